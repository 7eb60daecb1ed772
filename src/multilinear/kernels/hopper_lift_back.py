"""The way back through shift, lift and norm on Hopper: the same as `block_backward.lift_back` where tokens at the
border stay.

Each processor runs its programs for good and keeps the weights. Groups of four warps take 64 tokens each. What comes
back from a tile's neighbours is added up in registers, two numbers in each, and goes to shared memory, from where it is
written and multiplied; that of the next tile is on its way while this one goes through the norm.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_mu1 import neighbours, pick
from multilinear.kernels.hopper_parts import (
    accumulator,
    across,
    row_zeros,
    rows_layout,
    times_columns,
    zeros,
)


@gluon.constexpr_function
def vector(low):
    """How many pairs of channels of the low rank are loaded at once: so many lie in a quarter, and move together."""
    return 1 if low % 16 else 2


@gluon.constexpr_function
def shared_out(pairs, together):
    """How the pairs of a token are shared out, so many to a thread."""
    return gl.BlockedLayout([1, together], [32 * together // pairs, pairs // together], [4, 1], [1, 0])


@gluon.constexpr_function
def as_pairs(width):
    """A tile of that width as one of pairs."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * width, element_bitwidth=32, rank=2)


@gluon.jit
def load_back(
    E_ptr, row, rows, grid, first, R: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr, V: gl.constexpr,
    STAYED: gl.constexpr,
):  # fmt: skip
    """Pairs `first` on, of R that are shifted, of the gradient of 64 tokens' u, from where each of them had gone to; or
    from the token itself, where at the border it also stayed."""
    layout: gl.constexpr = shared_out(WIDTH, V)
    token, up, down, left, right = neighbours(row, grid, layout)
    j = (first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)))[None, :]
    quarter = (j * 4) // R
    if STAYED:
        where = E_ptr + token * STRIDE + j
        inside = pick(quarter, up, down, left, right) == 0
    else:
        far = pick(quarter, down, up, right, left)  # the first quarter moved down: its gradient comes from below
        where = E_ptr + (token + far) * STRIDE + j
        inside = far != 0
    where = gl.max_contiguous(gl.multiple_of(where, [1, 4 * V]), [1, V])
    return gl.load(where, mask=gl.max_constancy(inside & (token < rows) & (j < R), [1, V]), other=0)


