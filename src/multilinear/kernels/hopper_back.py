"""The way back through the second Mu-Layer on Hopper: the same as `block_backward.mu2_back`.

As on the way forward one warp copies weights and groups of four warps share them. Everything that is multiplied comes to shared memory
as it is stored, and what is written leaves from there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from multilinear.kernels.hopper_parts import (
    accumulator,
    along,
    piece_width,
    release,
    row_zeros,
    rows_layout,
    slot_of,
    store_columns,
    sum_rows,
    times,
    zeros,
)


@gluon.jit
def times_columns(left, right, out, FIRST: gl.constexpr):
    """Start adding `left right` to `out`, or putting it there."""
    return warpgroup_mma(left, right, out, use_acc=not FIRST, is_async=True)


@gluon.jit
def shift_part(sums):
    """The columns of the extras that meet a norm's shift."""
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, accumulator(16)))[None, :]
    return sum_rows(gl.where((column == 2) | (column == 4), sums, 0.0))


@gluon.jit
def consume(
    which: gl.constexpr, inputs, outputs, tokens_in, tokens_out, weights, bars, pointers, groups, rows,
    C: gl.constexpr, R2: gl.constexpr, L2: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, SP: gl.constexpr, SQ: gl.constexpr,
):  # fmt: skip
    grad_desc, n_desc, extra_desc, d_desc, tail_desc = inputs
    h_desc, p_desc, q_desc, last_desc = outputs
    tiles_g, tiles_n, tiles_x, tiles_d, tiles_t = tokens_in
    tiles_h, tiles_p, tiles_q = tokens_out
    weights_a, weights_e, weights_b, weights_t, weights_f, weights_c = weights
    full, empty, full_x = bars
    stats_ptr, P_ptr, Q_ptr = pointers
    P: gl.constexpr = C // 64
    PIECES: gl.constexpr = P2 + (1 if TAIL > 0 else 0)
    RESIDENT: gl.constexpr = R2 // J == SLOTS
    kind: gl.constexpr = n_desc.dtype
    item = 0
    turn = 0
    group = gl.program_id(0)
    bar = full_x.index(which)
    extra = tiles_x.index(which)
    h_tile = tiles_h.index(which)
    p_tile = tiles_p.index(which)
    q_tile = tiles_q.index(which)
    while group < groups:
        row = (group * GROUPS + which) * 64
        tma.store_wait(0)
        mbarrier.expect(bar, (2 * C + 16 + J * P2 + TAIL) * 128)
        for k in gl.static_range(P):
            tma.async_copy_global_to_shared(n_desc, [row, 64 * k], bar, tiles_n.index(which * P + k))
            tma.async_copy_global_to_shared(grad_desc, [row, 64 * k], bar, tiles_g.index(which * P + k))
        tma.async_copy_global_to_shared(extra_desc, [row, C], bar, extra)
        for q in gl.static_range(P2):
            tma.async_copy_global_to_shared(d_desc, [row, J * q], bar, tiles_d.index(which * P2 + q))
        if TAIL > 0:
            tma.async_copy_global_to_shared(tail_desc, [row, J * P2], bar, tiles_t.index(which))
        index = row + gl.arange(0, 64, layout=rows_layout())
        live = index < rows
        scale_a = gl.load(stats_ptr + index * 3, mask=live, other=0.0)
        scale_b = gl.load(stats_ptr + index * 3 + 1, mask=live, other=0.0)
        scale = gl.load(stats_ptr + index * 3 + 2, mask=live, other=0.0)
        mbarrier.wait(bar, turn & 1)
        total = row_zeros()
        shift_a = warpgroup_mma_init(zeros(16))
        shift_b = warpgroup_mma_init(zeros(16))
        for i in range(R2 // J):
            slot, phase = slot_of(item, SLOTS, RESIDENT)
            mbarrier.wait(full.index(slot), phase)
            first = zeros(J)
            grad = zeros(J)
            for k in gl.static_range(P):
                first = times(tiles_n.index(which * P + k), weights_a.index(slot * P + k), first, k == 0)
                grad = times_columns(tiles_g.index(which * P + k), weights_c.index(slot * P + k), grad, k == 0)
            first = times(extra, weights_e.index(slot), first, False)
            second = zeros(J)
            for q in gl.static_range(PIECES):
                if q < P2:
                    second = times(tiles_d.index(which * P2 + q), weights_b.index(slot * P2 + q), second, q == 0)
                else:
                    second = times(tiles_t.index(which), weights_t.index(slot), second, q == 0)
            first, second, grad, shift_a, shift_b = warpgroup_mma_wait(0, deps=[first, second, grad, shift_a, shift_b])
            if not RESIDENT:  # products with the extras of the chunk before are over now
                if i > 0:
                    release(empty, (item - 1) % SLOTS, RESIDENT)
            grad = grad * along(scale, J)
            h = first * second
            total += sum_rows(grad * h)
            tma.store_wait(0)
            h_tile.store((h * along(scale, J)).to(kind))
            p_tile.store((grad * second).to(kind))
            q_tile.store((grad * first).to(kind))
            fence_async_shared()
            tma.async_copy_shared_to_global(h_desc, [row, J * i], h_tile)
            tma.async_copy_shared_to_global(p_desc, [row, J * i], p_tile)
            tma.async_copy_shared_to_global(q_desc, [row, J * i], q_tile)
            shift_a = times_columns(p_tile, weights_e.index(slot), shift_a, False)
            shift_b = times_columns(q_tile, weights_f.index(slot), shift_b, False)
            item += 1
        shift_a, shift_b = warpgroup_mma_wait(0, deps=[shift_a, shift_b])
        release(empty, (item - 1) % SLOTS, RESIDENT)
        # of the gradient along a branch only the part along its normed values counts, not that along the norm's shift
        k_a = (shift_part(shift_a) - scale_a * total) * scale_a / R2
        k_b = (shift_part(shift_b) - scale_b * total) * scale_b / R2
        for k in gl.static_range(P):
            tile = tiles_n.index(which * P + k)
            tile.store((tile.load(accumulator(64)).to(gl.float32) * k_a[:, None]).to(kind))
        fence_async_shared()
        for k in gl.static_range(P):
            tma.async_copy_shared_to_global(last_desc, [row, R2 + 64 * k], tiles_n.index(which * P + k))
        only = gl.arange(0, 16, layout=gl.SliceLayout(0, accumulator(16)))[None, :] == 0
        store_columns(P_ptr, row, rows, R2 + C, gl.where(only, along(k_a, 16), 0.0).to(kind), 16, SP, R2 + C + 8)
        for q in gl.static_range(PIECES):
            if q < P2:
                tile = tiles_d.index(which * P2 + q)
            else:
                tile = tiles_t.index(which)
            d = tile.load(accumulator(piece_width(q, P2, J, TAIL))).to(gl.float32)
            d = (d * along(k_b, piece_width(q, P2, J, TAIL))).to(kind)
            store_columns(Q_ptr, row, rows, R2 + J * q, d, piece_width(q, P2, J, TAIL), SQ, R2 + L2)
        store_columns(Q_ptr, row, rows, R2 + L2, gl.where(only, along(k_b, 16), 0.0).to(kind), 16, SQ, R2 + L2 + 8)
        turn += 1
        group += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit
def produce(
    descs, weights, bars, groups,
    C: gl.constexpr, R2: gl.constexpr, L2: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Copy weights chunk by chunk."""
    a_desc, e_desc, b_desc, t_desc, f_desc, c_desc = descs
    weights_a, weights_e, weights_b, weights_t, weights_f, weights_c = weights
    full, empty, _ = bars
    P: gl.constexpr = C // 64
    RESIDENT: gl.constexpr = R2 // J == SLOTS
    item = 0
    group = gl.program_id(0)
    if RESIDENT:
        groups = group + 1
    while group < groups:
        for i in range(R2 // J):
            slot, phase = slot_of(item, SLOTS, RESIDENT)
            bar = full.index(slot)
            if not RESIDENT:
                mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(bar, (2 * C + 32 + J * P2 + TAIL) * J * 2)
            for k in gl.static_range(P):
                tma.async_copy_global_to_shared(a_desc, [J * i, 64 * k], bar, weights_a.index(slot * P + k))
                tma.async_copy_global_to_shared(c_desc, [64 * k, J * i], bar, weights_c.index(slot * P + k))
            tma.async_copy_global_to_shared(e_desc, [J * i, C], bar, weights_e.index(slot))
            tma.async_copy_global_to_shared(f_desc, [J * i, L2], bar, weights_f.index(slot))
            for q in gl.static_range(P2):
                tma.async_copy_global_to_shared(b_desc, [J * i, J * q], bar, weights_b.index(slot * P2 + q))
            if TAIL > 0:
                tma.async_copy_global_to_shared(t_desc, [J * i, J * P2], bar, weights_t.index(slot))
            item += 1
        group += gl.num_programs(0)


@gluon.jit
def mu2_back(
    grad_desc, n_desc, extra_desc, d_desc, tail_desc, a_desc, e_desc, b_desc, t_desc, f_desc, c_desc,
    h_desc, p_desc, q_desc, last_desc, stats_ptr, P_ptr, Q_ptr, groups, rows,
    C: gl.constexpr, R2: gl.constexpr, L2: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, SP: gl.constexpr, SQ: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Both branches again, the product h, and the gradients P and Q of the branches ahead of their scales; next to P
    and Q what the norms take from them, as multiples k of n and d."""
    P: gl.constexpr = C // 64
    WHOLE: gl.constexpr = P2 if P2 > 0 else 1
    REST: gl.constexpr = TAIL if TAIL > 0 else 16
    kind: gl.constexpr = n_desc.dtype
    tiles_g = gl.allocate_shared_memory(kind, [GROUPS * P, 64, 64], grad_desc.layout)
    tiles_n = gl.allocate_shared_memory(kind, [GROUPS * P, 64, 64], n_desc.layout)
    tiles_x = gl.allocate_shared_memory(kind, [GROUPS, 64, 16], extra_desc.layout)
    tiles_d = gl.allocate_shared_memory(kind, [GROUPS * P2 if P2 > 0 else 1, 64, J], d_desc.layout)
    tiles_t = gl.allocate_shared_memory(kind, [GROUPS if TAIL > 0 else 1, 64, REST], tail_desc.layout)
    tiles_h = gl.allocate_shared_memory(kind, [GROUPS, 64, J], h_desc.layout)
    tiles_p = gl.allocate_shared_memory(kind, [GROUPS, 64, J], p_desc.layout)
    tiles_q = gl.allocate_shared_memory(kind, [GROUPS, 64, J], q_desc.layout)
    weights_a = gl.allocate_shared_memory(kind, [SLOTS * P, J, 64], a_desc.layout)
    weights_e = gl.allocate_shared_memory(kind, [SLOTS, J, 16], e_desc.layout)
    weights_b = gl.allocate_shared_memory(kind, [SLOTS * P2 if P2 > 0 else 1, J, J], b_desc.layout)
    weights_t = gl.allocate_shared_memory(kind, [SLOTS if TAIL > 0 else 1, J, REST], t_desc.layout)
    weights_f = gl.allocate_shared_memory(kind, [SLOTS, J, 16], f_desc.layout)
    weights_c = gl.allocate_shared_memory(kind, [SLOTS * P, 64, J], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    for i in gl.static_range(GROUPS):
        mbarrier.init(full_x.index(i), count=1)
    fence_async_shared()
    inputs = (grad_desc, n_desc, extra_desc, d_desc, tail_desc)
    outputs = (h_desc, p_desc, q_desc, last_desc)
    descs = (a_desc, e_desc, b_desc, t_desc, f_desc, c_desc)
    tokens_in = (tiles_g, tiles_n, tiles_x, tiles_d, tiles_t)
    tokens_out = (tiles_h, tiles_p, tiles_q)
    weights = (weights_a, weights_e, weights_b, weights_t, weights_f, weights_c)
    bars = (full, empty, full_x)
    pointers = (stats_ptr, P_ptr, Q_ptr)
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, inputs, outputs, tokens_in, tokens_out, weights, bars, pointers, groups, rows,
                       C, R2, L2, P2, TAIL, J, GROUPS, SLOTS, SP, SQ)),
            (consume, (1, inputs, outputs, tokens_in, tokens_out, weights, bars, pointers, groups, rows,
                       C, R2, L2, P2, TAIL, J, GROUPS, SLOTS, SP, SQ)),
            (produce, (descs, weights, bars, groups, C, R2, L2, P2, TAIL, J, SLOTS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, inputs, outputs, tokens_in, tokens_out, weights, bars, pointers, groups, rows,
                       C, R2, L2, P2, TAIL, J, GROUPS, SLOTS, SP, SQ)),
            (consume, (1, inputs, outputs, tokens_in, tokens_out, weights, bars, pointers, groups, rows,
                       C, R2, L2, P2, TAIL, J, GROUPS, SLOTS, SP, SQ)),
            (consume, (2, inputs, outputs, tokens_in, tokens_out, weights, bars, pointers, groups, rows,
                       C, R2, L2, P2, TAIL, J, GROUPS, SLOTS, SP, SQ)),
            (produce, (descs, weights, bars, groups, C, R2, L2, P2, TAIL, J, SLOTS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
