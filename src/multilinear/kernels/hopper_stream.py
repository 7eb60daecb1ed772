"""What the second Mu-Layer multiplies, on its way to a processor of the Hopper kind."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multilinear.kernels.hopper_names import load_tile
from multilinear.kernels.hopper_parts import resident, slot_of


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
    RESIDENT: gl.constexpr = resident(C, R2, J, PIECES, True, SLOTS, SLOTS_C)
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
            item = put_form(h_desc, i_desc, J * p, full, empty, tiles_b, tiles_t, item, P2, TAIL, J, SLOTS, RESIDENT)
        for i in range(R2 // J):
            item, item_c = put_chunk(
                a_desc, e_desc, b_desc, t_desc, c_desc, (tiles_a, tiles_e, tiles_b, tiles_t, tiles_c), full, empty,
                full_c, empty_c, i, item, item_c, C, P2, TAIL, J, SLOTS, SLOTS_C, RESIDENT,
            )  # fmt: skip
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
        load_tile(desc, [row, 64 * k], full.index(slot), tiles.index(slot * P + k))
    return item + 1


@gluon.jit
def put_low(
    desc, tail_desc, row, bar, tiles, tails, slot, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr
):  # fmt: skip
    for q in gl.static_range(P2):
        load_tile(desc, [row, J * q], bar, tiles.index(slot * P2 + q))
    if TAIL > 0:
        load_tile(tail_desc, [row, J * P2], bar, tails.index(slot))


@gluon.jit
def produce_back(
    descs, weights, bars, groups,
    C: gl.constexpr, R2: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr,
    SLOTS: gl.constexpr, SLOTS_C: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """The same for the way back: chunk by chunk, then the second form's, then D and the first form's."""
    a_desc, e_desc, b_desc, t_desc, c_desc, low_desc, low_tail_desc, down_desc, gram_desc = descs
    weights_a, _, weights_b, weights_t, _ = weights
    full, empty, full_c, empty_c, _ = bars
    P: gl.constexpr = C // 64
    PIECES: gl.constexpr = P2 + (1 if TAIL > 0 else 0)
    RESIDENT: gl.constexpr = resident(C, R2, J, PIECES, WHOLE, SLOTS, SLOTS_C)
    item = 0
    item_c = 0
    group = gl.program_id(0)
    if RESIDENT:
        groups = group + 1
    while group < groups:
        for i in range(R2 // J):
            item, item_c = put_chunk(
                a_desc, e_desc, b_desc, t_desc, c_desc, weights, full, empty, full_c, empty_c, i, item, item_c,
                C, P2, TAIL, J, SLOTS, SLOTS_C, RESIDENT,
            )  # fmt: skip
        for p in range(PIECES):
            item = put_form(low_desc, low_tail_desc, J * p, full, empty, weights_b, weights_t, item, P2, TAIL, J, SLOTS,
                            RESIDENT)  # fmt: skip
        for p in range(PIECES if WHOLE else 0):
            item = put(down_desc, J * p, full, empty, weights_a, item, P, J, SLOTS, RESIDENT)
        for c in range(C // J if WHOLE else 0):
            item = put(gram_desc, J * c, full, empty, weights_a, item, P, J, SLOTS, RESIDENT)
        group += gl.num_programs(0)


@gluon.jit
def put_chunk(
    a_desc, e_desc, b_desc, t_desc, c_desc, weights, full, empty, full_c, empty_c, i, item, item_c,
    C: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr, SLOTS: gl.constexpr,
    SLOTS_C: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    """Chunk i of A with its extras, of B and of C."""
    tiles_a, tiles_e, tiles_b, tiles_t, tiles_c = weights
    P: gl.constexpr = C // 64
    slot, phase = slot_of(item, SLOTS, RESIDENT)
    bar = full.index(slot)
    claim(empty, slot, phase, RESIDENT)
    mbarrier.expect(bar, (C + 16 + J * P2 + TAIL) * J * 2)
    for k in gl.static_range(P):
        load_tile(a_desc, [J * i, 64 * k], bar, tiles_a.index(slot * P + k))
    load_tile(e_desc, [J * i, C], bar, tiles_e.index(slot))
    put_low(b_desc, t_desc, J * i, bar, tiles_b, tiles_t, slot, P2, TAIL, J)
    slot, phase = slot_of(item_c, SLOTS_C, RESIDENT)
    bar = full_c.index(slot)
    claim(empty_c, slot, phase, RESIDENT)
    mbarrier.expect(bar, C * J * 2)
    for k in gl.static_range(P):
        load_tile(c_desc, [64 * k, J * i], bar, tiles_c.index(slot * P + k))
    return item + 1, item_c + 1


@gluon.jit
def put_form(
    desc, tail_desc, row, full, empty, tiles, tails, item, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr,
    SLOTS: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    slot, phase = slot_of(item, SLOTS, RESIDENT)
    claim(empty, slot, phase, RESIDENT)
    mbarrier.expect(full.index(slot), (J * P2 + TAIL) * J * 2)
    put_low(desc, tail_desc, row, full.index(slot), tiles, tails, slot, P2, TAIL, J)
    return item + 1


@gluon.jit
def put_both(
    both_desc, extra_desc, c_desc, tiles_b, tiles_e, tiles_c, bars, i, item, item_c,
    C: gl.constexpr, J: gl.constexpr, SLOTS: gl.constexpr, SLOTS_C: gl.constexpr,
):  # fmt: skip
    """Start copying a chunk of J hidden channels: of merged branches, with their extras, and of C."""
    P: gl.constexpr = C // 64
    slot, phase = slot_of(item, SLOTS, False)
    mbarrier.wait(bars[1].index(slot), phase ^ 1)
    mbarrier.expect(bars[0].index(slot), (C + 16) * J * 4)
    for k in gl.static_range(P):
        load_tile(both_desc, [2 * J * i, 64 * k], bars[0].index(slot), tiles_b.index(slot * P + k))
    load_tile(extra_desc, [2 * J * i, C], bars[0].index(slot), tiles_e.index(slot))
    slot_c, phase_c = slot_of(item_c, SLOTS_C, False)
    mbarrier.wait(bars[3].index(slot_c), phase_c ^ 1)
    mbarrier.expect(bars[2].index(slot_c), C * J * 2)
    for k in gl.static_range(P):
        load_tile(c_desc, [64 * k, J * i], bars[2].index(slot_c), tiles_c.index(slot_c * P + k))
    return item + 1, item_c + 1


@gluon.jit
def put_tiles(desc, row, column, ring, full, empty, item, GROUPS: gl.constexpr, TILES: gl.constexpr):
    """Start copying a tile for each group."""
    slot, phase = slot_of(item, TILES, False)
    for g in gl.static_range(GROUPS):
        bar = full.index(g * TILES + slot)
        mbarrier.wait(empty.index(g * TILES + slot), phase ^ 1)
        mbarrier.expect(bar, 64 * 64 * 2)
        load_tile(desc, [row + 64 * g, column], bar, ring.index(g * TILES + slot))
    return item + 1


@gluon.jit
def produce_tokens(
    descs, buffers, bars, groups, C: gl.constexpr, SP: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr
):  # fmt: skip
    """For `hopper_norm_back`, copy rows of P, then of x, then of the gradient."""
    p_desc, x_desc, grad_desc = descs[0], descs[1], descs[2]
    ring = buffers[0]
    full, empty = bars[0], bars[1]
    item = 0
    group = gl.program_id(0)
    while group < groups:
        row = group * GROUPS * 64
        for i in range((SP + 63) // 64):
            item = put_tiles(p_desc, row, 64 * i, ring, full, empty, item, GROUPS, TILES)
        for k in range(C // 64):
            item = put_tiles(x_desc, row, 64 * k, ring, full, empty, item, GROUPS, TILES)
        for k in range(C // 64):
            item = put_tiles(grad_desc, row, 64 * k, ring, full, empty, item, GROUPS, TILES)
        group += gl.num_programs(0)


@gluon.jit
def produce_stack(
    descs, buffers, bars, groups, C: gl.constexpr, SP: gl.constexpr, J: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    """Beside that, copy J rows at a time; past the last one zeros, as for the columns of P that meet them."""
    wide_desc, narrow_desc = descs[4], descs[5]
    wides, narrows = buffers[1], buffers[2]
    full, empty = bars[2], bars[3]
    step = 0
    group = gl.program_id(0)
    while group < groups:
        for i in range((SP + 63) // 64 * (64 // J)):
            slot, phase = slot_of(step, SLOTS, False)
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(bar, C * J * 2)
            for k in gl.static_range(C // 128):
                load_tile(wide_desc, [J * i, 128 * k], bar, wides.index(slot * (C // 128) + k))
            if C % 128 > 0:
                load_tile(narrow_desc, [J * i, C // 128 * 128], bar, narrows.index(slot))
            step += 1
        group += gl.num_programs(0)
