"""Backward kernels of a Poly-Block: everything that is local to a token, computed again from what the way forward kept.

`mu2_back` goes from the gradient of the second Mu-Layer's output to those of its branches, and `norm_back` through the
norm ahead of it; `mu1_back` and `lift_back` do so for the first, this on the other side of the shift. What remains are
large products of matrices: of what is written here with the weights, and over all tokens.

A layer norm's gradient, `E - mean(E) - p mean(E p)`, needs two means over the hidden width, which is visited in chunks.
The first one vanishes in products with centred matrices. The second one is k, known after the last chunk, and `A' p` is
the gradient of the quadratic form that gave the variance, so that k n joins P as further columns.
"""

import triton
import triton.language as tl

from multilinear.kernels.block_parts import (
    columns,
    factor,
    gather,
    gather_rows,
    load_floats,
    load_low,
    load_matrix,
    load_rows,
    multiply,
    neighbours,
    pick,
    spread,
    store_low,
    store_rows,
)


@triton.jit
def store_column(ptr, row, live, x, STRIDE: tl.constexpr):
    tl.store(ptr + row * STRIDE, x.to(ptr.dtype.element_ty), mask=live)


@triton.jit
def mu2_back(
    grad_ptr, n_ptr, d_ptr, stats_ptr, A_ptr, B_ptr, C_ptr, h_ptr, P_ptr, Q_ptr, rows,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    R2: tl.constexpr, L2: tl.constexpr, L20: tl.constexpr, L21: tl.constexpr, X20: tl.constexpr, X21: tl.constexpr,
    SP: tl.constexpr, SQ: tl.constexpr, T: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both branches again, the product h, and the gradients P and Q of the branches ahead of their scales; next to P
    and Q what the norms take from them, as multiples k of n and d."""
    row = tl.program_id(0) * T + tl.arange(0, T)
    live = row < rows
    kind = n_ptr.dtype.element_ty
    n0, n1 = load_rows(n_ptr, row, live, C + 16, C0, C1)
    extra, _ = load_rows(n_ptr + C, row, live, C + 16, 16, 0)
    d0, d1 = load_low(d_ptr, row, live, L2 + 16, L2 + 16, X20, X21)
    g0, g1 = load_rows(grad_ptr, row, live, C, C0, C1)
    scale_a = tl.load(stats_ptr + row * 3, mask=live, other=0.0)
    scale_b = tl.load(stats_ptr + row * 3 + 1, mask=live, other=0.0)
    scale = tl.load(stats_ptr + row * 3 + 2, mask=live, other=0.0)[:, None]
    along = tl.zeros((T,), tl.float32)
    shift_a = tl.zeros((T, 16), tl.float32)
    shift_b = tl.zeros((T, 16), tl.float32)
    for start in tl.range(0, R2, J, num_stages=STAGES):
        j = columns(start, J)
        extras_A = load_matrix(A_ptr, columns(C, 16), j, C + 16, R2, 1, C + 16, False, False)
        extras_B = load_matrix(B_ptr, columns(L2, 16), j, L2 + 16, R2, 1, L2 + 16, False, False)
        first = tl.dot(extra, extras_A, multiply(n0, n1, A_ptr, j, C + 16, C0, C1, R2, 1, C + 16, False))
        second = multiply(d0, d1, B_ptr, j, L2 + 16, X20, X21, R2, 1, L2 + 16, False)
        dh = multiply(g0, g1, C_ptr, j, C, C0, C1, R2, R2, 1, False) * scale
        h = first * second
        along += tl.sum(dh * h, 1)
        p = (dh * second).to(kind)
        q = (dh * first).to(kind)
        tl.store(h_ptr + row[:, None] * R2 + j[None, :], (h * scale).to(kind), mask=live[:, None])
        tl.store(P_ptr + row[:, None] * SP + j[None, :], p, mask=live[:, None])
        tl.store(Q_ptr + row[:, None] * SQ + j[None, :], q, mask=live[:, None])
        shift_a = tl.dot(p, tl.trans(extras_A), shift_a)
        shift_b = tl.dot(q, tl.trans(extras_B), shift_b)
    # of the gradient along a branch only the part along its normed values counts, not that along the norm's shift
    column = tl.arange(0, 16)[None, :]
    shift = (column == 2) | (column == 4)
    k_a = ((tl.sum(tl.where(shift, shift_a, 0.0), 1) - scale_a * along) * scale_a / R2)[:, None]
    k_b = ((tl.sum(tl.where(shift, shift_b, 0.0), 1) - scale_b * along) * scale_b / R2)[:, None]
    n0, n1 = load_floats(n_ptr, row, live, C + 16, C0, C1)
    store_rows(P_ptr + R2, row, live, n0 * k_a, n1 * k_a, SP, C0, C1)
    d0, d1 = load_low(d_ptr, row, live, L2 + 16, L2, L20, L21)
    store_low(Q_ptr + R2, row, live, d0.to(tl.float32) * k_b, d1.to(tl.float32) * k_b, SQ, L2, L20, L21)
    only = tl.arange(0, 8)[None, :] == 0
    store_rows(P_ptr + R2 + C, row, live, tl.where(only, k_a, 0.0), k_a, SP, 8, 0)
    store_rows(Q_ptr + R2 + L2, row, live, tl.where(only, k_b, 0.0), k_b, SQ, 8, 0)


@triton.jit
def mu1_back(
    grad_ptr, u_ptr, stats_ptr, keep_ptr, B_ptr, C_ptr, vectors_ptr, E_ptr, h_ptr, db_ptr, d_ptr, sums_ptr,
    rows, height, width,
    C: tl.constexpr, R1: tl.constexpr, R10: tl.constexpr, R11: tl.constexpr, L1: tl.constexpr, L10: tl.constexpr,
    L11: tl.constexpr, US: tl.constexpr, SD1: tl.constexpr, MU1: tl.constexpr, V1: tl.constexpr, VL1: tl.constexpr,
    KEEP: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr, STEP: tl.constexpr, J: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """From the gradient of the first Mu-Layer's output to E, that of the shifted u; and the factors h, db and d.

    What the products give, dh and B d + b, waits in the cache, where h and db will be: a product's rows are spread over
    too many threads for a norm.
    """
    tile = tl.program_id(0) * T
    local = tl.arange(0, T)
    row = tile + local
    live = row < rows
    b_ptr = vectors_ptr + MU1
    y0 = tl.zeros((T, R10), tl.float32)
    y1 = tl.zeros((T, R11 if R11 > 0 else 16), tl.float32)
    for start in tl.range(0, C, J, num_stages=STAGES):
        j = columns(start, J)
        grad = tl.load(grad_ptr + row[:, None] * C + j[None, :], mask=live[:, None], other=0.0)
        y0, y1 = spread(grad, C_ptr, j, y0, y1, C, R1, R10, R11, R1, 1)
    store_rows(h_ptr, row, live, y0, y1, R1, R10, R11)
    d0, d1 = gather_rows(u_ptr, tile, local, live, height, width, R1, L1, L10, L11, US, KEEP, VL1)
    store_low(d_ptr, row, live, d0, d1, SD1, L1, L10, L11)
    store_column(d_ptr + L1, row, live, tl.full((T,), 1.0, tl.float32), SD1)
    y0, y1 = factor(d0, d1, B_ptr, b_ptr, R1, R10, R11, L1, L10, L11)
    store_rows(db_ptr, row, live, y0, y1, R1, R10, R11)
    step = tl.arange(0, STEP)
    a = gather(u_ptr, tile, step, tile + step < rows, height, width, 0, columns(0, BLOCK), R1, US, KEEP, V1)
    tl.debug_barrier()
    scale_a, shift_a = tl.zeros((STEP, BLOCK), tl.float32), tl.zeros((STEP, BLOCK), tl.float32)
    scale_b, shift_b = tl.zeros((STEP, BLOCK), tl.float32), tl.zeros((STEP, BLOCK), tl.float32)
    for start in tl.range(0, T, STEP, num_stages=1):
        ahead = start + STEP + tl.arange(0, STEP)  # on their way while these rows are dealt with
        there = (ahead < T) & (tile + ahead < rows)
        next_a = gather(u_ptr, tile, ahead, there, height, width, 0, columns(0, BLOCK), R1, US, KEEP, V1)
        more = mu1_rows(
            a, stats_ptr, keep_ptr, b_ptr, E_ptr, h_ptr, db_ptr, tile + start + tl.arange(0, STEP), rows,
            height * width, R1, US, DROP, BLOCK,
        )  # fmt: skip
        a = next_a
        scale_a += more[0]
        shift_a += more[1]
        scale_b += more[2]
        shift_b += more[3]
    store_sums(sums_ptr, (scale_a, shift_a, scale_b, shift_b), R1, BLOCK)
    tl.debug_barrier()
    y0 = tl.zeros((T, L10), tl.float32)
    y1 = tl.zeros((T, L11 if L11 > 0 else 16), tl.float32)
    for start in tl.range(0, R1, J, num_stages=STAGES):
        j = columns(start, J)
        db = tl.load(db_ptr + row[:, None] * R1 + j[None, :], mask=live[:, None], other=0.0)
        y0, y1 = spread(db, B_ptr, j, y0, y1, R1, L1, L10, L11, L1, 1)
    store_low(E_ptr + R1, row, live, y0, y1, US, L1, L10, L11)


@triton.jit
def load_below(ptr, j, mask):
    """A vector in every row of a tile, loaded by those threads that need it: they are faster than an exchange."""
    return tl.load(tl.broadcast_to((ptr + j)[None, :], mask.shape), mask=mask, other=0.0)


@triton.jit
def mu1_rows(
    a, stats_ptr, keep_ptr, b_ptr, E_ptr, h_ptr, db_ptr, row, rows, tokens,
    R1: tl.constexpr, US: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of E, h and db from those of dh, B d + b and the shifted u; and the terms of the gradients of the norms'
    parameters."""
    live = row < rows
    j = tl.arange(0, BLOCK)
    mask = live[:, None] & (j < R1)[None, :]
    place = row[:, None] * R1 + j[None, :]
    dh = tl.load(h_ptr + place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(db_ptr + place, mask=mask, other=0.0).to(tl.float32)
    a = a.to(tl.float32)
    mean = tl.load(stats_ptr + row * 3, mask=live, other=0.0)
    scale_a = tl.load(stats_ptr + row * 3 + 1, mask=live, other=0.0)
    scale_b = tl.load(stats_ptr + row * 3 + 2, mask=live, other=0.0)
    weight_a, weight_b = load_below(b_ptr + R1, j, mask), load_below(b_ptr + 3 * R1, j, mask)
    a = a * scale_a[:, None] - (mean * scale_a)[:, None]
    b *= scale_b[:, None]
    p = a * weight_a + load_below(b_ptr + 2 * R1, j, mask)
    q = b * weight_b + load_below(b_ptr + 4 * R1, j, mask)
    h = p * q
    if DROP:
        keep = tl.load(keep_ptr + row // tokens, mask=live, other=0.0)[:, None]
        h *= keep
        dh *= keep
    tl.store(h_ptr + place, h.to(h_ptr.dtype.element_ty), mask=mask)
    dp, dq = dh * q, dh * p
    grad_a, grad_b = dp * weight_a, dq * weight_b
    level_a, along_a = tl.sum(grad_a, 1) * scale_a / R1, tl.sum(grad_a * a, 1) * scale_a / R1
    level_b, along_b = tl.sum(grad_b, 1) * scale_b / R1, tl.sum(grad_b * b, 1) * scale_b / R1
    grad_a = grad_a * scale_a[:, None] - level_a[:, None] - a * along_a[:, None]
    grad_b = grad_b * scale_b[:, None] - level_b[:, None] - b * along_b[:, None]
    tl.store(E_ptr + row[:, None] * US + j[None, :], grad_a.to(E_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + place, grad_b.to(db_ptr.dtype.element_ty), mask=mask)
    return dp * a, dp, dq * b, dq


@triton.jit
def unshift(
    E_ptr, tile, local, live, height, width, first, j, R: tl.constexpr, STRIDE: tl.constexpr, KEEP: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """Columns `first + j` of the gradient of u: each goes back to where it came from, and at the border it stayed."""
    a, b, c, d, _, _, _, _ = neighbours(tile, local, height, width, KEEP)
    quarter = (j * 4) // R
    # u moved down in the first quarter, so that its gradient comes from below: the second quarter's neighbour
    came = pick(quarter, b, a, d, c)
    inside = live[:, None] & (j < R)[None, :]
    here = (tile + local)[:, None] * STRIDE + (first + j)[None, :]
    place = tl.max_contiguous(tl.multiple_of(here + came * STRIDE, [1, V]), [1, V])
    grad = tl.load(E_ptr + place, mask=tl.max_constancy(inside & (came != 0), [1, V]), other=0.0)
    if KEEP:
        stayed = tl.max_constancy(inside & (pick(quarter, a, b, c, d) == 0), [1, V])
        kept = tl.load(E_ptr + here, mask=stayed, other=0.0)
        grad = (grad.to(tl.float32) + kept.to(tl.float32)).to(grad.dtype)
    return grad


@triton.jit
def lift_back(
    E_ptr, x_ptr, grad_ptr, keep_ptr, AD_ptr, vectors_ptr, du_ptr, out_ptr, n_ptr, sums_ptr, rows, height, width, eps,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, R1: tl.constexpr, L1: tl.constexpr, U: tl.constexpr,
    US: tl.constexpr, LOW: tl.constexpr, V1: tl.constexpr, VL1: tl.constexpr, KEEP: tl.constexpr, DROP: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, STEP: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From E through shift and lift, which gives du, and then as `norm_back` does, STEP rows at a time."""
    tile = tl.program_id(0) * T
    local = tl.arange(0, T)
    row = tile + local
    live = row < rows
    dn0 = tl.zeros((T, C0), tl.float32)
    dn1 = tl.zeros((T, C1 if C1 > 0 else 16), tl.float32)
    for start in tl.range(0, R1, J, num_stages=STAGES):
        j = columns(start, J)
        du = unshift(E_ptr, tile, local, live, height, width, 0, j, R1, US, KEEP, V1)
        tl.store(du_ptr + row[:, None] * US + j[None, :], du, mask=live[:, None])
        dn0, dn1 = spread(du, AD_ptr, j, dn0, dn1, U, C, C0, C1, C, 1)
    j = columns(0, LOW)
    du = unshift(E_ptr, tile, local, live, height, width, R1, j, L1, US, KEEP, VL1)
    # past the last column zeros, as a matrix product reads them too
    tl.store(du_ptr + row[:, None] * US + (R1 + j)[None, :], du, mask=live[:, None] & (j < US - R1)[None, :])
    dn0, dn1 = spread(du, AD_ptr, R1 + j, dn0, dn1, U, C, C0, C1, C, 1, R1 + LOW > U)
    # dn waits in the cache, where the result will be: a product's rows are spread over too many threads for a norm
    store_rows(out_ptr, row, live, dn0, dn1, C, C0, C1)
    step = tile + tl.arange(0, STEP)
    x, grad = load_both(x_ptr, grad_ptr, step, step < rows, C, BLOCK)
    tl.debug_barrier()
    sums = norm_sums(STEP, BLOCK)
    for start in tl.range(tile, tile + T, STEP, num_stages=1):
        step = start + tl.arange(0, STEP)
        ahead = step + STEP  # on their way while these rows are dealt with
        next_x, next_grad = load_both(x_ptr, grad_ptr, ahead, ahead < tl.minimum(rows, tile + T), C, BLOCK)
        dn = load_whole(out_ptr, step, step < rows, C, BLOCK)
        sums = norm_rows(
            dn, x, grad, keep_ptr, vectors_ptr, out_ptr, n_ptr, sums, step, rows, height * width, eps, C, True, DROP,
            BLOCK,
        )  # fmt: skip
        x, grad = next_x, next_grad
    store_sums(sums_ptr, sums, C, BLOCK)


@triton.jit
def norm_back(
    dn_ptr, x_ptr, grad_ptr, keep_ptr, vectors_ptr, out_ptr, sums_ptr, rows, tokens, eps,
    C: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Through the norm ahead of a Mu-Layer and along the shortcut."""
    sums = norm_sums(T, BLOCK)
    step = tl.num_programs(0) * T
    row = tl.program_id(0) * T + tl.arange(0, T)
    dn = load_whole(dn_ptr, row, row < rows, C, BLOCK)
    x, grad = load_both(x_ptr, grad_ptr, row, row < rows, C, BLOCK)
    for start in tl.range(tl.program_id(0) * T, rows, step, num_stages=1):
        row = start + tl.arange(0, T)
        ahead = row + step  # on their way while these rows are dealt with
        next_dn = load_whole(dn_ptr, ahead, ahead < rows, C, BLOCK)
        next_x, next_grad = load_both(x_ptr, grad_ptr, ahead, ahead < rows, C, BLOCK)
        sums = norm_rows(
            dn, x, grad, keep_ptr, vectors_ptr, out_ptr, out_ptr, sums, row, rows, tokens, eps, C, False, DROP, BLOCK
        )  # fmt: skip
        dn, x, grad = next_dn, next_x, next_grad
    store_sums(sums_ptr, sums, C, BLOCK)


@triton.jit
def norm_sums(STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over steps that are to come: the gradients of a norm's weight and bias and of its layer's last bias."""
    none = tl.zeros((STEP, BLOCK), tl.float32)
    return none, none, none


@triton.jit
def store_sums(ptr, sums, C: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    ptr += tl.program_id(0) * len(sums) * C
    for i in tl.static_range(len(sums)):
        tl.store(ptr + i * C + column, tl.sum(sums[i], 0), mask=column < C)


@triton.jit
def load_whole(ptr, row, live, C: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    mask = live[:, None] & (column < C)[None, :]
    return tl.load(ptr + row[:, None] * C + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_both(x_ptr, grad_ptr, row, live, C: tl.constexpr, BLOCK: tl.constexpr):
    return load_whole(x_ptr, row, live, C, BLOCK), load_whole(grad_ptr, row, live, C, BLOCK)


@triton.jit
def norm_rows(
    dn, x, grad, keep_ptr, vectors_ptr, out_ptr, n_ptr, sums, row, rows, tokens, eps,
    C: tl.constexpr, WRITE: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of the gradient of x; if asked, of the norm's output next to a column of ones; and the sums with them."""
    sum_weight, sum_bias, sum_last = sums
    live = row < rows
    column = tl.arange(0, BLOCK)
    mask = live[:, None] & (column < C)[None, :]
    place = row[:, None] * C + column[None, :]
    dn, x, grad = dn.to(tl.float32), x.to(tl.float32), grad.to(tl.float32)
    weight = load_below(vectors_ptr, column, mask)
    x -= (tl.sum(x, 1) / C)[:, None]
    if BLOCK > C:
        x = tl.where(mask, x, 0.0)
    scale = (1 / tl.sqrt(tl.sum(x * x, 1) / C + eps))[:, None]
    x *= scale
    sum_weight += dn * x
    sum_bias += dn
    if DROP:
        sum_last += grad * tl.load(keep_ptr + row // tokens, mask=live, other=0.0)[:, None]
    else:
        sum_last += grad
    if WRITE:
        n = x * weight + load_below(vectors_ptr + C, column, mask)
        tl.store(n_ptr + row[:, None] * (C + 8) + column[None, :], n.to(n_ptr.dtype.element_ty), mask=mask)
        store_column(n_ptr + C, row, live, tl.full(row.shape, 1.0, tl.float32), C + 8)
    dn *= weight
    level = (tl.sum(dn, 1) / C)[:, None]
    along = (tl.sum(dn * x, 1) / C)[:, None]
    grad += (dn - level - x * along) * scale
    tl.store(out_ptr + place, grad.to(out_ptr.dtype.element_ty), mask=mask)
    return sum_weight, sum_bias, sum_last
