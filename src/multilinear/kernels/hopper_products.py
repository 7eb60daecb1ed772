"""Products over all tokens on Hopper, `du' x`, `grad' h` and `db' d`: gradients of the first Mu-Layer follow from them.

They are short of memory's speed, not of the processors', so one launch reads everything at once: some programs take the
first product, the others both of the rest. Each adds up what its tokens give and writes that as a line; the lines are
added up later, in the same order each time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from multilinear.kernels.hopper_names import load_tile
from multilinear.kernels.hopper_norm_back import add_up
from multilinear.kernels.hopper_parts import accumulator, release, slot_of, start_ring, zeros


@gluon.jit
def put_rows(desc, row, column, bar, ring, place, TILES: gl.constexpr):
    """Start copying rows, tile by tile; past the last one, as past the last column, there are zeros."""
    for k in gl.static_range(TILES):
        load_tile(desc, [row, column + 64 * k], bar, ring.index(place + k))


@gluon.jit
def produce(descs, ring, full, empty, blocks, split, C: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr):
    du_desc, x_desc, grad_desc, h_desc, db_desc, d_desc = descs
    P: gl.constexpr = C // 64
    item = 0
    program = gl.program_id(0)
    first = program < split
    block = program if first else program - split
    step = split if first else gl.num_programs(0) - split
    while block < blocks:
        slot, phase = slot_of(item, STAGES, False)
        bar, place, row = full.index(slot), slot * (3 * P + 1), TOKENS * block
        mbarrier.wait(empty.index(slot), phase ^ 1)
        if first:
            mbarrier.expect(bar, (2 * P + 1) * TOKENS * 128)
            put_rows(du_desc, row, 0, bar, ring, place, P + 1)
            put_rows(x_desc, row, 0, bar, ring, place + P + 1, P)
        else:
            mbarrier.expect(bar, (3 * P + 1) * TOKENS * 128)
            put_rows(grad_desc, row, 0, bar, ring, place, P)
            put_rows(h_desc, row, 0, bar, ring, place + P, P)
            put_rows(db_desc, row, 0, bar, ring, place + 2 * P, P)
            put_rows(d_desc, row, 0, bar, ring, place + 3 * P, 1)
        item += 1
        block += step


@gluon.jit
def multiply(
    which: gl.constexpr, ring, full, empty, block, step, blocks, FIRST: gl.constexpr, C: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Of the first product, or of the second, 64 rows; and of the low rank's rows, or of the third product, 64."""
    P: gl.constexpr = C // 64
    item = 0
    sums = ()
    for _k in gl.static_range(P + 1):
        sums = sums + (zeros(64),)
    while block < blocks:
        slot, phase = slot_of(item, STAGES, False)
        mbarrier.wait(full.index(slot), phase)
        place = slot * (3 * P + 1)
        new = ()
        for k in gl.static_range(P):
            new = new + (add_up(ring.index(place + which), ring.index(place + P + FIRST + k), sums[k]),)
        if FIRST:
            new = new + (add_up(ring.index(place + P), ring.index(place + P + 1 + which), sums[P]),)
        else:
            new = new + (add_up(ring.index(place + 2 * P + which), ring.index(place + 3 * P), sums[P]),)
        sums = warpgroup_mma_wait(0, deps=new)
        release(empty, slot, False)
        item += 1
        block += step
    return sums


@gluon.jit
def write(ptr, x, row, column, STRIDE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile of a (ROWS, COLUMNS) matrix."""
    i = row + gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(64)))[:, None]
    j = column + gl.arange(0, 64, layout=gl.SliceLayout(0, accumulator(64)))[None, :]
    gl.store(ptr + i * STRIDE + j, x, mask=(i < ROWS) & (j < COLUMNS))


@gluon.jit
def consume(
    which: gl.constexpr, ring, full, empty, first_ptr, rest_ptr, blocks, split, C: gl.constexpr, US: gl.constexpr,
    SD1: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    P: gl.constexpr = C // 64
    program = gl.program_id(0)
    if program < split:
        sums = multiply(which, ring, full, empty, program, split, blocks, True, C, STAGES)
        line = first_ptr + program * (US * C)
        for k in gl.static_range(P):
            write(line, sums[k], 64 * which, 64 * k, C, US, C)
        write(line, sums[P], C, 64 * which, C, US, C)
    else:
        program -= split
        sums = multiply(which, ring, full, empty, program, gl.num_programs(0) - split, blocks, False, C, STAGES)
        line = rest_ptr + program * (C * (C + SD1))
        for k in gl.static_range(P):
            write(line, sums[k], 64 * which, 64 * k, C, C, C)
        write(line + C * C, sums[P], 64 * which, 0, SD1, C, SD1)


@gluon.jit
def first_products(
    du_desc, x_desc, grad_desc, h_desc, db_desc, d_desc, first_ptr, rest_ptr, blocks, split,
    C: gl.constexpr, US: gl.constexpr, SD1: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """`du' x` by the first `split` programs, a line of all its entries from each; by the others `grad' h` and then
    `db' d`. A group of warps for 64 columns of each left side."""
    P: gl.constexpr = C // 64
    gl.static_assert(US <= C + 64 and SD1 <= 64)
    kind: gl.constexpr = x_desc.dtype
    ring = gl.allocate_shared_memory(kind, [STAGES * (3 * P + 1), TOKENS, 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, STAGES, P, False)
    fence_async_shared()
    descs = (du_desc, x_desc, grad_desc, h_desc, db_desc, d_desc)
    if P == 1:
        gl.warp_specialize([
            (consume, (0, ring, full, empty, first_ptr, rest_ptr, blocks, split, C, US, SD1, STAGES)),
            (produce, (descs, ring, full, empty, blocks, split, C, TOKENS, STAGES)),
        ], [1], [24])  # fmt: skip
    elif P == 2:
        gl.warp_specialize([
            (consume, (0, ring, full, empty, first_ptr, rest_ptr, blocks, split, C, US, SD1, STAGES)),
            (consume, (1, ring, full, empty, first_ptr, rest_ptr, blocks, split, C, US, SD1, STAGES)),
            (produce, (descs, ring, full, empty, blocks, split, C, TOKENS, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, ring, full, empty, first_ptr, rest_ptr, blocks, split, C, US, SD1, STAGES)),
            (consume, (1, ring, full, empty, first_ptr, rest_ptr, blocks, split, C, US, SD1, STAGES)),
            (consume, (2, ring, full, empty, first_ptr, rest_ptr, blocks, split, C, US, SD1, STAGES)),
            (produce, (descs, ring, full, empty, blocks, split, C, TOKENS, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
