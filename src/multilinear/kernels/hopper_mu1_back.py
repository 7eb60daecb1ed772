"""The way back through the first Mu-Layer down to u, on Hopper: the same as `block_backward.mu1_back` where tokens at
the border stay.

As on the way forward each processor runs its programs for good and keeps the weights, and groups of four warps take 64
tokens each. The norms need sums over whole rows, so a first pass over the hidden width takes those, writes h and adds
up the gradients of the norms' parameters; a second computes the branches again, which costs less than to keep them,
and goes on to E and db. Where one chunk is the whole width, there is nothing to compute again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from multilinear.kernels.hopper_mu1 import fetch_shifted, load_low
from multilinear.kernels.hopper_names import load_tile, meet, store_tile
from multilinear.kernels.hopper_parts import (
    accumulator,
    across,
    along,
    fetch,
    operand,
    row_zeros,
    rows_layout,
    store_columns,
    sum_rows,
    times,
    times_columns,
    zeros,
)


@gluon.constexpr_function
def summing(width):
    """How a warp holds eight rows to add them up: all in one thread, which has one column, or two of 64."""
    if width == 64:
        return gl.DistributedLinearLayout(
            [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 0, 1]],
            [[0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
            [[1, 0, 0], [2, 0, 0]], [], [4, 8, 64],
        )  # fmt: skip
    else:
        return gl.DistributedLinearLayout(
            [[0, 1, 0], [0, 2, 0], [0, 4, 0]],
            [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
            [[1, 0, 0], [2, 0, 0]], [], [4, 8, 32],
        )  # fmt: skip


@gluon.jit
def column_sums(x, J: gl.constexpr):
    """Sums over the rows of each warp. To exchange ahead of them takes far less than an exchange for each."""
    x = gl.sum(x.reshape([4, 2, 8, J]), 1)
    return gl.sum(gl.convert_layout(x, summing(J)), 1)


@gluon.jit
def load_stats(stats_ptr, keep_ptr, row, rows, tokens, DROP: gl.constexpr):
    """The mean of the first branch, both scales, and what became of the layer; zeros past the last row."""
    index = row + gl.arange(0, 64, layout=rows_layout())
    live = index < rows
    mean = gl.load(stats_ptr + index * 3, mask=live, other=0.0)
    scale_a = gl.load(stats_ptr + index * 3 + 1, mask=live, other=0.0)
    scale_b = gl.load(stats_ptr + index * 3 + 2, mask=live, other=0.0)
    keep = row_zeros() + 1.0
    if DROP:
        keep = gl.load(keep_ptr + index // tokens, mask=live, other=0.0)
    return mean, scale_a, scale_b, keep


@gluon.jit
def store_factor(d_ptr, row, rows, low, L1: gl.constexpr, K1: gl.constexpr, SD1: gl.constexpr):
    """The low rank next to a column of ones, and zeros up to where rows end."""
    j = gl.arange(0, K1, layout=gl.SliceLayout(0, accumulator(K1)))[None, :]
    store_columns(d_ptr, row, rows, 0, gl.where(j == L1, 1.0, low.to(gl.float32)).to(low.dtype), K1, SD1, SD1)
    if K1 == L1:
        j = gl.arange(0, 16, layout=gl.SliceLayout(0, accumulator(16)))[None, :]
        ones = gl.where(j == 0, 1.0, zeros(16)).to(low.dtype)
        store_columns(d_ptr, row, rows, L1, ones, 16, SD1, SD1)


@gluon.jit
def branches(tiles_g, tiles_a, weights, turn, d, stats, i, b_ptr, C: gl.constexpr, J: gl.constexpr):
    """A chunk of both normed branches, and of the gradient of their product."""
    weights_b, weights_c = weights
    mean, scale_a, scale_b, keep = stats
    P: gl.constexpr = C // 64
    dh = zeros(J)
    for k in gl.static_range(P):
        dh = times_columns(tiles_g.index(turn * P + k), weights_c.index(i * P + k), dh, k == 0)
    b = times(d, weights_b.index(i), zeros(J), True)
    done = warpgroup_mma_wait(0, deps=(dh, b, d))
    a = tiles_a.index(turn * (C // J) + i).load(accumulator(J)).to(gl.float32)
    a = a * along(scale_a, J) - along(mean * scale_a, J)
    b = (done[1] + across(b_ptr, J * i, J, C)) * along(scale_b, J)
    return a, b, done[0] * along(keep, J)


@gluon.jit
def affine(x, ptr, i, C: gl.constexpr, J: gl.constexpr):
    """A branch with its norm's weight and bias."""
    return x * across(ptr, J * i, J, C) + across(ptr + C, J * i, J, C)


