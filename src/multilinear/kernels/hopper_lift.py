"""The step ahead of the shift on Hopper: the same as `block_forward.lift`.

Each processor runs its programs for good and keeps the weights. Groups of four warps take 64 tokens each, and the next
tile is on its way meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_names import load_tile, meet, reinterpret, store_tile
from multilinear.kernels.hopper_parts import (
    across,
    fetch,
    keep_vectors,
    kept,
    normed,
    operand,
    row_norm,
    rows_layout,
    times,
    zeros,
)


@gluon.constexpr_function
def room(channels):
    """Whether there is some for the bias, and for a tile of the low rank."""
    return channels < 256


@gluon.jit
def load_bias(bias, i, C: gl.constexpr):
    if room(C):
        return kept(bias, i, 64)
    else:
        return across(bias, 64 * i, 64, C)


@gluon.jit
def consume(
    which: gl.constexpr, x_desc, u_desc, low_out_desc, buffers, bars, norms_ptr, low_bias_ptr, groups, rows, eps,
    C: gl.constexpr, L1: gl.constexpr, LOW: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr,
    TRAIN: gl.constexpr,
):  # fmt: skip
    tiles_x, tiles_u, tiles_low, weights, weights_low, vectors, bias = buffers
    full_w, full_x = bars
    P: gl.constexpr = C // 64
    kind: gl.constexpr = x_desc.dtype
    out = tiles_u.index(which)
    turn = 0
    group = gl.program_id(0)
    fetch(x_desc, (group * GROUPS + which) * 64, full_x.index(which * TILES), tiles_x, which * TILES * P, C)
    mbarrier.wait(full_w, 0)
    while group < groups:
        row = (group * GROUPS + which) * 64
        ahead = row + gl.num_programs(0) * GROUPS * 64
        mine = which * TILES + turn % TILES
        other = which * TILES + (turn + 1) % TILES
        mbarrier.wait(full_x.index(mine), (turn // TILES) & 1)
        if TILES == 2:
            meet()  # all are done with the other tile
            fetch(x_desc, ahead, full_x.index(other), tiles_x, other * P, C)
        mean, scale = row_norm(tiles_x, mine * P, eps, C)
        ns = ()
        for k in gl.static_range(P):
            ns = ns + (gl.convert_layout(normed(tiles_x, mine * P, mean, scale, vectors, k, C, kind), operand()),)
        if TILES == 1:
            meet()  # all have read it
            fetch(x_desc, ahead, full_x.index(other), tiles_x, other * P, C)
        for i in range(P):
            part = zeros(64)
            for k in gl.static_range(P):
                part = times(ns[k], weights.index(i * P + k), part, k == 0)
            part = warpgroup_mma_wait(0, deps=[part])
            tma.store_wait(0)
            out.store((part + load_bias(bias, i, C)).to(kind))
            fence_async_shared()
            store_tile(u_desc, [row, 64 * i], out)
        part = zeros(LOW)
        for k in gl.static_range(P):
            part = times(ns[k], weights_low.index(k), part, k == 0)
        done = warpgroup_mma_wait(0, deps=(part,) + ns)
        if room(C):
            low = tiles_low.index(which)
        else:
            tma.store_wait(0)
            low = reinterpret(out, kind, [64, LOW], low_out_desc.layout)
        low.store((done[0] + across(low_bias_ptr, 0, LOW, L1)).to(kind))
        fence_async_shared()
        store_tile(low_out_desc, [row, C], low)  # past the last column it is cut off
        if TRAIN:  # a fence would wait for it
            index = row + gl.arange(0, 64, layout=rows_layout())
            gl.store(norms_ptr + index, mean, mask=index < rows)
            gl.store(norms_ptr + rows + index, scale, mask=index < rows)
        turn += 1
        group += gl.num_programs(0)
    mbarrier.wait(full_x.index(which * TILES + turn % TILES), (turn // TILES) & 1)
    tma.store_wait(0)


@gluon.jit
def lift(
    x_desc, u_desc, low_out_desc, w_desc, low_desc, norms_ptr, vectors_ptr, groups, rows, eps,
    C: gl.constexpr, L1: gl.constexpr, LOW: gl.constexpr, BIAS: gl.constexpr, GROUPS: gl.constexpr,
    TILES: gl.constexpr, TRAIN: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """u = [A1 | D1] norm(x) + bias; in training also the mean of each row of x and what makes its variance 1."""
    P: gl.constexpr = C // 64
    kind: gl.constexpr = x_desc.dtype
    tiles_x = gl.allocate_shared_memory(kind, [GROUPS * TILES * P, 64, 64], x_desc.layout)
    tiles_u = gl.allocate_shared_memory(kind, [GROUPS, 64, 64], u_desc.layout)
    tiles_low = gl.allocate_shared_memory(kind, [GROUPS if room(C) else 1, 64, LOW], low_out_desc.layout)
    weights = gl.allocate_shared_memory(kind, [P * P, 64, 64], w_desc.layout)
    weights_low = gl.allocate_shared_memory(kind, [P, LOW, 64], low_desc.layout)
    full_w = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS * TILES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_w, count=1)
    for i in gl.static_range(GROUPS * TILES):
        mbarrier.init(full_x.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(full_w, (C + LOW) * C * 2)
    for k in gl.static_range(P):
        for i in gl.static_range(P):
            load_tile(w_desc, [64 * i, 64 * k], full_w, weights.index(i * P + k))
        load_tile(low_desc, [C, 64 * k], full_w, weights_low.index(k))
    vectors = keep_vectors(vectors_ptr, 2 * C, 64, 2 * P)
    if room(C):
        bias = keep_vectors(vectors_ptr + BIAS, C, 64, P)
    else:
        bias = vectors_ptr + BIAS
    meet()
    buffers = (tiles_x, tiles_u, tiles_low, weights, weights_low, vectors, bias)
    bars = (full_w, full_x)
    low_bias_ptr = vectors_ptr + BIAS + C
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, x_desc, u_desc, low_out_desc, buffers, bars, norms_ptr, low_bias_ptr, groups, rows, eps, C,
                       L1, LOW, GROUPS, TILES, TRAIN)),
            (consume, (1, x_desc, u_desc, low_out_desc, buffers, bars, norms_ptr, low_bias_ptr, groups, rows, eps, C,
                       L1, LOW, GROUPS, TILES, TRAIN)),
        ], [4], [REGISTERS])  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize([
            (consume, (0, x_desc, u_desc, low_out_desc, buffers, bars, norms_ptr, low_bias_ptr, groups, rows, eps, C,
                       L1, LOW, GROUPS, TILES, TRAIN)),
            (consume, (1, x_desc, u_desc, low_out_desc, buffers, bars, norms_ptr, low_bias_ptr, groups, rows, eps, C,
                       L1, LOW, GROUPS, TILES, TRAIN)),
            (consume, (2, x_desc, u_desc, low_out_desc, buffers, bars, norms_ptr, low_bias_ptr, groups, rows, eps, C,
                       L1, LOW, GROUPS, TILES, TRAIN)),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, x_desc, u_desc, low_out_desc, buffers, bars, norms_ptr, low_bias_ptr, groups, rows, eps, C,
                       L1, LOW, GROUPS, TILES, TRAIN)),
            (consume, (1, x_desc, u_desc, low_out_desc, buffers, bars, norms_ptr, low_bias_ptr, groups, rows, eps, C,
                       L1, LOW, GROUPS, TILES, TRAIN)),
            (consume, (2, x_desc, u_desc, low_out_desc, buffers, bars, norms_ptr, low_bias_ptr, groups, rows, eps, C,
                       L1, LOW, GROUPS, TILES, TRAIN)),
            (consume, (3, x_desc, u_desc, low_out_desc, buffers, bars, norms_ptr, low_bias_ptr, groups, rows, eps, C,
                       L1, LOW, GROUPS, TILES, TRAIN)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
