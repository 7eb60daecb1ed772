"""Steps of the way back through the first Mu-Layer on Hopper, for 64 tokens and a chunk of the hidden width: branches
and their gradients ahead of their norms, the sums that the norms need, and from there to E, db and the low rank."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from multilinear.kernels.hopper_names import meet, store_tile
from multilinear.kernels.hopper_pairs import (
    column_products,
    eights,
    multiplied,
    multiplied_onto,
    row_products,
    row_sums,
)
from multilinear.kernels.hopper_parts import (
    accumulator,
    along,
    in_full,
    kept,
    operand,
    store_own,
    sum_rows,
    times,
    times_columns,
    zeros,
)


@gluon.jit
def branches(
    tiles_g, tiles_a, weights, biases, turn, ds, stats, i, C: gl.constexpr, J: gl.constexpr, LOWS: gl.constexpr,
    AGAIN: gl.constexpr,
):  # fmt: skip
    """A chunk of both normed branches, and of the gradient of their product. The first branch is put down where it was
    ahead of its norm, and is there if this is done again."""
    weights_b, weights_c = weights
    mean, scale_a, scale_b, keep = stats
    P: gl.constexpr = C // 64
    kind: gl.constexpr = tiles_a.dtype
    dh = zeros(J)
    for k in gl.static_range(P):
        dh = times_columns(tiles_g.index(turn * P + k), weights_c.index(i * P + k), dh, k == 0)
    b = zeros(J)
    for j in gl.static_range(LOWS):
        b = times(ds[j], weights_b.index(i * LOWS + j), b, j == 0)
    done = warpgroup_mma_wait(0, deps=(dh, b) + ds)
    tile_a = tiles_a.index(turn * (C // J) + i)
    a = tile_a.load(accumulator(J))
    if not AGAIN:
        a = (in_full(a) * along(scale_a, J) - along(mean * scale_a, J)).to(kind)
        if C > J:
            tile_a.store(a)
    b = ((done[1] + kept(biases, i, J)) * along(scale_b, J)).to(kind)
    return a, b, (done[0] * along(keep, J)).to(kind)


@gluon.jit
def behind_norms(norms, i, a, b, COUNT: gl.constexpr, J: gl.constexpr):
    """What both branches multiply."""
    p = multiplied_onto(a, kept(norms, i, J), kept(norms, COUNT + i, J))
    return p, multiplied_onto(b, kept(norms, 2 * COUNT + i, J), kept(norms, 3 * COUNT + i, J))


@gluon.jit
def ahead_of_norms(norms, i, p, q, dh, COUNT: gl.constexpr, J: gl.constexpr):
    """Gradients of both branches behind their norms' weights, and of the normed branches."""
    dp, dq = multiplied(dh, q), multiplied(dh, p)
    return dp, dq, multiplied(dp, kept(norms, i, J)), multiplied(dq, kept(norms, 2 * COUNT + i, J))


@gluon.jit
def first_pass(
    h_ptr, norms, row, rows, i, a, b, dh, more, C: gl.constexpr, J: gl.constexpr, DROP: gl.constexpr
):  # fmt: skip
    """Write a chunk of h. Gradients of the normed branches; sums for those of their norms' weights and biases."""
    p, q = behind_norms(norms, i, a, b, C // J, J)
    h = multiplied(p, q)
    if DROP:  # what it is multiplied with, less 1, so that this is not rounded
        h = multiplied_onto(h, along(more, J), h)
    store_own(h_ptr, row, rows, J * i, h, C)
    dp, dq, grad_a, grad_b = ahead_of_norms(norms, i, p, q, dh, C // J, J)
    return grad_a, grad_b, column_products(dp, a, J) + column_products(dq, b, J)


@gluon.jit
def add_row_sums(sums, grad_a, grad_b, a, b):
    """Those of the gradients and of their products with what they are gradients of."""
    parts_a, parts_b = eights(grad_a), eights(grad_b)
    level_a, level_b = sums[0] + row_sums(parts_a), sums[2] + row_sums(parts_b)
    return level_a, sums[1] + row_products(parts_a, eights(a)), level_b, sums[3] + row_products(parts_b, eights(b))


@gluon.jit
def second_pass(
    e_desc, db_ptr, tile_e, weights_b, scales, down, a, b, grad_a, grad_b, row, rows, i, C: gl.constexpr,
    J: gl.constexpr, LOWS: gl.constexpr, IMAGE: gl.constexpr,
):  # fmt: skip
    """Put down a chunk of E, in a tile that nothing else reads any more, and write it, but not of images; write db, and
    add what it gives to the low rank."""
    scale_a, level_a, along_a, scale_b, level_b, along_b = scales
    rest_a = multiplied_onto(a, along(along_a, J), along(level_a, J))
    rest_b = multiplied_onto(b, along(along_b, J), along(level_b, J))
    db = multiplied_onto(grad_b, along(scale_b, J), rest_b)
    left = gl.convert_layout(db, operand())
    new = ()
    for j in gl.static_range(LOWS):
        new = new + (times_columns(left, weights_b.index(i * LOWS + j), down[j], False),)
    tile_e.store(multiplied_onto(grad_a, along(scale_a, J), rest_a))
    if not IMAGE:
        fence_async_shared()
        meet()
        store_tile(e_desc, [row, J * i], tile_e)
    store_own(db_ptr, row, rows, J * i, db, C)
    return warpgroup_mma_wait(0, deps=new + (left,))[:LOWS]


@gluon.jit
def scales_of(stats, sums, kind: gl.constexpr, C: gl.constexpr):
    """What gradients of normed branches are multiplied with, and what is added: a number, and one times the branch."""
    share_a, share_b = stats[1] / C, stats[2] / C
    level_a, along_a = -sum_rows(sums[0]) * share_a, -sum_rows(sums[1]) * share_a
    level_b, along_b = -sum_rows(sums[2]) * share_b, -sum_rows(sums[3]) * share_b
    return (
        stats[1].to(kind), level_a.to(kind), along_a.to(kind), stats[2].to(kind), level_b.to(kind), along_b.to(kind)
    )  # fmt: skip