@gluon.jit
def first_pass(h_desc, tile_h, row, i, a, b, dh, keep, b_ptr, C: gl.constexpr, J: gl.constexpr):
    """Write a chunk of h. Gradients of the normed branches; sums for those of their norms' weights and biases."""
    p = affine(a, b_ptr + C, i, C, J)
    q = affine(b, b_ptr + 3 * C, i, C, J)
    tma.store_wait(0)
    meet()  # the tile is free
    tile_h.store((p * q * along(keep, J)).to(h_desc.dtype))
    fence_async_shared()
    meet()
    store_tile(h_desc, [row, J * i], tile_h)
    dp, dq = dh * q, dh * p
    parts = (column_sums(dp * a, J), column_sums(dp, J), column_sums(dq * b, J), column_sums(dq, J))
    return dp * across(b_ptr + C, J * i, J, C), dq * across(b_ptr + 3 * C, J * i, J, C), parts


@gluon.jit
def second_pass(
    e_desc, db_desc, tile_e, tile_b, weights_b, stats, means, down, a, b, grad_a, grad_b, row, i, J: gl.constexpr
):  # fmt: skip
    """Write a chunk of E and of db, from tiles that nothing reads any more; add what db gives to the low rank."""
    scale_a, scale_b = stats[1], stats[2]
    level_a, along_a, level_b, along_b = means
    grad_a = grad_a * along(scale_a, J) - along(level_a, J) - a * along(along_a, J)
    grad_b = grad_b * along(scale_b, J) - along(level_b, J) - b * along(along_b, J)
    tile_e.store(grad_a.to(e_desc.dtype))
    tile_b.store(grad_b.to(e_desc.dtype))
    fence_async_shared()
    meet()
    store_tile(e_desc, [row, J * i], tile_e)
    store_tile(db_desc, [row, J * i], tile_b)
    return warpgroup_mma_wait(0, deps=[times_columns(tile_b, weights_b.index(i), down, False)])


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, bars, pointers, groups, rows, tokens, grid,
    C: gl.constexpr, L1: gl.constexpr, K1: gl.constexpr, STRIDE: gl.constexpr, SD1: gl.constexpr, MU1: gl.constexpr,
    J: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    grad_desc, h_desc, e_desc, db_desc = descs
    tiles_g, tiles_a, tiles_h, weights_b, weights_c = buffers
    full_w, full_g = bars
    u_ptr, stats_ptr, keep_ptr, vectors_ptr, E_ptr, d_ptr, sums_ptr = pointers
    weights = (weights_b, weights_c)
    P: gl.constexpr = C // 64
    CHUNKS: gl.constexpr = C // J
    b_ptr = vectors_ptr + MU1
    tile_h = tiles_h.index(which)
    sums = ()
    for k in gl.static_range(4 * CHUNKS):
        sums = sums + (gl.full([4, J], 0.0, gl.float32, gl.SliceLayout(1, summing(J))),)
    turn = 0
    group = gl.program_id(0)
    row = (group * GROUPS + which) * 64
    fetch(grad_desc, row, full_g.index(which * TILES), tiles_g, which * TILES * P, C)
    fetch_shifted(u_ptr, row, rows, grid, tiles_a, which * TILES * CHUNKS, C, STRIDE, J)
    low = load_low(u_ptr, row, rows, grid, C, L1, K1, STRIDE)
    mbarrier.wait(full_w, 0)
    while group < groups:
        row = (group * GROUPS + which) * 64
        ahead = row + gl.num_programs(0) * GROUPS * 64
        mine = which * TILES + turn % TILES
        stats = load_stats(stats_ptr, keep_ptr, row, rows, tokens, DROP)
        store_factor(d_ptr, row, rows, low, L1, K1, SD1)
        d = gl.convert_layout(low, operand())
        low = load_low(u_ptr, ahead, rows, grid, C, L1, K1, STRIDE)
        async_copy.wait_group(0)
        mbarrier.wait(full_g.index(mine), (turn // TILES) & 1)
        tma.store_wait(0)
        meet()  # all see this tile, and what was written from the one before is gone
        if TILES == 2:
            other = which * 2 + (turn + 1) % 2
            fetch(grad_desc, ahead, full_g.index(other), tiles_g, other * P, C)
            fetch_shifted(u_ptr, ahead, rows, grid, tiles_a, other * CHUNKS, C, STRIDE, J)
        share_a, share_b = stats[1] / C, stats[2] / C
        down = zeros(K1)
        if CHUNKS == 1:
            a, b, dh = branches(tiles_g, tiles_a, weights, mine, d, stats, 0, b_ptr, C, J)
            dp, dq, parts = first_pass(h_desc, tile_h, row, 0, a, b, dh, stats[3], b_ptr, C, J)
            new = ()
            for k in gl.static_range(4):
                new = new + (sums[k] + parts[k],)
            sums = new
            means = (
                sum_rows(dp) * share_a, sum_rows(dp * a) * share_a, sum_rows(dq) * share_b, sum_rows(dq * b) * share_b
            )  # fmt: skip
            # E comes where u was, and db where the gradient was
            down = second_pass(
                e_desc, db_desc, tiles_a.index(mine), tiles_g.index(mine), weights_b, stats, means, down,
                a, b, dp, dq, row, 0, J,
            )  # fmt: skip
        else:
            level_a, along_a, level_b, along_b = row_zeros(), row_zeros(), row_zeros(), row_zeros()
            for i in range(CHUNKS):
                a, b, dh = branches(tiles_g, tiles_a, weights, mine, d, stats, i, b_ptr, C, J)
                dp, dq, parts = first_pass(h_desc, tile_h, row, i, a, b, dh, stats[3], b_ptr, C, J)
                new = ()
                for c in gl.static_range(CHUNKS):  # in registers, where a place cannot be looked up
                    for k in gl.static_range(4):
                        new = new + (sums[4 * c + k] + gl.where(i == c, parts[k], 0.0),)
                sums = new
                level_a += sum_rows(dp)
                along_a += sum_rows(dp * a)
                level_b += sum_rows(dq)
                along_b += sum_rows(dq * b)
            means = (level_a * share_a, along_a * share_a, level_b * share_b, along_b * share_b)
            for i in range(CHUNKS):
                a, b, dh = branches(tiles_g, tiles_a, weights, mine, d, stats, i, b_ptr, C, J)
                dp = dh * affine(b, b_ptr + 3 * C, i, C, J) * across(b_ptr + C, J * i, J, C)
                dq = dh * affine(a, b_ptr + C, i, C, J) * across(b_ptr + 3 * C, J * i, J, C)
                tma.store_wait(0)
                meet()  # the tile of h is free
                down = second_pass(
                    e_desc, db_desc, tiles_a.index(mine * CHUNKS + i), tile_h, weights_b, stats, means, down,
                    a, b, dp, dq, row, i, J,
                )  # fmt: skip
        store_columns(E_ptr, row, rows, C, down.to(grad_desc.dtype), K1, STRIDE, C + L1)
        if TILES == 1:
            tma.store_wait(0)
            meet()
            fetch(grad_desc, ahead, full_g.index(mine), tiles_g, mine * P, C)
            fetch_shifted(u_ptr, ahead, rows, grid, tiles_a, mine * CHUNKS, C, STRIDE, J)
        turn += 1
        group += gl.num_programs(0)
    for c in gl.static_range(CHUNKS):
        for k in gl.static_range(4):
            total = gl.sum(sums[4 * c + k], 0)
            where = ((gl.program_id(0) * GROUPS + which) * 4 + k) * C + J * c
            gl.store(sums_ptr + where + gl.arange(0, J, layout=total.type.layout), total)
    async_copy.wait_group(0)
    mbarrier.wait(full_g.index(which * TILES + turn % TILES), (turn // TILES) & 1)
    tma.store_wait(0)


@gluon.jit
def mu1_back(
    grad_desc, h_desc, e_desc, db_desc, b_desc, c_desc, u_ptr, stats_ptr, keep_ptr, vectors_ptr, E_ptr, d_ptr,
    sums_ptr, groups, rows, tokens, height, width, magic_height, magic_width,
    C: gl.constexpr, L1: gl.constexpr, K1: gl.constexpr, STRIDE: gl.constexpr, SD1: gl.constexpr, MU1: gl.constexpr,
    J: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, DROP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """From the gradient of the first Mu-Layer's output to E, that of the shifted u; the factors h, db and d; sums."""
    P: gl.constexpr = C // 64
    CHUNKS: gl.constexpr = C // J
    kind: gl.constexpr = grad_desc.dtype
    tiles_g = gl.allocate_shared_memory(kind, [GROUPS * TILES * P, 64, 64], grad_desc.layout)
    tiles_a = gl.allocate_shared_memory(kind, [GROUPS * TILES * CHUNKS, 64, J], e_desc.layout)
    tiles_h = gl.allocate_shared_memory(kind, [GROUPS, 64, J], h_desc.layout)
    weights_b = gl.allocate_shared_memory(kind, [CHUNKS, J, K1], b_desc.layout)
    weights_c = gl.allocate_shared_memory(kind, [CHUNKS * P, 64, J], c_desc.layout)
    full_w = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_g = gl.allocate_shared_memory(gl.int64, [GROUPS * TILES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_w, count=1)
    for i in gl.static_range(GROUPS * TILES):
        mbarrier.init(full_g.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(full_w, (K1 + C) * C * 2)
    for i in gl.static_range(CHUNKS):
        load_tile(b_desc, [J * i, 0], full_w, weights_b.index(i))
        for k in gl.static_range(P):
            load_tile(c_desc, [64 * k, J * i], full_w, weights_c.index(i * P + k))
    descs = (grad_desc, h_desc, e_desc, db_desc)
    buffers = (tiles_g, tiles_a, tiles_h, weights_b, weights_c)
    bars = (full_w, full_g)
    pointers = (u_ptr, stats_ptr, keep_ptr, vectors_ptr, E_ptr, d_ptr, sums_ptr)
    grid = (height, width, magic_height, magic_width)
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, descs, buffers, bars, pointers, groups, rows, tokens, grid, C, L1, K1, STRIDE, SD1, MU1,
                       J, GROUPS, TILES, DROP)),
            (consume, (1, descs, buffers, bars, pointers, groups, rows, tokens, grid, C, L1, K1, STRIDE, SD1, MU1,
                       J, GROUPS, TILES, DROP)),
        ], [4], [REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, descs, buffers, bars, pointers, groups, rows, tokens, grid, C, L1, K1, STRIDE, SD1, MU1,
                       J, GROUPS, TILES, DROP)),
            (consume, (1, descs, buffers, bars, pointers, groups, rows, tokens, grid, C, L1, K1, STRIDE, SD1, MU1,
                       J, GROUPS, TILES, DROP)),
            (consume, (2, descs, buffers, bars, pointers, groups, rows, tokens, grid, C, L1, K1, STRIDE, SD1, MU1,
                       J, GROUPS, TILES, DROP)),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
