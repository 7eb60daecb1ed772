"""The way back through lift and norm on Hopper for images of 8x8 tokens, which are one tile: as in `hopper_lift_back`,
but du has come back through the shift already.

Copies bring two pieces of it to spare tiles and the rest to where x will come, and next to it goes what it is summed up
with. While it is multiplied, the gradient is on its way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_lift_back import (
    load_norms,
    load_weights,
    norm_columns,
    spread,
    store_sums,
    to_input,
    to_norm,
)
from multilinear.kernels.hopper_names import load_tile, meet, reinterpret, store_tile
from multilinear.kernels.hopper_norm_back import add_up, columns_of
from multilinear.kernels.hopper_parts import fetch, keep_vectors, nothing, row_zeros, zeros


@gluon.jit
def fetch_pieces(du_desc, row, bar, tiles, place, FROM: gl.constexpr, TO: gl.constexpr):
    """Start copying these pieces of du, the last of which holds the low rank and zeros."""
    mbarrier.expect(bar, (TO - FROM) * 64 * 128)
    for i in gl.static_range(FROM, TO):
        load_tile(du_desc, [row, 64 * i], bar, tiles.index(place + i - FROM))


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, bars, pointers, rows,
    C: gl.constexpr, L1: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    x_desc, grad_desc, out_desc, du_desc = descs
    tiles_x, tiles_g, spare, weights, weights_low, selects, vectors = buffers
    full_x, full_g = bars[1].index(which), bars[2].index(which)
    full_first, full_rest = bars[3].index(which), bars[4].index(which)
    keep_ptr, norms_ptr, sums_ptr = pointers
    P: gl.constexpr = C // 64
    kind: gl.constexpr = x_desc.dtype
    select = selects.index(which if DROP else 0)
    sums = ()
    for k in gl.static_range(P + 1):
        sums = sums + (zeros(16),)
    turn = 0
    row = (gl.program_id(0) * GROUPS + which) * 64
    fetch_pieces(du_desc, row, full_first, spare, which * 2, 0, 2)
    fetch_pieces(du_desc, row, full_rest, tiles_x, which * P, 2, P + 1)
    mean, scale, keep = load_norms(norms_ptr, keep_ptr, row, rows, 64, DROP)
    mbarrier.wait(bars[0], 0)
    while row - which * 64 < rows:
        ahead = row + gl.num_programs(0) * GROUPS * 64
        phase = turn & 1
        none = nothing(row)
        place = which * P + none
        free = which * 2 + none
        tma.store_wait(0)
        meet()  # what was written from the tile before is gone
        fetch(grad_desc, row, full_g, tiles_g, place, C)
        norm_tile = reinterpret(tiles_x.index(place + P - 1), kind, [4, 64, 16], selects.layout).index(0)
        norm_tile.store(norm_columns(mean, scale, kind))
        fence_async_shared()
        meet()
        dns = ()
        for k in gl.static_range(P):
            dns = dns + (zeros(64),)
        mbarrier.wait(full_first, phase)
        for i in gl.static_range(2):
            dns = spread(spare.index(free + i), weights, none + i * P, dns, P, i == 0)
        mbarrier.wait(full_rest, phase)
        for i in gl.static_range(2, P):
            dns = spread(tiles_x.index(place + i - 2), weights, none + i * P, dns, P, False)
        for j in gl.static_range((L1 + 15) // 16):
            low = tiles_x.index(place + P - 2).slice(16 * j, 16, 1)
            dns = spread(low, weights_low, none + j * P, dns, P, False)
        new = ()
        for i in gl.static_range(P + 1):
            tile = spare.index(free + i) if i < 2 else tiles_x.index(place + i - 2)
            new = new + (add_up(tile, norm_tile, sums[i]),)
        done = warpgroup_mma_wait(0, deps=dns + new)
        dns, sums = done[:P], done[P:]
        meet()  # du has been multiplied
        fetch(x_desc, row, full_x, tiles_x, place, C)
        fetch_pieces(du_desc, ahead, full_first, spare, free, 0, 2)
        if DROP:  # the sums that read the one before are over
            select.store(columns_of(row_zeros(), row_zeros(), keep, kind))
            fence_async_shared()
            meet()
        mbarrier.wait(full_x, phase)
        level, follow = to_norm(tiles_x, place, dns, mean, scale, vectors, C)
        mbarrier.wait(full_g, phase)
        new = to_input(tiles_x, tiles_g, place, select, dns, sums, mean, level, follow, vectors, C, kind)
        sums = new + (sums[P],)
        fetch_pieces(du_desc, ahead, full_rest, tiles_x, place, 2, P + 1)
        for k in gl.static_range(P):
            store_tile(out_desc, [row, 64 * k], tiles_g.index(place + k))
        # not before: a fence waits for all that is on its way to registers
        mean, scale, keep = load_norms(norms_ptr, keep_ptr, ahead, rows, 64, DROP)
        turn += 1
        row = ahead
    store_sums(sums_ptr, which, sums, C, L1, STRIDE, GROUPS)
    mbarrier.wait(full_first, turn & 1)
    mbarrier.wait(full_rest, turn & 1)
    tma.store_wait(0)


@gluon.jit
def image_back(
    x_desc, grad_desc, out_desc, du_desc, w_desc, w_low_desc, keep_ptr, norms_ptr, vectors_ptr, sums_ptr, rows,
    C: gl.constexpr, L1: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr, DROP: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradient of x. A line for each group of each program with sums, as `lift_back` leaves them."""
    P: gl.constexpr = C // 64
    LOWS: gl.constexpr = (L1 + 15) // 16
    gl.static_assert(LOWS <= 4)  # they share a tile
    gl.static_assert(P >= 2)
    gl.static_assert(GROUPS == 2)
    kind: gl.constexpr = x_desc.dtype
    column: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    tiles_x = gl.allocate_shared_memory(kind, [GROUPS * P, 64, 64], x_desc.layout)
    tiles_g = gl.allocate_shared_memory(kind, [GROUPS * P, 64, 64], grad_desc.layout)
    spare = gl.allocate_shared_memory(kind, [GROUPS * 2, 64, 64], du_desc.layout)
    weights = gl.allocate_shared_memory(kind, [P * P, 64, 64], w_desc.layout)
    weights_low = gl.allocate_shared_memory(kind, [LOWS * P, 16, 64], w_low_desc.layout)
    selects = gl.allocate_shared_memory(kind, [GROUPS if DROP else 1, 64, 16], column)
    full_w = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    full_g = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    full_first = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    full_rest = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_w, count=1)
    for i in gl.static_range(GROUPS):
        mbarrier.init(full_x.index(i), count=1)
        mbarrier.init(full_g.index(i), count=1)
        mbarrier.init(full_first.index(i), count=1)
        mbarrier.init(full_rest.index(i), count=1)
    if not DROP:
        selects.index(0).store(columns_of(row_zeros(), row_zeros(), row_zeros() + 1.0, kind))
    vectors = keep_vectors(vectors_ptr, C, 64, P)
    fence_async_shared()
    meet()
    load_weights(w_desc, w_low_desc, full_w, weights, weights_low, C, LOWS)
    descs = (x_desc, grad_desc, out_desc, du_desc)
    buffers = (tiles_x, tiles_g, spare, weights, weights_low, selects, vectors)
    bars = (full_w, full_x, full_g, full_first, full_rest)
    pointers = (keep_ptr, norms_ptr, sums_ptr)
    gl.warp_specialize([
        (consume, (0, descs, buffers, bars, pointers, rows, C, L1, STRIDE, GROUPS, DROP)),
        (consume, (1, descs, buffers, bars, pointers, rows, C, L1, STRIDE, GROUPS, DROP)),
    ], [4], [REGISTERS])  # fmt: skip
