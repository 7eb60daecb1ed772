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

from multilinear.kernels.hopper_mu1 import fetch_low, fetch_shifted, load_pieces, load_stats
from multilinear.kernels.hopper_names import load_tile, meet, reinterpret, store_tile
from multilinear.kernels.hopper_norm_back import settle
from multilinear.kernels.hopper_parts import (
    accumulator,
    along,
    column_sums,
    keep_vectors,
    kept,
    sum_rows,
    summing,
    thread_sums,
    times,
    times_columns,
    zeros,
)
from multilinear.kernels.hopper_unshift import unshift


@gluon.jit
def put_ones(tile, column: gl.constexpr):
    """In a column of a piece of the low rank past its last."""
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, accumulator(16)))[None, :]
    tile.store(gl.where(j == column, 1.0, tile.load(accumulator(16)).to(gl.float32)).to(tile.dtype))


@gluon.jit
def store_factor(d_desc, row, lows, place, ones, L1: gl.constexpr, LOWS: gl.constexpr):
    """The low rank next to a column of ones, and zeros up to where rows end."""
    for j in gl.static_range(LOWS):
        store_tile(d_desc, [row, 16 * j], lows.index(place * LOWS + j))
    if L1 % 16 == 0:
        store_tile(d_desc, [row, L1], ones)


