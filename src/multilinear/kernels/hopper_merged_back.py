"""The way back through the second Mu-Layer on Hopper where the matrices of its second branch are merged.

As in `hopper_back`, but both branches come out of one product, and the gradients of both go on to n in another one.
While these products of a chunk run, the next one's values are multiplied with each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_back_steps import shift_part
from multilinear.kernels.hopper_names import load_tile, meet, store_tile
from multilinear.kernels.hopper_parts import (
    accumulator,
    along,
    extras,
    fetch,
    halves,
    keep_vectors,
    kept,
    nothing,
    operand,
    release,
    row_zeros,
    rows_layout,
    side_by_side,
    slot_of,
    start_ring,
    sum_rows,
    times,
    times_columns,
    zeros,
)
from multilinear.kernels.hopper_stream import put_both


@gluon.jit
def produce(
    sources, weights, bars, groups, C: gl.constexpr, R2: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr
):  # fmt: skip
    """Copy both branches and C chunk by chunk, then 64 rows of each gram matrix in turns."""
    both_desc, extra_desc, c_desc, form_desc = sources
    tiles_b, tiles_e, tiles_c = weights
    full, empty = bars[0], bars[1]
    P: gl.constexpr = C // 64
    item = 0
    item_c = 0
    group = gl.program_id(0)
    while group < groups:
        for i in range(R2 // 32):
            item, item_c = put_both(
                both_desc, extra_desc, c_desc, tiles_b, tiles_e, tiles_c, bars, i, item, item_c, C, 32, SLOTS, SLOTS_C
            )
        for i in range(2 * P):
            slot, phase = slot_of(item, SLOTS, False)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), C * 64 * 2)
            for k in gl.static_range(P):
                load_tile(form_desc, [64 * i, 64 * k], full.index(slot), tiles_b.index(slot * P + k))
            item += 1
        group += gl.num_programs(0)


@gluon.jit
def open_branches(which: gl.constexpr, tiles_n, extra, weights, full, item, C: gl.constexpr, SLOTS: gl.constexpr):
    """A chunk of both branches, ahead of their scales, on its way."""
    tiles_b, tiles_e, _ = weights
    P: gl.constexpr = C // 64
    slot, phase = slot_of(item, SLOTS, False)
    mbarrier.wait(full.index(slot), phase)
    place = nothing(item) + which * P
    chunk = zeros(64)
    for k in gl.static_range(P):
        chunk = times(tiles_n.index(place + k), tiles_b.index(slot * P + k), chunk, k == 0)
    return times(extra, tiles_e.index(slot), chunk, False)


@gluon.jit
def open_gradient(which: gl.constexpr, tiles_g, tiles_c, full_c, item, C: gl.constexpr, SLOTS: gl.constexpr):
    """The same of the gradient of their product."""
    P: gl.constexpr = C // 64
    slot, phase = slot_of(item, SLOTS, False)
    mbarrier.wait(full_c.index(slot), phase)
    place = nothing(item) + which * P
    grad = zeros(32)
    for k in gl.static_range(P):
        grad = times_columns(tiles_g.index(place + k), tiles_c.index(slot * P + k), grad, k == 0)
    return grad


@gluon.jit
def close_chunk(chunk, grad, scale, h_tile, pq_tile, h_desc, pq_desc, row, i, kind: gl.constexpr):
    """Write the product of the branches, and the gradients of both; return these, and each row's product with that."""
    first, second = halves(chunk)
    grad = grad * along(scale, 32)
    h = first * second
    pq = side_by_side((grad * second).to(kind), (grad * first).to(kind))
    tma.store_wait(0)
    meet()  # the chunk before has left
    h_tile.store((h * along(scale, 32)).to(kind))
    pq_tile.store(pq)
    fence_async_shared()
    meet()
    store_tile(h_desc, [row, 32 * i], h_tile)
    store_tile(pq_desc, [row, 64 * i], pq_tile)
    return gl.convert_layout(pq, operand()), sum_rows(grad * h)


@gluon.jit
def add_gradients(dns, shift, pq, weights, slot, P: gl.constexpr):
    """Start adding a chunk's gradients to those of n and of the extras."""
    new = ()
    for k in gl.static_range(P):
        new = new + (times_columns(pq, weights[0].index(slot * P + k), dns[k], False),)
    return new, times_columns(pq, weights[1].index(slot), shift, False)


