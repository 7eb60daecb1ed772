"""Products over all tokens on Hopper that gradients of a second Mu-Layer with merged branches follow from.

With branches a and b and g, the gradient of their product, these are `(g b)' n`, `(g a)' n` and `(a b)' grad`, and
`(k n)' n` for two numbers k of each token. Left sides are made in registers, where products take them from, so none of
them is ever written. A program takes 64 hidden channels, or one of both numbers, and some of the tokens; what it adds
up is a line, and lines are added up later, in the same order each time. The product of n with itself is symmetric:
of its blocks of 64 x 64 only those from the diagonal on are there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from multilinear.kernels.hopper_names import load_tile, reinterpret
from multilinear.kernels.hopper_parts import (
    accumulator,
    operand,
    own_place,
    release,
    slot_of,
    start_ring,
    times_columns,
    zeros,
)
from multilinear.kernels.hopper_products import put_rows


@gluon.constexpr_function
def left_of(which, i):
    """Which two tiles of a stage, which begins with b, a and g, make up the left side of a group of warps."""
    return ((2, 0), (2, 1), (1, 0))[which][i]


@gluon.jit
def produce(
    descs, ring, extras, full, empty, blocks, splits, padded, C: gl.constexpr, R2: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Copy 32 tokens at a time: of the branches and of g a chunk, n with its extras, and the gradient; or only n and
    numbers, of which a row are those of 32 tokens."""
    branches_desc, inner_desc, n_desc, extra_desc, grad_desc, taken_desc = descs
    P: gl.constexpr = C // 64
    J: gl.constexpr = R2 // 64
    program = gl.program_id(0)
    hidden = program < J * splits
    j = program % J
    block = program // J if hidden else (program - J * splits) // 2
    step = splits if hidden else (gl.num_programs(0) - J * splits) // 2
    item = 0
    while block < blocks:
        slot, phase = slot_of(item, STAGES, False)
        bar, place, row = full.index(slot), slot * (2 * P + 3), 32 * block
        mbarrier.wait(empty.index(slot), phase ^ 1)
        if hidden:
            mbarrier.expect(bar, (2 * P + 3) * 4096 + 1024)
            put_rows(branches_desc, row, 128 * j, bar, ring, place, 2)
            put_rows(inner_desc, row, 64 * j, bar, ring, place + 2, 1)
            put_rows(grad_desc, row, 0, bar, ring, place + P + 3, P)
        else:
            mbarrier.expect(bar, (P + 1) * 4096 + 1024)
            put_rows(taken_desc, (program - J * splits) % 2 * padded + block, 0, bar, ring, place, 1)
        put_rows(n_desc, row, 0, bar, ring, place + 3, P)
        load_tile(extra_desc, [row, C], bar, extras.index(slot))
        item += 1
        block += step


@gluon.jit
def multiplied(x, y):
    """Products of numbers of 16 bits, two at a time, each rounded once."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], x.dtype, True, 2)
    else:
        return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], x.dtype, True, 2)


@gluon.jit
def transposed(ring, place):
    """A tile as the left side of a product, its columns as rows."""
    return ring.index(place).permute((1, 0)).load(operand())


@gluon.jit
def load_taken(tile):
    """The first row of a tile, which is not swizzled, as numbers of 32 bits."""
    rows = reinterpret(tile, gl.float32, [32, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return rows.index(0).load(gl.SliceLayout(0, operand()))


@gluon.jit
def left_side(which: gl.constexpr, ring, full, item, HIDDEN: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr):
    slot, phase = slot_of(item, STAGES, False)
    mbarrier.wait(full.index(slot), phase)
    place = slot * (2 * P + 3)
    if HIDDEN:
        return multiplied(transposed(ring, place + left_of(which, 0)), transposed(ring, place + left_of(which, 1)))
    else:
        n = transposed(ring, place + 3 + which)
        return (n.to(gl.float32) * load_taken(ring.index(place))[None, :]).to(n.dtype)


@gluon.jit
def add_up(
    which: gl.constexpr, ring, extras, full, empty, block, step, blocks,
    HIDDEN: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 rows of a product; the next left side is made while products of this one are on their way."""
    P: gl.constexpr = C // 64
    LAST: gl.constexpr = HIDDEN and which == 2  # the one with the gradient, which has no extras
    FROM: gl.constexpr = 0 if HIDDEN else which
    right: gl.constexpr = P + 3 if LAST else 3
    COUNT: gl.constexpr = P - FROM + (0 if LAST else 1)
    sums = ()
    for _k in gl.static_range(FROM, P):
        sums = sums + (zeros(64),)
    if not LAST:
        sums = sums + (zeros(16),)
    item = 0
    left = left_side(which, ring, full, item, HIDDEN, P, STAGES)
    while block < blocks:
        slot = item % STAGES
        block += step
        new = ()
        for k in gl.static_range(FROM, P):
            new = new + (times_columns(left, ring.index(slot * (2 * P + 3) + right + k), sums[k - FROM], False),)
        if not LAST:
            new = new + (times_columns(left, extras.index(slot), sums[P - FROM], False),)
        item += (block < blocks).to(gl.int32)  # at the end the last one again, which nobody needs
        ahead = left_side(which, ring, full, item, HIDDEN, P, STAGES)
        done = warpgroup_mma_wait(0, deps=new + (left,))
        sums = done[:COUNT]
        release(empty, slot, False)
        left = ahead
    return sums


