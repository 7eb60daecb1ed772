"""Backward kernels of a Poly-Block: everything that is local to a token, computed again from what the way forward kept.

`mu2_back` goes from the gradient of the block's output to that of the value between the Mu-Layers, `mu1_back` on to the
shifted u, `lift_back` undoes the shift and goes on to the block's input. They write the factors of the gradients of the
matrices; the products of those over all tokens are left to large matrix products.

A layer norm's gradient, `E - mean(E) - p mean(E p)`, needs two means over the hidden width, which is visited in chunks.
The first one vanishes in products with centred matrices. The second one follows after the last chunk: `A' p` is the
gradient of the quadratic form that gave the variance.
"""

import triton
import triton.language as tl

from multilinear.kernels.block_forward import (
    affine,
    columns,
    extras,
    gather,
    gather_rows,
    load_matrix,
    load_rows,
    low_rank,
    multiply,
    neighbours,
    pick,
    quadratic,
    quadratic_of_rows,
    row_sum,
    spread,
    store_rows,
    unit_rows,
)


@triton.jit
def store_sums(ptr, x0, x1, C0: tl.constexpr, C1: tl.constexpr):
    """Sums over the rows of a tile."""
    tl.store(ptr + columns(0, C0), tl.sum(x0, 0))
    if C1 > 0:
        tl.store(ptr + columns(C0, C1), tl.sum(x1, 0))


@triton.jit
def store_column(ptr, row, live, x, STRIDE: tl.constexpr):
    tl.store(ptr + row * STRIDE, x.to(ptr.dtype.element_ty), mask=live)


@triton.jit
def store_low(
    ptr, row, live, d0, d1, STRIDE: tl.constexpr, L: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr
):  # fmt: skip
    """Rows of a width L that its parts may exceed."""
    j = columns(0, L0)
    place = row[:, None] * STRIDE
    tl.store(ptr + place + j[None, :], d0.to(ptr.dtype.element_ty), mask=live[:, None] & (j < L)[None, :])
    if L1 > 0:
        j = columns(L0, L1)
        tl.store(ptr + place + j[None, :], d1.to(ptr.dtype.element_ty), mask=live[:, None] & (j < L)[None, :])


@triton.jit
def subtract_form(
    acc0, acc1, n0, n1, k, gram_ptr, linear_ptr, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr
):  # fmt: skip
    """Subtract k times half the gradient, `G n + g / 2`, of a quadratic form."""
    m0 = (n0.to(tl.float32) * -k[:, None]).to(n0.dtype)
    m1 = (n1.to(tl.float32) * -k[:, None]).to(n0.dtype)
    j = columns(0, C0)
    acc0 += multiply(m0, m1, gram_ptr, j, C, C0, C1, C, 1, C, C0 > C)
    acc0 -= k[:, None] * tl.load(linear_ptr + j, mask=j < C, other=0.0)[None, :] / 2
    if C1 > 0:
        j = columns(C0, C1)
        acc1 += multiply(m0, m1, gram_ptr, j, C, C0, C1, C, 1, C, C0 + C1 > C)
        acc1 -= k[:, None] * tl.load(linear_ptr + j, mask=j < C, other=0.0)[None, :] / 2
    return acc0, acc1


