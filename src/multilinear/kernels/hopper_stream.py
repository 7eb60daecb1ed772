"""The weights of the second Mu-Layer on their way to a processor of the Hopper kind."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from multilinear.kernels.hopper_parts import slot_of


@gluon.jit
def produce(
    descs, buffers, bars, groups,
    C: gl.constexpr, R2: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr,
    SLOTS: gl.constexpr, SLOTS_C: gl.constexpr,
):  # fmt: skip
    """Copy weights in the order in which they are read: both forms', then chunk by chunk."""
    _, _, _, a_desc, e_desc, b_desc, t_desc, c_desc, g_desc, d_desc, h_desc, i_desc = descs
    _, tiles_a, tiles_e, tiles_b, tiles_t, tiles_c, _ = buffers
    full, empty, full_c, empty_c, _ = bars
    P: gl.constexpr = C // 64
    PIECES: gl.constexpr = P2 + (1 if TAIL > 0 else 0)
    RESIDENT: gl.constexpr = (C + R2) // J + 2 * PIECES == SLOTS
    item = 0
    item_c = 0
    group = gl.program_id(0)
    if RESIDENT:
        groups = group + 1
    while group < groups:
        for c in range(C // J):
            item = put(g_desc, J * c, full, empty, tiles_a, item, P, J, SLOTS, RESIDENT)
        for p in range(PIECES):
            item = put(d_desc, J * p, full, empty, tiles_a, item, P, J, SLOTS, RESIDENT)
        for p in range(PIECES):
            slot, phase = slot_of(item, SLOTS, RESIDENT)
            claim(empty, slot, phase, RESIDENT)
            mbarrier.expect(full.index(slot), (J * P2 + TAIL) * J * 2)
            put_low(h_desc, i_desc, J * p, full.index(slot), tiles_b, tiles_t, slot, P2, TAIL, J)
            item += 1
        for i in range(R2 // J):
            slot, phase = slot_of(item, SLOTS, RESIDENT)
            bar = full.index(slot)
            claim(empty, slot, phase, RESIDENT)
            mbarrier.expect(bar, (C + 16 + J * P2 + TAIL) * J * 2)
            for k in gl.static_range(P):
                tma.async_copy_global_to_shared(a_desc, [J * i, 64 * k], bar, tiles_a.index(slot * P + k))
            tma.async_copy_global_to_shared(e_desc, [J * i, C], bar, tiles_e.index(slot))
            put_low(b_desc, t_desc, J * i, bar, tiles_b, tiles_t, slot, P2, TAIL, J)
            item += 1
            slot, phase = slot_of(item_c, SLOTS_C, RESIDENT)
            bar = full_c.index(slot)
            claim(empty_c, slot, phase, RESIDENT)
            mbarrier.expect(bar, C * J * 2)
            for k in gl.static_range(P):
                tma.async_copy_global_to_shared(c_desc, [64 * k, J * i], bar, tiles_c.index(slot * P + k))
            item_c += 1
        group += gl.num_programs(0)


@gluon.jit
def claim(bars, slot, phase, RESIDENT: gl.constexpr):
    if not RESIDENT:
        mbarrier.wait(bars.index(slot), phase ^ 1)


@gluon.jit
def put(
    desc, row, full, empty, tiles, item, P: gl.constexpr, J: gl.constexpr, SLOTS: gl.constexpr, RESIDENT: gl.constexpr
):  # fmt: skip
    slot, phase = slot_of(item, SLOTS, RESIDENT)
    claim(empty, slot, phase, RESIDENT)
    mbarrier.expect(full.index(slot), P * J * 128)
    for k in gl.static_range(P):
        tma.async_copy_global_to_shared(desc, [row, 64 * k], full.index(slot), tiles.index(slot * P + k))
    return item + 1


@gluon.jit
def put_low(
    desc, tail_desc, row, bar, tiles, tails, slot, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr
):  # fmt: skip
    for q in gl.static_range(P2):
        tma.async_copy_global_to_shared(desc, [row, J * q], bar, tiles.index(slot * P2 + q))
    if TAIL > 0:
        tma.async_copy_global_to_shared(tail_desc, [row, J * P2], bar, tails.index(slot))
