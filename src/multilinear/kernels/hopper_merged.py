"""The second Mu-Layer on Hopper for inference, where a low rank of a quarter saves nothing: both of its matrices are
merged into one, and so each chunk of both branches comes out of a single product, twice as wide, with the same rows.

Variances are sums of squares: of a branch with rows `[A | a]` that of an output is the square of `R [n; 1]` for the
triangular factor R, of which a third is zero by blocks. All else is as in `hopper_mu2`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_mu2 import add_output, finished
from multilinear.kernels.hopper_parts import (
    accumulator,
    across,
    extras,
    fetch,
    normed,
    operand,
    release,
    row_norm,
    row_zeros,
    slot_of,
    start_ring,
    sum_rows,
    times,
    zeros,
)


@gluon.jit
def produce(
    descs, buffers, bars, groups, C: gl.constexpr, R2: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr
):  # fmt: skip
    """Copy the factors, row by row of blocks up to the diagonal, then chunk by chunk both branches and C."""
    both_desc, extra_desc, c_desc, root_desc = descs[2], descs[3], descs[4], descs[5]
    _, tiles_b, tiles_e, tiles_c = buffers
    full, empty, full_c, empty_c, _ = bars
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
                tma.async_copy_global_to_shared(
                    root_desc, [128 * c, 64 * k], full.index(slot), tiles_b.index(slot * P + k)
                )
            item += 1
        for i in range(R2 // 64):
            slot, phase = slot_of(item, SLOTS, False)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (C + 16) * 128 * 2)
            for k in gl.static_range(P):
                tma.async_copy_global_to_shared(
                    both_desc, [128 * i, 64 * k], full.index(slot), tiles_b.index(slot * P + k)
                )
            tma.async_copy_global_to_shared(extra_desc, [128 * i, C], full.index(slot), tiles_e.index(slot))
            item += 1
            slot_c, phase_c = slot_of(item_c, SLOTS_C, False)
            mbarrier.wait(empty_c.index(slot_c), phase_c ^ 1)
            mbarrier.expect(full_c.index(slot_c), C * 64 * 2)
            for k in gl.static_range(P):
                tma.async_copy_global_to_shared(
                    c_desc, [64 * k, 64 * i], full_c.index(slot_c), tiles_c.index(slot_c * P + k)
                )
            item_c += 1
        group += gl.num_programs(0)


@gluon.jit
def halves(x):
    """Both branches of a chunk: the same registers."""
    left, right = x.reshape([64, 2, 64]).permute((0, 2, 1)).split()
    layout: gl.constexpr = accumulator(64)
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def product_of(x, kind: gl.constexpr):
    left, right = halves(x)
    return (left * right).to(kind)


@gluon.jit
def both_branches(ns, extra, tiles_b, tiles_e, slot, P: gl.constexpr):
    """A chunk of both branches, ahead of their scales, on its way."""
    out = zeros(128)
    for k in gl.static_range(P):
        out = times(ns[k], tiles_b.index(slot * P + k), out, k == 0)
    return times(extra, tiles_e.index(slot), out, False)


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, bars, pointers, groups, eps,
    C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr,
    SPARE: gl.constexpr,
):  # fmt: skip
    x_desc, out_desc = descs[0], descs[1]
    tiles_x, tiles_b, tiles_e, tiles_c = buffers
    full, empty, full_c, empty_c, full_x = bars
    vectors_ptr, linear_ptr = pointers
    P: gl.constexpr = C // 64
    kind: gl.constexpr = x_desc.dtype
    # with a second tile x stays until it is added to, and the next one comes where n was
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
        if SPARE:
            tma.store_wait(0)
            gl.thread_barrier()
        ns = ()
        for k in gl.static_range(P):
            tiles_x.index(other * P + k).store(normed(tiles_x, place, mean, scale, vectors_ptr, k, C, kind))
            ns = ns + (tiles_x.index(other * P + k),)
        fence_async_shared()
        form_a = row_zeros() + gl.load(linear_ptr + 2 * C)
        form_b = row_zeros() + gl.load(linear_ptr + 2 * C + 1)
        for c in gl.static_range(P):
            slot, phase = slot_of(item, SLOTS, False)
            mbarrier.wait(full.index(slot), phase)
            part = zeros(128)
            for k in gl.static_range(c, P):
                part = times(ns[k], tiles_b.index(slot * P + k), part, k == c)
            part = warpgroup_mma_wait(0, deps=[part])
            release(empty, slot, False)
            item += 1
            part = part + across(linear_ptr, 128 * c, 128, 2 * C)
            square_a, square_b = halves(part * part)
            form_a += sum_rows(square_a)
            form_b += sum_rows(square_b)
        scale_a = gl.rsqrt(form_a / R2 + eps)
        scale_b = gl.rsqrt(form_b / R2 + eps)
        both = scale_a * scale_b
        extra = (extras(scale_a, 0, 16, kind) + extras(scale_b, 5, 16, kind)).to(kind)
        extra = gl.convert_layout(extra, operand())
        slot, phase = slot_of(item, SLOTS, False)
        mbarrier.wait(full.index(slot), phase)
        chunk = warpgroup_mma_wait(0, deps=[both_branches(ns, extra, tiles_b, tiles_e, slot, P)])
        release(empty, slot, False)
        item += 1
        h = gl.convert_layout(product_of(chunk, kind), operand())
        ys = ()
        for k in gl.static_range(P):
            ys = ys + (zeros(64),)
        for _chunk in range(1, R2 // 64):
            slot, phase = slot_of(item, SLOTS, False)
            mbarrier.wait(full.index(slot), phase)
            chunk = both_branches(ns, extra, tiles_b, tiles_e, slot, P)
            slot_c, phase_c = slot_of(item_c, SLOTS_C, False)
            mbarrier.wait(full_c.index(slot_c), phase_c)
            ys = add_output(ys, h, tiles_c, slot_c, P)
            chunk = warpgroup_mma_wait(P, deps=[chunk])
            release(empty, slot, False)
            item += 1
            product = product_of(chunk, kind)
            ys = finished(ys, h, P)
            release(empty_c, slot_c, False)
            item_c += 1
            h = gl.convert_layout(product, operand())
        gl.thread_barrier()  # nothing reads n any more
        ahead = group + gl.num_programs(0)
        if not SPARE:
            fetch(x_desc, row, full_x.index(mine), tiles_x, place, C)
        elif ahead < groups:
            fetch(x_desc, (ahead * GROUPS + which) * 64, full_x.index(other), tiles_x, other * P, C)
        slot_c, phase_c = slot_of(item_c, SLOTS_C, False)
        mbarrier.wait(full_c.index(slot_c), phase_c)
        ys = finished(add_output(ys, h, tiles_c, slot_c, P), h, P)
        release(empty_c, slot_c, False)
        item_c += 1
        if not SPARE:
            mbarrier.wait(full_x.index(mine), 1)
        for k in gl.static_range(P):
            tile = tiles_x.index(place + k)
            x = tile.load(accumulator(64)).to(gl.float32) + ys[k] * both[:, None]
            tile.store((x + across(vectors_ptr + 3 * C, 64 * k, 64, C)).to(kind))
        fence_async_shared()
        for k in gl.static_range(P):
            tma.async_copy_shared_to_global(out_desc, [row, 64 * k], tiles_x.index(place + k))
        turn += 1
        group = ahead
    tma.store_wait(0)


@gluon.jit
def mu2_merged(
    x_desc, out_desc, both_desc, extra_desc, c_desc, root_desc, vectors_ptr, linear_ptr, groups, eps,
    C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr,
    SPARE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """x plus the second Mu-Layer of norm(x)."""
    P: gl.constexpr = C // 64
    TILES_X: gl.constexpr = GROUPS * (2 if SPARE else 1)
    gl.static_assert(GROUPS == 2)
    kind: gl.constexpr = x_desc.dtype
    tiles_x = gl.allocate_shared_memory(kind, [TILES_X * P, 64, 64], x_desc.layout)
    tiles_b = gl.allocate_shared_memory(kind, [SLOTS * P, 128, 64], both_desc.layout)
    tiles_e = gl.allocate_shared_memory(kind, [SLOTS, 128, 16], extra_desc.layout)
    tiles_c = gl.allocate_shared_memory(kind, [SLOTS_C * P, 64, 64], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    empty_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [TILES_X, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, SLOTS, GROUPS, False)
    start_ring(full_c, empty_c, SLOTS_C, GROUPS, False)
    for i in gl.static_range(TILES_X):
        mbarrier.init(full_x.index(i), count=1)
    fence_async_shared()
    descs = (x_desc, out_desc, both_desc, extra_desc, c_desc, root_desc)
    buffers = (tiles_x, tiles_b, tiles_e, tiles_c)
    bars = (full, empty, full_c, empty_c, full_x)
    pointers = (vectors_ptr, linear_ptr)
    gl.warp_specialize([
        (consume, (0, descs, buffers, bars, pointers, groups, eps, C, R2, GROUPS, SLOTS, SLOTS_C, SPARE)),
        (consume, (1, descs, buffers, bars, pointers, groups, eps, C, R2, GROUPS, SLOTS, SLOTS_C, SPARE)),
        (produce, (descs, buffers, bars, groups, C, R2, SLOTS, SLOTS_C)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