@gluon.jit
def load_all(E_ptr, row, rows, grid, C: gl.constexpr, STRIDE: gl.constexpr, STAYED: gl.constexpr):
    parts = ()
    for k in gl.static_range(C // 64):
        parts = parts + (load_back(E_ptr, row, rows, grid, 32 * k, C // 2, 32, STRIDE, 4, STAYED),)
    return parts


@gluon.jit
def add_pairs(x, y, kind: gl.constexpr):
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.int32, True, 1)


@gluon.jit
def fetch_both(x_desc, grad_desc, row, bar, tiles_x, tiles_g, place, C: gl.constexpr):
    """Start copying 64 rows of x and of the gradient."""
    mbarrier.expect(bar, 2 * C * 128)
    for k in gl.static_range(C // 64):
        tma.async_copy_global_to_shared(x_desc, [row, 64 * k], bar, tiles_x.index(place + k))
        tma.async_copy_global_to_shared(grad_desc, [row, 64 * k], bar, tiles_g.index(place + k))


@gluon.jit
def store_ones(n_ptr, row, rows, C: gl.constexpr, kind: gl.constexpr):
    """The column of ones next to n; zeros up to the end of a row, which is so written as a whole."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0])
    index = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    ones = gl.where((j == 0) & (index < rows), 1.0, 0.0).to(kind)
    gl.store(n_ptr + index * (C + 8) + C + j, ones, mask=index < rows)


@gluon.jit
def give(x, y, tile, desc, row, first, WIDTH: gl.constexpr):
    """Put the sum, a part of du, where it is multiplied, and start writing it."""
    tile._reinterpret(gl.int32, [64, WIDTH // 2], as_pairs(WIDTH)).store(add_pairs(x, y, desc.dtype))
    fence_async_shared()
    gl.thread_barrier()  # all have written, and said so to the copy and the product
    tma.async_copy_shared_to_global(desc, [row, first], tile)


@gluon.jit
def spread(left, weights, place, dns, P: gl.constexpr, FIRST: gl.constexpr):
    """Start adding the product with rows of the weights to dn."""
    new = ()
    for c in gl.static_range(P):
        new = new + (times_columns(left, weights.index(place + c), dns[c], FIRST),)
    return new


@gluon.jit
def finish(dns, P: gl.constexpr):
    """Wait for the products."""
    done = warpgroup_mma_wait(0, deps=dns + (zeros(16),))
    out = ()
    for c in gl.static_range(P):
        out = out + (done[c],)
    return out


@gluon.jit
def through_lift(
    which: gl.constexpr, descs, buffers, E_ptr, row, rows, grid, fetched,
    C: gl.constexpr, L1: gl.constexpr, LOW: gl.constexpr, STRIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The gradient of u, which is written, and products on their way that give that of n."""
    du_desc, low_desc = descs[3], descs[4]
    tiles_u, tiles_low, weights, weights_low = buffers[2], buffers[3], buffers[4], buffers[5]
    P: gl.constexpr = C // 64
    V: gl.constexpr = vector(L1)
    # 0, which the compiler cannot know: else it keeps the places of all weights, too many for the registers
    none = row >> 31
    kept = load_all(E_ptr, row, rows, grid, C, STRIDE // 2, True)
    low = load_back(E_ptr + C // 2, row, rows, grid, 0, L1 // 2, LOW // 2, STRIDE // 2, V, False)
    kept_low = load_back(E_ptr + C // 2, row, rows, grid, 0, L1 // 2, LOW // 2, STRIDE // 2, V, True)
    dns = ()
    for c in gl.static_range(P):
        dns = dns + (zeros(64),)
    for k in gl.static_range(P):
        if k >= STAGES:  # the tile has been written and multiplied
            dns = finish(dns, P)
            tma.store_wait(STAGES - 1)
            gl.thread_barrier()
        tile = tiles_u.index(which * STAGES + k % STAGES)
        give(fetched[k], kept[k], tile, du_desc, row, 64 * k, 64)
        dns = spread(tile, weights, none + k * P, dns, P, k == 0)
    if LOW == 64:
        if P >= STAGES:
            dns = finish(dns, P)
            tma.store_wait(STAGES - 1)
            gl.thread_barrier()
        tile = tiles_u.index(which * STAGES + P % STAGES)
    else:
        tile = tiles_low.index(which)
    # past the last column zeros, as a matrix product reads them too
    give(low, kept_low, tile, low_desc, row, C, LOW)
    return spread(tile, weights_low, none, dns, P, False)


@gluon.jit
def load_floats(tile):
    return tile.load(accumulator(64)).to(gl.float32)


@gluon.jit
def add_columns(total, x):
    """Add the sum over rows."""
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(64))
    total.store(total.load(columns) + gl.sum(x, 0))


@gluon.jit
def through_norm(
    tiles_x, tiles_g, place, sums, which: gl.constexpr, dns, keep, vectors_ptr, eps, C: gl.constexpr, kind: gl.constexpr
):  # fmt: skip
    """As `norm_back` of the second Mu-Layer; and the norm's output in place of the gradient of the layer's.

    x is loaded again after each barrier, without which it would stay and take too many registers.
    """
    P: gl.constexpr = C // 64
    total = row_zeros()
    for k in gl.static_range(P):
        total += gl.sum(load_floats(tiles_x.index(place + k)), 1)
    mean = (total / C)[:, None]
    gl.thread_barrier()
    total = row_zeros()
    for k in gl.static_range(P):
        x = load_floats(tiles_x.index(place + k)) - mean
        total += gl.sum(x * x, 1)
    scale = gl.rsqrt(total / C + eps)[:, None]
    gl.thread_barrier()
    level = row_zeros()
    follow = row_zeros()
    for k in gl.static_range(P):
        x = (load_floats(tiles_x.index(place + k)) - mean) * scale
        dn = dns[k] * across(vectors_ptr, 64 * k, 64, C)
        level += gl.sum(dn, 1)
        follow += gl.sum(dn * x, 1)
        add_columns(sums.index(which * 3 * P + k), dns[k] * x)
        add_columns(sums.index((which * 3 + 1) * P + k), dns[k])
        add_columns(sums.index((which * 3 + 2) * P + k), load_floats(tiles_g.index(place + k)) * keep[:, None])
    level = (level / C)[:, None]
    follow = (follow / C)[:, None]
    for k in gl.static_range(P):
        gl.thread_barrier()
        x = (load_floats(tiles_x.index(place + k)) - mean) * scale
        weight = across(vectors_ptr, 64 * k, 64, C)
        grad = load_floats(tiles_g.index(place + k)) + (dns[k] * weight - level - x * follow) * scale
        tiles_x.index(place + k).store(grad.to(kind))
        tiles_g.index(place + k).store((x * weight + across(vectors_ptr + C, 64 * k, 64, C)).to(kind))


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, bars, pointers, groups, rows, tokens, grid, eps,
    C: gl.constexpr, L1: gl.constexpr, LOW: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr,
    TILES: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    x_desc, grad_desc, out_desc, n_desc = descs[0], descs[1], descs[2], descs[5]
    tiles_x, tiles_g, sums = buffers[0], buffers[1], buffers[6]
    full_w, full_x = bars
    E_ptr, keep_ptr, vectors_ptr, n_ptr, sums_ptr = pointers
    P: gl.constexpr = C // 64
    kind: gl.constexpr = x_desc.dtype
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(64))
    for k in gl.static_range(3 * P):
        sums.index(which * 3 * P + k).store(gl.full([64], 0.0, gl.float32, columns))
    turn = 0
    group = gl.program_id(0)
    row = (group * GROUPS + which) * 64
    fetch_both(x_desc, grad_desc, row, full_x.index(which * TILES), tiles_x, tiles_g, which * TILES * P, C)
    if AHEAD:
        fetched = load_all(E_ptr, row, rows, grid, C, STRIDE // 2, False)
    mbarrier.wait(full_w, 0)
    while group < groups:
        row = (group * GROUPS + which) * 64
        ahead = row + gl.num_programs(0) * GROUPS * 64
        mine = which * TILES + turn % TILES
        place = mine * P
        if TILES == 2:
            other = which * 2 + (turn + 1) % 2
            tma.store_wait(0)
            gl.thread_barrier()  # all are done with the other tile
            fetch_both(x_desc, grad_desc, ahead, full_x.index(other), tiles_x, tiles_g, other * P, C)
        if not AHEAD:
            fetched = load_all(E_ptr, row, rows, grid, C, STRIDE // 2, False)
        dns = through_lift(which, descs, buffers, E_ptr, row, rows, grid, fetched, C, L1, LOW, STRIDE, STAGES)
        if AHEAD:
            fetched = load_all(E_ptr, ahead, rows, grid, C, STRIDE // 2, False)
        keep = row_zeros() + 1.0
        if DROP:
            index = row + gl.arange(0, 64, layout=rows_layout())
            keep = gl.load(keep_ptr + index // tokens, mask=index < rows, other=0.0)
        store_ones(n_ptr, row, rows, C, kind)
        dns = finish(dns, P)
        mbarrier.wait(full_x.index(mine), (turn // TILES) & 1)
        through_norm(tiles_x, tiles_g, place, sums, which, dns, keep, vectors_ptr, eps, C, kind)
        fence_async_shared()
        gl.thread_barrier()  # all have written, and said so to the copies
        for k in gl.static_range(P):
            tma.async_copy_shared_to_global(out_desc, [row, 64 * k], tiles_x.index(place + k))
            tma.async_copy_shared_to_global(n_desc, [row, 64 * k], tiles_g.index(place + k))
        if TILES == 1:
            tma.store_wait(0)
            gl.thread_barrier()
            fetch_both(x_desc, grad_desc, ahead, full_x.index(mine), tiles_x, tiles_g, place, C)
        turn += 1
        group += gl.num_programs(0)
    for k in gl.static_range(3 * P):
        where = (gl.program_id(0) * GROUPS + which) * 3 * C + 64 * k + gl.arange(0, 64, layout=columns)
        gl.store(sums_ptr + where, sums.index(which * 3 * P + k).load(columns))
    mbarrier.wait(full_x.index(which * TILES + turn % TILES), (turn // TILES) & 1)
    tma.store_wait(0)


@gluon.jit
def lift_back(
    x_desc, grad_desc, out_desc, du_desc, low_desc, n_desc, w_desc, w_low_desc,
    E_ptr, keep_ptr, vectors_ptr, n_ptr, sums_ptr, groups, rows, tokens, height, width, magic_height, magic_width, eps,
    C: gl.constexpr, L1: gl.constexpr, LOW: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr,
    TILES: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, DROP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradients of u and of x, the norm's output next to a column of ones, and sums."""
    P: gl.constexpr = C // 64
    kind: gl.constexpr = x_desc.dtype
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles_x = gl.allocate_shared_memory(kind, [GROUPS * TILES * P, 64, 64], x_desc.layout)
    tiles_g = gl.allocate_shared_memory(kind, [GROUPS * TILES * P, 64, 64], grad_desc.layout)
    tiles_u = gl.allocate_shared_memory(kind, [GROUPS * STAGES, 64, 64], du_desc.layout)
    if LOW < 64:
        tiles_low = gl.allocate_shared_memory(kind, [GROUPS, 64, LOW], low_desc.layout)
    else:
        tiles_low = tiles_u
    weights = gl.allocate_shared_memory(kind, [P * P, 64, 64], w_desc.layout)
    weights_low = gl.allocate_shared_memory(kind, [P, LOW, 64], w_low_desc.layout)
    sums = gl.allocate_shared_memory(gl.float32, [GROUPS * 3 * P, 64], one)
    full_w = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS * TILES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_w, count=1)
    for i in gl.static_range(GROUPS * TILES):
        mbarrier.init(full_x.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(full_w, (C + LOW) * C * 2)
    for c in gl.static_range(P):
        for k in gl.static_range(P):
            tma.async_copy_global_to_shared(w_desc, [64 * k, 64 * c], full_w, weights.index(k * P + c))
        # rows past the last are zeros
        tma.async_copy_global_to_shared(w_low_desc, [C, 64 * c], full_w, weights_low.index(c))
    descs = (x_desc, grad_desc, out_desc, du_desc, low_desc, n_desc)
    buffers = (tiles_x, tiles_g, tiles_u, tiles_low, weights, weights_low, sums)
    bars = (full_w, full_x)
    pointers = (E_ptr, keep_ptr, vectors_ptr, n_ptr, sums_ptr)
    grid = (height, width, magic_height, magic_width)
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, descs, buffers, bars, pointers, groups, rows, tokens, grid, eps, C, L1, LOW, STRIDE, GROUPS,
                       TILES, STAGES, AHEAD, DROP)),
            (consume, (1, descs, buffers, bars, pointers, groups, rows, tokens, grid, eps, C, L1, LOW, STRIDE, GROUPS,
                       TILES, STAGES, AHEAD, DROP)),
        ], [4], [REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, descs, buffers, bars, pointers, groups, rows, tokens, grid, eps, C, L1, LOW, STRIDE, GROUPS,
                       TILES, STAGES, AHEAD, DROP)),
            (consume, (1, descs, buffers, bars, pointers, groups, rows, tokens, grid, eps, C, L1, LOW, STRIDE, GROUPS,
                       TILES, STAGES, AHEAD, DROP)),
            (consume, (2, descs, buffers, bars, pointers, groups, rows, tokens, grid, eps, C, L1, LOW, STRIDE, GROUPS,
                       TILES, STAGES, AHEAD, DROP)),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