@triton.jit
def norm_back(
    x_ptr, grad_ptr, out_ptr, n_ptr, sums_ptr, weight_ptr, bias_ptr, row, live, mean, scale, dn0, dn1,
    N: tl.constexpr, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
):  # fmt: skip
    """Through the norm ahead of a Mu-Layer and along the shortcut; also the norm's output and its own gradients."""
    u0, u1 = load_rows(x_ptr, row, live, C, C0, C1)
    u0 = (u0 - mean[:, None]) * scale[:, None]
    u1 = (u1 - mean[:, None]) * scale[:, None]
    if C1 == 0:
        dn1 = dn0
    n0, n1 = affine(u0, u1, weight_ptr, bias_ptr, C0, C1)
    store_rows(n_ptr, row, live, n0, n1, N, C0, C1)
    store_column(n_ptr + C, row, live, tl.full(mean.shape, 1.0, tl.float32), N)
    dn0 = tl.where(live[:, None], dn0, 0.0)
    dn1 = tl.where(live[:, None], dn1, 0.0)
    store_sums(sums_ptr, dn0 * u0, dn1 * u1, C0, C1)
    store_sums(sums_ptr + C, dn0, dn1, C0, C1)
    dn0 *= tl.load(weight_ptr + columns(0, C0))[None, :]
    if C1 > 0:
        dn1 *= tl.load(weight_ptr + columns(C0, C1))[None, :]
    level = row_sum(dn0, dn1, C1) / C
    along = row_sum(dn0 * u0, dn1 * u1, C1) / C
    g0, g1 = load_rows(grad_ptr, row, live, C, C0, C1)
    g0 += (dn0 - level[:, None] - u0 * along[:, None]) * scale[:, None]
    g1 += (dn1 - level[:, None] - u1 * along[:, None]) * scale[:, None]
    store_rows(out_ptr, row, live, g0, g1, C, C0, C1)


