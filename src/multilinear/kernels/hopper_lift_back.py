"""The way back through shift, lift and norm on Hopper: the same as `block_backward.lift_back` where tokens at the
border stay.

Each processor runs its program for good and keeps the weights. Groups of four warps take 64 tokens each. What comes
back from a tile's neighbours is added up in registers, two numbers in each, and goes to shared memory, from where it is
written and multiplied. That of the next tile is loaded at the end of this one, into registers that dn leaves piece by
piece. Sums over tokens are products, as in `hopper_norm_back`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_names import load_tile, meet, reinterpret, store_tile
from multilinear.kernels.hopper_norm_back import add_up, columns_of, row_norm, settle
from multilinear.kernels.hopper_parts import (
    accumulator,
    fetch,
    keep_vectors,
    kept,
    normed,
    row_zeros,
    rows_layout,
    times_columns,
    zeros,
)
from multilinear.kernels.hopper_unshift import added, load_all, load_back, load_low, nothing, put_down, stage


@gluon.jit
def store_ones(n_ptr, row, rows, C: gl.constexpr, kind: gl.constexpr):
    """The column of ones next to n; zeros up to the end of a row, which is so written as a whole."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0])
    index = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    ones = gl.where((j == 0) & (index < rows), 1.0, 0.0).to(kind)
    gl.store(n_ptr + index * (C + 8) + C + j, ones, mask=index < rows)


@gluon.jit
def spread(left, weights, place, dns, P: gl.constexpr, FIRST: gl.constexpr):
    """Start adding the product with rows of the weights to dn."""
    new = ()
    for c in gl.static_range(P):
        new = new + (times_columns(left, weights.index(place + c), dns[c], FIRST),)
    return new


