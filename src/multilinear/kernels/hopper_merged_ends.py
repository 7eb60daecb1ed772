"""How the way back through a second Mu-Layer with merged branches ends on Hopper: what the norms of both branches take,
and the norm ahead of them; and sums of the gradient over all tokens, which are products too."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_names import meet, store_tile
from multilinear.kernels.hopper_norm_back import add_up
from multilinear.kernels.hopper_parts import (
    accumulator,
    halves,
    operand,
    release,
    row_zeros,
    slot_of,
    times_columns,
    zeros,
)


@gluon.jit
def taken_part(ns, c: gl.constexpr, k_a, k_b, kind: gl.constexpr):
    """64 columns of n, of which each row is multiplied for one of both norms, as a left side."""
    n = ns[c // 2].to(gl.float32)
    if c % 2 == 0:
        n = n * k_a[:, None]
    else:
        n = n * k_b[:, None]
    return gl.convert_layout(n.to(kind), operand())


@gluon.jit
def add_forms(dns, ns, k_a, k_b, tiles_b, full, empty, item, kind: gl.constexpr, P: gl.constexpr, SLOTS: gl.constexpr):
    """Add what the norms of both branches take: each gram matrix times such parts of n."""
    left = taken_part(ns, 0, k_a, k_b, kind)
    for c in gl.static_range(2 * P):
        slot, phase = slot_of(item, SLOTS, False)
        mbarrier.wait(full.index(slot), phase)
        new = ()
        for k in gl.static_range(P):
            new = new + (times_columns(left, tiles_b.index(slot * P + k), dns[k], False),)
        if c + 1 < 2 * P:
            ahead = taken_part(ns, c + 1, k_a, k_b, kind)
        else:
            ahead = left
        done = warpgroup_mma_wait(0, deps=new + (left,))
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
        follow += gl.sum(dns[k] * ns[k].to(gl.float32), 1)
    level = level * unit / C
    follow = follow * unit / C
    for k in gl.static_range(P):
        slot, phase = slot_of(item + k, STAGES, False)
        mbarrier.wait(full_b.index(slot), phase)
        place = (slot * GROUPS + which) * 2
        dx = dns[k] * unit[:, None] - level[:, None] - ns[k].to(gl.float32) * follow[:, None]
        left, right = halves(dx)
        left += ring.index(place).load(accumulator(32)).to(gl.float32)
        right += ring.index(place + 1).load(accumulator(32)).to(gl.float32)
        ring.index(place).store(left.to(kind))  # each warp where it has read
        ring.index(place + 1).store(right.to(kind))
        fence_async_shared()
        meet()
        store_tile(out_desc, [row, 64 * k], ring.index(place))
        store_tile(out_desc, [row, 64 * k + 32], ring.index(place + 1))
    tma.store_wait(0)
    for k in gl.static_range(P):
        release(empty_b, (item + k) % STAGES, False)
