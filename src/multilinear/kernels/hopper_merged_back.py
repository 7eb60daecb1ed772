"""The way back through the second Mu-Layer on Hopper where the matrices of its second branch are merged.

The gradient of the product of both branches comes in chunks of 64 hidden channels. Each half of it meets the branches,
which were left by the way forward, and what that gives goes on to n in one product, while the next half is dealt with;
from there it goes through the norm, which only centres and divides. Beside the gradient of the input only that of the
product is written: what gradients of the weights need besides is made again from it (`hopper_second_products`). One
warp copies what all tokens read, another one what belongs to some of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_merged_ends import (
    add_forms,
    add_to_totals,
    keep_shifts,
    put_linear,
    sum_gradient,
    through_norm,
)
from multilinear.kernels.hopper_names import load_tile, meet
from multilinear.kernels.hopper_norm_back import columns_of
from multilinear.kernels.hopper_pairs import eights, kept_eights, multiplied, row_products
from multilinear.kernels.hopper_parts import (
    accumulator,
    along,
    fetch,
    halves,
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
def produce_weights(
    both_desc, form_desc, tiles_b, full, empty, groups, C: gl.constexpr, R2: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    """Copy 32 rows of each branch in turns, then 64 rows of each gram matrix."""
    P: gl.constexpr = C // 64
    item = 0
    group = gl.program_id(0)
    while group < groups:
        for i in range(R2 // 32 + 2 * P):
            slot, phase = slot_of(item, SLOTS, False)
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(bar, C * 128)
            if i < R2 // 32:
                for k in gl.static_range(P):
                    load_tile(both_desc, [64 * i, 64 * k], bar, tiles_b.index(slot * P + k))
            else:
                for k in gl.static_range(P):
                    load_tile(form_desc, [64 * i - 2 * R2, 64 * k], bar, tiles_b.index(slot * P + k))
            item += 1
        group += gl.num_programs(0)


@gluon.jit
def piece_of(chunk, k, P: gl.constexpr):
    """Where piece k of a chunk of C is: there is room for two chunks less a piece."""
    return (P * chunk + k) % (2 * P - 1)


@gluon.jit
def produce_tokens(
    sources, tiles_c, ring, bars, groups, C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy C chunk by chunk, and of both branches what belongs to each half; at the end of tiles the gradient of the
    output once more."""
    c_desc, branches_desc, again_desc = sources
    full_c, empty_c, full_b, empty_b = bars
    P: gl.constexpr = C // 64
    item = 0
    item_c = 0
    group = gl.program_id(0)
    while group < groups:
        for i in range(R2 // 32 + P):
            if (i < R2 // 32) & (i % 2 == 0):
                mbarrier.expect(full_c.index(item_c % 2), C * 128)
                for k in gl.static_range(P):
                    if k == P - 1:  # there is room for all but the last piece while the chunk before is read
                        mbarrier.wait(empty_c.index(0), item_c & 1 ^ 1)
                    place = piece_of(item_c, k, P)
                    load_tile(c_desc, [64 * k, 32 * i], full_c.index(item_c % 2), tiles_c.index(place))
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
def open_gradient(tiles, place, tiles_c, full_c, chunk, P: gl.constexpr):
    """The gradient of a chunk of the branches' product, ahead of its scale, on its way."""
    mbarrier.wait(full_c.index(chunk % 2), (chunk // 2) & 1)
    grad = zeros(64)
    for k in gl.static_range(P):
        grad = times_columns(tiles.index(place + k), tiles_c.index(piece_of(chunk, k, P)), grad, k == 0)
    return grad


@gluon.jit
def close_half(
    which: gl.constexpr, grad, root, ring, full_b, empty_b, item, shifts, inner_ptr, row, rows, i, sums,
    kind: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write that gradient, for 32 hidden channels; return those of both branches, and their products with the shifts of
    their norms, and with the branches, added up."""
    slot, phase = slot_of(item, STAGES, False)
    mbarrier.wait(full_b.index(slot), phase)
    place = (slot * GROUPS + which) * 2
    second = load_own(ring.index(place))
    first = load_own(ring.index(place + 1))
    release(empty_b, slot, False)
    grad = (grad * along(root, 32)).to(kind)
    store_own(inner_ptr, row, rows, 32 * i, grad, R2)
    grad_a = multiplied(grad, second)
    grad_b = multiplied(grad, first)
    parts = eights(grad_a)
    sum_a = sums[0] + row_products(parts, kept_eights(shifts, 2 * i))
    sum_b = sums[1] + row_products(eights(grad_b), kept_eights(shifts, 2 * i + 1))
    total = sums[2] + row_products(parts, eights(first))
    return gl.convert_layout(side_by_side(grad_a, grad_b), operand()), (sum_a, sum_b, total)


@gluon.jit
def add_gradients(dns, pq, tiles_b, full, item, P: gl.constexpr, SLOTS: gl.constexpr):
    """Start adding the gradients of 32 channels of both branches to that of n."""
    slot, phase = slot_of(item, SLOTS, False)
    mbarrier.wait(full.index(slot), phase)
    new = ()
    for k in gl.static_range(P):
        new = new + (times_columns(pq, tiles_b.index(slot * P + k), dns[k], False),)
    return new


@gluon.jit
def added(dns, pq, ahead, empty, item, P: gl.constexpr, SLOTS: gl.constexpr):
    """Wait for that, and before it for what is multiplied next."""
    done = warpgroup_mma_wait(0, deps=dns + (pq,) + ahead)
    release(empty, item % SLOTS, False)
    return done[:P], done[P + 1 :]


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
    C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    DROP: gl.constexpr,
):  # fmt: skip
    grad_desc, n_desc, out_desc = descs
    tiles, ring, linear, shifts, selects, totals = buffers
    tiles_b, tiles_c = weights
    full, empty, full_c, empty_c, full_b, empty_b = bars[:6]
    bar = bars[6].index(which)
    select = selects.index(which if DROP else 0)
    inner_ptr, stats_ptr, taken_ptr, ends_ptr, sums_ptr = pointers
    P: gl.constexpr = C // 64
    kind: gl.constexpr = n_desc.dtype
    item = 0
    item_b = 0
    chunk = 0
    group = gl.program_id(0)
    end_a = row_zeros()
    end_b = row_zeros()
    fetch(grad_desc, (group * GROUPS + which) * 64, bar, tiles, which * P, C)
    scale_a, scale_b, scale, unit = load_scales(stats_ptr, (group * GROUPS + which) * 64, rows)
    while group < groups:
        row = (group * GROUPS + which) * 64
        mbarrier.wait(bar, 0)
        if DROP:  # the sums that read the one before are over
            select.store(columns_of(row_zeros(), row_zeros(), scale / (scale_a * scale_b), kind))
            fence_async_shared()
            meet()
        summed = sum_gradient(tiles, which * P, select, P)
        root = gl.sqrt(scale)
        first = open_gradient(tiles, which * P, tiles_c, full_c, chunk, P)
        opened = warpgroup_mma_wait(0, deps=(first,) + summed)
        left, right = halves(opened[0])
        release(empty_c, 0, False)
        chunk += 1
        add_to_totals(totals, which * P, opened[1:], P)
        pq, sums = close_half(
            which, left, root, ring, full_b, empty_b, item_b, shifts, inner_ptr, row, rows, 0,
            (zeros(8), zeros(8), zeros(8)), kind, R2, GROUPS, STAGES,
        )  # fmt: skip
        dns = ()
        for k in gl.static_range(P):
            dns = dns + (zeros(64),)
        dns = add_gradients(dns, pq, tiles_b, full, item, P, SLOTS)
        new, sums = close_half(
            which, right, root, ring, full_b, empty_b, item_b + 1, shifts, inner_ptr, row, rows, 1, sums, kind, R2,
            GROUPS, STAGES,
        )  # fmt: skip
        dns, ahead = added(dns, pq, (new,), empty, item, P, SLOTS)
        pq = ahead[0]
        item += 1
        for i in range(1, R2 // 64):
            grad = open_gradient(tiles, which * P, tiles_c, full_c, chunk, P)
            dns = add_gradients(dns, pq, tiles_b, full, item, P, SLOTS)
            left, right = halves(warpgroup_mma_wait(P, deps=[grad]))
            release(empty_c, 0, False)
            chunk += 1
            if i + 1 == R2 // 64:  # all have read the gradient, as they met
                fetch(n_desc, row, bar, tiles, which * P, C)
            new, sums = close_half(
                which, left, root, ring, full_b, empty_b, item_b + 2 * i, shifts, inner_ptr, row, rows, 2 * i, sums,
                kind, R2, GROUPS, STAGES,
            )  # fmt: skip
            dns, ahead = added(dns, pq, (new,), empty, item, P, SLOTS)
            new = ahead[0]
            dns = add_gradients(dns, new, tiles_b, full, item + 1, P, SLOTS)
            pq, sums = close_half(
                which, right, root, ring, full_b, empty_b, item_b + 2 * i + 1, shifts, inner_ptr, row, rows, 2 * i + 1,
                sums, kind, R2, GROUPS, STAGES,
            )  # fmt: skip
            dns, ahead = added(dns, new, (pq,), empty, item + 1, P, SLOTS)
            pq = ahead[0]
            item += 2
        item_b += R2 // 32
        dns = add_gradients(dns, pq, tiles_b, full, item, P, SLOTS)
        dns, _ = added(dns, pq, (), empty, item, P, SLOTS)
        item += 1
        # of the gradient along a branch only the part along its normed values counts, not that along the norm's shift
        live = gl.where(scale > 0.0, 1.0 / root, 0.0)
        total = sum_rows(sums[2]) * live
        k_a = (sum_rows(sums[0]) - scale_a * total) * scale_a / R2
        k_b = (sum_rows(sums[1]) - scale_b * total) * scale_b / R2
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
        dns, item = add_forms(dns, ns, k_a, k_b, linear, tiles_b, full, empty, item, kind, P, SLOTS)
        through_norm(which, ring, full_b, empty_b, item_b, ns, dns, unit, out_desc, row, kind, C, GROUPS, STAGES)
        item_b += P
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
    grad_desc, n_desc, branches_desc, again_desc, out_desc, both_desc, c_desc, form_desc, both_ptr, inner_ptr,
    stats_ptr, taken_ptr, ends_ptr, sums_ptr, linear_ptr, groups, rows, padded,
    C: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    DROP: gl.constexpr, REGISTERS: gl.constexpr,
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
    tiles_c = gl.allocate_shared_memory(kind, [2 * P - 1, 64, 64], c_desc.layout)
    linear = gl.allocate_shared_memory(kind, [P, 16, 64], both_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_c = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty_c = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full_b = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_b = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, SLOTS, GROUPS, False)
    mbarrier.init(empty_c.index(0), count=GROUPS)
    start_ring(full_b, empty_b, STAGES, GROUPS, False)
    for i in gl.static_range(2):
        mbarrier.init(full_c.index(i), count=1)
    for i in gl.static_range(GROUPS):
        mbarrier.init(full_x.index(i), count=1)
    put_linear(linear, linear_ptr, P)
    fence_async_shared()
    shifts = keep_shifts(both_ptr, kind, C, R2)
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
    buffers = (tiles, ring, linear, shifts, selects, totals)
    weights = (tiles_b, tiles_c)
    bars = (full, empty, full_c, empty_c, full_b, empty_b, full_x)
    pointers = (inner_ptr, stats_ptr, taken_ptr, ends_ptr, sums_ptr)
    gl.warp_specialize([
        (consume, (0, descs, buffers, weights, bars, pointers, groups, rows, padded, C, R2, GROUPS, SLOTS, STAGES,
                   DROP)),
        (consume, (1, descs, buffers, weights, bars, pointers, groups, rows, padded, C, R2, GROUPS, SLOTS, STAGES,
                   DROP)),
        (produce_weights, (both_desc, form_desc, tiles_b, full, empty, groups, C, R2, SLOTS)),
        (produce_tokens, ((c_desc, branches_desc, again_desc), tiles_c, ring, (full_c, empty_c, full_b, empty_b),
                          groups, C, R2, GROUPS, STAGES)),
    ], [4, 1, 1], [REGISTERS, 24, 24])  # fmt: skip
