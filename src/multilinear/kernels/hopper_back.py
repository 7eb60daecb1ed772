"""The way back through the second Mu-Layer and the norm ahead of it on Hopper.

It does what `block_backward.mu2_back`, two products with the weights and `block_backward.norm_back` do, from the
gradient of the output to that of the input, and writes what the gradients of the weights are made of.
As on the way forward one warp copies weights and groups of four warps share them. What is multiplied comes to shared
memory as it is stored, and what is written leaves from there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from multilinear.kernels.hopper_back_steps import piece, shift_part, to_input, to_low
from multilinear.kernels.hopper_names import load_tile, meet, store_tile
from multilinear.kernels.hopper_parts import (
    accumulator,
    along,
    nothing,
    piece_width,
    release,
    resident,
    row_zeros,
    rows_layout,
    slot_of,
    start_ring,
    store_columns,
    sum_rows,
    times,
    times_columns,
    zeros,
)
from multilinear.kernels.hopper_stream import produce_back


@gluon.jit
def fetch_tokens(
    descs, buffers, bar, row, which, C: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr
):
    """Start copying what a tile reads."""
    grad_desc, n_desc, extra_desc, d_desc, tail_desc = descs[0], descs[1], descs[2], descs[3], descs[4]
    tiles_g, tiles_n, tiles_e, tiles_d, tiles_t = buffers[0], buffers[1], buffers[2], buffers[3], buffers[4]
    P: gl.constexpr = C // 64
    mbarrier.expect(bar, (2 * C + 16 + J * P2 + TAIL) * 128)
    for k in gl.static_range(P):
        load_tile(n_desc, [row, 64 * k], bar, tiles_n.index(which * P + k))
        load_tile(grad_desc, [row, 64 * k], bar, tiles_g.index(which * P + k))
    load_tile(extra_desc, [row, C], bar, tiles_e.index(which))
    for q in gl.static_range(P2):
        load_tile(d_desc, [row, J * q], bar, tiles_d.index(which * P2 + q))
    if TAIL > 0:
        load_tile(tail_desc, [row, J * P2], bar, tiles_t.index(which))


@gluon.jit
def consume(
    which: gl.constexpr, descs, buffers, weights, bars, pointers, groups, rows, tokens, eps,
    C: gl.constexpr, R2: gl.constexpr, L2: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr, FORMS: gl.constexpr, SP: gl.constexpr,
    SQ: gl.constexpr, DROP: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    x_desc, h_desc, p_desc, q_desc, last_desc = descs[5], descs[7], descs[8], descs[9], descs[10]
    tiles_g, tiles_n, tiles_e, tiles_d, tiles_t, tiles_h, tiles_p, tiles_q, sums = buffers
    weights_a, weights_e, weights_b, weights_t, weights_c = weights
    full, empty, full_c, empty_c, full_x = bars
    stats_ptr, P_ptr, Q_ptr, sums_ptr = pointers[0], pointers[1], pointers[2], pointers[5]
    P: gl.constexpr = C // 64
    PIECES: gl.constexpr = P2 + (1 if TAIL > 0 else 0)
    RESIDENT: gl.constexpr = resident(C, R2, J, PIECES, WHOLE, SLOTS, SLOTS_C)
    kind: gl.constexpr = x_desc.dtype
    item = 0
    item_c = 0
    turn = 0
    group = gl.program_id(0)
    bar = full_x.index(which)
    h_tile, p_tile, q_tile = tiles_h.index(which), tiles_p.index(which), tiles_q.index(which)
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(64))
    for k in gl.static_range(3 * P if WHOLE else 0):
        sums.index(which * 3 * P + k).store(gl.full([64], 0.0, gl.float32, columns))
    while group < groups:
        row = (group * GROUPS + which) * 64
        tma.store_wait(0)
        fetch_tokens(descs, buffers, bar, row, which, C, P2, TAIL, J)
        index = row + gl.arange(0, 64, layout=rows_layout())
        live = index < rows
        scale_a = gl.load(stats_ptr + index * 3, mask=live, other=0.0)
        scale_b = gl.load(stats_ptr + index * 3 + 1, mask=live, other=0.0)
        scale = gl.load(stats_ptr + index * 3 + 2, mask=live, other=0.0)
        mbarrier.wait(bar, 0 if WHOLE else turn & 1)
        total = row_zeros()
        shift = warpgroup_mma_init(zeros(16))
        dds = ()
        for q in gl.static_range(PIECES):
            dds = dds + (warpgroup_mma_init(zeros(piece_width(q, P2, J, TAIL))),)
        dns = ()
        for k in gl.static_range(P if WHOLE else 0):
            dns = dns + (warpgroup_mma_init(zeros(64)),)
        for i in range(R2 // J):
            slot, phase = slot_of(item, SLOTS, RESIDENT)
            slot_c, phase_c = slot_of(item_c, SLOTS_C, RESIDENT)
            mbarrier.wait(full.index(slot), phase)
            mine = which + (nothing(item) if C == 192 else 0)  # it is slower for other widths
            first = zeros(J)
            for k in gl.static_range(P):
                first = times(tiles_n.index(mine * P + k), weights_a.index(slot * P + k), first, k == 0)
            first = times(tiles_e.index(mine), weights_e.index(slot), first, False)
            second = zeros(J)
            for q in gl.static_range(PIECES):
                left = piece(tiles_d, tiles_t, mine, q, P2)
                second = times(left, piece(weights_b, weights_t, slot, q, P2), second, q == 0)
            mbarrier.wait(full_c.index(slot_c), phase_c)
            grad = zeros(J)
            for k in gl.static_range(P):
                grad = times_columns(tiles_g.index(mine * P + k), weights_c.index(slot_c * P + k), grad, k == 0)
            done = warpgroup_mma_wait(0, deps=(first, second, grad, shift) + dds + dns)
            first, second, grad, shift = done[0], done[1], done[2], done[3]
            release(empty_c, slot_c, RESIDENT)
            if i > 0:  # the products that went on from the chunk before are over now
                release(empty, (item + SLOTS - 1) % SLOTS, RESIDENT)
            grad = grad * along(scale, J)
            h = first * second
            total += sum_rows(grad * h)
            tma.store_wait(0)
            h_tile.store((h * along(scale, J)).to(kind))
            p_tile.store((grad * second).to(kind))
            q_tile.store((grad * first).to(kind))
            fence_async_shared()
            store_tile(h_desc, [row, J * i], h_tile)
            store_tile(p_desc, [row, J * i], p_tile)
            store_tile(q_desc, [row, J * i], q_tile)
            shift = times_columns(p_tile, weights_e.index(slot), shift, False)
            dds = ()
            for q in gl.static_range(PIECES):
                dds = dds + (times_columns(q_tile, piece(weights_b, weights_t, slot, q, P2), done[4 + q], False),)
            dns = ()
            for k in gl.static_range(P if WHOLE else 0):
                dns = dns + (times_columns(p_tile, weights_a.index(slot * P + k), done[4 + PIECES + k], False),)
            item += 1
            item_c += 1
        done = warpgroup_mma_wait(0, deps=(shift,) + dds + dns)
        release(empty, (item + SLOTS - 1) % SLOTS, RESIDENT)
        # of the gradient along a branch only the part along its normed values counts, not that along the norm's shift
        k_a = (shift_part(done[0], 0, 16) - scale_a * total) * scale_a / R2
        k_b = row_zeros() - scale_b * total
        for q in gl.static_range(PIECES):  # d's own extras are the last of its columns
            k_b += shift_part(done[1 + q], L2 - J * q, piece_width(q, P2, J, TAIL))
        k_b = k_b * scale_b / R2
        for k in gl.static_range(P):
            tile = tiles_n.index(which * P + k)
            tile.store((tile.load(accumulator(64)).to(gl.float32) * k_a[:, None]).to(kind))
        for q in gl.static_range(PIECES):
            tile = piece(tiles_d, tiles_t, which, q, P2)
            d = tile.load(accumulator(piece_width(q, P2, J, TAIL))).to(gl.float32)
            d = (d * along(k_b, piece_width(q, P2, J, TAIL))).to(kind)
            tile.store(d)
            store_columns(Q_ptr, row, rows, R2 + J * q, d, piece_width(q, P2, J, TAIL), SQ, R2 + L2)
        fence_async_shared()
        meet()  # all have written, and said so to the copies
        for k in gl.static_range(P):
            store_tile(last_desc, [row, R2 + 64 * k], tiles_n.index(which * P + k))
        j = gl.arange(0, 16, layout=gl.SliceLayout(0, accumulator(16)))[None, :]
        store_columns(P_ptr, row, rows, R2 + C, gl.where(j == 0, along(k_a, 16), 0.0).to(kind), 16, SP, R2 + C + 8)
        store_columns(Q_ptr, row, rows, R2 + L2, gl.where(j == 0, along(k_b, 16), 0.0).to(kind), 16, SQ, R2 + L2 + 8)
        item = to_low(
            which, buffers, weights, bars, pointers, done, k_b, row, rows, item,
            C, R2, L2, P2, TAIL, J, SLOTS, FORMS, SP, RESIDENT,
        )  # fmt: skip
        if WHOLE:
            item = to_input(
                which, descs, buffers, weights, bars, pointers, done, k_a, row, rows, tokens, item, eps,
                C, P2, TAIL, J, SLOTS, FORMS, DROP, RESIDENT,
            )  # fmt: skip
        turn += 1
        group += gl.num_programs(0)
    for k in gl.static_range(3 * P if WHOLE else 0):
        place = (gl.program_id(0) * GROUPS + which) * 3 * C + 64 * k + gl.arange(0, 64, layout=columns)
        gl.store(sums_ptr + place, sums.index(which * 3 * P + k).load(columns))
    tma.store_wait(0)


@gluon.jit
def mu2_back(
    grad_desc, n_desc, extra_desc, d_desc, tail_desc, x_desc, out_desc, h_desc, p_desc, q_desc, last_desc,
    a_desc, e_desc, b_desc, t_desc, c_desc, low_desc, low_tail_desc, down_desc, gram_desc,
    stats_ptr, P_ptr, Q_ptr, vectors_ptr, keep_ptr, sums_ptr, groups, rows, tokens, eps,
    C: gl.constexpr, R2: gl.constexpr, L2: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr, FORMS: gl.constexpr, SP: gl.constexpr,
    SQ: gl.constexpr, DROP: gl.constexpr, WHOLE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradient of x; h, P and Q as `block_backward.mu2_back` and the product after it leave them; and sums."""
    P: gl.constexpr = C // 64
    REST: gl.constexpr = TAIL if TAIL > 0 else 16
    RESIDENT: gl.constexpr = resident(C, R2, J, P2 + (1 if TAIL > 0 else 0), WHOLE, SLOTS, SLOTS_C)
    kind: gl.constexpr = x_desc.dtype
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles_g = gl.allocate_shared_memory(kind, [GROUPS * P, 64, 64], grad_desc.layout)
    tiles_n = gl.allocate_shared_memory(kind, [GROUPS * P, 64, 64], n_desc.layout)
    tiles_e = gl.allocate_shared_memory(kind, [GROUPS, 64, 16], extra_desc.layout)
    tiles_d = gl.allocate_shared_memory(kind, [GROUPS * P2 if P2 > 0 else 1, 64, J], d_desc.layout)
    tiles_t = gl.allocate_shared_memory(kind, [GROUPS if TAIL > 0 else 1, 64, REST], tail_desc.layout)
    tiles_h = gl.allocate_shared_memory(kind, [GROUPS, 64, J], h_desc.layout)
    tiles_p = gl.allocate_shared_memory(kind, [GROUPS, 64, J], p_desc.layout)
    tiles_q = gl.allocate_shared_memory(kind, [GROUPS, 64, J], q_desc.layout)
    sums = gl.allocate_shared_memory(gl.float32, [GROUPS * 3 * P if WHOLE else 1, 64], one)
    weights_a = gl.allocate_shared_memory(kind, [SLOTS * P, J, 64], a_desc.layout)
    weights_e = gl.allocate_shared_memory(kind, [SLOTS, J, 16], e_desc.layout)
    weights_b = gl.allocate_shared_memory(kind, [SLOTS * P2 if P2 > 0 else 1, J, J], b_desc.layout)
    weights_t = gl.allocate_shared_memory(kind, [SLOTS if TAIL > 0 else 1, J, REST], t_desc.layout)
    weights_c = gl.allocate_shared_memory(kind, [SLOTS_C * P, 64, J], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    empty_c = gl.allocate_shared_memory(gl.int64, [SLOTS_C, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, SLOTS, GROUPS, RESIDENT)
    start_ring(full_c, empty_c, SLOTS_C, GROUPS, RESIDENT)
    for i in gl.static_range(GROUPS):
        mbarrier.init(full_x.index(i), count=1)
    fence_async_shared()
    descs = (grad_desc, n_desc, extra_desc, d_desc, tail_desc, x_desc, out_desc, h_desc, p_desc, q_desc, last_desc)
    sources = (a_desc, e_desc, b_desc, t_desc, c_desc, low_desc, low_tail_desc, down_desc, gram_desc)
    buffers = (tiles_g, tiles_n, tiles_e, tiles_d, tiles_t, tiles_h, tiles_p, tiles_q, sums)
    weights = (weights_a, weights_e, weights_b, weights_t, weights_c)
    bars = (full, empty, full_c, empty_c, full_x)
    pointers = (stats_ptr, P_ptr, Q_ptr, vectors_ptr, keep_ptr, sums_ptr)
    gl.static_assert(GROUPS <= 2)
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, descs, buffers, weights, bars, pointers, groups, rows, tokens, eps, C, R2, L2, P2, TAIL, J,
                       GROUPS, SLOTS, SLOTS_C, FORMS, SP, SQ, DROP, WHOLE)),
            (consume, (1, descs, buffers, weights, bars, pointers, groups, rows, tokens, eps, C, R2, L2, P2, TAIL, J,
                       GROUPS, SLOTS, SLOTS_C, FORMS, SP, SQ, DROP, WHOLE)),
            (produce_back, (sources, weights, bars, groups, C, R2, P2, TAIL, J, SLOTS, SLOTS_C, WHOLE)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, descs, buffers, weights, bars, pointers, groups, rows, tokens, eps, C, R2, L2, P2, TAIL, J,
                       GROUPS, SLOTS, SLOTS_C, FORMS, SP, SQ, DROP, WHOLE)),
            (produce_back, (sources, weights, bars, groups, C, R2, P2, TAIL, J, SLOTS, SLOTS_C, WHOLE)),
        ], [1], [24])  # fmt: skip