@gluon.jit
def write(ptr, x, i, WIDTH: gl.constexpr, STRIDE: gl.constexpr, COLUMN: gl.constexpr):
    """To rows i, from a column on."""
    i = gl.convert_layout(i, gl.SliceLayout(1, accumulator(WIDTH)))[:, None]
    j = COLUMN + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, accumulator(WIDTH)))[None, :]
    gl.store(ptr + i * STRIDE + j, x)


@gluon.jit
def write_hidden(which: gl.constexpr, line, sums, j, C: gl.constexpr, R2: gl.constexpr):
    """What belongs to 64 hidden channels: rows of both branches stand in turns of 32, columns of the rest behind."""
    r = own_place(gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(64))))
    if which < 2:
        i = 128 * j + r // 32 * 64 + 32 * which + r % 32
        for k in gl.static_range(C // 64):
            write(line, sums[k], i, 64, C + 16, 64 * k)
        write(line, sums[C // 64], i, 16, C + 16, C)
    else:
        line += 2 * R2 * (C + 16) + 64 * j
        column = gl.arange(0, 64, layout=gl.SliceLayout(0, accumulator(64)))[None, :]
        for k in gl.static_range(C // 64):
            gl.store(line + (64 * k + column) * R2 + r[:, None], sums[k])


@gluon.jit
def write_own(which: gl.constexpr, line, sums, C: gl.constexpr):
    """64 rows of a product of n with itself, from the diagonal on."""
    i = 64 * which + gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(64)))
    for k in gl.static_range(which, C // 64):
        write(line, sums[k - which], i, 64, C + 16, 64 * k)
    write(line, sums[C // 64 - which], i, 16, C + 16, C)


@gluon.jit
def consume(
    which: gl.constexpr, ring, extras, full, empty, hidden_ptr, norms_ptr, blocks, splits,
    C: gl.constexpr, R2: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    J: gl.constexpr = R2 // 64
    program = gl.program_id(0)
    if program < J * splits:
        split = program // J
        hidden = add_up(which, ring, extras, full, empty, split, splits, blocks, True, C, STAGES)
        line = hidden_ptr + split * (2 * R2 * (C + 16) + C * R2)
        write_hidden(which, line, hidden, program % J, C, R2)
    else:
        program -= J * splits
        step = (gl.num_programs(0) - J * splits) // 2
        own = add_up(which, ring, extras, full, empty, program // 2, step, blocks, False, C, STAGES)
        write_own(which, norms_ptr + program * (C * (C + 16)), own, C)


@gluon.jit
def second_products(
    branches_desc, inner_desc, n_desc, extra_desc, grad_desc, taken_desc, hidden_ptr, norms_ptr, blocks, splits, padded,
    C: gl.constexpr, R2: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Lines of `splits` shares of the tokens: products with n of both branches' gradients, 32 rows of each in turns,
    and that of the output's gradient with the branches' product; from the other programs such of n with itself."""
    P: gl.constexpr = C // 64
    gl.static_assert(P == 3)  # as many groups of warps
    kind: gl.constexpr = n_desc.dtype
    ring = gl.allocate_shared_memory(kind, [STAGES * (2 * P + 3), 32, 64], n_desc.layout)
    extras = gl.allocate_shared_memory(kind, [STAGES, 32, 16], extra_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, STAGES, P, False)
    fence_async_shared()
    descs = (branches_desc, inner_desc, n_desc, extra_desc, grad_desc, taken_desc)
    gl.warp_specialize([
        (consume, (0, ring, extras, full, empty, hidden_ptr, norms_ptr, blocks, splits, C, R2, STAGES)),
        (consume, (1, ring, extras, full, empty, hidden_ptr, norms_ptr, blocks, splits, C, R2, STAGES)),
        (consume, (2, ring, extras, full, empty, hidden_ptr, norms_ptr, blocks, splits, C, R2, STAGES)),
        (produce, (descs, ring, extras, full, empty, blocks, splits, padded, C, R2, STAGES)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
