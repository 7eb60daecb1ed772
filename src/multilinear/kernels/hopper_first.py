"""The whole first Mu-Layer on Hopper, for inference on grids of 8 x 8 tokens: `block_forward.lift` and
`block_forward.mu1` where tokens at the border stay.

Such a grid is the tile of one group of four warps, so that the shift stays in it: u never leaves the processor. A
thread holds tokens of two lines, at one place of each. So what comes from the left or right is in another thread of the
warp, and what comes from above or below is read from shared memory, a line of tokens further.

Each processor runs one program for good. What u is lifted with is copied again for each tile, by a warp of its own, and
both groups share it; the other weights are kept. x stays until it is added to; u is where the last tile's x was, and
the next one's comes there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_mu2 import add_output, finished
from multilinear.kernels.hopper_parts import (
    accumulator,
    across,
    fetch,
    normed,
    operand,
    release,
    row_norm,
    row_zeros,
    slot_of,
    times,
    zeros,
)
from multilinear.kernels.hopper_unshift import nothing


@gluon.jit
def place_of(piece):
    """Which of a group's three tiles a shifted piece of u is in: u itself is in the middle one ahead of its shift, as
    lines above and below are read with it, and the last piece has no part that needs that."""
    return (3 - piece) % 3


@gluon.jit
def from_line(tiles, place, far: gl.constexpr):
    """A tile, and the tile of as many tokens that starts a line above or below."""
    lines = tiles._reinterpret(tiles.dtype, [tiles.shape[0] * 8, 8, 64], tiles.layout)
    return lines.index(place * 8 + far)._reinterpret(tiles.dtype, [64, 64], tiles.layout)


@gluon.jit
def from_left(x):
    """Each token's numbers are those of the token to its left, or stay if there is none: four threads hold a token, and
    where the shuffle would go beyond the first or last thread it takes the thread's own."""
    return gl.inline_asm_elementwise("shfl.sync.up.b32 $0, $1, 4, 0, 0xffffffff;", "=r,r", [x], x.dtype, True, 2)


@gluon.jit
def from_right(x):
    return gl.inline_asm_elementwise("shfl.sync.down.b32 $0, $1, 4, 31, 0xffffffff;", "=r,r", [x], x.dtype, True, 2)


@gluon.jit
def shifted(x, tiles, place, first: gl.constexpr, R: gl.constexpr):
    """64 of R channels of u, from `first` on, after the shift; with quarters from above or below by way of a tile that
    has others on both sides. What is read beyond it is not used."""
    layout: gl.constexpr = accumulator(64)
    quarter: gl.constexpr = R // 4
    j = (first + gl.arange(0, 64, layout=gl.SliceLayout(0, layout)))[None, :]
    token = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    out = x
    if first < 2 * quarter:
        tiles.index(place).store(x)
        gl.thread_barrier()
        if first < quarter:
            out = gl.where((j < quarter) & (token >= 8), from_line(tiles, place, -1).load(layout), out)
        lower = (j >= quarter) & (j < 2 * quarter)
        out = gl.where(lower & (token < 56), from_line(tiles, place, 1).load(layout), out)
    if first + 64 > 2 * quarter:
        out = gl.where((j >= 2 * quarter) & (j < 3 * quarter), from_left(x), out)
    if first + 64 > 3 * quarter:
        out = gl.where(j >= 3 * quarter, from_right(x), out)
    return out


@gluon.jit
def lifted(ns, weights, bars, item, LAST: gl.constexpr, SLOTS: gl.constexpr):
    """64 channels of u, ahead of their bias; each tile of weights is free again once it is multiplied."""
    full, empty = bars[0], bars[1]
    P: gl.constexpr = len(ns)
    part = zeros(64)
    for k in gl.static_range(P):
        slot, phase = slot_of(item + k, SLOTS, False)
        mbarrier.wait(full.index(slot), phase)
        part = times(ns[k], weights.index(slot), part, k == 0)
        if k > 0:
            part = warpgroup_mma_wait(1, deps=[part])
            release(empty, (item + k - 1) % SLOTS, False)
    if LAST:
        part = warpgroup_mma_wait(0, deps=(part,) + ns)[0]
    else:
        part = warpgroup_mma_wait(0, deps=[part])
    release(empty, (item + P - 1) % SLOTS, False)
    return part


