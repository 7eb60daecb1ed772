"""The second Mu-Layer on Hopper where a low rank of a quarter saves nothing: both of its matrices are merged into one,
and so each chunk of both branches comes out of a single product, twice as wide, with the same rows.

Variances are quadratic forms of n, of which blocks from the diagonal on suffice, those beyond it doubled. With frozen
weights they are sums of squares: of a branch with rows `[A | a]` that of an output is the square of `R [n; 1]` for the
triangular factor R, which has the same blocks. The output is added up on top of x, divided
by what the sum is multiplied with in the end, so that nothing is read twice. In training both branches are left for the
way back, each times the root of what multiplies their product. The weights have taken up scale and shift of the norm
ahead of them, which so only centres and divides. All else is as in `hopper_mu2`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_mu2 import add_output, finished
from multilinear.kernels.hopper_names import load_tile, meet, store_tile
from multilinear.kernels.hopper_parts import (
    accumulator,
    extras,
    fetch,
    halves,
    keep_vectors,
    kept,
    load_rows,
    operand,
    release,
    row_zeros,
    rows_layout,
    slot_of,
    start_ring,
    store_columns,
    store_own,
    sum_rows,
    times,
    zeros,
)
from multilinear.kernels.hopper_stream import put_both


@gluon.jit
def produce(
    descs, buffers, bars, groups, C: gl.constexpr, R2: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr
):  # fmt: skip
    """Copy the forms, row by row of blocks from the diagonal on, then chunk by chunk both branches and C."""
    both_desc, extra_desc, c_desc, form_desc = descs[3], descs[4], descs[5], descs[6]
    tiles_b, tiles_e, tiles_c = buffers[1], buffers[2], buffers[3]
    full, empty = bars[0], bars[1]
    P: gl.constexpr = C // 64
    item = 0
    item_c = 0
    group = gl.program_id(0)
    while group < groups:
        for c in gl.static_range(P):
            slot, phase = slot_of(item, SLOTS, False)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (P - c) * 128 * 128)
            for k in gl.static_range(c, P):
                load_tile(form_desc, [128 * c, 64 * k], full.index(slot), tiles_b.index(slot * P + k))
            item += 1
        for i in range(R2 // 64):
            item, item_c = put_both(
                both_desc, extra_desc, c_desc, tiles_b, tiles_e, tiles_c, bars, i, item, item_c, C, 64, SLOTS, SLOTS_C
            )
        group += gl.num_programs(0)


@gluon.jit
def product_of(x, on, kind: gl.constexpr, DROP: gl.constexpr):
    """Of both branches of a chunk, which stand in turns of 32; zero for tokens that are dropped."""
    left, right = halves(x, 2)
    if DROP:
        return (left * right * on[:, None]).to(kind)
    else:
        return (left * right).to(kind)


@gluon.jit
def store_apart(ptr, row, rows, i, x, root, kind: gl.constexpr, R2: gl.constexpr):
    """Both branches of a chunk, as the way back reads them."""
    left, right = halves(x, 2)
    store_own(ptr, row, rows, 128 * i, (right * root[:, None]).to(kind), 2 * R2)
    store_own(ptr, row, rows, 128 * i + 64, (left * root[:, None]).to(kind), 2 * R2)


@gluon.jit
def leave(tile, x, desc, row, column):
    """Write by way of a tile, from which the one before has left."""
    tma.store_wait(0)
    meet()
    tile.store(x)
    fence_async_shared()
    meet()
    store_tile(desc, [row, column], tile)


@gluon.jit
def both_branches(ns, extra, tiles_b, tiles_e, slot, P: gl.constexpr):
    """A chunk of both branches, ahead of their scales, on its way."""
    out = zeros(128)
    for k in gl.static_range(P):
        out = times(ns[k], tiles_b.index(slot * P + k), out, k == 0)
    return times(extra, tiles_e.index(slot), out, False)


@gluon.jit
def load_normed(tiles, place, eps, C: gl.constexpr, kind: gl.constexpr):
    """Put x, with mean 0 and variance 1, where x is, which stays in registers; and what makes its variance 1."""
    xs, mean, scale = load_rows(tiles, place, eps, C)
    for k in gl.static_range(C // 64):
        tiles.index(place + k).store(((xs[k].to(gl.float32) - mean[:, None]) * scale[:, None]).to(kind))
    fence_async_shared()
    return xs, scale


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, bars, pointers, groups, rows, tokens, eps,
    C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr,
    ROOTS: gl.constexpr, TRAIN: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    x_desc, out_desc, n_desc = descs[0], descs[1], descs[2]
    tiles_x, tiles_b, tiles_e, tiles_c, tiles_o, bias, linear = buffers
    full, empty, full_c, empty_c, full_x = bars
    keep_ptr, n_ptr, branches_ptr, stats_ptr, constants_ptr = pointers
    constant_a, constant_b = gl.load(constants_ptr), gl.load(constants_ptr + 1)
    P: gl.constexpr = C // 64
    kind: gl.constexpr = x_desc.dtype
    item = 0
    item_c = 0
    turn = 0
    group = gl.program_id(0)
    bar, tile_o = full_x.index(which), tiles_o.index(which)
    fetch(x_desc, (group * GROUPS + which) * 64, bar, tiles_x, which * P, C)
    while group < groups:
        row = (group * GROUPS + which) * 64
        mbarrier.wait(bar, turn & 1)
        xs, unit = load_normed(tiles_x, which * P, eps, C, kind)
        ns = ()
        for k in gl.static_range(P):
            ns = ns + (tiles_x.index(which * P + k),)
        if TRAIN:
            meet()  # all have written, and said so to the copies
            for k in gl.static_range(P):
                store_tile(n_desc, [row, 64 * k], ns[k])
        form_a = row_zeros() + constant_a
        form_b = row_zeros() + constant_b
        for c in gl.static_range(P):
            slot, phase = slot_of(item, SLOTS, False)
            mbarrier.wait(full.index(slot), phase)
            part = zeros(128)
            for k in gl.static_range(c, P):
                part = times(ns[k], tiles_b.index(slot * P + k), part, k == c)
            part = warpgroup_mma_wait(0, deps=[part])
            release(empty, slot, False)
            item += 1
            part = part + kept(linear, c, 128)
            if ROOTS:
                part_a, part_b = halves(part * part)
            else:
                n = ns[c].load(accumulator(64)).to(gl.float32)
                part_a, part_b = halves(part)
                part_a, part_b = part_a * n, part_b * n
            form_a += sum_rows(part_a)
            form_b += sum_rows(part_b)
        scale_a = gl.rsqrt(gl.maximum(form_a, 0.0) / R2 + eps)
        scale_b = gl.rsqrt(gl.maximum(form_b, 0.0) / R2 + eps)
        both = scale_a * scale_b
        extra = (extras(scale_a, 0, 16, kind) + extras(scale_b, 5, 16, kind)).to(kind)
        index = row + gl.arange(0, 64, layout=rows_layout())
        keep = row_zeros() + 1.0
        if DROP:
            keep = gl.load(keep_ptr + index // tokens, mask=index < rows, other=0.0)
        if TRAIN:
            gl.store(stats_ptr + index * 4, scale_a, mask=index < rows)
            gl.store(stats_ptr + index * 4 + 1, scale_b, mask=index < rows)
            gl.store(stats_ptr + index * 4 + 2, both * keep, mask=index < rows)
            gl.store(stats_ptr + index * 4 + 3, unit, mask=index < rows)
            store_columns(n_ptr, row, rows, C, extra, 16, C + 16, C + 16)
        root = gl.sqrt(both * keep)
        on = gl.where(keep == 0.0, 0.0, 1.0)
        both = both * gl.where(keep == 0.0, 1.0, keep)  # x is divided by it, which is added up with nothing if dropped
        extra = gl.convert_layout(extra, operand())
        slot, phase = slot_of(item, SLOTS, False)
        mbarrier.wait(full.index(slot), phase)
        chunk = warpgroup_mma_wait(0, deps=[both_branches(ns, extra, tiles_b, tiles_e, slot, P)])
        release(empty, slot, False)
        item += 1
        h = gl.convert_layout(product_of(chunk, on, kind, DROP), operand())
        if TRAIN:
            store_apart(branches_ptr, row, rows, 0, chunk, root, kind, R2)
        ys = ()
        for k in gl.static_range(P):  # the output is added to x, which is so out of the way
            ys = ys + (xs[k].to(gl.float32) / both[:, None],)
        for i in range(1, R2 // 64):
            slot, phase = slot_of(item, SLOTS, False)
            mbarrier.wait(full.index(slot), phase)
            chunk = both_branches(ns, extra, tiles_b, tiles_e, slot, P)
            slot_c, phase_c = slot_of(item_c, SLOTS_C, False)
            mbarrier.wait(full_c.index(slot_c), phase_c)
            ys = add_output(ys, h, tiles_c, slot_c, P)
            chunk = warpgroup_mma_wait(P, deps=[chunk])
            release(empty, slot, False)
            item += 1
            product = product_of(chunk, on, kind, DROP)
            if TRAIN:
                store_apart(branches_ptr, row, rows, i, chunk, root, kind, R2)
            ys = finished(ys, h, P)
            release(empty_c, slot_c, False)
            item_c += 1
            h = gl.convert_layout(product, operand())
        if TRAIN:
            tma.store_wait(0)
        meet()  # nothing reads n any more
        ahead = group + gl.num_programs(0)
        if ahead < groups:
            fetch(x_desc, (ahead * GROUPS + which) * 64, bar, tiles_x, which * P, C)
        slot_c, phase_c = slot_of(item_c, SLOTS_C, False)
        mbarrier.wait(full_c.index(slot_c), phase_c)
        ys = finished(add_output(ys, h, tiles_c, slot_c, P), h, P)
        release(empty_c, slot_c, False)
        item_c += 1
        for k in gl.static_range(P):
            y = (ys[k] * both[:, None] + keep[:, None] * kept(bias, k, 64)).to(kind)
            leave(tile_o, y, out_desc, row, 64 * k)
        turn += 1
        group = ahead
    tma.store_wait(0)


@gluon.jit
def mu2_merged(
    x_desc, out_desc, n_desc, both_desc, extra_desc, c_desc, form_desc, keep_ptr, n_ptr, branches_ptr, stats_ptr,
    vectors_ptr, linear_ptr, groups, rows, tokens, eps,
    C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr,
    ROOTS: gl.constexpr, TRAIN: gl.constexpr, DROP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """x plus the second Mu-Layer of norm(x); in training also four numbers of each token, what its branches read, n
    next to the extras, and what they give, 64 columns of the second and of the first in turns, in the order of
    `own_columns`."""
    P: gl.constexpr = C // 64
    gl.static_assert(GROUPS == 2)
    kind: gl.constexpr = x_desc.dtype
    tiles_x = gl.allocate_shared_memory(kind, [GROUPS * P, 64, 64], x_desc.layout)
    tiles_b = gl.allocate_shared_memory(kind, [SLOTS * P, 128, 64], both_desc.layout)
    tiles_e = gl.allocate_shared_memory(kind, [SLOTS, 128, 16], extra_desc.layout)
    tiles_c = gl.allocate_shared_memory(kind, [SLOTS_C * P, 64, 64], c_desc.layout)
    tiles_o = gl.allocate_shared_memory(kind, [GROUPS, 64, 64], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    empty_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, SLOTS, GROUPS, False)
    start_ring(full_c, empty_c, SLOTS_C, GROUPS, False)
    for i in gl.static_range(GROUPS):
        mbarrier.init(full_x.index(i), count=1)
    fence_async_shared()
    descs = (x_desc, out_desc, n_desc, both_desc, extra_desc, c_desc, form_desc)
    bias = keep_vectors(vectors_ptr + 3 * C, C, 64, P)
    linear = keep_vectors(linear_ptr, 2 * C, 128, P)
    meet()
    buffers = (tiles_x, tiles_b, tiles_e, tiles_c, tiles_o, bias, linear)
    bars = (full, empty, full_c, empty_c, full_x)
    pointers = (keep_ptr, n_ptr, branches_ptr, stats_ptr, linear_ptr + 2 * C)
    gl.warp_specialize([
        (consume, (0, descs, buffers, bars, pointers, groups, rows, tokens, eps, C, R2, GROUPS, SLOTS, SLOTS_C,
                   ROOTS, TRAIN, DROP)),
        (consume, (1, descs, buffers, bars, pointers, groups, rows, tokens, eps, C, R2, GROUPS, SLOTS, SLOTS_C,
                   ROOTS, TRAIN, DROP)),
        (produce, (descs, buffers, bars, groups, C, R2, SLOTS, SLOTS_C)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
