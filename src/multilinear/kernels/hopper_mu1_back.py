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
)

from multilinear.kernels.hopper_mu1 import fetch_low, fetch_shifted, load_pieces, load_stats
from multilinear.kernels.hopper_mu1_back_steps import (
    add_row_sums,
    ahead_of_norms,
    behind_norms,
    branches,
    first_pass,
    scales_of,
    second_pass,
)
from multilinear.kernels.hopper_names import load_tile, meet, reinterpret, store_tile
from multilinear.kernels.hopper_pairs import store_column_sums, summing
from multilinear.kernels.hopper_parts import accumulator, keep_vectors, zeros
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
    tiles_a, lows, bar = buffers[1], buffers[2], bars[1].index(mine)
    if IMAGE:
        for i in gl.static_range(C // J):
            load_tile(descs[4], [row, J * i], bar, tiles_a.index(mine * (C // J) + i))
        for j in gl.static_range(LOWS):
            load_tile(descs[5], [row, C + 16 * j], bar, lows.index(mine * LOWS + j))
    else:
        fetch_low(u_ptr, row, rows, grid, lows, mine, C, L1, LOWS, STRIDE)
        fetch_shifted(u_ptr, row, rows, grid, tiles_a, mine * (C // J), C, STRIDE, J)


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, bars, pointers, groups, rows, tokens, grid,
    C: gl.constexpr, L1: gl.constexpr, LOWS: gl.constexpr, STRIDE: gl.constexpr,
    J: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, DROP: gl.constexpr, IMAGE: gl.constexpr,
):  # fmt: skip
    grad_desc, e_desc, low_desc, d_desc, _, _ = descs
    tiles_g, tiles_a, lows, ones, weights_b, weights_c, biases, norms, lines = buffers
    full_w, full_g = bars
    u_ptr, norms_ptr, stats_ptr, keep_ptr, sums_ptr, h_ptr, db_ptr = pointers
    weights = (weights_b, weights_c)
    CHUNKS: gl.constexpr = C // J
    kind: gl.constexpr = grad_desc.dtype
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
        down = ()
        for j in gl.static_range(LOWS):
            down = down + (zeros(16),)
        more = (stats[3] - 1.0).to(kind)
        rows_sums = (zeros(8), zeros(8), zeros(8), zeros(8))
        if CHUNKS == 1:
            a, b, dh = branches(tiles_g, tiles_a, weights, biases, mine, ds, stats, 0, C, J, LOWS, False)
            grad_a, grad_b, parts = first_pass(h_ptr, norms, row, rows, 0, a, b, dh, more, C, J, DROP)
            new = ()
            for k in gl.static_range(4):
                new = new + (sums[k] + parts[k],)
            sums = new
            scales = scales_of(stats, add_row_sums(rows_sums, grad_a, grad_b, a, b), kind, C)
            tma.store_wait(0)
            down = second_pass(  # E comes where u was
                e_desc, db_ptr, tiles_a.index(mine), weights_b, scales, down, a, b, grad_a, grad_b, row, rows, 0, C, J,
                LOWS, IMAGE,
            )  # fmt: skip
        else:
            for i in range(CHUNKS):
                a, b, dh = branches(tiles_g, tiles_a, weights, biases, mine, ds, stats, i, C, J, LOWS, False)
                grad_a, grad_b, parts = first_pass(h_ptr, norms, row, rows, i, a, b, dh, more, C, J, DROP)
                new = ()
                for c in gl.static_range(CHUNKS):  # in registers, where a place cannot be looked up
                    here = gl.where(i == c, 1.0, 0.0)
                    for k in gl.static_range(4):
                        new = new + (sums[4 * c + k] + parts[k] * here,)
                sums = new
                rows_sums = add_row_sums(rows_sums, grad_a, grad_b, a, b)
            scales = scales_of(stats, rows_sums, kind, C)
            tma.store_wait(0)
            meet()  # d has been written, long ago
            for i in range(CHUNKS):
                a, b, dh = branches(tiles_g, tiles_a, weights, biases, mine, ds, stats, i, C, J, LOWS, True)
                p, q = behind_norms(norms, i, a, b, CHUNKS, J)
                grad_a, grad_b = ahead_of_norms(norms, i, p, q, dh, CHUNKS, J)[2:]
                down = second_pass(
                    e_desc, db_ptr, tiles_a.index(mine * CHUNKS + i), weights_b, scales, down, a, b, grad_a, grad_b,
                    row, rows, i, C, J, LOWS, IMAGE,
                )  # fmt: skip
        for j in gl.static_range(LOWS):
            lows.index(mine * LOWS + j).store(down[j].to(kind))
        if IMAGE:
            meet()
            fetch_gradient(descs, buffers, bars, ahead, mine, C, LOWS, IMAGE)
            unshift(
                lines[0], lines[1], norms_ptr, row, rows, mine * CHUNKS, mine * LOWS, C, L1, J, kind
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
        for k in gl.static_range(2):
            line = sums_ptr + ((gl.program_id(0) * GROUPS + which) * 4 + 2 * k) * C + J * c
            store_column_sums(line, sums[4 * c + 2 * k : 4 * c + 2 * k + 2], J, C)
    async_copy.wait_group(0)
    mbarrier.wait(full_g.index(which * TILES + turn % TILES), (turn // TILES) & 1)
    tma.store_wait(0)


@gluon.jit
def mu1_back(
    grad_desc, e_desc, low_desc, d_desc, b_desc, c_desc, u_desc, u_low_desc, h_ptr, db_ptr, u_ptr, norms_ptr,
    stats_ptr, keep_ptr, vectors_ptr, sums_ptr, groups, rows, tokens, height, width, magic_height, magic_width,
    C: gl.constexpr, L1: gl.constexpr, LOWS: gl.constexpr, STRIDE: gl.constexpr, MU1: gl.constexpr,
    J: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, DROP: gl.constexpr, IMAGE: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """From the gradient of the first Mu-Layer's output to E, that of the shifted u; the factors h and db, in the order
    of `own_columns`, and d; sums.

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
    biases = keep_vectors(vectors_ptr + MU1, C, J, CHUNKS)
    norms = keep_vectors(vectors_ptr + MU1 + C, 4 * C, J, 4 * CHUNKS, kind)
    fence_async_shared()
    meet()
    mbarrier.expect(full_w, (16 * LOWS + C) * C * 2)
    for i in gl.static_range(CHUNKS):
        for j in gl.static_range(LOWS):
            load_tile(b_desc, [J * i, 16 * j], full_w, weights_b.index(i * LOWS + j))
        for k in gl.static_range(P):
            load_tile(c_desc, [64 * k, J * i], full_w, weights_c.index(i * P + k))
    descs = (grad_desc, e_desc, low_desc, d_desc, u_desc, u_low_desc)
    buffers = (tiles_g, tiles_a, lows, ones, weights_b, weights_c, biases, norms, lines)
    bars = (full_w, full_g)
    pointers = (u_ptr, norms_ptr, stats_ptr, keep_ptr, sums_ptr, h_ptr, db_ptr)
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
