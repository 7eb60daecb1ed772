"""Forward kernels of a Poly-Block with layer norms.

The spatial shift is the only step that looks beyond a token, so a block is cut there. `lift` writes
`u = [A1 | D1] norm(x)`; `mu1` gathers the shifted u and does the rest of the first Mu-Layer; `mu2` is the second. Each
reads a tile of tokens once and writes it once. The hidden width of the second Mu-Layer is visited in chunks and never
stored: with A and B centred over their outputs the means of the layer norms vanish, and their variances are quadratic
forms, `|A n + a|^2 = n' (A'A) n + 2 (A'a) n + a'a`, known before the first chunk.
"""

import triton
import triton.language as tl

from multilinear.kernels.block_parts import (
    affine,
    columns,
    extras,
    factor,
    gather,
    gather_rows,
    load_floats,
    load_matrix,
    low_rank,
    multiply,
    quadratic,
    quadratic_of_rows,
    row_sum,
    spread,
    store_low,
    store_rows,
    unit_rows,
)


@triton.jit
def lift(
    x_ptr, u_ptr, AD_ptr, vectors_ptr, rows, eps,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, U: tl.constexpr, US: tl.constexpr,
    BIAS: tl.constexpr, T: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """u = [A1 | D1] norm(x) + bias."""
    row = tl.program_id(0) * T + tl.arange(0, T)
    live = row < rows
    x0, x1 = load_floats(x_ptr, row, live, C, C0, C1)
    x0, x1, _, _ = unit_rows(x0, x1, eps, C, C1)
    x0, x1 = affine(x0, x1, vectors_ptr, vectors_ptr + C, C0, C1)
    n0, n1 = x0.to(x_ptr.dtype.element_ty), x1.to(x_ptr.dtype.element_ty)
    for start in range(0, U, J):
        j = columns(start, J)
        inside = j < U
        out = multiply(n0, n1, AD_ptr, j, C, C0, C1, U, 1, C, U % J != 0)
        out += tl.load(vectors_ptr + BIAS + j, mask=inside, other=0.0)[None, :]
        place = u_ptr + row[:, None] * US + j[None, :]
        tl.store(place, out.to(u_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def mu1(
    x_ptr, u_ptr, out_ptr, stats_ptr, keep_ptr, B_ptr, C_ptr, vectors_ptr, rows, height, width, eps,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, R1: tl.constexpr, R10: tl.constexpr, R11: tl.constexpr,
    L1: tl.constexpr, L10: tl.constexpr, L11: tl.constexpr, US: tl.constexpr,
    MU1: tl.constexpr, V1: tl.constexpr, VL1: tl.constexpr, KEEP: tl.constexpr, TRAIN: tl.constexpr,
    DROP: tl.constexpr, T: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x plus the rest of the first Mu-Layer from u on; in training also three numbers a row."""
    tile = tl.program_id(0) * T
    local = tl.arange(0, T)
    row = tile + local
    live = row < rows
    b_ptr = vectors_ptr + MU1
    a0, a1 = gather_rows(u_ptr, tile, local, live, height, width, 0, R1, R10, R11, US, KEEP, V1)
    d0, d1 = gather_rows(u_ptr, tile, local, live, height, width, R1, L1, L10, L11, US, KEEP, VL1)
    a0, a1, mean, scale_a = unit_rows(a0.to(tl.float32), a1.to(tl.float32), eps, R1, R11)
    q0, q1 = factor(d0, d1, B_ptr, b_ptr, R1, R10, R11, L1, L10, L11)
    scale_b = 1 / tl.sqrt(row_sum(q0 * q0, q1 * q1, R11) / R1 + eps)
    if TRAIN:
        tl.store(stats_ptr + row * 3, mean, mask=live)
        tl.store(stats_ptr + row * 3 + 1, scale_a, mask=live)
        tl.store(stats_ptr + row * 3 + 2, scale_b, mask=live)
    y0 = tl.zeros((T, C0), tl.float32)
    y1 = tl.zeros((T, C1 if C1 > 0 else 16), tl.float32)
    for start in tl.range(0, R1, J, num_stages=STAGES):
        j = columns(start, J)
        # both branches come once more, from the cache: a whole row of them would not stay in registers
        a = gather(u_ptr, tile, local, live, height, width, 0, j, R1, US, KEEP, V1).to(tl.float32)
        p = (a - mean[:, None]) * scale_a[:, None] * tl.load(b_ptr + R1 + j)[None, :]
        p += tl.load(b_ptr + 2 * R1 + j)[None, :]
        q = multiply(d0, d1, B_ptr, j, L1, L10, L11, R1, 1, L1, False) + tl.load(b_ptr + j)[None, :]
        q = q * scale_b[:, None] * tl.load(b_ptr + 3 * R1 + j)[None, :] + tl.load(b_ptr + 4 * R1 + j)[None, :]
        y0, y1 = spread((p * q).to(d0.dtype), C_ptr, j, y0, y1, R1, C, C0, C1, 1, R1)
    keep = tl.full((T,), 1.0, tl.float32)
    if DROP:
        keep = tl.load(keep_ptr + row // (height * width), mask=live, other=0.0)
    add_branch(x_ptr, out_ptr, vectors_ptr + 2 * C, row, live, y0, y1, keep, keep, C, C0, C1)


@triton.jit
def branch(n0, n1, extra, ptr, j, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, J: tl.constexpr):
    """Columns j of a normed branch, still to be multiplied by the scale of each row."""
    out = multiply(n0, n1, ptr, j, K, K0, K1, J, 1, K + 16, False)
    return tl.dot(extra, load_matrix(ptr, columns(K, 16), j, K + 16, J, 1, K + 16, False, False), out)


@triton.jit
def mu2(
    x_ptr, out_ptr, keep_ptr, n_ptr, d_ptr, stats_ptr, A_ptr, D_ptr, B_ptr, C_ptr, G_ptr, H_ptr, vectors_ptr,
    rows, tokens, eps,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    R2: tl.constexpr, L2: tl.constexpr, L20: tl.constexpr, L21: tl.constexpr,
    FORMS: tl.constexpr, DROP: tl.constexpr, TRAIN: tl.constexpr,
    T: tl.constexpr, J: tl.constexpr, JC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x plus the second Mu-Layer of norm(x); in training also what its branches read, n and d next to their extras."""
    row = tl.program_id(0) * T + tl.arange(0, T)
    live = row < rows
    x0, x1 = load_floats(x_ptr, row, live, C, C0, C1)
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
    keep = tl.full((T,), 1.0, tl.float32)
    if DROP:
        keep = tl.load(keep_ptr + row // tokens, mask=live, other=0.0)
    scale = scale_a * scale_b * keep
    if TRAIN:
        store_rows(n_ptr, row, live, n0, n1, C + 16, C0, C1)
        store_rows(n_ptr + C, row, live, extra_a, extra_a, C + 16, 16, 0)
        store_low(d_ptr, row, live, d0, d1, L2 + 16, L2, L20, L21)
        store_rows(d_ptr + L2, row, live, extra_b, extra_b, L2 + 16, 16, 0)
        tl.store(stats_ptr + row * 3, scale_a, mask=live)
        tl.store(stats_ptr + row * 3 + 1, scale_b, mask=live)
        tl.store(stats_ptr + row * 3 + 2, scale, mask=live)
    y0 = tl.zeros((T, C0), tl.float32)
    y1 = tl.zeros((T, C1 if C1 > 0 else 16), tl.float32)
    for start in tl.range(0, R2, J, num_stages=STAGES):
        j = columns(start, J)
        first = branch(n0, n1, extra_a, A_ptr, j, C, C0, C1, R2)
        second = branch(d0, d1, extra_b, B_ptr, j, L2, L20, L21, R2)
        y0, y1 = spread((first * second).to(n0.dtype), C_ptr, j, y0, y1, R2, C, C0, C1, 1, R2)
    add_branch(x_ptr, out_ptr, vectors_ptr + 3 * C, row, live, y0, y1, scale, keep, C, C0, C1)


@triton.jit
def add_branch(
    x_ptr, out_ptr, bias_ptr, row, live, y0, y1, scale, keep, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr
):  # fmt: skip
    """Write x plus `scale` times the branch (y0, y1) plus `keep` times its bias."""
    x0, x1 = load_floats(x_ptr, row, live, C, C0, C1)
    x0 += y0 * scale[:, None] + keep[:, None] * tl.load(bias_ptr + columns(0, C0))[None, :]
    if C1 > 0:
        x1 += y1 * scale[:, None] + keep[:, None] * tl.load(bias_ptr + columns(C0, C1))[None, :]
    store_rows(out_ptr, row, live, x0, x1, C, C0, C1)
