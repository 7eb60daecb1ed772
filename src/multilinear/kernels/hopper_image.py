"""The first Mu-Layer on Hopper for images of 8x8 tokens: what `hopper_lift` and `hopper_mu1` do at once, since a tile
has all that is shifted into it.

Eight warps take two images. That is one program for both, where two groups of warps would have one each, of code that
is too long for the cache of instructions. There are two places for tiles: one holds x, and in the end the output; the
other one u, which is shifted there, and after it x of the next images. A ninth warp copies weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_mu1 import hidden, put_output, store_stats
from multilinear.kernels.hopper_names import load_tile, meet, reinterpret, store_tile
from multilinear.kernels.hopper_parts import (
    fetch,
    keep_vectors,
    kept,
    load_rows,
    operand,
    release,
    row_zeros,
    rows_layout,
    slot_of,
    start_ring,
    times,
    zeros,
)
from multilinear.kernels.hopper_stream import claim, put
from multilinear.kernels.hopper_unshift import from_left, from_right, has, held, of_quarter, pairs_at


@gluon.jit
def moved(lines, place, first: gl.constexpr, PAIRS: gl.constexpr):
    """The tile that begins at a line, its quarters from above, below, left and right; at the border it stays."""
    layout: gl.constexpr = held(32, 128)
    token = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))[:, None] % 64
    here = pairs_at(lines, place, 32, 128).load(layout)
    out = here
    if has(0, first, 32, PAIRS):
        above = gl.where(token >= 8, pairs_at(lines, place - 1, 32, 128).load(layout), here)
        out = of_quarter(0, first, above, out, PAIRS)
    if has(1, first, 32, PAIRS):
        below = gl.where(token < 56, pairs_at(lines, place + 1, 32, 128).load(layout), here)
        out = of_quarter(1, first, below, out, PAIRS)
    if has(2, first, 32, PAIRS):
        out = of_quarter(2, first, from_left(here), out, PAIRS)
    if has(3, first, 32, PAIRS):
        out = of_quarter(3, first, from_right(here), out, PAIRS)
    return out


@gluon.jit
def shift(lines, place, low, C: gl.constexpr, L1: gl.constexpr):
    """Shift a tile of u where it is, and its low rank."""
    P: gl.constexpr = C // 64
    new = ()
    for k in gl.static_range(P):
        new = new + (moved(lines, 16 * (place + k) + 1, 32 * k, C // 2),)
    new = new + (moved(lines, 16 * low + 1, 0, L1 // 2),)
    meet()  # all have read it
    for k in gl.static_range(P):
        pairs_at(lines, 16 * (place + k) + 1, 32, 128).store(new[k])
    pairs_at(lines, 16 * low + 1, 32, 128).store(new[P])
    fence_async_shared()
    meet()


@gluon.jit
def produce(descs, buffers, bars, groups, C: gl.constexpr, SLOTS: gl.constexpr):
    """Copy 64 rows of the matrix ahead of the shift after the other, then 64 columns of that at the end."""
    w_desc, c_desc = descs[3], descs[4]
    ring = buffers[2]
    full, empty = bars[0], bars[1]
    P: gl.constexpr = C // 64
    item = 0
    group = gl.program_id(0)
    while group < groups:
        for i in range(P + 1):
            item = put(w_desc, 64 * i, full, empty, ring, item, P, 64, SLOTS, False)
        for i in range(P):
            slot, phase = slot_of(item, SLOTS, False)
            claim(empty, slot, phase, False)
            mbarrier.expect(full.index(slot), C * 128)
            for k in gl.static_range(P):
                load_tile(c_desc, [64 * k, 64 * i], full.index(slot), ring.index(slot * P + k))
            item += 1
        group += gl.num_programs(0)


@gluon.jit
def lift_piece(ns, ring, bars, item, P: gl.constexpr, SLOTS: gl.constexpr):
    """64 columns of u, ahead of their bias, on their way."""
    slot, phase = slot_of(item, SLOTS, False)
    mbarrier.wait(bars[0].index(slot), phase)
    part = zeros(64, 128)
    for k in gl.static_range(P):
        part = times(ns[k], ring.index(slot * P + k), part, k == 0)
    return part


@gluon.jit
def lift_tile(ns, ring, bars, item, lifted, tiles, place, low, P: gl.constexpr, SLOTS: gl.constexpr):
    """Put u where it is shifted: each piece while the next is on its way."""
    part = lift_piece(ns, ring, bars, item, P, SLOTS)
    for i in gl.static_range(P + 1):
        if i < P:
            after = lift_piece(ns, ring, bars, item + 1, P, SLOTS)
            part = warpgroup_mma_wait(P, deps=[part])
        else:
            after = part
            part = warpgroup_mma_wait(0, deps=(part,) + ns)[0]
        release(bars[1], item % SLOTS, False)
        tile = tiles.index(place + i if i < P else low)
        tile.store((part + kept(lifted, i, 64, 128)).to(tile.dtype))
        part = after
        item += 1
    meet()
    return item


@gluon.jit
def second_branch(ds, weights_b, P: gl.constexpr, LOWS: gl.constexpr):
    """The second branch ahead of its bias, on its way."""
    qs = ()
    for k in gl.static_range(P):
        q = zeros(64, 128)
        for j in gl.static_range(LOWS):
            q = times(ds[j], weights_b.index(k * LOWS + j), q, j == 0)
        qs = qs + (q,)
    return qs


@gluon.jit
def add_hidden(ys, h, ring, bars, item, P: gl.constexpr, SLOTS: gl.constexpr):
    """Start adding what 64 hidden channels give to the output."""
    slot, phase = slot_of(item, SLOTS, False)
    mbarrier.wait(bars[0].index(slot), phase)
    new = ()
    for k in gl.static_range(P):
        new = new + (times(h, ring.index(slot * P + k), ys[k], False),)
    return new


@gluon.jit
def consume(
    descs, buffers, bars, pointers, groups, rows, eps,
    C: gl.constexpr, L1: gl.constexpr, SLOTS: gl.constexpr, TRAIN: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    x_desc, out_desc, u_desc = descs[0], descs[1], descs[2]
    lines, tiles, ring, weights_b, norm, lifted, vectors = buffers
    full_x, full_w = bars[2], bars[3]
    norms_ptr, stats_ptr, keep_ptr = pointers
    P: gl.constexpr = C // 64
    LOWS: gl.constexpr = (L1 + 15) // 16
    LOW: gl.constexpr = 2 * P
    kind: gl.constexpr = x_desc.dtype
    item = 0
    turn = 0
    group = gl.program_id(0)
    fetch(x_desc, group * 128, full_x.index(0), tiles, 0, C, 128)
    mbarrier.wait(full_w, 0)
    while group < groups:
        row = group * 128
        mine = turn % 2
        other = 1 - mine
        index = row + gl.arange(0, 128, layout=rows_layout(128))
        live = index < rows
        mbarrier.wait(full_x.index(mine), (turn // 2) & 1)
        xs, mean, scale = load_rows(tiles, mine * P, eps, C, 128)
        ns = ()
        for k in gl.static_range(P):
            n = (xs[k].to(gl.float32) - mean[:, None]) * scale[:, None]
            n = n * kept(norm, k, 64, 128) + kept(norm, P + k, 64, 128)
            ns = ns + (gl.convert_layout(n.to(kind), operand(128)),)
        tma.store_wait(0)
        meet()  # what was written from the other place has left
        item = lift_tile(ns, ring, bars, item, lifted, tiles, other * P, LOW, P, SLOTS)
        shift(lines, other * P, LOW, C, L1)
        ds = ()
        for j in gl.static_range(LOWS):
            ds = ds + (tiles.index(LOW).slice(16 * j, 16, 1).load(operand(128)),)
        qs = second_branch(ds, weights_b, P, LOWS)
        if TRAIN:
            for k in gl.static_range(P):
                store_tile(u_desc, [row, 64 * k], tiles.index(other * P + k))
            store_tile(u_desc, [row, C], tiles.index(LOW))  # past the last column it is cut off
            gl.store(norms_ptr + index, mean, mask=live)
            gl.store(norms_ptr + rows + index, scale, mask=live)
        keep = row_zeros(128) + 1.0
        if DROP:
            keep = gl.load(keep_ptr + index // 64, mask=live, other=0.0)
        _, mean, scale_a = load_rows(tiles, other * P, eps, C, 128)
        done = warpgroup_mma_wait(0, deps=qs + ds)
        qs = ()
        total = row_zeros(128)
        for k in gl.static_range(P):
            q = done[k] + kept(vectors, k, 64, 128)
            total += gl.sum(q * q, 1)
            qs = qs + (q,)
        scale_b = gl.rsqrt(total / C + eps)  # the mean is zero
        if TRAIN:
            store_stats(stats_ptr, index, live, (mean, scale_a, scale_b))
        meet()  # or tiles would stay in registers from here on
        ys = ()
        for k in gl.static_range(P):
            ys = ys + (zeros(64, 128),)
        h = hidden(tiles, other * P, qs[0], vectors, mean, scale_a, scale_b, 0, C, kind, 128)
        for i in gl.static_range(P):
            ys = add_hidden(ys, h, ring, bars, item, P, SLOTS)
            if i + 1 < P:
                after = hidden(tiles, other * P, qs[i + 1], vectors, mean, scale_a, scale_b, i + 1, C, kind, 128)
            else:
                after = h
            ys = warpgroup_mma_wait(0, deps=ys + (h,))[:P]
            release(bars[1], item % SLOTS, False)
            h = after
            item += 1
        tma.store_wait(0)
        fence_async_shared()
        meet()  # nothing reads u any more
        fetch(x_desc, row + gl.num_programs(0) * 128, full_x.index(other), tiles, other * P, C, 128)
        put_output(out_desc, tiles, mine * P, row, ys, norm, 2 * P, keep, C, 128)
        turn += 1
        group += gl.num_programs(0)
    mbarrier.wait(full_x.index(turn % 2), (turn // 2) & 1)
    tma.store_wait(0)


@gluon.jit
def first_layer(
    x_desc, out_desc, u_desc, w_desc, c_desc, b_desc, norms_ptr, stats_ptr, keep_ptr, vectors_ptr, groups, rows, eps,
    C: gl.constexpr, L1: gl.constexpr, BIAS: gl.constexpr, MU1: gl.constexpr,
    SLOTS: gl.constexpr, TRAIN: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    """x plus the first Mu-Layer; in training also u, shifted, and five numbers a row."""
    P: gl.constexpr = C // 64
    LOWS: gl.constexpr = (L1 + 15) // 16
    TILES: gl.constexpr = 2 * P + 1
    gl.static_assert(L1 <= 64 and L1 % 8 == 0)  # one tile, and whole pairs in each quarter
    kind: gl.constexpr = x_desc.dtype
    # tiles as lines of an image, one more at either end: what is above and below is read, and not taken
    lines = gl.allocate_shared_memory(kind, [16 * TILES + 2, 8, 64], x_desc.layout)
    tiles = reinterpret(lines.index(1), kind, [TILES, 128, 64], x_desc.layout)
    ring = gl.allocate_shared_memory(kind, [SLOTS * P, 64, 64], w_desc.layout)
    weights_b = gl.allocate_shared_memory(kind, [P * LOWS, 64, 16], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full_w = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    start_ring(full, empty, SLOTS, 1, False)
    mbarrier.init(full_w, count=1)
    for i in gl.static_range(2):
        mbarrier.init(full_x.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(full_w, 16 * LOWS * C * 2)
    for i in gl.static_range(P):
        for j in gl.static_range(LOWS):
            load_tile(b_desc, [64 * i, 16 * j], full_w, weights_b.index(i * LOWS + j))
    norm = keep_vectors(vectors_ptr, 3 * C, 64, 3 * P)  # and the bias at the end
    lifted = keep_vectors(vectors_ptr + BIAS, C + L1, 64, P + 1)
    vectors = keep_vectors(vectors_ptr + MU1, 5 * C, 64, 5 * P)
    meet()
    descs = (x_desc, out_desc, u_desc, w_desc, c_desc)
    buffers = (lines, tiles, ring, weights_b, norm, lifted, vectors)
    bars = (full, empty, full_x, full_w)
    pointers = (norms_ptr, stats_ptr, keep_ptr)
    gl.warp_specialize([
        (consume, (descs, buffers, bars, pointers, groups, rows, eps, C, L1, SLOTS, TRAIN, DROP)),
        (produce, (descs, buffers, bars, groups, C, SLOTS)),
    ], [1], [24])  # fmt: skip
