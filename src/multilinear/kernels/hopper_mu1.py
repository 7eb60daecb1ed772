"""The first Mu-Layer from u on, on Hopper: the same as `block_forward.mu1` where tokens at the border stay.

Each processor runs its programs for good and keeps the weights. Groups of four warps take 64 tokens each; the shift is
where a tile's copy of u comes from, and the next tile is on its way meanwhile.
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

from multilinear.kernels.hopper_names import load_each, load_tile, meet, store_tile
from multilinear.kernels.hopper_parts import (
    accumulator,
    fetch,
    keep_vectors,
    kept,
    operand,
    row_norm,
    row_zeros,
    rows_layout,
    times,
    zeros,
)


@gluon.constexpr_function
def copied(width):
    """How tokens are shared out for copies: eight channels a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.jit
def shifted(row, first, R: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr, grid, layout: gl.constexpr):
    """Where columns `first` on of R shifted channels come from, for 64 tokens."""
    height, width, magic_height, magic_width = grid
    token = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    line = gl.umulhi(token, magic_width)  # a product by 2^32 / width instead of a division
    x = token - line * width
    y = line - gl.umulhi(line, magic_height) * height
    up = gl.where(y > 0, -width, 0)[:, None]
    down = gl.where(y < height - 1, width, 0)[:, None]
    left = gl.where(x > 0, -1, 0)[:, None]
    right = gl.where(x < width - 1, 1, 0)[:, None]
    j = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    quarter = ((j * 4) // R)[None, :]
    far = gl.where(quarter == 0, up, gl.where(quarter == 1, down, gl.where(quarter == 2, left, right)))
    return (token[:, None] + far) * STRIDE + j[None, :]


@gluon.jit
def fetch_shifted(u_ptr, row, rows, grid, tiles, place, C: gl.constexpr, STRIDE: gl.constexpr, J: gl.constexpr):
    """Start copying the shifted first part of a tile's u, in chunks of J columns."""
    live = (row + gl.arange(0, 64, layout=gl.SliceLayout(1, copied(J))) < rows)[:, None]
    for k in gl.static_range(C // J):
        where = u_ptr + shifted(row, J * k, C, J, STRIDE, grid, copied(J))
        where = gl.max_contiguous(gl.multiple_of(where, [1, 16]), [1, 8])  # eight channels always move together
        load_each(tiles.index(place + k), where, mask=live)
    async_copy.commit_group()


@gluon.constexpr_function
def copied_low(low):
    """The same for 16 channels of the low rank, of which so many a thread as always move together."""
    quarter = low // 4
    vector = min(8, quarter & -quarter)
    return gl.BlockedLayout([1, vector], [2 * vector, 16 // vector], [4, 1], [1, 0])


@gluon.jit
def fetch_low(
    u_ptr, row, rows, grid, lows, place, C: gl.constexpr, L1: gl.constexpr, LOWS: gl.constexpr, STRIDE: gl.constexpr
):  # fmt: skip
    """Start copying the shifted rest of u, the low rank of the second branch, in pieces of 16 columns."""
    layout: gl.constexpr = copied_low(L1)
    vector: gl.constexpr = layout.size_per_thread[1]
    live = (row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) < rows)[:, None]
    for j in gl.static_range(LOWS):
        inside = (16 * j + gl.arange(0, 16, layout=gl.SliceLayout(0, layout)) < L1)[None, :]
        where = u_ptr + C + shifted(row, 16 * j, L1, 16, STRIDE, grid, layout)
        where = gl.max_contiguous(gl.multiple_of(where, [1, 2 * vector]), [1, vector])
        load_each(lows.index(place * LOWS + j), where, mask=gl.max_constancy(live & inside, [1, vector]))


@gluon.jit
def load_pieces(lows, place, LOWS: gl.constexpr):
    """The low rank as left sides of products."""
    ds = ()
    for j in gl.static_range(LOWS):
        ds = ds + (lows.index(place * LOWS + j).load(operand()),)
    return ds


@gluon.jit
def second(ds, weights, bias, k, LOWS: gl.constexpr):
    """64 columns of the second branch ahead of its norm."""
    q = zeros(64)
    for j in gl.static_range(LOWS):
        q = times(ds[j], weights.index(k * LOWS + j), q, j == 0)
    return warpgroup_mma_wait(0, deps=(q,) + ds)[0] + kept(bias, k, 64)


@gluon.jit
def branch_norms(tiles_a, place, ds, weights_b, vectors, eps, C: gl.constexpr, LOWS: gl.constexpr):
    """The mean of the first branch, and what makes the variance of each 1; the mean of the second is zero."""
    mean, scale_a = row_norm(tiles_a, place, eps, C)
    total = row_zeros()
    for k in range(C // 64):
        q = second(ds, weights_b, vectors, k, LOWS)
        total += gl.sum(q * q, 1)
    return mean, scale_a, gl.rsqrt(total / C + eps)


@gluon.jit
def store_stats(stats_ptr, index, live, norms):
    for i in gl.static_range(3):
        gl.store(stats_ptr + index * 3 + i, norms[i], mask=live)


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
def hidden(
    tiles_a, place, q, vectors, mean, scale_a, scale_b, i, C: gl.constexpr, kind: gl.constexpr,
    ROWS: gl.constexpr = 64,
):  # fmt: skip
    """64 columns of the product of both normed branches, of the second one from ahead of its norm."""
    P: gl.constexpr = C // 64
    q = q * scale_b[:, None]
    q = q * kept(vectors, 3 * P + i, 64, ROWS) + kept(vectors, 4 * P + i, 64, ROWS)
    a = tiles_a.index(place + i).load(accumulator(64, ROWS)).to(gl.float32)
    a = (a - mean[:, None]) * scale_a[:, None]
    a = a * kept(vectors, P + i, 64, ROWS) + kept(vectors, 2 * P + i, 64, ROWS)
    return gl.convert_layout((a * q).to(kind), operand(ROWS))


@gluon.jit
def put_output(
    out_desc, tiles, place, row, ys, bias, first: gl.constexpr, keep, C: gl.constexpr, ROWS: gl.constexpr = 64
):  # fmt: skip
    """Add the layer's output to x where it is, with a bias from piece `first` on, and start writing it."""
    for k in gl.static_range(C // 64):
        tile = tiles.index(place + k)
        y = (ys[k] + kept(bias, first + k, 64, ROWS)) * keep[:, None]
        tile.store((tile.load(accumulator(64, ROWS)).to(gl.float32) + y).to(tile.dtype))
    fence_async_shared()
    for k in gl.static_range(C // 64):
        store_tile(out_desc, [row, 64 * k], tiles.index(place + k))


@gluon.jit
def consume(
    which: gl.constexpr, x_desc, out_desc, buffers, bars, pointers, groups, rows, tokens, grid, eps,
    C: gl.constexpr, L1: gl.constexpr, LOWS: gl.constexpr, STRIDE: gl.constexpr,
    GROUPS: gl.constexpr, TILES: gl.constexpr, TRAIN: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    tiles_x, tiles_a, lows, weights_b, weights_c, vectors, bias = buffers
    full_w, full_x = bars
    u_ptr, stats_ptr, keep_ptr = pointers
    P: gl.constexpr = C // 64
    kind: gl.constexpr = x_desc.dtype
    KEPT: gl.constexpr = TILES if TILES > 0 else 1
    turn = 0
    group = gl.program_id(0)
    row = (group * GROUPS + which) * 64
    if TILES == 2:
        fetch(x_desc, row, full_x.index(which * KEPT), tiles_x, which * KEPT * P, C)
    fetch_low(u_ptr, row, rows, grid, lows, which * KEPT, C, L1, LOWS, STRIDE)
    fetch_shifted(u_ptr, row, rows, grid, tiles_a, which * KEPT * P, C, STRIDE, 64)
    mbarrier.wait(full_w, 0)
    while group < groups:
        row = (group * GROUPS + which) * 64
        ahead = row + gl.num_programs(0) * GROUPS * 64
        mine = which * KEPT + turn % KEPT
        place = mine * P
        async_copy.wait_group(0)
        meet()
        ds = load_pieces(lows, mine, LOWS)
        if TILES == 2:
            other = which * 2 + (turn + 1) % 2
            tma.store_wait(0)
            fetch(x_desc, ahead, full_x.index(other), tiles_x, other * P, C)
            fetch_low(u_ptr, ahead, rows, grid, lows, other, C, L1, LOWS, STRIDE)
            fetch_shifted(u_ptr, ahead, rows, grid, tiles_a, other * P, C, STRIDE, 64)
        elif TILES == 1:  # x is not needed before the end
            tma.store_wait(0)
            fetch(x_desc, row, full_x.index(mine), tiles_x, place, C)
        norms = branch_norms(tiles_a, place, ds, weights_b, vectors, eps, C, LOWS)
        index = row + gl.arange(0, 64, layout=rows_layout())
        live = index < rows
        if TRAIN:
            store_stats(stats_ptr, index, live, norms)
        ys = ()
        for k in gl.static_range(P):
            ys = ys + (zeros(64),)
        for i in range(P):
            q = second(ds, weights_b, vectors, i, LOWS)
            h = hidden(tiles_a, place, q, vectors, norms[0], norms[1], norms[2], i, C, kind)
            new = ()
            for k in gl.static_range(P):
                new = new + (times(h, weights_c.index(i * P + k), ys[k], False),)
            done = warpgroup_mma_wait(0, deps=new + (h,))
            ys = ()
            for k in gl.static_range(P):
                ys = ys + (done[k],)
        keep = row_zeros() + 1.0
        if DROP:
            keep = gl.load(keep_ptr + index // tokens, mask=live, other=0.0)
        if TILES == 0:  # x comes where u was
            fence_async_shared()
            meet()
            fetch(x_desc, row, full_x.index(mine), tiles_x, place, C)
        elif TILES == 1:  # all have read u
            meet()
            fetch_low(u_ptr, ahead, rows, grid, lows, mine, C, L1, LOWS, STRIDE)
            fetch_shifted(u_ptr, ahead, rows, grid, tiles_a, place, C, STRIDE, 64)
        mbarrier.wait(full_x.index(mine), (turn // KEPT) & 1)
        put_output(out_desc, tiles_x, place, row, ys, bias, 0, keep, C)
        if TILES == 0:
            tma.store_wait(0)
            meet()
            fetch_low(u_ptr, ahead, rows, grid, lows, mine, C, L1, LOWS, STRIDE)
            fetch_shifted(u_ptr, ahead, rows, grid, tiles_a, place, C, STRIDE, 64)
        turn += 1
        group += gl.num_programs(0)
    async_copy.wait_group(0)
    if TILES == 2:
        mbarrier.wait(full_x.index(which * KEPT + turn % KEPT), (turn // KEPT) & 1)
    tma.store_wait(0)


@gluon.jit
def mu1(
    x_desc, out_desc, b_desc, c_desc, u_ptr, stats_ptr, keep_ptr, vectors_ptr, groups, rows, tokens,
    height, width, magic_height, magic_width, eps,
    C: gl.constexpr, L1: gl.constexpr, LOWS: gl.constexpr, STRIDE: gl.constexpr, MU1: gl.constexpr,
    GROUPS: gl.constexpr, TILES: gl.constexpr, TRAIN: gl.constexpr, DROP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """x plus the rest of the first Mu-Layer from u on; in training also three numbers a row."""
    P: gl.constexpr = C // 64
    kind: gl.constexpr = x_desc.dtype
    KEPT: gl.constexpr = TILES if TILES > 0 else 1
    tiles_a = gl.allocate_shared_memory(kind, [GROUPS * KEPT * P, 64, 64], x_desc.layout)
    if TILES > 0:
        tiles_x = gl.allocate_shared_memory(kind, [GROUPS * KEPT * P, 64, 64], x_desc.layout)
    else:
        tiles_x = tiles_a
    lows = gl.allocate_shared_memory(kind, [GROUPS * KEPT * LOWS, 64, 16], b_desc.layout)
    weights_b = gl.allocate_shared_memory(kind, [P * LOWS, 64, 16], b_desc.layout)
    weights_c = gl.allocate_shared_memory(kind, [P * P, 64, 64], c_desc.layout)
    full_w = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS * KEPT, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_w, count=1)
    for i in gl.static_range(GROUPS * KEPT):
        mbarrier.init(full_x.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(full_w, (16 * LOWS + C) * C * 2)
    for i in gl.static_range(P):
        for j in gl.static_range(LOWS):
            load_tile(b_desc, [64 * i, 16 * j], full_w, weights_b.index(i * LOWS + j))
        for k in gl.static_range(P):
            load_tile(c_desc, [64 * k, 64 * i], full_w, weights_c.index(i * P + k))
    for i in gl.static_range(GROUPS * KEPT * LOWS):  # past the low rank they stay zeros
        lows.index(i).store(zeros(16).to(kind))
    vectors = keep_vectors(vectors_ptr + MU1, 5 * C, 64, 5 * P)
    bias = keep_vectors(vectors_ptr + 2 * C, C, 64, P)
    meet()
    buffers = (tiles_x, tiles_a, lows, weights_b, weights_c, vectors, bias)
    bars = (full_w, full_x)
    pointers = (u_ptr, stats_ptr, keep_ptr)
    grid = (height, width, magic_height, magic_width)
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, x_desc, out_desc, buffers, bars, pointers, groups, rows, tokens, grid, eps, C, L1, LOWS,
                       STRIDE, GROUPS, TILES, TRAIN, DROP)),
            (consume, (1, x_desc, out_desc, buffers, bars, pointers, groups, rows, tokens, grid, eps, C, L1, LOWS,
                       STRIDE, GROUPS, TILES, TRAIN, DROP)),
        ], [4], [REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, x_desc, out_desc, buffers, bars, pointers, groups, rows, tokens, grid, eps, C, L1, LOWS,
                       STRIDE, GROUPS, TILES, TRAIN, DROP)),
            (consume, (1, x_desc, out_desc, buffers, bars, pointers, groups, rows, tokens, grid, eps, C, L1, LOWS,
                       STRIDE, GROUPS, TILES, TRAIN, DROP)),
            (consume, (2, x_desc, out_desc, buffers, bars, pointers, groups, rows, tokens, grid, eps, C, L1, LOWS,
                       STRIDE, GROUPS, TILES, TRAIN, DROP)),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