@gluon.jit
def fetch_gradient(
    descs, buffers, bars, row, mine, C: gl.constexpr, LOWS: gl.constexpr, IMAGE: gl.constexpr
):  # fmt: skip
    """Start copying a tile of the gradient. Of an image the same barrier waits for u, which must be fetched too."""
    mbarrier.expect(bars[1].index(mine), (2 * C + 16 * LOWS if IMAGE else C) * 128)
    for k in gl.static_range(C // 64):
        load_tile(descs[0], [row, 64 * k], bars[1].index(mine), buffers[0].index(mine * (C // 64) + k))


@gluon.jit
def fetch_shifted_u(
    descs, buffers, bars, u_ptr, row, rows, grid, mine, C: gl.constexpr, L1: gl.constexpr, LOWS: gl.constexpr,
    STRIDE: gl.constexpr, J: gl.constexpr, IMAGE: gl.constexpr,
):  # fmt: skip
    """Start copying a tile of the shifted u, after the gradient's."""
    tiles_a, lows, bar = buffers[1], buffers[3], bars[1].index(mine)
    if IMAGE:
        for i in gl.static_range(C // J):
            load_tile(descs[6], [row, J * i], bar, tiles_a.index(mine * (C // J) + i))
        for j in gl.static_range(LOWS):
            load_tile(descs[7], [row, C + 16 * j], bar, lows.index(mine * LOWS + j))
    else:
        fetch_low(u_ptr, row, rows, grid, lows, mine, C, L1, LOWS, STRIDE)
        fetch_shifted(u_ptr, row, rows, grid, tiles_a, mine * (C // J), C, STRIDE, J)


@gluon.jit
def branches(
    tiles_g, tiles_a, weights, vectors, turn, ds, stats, i, C: gl.constexpr, J: gl.constexpr, LOWS: gl.constexpr
):  # fmt: skip
    """A chunk of both normed branches, and of the gradient of their product."""
    weights_b, weights_c = weights
    mean, scale_a, scale_b, keep = stats
    P: gl.constexpr = C // 64
    dh = zeros(J)
    for k in gl.static_range(P):
        dh = times_columns(tiles_g.index(turn * P + k), weights_c.index(i * P + k), dh, k == 0)
    b = zeros(J)
    for j in gl.static_range(LOWS):
        b = times(ds[j], weights_b.index(i * LOWS + j), b, j == 0)
    done = warpgroup_mma_wait(0, deps=(dh, b) + ds)
    a = tiles_a.index(turn * (C // J) + i).load(accumulator(J)).to(gl.float32)
    a = a * along(scale_a, J) - along(mean * scale_a, J)
    b = (done[1] + kept(vectors, i, J)) * along(scale_b, J)
    return a, b, done[0] * along(keep, J)


@gluon.jit
def first_pass(h_desc, tile_h, vectors, row, i, a, b, dh, keep, C: gl.constexpr, J: gl.constexpr):
    """Write a chunk of h. Gradients of the normed branches; sums for those of their norms' weights and biases."""
    COUNT: gl.constexpr = C // J
    weight_a, weight_b = kept(vectors, COUNT + i, J), kept(vectors, 3 * COUNT + i, J)
    p = a * weight_a + kept(vectors, 2 * COUNT + i, J)
    q = b * weight_b + kept(vectors, 4 * COUNT + i, J)
    tma.store_wait(0)
    meet()  # the tile is free
    tile_h.store((p * q * along(keep, J)).to(h_desc.dtype))
    fence_async_shared()
    meet()
    store_tile(h_desc, [row, J * i], tile_h)
    dp, dq = dh * q, dh * p
    parts = column_sums(dp * a, dp, J) + column_sums(dq * b, dq, J)
    return dp * weight_a, dq * weight_b, parts


@gluon.jit
def second_pass(
    e_desc, db_desc, tile_e, tile_b, weights_b, stats, means, down, a, b, grad_a, grad_b, row, i, J: gl.constexpr,
    LOWS: gl.constexpr, IMAGE: gl.constexpr,
):  # fmt: skip
    """Put down a chunk of E and of db, in tiles that nothing reads any more, and write them, of images only db; add
    what db gives to the low rank."""
    scale_a, scale_b = stats[1], stats[2]
    level_a, along_a, level_b, along_b = means
    grad_a = grad_a * along(scale_a, J) - along(level_a, J) - a * along(along_a, J)
    grad_b = grad_b * along(scale_b, J) - along(level_b, J) - b * along(along_b, J)
    tile_e.store(grad_a.to(e_desc.dtype))
    tile_b.store(grad_b.to(e_desc.dtype))
    fence_async_shared()
    meet()
    if not IMAGE:
        store_tile(e_desc, [row, J * i], tile_e)
    store_tile(db_desc, [row, J * i], tile_b)
    new = ()
    for j in gl.static_range(LOWS):
        new = new + (times_columns(tile_b, weights_b.index(i * LOWS + j), down[j], False),)
    return settle(new, 0, LOWS)


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, bars, pointers, groups, rows, tokens, grid,
    C: gl.constexpr, L1: gl.constexpr, LOWS: gl.constexpr, STRIDE: gl.constexpr,
    J: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, DROP: gl.constexpr, IMAGE: gl.constexpr,
):  # fmt: skip
    grad_desc, h_desc, e_desc, db_desc, low_desc, d_desc, _, _ = descs
    tiles_g, tiles_a, tiles_h, lows, ones, weights_b, weights_c, vectors = buffers[:8]
    lines = buffers[8]
    full_w, full_g = bars
    u_ptr, norms_ptr, stats_ptr, keep_ptr, sums_ptr = pointers
    weights = (weights_b, weights_c)
    CHUNKS: gl.constexpr = C // J
    tile_h = tiles_h.index(which)
    sums = ()
    for k in gl.static_range(4 * CHUNKS):
        sums = sums + (gl.full([4, J], 0.0, gl.float32, gl.SliceLayout(1, summing(J))),)
    turn = 0
    group = gl.program_id(0)
    row = (group * GROUPS + which) * 64
    fetch_gradient(descs, buffers, bars, row, which * TILES, C, LOWS, IMAGE)
    fetch_shifted_u(descs, buffers, bars, u_ptr, row, rows, grid, which * TILES, C, L1, LOWS, STRIDE, J, IMAGE)
    stats = load_stats(stats_ptr, keep_ptr, row, rows, tokens, DROP)
    mbarrier.wait(full_w, 0)
    while group < groups:
        row = (group * GROUPS + which) * 64
        ahead = row + gl.num_programs(0) * GROUPS * 64
        mine = which * TILES + turn % TILES
        async_copy.wait_group(0)
        mbarrier.wait(full_g.index(mine), (turn // TILES) & 1)
        tma.store_wait(0)
        meet()  # all see this tile, and what was written from the one before is gone
        ds = load_pieces(lows, mine, LOWS)
        if L1 % 16 > 0:
            put_ones(lows.index(mine * LOWS + LOWS - 1), L1 % 16)
        fence_async_shared()
        meet()
        store_factor(d_desc, row, lows, mine, ones, L1, LOWS)
        if TILES == 2:
            other = which * 2 + (turn + 1) % 2
            fetch_gradient(descs, buffers, bars, ahead, other, C, LOWS, IMAGE)
            fetch_shifted_u(descs, buffers, bars, u_ptr, ahead, rows, grid, other, C, L1, LOWS, STRIDE, J, IMAGE)
        share_a, share_b = stats[1] / C, stats[2] / C
        down = ()
        for j in gl.static_range(LOWS):
            down = down + (zeros(16),)
        if CHUNKS == 1:
            a, b, dh = branches(tiles_g, tiles_a, weights, vectors, mine, ds, stats, 0, C, J, LOWS)
            dp, dq, parts = first_pass(h_desc, tile_h, vectors, row, 0, a, b, dh, stats[3], C, J)
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
                a, b, dp, dq, row, 0, J, LOWS, IMAGE,
            )  # fmt: skip
        else:
            none = thread_sums(zeros(J))
            level_a, along_a, level_b, along_b = none, none, none, none
            for i in range(CHUNKS):
                a, b, dh = branches(tiles_g, tiles_a, weights, vectors, mine, ds, stats, i, C, J, LOWS)
                dp, dq, parts = first_pass(h_desc, tile_h, vectors, row, i, a, b, dh, stats[3], C, J)
                new = ()
                for c in gl.static_range(CHUNKS):  # in registers, where a place cannot be looked up
                    for k in gl.static_range(4):
                        new = new + (sums[4 * c + k] + gl.where(i == c, parts[k], 0.0),)
                sums = new
                level_a += thread_sums(dp)
                along_a += thread_sums(dp * a)
                level_b += thread_sums(dq)
                along_b += thread_sums(dq * b)
            means = (
                sum_rows(level_a) * share_a, sum_rows(along_a) * share_a, sum_rows(level_b) * share_b,
                sum_rows(along_b) * share_b,
            )  # fmt: skip
            for i in range(CHUNKS):
                a, b, dh = branches(tiles_g, tiles_a, weights, vectors, mine, ds, stats, i, C, J, LOWS)
                weight_a, weight_b = kept(vectors, CHUNKS + i, J), kept(vectors, 3 * CHUNKS + i, J)
                dp = dh * (b * weight_b + kept(vectors, 4 * CHUNKS + i, J)) * weight_a
                dq = dh * (a * weight_a + kept(vectors, 2 * CHUNKS + i, J)) * weight_b
                tma.store_wait(0)
                meet()  # the tile of h is free
                down = second_pass(
                    e_desc, db_desc, tiles_a.index(mine * CHUNKS + i), tile_h, weights_b, stats, means, down,
                    a, b, dp, dq, row, i, J, LOWS, IMAGE,
                )  # fmt: skip
        # d has been written long ago
        for j in gl.static_range(LOWS):
            lows.index(mine * LOWS + j).store(down[j].to(grad_desc.dtype))
        if IMAGE:
            meet()
            fetch_gradient(descs, buffers, bars, ahead, mine, C, LOWS, IMAGE)
            unshift(
                lines[0], lines[1], norms_ptr, row, rows, mine * CHUNKS, mine * LOWS, C, L1, J, grad_desc.dtype
            )  # fmt: skip
            for i in gl.static_range(CHUNKS):
                store_tile(e_desc, [row, J * i], tiles_a.index(mine * CHUNKS + i))
        else:
            fence_async_shared()
            meet()
        for j in gl.static_range(LOWS):  # past the last column it is cut off
            store_tile(low_desc, [row, C + 16 * j], lows.index(mine * LOWS + j))
        stats = load_stats(stats_ptr, keep_ptr, ahead, rows, tokens, DROP)  # not before: a fence would wait for it
        if TILES == 1:
            tma.store_wait(0)
            meet()
            if not IMAGE:
                fetch_gradient(descs, buffers, bars, ahead, mine, C, LOWS, IMAGE)
            fetch_shifted_u(descs, buffers, bars, u_ptr, ahead, rows, grid, mine, C, L1, LOWS, STRIDE, J, IMAGE)
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
    grad_desc, h_desc, e_desc, db_desc, low_desc, d_desc, b_desc, c_desc, u_desc, u_low_desc, u_ptr, norms_ptr,
    stats_ptr, keep_ptr, vectors_ptr, sums_ptr, groups, rows, tokens, height, width, magic_height, magic_width,
    C: gl.constexpr, L1: gl.constexpr, LOWS: gl.constexpr, STRIDE: gl.constexpr, MU1: gl.constexpr,
    J: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, DROP: gl.constexpr, IMAGE: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """From the gradient of the first Mu-Layer's output to E, that of the shifted u; the factors h, db and d; sums.

    For images of 8x8 tokens u comes shifted, and E is shifted back and each row divided by the deviation of x."""
    # a piece of the low rank would end in something else, and the next gradient comes early to where db must not be
    gl.static_assert(not IMAGE or (L1 % 16 == 0 and TILES == 1 and C > J))
    P: gl.constexpr = C // 64
    CHUNKS: gl.constexpr = C // J
    kind: gl.constexpr = grad_desc.dtype
    COUNT: gl.constexpr = GROUPS * TILES
    tiles_g = gl.allocate_shared_memory(kind, [COUNT * P, 64, 64], grad_desc.layout)
    if IMAGE:  # as lines of an image, one more at either end, as in `hopper_image`
        wide = gl.allocate_shared_memory(kind, [8 * COUNT * CHUNKS + 2, 8, J], e_desc.layout)
        narrow = gl.allocate_shared_memory(kind, [8 * COUNT * LOWS + 2, 8, 16], low_desc.layout)
        tiles_a = reinterpret(wide.index(1), kind, [COUNT * CHUNKS, 64, J], e_desc.layout)
        lows = reinterpret(narrow.index(1), kind, [COUNT * LOWS, 64, 16], low_desc.layout)
        lines = (wide, narrow)
    else:
        tiles_a = gl.allocate_shared_memory(kind, [COUNT * CHUNKS, 64, J], e_desc.layout)
        lows = gl.allocate_shared_memory(kind, [COUNT * LOWS, 64, 16], low_desc.layout)
        lines = (tiles_a, lows)
    tiles_h = gl.allocate_shared_memory(kind, [GROUPS, 64, J], h_desc.layout)
    ones = gl.allocate_shared_memory(kind, [64, 16], low_desc.layout)
    weights_b = gl.allocate_shared_memory(kind, [CHUNKS * LOWS, J, 16], b_desc.layout)
    weights_c = gl.allocate_shared_memory(kind, [CHUNKS * P, 64, J], c_desc.layout)
    full_w = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_g = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_w, count=1)
    for i in gl.static_range(COUNT):
        mbarrier.init(full_g.index(i), count=1)
    for i in gl.static_range(COUNT * LOWS):  # past the low rank they stay zeros
        lows.index(i).store(zeros(16).to(kind))
    ones.store(zeros(16).to(kind))
    put_ones(ones, 0)
    vectors = keep_vectors(vectors_ptr + MU1, 5 * C, J, 5 * CHUNKS)
    fence_async_shared()
    meet()
    mbarrier.expect(full_w, (16 * LOWS + C) * C * 2)
    for i in gl.static_range(CHUNKS):
        for j in gl.static_range(LOWS):
            load_tile(b_desc, [J * i, 16 * j], full_w, weights_b.index(i * LOWS + j))
        for k in gl.static_range(P):
            load_tile(c_desc, [64 * k, J * i], full_w, weights_c.index(i * P + k))
    descs = (grad_desc, h_desc, e_desc, db_desc, low_desc, d_desc, u_desc, u_low_desc)
    buffers = (tiles_g, tiles_a, tiles_h, lows, ones, weights_b, weights_c, vectors, lines)
    bars = (full_w, full_g)
    pointers = (u_ptr, norms_ptr, stats_ptr, keep_ptr, sums_ptr)
    grid = (height, width, magic_height, magic_width)
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, descs, buffers, bars, pointers, groups, rows, tokens, grid, C, L1, LOWS, STRIDE, J,
                       GROUPS, TILES, DROP, IMAGE)),
            (consume, (1, descs, buffers, bars, pointers, groups, rows, tokens, grid, C, L1, LOWS, STRIDE, J,
                       GROUPS, TILES, DROP, IMAGE)),
        ], [4], [REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, descs, buffers, bars, pointers, groups, rows, tokens, grid, C, L1, LOWS, STRIDE, J,
                       GROUPS, TILES, DROP, IMAGE)),
            (consume, (1, descs, buffers, bars, pointers, groups, rows, tokens, grid, C, L1, LOWS, STRIDE, J,
                       GROUPS, TILES, DROP, IMAGE)),
            (consume, (2, descs, buffers, bars, pointers, groups, rows, tokens, grid, C, L1, LOWS, STRIDE, J,
                       GROUPS, TILES, DROP, IMAGE)),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
