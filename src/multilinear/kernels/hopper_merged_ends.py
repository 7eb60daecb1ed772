"""How the way back through a second Mu-Layer with merged branches ends on Hopper: what the norms of both branches take,
and the norm ahead of them; and sums of the gradient over all tokens, which are products too."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_names import meet, store_tile
from multilinear.kernels.hopper_norm_back import add_up
from multilinear.kernels.hopper_pairs import in_two, rows_multiplied
from multilinear.kernels.hopper_parts import (
    accumulator,
    along,
    halves,
    in_full,
    operand,
    put_vectors,
    release,
    row_zeros,
    run,
    run_start,
    runs,
    slot_of,
    times_columns,
    zeros,
)


@gluon.jit
def keep_shifts(both_ptr, kind: gl.constexpr, C: gl.constexpr, R2: gl.constexpr):
    """The shifts of both branches' norms as stored, 32 of each in turns, from the columns that they are in next to the
    matrices: another one for either branch, with zeros in that of the other."""
    WIDTH: gl.constexpr = 32
    PIECES: gl.constexpr = 2 * R2 // WIDTH
    shifts = gl.allocate_shared_memory(kind, [PIECES, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    loaded = ()
    for i in gl.static_range(runs(PIECES)):
        row = gl.arange(0, WIDTH * run(PIECES, i), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        row += WIDTH * run_start(PIECES, i)
        beside = both_ptr + row * (C + 16) + C
        loaded = loaded + (gl.load(beside + 2) + gl.load(beside + 7),)
    put_vectors(shifts, loaded, WIDTH, PIECES)
    return shifts


@gluon.jit
def put_linear(tiles, linear_ptr, P: gl.constexpr):
    """The linear parts of both forms, halved, in rows 0 and 1 of tiles: what `level_columns` multiplies."""
    held: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 16, layout=gl.SliceLayout(1, held))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, held))[None, :]
    for k in gl.static_range(P):  # 64 numbers of each in turns
        part = gl.load(linear_ptr + 128 * k + 64 * i + j, mask=(i < 2) & (j < 64), other=0.0)
        tiles.index(k).store((0.5 * part).to(tiles.dtype))


@gluon.jit
def level_columns(k_a, k_b, kind: gl.constexpr):
    """Both numbers of each row in columns 0 and 1, as a left side."""
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, accumulator(16)))[None, :]
    out = gl.where(j == 0, along(k_a, 16), gl.where(j == 1, along(k_b, 16), 0.0))
    return gl.convert_layout(out.to(kind), operand())


@gluon.jit
def taken_part(ns, c: gl.constexpr, parts_a, parts_b):
    """64 columns of n, of which each row is multiplied for one of both norms, as a left side."""
    return gl.convert_layout(rows_multiplied(ns[c // 2], parts_a if c % 2 == 0 else parts_b), operand())


@gluon.jit
def add_forms(
    dns, ns, k_a, k_b, linear, tiles_b, full, empty, item, kind: gl.constexpr, P: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    """Add what the norms of both branches take: the linear parts of both forms, and each gram matrix times such parts
    of n."""
    level = level_columns(k_a, k_b, kind)
    new = ()
    for k in gl.static_range(P):
        new = new + (times_columns(level, linear.index(k), dns[k], False),)
    dns = new
    parts_a, parts_b = in_two(k_a, kind), in_two(k_b, kind)
    left = taken_part(ns, 0, parts_a, parts_b)
    for c in gl.static_range(2 * P):
        slot, phase = slot_of(item, SLOTS, False)
        mbarrier.wait(full.index(slot), phase)
        new = ()
        for k in gl.static_range(P):
            new = new + (times_columns(left, tiles_b.index(slot * P + k), dns[k], False),)
        if c + 1 < 2 * P:
            ahead = taken_part(ns, c + 1, parts_a, parts_b)
        else:
            ahead = left
        done = warpgroup_mma_wait(0, deps=new + (left, level))
        dns = done[:P]
        release(empty, slot, False)
        left = ahead
        item += 1
    return dns, item


@gluon.jit
def sum_gradient(tiles, place, select, P: gl.constexpr):
    """Start summing up a tile of the gradient, each row times what became of the layer."""
    new = ()
    for k in gl.static_range(P):
        new = new + (add_up(tiles.index(place + k), select, zeros(16)),)
    return new


@gluon.jit
def add_to_totals(totals, place, sums, P: gl.constexpr):
    """Add that to the sums over all tiles."""
    for k in gl.static_range(P):
        total = totals.index(place + k)
        # of the columns only two are not zero: they add up to what was selected
        total.store(total.load(gl.SliceLayout(1, accumulator(16))) + gl.sum(sums[k], 1))


@gluon.jit
def through_norm(
    which: gl.constexpr, ring, full_b, empty_b, item, ns, dns, unit, out_desc, row, kind: gl.constexpr,
    C: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write the gradient of the input: that of the output, which has come once more, and what goes through the norm. It
    is written from where that of the output was."""
    P: gl.constexpr = C // 64
    level = row_zeros()
    follow = row_zeros()
    for k in gl.static_range(P):
        level += gl.sum(dns[k], 1)
        follow += gl.sum(dns[k] * in_full(ns[k]), 1)
    level = level * unit / C
    follow = follow * unit / C
    for k in gl.static_range(P):
        slot, phase = slot_of(item + k, STAGES, False)
        mbarrier.wait(full_b.index(slot), phase)
        place = (slot * GROUPS + which) * 2
        dx = dns[k] * unit[:, None] - level[:, None] - in_full(ns[k]) * follow[:, None]
        left, right = halves(dx)
        left += in_full(ring.index(place).load(accumulator(32)))
        right += in_full(ring.index(place + 1).load(accumulator(32)))
        ring.index(place).store(left.to(kind))  # each warp where it has read
        ring.index(place + 1).store(right.to(kind))
        fence_async_shared()
        meet()
        store_tile(out_desc, [row, 64 * k], ring.index(place))
        store_tile(out_desc, [row, 64 * k + 32], ring.index(place + 1))
    tma.store_wait(0)
    for k in gl.static_range(P):
        release(empty_b, (item + k) % STAGES, False)
