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
    branch,
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
def load_low(ptr, row, live, STRIDE: tl.constexpr, L: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr):
    j = columns(0, L0)
    place = row[:, None] * STRIDE
    d0 = tl.load(ptr + place + j[None, :], mask=live[:, None] & (j < L)[None, :], other=0.0)
    d1 = d0
    if L1 > 0:
        j = columns(L0, L1)
        d1 = tl.load(ptr + place + j[None, :], mask=live[:, None] & (j < L)[None, :], other=0.0)
    return d0, d1


@triton.jit
def subtract_form(
    acc0, acc1, n0, n1, k, gram_ptr, linear_ptr, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr
):  # fmt: skip
    """Subtract k times half the gradient, `G n + g / 2`, of a quadratic form, given k n."""
    j = columns(0, C0)
    linear = tl.load(linear_ptr + j, mask=j < C, other=0.0)[None, :]
    acc0 -= multiply(n0, n1, gram_ptr, j, C, C0, C1, C, 1, C, C0 > C) + k[:, None] * linear / 2
    if C1 > 0:
        j = columns(C0, C1)
        linear = tl.load(linear_ptr + j, mask=j < C, other=0.0)[None, :]
        acc1 -= multiply(n0, n1, gram_ptr, j, C, C0, C1, C, 1, C, C0 + C1 > C) + k[:, None] * linear / 2
    return acc0, acc1


