"""The second Mu-Layer on Hopper: the same as `block_forward.mu2`, with products that overlap all else.

Each processor runs one program for good. One warp copies weights into a ring of tiles, or once and for all if they fit;
two or three groups of four warps take 64 tokens each and share what comes. While a chunk of the hidden width goes on to
the output the next one is multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_names import meet, store_tile
from multilinear.kernels.hopper_parts import (
    accumulator,
    extras,
    fetch,
    keep_vectors,
    kept,
    normed,
    operand,
    piece_width,
    release,
    resident,
    row_norm,
    row_zeros,
    rows_layout,
    slot_of,
    start_ring,
    store_columns,
    sum_rows,
    times,
    zeros,
)
from multilinear.kernels.hopper_stream import produce


@gluon.jit
def both_branches(
    ns, ds, extra, buffers, slot, P: gl.constexpr, P2: gl.constexpr, PIECES: gl.constexpr, J: gl.constexpr
):  # fmt: skip
    """A chunk of both branches, ahead of their scales, on its way."""
    _, tiles_a, tiles_e, tiles_b, tiles_t, _, _ = buffers
    first = zeros(J)
    for k in gl.static_range(P):
        first = times(ns[k], tiles_a.index(slot * P + k), first, k == 0)
    first = times(extra, tiles_e.index(slot), first, False)
    second = zeros(J)
    for q in gl.static_range(PIECES):
        if q < P2:
            second = times(ds[q], tiles_b.index(slot * P2 + q), second, q == 0)
        else:
            second = times(ds[q], tiles_t.index(slot), second, q == 0)
    return first, second


@gluon.jit
def finished(ys, h, P: gl.constexpr):
    """Wait for the products with h, which must stay where it is until then."""
    if P == 1:
        y0, h = warpgroup_mma_wait(0, deps=[ys[0], h])
        return (y0,)
    elif P == 2:
        y0, y1, h = warpgroup_mma_wait(0, deps=[ys[0], ys[1], h])
        return (y0, y1)
    elif P == 3:
        y0, y1, y2, h = warpgroup_mma_wait(0, deps=[ys[0], ys[1], ys[2], h])
        return (y0, y1, y2)
    else:
        y0, y1, y2, y3, h = warpgroup_mma_wait(0, deps=[ys[0], ys[1], ys[2], ys[3], h])
        return (y0, y1, y2, y3)


@gluon.jit
def add_output(ys, h, tiles_c, slot, P: gl.constexpr):
    new = ()
    for k in gl.static_range(P):
        new = new + (times(h, tiles_c.index(slot * P + k), ys[k], False),)
    return new


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, held, bars, pointers, groups, rows, tokens, eps,
    C: gl.constexpr, R2: gl.constexpr, L2: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr, STAGED: gl.constexpr, STAGED_LOW: gl.constexpr,
    SPARE: gl.constexpr, TRAIN: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    x_desc, out_desc, n_desc = descs[0], descs[1], descs[2]
    tiles_x, tiles_a, _, tiles_b, tiles_t, tiles_c, tiles_d = buffers
    full, empty, full_c, empty_c, full_x = bars
    keep_ptr, n_ptr, d_ptr, stats_ptr, constants_ptr = pointers
    constant_a, constant_b = gl.load(constants_ptr), gl.load(constants_ptr + 1)
    vectors, bias, linear, low_bias, low_linear = held
    P: gl.constexpr = C // 64
    PIECES: gl.constexpr = P2 + (1 if TAIL > 0 else 0)
    RESIDENT: gl.constexpr = resident(C, R2, J, PIECES, True, SLOTS, SLOTS_C)
    kind: gl.constexpr = x_desc.dtype
    # with a second tile x stays until it is added to, and the next one is fetched ahead: where n was if that is staged
    TILES_X: gl.constexpr = 2 if SPARE else 1
    item = 0
    item_c = 0
    turn = 0
    group = gl.program_id(0)
    if SPARE:
        fetch(x_desc, (group * GROUPS + which) * 64, full_x.index(which * 2), tiles_x, which * 2 * P, C)
    while group < groups:
        row = (group * GROUPS + which) * 64
        mine = which * TILES_X + turn % TILES_X
        other = which * TILES_X + (turn + 1) % TILES_X
        place = mine * P
        if SPARE:
            mbarrier.wait(full_x.index(mine), (turn // 2) & 1)
        else:
            tma.store_wait(0)
            fetch(x_desc, row, full_x.index(mine), tiles_x, place, C)
            mbarrier.wait(full_x.index(mine), 0)
        mean, scale = row_norm(tiles_x, place, eps, C)
        if STAGED and SPARE:
            tma.store_wait(0)
            meet()
        index = gl.arange(0, 64, layout=rows_layout())
        live = row + index < rows
        ns = ()
        for k in gl.static_range(P):
            n = normed(tiles_x, place, mean, scale, vectors, k, C, kind)
            if STAGED:
                tiles_x.index(other * P + k).store(n)
                ns = ns + (tiles_x.index(other * P + k),)
            else:
                ns = ns + (gl.convert_layout(n, operand()),)
        if STAGED:
            fence_async_shared()
            if TRAIN:
                for k in gl.static_range(P):
                    store_tile(n_desc, [row, 64 * k], tiles_x.index(other * P + k))
        # the variance of the first branch
        form = row_zeros() + constant_a
        for c in gl.static_range(C // J):
            slot, phase = slot_of(item, SLOTS, RESIDENT)
            mbarrier.wait(full.index(slot), phase)
            part = zeros(J)
            for k in gl.static_range(P):
                part = times(ns[k], tiles_a.index(slot * P + k), part, k == 0)
            part = warpgroup_mma_wait(0, deps=[part])
            release(empty, slot, RESIDENT)
            item += 1
            if STAGED:
                n = tiles_x.index(other * P + c * J // 64).slice(c * J % 64, J, 1).load(accumulator(J))
            else:
                n = gl.convert_layout(ns[c], accumulator(J))
            form += sum_rows((part + kept(linear, c, J)) * n.to(gl.float32))
        scale_a = gl.rsqrt(gl.maximum(form, 0.0) / R2 + eps)
        # the low rank and the variance of the second branch
        low = ()
        for p in gl.static_range(PIECES):
            slot, phase = slot_of(item, SLOTS, RESIDENT)
            mbarrier.wait(full.index(slot), phase)
            part = zeros(piece_width(p, P2, J, TAIL))
            for k in gl.static_range(P):
                right = tiles_a.index(slot * P + k).slice(0, piece_width(p, P2, J, TAIL), 0)
                part = times(ns[k], right, part, k == 0)
            part = warpgroup_mma_wait(0, deps=[part])
            release(empty, slot, RESIDENT)
            item += 1
            low = low + ((part + kept(low_bias, p, piece_width(p, P2, J, TAIL))).to(kind),)
        form = row_zeros() + constant_b
        for p in gl.static_range(PIECES):
            slot, phase = slot_of(item, SLOTS, RESIDENT)
            mbarrier.wait(full.index(slot), phase)
            part = zeros(piece_width(p, P2, J, TAIL))
            for q in gl.static_range(PIECES):
                if q < P2:
                    right = tiles_b.index(slot * P2 + q)
                else:
                    right = tiles_t.index(slot)
                right = right.slice(0, piece_width(p, P2, J, TAIL), 0)
                part = times(gl.convert_layout(low[q], operand()), right, part, q == 0)
            part = warpgroup_mma_wait(0, deps=[part])
            release(empty, slot, RESIDENT)
            item += 1
            part = (part + kept(low_linear, p, piece_width(p, P2, J, TAIL))) * low[p].to(gl.float32)
            form += sum_rows(part)
        scale_b = gl.rsqrt(gl.maximum(form, 0.0) / R2 + eps)
        extra = extras(scale_a, 0, 16, kind).to(kind)
        keep = row_zeros() + 1.0
        if DROP:
            keep = gl.load(keep_ptr + (row + index) // tokens, mask=live, other=0.0)
        both = scale_a * scale_b * keep
        if TRAIN:
            gl.store(stats_ptr + (row + index) * 3, scale_a, mask=live)
            gl.store(stats_ptr + (row + index) * 3 + 1, scale_b, mask=live)
            gl.store(stats_ptr + (row + index) * 3 + 2, both, mask=live)
            store_columns(n_ptr, row, rows, C, extra, 16, C + 16, C + 16)
        ds = ()
        for p in gl.static_range(PIECES):
            d = low[p]
            if L2 + 5 > J * p and L2 < J * p + piece_width(p, P2, J, TAIL):
                d = (d.to(gl.float32) + extras(scale_b, L2 - J * p, piece_width(p, P2, J, TAIL), kind)).to(kind)
            if TRAIN:
                store_columns(d_ptr, row, rows, J * p, d, piece_width(p, P2, J, TAIL), L2 + 16, L2 + 16)
            if STAGED_LOW:
                tile = tiles_d.index(which * PIECES + p).slice(0, piece_width(p, P2, J, TAIL), 1)
                tile.store(d)
                ds = ds + (tile,)
            else:
                ds = ds + (gl.convert_layout(d, operand()),)
        if STAGED_LOW:
            fence_async_shared()
        if TRAIN:
            if J * P2 + TAIL < L2 + 16:
                store_columns(d_ptr, row, rows, J * P2 + TAIL, zeros(16).to(kind), 16, L2 + 16, L2 + 16)
        extra = gl.convert_layout(extra, operand())
        if not STAGED:
            ahead = group + gl.num_programs(0)
            if ahead < groups:
                tma.store_wait(0)
                fetch(x_desc, (ahead * GROUPS + which) * 64, full_x.index(other), tiles_x, other * P, C)
        slot, phase = slot_of(item, SLOTS, RESIDENT)
        mbarrier.wait(full.index(slot), phase)
        first, second = both_branches(ns, ds, extra, buffers, slot, P, P2, PIECES, J)
        first, second = warpgroup_mma_wait(0, deps=[first, second])
        release(empty, slot, RESIDENT)
        item += 1
        h = gl.convert_layout((first * second).to(kind), operand())
        ys = ()
        for k in gl.static_range(P):
            ys = ys + (zeros(64),)
        for _chunk in range(1, R2 // J):
            slot, phase = slot_of(item, SLOTS, RESIDENT)
            mbarrier.wait(full.index(slot), phase)
            first, second = both_branches(ns, ds, extra, buffers, slot, P, P2, PIECES, J)
            slot_c, phase_c = slot_of(item_c, SLOTS_C, RESIDENT)
            mbarrier.wait(full_c.index(slot_c), phase_c)
            ys = add_output(ys, h, tiles_c, slot_c, P)
            first, second = warpgroup_mma_wait(P, deps=[first, second])
            release(empty, slot, RESIDENT)
            item += 1
            product = (first * second).to(kind)
            ys = finished(ys, h, P)
            release(empty_c, slot_c, RESIDENT)
            item_c += 1
            h = gl.convert_layout(product, operand())
        if STAGED:  # in place of n comes the next x, or x once more
            tma.store_wait(0)
            meet()
            ahead = group + gl.num_programs(0)
            if not SPARE:
                fetch(x_desc, row, full_x.index(mine), tiles_x, place, C)
            elif ahead < groups:
                fetch(x_desc, (ahead * GROUPS + which) * 64, full_x.index(other), tiles_x, other * P, C)
        slot_c, phase_c = slot_of(item_c, SLOTS_C, RESIDENT)
        mbarrier.wait(full_c.index(slot_c), phase_c)
        ys = finished(add_output(ys, h, tiles_c, slot_c, P), h, P)
        release(empty_c, slot_c, RESIDENT)
        item_c += 1
        if not SPARE:
            mbarrier.wait(full_x.index(mine), 1)
        for k in gl.static_range(P):
            tile = tiles_x.index(place + k)
            x = tile.load(accumulator(64)).to(gl.float32) + ys[k] * both[:, None]
            tile.store((x + keep[:, None] * kept(bias, k, 64)).to(kind))
        fence_async_shared()
        for k in gl.static_range(P):
            store_tile(out_desc, [row, 64 * k], tiles_x.index(place + k))
        turn += 1
        group += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit
def mu2(
    x_desc, out_desc, n_desc, a_desc, e_desc, b_desc, t_desc, c_desc, g_desc, d_desc, h_desc, i_desc,
    keep_ptr, n_ptr, d_ptr, stats_ptr, vectors_ptr, groups, rows, tokens, eps,
    C: gl.constexpr, R2: gl.constexpr, L2: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr, STAGED: gl.constexpr, STAGED_LOW: gl.constexpr,
    SPARE: gl.constexpr, FORMS: gl.constexpr, TRAIN: gl.constexpr, DROP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """x plus the second Mu-Layer of norm(x); in training also what its branches read, n and d next to their extras."""
    P: gl.constexpr = C // 64
    PIECES: gl.constexpr = P2 + (1 if TAIL > 0 else 0)
    RESIDENT: gl.constexpr = resident(C, R2, J, PIECES, True, SLOTS, SLOTS_C)
    TILES_X: gl.constexpr = GROUPS * (2 if SPARE else 1)
    kind: gl.constexpr = x_desc.dtype
    tiles_x = gl.allocate_shared_memory(kind, [TILES_X * P, 64, 64], x_desc.layout)
    tiles_a = gl.allocate_shared_memory(kind, [SLOTS * P, J, 64], a_desc.layout)
    tiles_e = gl.allocate_shared_memory(kind, [SLOTS, J, 16], e_desc.layout)
    tiles_b = gl.allocate_shared_memory(kind, [SLOTS * P2 if P2 > 0 else 1, J, J], b_desc.layout)
    tiles_t = gl.allocate_shared_memory(kind, [SLOTS if TAIL > 0 else 1, J, TAIL if TAIL > 0 else 16], t_desc.layout)
    tiles_c = gl.allocate_shared_memory(kind, [SLOTS_C * P, 64, J], c_desc.layout)
    tiles_d = gl.allocate_shared_memory(kind, [GROUPS * PIECES if STAGED_LOW else 1, 64, J], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    empty_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [TILES_X, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, SLOTS, GROUPS, RESIDENT)
    start_ring(full_c, empty_c, SLOTS_C, GROUPS, RESIDENT)
    for i in gl.static_range(TILES_X):
        mbarrier.init(full_x.index(i), count=1)
    fence_async_shared()
    descs = (x_desc, out_desc, n_desc, a_desc, e_desc, b_desc, t_desc, c_desc, g_desc, d_desc, h_desc, i_desc)
    buffers = (tiles_x, tiles_a, tiles_e, tiles_b, tiles_t, tiles_c, tiles_d)
    bars = (full, empty, full_c, empty_c, full_x)
    forms_ptr = vectors_ptr + FORMS
    held = (
        keep_vectors(vectors_ptr, 2 * C, 64, 2 * P), keep_vectors(vectors_ptr + 3 * C, C, 64, P),
        keep_vectors(forms_ptr, C, J, C // J), keep_vectors(forms_ptr + C, L2, J, PIECES),
        keep_vectors(forms_ptr + C + L2, L2, J, PIECES),
    )  # fmt: skip
    meet()
    pointers = (keep_ptr, n_ptr, d_ptr, stats_ptr, forms_ptr + C + 2 * L2)
    # numbers that are known to the compiler stay so in tuples only where these are written
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, descs, buffers, held, bars, pointers, groups, rows, tokens, eps, C, R2, L2, P2, TAIL, J,
                       GROUPS, SLOTS, SLOTS_C, STAGED, STAGED_LOW, SPARE, TRAIN, DROP)),
            (consume, (1, descs, buffers, held, bars, pointers, groups, rows, tokens, eps, C, R2, L2, P2, TAIL, J,
                       GROUPS, SLOTS, SLOTS_C, STAGED, STAGED_LOW, SPARE, TRAIN, DROP)),
            (produce, (descs, buffers, bars, groups, C, R2, P2, TAIL, J, SLOTS, SLOTS_C)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, descs, buffers, held, bars, pointers, groups, rows, tokens, eps, C, R2, L2, P2, TAIL, J,
                       GROUPS, SLOTS, SLOTS_C, STAGED, STAGED_LOW, SPARE, TRAIN, DROP)),
            (consume, (1, descs, buffers, held, bars, pointers, groups, rows, tokens, eps, C, R2, L2, P2, TAIL, J,
                       GROUPS, SLOTS, SLOTS_C, STAGED, STAGED_LOW, SPARE, TRAIN, DROP)),
            (consume, (2, descs, buffers, held, bars, pointers, groups, rows, tokens, eps, C, R2, L2, P2, TAIL, J,
                       GROUPS, SLOTS, SLOTS_C, STAGED, STAGED_LOW, SPARE, TRAIN, DROP)),
            (produce, (descs, buffers, bars, groups, C, R2, P2, TAIL, J, SLOTS, SLOTS_C)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
