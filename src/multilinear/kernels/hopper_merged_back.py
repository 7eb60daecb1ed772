"""The way back through the second Mu-Layer on Hopper where the matrices of its second branch are merged.

Both branches were left by the way forward and come in chunks of 32 hidden channels. The gradient of their product meets
them, and what that gives goes on to n in one product, while the next chunk's gradient is on its way; from there it goes
through the norm, which only centres and divides. Beside the gradient of the input only that of the product is written:
what gradients of the weights need besides is made again from it (`hopper_second_products`). One warp copies what all
tokens read, another one what belongs to some of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_back_steps import shift_part
from multilinear.kernels.hopper_merged_ends import add_forms, add_to_totals, sum_gradient, through_norm
from multilinear.kernels.hopper_names import load_tile, meet
from multilinear.kernels.hopper_norm_back import columns_of
from multilinear.kernels.hopper_parts import (
    accumulator,
    along,
    fetch,
    keep_vectors,
    kept,
    load_own,
    operand,
    release,
    row_zeros,
    rows_layout,
    side_by_side,
    slot_of,
    start_ring,
    store_own,
    sum_rows,
    times_columns,
    zeros,
)


@gluon.jit
def produce_weights(sources, weights, full, empty, groups, C: gl.constexpr, R2: gl.constexpr, SLOTS: gl.constexpr):
    """Copy both branches chunk by chunk, then 64 rows of each gram matrix in turns."""
    both_desc, extra_desc, form_desc = sources
    tiles_b, tiles_e = weights
    P: gl.constexpr = C // 64
    item = 0
    group = gl.program_id(0)
    while group < groups:
        for i in range(R2 // 32 + 2 * P):
            slot, phase = slot_of(item, SLOTS, False)
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            if i < R2 // 32:
                mbarrier.expect(bar, (C + 16) * 128)
                for k in gl.static_range(P):
                    load_tile(both_desc, [64 * i, 64 * k], bar, tiles_b.index(slot * P + k))
                load_tile(extra_desc, [64 * i, C], bar, tiles_e.index(slot))
            else:
                mbarrier.expect(bar, C * 128)
                for k in gl.static_range(P):
                    load_tile(form_desc, [64 * i - 2 * R2, 64 * k], bar, tiles_b.index(slot * P + k))
            item += 1
        group += gl.num_programs(0)


@gluon.jit
def produce_tokens(
    sources, tiles_c, ring, bars, groups, C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr,
    SLOTS_C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy C chunk by chunk, and of both branches what belongs to it; at the end of tiles their gradient once more."""
    c_desc, branches_desc, again_desc = sources
    full_c, empty_c, full_b, empty_b = bars
    P: gl.constexpr = C // 64
    item = 0
    item_c = 0
    group = gl.program_id(0)
    while group < groups:
        for i in range(R2 // 32 + P):
            if i < R2 // 32:
                slot, phase = slot_of(item_c, SLOTS_C, False)
                mbarrier.wait(empty_c.index(slot), phase ^ 1)
                mbarrier.expect(full_c.index(slot), C * 64)
                for k in gl.static_range(P):
                    load_tile(c_desc, [64 * k, 32 * i], full_c.index(slot), tiles_c.index(slot * P + k))
                item_c += 1
            slot, phase = slot_of(item, STAGES, False)
            bar = full_b.index(slot)
            mbarrier.wait(empty_b.index(slot), phase ^ 1)
            mbarrier.expect(bar, GROUPS * 64 * 128)
            for g in gl.static_range(GROUPS):
                row = (group * GROUPS + g) * 64
                place = (slot * GROUPS + g) * 2
                if i < R2 // 32:
                    column = i // 2 * 128 + i % 2 * 32
                    load_tile(branches_desc, [row, column], bar, ring.index(place))
                    load_tile(branches_desc, [row, column + 64], bar, ring.index(place + 1))
                else:
                    column = 64 * i - 2 * R2
                    load_tile(again_desc, [row, column], bar, ring.index(place))
                    load_tile(again_desc, [row, column + 32], bar, ring.index(place + 1))
            item += 1
        group += gl.num_programs(0)


@gluon.jit
def open_gradient(gs, tiles_c, full_c, item, P: gl.constexpr, SLOTS_C: gl.constexpr):
    """The gradient of a chunk of the branches' product, ahead of its scale, on its way."""
    slot, phase = slot_of(item, SLOTS_C, False)
    mbarrier.wait(full_c.index(slot), phase)
    grad = zeros(32)
    for k in gl.static_range(P):
        grad = times_columns(gs[k], tiles_c.index(slot * P + k), grad, k == 0)
    return grad


@gluon.jit
def close_chunk(
    which: gl.constexpr, grad, root, ring, full_b, empty_b, item, inner_ptr, row, rows, i, kind: gl.constexpr,
    R2: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write that gradient; return those of both branches, and each row's product with that of the branches."""
    slot, phase = slot_of(item, STAGES, False)
    mbarrier.wait(full_b.index(slot), phase)
    place = (slot * GROUPS + which) * 2
    second = load_own(ring.index(place)).to(gl.float32)
    first = load_own(ring.index(place + 1)).to(gl.float32)
    release(empty_b, slot, False)
    part = sum_rows(grad * (first * second))
    grad = grad * along(root, 32)
    pq = side_by_side((grad * second).to(kind), (grad * first).to(kind))
    store_own(inner_ptr, row, rows, 32 * i, grad.to(kind), R2)
    return gl.convert_layout(pq, operand()), part


@gluon.jit
def add_gradients(dns, shift, pq, weights, full, item, P: gl.constexpr, SLOTS: gl.constexpr):
    """Start adding a chunk's gradients to those of n and of the extras."""
    slot, phase = slot_of(item, SLOTS, False)
    mbarrier.wait(full.index(slot), phase)
    new = ()
    for k in gl.static_range(P):
        new = new + (times_columns(pq, weights[0].index(slot * P + k), dns[k], False),)
    return new, times_columns(pq, weights[1].index(slot), shift, False)


@gluon.jit
def load_scales(stats_ptr, row, rows):
    """Those of both branches of 64 tokens, of their product, and of the input."""
    index = row + gl.arange(0, 64, layout=rows_layout())
    scale_a = gl.load(stats_ptr + index * 4, mask=index < rows, other=1.0)
    scale_b = gl.load(stats_ptr + index * 4 + 1, mask=index < rows, other=1.0)
    scale = gl.load(stats_ptr + index * 4 + 2, mask=index < rows, other=0.0)
    return scale_a, scale_b, scale, gl.load(stats_ptr + index * 4 + 3, mask=index < rows, other=0.0)


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, weights, bars, pointers, groups, rows, padded,
    C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr,
    STAGES: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    grad_desc, n_desc, out_desc = descs
    tiles, ring, linear, selects, totals = buffers
    tiles_b, tiles_c = weights[0], weights[2]
    full, empty, full_c, empty_c, full_b, empty_b = bars[:6]
    bar = bars[6].index(which)
    select = selects.index(which if DROP else 0)
    inner_ptr, stats_ptr, taken_ptr, ends_ptr, sums_ptr = pointers
    P: gl.constexpr = C // 64
    kind: gl.constexpr = n_desc.dtype
    item = 0
    chunk = 0
    more = 0  # tiles of the gradient that came between those of branches
    group = gl.program_id(0)
    end_a = row_zeros()
    end_b = row_zeros()
    fetch(grad_desc, (group * GROUPS + which) * 64, bar, tiles, which * P, C)
    scale_a, scale_b, scale, unit = load_scales(stats_ptr, (group * GROUPS + which) * 64, rows)
    while group < groups:
        row = (group * GROUPS + which) * 64
        mbarrier.wait(bar, 0)
        gs = ()
        for k in gl.static_range(P):
            gs = gs + (tiles.index(which * P + k).load(operand()),)
        if DROP:  # the sums that read the one before are over
            select.store(columns_of(row_zeros(), row_zeros(), scale / (scale_a * scale_b), kind))
            fence_async_shared()
            meet()
        sums = sum_gradient(tiles, which * P, select, P)
        root = gl.sqrt(scale)
        grad = open_gradient(gs, tiles_c, full_c, chunk, P, SLOTS_C)
        opened = warpgroup_mma_wait(0, deps=(grad,) + sums)
        grad = opened[0]
        release(empty_c, chunk % SLOTS_C, False)
        fetch(n_desc, row, bar, tiles, which * P, C)  # all have read the gradient, as they met
        add_to_totals(totals, which * P, opened[1:], P)
        pq, total = close_chunk(
            which, grad, root, ring, full_b, empty_b, chunk + more, inner_ptr, row, rows, 0, kind, R2, GROUPS, STAGES
        )  # fmt: skip
        chunk += 1
        dns = ()
        for k in gl.static_range(P):
            dns = dns + (zeros(64),)
        shift = zeros(16)
        for i in range(1, R2 // 32):
            grad = open_gradient(gs, tiles_c, full_c, chunk, P, SLOTS_C)
            dns, shift = add_gradients(dns, shift, pq, weights, full, item, P, SLOTS)
            grad = warpgroup_mma_wait(P + 1, deps=[grad])
            release(empty_c, chunk % SLOTS_C, False)
            new, part = close_chunk(
                which, grad, root, ring, full_b, empty_b, chunk + more, inner_ptr, row, rows, i, kind, R2, GROUPS,
                STAGES,
            )  # fmt: skip
            total += part
            chunk += 1
            done = warpgroup_mma_wait(0, deps=dns + (shift, pq))
            dns, shift = done[:P], done[P]
            release(empty, item % SLOTS, False)
            item += 1
            pq = new
        dns, shift = add_gradients(dns, shift, pq, weights, full, item, P, SLOTS)
        done = warpgroup_mma_wait(0, deps=dns + (shift, pq))
        dns, shift = done[:P], done[P]
        release(empty, item % SLOTS, False)
        item += 1
        # of the gradient along a branch only the part along its normed values counts, not that along the norm's shift
        k_a = (shift_part(shift, 0, 16) - scale_a * total) * scale_a / R2
        k_b = (shift_part(shift, 5, 16) - scale_b * total) * scale_b / R2
        end_a += k_a
        end_b += k_b
        mbarrier.wait(bar, 1)
        ahead = group + gl.num_programs(0)
        ns = ()
        for k in gl.static_range(P):
            ns = ns + (tiles.index(which * P + k).load(accumulator(64)),)
        meet()  # all have read it
        if ahead < groups:
            fetch(grad_desc, (ahead * GROUPS + which) * 64, bar, tiles, which * P, C)
        dns, item = add_forms(dns, ns, k_a, k_b, tiles_b, full, empty, item, kind, P, SLOTS)
        new = ()
        for k in gl.static_range(P):
            half = k_a[:, None] * kept(linear, 2 * k, 64) + k_b[:, None] * kept(linear, 2 * k + 1, 64)
            new = new + (dns[k] + 0.5 * half,)
        through_norm(
            which, ring, full_b, empty_b, chunk + more, ns, new, unit, out_desc, row, kind, C, GROUPS, STAGES
        )  # fmt: skip
        more += P
        # not before: a fence would wait for them
        index = row + gl.arange(0, 64, layout=rows_layout())
        gl.store(taken_ptr + index, k_a, mask=index < padded)  # past the last row zeros
        gl.store(taken_ptr + padded + index, k_b, mask=index < padded)
        scale_a, scale_b, scale, unit = load_scales(stats_ptr, (ahead * GROUPS + which) * 64, rows)
        group = ahead
    line = ends_ptr + (gl.program_id(0) * GROUPS + which) * 2
    gl.store(line, gl.sum(end_a, 0))
    gl.store(line + 1, gl.sum(end_b, 0))
    channel = gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(16)))
    for k in gl.static_range(P):
        line = sums_ptr + (gl.program_id(0) * GROUPS + which) * C + 64 * k
        gl.store(line + channel, totals.index(which * P + k).load(gl.SliceLayout(1, accumulator(16))))
    tma.store_wait(0)


@gluon.jit
def mu2_merged_back(
    grad_desc, n_desc, branches_desc, again_desc, out_desc, both_desc, extra_desc, c_desc, form_desc, inner_ptr,
    stats_ptr, taken_ptr, ends_ptr, sums_ptr, linear_ptr, groups, rows, padded,
    C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr,
    STAGES: gl.constexpr, DROP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """From the gradient of the output: that of the product of both branches, times the root of what multiplies it; two
    numbers of each token, by which n is multiplied for what the norms take; that of the input. And sums, a line for
    each group of each program: of those numbers, and of the gradient, times what became of the layer."""
    P: gl.constexpr = C // 64
    gl.static_assert(GROUPS == 2)
    kind: gl.constexpr = n_desc.dtype
    tiles = gl.allocate_shared_memory(kind, [GROUPS * P, 64, 64], n_desc.layout)
    ring = gl.allocate_shared_memory(kind, [STAGES * GROUPS * 2, 64, 32], branches_desc.layout)
    tiles_b = gl.allocate_shared_memory(kind, [SLOTS * P, 64, 64], both_desc.layout)
    tiles_e = gl.allocate_shared_memory(kind, [SLOTS, 64, 16], extra_desc.layout)
    tiles_c = gl.allocate_shared_memory(kind, [SLOTS_C * P, 64, 32], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    empty_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    full_b = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_b = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, SLOTS, GROUPS, False)
    start_ring(full_c, empty_c, SLOTS_C, GROUPS, False)
    start_ring(full_b, empty_b, STAGES, GROUPS, False)
    for i in gl.static_range(GROUPS):
        mbarrier.init(full_x.index(i), count=1)
    fence_async_shared()
    linear = keep_vectors(linear_ptr, 2 * C, 64, 2 * P)
    column: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    selects = gl.allocate_shared_memory(kind, [GROUPS if DROP else 1, 64, 16], column)
    if not DROP:
        selects.index(0).store(columns_of(row_zeros(), row_zeros(), row_zeros() + 1.0, kind))
        fence_async_shared()
    totals = gl.allocate_shared_memory(gl.float32, [GROUPS * P, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(GROUPS * P):
        totals.index(i).store(gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, accumulator(16))))
    meet()
    descs = (grad_desc, n_desc, out_desc)
    buffers = (tiles, ring, linear, selects, totals)
    weights = (tiles_b, tiles_e, tiles_c)
    bars = (full, empty, full_c, empty_c, full_b, empty_b, full_x)
    pointers = (inner_ptr, stats_ptr, taken_ptr, ends_ptr, sums_ptr)
    gl.warp_specialize([
        (consume, (0, descs, buffers, weights, bars, pointers, groups, rows, padded, C, R2, GROUPS, SLOTS, SLOTS_C,
                   STAGES, DROP)),
        (consume, (1, descs, buffers, weights, bars, pointers, groups, rows, padded, C, R2, GROUPS, SLOTS, SLOTS_C,
                   STAGES, DROP)),
        (produce_weights, ((both_desc, extra_desc, form_desc), (tiles_b, tiles_e), full, empty, groups, C, R2, SLOTS)),
        (produce_tokens, ((c_desc, branches_desc, again_desc), tiles_c, ring, (full_c, empty_c, full_b, empty_b),
                          groups, C, R2, GROUPS, SLOTS_C, STAGES)),
    ], [4, 1, 1], [REGISTERS, 24, 24])  # fmt: skip
