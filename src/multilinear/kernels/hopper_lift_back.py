"""The way back through shift, lift and norm on Hopper: the same as `block_backward.lift_back` where tokens at the
border stay.

Each processor runs its program for good and keeps the weights. Groups of four warps take 64 tokens each. What comes
back from a tile's neighbours is added up in registers, two numbers in each, and goes to shared memory, from where it is
written and multiplied. That of the next tile is loaded at the end of this one. Sums over tokens are products, as in
`hopper_norm_back`. The gradients of the norm come out of that of the matrix behind it, for which each row of du is
divided by the deviation of x: its product with x, less what the mean gives, is that with the normed x.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_names import load_tile, meet, reinterpret, store_tile
from multilinear.kernels.hopper_norm_back import add_up, columns_of
from multilinear.kernels.hopper_parts import (
    accumulator,
    along,
    fetch,
    keep_vectors,
    kept,
    nothing,
    row_zeros,
    rows_layout,
    times_columns,
    zeros,
)
from multilinear.kernels.hopper_unshift import load_all, put_down, stage


@gluon.jit
def load_norms(norms_ptr, keep_ptr, row, rows, tokens, DROP: gl.constexpr):
    """The mean of each of 64 rows, what makes its variance 1, and what became of the layer."""
    index = row + gl.arange(0, 64, layout=rows_layout())
    mean = gl.load(norms_ptr + index, mask=index < rows, other=0.0)
    scale = gl.load(norms_ptr + rows + index, mask=index < rows, other=1.0)
    keep = row_zeros()
    if DROP:
        keep = gl.load(keep_ptr + index // tokens, mask=index < rows, other=0.0)
    return mean, scale, keep


@gluon.jit
def norm_columns(mean, scale, kind: gl.constexpr):
    """Columns 4 to 6 add up to the mean of each row, 7 and 8 to its deviation: parts of 16 bits each. The mean has
    more of them, as rows may lie far from zero for their deviation."""
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, accumulator(16)))[None, :]
    mean, deviation = along(mean, 16), along(1.0 / scale, 16)
    rest = mean - mean.to(kind).to(gl.float32)
    part = gl.where(j == 4, mean, gl.where(j == 5, rest, rest - rest.to(kind).to(gl.float32)))
    left = deviation - deviation.to(kind).to(gl.float32)
    part = gl.where(j == 7, deviation, gl.where(j == 8, left, part))
    return gl.where((j >= 4) & (j <= 8), part, 0.0).to(kind)


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
    du_desc = descs[3]
    weights, weights_low = buffers[3], buffers[4]
    P: gl.constexpr = C // 64
    none = nothing(row)
    for i in gl.static_range(FROM, TO):
        tile = stage(buffers[2], buffers[1], free, place, i, STAGES)
        store_tile(du_desc, [row, 64 * i], tile)  # past the last column it is cut off
        if i < P:
            dns = spread(tile, weights, none + i * P, dns, P, i == 0)
        else:
            for j in gl.static_range(LOWS):
                dns = spread(tile.slice(16 * j, 16, 1), weights_low, none + j * P, dns, P, False)
    return dns


@gluon.jit
def load_floats(tile):
    return tile.load(accumulator(64)).to(gl.float32)


@gluon.jit
def to_norm(tiles_x, place, dns, mean, scale, vectors, C: gl.constexpr):
    """What of each row the norm takes off: a level, and so much of x without its mean."""
    level = row_zeros()
    follow = row_zeros()
    for k in gl.static_range(C // 64):
        x = load_floats(tiles_x.index(place + k)) - mean[:, None]
        weighted = dns[k] * kept(vectors, k, 64)
        level += gl.sum(weighted, 1)
        follow += gl.sum(weighted * x, 1)
    return level / C, follow * scale * scale / C


@gluon.jit
def to_input(
    tiles_x, tiles_g, place, select, dns, sums, mean, level, follow, vectors, C: gl.constexpr, kind: gl.constexpr
):  # fmt: skip
    """Put the gradient of x where that of the output was, whose sums are taken first."""
    done = ()
    for k in gl.static_range(C // 64):
        pending = add_up(tiles_g.index(place + k), select, sums[k])
        grad = load_floats(tiles_g.index(place + k))
        x = load_floats(tiles_x.index(place + k)) - mean[:, None]
        out = (grad + dns[k] * kept(vectors, k, 64) - level[:, None] - x * follow[:, None]).to(kind)
        done = done + (warpgroup_mma_wait(0, deps=[pending]),)
        meet()  # nothing reads the tile any more
        tiles_g.index(place + k).store(out)
    fence_async_shared()
    meet()  # all have written, and said so to the copies
    return done


@gluon.jit
def store_sums(
    sums_ptr, which: gl.constexpr, sums, C: gl.constexpr, L1: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr
):  # fmt: skip
    """A line of this group with all that it has summed up."""
    P: gl.constexpr = C // 64
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, accumulator(16)))[None, :]
    channel = gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(16)))
    line = sums_ptr + (gl.program_id(0) * GROUPS + which) * (C + 2 * STRIDE) + channel
    for k in gl.static_range(P + 1):
        inside = 64 * k + channel < C + L1
        if k < P:
            gl.store(line + 64 * k, gl.sum(gl.where((j == 2) | (j == 3), sums[k], 0.0), 1))
        gl.store(line + C + 64 * k, gl.sum(gl.where((j >= 4) & (j <= 6), sums[k], 0.0), 1), mask=inside)
        gl.store(line + C + STRIDE + 64 * k, gl.sum(gl.where((j == 7) | (j == 8), sums[k], 0.0), 1), mask=inside)


@gluon.jit
def load_weights(w_desc, w_low_desc, bar, weights, weights_low, C: gl.constexpr, LOWS: gl.constexpr):
    """Start copying them, for good."""
    P: gl.constexpr = C // 64
    mbarrier.expect(bar, (C + 16 * LOWS) * C * 2)
    for c in gl.static_range(P):
        for k in gl.static_range(P):
            load_tile(w_desc, [64 * k, 64 * c], bar, weights.index(k * P + c))
        for k in gl.static_range(LOWS):  # rows past the last are zeros
            load_tile(w_low_desc, [C + 16 * k, 64 * c], bar, weights_low.index(k * P + c))


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, bars, pointers, rows, grid,
    C: gl.constexpr, L1: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    x_desc, grad_desc, out_desc = descs[0], descs[1], descs[2]
    tiles_x, tiles_g, spare, _, _, selects, norms, vectors = buffers
    full_w, full_x, full_g = bars
    E_ptr, keep_ptr, norms_ptr, sums_ptr = pointers
    P: gl.constexpr = C // 64
    LOWS: gl.constexpr = (L1 + 15) // 16
    ENOUGH: gl.constexpr = STAGES > P  # spare tiles for all of du
    MOST: gl.constexpr = P + 1 if ENOUGH else STAGES
    kind: gl.constexpr = x_desc.dtype
    select = selects.index(which if DROP else 0)
    sums = ()
    for k in gl.static_range(P + 1):
        sums = sums + (zeros(16),)
    turn = 0
    row = (gl.program_id(0) * GROUPS + which) * 64
    fetch(x_desc, row, full_x.index(which * TILES), tiles_x, which * TILES * P, C)
    if TILES == 2:
        fetch(grad_desc, row, full_g.index(which * 2), tiles_g, which * 2 * P, C)
    tokens = grid[0] * grid[1]
    mean, scale, keep = load_norms(norms_ptr, keep_ptr, row, rows, tokens, DROP)
    du = load_all(E_ptr, norms_ptr, row, rows, grid, C, L1, STRIDE, kind)
    mbarrier.wait(full_w, 0)
    while row - which * 64 < rows:
        ahead = row + gl.num_programs(0) * GROUPS * 64
        mine = which * TILES + turn % TILES
        phase = (turn // TILES) & 1
        place = mine * P + nothing(row)
        free = which * STAGES + nothing(row)
        put_down(buffers, free, place, du, 0, MOST, C, L1, STAGES)
        if ENOUGH:
            norm_tile = norms.index(which)
            norm_tile.store(norm_columns(mean, scale, kind))
            fence_async_shared()
        tma.store_wait(0)
        meet()  # all see du, and what was written from the tile before is gone
        if TILES == 2:
            other = which * 2 + (turn + 1) % 2
            fetch(x_desc, ahead, full_x.index(other), tiles_x, other * P, C)
            fetch(grad_desc, ahead, full_g.index(other), tiles_g, other * P, C)
        elif ENOUGH:
            fetch(grad_desc, row, full_g.index(mine), tiles_g, place, C)
        dns = ()
        for k in gl.static_range(P):
            dns = dns + (zeros(64),)
        dns = give(descs, buffers, free, place, row, dns, 0, MOST, C, LOWS, STAGES)
        if not ENOUGH:  # the rest goes where the gradient will come, and what it is summed up with next to it
            norm_tile = reinterpret(tiles_g.index(place + P - 1), kind, [4, 64, 16], norms.layout).index(0)
            norm_tile.store(norm_columns(mean, scale, kind))
            put_down(buffers, free, place, du, MOST, P + 1, C, L1, STAGES)
            meet()
            dns = give(descs, buffers, free, place, row, dns, MOST, P + 1, C, LOWS, STAGES)
        new = ()
        for i in gl.static_range(P + 1):
            new = new + (add_up(stage(spare, tiles_g, free, place, i, STAGES), norm_tile, sums[i]),)
        mbarrier.wait(full_x.index(mine), phase)
        done = warpgroup_mma_wait(0, deps=dns + new)
        dns, sums = done[:P], done[P:]
        tma.store_wait(0)
        meet()  # du has been written and multiplied
        if not ENOUGH:
            fetch(grad_desc, row, full_g.index(mine), tiles_g, place, C)
        if DROP:  # the sums that read the one before are over
            select.store(columns_of(row_zeros(), row_zeros(), keep, kind))
            fence_async_shared()
            meet()
        level, follow = to_norm(tiles_x, place, dns, mean, scale, vectors, C)
        mbarrier.wait(full_g.index(mine), phase)
        new = to_input(tiles_x, tiles_g, place, select, dns, sums, mean, level, follow, vectors, C, kind)
        sums = new + (sums[P],)
        for k in gl.static_range(P):
            store_tile(out_desc, [row, 64 * k], tiles_g.index(place + k))
        if TILES == 1:
            fetch(x_desc, ahead, full_x.index(mine), tiles_x, place, C)
        # not before: a fence waits for all that is on its way to registers
        mean, scale, keep = load_norms(norms_ptr, keep_ptr, ahead, rows, tokens, DROP)
        du = load_all(E_ptr, norms_ptr, ahead, rows, grid, C, L1, STRIDE, kind)
        turn += 1
        row = ahead
    store_sums(sums_ptr, which, sums, C, L1, STRIDE, GROUPS)
    mbarrier.wait(full_x.index(which * TILES + turn % TILES), (turn // TILES) & 1)
    if TILES == 2:
        mbarrier.wait(full_g.index(which * 2 + turn % 2), (turn // 2) & 1)
    tma.store_wait(0)


@gluon.jit
def lift_back(
    x_desc, grad_desc, out_desc, du_desc, w_desc, w_low_desc,
    E_ptr, keep_ptr, norms_ptr, vectors_ptr, sums_ptr, rows, height, width, magic_height, magic_width,
    C: gl.constexpr, L1: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr, DROP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradients of x and of u, of this each row divided by the deviation of x. A line for each group of each
    program with sums: of the gradient of the output, and of those rows times the mean of x and times its deviation."""
    P: gl.constexpr = C // 64
    LOWS: gl.constexpr = (L1 + 15) // 16
    gl.static_assert(LOWS <= 4)  # they share a tile
    gl.static_assert(GROUPS == 2 or GROUPS == 3)
    # if spare tiles are too few, the rest of du and what it is summed up with have those of the gradient
    gl.static_assert(STAGES > P or (TILES == 1 and STAGES >= 2))
    kind: gl.constexpr = x_desc.dtype
    column: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    tiles_x = gl.allocate_shared_memory(kind, [GROUPS * TILES * P, 64, 64], x_desc.layout)
    tiles_g = gl.allocate_shared_memory(kind, [GROUPS * TILES * P, 64, 64], grad_desc.layout)
    spare = gl.allocate_shared_memory(kind, [GROUPS * STAGES, 64, 64], du_desc.layout)
    weights = gl.allocate_shared_memory(kind, [P * P, 64, 64], w_desc.layout)
    weights_low = gl.allocate_shared_memory(kind, [LOWS * P, 16, 64], w_low_desc.layout)
    selects = gl.allocate_shared_memory(kind, [GROUPS if DROP else 1, 64, 16], column)
    full_w = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS * TILES, 1], mbarrier.MBarrierLayout())
    full_g = gl.allocate_shared_memory(gl.int64, [GROUPS * TILES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_w, count=1)
    for i in gl.static_range(GROUPS * TILES):
        mbarrier.init(full_x.index(i), count=1)
        mbarrier.init(full_g.index(i), count=1)
    if not DROP:
        selects.index(0).store(columns_of(row_zeros(), row_zeros(), row_zeros() + 1.0, kind))
    if STAGES > P:
        norms = gl.allocate_shared_memory(kind, [GROUPS, 64, 16], column)
    else:  # they lie elsewhere in the same way
        norms = selects
    vectors = keep_vectors(vectors_ptr, C, 64, P)
    fence_async_shared()
    meet()
    load_weights(w_desc, w_low_desc, full_w, weights, weights_low, C, LOWS)
    descs = (x_desc, grad_desc, out_desc, du_desc)
    buffers = (tiles_x, tiles_g, spare, weights, weights_low, selects, norms, vectors)
    bars = (full_w, full_x, full_g)
    pointers = (E_ptr, keep_ptr, norms_ptr, sums_ptr)
    grid = (height, width, magic_height, magic_width)
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, descs, buffers, bars, pointers, rows, grid, C, L1, STRIDE, GROUPS, TILES,
                       STAGES, DROP)),
            (consume, (1, descs, buffers, bars, pointers, rows, grid, C, L1, STRIDE, GROUPS, TILES,
                       STAGES, DROP)),
        ], [4], [REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, descs, buffers, bars, pointers, rows, grid, C, L1, STRIDE, GROUPS, TILES,
                       STAGES, DROP)),
            (consume, (1, descs, buffers, bars, pointers, rows, grid, C, L1, STRIDE, GROUPS, TILES,
                       STAGES, DROP)),
            (consume, (2, descs, buffers, bars, pointers, rows, grid, C, L1, STRIDE, GROUPS, TILES,
                       STAGES, DROP)),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