@gluon.jit
def give(
    descs, buffers, free, place, row, dns, FROM: gl.constexpr, TO: gl.constexpr,
    C: gl.constexpr, LOWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start writing these pieces, and multiplying them."""
    du_desc, low_desc = descs[3], descs[4]
    weights, weights_low = buffers[3], buffers[4]
    P: gl.constexpr = C // 64
    none = nothing(row)
    for i in gl.static_range(FROM, TO):
        tile = stage(buffers[2], buffers[1], free, place, i, STAGES)
        if i < P:
            store_tile(du_desc, [row, 64 * i], tile)
            dns = spread(tile, weights, none + i * P, dns, P, i == 0)
        else:
            parts = reinterpret(tile, du_desc.dtype, [4, 64, 16], low_desc.layout)
            for j in gl.static_range(LOWS):
                # past the last column it is cut off
                store_tile(low_desc, [row, C + 16 * j], parts.index(j))
                dns = spread(parts.index(j), weights_low, none + j * P, dns, P, False)
    return dns


@gluon.jit
def load_floats(tile):
    return tile.load(accumulator(64)).to(gl.float32)


@gluon.jit
def to_norm(
    tiles_x, place, along_tile, level_tile, selects, dns, sums, mean, scale, vectors, C: gl.constexpr,
    kind: gl.constexpr,
):  # fmt: skip
    """Means of each row that the norm takes off; and the sums for the gradients of its weight and bias, by way of two
    spare tiles."""
    level = row_zeros()
    follow = row_zeros()
    done = ()
    pending = sums[0]
    for k in gl.static_range(C // 64):
        x = (load_floats(tiles_x.index(place + k)) - mean[:, None]) * scale[:, None]
        weighted = dns[k] * kept(vectors, k, 64)
        level += gl.sum(weighted, 1)
        follow += gl.sum(weighted * x, 1)
        product = (dns[k] * x).to(kind)
        if k > 0:
            done = done + (warpgroup_mma_wait(0, deps=[pending]),)
            meet()  # nothing reads the spare tiles any more
        along_tile.store(product)
        level_tile.store(dns[k].to(kind))
        fence_async_shared()
        meet()
        pending = add_up(along_tile, selects.index(0), sums[k])
        pending = add_up(level_tile, selects.index(1), pending)
    done = done + (warpgroup_mma_wait(0, deps=[pending]),)
    return level / C, follow / C, done


@gluon.jit
def to_input(
    tiles_x, tiles_g, place, select, dns, sums, mean, scale, level, follow, vectors, E_ptr, ahead, rows, grid,
    C: gl.constexpr, L1: gl.constexpr, STRIDE: gl.constexpr, kind: gl.constexpr,
):  # fmt: skip
    """Put the gradient of x where that of the output was, whose sums are taken first, and the norm's output where x
    was. Meanwhile start loading the next tile's du, and add up all but its last piece and the low rank."""
    P: gl.constexpr = C // 64
    done = ()
    loaded = ()
    du = ()
    for k in gl.static_range(P):
        pending = add_up(tiles_g.index(place + k), select, sums[k])
        grad = load_floats(tiles_g.index(place + k))
        x = (load_floats(tiles_x.index(place + k)) - mean[:, None]) * scale[:, None]
        dn = dns[k] * kept(vectors, k, 64) - level[:, None] - x * follow[:, None]
        out = (grad + dn * scale[:, None]).to(kind)
        if k > 0:
            du = du + added(loaded, k - 1, k, kind)
        done = done + (warpgroup_mma_wait(0, deps=[pending]),)
        meet()  # nothing reads either tile any more
        loaded = loaded + (load_back(E_ptr, ahead, rows, grid, 32 * k, C // 2, 32, STRIDE // 2, 4),)
        if k == P - 1:
            loaded = loaded + load_low(E_ptr, ahead, rows, grid, C, L1, STRIDE)
        tiles_g.index(place + k).store(out)
        # while those are on their way, from the start: else it would take too many registers above
        tiles_x.index(place + k).store(normed(tiles_x, place, mean, scale, vectors, k, C, kind))
    fence_async_shared()
    meet()  # all have written, and said so to the copies
    return done, du, loaded


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, bars, pointers, rows, grid, eps,
    C: gl.constexpr, L1: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    x_desc, grad_desc, out_desc, n_desc = descs[0], descs[1], descs[2], descs[5]
    tiles_x, tiles_g, spare, selects, vectors = buffers[0], buffers[1], buffers[2], buffers[5], buffers[6]
    full_w, full_x, full_g = bars
    E_ptr, keep_ptr, n_ptr, sums_ptr = pointers
    P: gl.constexpr = C // 64
    LOWS: gl.constexpr = (L1 + 15) // 16
    ENOUGH: gl.constexpr = STAGES > P  # spare tiles for all of du
    MOST: gl.constexpr = P + 1 if ENOUGH else STAGES
    kind: gl.constexpr = x_desc.dtype
    select = selects.index(2 + which if DROP else 2)
    sums = ()
    for k in gl.static_range(P):
        sums = sums + (zeros(16),)
    turn = 0
    row = (gl.program_id(0) * GROUPS + which) * 64
    if TILES == 2:
        fetch(x_desc, row, full_x.index(which * 2), tiles_x, which * 2 * P, C)
        fetch(grad_desc, row, full_g.index(which * 2), tiles_g, which * 2 * P, C)
    du = added(load_all(E_ptr, row, rows, grid, C, L1, STRIDE), 0, P + LOWS, kind)
    mbarrier.wait(full_w, 0)
    while row - which * 64 < rows:
        ahead = row + gl.num_programs(0) * GROUPS * 64
        mine = which * TILES + turn % TILES
        phase = (turn // TILES) & 1
        place = mine * P + nothing(row)
        free = which * STAGES + nothing(row)
        keep = row_zeros()
        if DROP:
            index = row + gl.arange(0, 64, layout=rows_layout())
            keep = gl.load(keep_ptr + index // (grid[0] * grid[1]), mask=index < rows, other=0.0)
        put_down(buffers, free, place, du, 0, MOST, C, LOWS, STAGES)
        tma.store_wait(0)
        meet()  # all see du, and what was written from the tile before is gone
        if TILES == 2:
            other = which * 2 + (turn + 1) % 2
            fetch(x_desc, ahead, full_x.index(other), tiles_x, other * P, C)
            fetch(grad_desc, ahead, full_g.index(other), tiles_g, other * P, C)
        else:
            fetch(x_desc, row, full_x.index(mine), tiles_x, place, C)
            if ENOUGH:
                fetch(grad_desc, row, full_g.index(mine), tiles_g, place, C)
        dns = ()
        for k in gl.static_range(P):
            dns = dns + (zeros(64),)
        dns = give(descs, buffers, free, place, row, dns, 0, MOST, C, LOWS, STAGES)
        if not ENOUGH:
            put_down(buffers, free, place, du, MOST, P + 1, C, LOWS, STAGES)
            meet()
            dns = give(descs, buffers, free, place, row, dns, MOST, P + 1, C, LOWS, STAGES)
        store_ones(n_ptr, row, rows, C, kind)
        mbarrier.wait(full_x.index(mine), phase)
        mean, scale = row_norm(tiles_x, which, (turn % TILES) * P, eps, C, TILES * P)
        dns = settle(dns, 0, P)
        tma.store_wait(0)
        meet()  # du has been written and multiplied
        if not ENOUGH:
            fetch(grad_desc, row, full_g.index(mine), tiles_g, place, C)
        if DROP:  # the sums that read the one before are over
            select.store(columns_of(row_zeros(), row_zeros(), keep, kind))
        level, follow, sums = to_norm(
            tiles_x, place, spare.index(free), spare.index(free + 1), selects, dns, sums, mean,
            scale, vectors, C, kind,
        )  # fmt: skip
        mbarrier.wait(full_g.index(mine), phase)
        sums, du, loaded = to_input(
            tiles_x, tiles_g, place, select, dns, sums, mean, scale, level, follow, vectors, E_ptr, ahead, rows,
            grid, C, L1, STRIDE, kind,
        )  # fmt: skip
        for k in gl.static_range(P):
            store_tile(out_desc, [row, 64 * k], tiles_g.index(place + k))
            store_tile(n_desc, [row, 64 * k], tiles_x.index(place + k))
        du = du + added(loaded, P - 1, P + LOWS, kind)
        turn += 1
        row = ahead
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, accumulator(16)))[None, :]
    channel = gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(16)))
    line = sums_ptr + (gl.program_id(0) * GROUPS + which) * 3 * C + channel
    for k in gl.static_range(P):
        gl.store(line + 64 * k, gl.sum(gl.where(j == 0, sums[k], 0.0), 1))
        gl.store(line + C + 64 * k, gl.sum(gl.where(j == 1, sums[k], 0.0), 1))
        gl.store(line + 2 * C + 64 * k, gl.sum(gl.where((j == 2) | (j == 3), sums[k], 0.0), 1))
    if TILES == 2:
        mbarrier.wait(full_x.index(which * 2 + turn % 2), (turn // 2) & 1)
        mbarrier.wait(full_g.index(which * 2 + turn % 2), (turn // 2) & 1)
    tma.store_wait(0)


@gluon.jit
def lift_back(
    x_desc, grad_desc, out_desc, du_desc, low_desc, n_desc, w_desc, w_low_desc,
    E_ptr, keep_ptr, vectors_ptr, n_ptr, sums_ptr, rows, height, width, magic_height, magic_width, eps,
    C: gl.constexpr, L1: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr, DROP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradients of u and of x, the norm's output next to a column of ones; a line for each group of each program
    with sums for the gradients of the norm's weight and bias and of the layer's last bias."""
    P: gl.constexpr = C // 64
    LOWS: gl.constexpr = (L1 + 15) // 16
    gl.static_assert(LOWS <= 4)  # they share a tile
    gl.static_assert(STAGES >= 2 and (STAGES > P or TILES == 1))
    kind: gl.constexpr = x_desc.dtype
    column: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    tiles_x = gl.allocate_shared_memory(kind, [GROUPS * TILES * P, 64, 64], x_desc.layout)
    tiles_g = gl.allocate_shared_memory(kind, [GROUPS * TILES * P, 64, 64], grad_desc.layout)
    spare = gl.allocate_shared_memory(kind, [GROUPS * STAGES, 64, 64], du_desc.layout)
    weights = gl.allocate_shared_memory(kind, [P * P, 64, 64], w_desc.layout)
    weights_low = gl.allocate_shared_memory(kind, [LOWS * P, 16, 64], w_low_desc.layout)
    selects = gl.allocate_shared_memory(kind, [2 + GROUPS if DROP else 3, 64, 16], column)
    full_w = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS * TILES, 1], mbarrier.MBarrierLayout())
    full_g = gl.allocate_shared_memory(gl.int64, [GROUPS * TILES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_w, count=1)
    for i in gl.static_range(GROUPS * TILES):
        mbarrier.init(full_x.index(i), count=1)
        mbarrier.init(full_g.index(i), count=1)
    none = row_zeros()
    selects.index(0).store(columns_of(none + 1.0, none, none, kind))
    selects.index(1).store(columns_of(none, none + 1.0, none, kind))
    if not DROP:
        selects.index(2).store(columns_of(none, none, none + 1.0, kind))
    vectors = keep_vectors(vectors_ptr, 2 * C, 64, 2 * P)
    fence_async_shared()
    meet()
    mbarrier.expect(full_w, (C + 16 * LOWS) * C * 2)
    for c in gl.static_range(P):
        for k in gl.static_range(P):
            load_tile(w_desc, [64 * k, 64 * c], full_w, weights.index(k * P + c))
        for k in gl.static_range(LOWS):  # rows past the last are zeros
            load_tile(w_low_desc, [C + 16 * k, 64 * c], full_w, weights_low.index(k * P + c))
    descs = (x_desc, grad_desc, out_desc, du_desc, low_desc, n_desc)
    buffers = (tiles_x, tiles_g, spare, weights, weights_low, selects, vectors)
    bars = (full_w, full_x, full_g)
    pointers = (E_ptr, keep_ptr, n_ptr, sums_ptr)
    grid = (height, width, magic_height, magic_width)
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, descs, buffers, bars, pointers, rows, grid, eps, C, L1, STRIDE, GROUPS,
                       TILES, STAGES, DROP)),
            (consume, (1, descs, buffers, bars, pointers, rows, grid, eps, C, L1, STRIDE, GROUPS,
                       TILES, STAGES, DROP)),
        ], [4], [REGISTERS])  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize([
            (consume, (0, descs, buffers, bars, pointers, rows, grid, eps, C, L1, STRIDE, GROUPS,
                       TILES, STAGES, DROP)),
            (consume, (1, descs, buffers, bars, pointers, rows, grid, eps, C, L1, STRIDE, GROUPS,
                       TILES, STAGES, DROP)),
            (consume, (2, descs, buffers, bars, pointers, rows, grid, eps, C, L1, STRIDE, GROUPS,
                       TILES, STAGES, DROP)),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, descs, buffers, bars, pointers, rows, grid, eps, C, L1, STRIDE, GROUPS,
                       TILES, STAGES, DROP)),
            (consume, (1, descs, buffers, bars, pointers, rows, grid, eps, C, L1, STRIDE, GROUPS,
                       TILES, STAGES, DROP)),
            (consume, (2, descs, buffers, bars, pointers, rows, grid, eps, C, L1, STRIDE, GROUPS,
                       TILES, STAGES, DROP)),
            (consume, (3, descs, buffers, bars, pointers, rows, grid, eps, C, L1, STRIDE, GROUPS,
                       TILES, STAGES, DROP)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