@gluon.jit
def load_scales(stats_ptr, row, rows):
    """Those of both branches of 64 tokens, and of their product."""
    index = row + gl.arange(0, 64, layout=rows_layout())
    scale_a = gl.load(stats_ptr + index * 3, mask=index < rows, other=1.0)
    scale_b = gl.load(stats_ptr + index * 3 + 1, mask=index < rows, other=1.0)
    return scale_a, scale_b, gl.load(stats_ptr + index * 3 + 2, mask=index < rows, other=0.0)


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, weights, bars, pointers, groups, rows,
    C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr,
):  # fmt: skip
    grad_desc, n_desc, h_desc, pq_desc, dn_desc = descs
    tiles_g, tiles_n, tiles_h, tiles_pq, linear = buffers
    full, empty, full_c, empty_c = bars[0], bars[1], bars[2], bars[3]
    bar_g, bar_n = bars[4].index(which), bars[5].index(which)
    stats_ptr, ends_ptr = pointers
    P: gl.constexpr = C // 64
    kind: gl.constexpr = n_desc.dtype
    item = 0
    item_c = 0
    turn = 0
    group = gl.program_id(0)
    h_tile, pq_tile = tiles_h.index(which), tiles_pq.index(which)
    end_a = row_zeros()
    end_b = row_zeros()
    fetch(n_desc, (group * GROUPS + which) * 64, bar_n, tiles_n, which * P, C)
    scale_a, scale_b, scale = load_scales(stats_ptr, (group * GROUPS + which) * 64, rows)
    while group < groups:
        row = (group * GROUPS + which) * 64
        tma.store_wait(0)
        fetch(grad_desc, row, bar_g, tiles_g, which * P, C)
        extra = (extras(scale_a, 0, 16, kind) + extras(scale_b, 5, 16, kind)).to(kind)
        extra = gl.convert_layout(extra, operand())
        mbarrier.wait(bar_n, turn & 1)
        chunk = open_branches(which, tiles_n, extra, weights, full, item, C, SLOTS)
        mbarrier.wait(bar_g, turn & 1)
        grad = open_gradient(which, tiles_g, weights[2], full_c, item_c, C, SLOTS_C)
        chunk, grad = warpgroup_mma_wait(0, deps=[chunk, grad])
        release(empty_c, item_c % SLOTS_C, False)
        pq, total = close_chunk(chunk, grad, scale, h_tile, pq_tile, h_desc, pq_desc, row, 0, kind)
        dns = ()
        for k in gl.static_range(P):
            dns = dns + (zeros(64),)
        shift = zeros(16)
        for i in range(1, R2 // 32):
            chunk = open_branches(which, tiles_n, extra, weights, full, item + 1, C, SLOTS)
            grad = open_gradient(which, tiles_g, weights[2], full_c, item_c + 1, C, SLOTS_C)
            dns, shift = add_gradients(dns, shift, pq, weights, item % SLOTS, P)
            chunk, grad = warpgroup_mma_wait(P + 1, deps=[chunk, grad])
            item_c += 1
            release(empty_c, item_c % SLOTS_C, False)
            new, part = close_chunk(chunk, grad, scale, h_tile, pq_tile, h_desc, pq_desc, row, i, kind)
            total += part
            done = warpgroup_mma_wait(0, deps=dns + (shift, pq))
            dns, shift = done[:P], done[P]
            release(empty, item % SLOTS, False)
            item += 1
            pq = new
        item_c += 1
        dns, shift = add_gradients(dns, shift, pq, weights, item % SLOTS, P)
        done = warpgroup_mma_wait(0, deps=dns + (shift, pq))
        dns, shift = done[:P], done[P]
        release(empty, item % SLOTS, False)
        item += 1
        # of the gradient along a branch only the part along its normed values counts, not that along the norm's shift
        k_a = (shift_part(shift, 0, 16) - scale_a * total) * scale_a / R2
        k_b = (shift_part(shift, 5, 16) - scale_b * total) * scale_b / R2
        for k in gl.static_range(P):
            n = tiles_n.index(which * P + k).load(accumulator(64)).to(gl.float32)
            tiles_g.index(which * P + k).store((n * k_a[:, None]).to(kind))
            tiles_n.index(which * P + k).store((n * k_b[:, None]).to(kind))
        fence_async_shared()
        meet()  # all have written, and said so to the copies
        for k in gl.static_range(P):
            store_tile(pq_desc, [row, 2 * R2 + 64 * k], tiles_g.index(which * P + k))
            store_tile(pq_desc, [row, 2 * R2 + C + 64 * k], tiles_n.index(which * P + k))
        end_a += k_a
        end_b += k_b
        for c in gl.static_range(2 * P):
            slot, phase = slot_of(item, SLOTS, False)
            mbarrier.wait(full.index(slot), phase)
            place = nothing(item) + which * P
            if c % 2 == 0:
                left = tiles_g.index(place + c // 2)
            else:
                left = tiles_n.index(place + c // 2)
            new = ()
            for k in gl.static_range(P):
                new = new + (times_columns(left, weights[0].index(slot * P + k), dns[k], False),)
            # of a chunk before only, while those of this one are on their way
            dns = warpgroup_mma_wait(P if c < 2 * P - 1 else 0, deps=new)
            if c > 0:
                release(empty, (item + SLOTS - 1) % SLOTS, False)
            item += 1
        release(empty, (item + SLOTS - 1) % SLOTS, False)
        tma.store_wait(0)
        meet()  # nothing reads both any more
        ahead = group + gl.num_programs(0)
        if ahead < groups:
            fetch(n_desc, (ahead * GROUPS + which) * 64, bar_n, tiles_n, which * P, C)
        for k in gl.static_range(P):
            half = k_a[:, None] * kept(linear, 2 * k, 64) + k_b[:, None] * kept(linear, 2 * k + 1, 64)
            dn = dns[k] + 0.5 * half
            tiles_g.index(which * P + k).store(dn.to(kind))
        fence_async_shared()
        meet()
        for k in gl.static_range(P):
            store_tile(dn_desc, [row, 64 * k], tiles_g.index(which * P + k))
        # not before: a fence would wait for them
        scale_a, scale_b, scale = load_scales(stats_ptr, (ahead * GROUPS + which) * 64, rows)
        turn += 1
        group = ahead
    line = ends_ptr + (gl.program_id(0) * GROUPS + which) * 2
    gl.store(line, gl.sum(end_a, 0))
    gl.store(line + 1, gl.sum(end_b, 0))
    tma.store_wait(0)


@gluon.jit
def mu2_merged_back(
    grad_desc, n_desc, h_desc, pq_desc, dn_desc, both_desc, extra_desc, c_desc, form_desc,
    stats_ptr, ends_ptr, linear_ptr, groups, rows,
    C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """From the gradient of the output: the product h of both branches; their gradients P and Q, 32 columns of each in
    turns, and after them n with each row multiplied, once for each branch; sums of those numbers, a line for each group
    of each program; and the gradient of n."""
    P: gl.constexpr = C // 64
    gl.static_assert(GROUPS == 2)
    kind: gl.constexpr = n_desc.dtype
    tiles_g = gl.allocate_shared_memory(kind, [GROUPS * P, 64, 64], grad_desc.layout)
    tiles_n = gl.allocate_shared_memory(kind, [GROUPS * P, 64, 64], n_desc.layout)
    tiles_h = gl.allocate_shared_memory(kind, [GROUPS, 64, 32], h_desc.layout)
    tiles_pq = gl.allocate_shared_memory(kind, [GROUPS, 64, 64], pq_desc.layout)
    tiles_b = gl.allocate_shared_memory(kind, [SLOTS * P, 64, 64], both_desc.layout)
    tiles_e = gl.allocate_shared_memory(kind, [SLOTS, 64, 16], extra_desc.layout)
    tiles_c = gl.allocate_shared_memory(kind, [SLOTS_C * P, 64, 32], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    empty_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    full_g = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    full_n = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, SLOTS, GROUPS, False)
    start_ring(full_c, empty_c, SLOTS_C, GROUPS, False)
    for i in gl.static_range(GROUPS):
        mbarrier.init(full_g.index(i), count=1)
        mbarrier.init(full_n.index(i), count=1)
    fence_async_shared()
    linear = keep_vectors(linear_ptr, 2 * C, 64, 2 * P)
    meet()
    descs = (grad_desc, n_desc, h_desc, pq_desc, dn_desc)
    sources = (both_desc, extra_desc, c_desc, form_desc)
    buffers = (tiles_g, tiles_n, tiles_h, tiles_pq, linear)
    weights = (tiles_b, tiles_e, tiles_c)
    bars = (full, empty, full_c, empty_c, full_g, full_n)
    pointers = (stats_ptr, ends_ptr)
    gl.warp_specialize([
        (consume, (0, descs, buffers, weights, bars, pointers, groups, rows, C, R2, GROUPS, SLOTS, SLOTS_C)),
        (consume, (1, descs, buffers, weights, bars, pointers, groups, rows, C, R2, GROUPS, SLOTS, SLOTS_C)),
        (produce, (sources, weights, bars, groups, C, R2, SLOTS, SLOTS_C)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