@gluon.jit
def joined(tiles, base, q, mean, scale_a, scale_b, b_ptr, i, C: gl.constexpr, kind: gl.constexpr):
    """The product of both branches' norms, 64 channels of it."""
    q = (q + across(b_ptr, 64 * i, 64, C)) * scale_b[:, None]
    q = q * across(b_ptr + 3 * C, 64 * i, 64, C) + across(b_ptr + 4 * C, 64 * i, 64, C)
    a = tiles.index(base + place_of(i)).load(accumulator(64)).to(gl.float32)
    a = (a - mean[:, None]) * scale_a[:, None]
    a = a * across(b_ptr + C, 64 * i, 64, C) + across(b_ptr + 2 * C, 64 * i, 64, C)
    return (a * q).to(kind)


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, bars, vectors_ptr, groups, eps,
    C: gl.constexpr, L1: gl.constexpr, MU1: gl.constexpr, BIAS: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    x_desc, out_desc = descs[0], descs[1]
    tiles, weights, weights_b, weights_c = buffers
    full_w, full_x = bars[2], bars[3]
    P: gl.constexpr = C // 64
    kind: gl.constexpr = x_desc.dtype
    b_ptr = vectors_ptr + MU1
    bias_ptr = vectors_ptr + 2 * C
    lift_ptr = vectors_ptr + BIAS
    turn = 0
    item = 0
    group = gl.program_id(0)
    fetch(x_desc, (group * GROUPS + which) * 64, full_x.index(which * 2), tiles, which * 2 * P, C)
    while group < groups:
        row = (group * GROUPS + which) * 64
        ahead = row + gl.num_programs(0) * GROUPS * 64
        none = nothing(row)  # else all places of weights stay in registers
        mine = which * 2 + turn % 2
        other = which * 2 + (turn + 1) % 2
        place, base = mine * P, other * P
        mbarrier.wait(full_x.index(mine), (turn // 2) & 1)
        mean, scale = row_norm(tiles, place, eps, C)
        ns = ()
        for k in gl.static_range(P):
            ns = ns + (gl.convert_layout(normed(tiles, place, mean, scale, vectors_ptr, k, C, kind), operand()),)
        tma.store_wait(0)
        gl.thread_barrier()  # the last tile has left
        # u, first the low rank of the second branch, and the first branch's norm
        low = lifted(ns, weights, bars, item, False, SLOTS) + across(lift_ptr + C, 0, 64, L1)
        d = gl.convert_layout(shifted(low.to(kind), tiles, base + 1, 0, L1), operand())
        total = row_zeros()
        for i in gl.static_range(P):
            u = lifted(ns, weights, bars, item + (i + 1) * P, i == P - 1, SLOTS) + across(lift_ptr, 64 * i, 64, C)
            a = shifted(u.to(kind), tiles, base + 1, 64 * i, C)
            tiles.index(base + place_of(i)).store(a)
            total += gl.sum(a.to(gl.float32), 1)
        item += (P + 1) * P
        mean = total / C
        # the second branch ahead of its norm, whose mean is zero, comes meanwhile
        mbarrier.wait(full_w, 0)
        qs = ()
        for k in gl.static_range(P):
            qs = qs + (times(d, weights_b.index(none + k), zeros(64), True),)
        total = row_zeros()
        for k in gl.static_range(P):
            a = tiles.index(base + k).load(accumulator(64)).to(gl.float32) - mean[:, None]
            total += gl.sum(a * a, 1)
        scale_a = gl.rsqrt(total / C + eps)
        qs = warpgroup_mma_wait(0, deps=qs)
        total = row_zeros()
        for k in gl.static_range(P):
            q = qs[k] + across(b_ptr, 64 * k, 64, C)
            total += gl.sum(q * q, 1)
        scale_b = gl.rsqrt(total / C + eps)
        # products of both branches; while one piece goes on to the output the next comes
        ys = ()
        for k in gl.static_range(P):
            ys = ys + (zeros(64),)
        q = warpgroup_mma_wait(0, deps=[times(d, weights_b.index(none), zeros(64), True)])
        h = gl.convert_layout(joined(tiles, base, q, mean, scale_a, scale_b, b_ptr, 0, C, kind), operand())
        for i in range(1, P):
            q = times(d, weights_b.index(none + i), zeros(64), True)
            ys = add_output(ys, h, weights_c, none + i - 1, P)
            q = warpgroup_mma_wait(P, deps=[q])
            product = joined(tiles, base, q, mean, scale_a, scale_b, b_ptr, i, C, kind)
            ys = finished(ys, h, P)
            h = gl.convert_layout(product, operand())
        fence_async_shared()
        gl.thread_barrier()
        fetch(x_desc, ahead, full_x.index(other), tiles, base, C)  # where u was
        ys = finished(add_output(ys, h, weights_c, none + P - 1, P), h, P)
        for k in gl.static_range(P):
            tile = tiles.index(place + k)
            y = ys[k] + across(bias_ptr, 64 * k, 64, C)
            tile.store((tile.load(accumulator(64)).to(gl.float32) + y).to(kind))
        fence_async_shared()
        gl.thread_barrier()
        for k in gl.static_range(P):
            tma.async_copy_shared_to_global(out_desc, [row, 64 * k], tiles.index(place + k))
        turn += 1
        group += gl.num_programs(0)
    mbarrier.wait(full_x.index(which * 2 + turn % 2), (turn // 2) & 1)
    tma.store_wait(0)


@gluon.jit
def produce(descs, buffers, bars, groups, C: gl.constexpr, SLOTS: gl.constexpr):
    """Copy what u is lifted with in the order in which it is read: the rows for the low rank, then the others. The
    weights that are kept come in between, a tile at a time, as the first tokens need them only after that."""
    w_desc, b_desc, c_desc = descs[2], descs[3], descs[4]
    weights, weights_b, weights_c = buffers[1], buffers[2], buffers[3]
    full, empty, full_w = bars[0], bars[1], bars[2]
    P: gl.constexpr = C // 64
    item = 0
    group = gl.program_id(0)
    mbarrier.expect(full_w, (64 + C) * C * 2)
    while group < groups:
        for i in range(P + 1):
            for k in range(P):
                slot, phase = slot_of(item, SLOTS, False)
                mbarrier.wait(empty.index(slot), phase ^ 1)
                mbarrier.expect(full.index(slot), 64 * 64 * 2)
                tma.async_copy_global_to_shared(
                    w_desc, [(i + P) % (P + 1) * 64, 64 * k], full.index(slot), weights.index(slot)
                )
                if item < P:
                    tma.async_copy_global_to_shared(b_desc, [64 * k, 0], full_w, weights_b.index(k))
                elif item < (P + 1) * P:
                    tma.async_copy_global_to_shared(c_desc, [64 * k, 64 * (i - 1)], full_w, weights_c.index(item - P))
                item += 1
        group += gl.num_programs(0)


@gluon.jit
def first(
    x_desc, out_desc, w_desc, b_desc, c_desc, vectors_ptr, groups, eps,
    C: gl.constexpr, L1: gl.constexpr, MU1: gl.constexpr, BIAS: gl.constexpr, GROUPS: gl.constexpr,
    SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """x plus the first Mu-Layer of norm(x)."""
    P: gl.constexpr = C // 64
    kind: gl.constexpr = x_desc.dtype
    gl.static_assert(P == 3)  # pieces of u take turns in three tiles
    gl.static_assert(GROUPS == 2)
    tiles = gl.allocate_shared_memory(kind, [GROUPS * 2 * P, 64, 64], x_desc.layout)
    weights = gl.allocate_shared_memory(kind, [SLOTS, 64, 64], w_desc.layout)
    weights_b = gl.allocate_shared_memory(kind, [P, 64, 64], b_desc.layout)
    weights_c = gl.allocate_shared_memory(kind, [P * P, 64, 64], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_w = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS * 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    for i in gl.static_range(GROUPS * 2):
        mbarrier.init(full_x.index(i), count=1)
    mbarrier.init(full_w, count=1)
    fence_async_shared()
    descs = (x_desc, out_desc, w_desc, b_desc, c_desc)
    buffers = (tiles, weights, weights_b, weights_c)
    bars = (full, empty, full_w, full_x)
    gl.warp_specialize([
        (consume, (0, descs, buffers, bars, vectors_ptr, groups, eps, C, L1, MU1, BIAS, GROUPS, SLOTS)),
        (consume, (1, descs, buffers, bars, vectors_ptr, groups, eps, C, L1, MU1, BIAS, GROUPS, SLOTS)),
        (produce, (descs, buffers, bars, groups, C, SLOTS)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
