"""The way back through the norm ahead of the second Mu-Layer on Hopper: `P stack`, and of it what
`block_backward.norm_back` does.

Each processor runs its program for good. Two warps copy: one all that belongs to tokens, in the order in which it is
read, to a ring of tiles for each group of four warps; the other the stack, which stays in the cache and is shared by
the groups. A group takes 64 tokens, and while it is busy with the norm, what it multiplies next is on its way.
Sums over tokens are products too: a tile's transpose meets a matrix with a column of ones, and results stay in
registers until the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from multilinear.kernels.hopper_names import meet, store_tile
from multilinear.kernels.hopper_parts import (
    accumulator,
    along,
    halves,
    keep_vectors,
    kept,
    row_zeros,
    rows_layout,
    slot_of,
    start_ring,
    times_columns,
    zeros,
)
from multilinear.kernels.hopper_stream import produce_stack, produce_tokens


@gluon.jit
def tile_at(ring, which: gl.constexpr, item, TILES: gl.constexpr):
    return ring.index(which * TILES + item % TILES)


@gluon.jit
def await_tile(full, which: gl.constexpr, item, TILES: gl.constexpr):
    slot, phase = slot_of(item, TILES, False)
    mbarrier.wait(full.index(which * TILES + slot), phase)


@gluon.jit
def free_tile(empty, which: gl.constexpr, item, pred, TILES: gl.constexpr):
    """To be called when all four warps are done with it."""
    mbarrier.arrive(empty.index(which * TILES + item % TILES), count=1, pred=pred)


@gluon.jit
def settle(sums, left: gl.constexpr, COUNT: gl.constexpr):
    """Wait until only the last `left` products are on their way."""
    if COUNT == 1:
        return (warpgroup_mma_wait(left, deps=sums),)
    else:
        return warpgroup_mma_wait(left, deps=sums)


@gluon.jit
def add_up(tile, column, sums):
    """Start adding `tile' column` to `sums`."""
    return warpgroup_mma(tile.permute((1, 0)), column, sums, is_async=True)


@gluon.jit
def multiply(
    which: gl.constexpr, buffers, bars, dns, item, step, held, FIRST: gl.constexpr,
    C: gl.constexpr, J: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Start adding the product of a tile of P and its rows of the stack; what came before it is over then, and the tile
    before it free if it is not held."""
    ring, wides, narrows = buffers[0], buffers[1], buffers[2]
    full, empty, full_s, empty_s = bars
    WIDE: gl.constexpr = C // 128
    COUNT: gl.constexpr = WIDE + (1 if C % 128 > 0 else 0)
    await_tile(full, which, item, TILES)
    for j in gl.static_range(64 // J):
        slot, phase = slot_of(step, SLOTS, False)
        mbarrier.wait(full_s.index(slot), phase)
        left = tile_at(ring, which, item, TILES).slice(j * J, J, 1)
        new = ()
        for k in gl.static_range(WIDE):
            new = new + (times_columns(left, wides.index(slot * WIDE + k), dns[k], FIRST and j == 0),)
        if C % 128 > 0:
            new = new + (times_columns(left, narrows.index(slot), dns[WIDE], FIRST and j == 0),)
        dns = settle(new, COUNT, COUNT)
        if not (FIRST and j == 0):
            meet()
            mbarrier.arrive(empty_s.index((step + SLOTS - 1) % SLOTS), count=1)
            if j == 0:
                free_tile(empty, which, item + TILES - 1, not held, TILES)
        step += 1
    return dns, step


@gluon.jit
def in_tiles(dns, C: gl.constexpr):
    """The product in pieces of 64 columns."""
    pieces = ()
    for k in gl.static_range(C // 128):
        pieces = pieces + halves(dns[k])
    if C % 128 > 0:
        pieces = pieces + (dns[C // 128],)
    return pieces


@gluon.jit
def load(ring, which: gl.constexpr, item, TILES: gl.constexpr):
    return tile_at(ring, which, item, TILES).load(accumulator(64)).to(gl.float32)


@gluon.jit
def row_norm(ring, which: gl.constexpr, item, eps, C: gl.constexpr, TILES: gl.constexpr):
    """The mean of each row of x, and what makes its variance 1: from those of its pieces, so that each is read once."""
    total = row_zeros()
    inner = row_zeros()
    outer = row_zeros()
    for k in gl.static_range(C // 64):
        x = load(ring, which, item + k, TILES)
        level = gl.sum(x, 1) / 64
        x -= level[:, None]
        inner += gl.sum(x * x, 1)
        if k > 0:  # by how much the mean so far differs from this one
            gap = total / k - level
            outer += gap * gap * (64 * k / (k + 1))
        total += level
    return total / (C // 64), gl.rsqrt((inner + outer) / C + eps)


@gluon.jit
def columns_of(first, second, third, kind: gl.constexpr):
    """A number for each row in each of the columns 0, 1 and 2, of the last in column 3 what its rounding loses."""
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, accumulator(16)))[None, :]
    stored = third.to(kind).to(gl.float32)
    out = gl.where(j == 0, along(first, 16), 0.0)
    out = gl.where(j == 1, along(second, 16), out)
    out = gl.where(j == 2, along(stored, 16), out)
    return gl.where(j == 3, along(third - stored, 16), out).to(kind)


@gluon.jit
def to_norm(
    which: gl.constexpr, ring, selects, empty, dns, sums, item, mean, scale, vectors,
    C: gl.constexpr, TILES: gl.constexpr, kind: gl.constexpr,
):  # fmt: skip
    """Means of each row that the norm takes off; and the sums for the gradients of its weight and bias, by way of the
    last two tiles of P, which this group alone has read."""
    along_tile = tile_at(ring, which, item + TILES - 2, TILES)
    level_tile = tile_at(ring, which, item + TILES - 1, TILES)
    level = row_zeros()
    follow = row_zeros()
    done = ()
    pending = sums[0]
    for k in gl.static_range(C // 64):
        x = (load(ring, which, item + k, TILES) - mean[:, None]) * scale[:, None]
        weighted = dns[k] * kept(vectors, k, 64)
        level += gl.sum(weighted, 1)
        follow += gl.sum(weighted * x, 1)
        product = (dns[k] * x).to(kind)
        if k > 0:
            done = done + (warpgroup_mma_wait(0, deps=[pending]),)
        meet()  # no warp reads the tiles any more
        along_tile.store(product)
        level_tile.store(dns[k].to(kind))
        fence_async_shared()
        meet()
        pending = add_up(along_tile, selects.index(0), sums[k])
        pending = add_up(level_tile, selects.index(1), pending)
    done = done + (warpgroup_mma_wait(0, deps=[pending]),)
    meet()
    free_tile(empty, which, item + TILES - 2, True, TILES)
    free_tile(empty, which, item + TILES - 1, True, TILES)
    return level / C, follow / C, done


@gluon.jit
def to_input(
    which: gl.constexpr, ring, select, full, empty, dns, sums, item, mean, scale, level, follow, vectors,
    C: gl.constexpr, TILES: gl.constexpr, kind: gl.constexpr,
):  # fmt: skip
    """Put the gradient of x where that of the output was, whose sums are taken first: tiles of x are the older ones in
    the ring, so it can go on when they are free."""
    P: gl.constexpr = C // 64
    done = ()
    for k in gl.static_range(P):
        await_tile(full, which, item + P + k, TILES)
        pending = add_up(tile_at(ring, which, item + P + k, TILES), select, sums[k])
        grad = load(ring, which, item + P + k, TILES)
        x = (load(ring, which, item + k, TILES) - mean[:, None]) * scale[:, None]
        dn = dns[k] * kept(vectors, k, 64) - level[:, None] - x * follow[:, None]
        out = (grad + dn * scale[:, None]).to(kind)
        done = done + (warpgroup_mma_wait(0, deps=[pending]),)
        meet()  # no warp reads either tile any more
        free_tile(empty, which, item + k, True, TILES)
        tile_at(ring, which, item + P + k, TILES).store(out)
    fence_async_shared()
    meet()  # all have written, and said so to the copies
    return done


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, bars, pointers, groups, rows, tokens, eps,
    C: gl.constexpr, SP: gl.constexpr, J: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr,
    SLOTS: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    out_desc = descs[3]
    ring, selects, vectors = buffers[0], buffers[3], buffers[4]
    full, empty, empty_s = bars[0], bars[1], bars[3]
    keep_ptr, sums_ptr = pointers
    P: gl.constexpr = C // 64
    WIDE: gl.constexpr = C // 128
    COUNT: gl.constexpr = WIDE + (1 if C % 128 > 0 else 0)
    CHUNKS: gl.constexpr = (SP + 63) // 64
    kind: gl.constexpr = out_desc.dtype
    select = selects.index(2 + which if DROP else 2)
    sums = ()
    for k in gl.static_range(P):
        sums = sums + (zeros(16),)
    item = 0
    step = 0
    group = gl.program_id(0)
    while group < groups:
        row = (group * GROUPS + which) * 64
        keep = row_zeros()
        if DROP:
            index = row + gl.arange(0, 64, layout=rows_layout())
            keep = gl.load(keep_ptr + index // tokens, mask=index < rows, other=0.0)
        dns = ()
        for k in gl.static_range(WIDE):
            dns = dns + (zeros(128),)
        if C % 128 > 0:
            dns = dns + (zeros(64),)
        dns, step = multiply(which, buffers, bars, dns, item, step, True, True, C, J, TILES, SLOTS)
        # by now the gradient of x that was put down last has left its tiles
        tma.store_wait(0)
        meet()
        for k in gl.static_range(P):
            free_tile(empty, which, item + TILES - P + k, item > 0, TILES)
        for i in range(1, CHUNKS):
            held = i == CHUNKS - 1
            dns, step = multiply(which, buffers, bars, dns, item + i, step, held, False, C, J, TILES, SLOTS)
        dns = settle(dns, 0, COUNT)
        meet()
        mbarrier.arrive(empty_s.index((step + SLOTS - 1) % SLOTS), count=1)
        item += CHUNKS
        pieces = in_tiles(dns, C)
        if DROP:  # the sums that read the one before are over
            select.store(columns_of(row_zeros(), row_zeros(), keep, kind))
        for k in gl.static_range(P):
            await_tile(full, which, item + k, TILES)
        mean, scale = row_norm(ring, which, item, eps, C, TILES)
        meet()  # or the tiles would stay in registers from here on
        level, follow, sums = to_norm(
            which, ring, selects, empty, pieces, sums, item, mean, scale, vectors, C, TILES, kind
        )  # fmt: skip
        sums = to_input(
            which, ring, select, full, empty, pieces, sums, item, mean, scale, level, follow, vectors, C, TILES,
            kind,
        )  # fmt: skip
        for k in gl.static_range(P):
            store_tile(out_desc, [row, 64 * k], tile_at(ring, which, item + P + k, TILES))
        item += 2 * P
        group += gl.num_programs(0)
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, accumulator(16)))[None, :]
    channel = gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(16)))
    place = sums_ptr + (gl.program_id(0) * GROUPS + which) * 3 * C + channel
    for k in gl.static_range(P):
        gl.store(place + 64 * k, gl.sum(gl.where(j == 0, sums[k], 0.0), 1))
        gl.store(place + C + 64 * k, gl.sum(gl.where(j == 1, sums[k], 0.0), 1))
        gl.store(place + 2 * C + 64 * k, gl.sum(gl.where((j == 2) | (j == 3), sums[k], 0.0), 1))
    tma.store_wait(0)


@gluon.jit
def norm_back(
    p_desc, x_desc, grad_desc, out_desc, wide_desc, narrow_desc, keep_ptr, vectors_ptr, sums_ptr, groups, rows, tokens,
    eps, C: gl.constexpr, SP: gl.constexpr, J: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr,
    SLOTS: gl.constexpr, DROP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradient of x; a line for each group of each program with sums for those of the norm's weight and bias and of
    the layer's last bias."""
    REST: gl.constexpr = C % 128
    gl.static_assert(TILES >= C // 64 + 2)  # of P two and of x all are held at a time
    gl.static_assert(SLOTS >= 2)
    gl.static_assert(GROUPS == 2)
    kind: gl.constexpr = x_desc.dtype
    column: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(kind, [GROUPS * TILES, 64, 64], x_desc.layout)
    wides = gl.allocate_shared_memory(kind, [SLOTS * (C // 128), J, 128], wide_desc.layout)
    narrows = gl.allocate_shared_memory(kind, [SLOTS if REST > 0 else 1, J if REST > 0 else 8, 64], narrow_desc.layout)
    selects = gl.allocate_shared_memory(kind, [2 + GROUPS if DROP else 3, 64, 16], column)
    full = gl.allocate_shared_memory(gl.int64, [GROUPS * TILES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [GROUPS * TILES, 1], mbarrier.MBarrierLayout())
    full_s = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty_s = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, GROUPS * TILES, 1, False)
    start_ring(full_s, empty_s, SLOTS, GROUPS, False)
    none = row_zeros()
    selects.index(0).store(columns_of(none + 1.0, none, none, kind))
    selects.index(1).store(columns_of(none, none + 1.0, none, kind))
    if not DROP:
        selects.index(2).store(columns_of(none, none, none + 1.0, kind))
    vectors = keep_vectors(vectors_ptr, C, 64, C // 64)
    fence_async_shared()
    meet()
    descs = (p_desc, x_desc, grad_desc, out_desc, wide_desc, narrow_desc)
    buffers = (ring, wides, narrows, selects, vectors)
    bars = (full, empty, full_s, empty_s)
    pointers = (keep_ptr, sums_ptr)
    gl.warp_specialize([
        (consume, (0, descs, buffers, bars, pointers, groups, rows, tokens, eps, C, SP, J, GROUPS, TILES, SLOTS,
                   DROP)),
        (consume, (1, descs, buffers, bars, pointers, groups, rows, tokens, eps, C, SP, J, GROUPS, TILES, SLOTS,
                   DROP)),
        (produce_tokens, (descs, buffers, bars, groups, C, SP, GROUPS, TILES)),
        (produce_stack, (descs, buffers, bars, groups, C, SP, J, SLOTS)),
    ], [4, 1, 1], [REGISTERS, 24, 24])  # fmt: skip