@triton.jit
def mu2_back(
    grad_ptr, x_ptr, keep_ptr, A_ptr, D_ptr, B_ptr, C_ptr, G_ptr, H_ptr, vectors_ptr,
    out_ptr, gy_ptr, h_ptr, P_ptr, n_ptr, Q_ptr, d_ptr, sums_ptr, rows, tokens, eps,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    R2: tl.constexpr, L2: tl.constexpr, L20: tl.constexpr, L21: tl.constexpr, FORMS: tl.constexpr,
    SP: tl.constexpr, SN: tl.constexpr, SQ: tl.constexpr, SD: tl.constexpr,
    DROP: tl.constexpr, T: tl.constexpr, J: tl.constexpr, JC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes, row by row, P = [sa dp | k n | k | dd], n = [n | 1 | 1 / sa], Q = [sb dq | k d | k], d = [d | 1 | 1 / sb],
    and h and gy, whose product over all rows is the gradient of C."""
    program = tl.program_id(0)
    row = program * T + tl.arange(0, T)
    live = row < rows
    x0, x1 = load_rows(x_ptr, row, live, C, C0, C1)
    x0, x1, mean, scale = unit_rows(x0, x1, eps, C, C1)
    x0, x1 = affine(x0, x1, vectors_ptr, vectors_ptr + C, C0, C1)
    n0, n1 = x0.to(x_ptr.dtype.element_ty), x1.to(x_ptr.dtype.element_ty)
    ga_ptr = vectors_ptr + FORMS
    e_ptr, hb_ptr, constants_ptr = ga_ptr + C, ga_ptr + C + L2, ga_ptr + C + 2 * L2
    form = quadratic_of_rows(x_ptr, row, live, mean, scale, n0, n1, vectors_ptr, vectors_ptr + C, G_ptr, ga_ptr,
                             constants_ptr, C, C0, C1, JC)  # fmt: skip
    scale_a = 1 / tl.sqrt(tl.maximum(form, 0.0) / R2 + eps)
    d0, d1 = low_rank(n0, n1, D_ptr, e_ptr, C, C0, C1, L2, L20, L21)
    form = quadratic(d0, d1, H_ptr, hb_ptr, constants_ptr + 1, L2, L20, L21)
    scale_b = 1 / tl.sqrt(tl.maximum(form, 0.0) / R2 + eps)
    extra_a, extra_b = extras(scale_a, n0), extras(scale_b, n0)
    g0, g1 = load_rows(grad_ptr, row, live, C, C0, C1)
    if DROP:
        keep = tl.load(keep_ptr + row // tokens, mask=live, other=0.0)[:, None]
        g0 *= keep
        g1 *= keep
    store_sums(sums_ptr + program * 3 * C + 2 * C, g0, g1, C0, C1)
    product = (scale_a * scale_b)[:, None]
    g0, g1 = (g0 * product).to(n0.dtype), (g1 * product).to(n0.dtype)
    store_rows(gy_ptr, row, live, g0, g1, C, C0, C1)
    t = tl.zeros((T,), tl.float32)
    dn0 = tl.zeros((T, C0), tl.float32)
    dn1 = tl.zeros((T, C1 if C1 > 0 else 16), tl.float32)
    dd0 = tl.zeros((T, L20), tl.float32)
    dd1 = tl.zeros((T, L21 if L21 > 0 else 16), tl.float32)
    shift_a = tl.zeros((T, 16), tl.float32)
    shift_b = tl.zeros((T, 16), tl.float32)
    for start in tl.range(0, R2, J, num_stages=STAGES):
        j = columns(start, J)
        A0 = load_matrix(A_ptr, columns(0, C0), j, C + 16, R2, 1, C + 16, False, False)
        A2 = load_matrix(A_ptr, columns(C, 16), j, C + 16, R2, 1, C + 16, False, False)
        B0 = load_matrix(B_ptr, columns(0, L20), j, L2, R2, 1, L2 + 16, L20 > L2, False)
        B2 = load_matrix(B_ptr, columns(L2, 16), j, L2 + 16, R2, 1, L2 + 16, False, False)
        W0 = load_matrix(C_ptr, columns(0, C0), j, C, R2, R2, 1, False, False)
        first = tl.dot(extra_a, A2, tl.dot(n0, A0))
        second = tl.dot(extra_b, B2, tl.dot(d0, B0))
        dh = tl.dot(g0, W0)
        if C1 > 0:
            A1 = load_matrix(A_ptr, columns(C0, C1), j, C + 16, R2, 1, C + 16, False, False)
            W1 = load_matrix(C_ptr, columns(C0, C1), j, C, R2, R2, 1, False, False)
            first = tl.dot(n1, A1, first)
            dh = tl.dot(g1, W1, dh)
        if L21 > 0:
            B1 = load_matrix(B_ptr, columns(L20, L21), j, L2, R2, 1, L2 + 16, L20 + L21 > L2, False)
            second = tl.dot(d1, B1, second)
        h = first * second
        t += tl.sum(dh * h, 1)
        p = (dh * second).to(n0.dtype)
        q = (dh * first).to(n0.dtype)
        inside = live[:, None]
        tl.store(h_ptr + row[:, None] * R2 + j[None, :], h.to(n0.dtype), mask=inside)
        tl.store(P_ptr + row[:, None] * SP + j[None, :], p, mask=inside)
        tl.store(Q_ptr + row[:, None] * SQ + j[None, :], q, mask=inside)
        dn0 = tl.dot(p, tl.trans(A0), dn0)
        shift_a = tl.dot(p, tl.trans(A2), shift_a)
        dd0 = tl.dot(q, tl.trans(B0), dd0)
        shift_b = tl.dot(q, tl.trans(B2), shift_b)
        if C1 > 0:
            dn1 = tl.dot(p, tl.trans(A1), dn1)
        if L21 > 0:
            dd1 = tl.dot(q, tl.trans(B1), dd1)
    held = ((tl.arange(0, 16) == 2) | (tl.arange(0, 16) == 4))[None, :]
    k_a = (scale_a * t - tl.sum(tl.where(held, shift_a, 0.0), 1)) * scale_a / R2
    k_b = (scale_b * t - tl.sum(tl.where(held, shift_b, 0.0), 1)) * scale_b / R2
    dn0, dn1 = subtract_form(dn0, dn1, n0, n1, k_a, G_ptr, ga_ptr, C, C0, C1)
    dd0, dd1 = subtract_form(dd0, dd1, d0, d1, k_b, H_ptr, hb_ptr, L2, L20, L21)
    store_rows(P_ptr + R2, row, live, n0.to(tl.float32) * k_a[:, None], n1.to(tl.float32) * k_a[:, None], SP, C0, C1)
    store_column(P_ptr + R2 + C, row, live, k_a, SP)
    store_low(P_ptr + R2 + C + 1, row, live, dd0, dd1, SP, L2, L20, L21)
    store_column(n_ptr + C + 1, row, live, 1 / scale_a, SN)
    store_low(Q_ptr + R2, row, live, d0.to(tl.float32) * k_b[:, None], d1.to(tl.float32) * k_b[:, None], SQ, L2, L20, L21)
    store_column(Q_ptr + R2 + L2, row, live, k_b, SQ)
    store_low(d_ptr, row, live, d0, d1, SD, L2, L20, L21)
    store_column(d_ptr + L2, row, live, tl.full((T,), 1.0, tl.float32), SD)
    store_column(d_ptr + L2 + 1, row, live, 1 / scale_b, SD)
    dn0, dn1 = through_low_rank(dd0.to(n0.dtype), D_ptr, columns(0, L20), dn0, dn1, C, C0, C1, L2)
    if L21 > 0:
        dn0, dn1 = through_low_rank(dd1.to(n0.dtype), D_ptr, columns(L20, L21), dn0, dn1, C, C0, C1, L2)
    norm_back(x_ptr, grad_ptr, out_ptr, n_ptr, sums_ptr + program * 3 * C, vectors_ptr, vectors_ptr + C, row, live,
              mean, scale, dn0, dn1, SN, C, C0, C1)  # fmt: skip


@triton.jit
def through_low_rank(
    dd, D_ptr, j, dn0, dn1, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, L: tl.constexpr
):  # fmt: skip
    inside = (j < L)[:, None]
    place = D_ptr + j[:, None] * C
    dn0 = tl.dot(dd, tl.load(place + columns(0, C0)[None, :], mask=inside, other=0.0), dn0)
    if C1 > 0:
        dn1 = tl.dot(dd, tl.load(place + columns(C0, C1)[None, :], mask=inside, other=0.0), dn1)
    return dn0, dn1


@triton.jit
def mu1_chunk(
    g0, g1, d0, d1, u_ptr, B_ptr, C_ptr, b_ptr, row, live, height, width, mean, scale_a, scale_b, j,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, R1: tl.constexpr, L1: tl.constexpr, L10: tl.constexpr,
    L11: tl.constexpr, US: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Columns j of both branches of the first Mu-Layer before and after the norms' affine maps, and their gradient."""
    dh = multiply(g0, g1, C_ptr, j, C, C0, C1, R1, R1, 1, False)
    a = gather(u_ptr, row, live, height, width, 0, j, R1, US, KEEP, ALIGNED).to(tl.float32)
    unit_a = (a - mean[:, None]) * scale_a[:, None]
    p = unit_a * tl.load(b_ptr + R1 + j)[None, :] + tl.load(b_ptr + 2 * R1 + j)[None, :]
    unit_b = multiply(d0, d1, B_ptr, j, L1, L10, L11, R1, 1, L1, False) + tl.load(b_ptr + j)[None, :]
    unit_b *= scale_b[:, None]
    q = unit_b * tl.load(b_ptr + 3 * R1 + j)[None, :] + tl.load(b_ptr + 4 * R1 + j)[None, :]
    return dh, unit_a, p, unit_b, q


@triton.jit
def mu1_back(
    grad_ptr, u_ptr, stats_ptr, keep_ptr, B_ptr, C_ptr, vectors_ptr, E_ptr, gy_ptr, h_ptr, db_ptr, d_ptr, sums_ptr,
    rows, height, width,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, R1: tl.constexpr, L1: tl.constexpr, L10: tl.constexpr,
    L11: tl.constexpr, US: tl.constexpr, SD1: tl.constexpr, MU1: tl.constexpr, KEEP: tl.constexpr,
    ALIGNED: tl.constexpr, DROP: tl.constexpr, T: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From the gradient of the first Mu-Layer's output to E, that of the shifted u; and the factors h, gy, db and d."""
    program = tl.program_id(0)
    row = program * T + tl.arange(0, T)
    live = row < rows
    b_ptr = vectors_ptr + MU1
    sums_ptr += program * (4 * R1 + C)
    d0, d1 = gather_rows(u_ptr, row, live, height, width, R1, L1, L10, L11, US, KEEP, False)
    mean = tl.load(stats_ptr + row * 3, mask=live, other=0.0)
    scale_a = tl.load(stats_ptr + row * 3 + 1, mask=live, other=0.0)
    scale_b = tl.load(stats_ptr + row * 3 + 2, mask=live, other=0.0)
    g0, g1 = load_rows(grad_ptr, row, live, C, C0, C1)
    if DROP:
        keep = tl.load(keep_ptr + row // (height * width), mask=live, other=0.0)[:, None]
        g0 *= keep
        g1 *= keep
    store_sums(sums_ptr + 4 * R1, g0, g1, C0, C1)
    g0, g1 = g0.to(d0.dtype), g1.to(d0.dtype)
    if DROP:
        store_rows(gy_ptr, row, live, g0, g1, C, C0, C1)
    level_a = tl.zeros((T,), tl.float32)
    along_a = tl.zeros((T,), tl.float32)
    level_b = tl.zeros((T,), tl.float32)
    along_b = tl.zeros((T,), tl.float32)
    for start in tl.range(0, R1, J, num_stages=STAGES):
        j = columns(start, J)
        dh, unit_a, p, unit_b, q = mu1_chunk(
            g0, g1, d0, d1, u_ptr, B_ptr, C_ptr, b_ptr, row, live, height, width, mean, scale_a, scale_b, j,
            C, C0, C1, R1, L1, L10, L11, US, KEEP, ALIGNED,
        )  # fmt: skip
        grad_a = dh * q * tl.load(b_ptr + R1 + j)[None, :]
        grad_b = dh * p * tl.load(b_ptr + 3 * R1 + j)[None, :]
        level_a += tl.sum(grad_a, 1)
        along_a += tl.sum(grad_a * unit_a, 1)
        level_b += tl.sum(grad_b, 1)
        along_b += tl.sum(grad_b * unit_b, 1)
    dd0 = tl.zeros((T, L10), tl.float32)
    dd1 = tl.zeros((T, L11 if L11 > 0 else 16), tl.float32)
    for start in tl.range(0, R1, J, num_stages=STAGES):
        j = columns(start, J)
        dh, unit_a, p, unit_b, q = mu1_chunk(
            g0, g1, d0, d1, u_ptr, B_ptr, C_ptr, b_ptr, row, live, height, width, mean, scale_a, scale_b, j,
            C, C0, C1, R1, L1, L10, L11, US, KEEP, ALIGNED,
        )  # fmt: skip
        tl.store(h_ptr + row[:, None] * R1 + j[None, :], (p * q).to(d0.dtype), mask=live[:, None])
        dp = dh * q
        dq = dh * p
        tl.store(sums_ptr + j, tl.sum(dp * unit_a, 0))
        tl.store(sums_ptr + R1 + j, tl.sum(dp, 0))
        tl.store(sums_ptr + 2 * R1 + j, tl.sum(dq * unit_b, 0))
        tl.store(sums_ptr + 3 * R1 + j, tl.sum(dq, 0))
        grad_a = dp * tl.load(b_ptr + R1 + j)[None, :]
        grad_a = (grad_a - level_a[:, None] / R1 - unit_a * along_a[:, None] / R1) * scale_a[:, None]
        tl.store(E_ptr + row[:, None] * US + j[None, :], grad_a.to(d0.dtype), mask=live[:, None])
        grad_b = dq * tl.load(b_ptr + 3 * R1 + j)[None, :]
        grad_b = (grad_b - level_b[:, None] / R1 - unit_b * along_b[:, None] / R1) * scale_b[:, None]
        grad_b = grad_b.to(d0.dtype)
        tl.store(db_ptr + row[:, None] * R1 + j[None, :], grad_b, mask=live[:, None])
        dd0, dd1 = spread(grad_b, B_ptr, j, dd0, dd1, R1, L1, L10, L11, L1, 1)
    store_low(E_ptr + R1, row, live, dd0, dd1, US, L1, L10, L11)
    store_low(d_ptr, row, live, d0, d1, SD1, L1, L10, L11)
    store_column(d_ptr + L1, row, live, tl.full((T,), 1.0, tl.float32), SD1)


@triton.jit
def unshift(
    E_ptr, row, live, height, width, j, R1: tl.constexpr, L1: tl.constexpr, STRIDE: tl.constexpr, KEEP: tl.constexpr
):  # fmt: skip
    """Columns j of the gradient of u: each entry goes back to where it came from, and at the border it also stayed."""
    a, b, c, d, _, _, _, _ = neighbours(row, height, width, KEEP)
    quarter = tl.where(j < R1, (j * 4) // R1, ((j - R1) * 4) // L1)
    # u moved down in the first quarter, so that its gradient comes from below: the second quarter's neighbour
    came = pick(quarter, b, a, d, c)
    stayed = pick(quarter, a, b, c, d) == 0
    inside = live[:, None] & (j < R1 + L1)[None, :]
    place = E_ptr + row[:, None] * STRIDE + j[None, :]
    grad = tl.load(place + came * STRIDE, mask=inside & (came != 0), other=0.0).to(tl.float32)
    if KEEP:
        grad += tl.load(place, mask=inside & stayed, other=0.0).to(tl.float32)
    return grad


@triton.jit
def lift_back(
    E_ptr, x_ptr, grad_ptr, AD_ptr, vectors_ptr, du_ptr, n_ptr, out_ptr, sums_ptr, rows, height, width, eps,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, R1: tl.constexpr, L1: tl.constexpr, US: tl.constexpr,
    SN: tl.constexpr, KEEP: tl.constexpr, T: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From E to the gradient of the block's input; and du and n, whose product is the gradient of [A1 | D1]."""
    program = tl.program_id(0)
    row = program * T + tl.arange(0, T)
    live = row < rows
    dn0 = tl.zeros((T, C0), tl.float32)
    dn1 = tl.zeros((T, C1 if C1 > 0 else 16), tl.float32)
    for start in tl.range(0, R1 + L1, J, num_stages=STAGES):
        j = columns(start, J)
        du = unshift(E_ptr, row, live, height, width, j, R1, L1, US, KEEP).to(x_ptr.dtype.element_ty)
        tl.store(du_ptr + row[:, None] * US + j[None, :], du, mask=live[:, None] & (j < R1 + L1)[None, :])
        inside = (j < R1 + L1)[:, None]
        place = AD_ptr + j[:, None] * C
        dn0 = tl.dot(du, tl.load(place + columns(0, C0)[None, :], mask=inside, other=0.0), dn0)
        if C1 > 0:
            dn1 = tl.dot(du, tl.load(place + columns(C0, C1)[None, :], mask=inside, other=0.0), dn1)
    x0, x1 = load_rows(x_ptr, row, live, C, C0, C1)
    x0, x1, mean, scale = unit_rows(x0, x1, eps, C, C1)
    norm_back(x_ptr, grad_ptr, out_ptr, n_ptr, sums_ptr + program * 2 * C, vectors_ptr, vectors_ptr + C, row, live,
              mean, scale, dn0, dn1, SN, C, C0, C1)  # fmt: skip