@triton.jit
def norm_back(
    x_ptr, grad_ptr, out_ptr, sums_ptr, weight_ptr, row, live, mean, scale, dn0, dn1,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
):  # fmt: skip
    """Through the norm ahead of a Mu-Layer and along the shortcut; also the norm's own gradients."""
    u0, u1 = load_rows(x_ptr, row, live, C, C0, C1)
    u0 = (u0 - mean[:, None]) * scale[:, None]
    u1 = (u1 - mean[:, None]) * scale[:, None]
    if C1 == 0:
        dn1 = dn0
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
def mu2_open(
    grad_ptr, x_ptr, keep_ptr, D_ptr, G_ptr, H_ptr, vectors_ptr, gy_ptr, n_ptr, d_ptr, stats_ptr, sums_ptr,
    rows, tokens, eps,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    R2: tl.constexpr, L2: tl.constexpr, L20: tl.constexpr, L21: tl.constexpr, FORMS: tl.constexpr,
    DROP: tl.constexpr, T: tl.constexpr, JC: tl.constexpr,
):  # fmt: skip
    """What both branches of the second Mu-Layer read, n and d next to their extras; the gradient gy of its output,
    times both scales; and the statistics: mean and scale ahead, scales of the branches."""
    program = tl.program_id(0)
    row = program * T + tl.arange(0, T)
    live = row < rows
    x0, x1 = load_rows(x_ptr, row, live, C, C0, C1)
    x0, x1, mean, scale = unit_rows(x0, x1, eps, C, C1)
    x0, x1 = affine(x0, x1, vectors_ptr, vectors_ptr + C, C0, C1)
    n0, n1 = x0.to(x_ptr.dtype.element_ty), x1.to(x_ptr.dtype.element_ty)
    store_rows(n_ptr, row, live, n0, n1, C + 16, C0, C1)
    ga_ptr = vectors_ptr + FORMS
    e_ptr, hb_ptr, constants_ptr = ga_ptr + C, ga_ptr + C + L2, ga_ptr + C + 2 * L2
    form = quadratic_of_rows(x_ptr, row, live, mean, scale, n0, n1, vectors_ptr, vectors_ptr + C, G_ptr, ga_ptr,
                             constants_ptr, C, C0, C1, JC)  # fmt: skip
    scale_a = 1 / tl.sqrt(tl.maximum(form, 0.0) / R2 + eps)
    d0, d1 = low_rank(n0, n1, D_ptr, e_ptr, C, C0, C1, L2, L20, L21)
    store_low(d_ptr, row, live, d0, d1, L2 + 16, L2, L20, L21)
    form = quadratic(d0, d1, H_ptr, hb_ptr, constants_ptr + 1, L2, L20, L21)
    scale_b = 1 / tl.sqrt(tl.maximum(form, 0.0) / R2 + eps)
    store_rows(n_ptr + C, row, live, extras(scale_a, n0), extras(scale_a, n0), C + 16, 16, 0)
    store_rows(d_ptr + L2, row, live, extras(scale_b, n0), extras(scale_b, n0), L2 + 16, 16, 0)
    tl.store(stats_ptr + row * 4, mean, mask=live)
    tl.store(stats_ptr + row * 4 + 1, scale, mask=live)
    tl.store(stats_ptr + row * 4 + 2, scale_a, mask=live)
    tl.store(stats_ptr + row * 4 + 3, scale_b, mask=live)
    g0, g1 = load_rows(grad_ptr, row, live, C, C0, C1)
    if DROP:
        keep = tl.load(keep_ptr + row // tokens, mask=live, other=0.0)[:, None]
        g0 *= keep
        g1 *= keep
    store_sums(sums_ptr + program * C, g0, g1, C0, C1)
    product = (scale_a * scale_b)[:, None]
    store_rows(gy_ptr, row, live, g0 * product, g1 * product, C, C0, C1)


@triton.jit
def mu2_middle(
    gy_ptr, n_ptr, d_ptr, A_ptr, B_ptr, C_ptr, h_ptr, P_ptr, Q_ptr, along_ptr, rows,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    R2: tl.constexpr, L2: tl.constexpr, L20: tl.constexpr, L21: tl.constexpr,
    SP: tl.constexpr, SQ: tl.constexpr, T: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both branches again, the product h, and the gradients P and Q of the branches ahead of their scales."""
    row = tl.program_id(0) * T + tl.arange(0, T)
    live = row < rows
    kind = n_ptr.dtype.element_ty
    n0, n1 = load_rows(n_ptr, row, live, C + 16, C0, C1)
    n0, n1 = n0.to(kind), n1.to(kind)
    d0, d1 = load_low(d_ptr, row, live, L2 + 16, L2, L20, L21)
    extra_a, _ = load_rows(n_ptr + C, row, live, C + 16, 16, 0)
    extra_b, _ = load_rows(d_ptr + L2, row, live, L2 + 16, 16, 0)
    extra_a, extra_b = extra_a.to(kind), extra_b.to(kind)
    g0, g1 = load_rows(gy_ptr, row, live, C, C0, C1)
    g0, g1 = g0.to(kind), g1.to(kind)
    along = tl.zeros((T,), tl.float32)
    for start in tl.range(0, R2, J, num_stages=STAGES):
        j = columns(start, J)
        first = branch(n0, n1, extra_a, A_ptr, j, C, C0, C1, R2)
        second = branch(d0, d1, extra_b, B_ptr, j, L2, L20, L21, R2)
        dh = multiply(g0, g1, C_ptr, j, C, C0, C1, R2, R2, 1, False)
        h = first * second
        along += tl.sum(dh * h, 1)
        tl.store(h_ptr + row[:, None] * R2 + j[None, :], h.to(kind), mask=live[:, None])
        tl.store(P_ptr + row[:, None] * SP + j[None, :], (dh * second).to(kind), mask=live[:, None])
        tl.store(Q_ptr + row[:, None] * SQ + j[None, :], (dh * first).to(kind), mask=live[:, None])
    tl.store(along_ptr + row, along, mask=live)


@triton.jit
def shift_share(ptr, row, live, STRIDE: tl.constexpr):
    """What a gradient holds along the shift of a norm: two of the columns that the extras met."""
    share = tl.load(ptr + row * STRIDE + 2, mask=live, other=0.0).to(tl.float32)
    return share + tl.load(ptr + row * STRIDE + 4, mask=live, other=0.0).to(tl.float32)


@triton.jit
def mu2_close(
    grad_ptr, x_ptr, stats_ptr, along_ptr, n_ptr, d_ptr, dn_ptr, dd_ptr, D_ptr, G_ptr, H_ptr, vectors_ptr,
    P_ptr, Q_ptr, out_ptr, sums_ptr, rows,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    R2: tl.constexpr, L2: tl.constexpr, L20: tl.constexpr, L21: tl.constexpr, FORMS: tl.constexpr,
    SP: tl.constexpr, SQ: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """From P A and Q B to the gradient of the layer's input. What the norms took goes next to P and Q: k n and k, with
    the gradient of d, and k d and k."""
    program = tl.program_id(0)
    row = program * T + tl.arange(0, T)
    live = row < rows
    kind = x_ptr.dtype.element_ty
    mean = tl.load(stats_ptr + row * 4, mask=live, other=0.0)
    scale = tl.load(stats_ptr + row * 4 + 1, mask=live, other=0.0)
    scale_a = tl.load(stats_ptr + row * 4 + 2, mask=live, other=0.0)
    scale_b = tl.load(stats_ptr + row * 4 + 3, mask=live, other=0.0)
    along = tl.load(along_ptr + row, mask=live, other=0.0)
    k_a = (scale_a * along - shift_share(dn_ptr + C, row, live, C + 16)) * scale_a / R2
    k_b = (scale_b * along - shift_share(dd_ptr + L2, row, live, L2 + 16)) * scale_b / R2
    d0, d1 = load_low(d_ptr, row, live, L2 + 16, L2, L20, L21)
    k0, k1 = d0.to(tl.float32) * k_b[:, None], d1.to(tl.float32) * k_b[:, None]
    store_low(Q_ptr + R2, row, live, k0, k1, SQ, L2, L20, L21)
    store_column(Q_ptr + R2 + L2, row, live, k_b, SQ)
    dd0, dd1 = load_low(dd_ptr, row, live, L2 + 16, L2, L20, L21)
    ga_ptr = vectors_ptr + FORMS
    dd0, dd1 = subtract_form(dd0, dd1, k0.to(kind), k1.to(kind), k_b, H_ptr, ga_ptr + C + L2, L2, L20, L21)
    store_low(P_ptr + R2 + C + 1, row, live, dd0, dd1, SP, L2, L20, L21)
    n0, n1 = load_rows(n_ptr, row, live, C + 16, C0, C1)
    n0, n1 = (n0 * k_a[:, None]).to(kind), (n1 * k_a[:, None]).to(kind)
    store_rows(P_ptr + R2, row, live, n0, n1, SP, C0, C1)
    store_column(P_ptr + R2 + C, row, live, k_a, SP)
    dn0, dn1 = load_rows(dn_ptr, row, live, C + 16, C0, C1)
    dn0, dn1 = subtract_form(dn0, dn1, n0, n1, k_a, G_ptr, ga_ptr, C, C0, C1)
    dn0, dn1 = through_low_rank(dd0.to(kind), D_ptr, columns(0, L20), dn0, dn1, C, C0, C1, L2)
    if L21 > 0:
        dn0, dn1 = through_low_rank(dd1.to(kind), D_ptr, columns(L20, L21), dn0, dn1, C, C0, C1, L2)
    norm_back(x_ptr, grad_ptr, out_ptr, sums_ptr + program * 2 * C, vectors_ptr, row, live, mean, scale, dn0, dn1,
              C, C0, C1)  # fmt: skip


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
    n0, n1 = affine(x0, x1, vectors_ptr, vectors_ptr + C, C0, C1)
    store_rows(n_ptr, row, live, n0, n1, SN, C0, C1)
    store_column(n_ptr + C, row, live, tl.full((T,), 1.0, tl.float32), SN)
    norm_back(x_ptr, grad_ptr, out_ptr, sums_ptr + program * 2 * C, vectors_ptr, row, live, mean, scale, dn0, dn1,
              C, C0, C1)  # fmt: skip
