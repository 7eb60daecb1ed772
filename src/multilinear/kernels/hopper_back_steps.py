"""Steps of the way back through the second Mu-Layer on Hopper: from its branches to d, and on to its input."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper_names import load_tile, meet, store_tile
from multilinear.kernels.hopper_parts import (
    accumulator,
    across,
    along,
    piece_width,
    release,
    row_norm,
    row_zeros,
    rows_layout,
    slot_of,
    store_columns,
    sum_rows,
    times_columns,
    zeros,
)


@gluon.jit
def piece(tiles, tails, place, q: gl.constexpr, P2: gl.constexpr):
    """Piece q of the low rank."""
    if q < P2:
        return tiles.index(place * P2 + q)
    else:
        return tails.index(place)


@gluon.jit
def shift_part(products, first: gl.constexpr, WIDTH: gl.constexpr):
    """What of products with the extras, whose columns start at `first`, met a norm's shift."""
    column = columns_from(-first, WIDTH)
    return sum_rows(gl.where((column == 2) | (column == 4), products, 0.0))


@gluon.jit
def columns_from(first, WIDTH: gl.constexpr):
    return first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, accumulator(WIDTH)))[None, :]


@gluon.jit
def to_low(
    which: gl.constexpr, buffers, weights, bars, pointers, done, k_b, row, rows, item,
    C: gl.constexpr, R2: gl.constexpr, L2: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr,
    SLOTS: gl.constexpr, FORMS: gl.constexpr, SP: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    """The gradient of d: with what the norm takes from it, through the form that gave the variance."""
    tiles_d, tiles_t, weights_b, weights_t = buffers[3], buffers[4], weights[2], weights[3]
    full, empty = bars[0], bars[1]
    P_ptr = pointers[1]
    low_linear_ptr = pointers[3] + FORMS + C + L2
    PIECES: gl.constexpr = P2 + (1 if TAIL > 0 else 0)
    dds = ()
    for q in gl.static_range(PIECES):
        dds = dds + (done[1 + q],)
    for p in gl.static_range(PIECES):
        slot, phase = slot_of(item, SLOTS, RESIDENT)
        mbarrier.wait(full.index(slot), phase)
        left = piece(tiles_d, tiles_t, which, p, P2)
        new = ()
        for q in gl.static_range(PIECES):
            right = piece(weights_b, weights_t, slot, q, P2).slice(0, piece_width(p, P2, J, TAIL), 0)
            new = new + (times_columns(left, right, dds[q], False),)
        dds = warpgroup_mma_wait(0, deps=new + (zeros(16),))
        release(empty, slot, RESIDENT)
        item += 1
    for q in gl.static_range(PIECES):
        linear = across(low_linear_ptr, J * q, piece_width(q, P2, J, TAIL), L2) * 0.5
        d = dds[q] + along(k_b, piece_width(q, P2, J, TAIL)) * linear
        d = gl.where(columns_from(J * q, piece_width(q, P2, J, TAIL)) < L2, d, 0.0).to(tiles_d.dtype)
        store_columns(P_ptr, row, rows, R2 + C + 8 + J * q, d, piece_width(q, P2, J, TAIL), SP, R2 + C + 8 + L2)
        piece(tiles_d, tiles_t, which, q, P2).store(d)
    fence_async_shared()
    return item


@gluon.jit
def to_input(
    which: gl.constexpr, descs, buffers, weights, bars, pointers, done, k_a, row, rows, tokens, item, eps,
    C: gl.constexpr, P2: gl.constexpr, TAIL: gl.constexpr, J: gl.constexpr, SLOTS: gl.constexpr,
    FORMS: gl.constexpr, DROP: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    """The gradient of n, in the same way and from d, and that of x."""
    x_desc, out_desc = descs[5], descs[6]
    tiles_g, tiles_n, tiles_d, tiles_t, sums = buffers[0], buffers[1], buffers[3], buffers[4], buffers[8]
    weights_a = weights[0]
    full, empty = bars[0], bars[1]
    bar = bars[4].index(which)
    vectors_ptr, keep_ptr = pointers[3], pointers[4]
    P: gl.constexpr = C // 64
    PIECES: gl.constexpr = P2 + (1 if TAIL > 0 else 0)
    linear_ptr = vectors_ptr + FORMS
    index = row + gl.arange(0, 64, layout=rows_layout())
    dns = ()
    for k in gl.static_range(P):
        dns = dns + (done[1 + PIECES + k],)
    for p in gl.static_range(PIECES):
        slot, phase = slot_of(item, SLOTS, RESIDENT)
        mbarrier.wait(full.index(slot), phase)
        left = piece(tiles_d, tiles_t, which, p, P2)
        new = ()
        for k in gl.static_range(P):
            right = weights_a.index(slot * P + k).slice(0, piece_width(p, P2, J, TAIL), 0)
            new = new + (times_columns(left, right, dns[k], False),)
        dns = warpgroup_mma_wait(0, deps=new + (zeros(16),))
        release(empty, slot, RESIDENT)
        item += 1
    for c in gl.static_range(C // J):
        slot, phase = slot_of(item, SLOTS, RESIDENT)
        mbarrier.wait(full.index(slot), phase)
        left = tiles_n.index(which * P + c * J // 64).slice(c * J % 64, J, 1)
        new = ()
        for k in gl.static_range(P):
            new = new + (times_columns(left, weights_a.index(slot * P + k), dns[k], False),)
        dns = warpgroup_mma_wait(0, deps=new + (zeros(16),))
        release(empty, slot, RESIDENT)
        item += 1
    # through the norm, with x in place of n
    tma.store_wait(0)
    meet()
    mbarrier.expect(bar, C * 128)
    for k in gl.static_range(P):
        load_tile(x_desc, [row, 64 * k], bar, tiles_n.index(which * P + k))
    keep = row_zeros() + 1.0
    if DROP:
        keep = gl.load(keep_ptr + index // tokens, mask=index < rows, other=0.0)
    mbarrier.wait(bar, 1)
    fulls = ()
    for k in gl.static_range(P):
        fulls = fulls + (dns[k] + k_a[:, None] * (across(linear_ptr, 64 * k, 64, C) * 0.5),)
    norm_back(tiles_n, tiles_g, sums, which, fulls, keep, vectors_ptr, eps, C, x_desc.dtype)
    fence_async_shared()
    for k in gl.static_range(P):
        store_tile(out_desc, [row, 64 * k], tiles_n.index(which * P + k))
    return item


@gluon.jit
def norm_back(
    tiles_x, tiles_g, sums, which, dns, keep, vectors_ptr, eps, C: gl.constexpr, kind: gl.constexpr
):  # fmt: skip
    """Put the gradient of x in its place; add to the sums over rows that give those of the norm's weight and bias and
    of the layer's last bias."""
    P: gl.constexpr = C // 64
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(64))
    mean, scale = row_norm(tiles_x, which * P, eps, C)
    level = row_zeros()
    follow = row_zeros()
    for k in gl.static_range(P):
        x = (tiles_x.index(which * P + k).load(accumulator(64)).to(gl.float32) - mean[:, None]) * scale[:, None]
        dn = dns[k] * across(vectors_ptr, 64 * k, 64, C)
        level += gl.sum(dn, 1)
        follow += gl.sum(dn * x, 1)
        place = which * 3 * P + k
        sums.index(place).store(sums.index(place).load(columns) + gl.sum(dns[k] * x, 0))
        sums.index(place + P).store(sums.index(place + P).load(columns) + gl.sum(dns[k], 0))
        grad = tiles_g.index(which * P + k).load(accumulator(64)).to(gl.float32) * keep[:, None]
        sums.index(place + 2 * P).store(sums.index(place + 2 * P).load(columns) + gl.sum(grad, 0))
    level = (level / C)[:, None]
    follow = (follow / C)[:, None]
    for k in gl.static_range(P):
        x = (tiles_x.index(which * P + k).load(accumulator(64)).to(gl.float32) - mean[:, None]) * scale[:, None]
        dn = dns[k] * across(vectors_ptr, 64 * k, 64, C) - level - x * follow
        grad = tiles_g.index(which * P + k).load(accumulator(64)).to(gl.float32)
        tiles_x.index(which * P + k).store((grad + dn * scale[:, None]).to(kind))
