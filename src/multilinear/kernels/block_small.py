"""Forward kernels of a Poly-Block for few tokens, such as those of one image: what counts there is how long a number
takes from one end to the other, and that all processors have some of the work.

Tiles have 16 tokens, the fewest that a product takes, and programs share out what does not need a whole row: `lift` the
columns of u, and `mu2` the hidden width, of which each program adds up a part; the last one of a tile to end adds the
parts, in the same order always. Between them `mu1` has whole rows and goes on to all that the second Mu-Layer needs to
know of one. Weights come first, while the kernel ahead still runs, and wait for its results.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from multilinear.kernels.block_parts import (
    columns,
    extras,
    gather_rows,
    hold,
    hold_pair,
    load_floats,
    load_low,
    load_matrix,
    load_rows,
    store_low,
    store_rows,
    unit_rows,
)


class Share(NamedTuple):
    """Tokens of a program, its warps, and the columns of u or the hidden channels that it takes."""

    tokens: int
    warps: int
    width: int = 0


class Plan(NamedTuple):
    lift: Share
    mu1: Share
    mu2: Share


# By channels, low rank and the most tokens: as many programs as there are processors, or nearly so.
PLANS = {
    (64, 8, 4096): Plan(Share(32, 4, 128), Share(16, 4), Share(32, 4, 192)),
    (128, 16, 1024): Plan(Share(16, 4, 64), Share(16, 8), Share(32, 8, 128)),
    (192, 24, 512): Plan(Share(16, 4, 32), Share(16, 8), Share(16, 8, 192)),
}  # fmt: skip


def plan_for(channels: int, rank1: int, low1: int, rank2: int, low2: int, rows: int) -> Plan | None:
    """The plan for a block of these sizes, or None if there are too many tokens, or weights for shared memory."""
    if rank1 != channels or rank2 != 3 * channels or low2 != 3 * low1:
        return None
    tables = PLANS.items()
    return next((plan for (*sizes, most), plan in tables if sizes == [channels, low1] and rows <= most), None)


def low_parts(width: int) -> tuple[int, int]:
    """The parts of a low rank, of 32 and more: next to a product with no more columns than rows Triton 3.6 gives all
    warps the same rows of all products, so that each of them computes everything."""
    first = max(32, 1 << (width.bit_length() - 1))
    rest = max(32, triton.next_power_of_2(width - first)) if width > first else 0
    return (2 * first, 0) if rest == first else (first, rest)


@triton.jit
def sum_rows(x0, x1, C1: tl.constexpr):
    """Each row's sum where warps share a row and wait for each other: once, if one part has twice the columns of the
    other, as with 192."""
    if C1 == 0:
        total = tl.sum(x0, 1)
    elif x0.shape[1] == 2 * C1:
        total = tl.sum(tl.sum(tl.reshape(x0, (x0.shape[0], 2, C1)), 1) + x1, 1)
    else:
        total = tl.sum(x0, 1) + tl.sum(x1, 1)
    return total


@triton.jit
def norm_rows(x0, x1, scale, shift, eps, C: tl.constexpr, C1: tl.constexpr):
    mean = (sum_rows(x0, x1, C1) / C)[:, None]
    x0 -= mean
    x1 -= mean
    unit = (1 / tl.sqrt(sum_rows(x0 * x0, x1 * x1, C1) / C + eps))[:, None]
    return x0 * unit * scale[0] + shift[0], x1 * unit * scale[1] + shift[1]


@triton.jit
def load_vector(ptr, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr):
    """A row of numbers in two parts, with zeros beyond C."""
    j = columns(0, C0)[None, :]
    v0 = tl.load(ptr + j, mask=j < C, other=0.0)
    v1 = v0
    if C1 > 0:
        j = columns(C0, C1)[None, :]
        v1 = tl.load(ptr + j, mask=j < C, other=0.0)
    return v0, v1


@triton.jit
def load_columns(
    ptr, j, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, J: tl.constexpr, SK: tl.constexpr, SJ: tl.constexpr,
    MASK_J: tl.constexpr,
):  # fmt: skip
    """Columns j of a (K, J) matrix in two parts."""
    w0 = load_matrix(ptr, columns(0, K0), j, K, J, SK, SJ, K0 > K, MASK_J)
    w1 = w0
    if K1 > 0:
        w1 = load_matrix(ptr, columns(K0, K1), j, K, J, SK, SJ, K0 + K1 > K, MASK_J)
    return w0, w1


@triton.jit
def load_whole(
    ptr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, J: tl.constexpr, J0: tl.constexpr, J1: tl.constexpr,
    SK: tl.constexpr, SJ: tl.constexpr,
):  # fmt: skip
    """A (K, J) matrix in four parts: both of the first columns, both of the others."""
    w00, w10 = load_columns(ptr, columns(0, J0), K, K0, K1, J, SK, SJ, J0 > J)
    w01, w11 = w00, w10
    if J1 > 0:
        w01, w11 = load_columns(ptr, columns(J0, J1), K, K0, K1, J, SK, SJ, J0 + J1 > J)
    return w00, w10, w01, w11


@triton.jit
def times(n0, n1, w0, w1, K1: tl.constexpr):
    out = tl.dot(n0, w0)
    if K1 > 0:
        out = tl.dot(n1, w1, out)
    return out


@triton.jit
def times_whole(n0, n1, w, K1: tl.constexpr, J1: tl.constexpr):
    y0 = times(n0, n1, w[0], w[1], K1)
    y1 = y0
    if J1 > 0:
        y1 = times(n0, n1, w[2], w[3], K1)
    return y0, y1


@triton.jit
def small_lift(
    x_ptr, u_ptr, AD_ptr, vectors_ptr, rows, eps,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, U: tl.constexpr, US: tl.constexpr,
    BIAS: tl.constexpr, T: tl.constexpr, J: tl.constexpr, SPLITS: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """Some columns of u = [A1 | D1] norm(x) + bias."""
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    row = tile * T + tl.arange(0, T)
    live = row < rows
    j = columns(split * J, J)
    inside = j < U
    w0, w1 = load_columns(AD_ptr, j, C, C0, C1, U, 1, C, U % J != 0)
    bias = tl.load(vectors_ptr + BIAS + j, mask=inside, other=0.0)[None, :]
    scale = load_vector(vectors_ptr, C, C0, C1)
    shift = load_vector(vectors_ptr + C, C, C0, C1)
    scale = hold_pair(scale[0], scale[1], C1, CUDA)
    shift = hold_pair(shift[0], shift[1], C1, CUDA)
    if CUDA:
        tl.extra.cuda.gdc_wait()
        # not sooner, since those that follow read weights that a kernel ahead of this one may just have prepared
        tl.extra.cuda.gdc_launch_dependents()
    x0, x1 = load_rows(x_ptr, row, live, C, C0, C1)
    x0, x1 = hold_pair(x0, x1, C1, CUDA)
    x0, x1, _, _ = unit_rows(x0.to(tl.float32), x1.to(tl.float32), eps, C, C1)
    n0, n1 = x0 * scale[0] + shift[0], x1 * scale[1] + shift[1]
    out = times(n0.to(w0.dtype), n1.to(w0.dtype), w0, w1, C1) + bias
    place = u_ptr + row[:, None] * US + j[None, :]
    tl.store(place, out.to(u_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def small_mu1(
    x_ptr, u_ptr, mid_ptr, n_ptr, d_ptr, both_ptr, count_ptr, B_ptr, C_ptr, D_ptr, G_ptr, H_ptr, vectors_ptr,
    rows, height, width, eps,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, R1: tl.constexpr, R10: tl.constexpr, R11: tl.constexpr,
    L1: tl.constexpr, L10: tl.constexpr, L11: tl.constexpr, R2: tl.constexpr,
    L2: tl.constexpr, P20: tl.constexpr, P21: tl.constexpr, US: tl.constexpr, MU1: tl.constexpr, FORMS: tl.constexpr,
    V1: tl.constexpr, VL1: tl.constexpr, KEEP: tl.constexpr, T: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """x plus the rest of the first Mu-Layer from u on; what the second one's branches read, n and d next to their
    extras; the product of their scales; and a count of zero for each 16 rows."""
    if CUDA:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) * T
    local = tl.arange(0, T)
    row = tile + local
    live = row < rows
    b_ptr, ga_ptr = vectors_ptr + MU1, vectors_ptr + FORMS
    to_b = load_whole(B_ptr, L1, L10, L11, R1, R10, R11, 1, L1)
    to_mid = load_whole(C_ptr, R1, R10, R11, C, C0, C1, 1, R1)
    to_d = load_whole(D_ptr, C, C0, C1, L2, P20, P21, 1, C)
    gram = load_whole(G_ptr, C, C0, C1, C, C0, C1, 1, C)
    low_gram = load_whole(H_ptr, L2, P20, P21, L2, P20, P21, 1, L2)
    norm_scale = load_vector(vectors_ptr, C, C0, C1)
    norm_shift = load_vector(vectors_ptr + C, C, C0, C1)
    mid_bias = load_vector(vectors_ptr + 2 * C, C, C0, C1)
    q_bias = load_vector(b_ptr, R1, R10, R11)
    p_scale = load_vector(b_ptr + R1, R1, R10, R11)
    p_shift = load_vector(b_ptr + 2 * R1, R1, R10, R11)
    q_scale = load_vector(b_ptr + 3 * R1, R1, R10, R11)
    q_shift = load_vector(b_ptr + 4 * R1, R1, R10, R11)
    linear = load_vector(ga_ptr, C, C0, C1)
    d_bias = load_vector(ga_ptr + C, L2, P20, P21)
    low_linear = load_vector(ga_ptr + C + L2, L2, P20, P21)
    constant = tl.load(ga_ptr + C + 2 * L2)
    low_constant = tl.load(ga_ptr + C + 2 * L2 + 1)
    if CUDA:
        tl.extra.cuda.gdc_wait()
    a0, a1 = gather_rows(u_ptr, tile, local, live, height, width, 0, R1, R10, R11, US, KEEP, V1)
    d0, d1 = gather_rows(u_ptr, tile, local, live, height, width, R1, L1, L10, L11, US, KEEP, VL1)
    x0, x1 = load_rows(x_ptr, row, live, C, C0, C1)
    a0, a1 = hold_pair(a0, a1, R11, CUDA)
    d0, d1 = hold_pair(d0, d1, L11, CUDA)
    x0, x1 = hold_pair(x0, x1, C1, CUDA)
    q0, q1 = times_whole(d0, d1, to_b, L11, R11)
    q0, q1 = q0 + q_bias[0], q1 + q_bias[1]
    scale = (1 / tl.sqrt(sum_rows(q0 * q0, q1 * q1, R11) / R1 + eps))[:, None]
    q0, q1 = q0 * scale * q_scale[0] + q_shift[0], q1 * scale * q_scale[1] + q_shift[1]
    p0, p1 = norm_rows(a0.to(tl.float32), a1.to(tl.float32), p_scale, p_shift, eps, R1, R11)
    y0, y1 = times_whole((p0 * q0).to(d0.dtype), (p1 * q1).to(d0.dtype), to_mid, R11, C1)
    # rounded as it is stored, so that the norm is one of what the others read
    x0, x1 = (x0 + y0 + mid_bias[0]).to(d0.dtype), (x1 + y1 + mid_bias[1]).to(d0.dtype)
    store_rows(mid_ptr, row, live, x0, x1, C, C0, C1)
    n0, n1 = norm_rows(x0.to(tl.float32), x1.to(tl.float32), norm_scale, norm_shift, eps, C, C1)
    n0, n1 = n0.to(d0.dtype), n1.to(d0.dtype)
    store_rows(n_ptr, row, live, n0, n1, C + 16, C0, C1)
    d0, d1 = times_whole(n0, n1, to_d, C1, P21)
    d0, d1 = (d0 + d_bias[0]).to(n0.dtype), (d1 + d_bias[1]).to(n0.dtype)
    store_low(d_ptr, row, live, d0, d1, L2 + 16, L2, P20, P21)
    scale_a = scale_of(n0, n1, gram, linear, constant, eps, R2, C1)
    scale_b = scale_of(d0, d1, low_gram, low_linear, low_constant, eps, R2, P21)
    extra = extras(scale_a, n0)
    store_rows(n_ptr + C, row, live, extra, extra, C + 16, 16, 0)
    extra = extras(scale_b, n0)
    store_rows(d_ptr + L2, row, live, extra, extra, L2 + 16, 16, 0)
    tl.store(both_ptr + row, scale_a * scale_b, mask=live)
    tl.store(count_ptr + row // 16, tl.zeros((T,), tl.int32), mask=live & (row % 16 == 0))


@triton.jit
def scale_of(n0, n1, gram, linear, constant, eps, R: tl.constexpr, C1: tl.constexpr):
    """What a branch of R outputs is multiplied by in its norm, from the form `n' G n + g' n + c` of each row."""
    g0, g1 = times_whole(n0, n1, gram, C1, C1)
    form = sum_rows((g0 + linear[0]) * n0.to(tl.float32), (g1 + linear[1]) * n1.to(tl.float32), C1) + constant
    return 1 / tl.sqrt(tl.maximum(form, 0.0) / R + eps)


@triton.jit
def small_mu2(
    mid_ptr, out_ptr, n_ptr, d_ptr, both_ptr, count_ptr, parts_ptr, A_ptr, B_ptr, C_ptr, vectors_ptr, rows,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, R2: tl.constexpr, L2: tl.constexpr,
    X20: tl.constexpr, X21: tl.constexpr, T: tl.constexpr, J: tl.constexpr, CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """A part of the second Mu-Layer's sum over its hidden channels; the last program of a tile writes mid plus all."""
    if CUDA:
        tl.extra.cuda.gdc_launch_dependents()
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    row = tile * T + tl.arange(0, T)
    live = row < rows
    weights = ()
    for i in tl.static_range(CHUNKS):
        j = columns((split * CHUNKS + i) * J, J)
        a = load_columns(A_ptr, j, C, C0, C1, R2, 1, C + 16, False)
        extra = load_matrix(A_ptr, columns(C, 16), j, C + 16, R2, 1, C + 16, False, False)
        b = load_columns(B_ptr, j, L2 + 16, X20, X21, R2, 1, L2 + 16, False)
        c0 = load_matrix(C_ptr, j, columns(0, C0), R2, C, 1, R2, False, False)
        c1 = c0
        if C1 > 0:
            c1 = load_matrix(C_ptr, j, columns(C0, C1), R2, C, 1, R2, False, False)
        weights = weights + ((a[0], a[1], extra, b[0], b[1], c0, c1),)  # noqa: RUF005
    if CUDA:
        tl.extra.cuda.gdc_wait()
    n0, n1 = load_rows(n_ptr, row, live, C + 16, C0, C1)
    extra, _ = load_rows(n_ptr + C, row, live, C + 16, 16, 0)
    d0, d1 = load_low(d_ptr, row, live, L2 + 16, L2 + 16, X20, X21)
    n0, n1 = hold_pair(n0, n1, C1, CUDA)
    extra = hold(extra, CUDA)
    d0, d1 = hold_pair(d0, d1, X21, CUDA)
    y0 = tl.zeros((T, C0), tl.float32)
    y1 = tl.zeros((T, C1 if C1 > 0 else 16), tl.float32)
    for i in tl.static_range(CHUNKS):
        w = weights[i]
        first = tl.dot(extra, w[2], times(n0, n1, w[0], w[1], C1))
        h = (first * times(d0, d1, w[3], w[4], X21)).to(n0.dtype)
        y0 = tl.dot(h, w[5], y0)
        if C1 > 0:
            y1 = tl.dot(h, w[6], y1)
    if SPLITS == 1:
        finish(mid_ptr, out_ptr, both_ptr, vectors_ptr + 3 * C, row, live, y0, y1, C, C0, C1)
    else:
        store_rows(parts_ptr, split * rows + row, live, y0, y1, C, C0, C1)
        tl.debug_barrier()  # all threads have written before one of them tells
        if tl.atomic_add(count_ptr + tile * (T // 16), 1, sem="acq_rel") == SPLITS - 1:
            y0, y1 = add_parts(parts_ptr, row, live, rows, SPLITS, C, C0, C1)
            finish(mid_ptr, out_ptr, both_ptr, vectors_ptr + 3 * C, row, live, y0, y1, C, C0, C1)


@triton.jit
def add_parts(
    ptr, row, live, rows, SPLITS: tl.constexpr, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr
):  # fmt: skip
    """The sum of a tile's parts, one after the other, from the cache that all processors share."""
    place = ptr + row[:, None] * C
    y0 = tl.zeros((row.shape[0], C0), tl.float32)
    y1 = tl.zeros((row.shape[0], C1 if C1 > 0 else 16), tl.float32)
    for i in tl.static_range(SPLITS):
        part = place + i * rows * C
        y0 += tl.load(part + columns(0, C0)[None, :], mask=live[:, None], other=0.0, cache_modifier=".cg")
        if C1 > 0:
            y1 += tl.load(part + columns(C0, C1)[None, :], mask=live[:, None], other=0.0, cache_modifier=".cg")
    return y0, y1


@triton.jit
def finish(
    mid_ptr, out_ptr, both_ptr, bias_ptr, row, live, y0, y1, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr
):  # fmt: skip
    """Write mid plus the branch (y0, y1), times the scale of each row, plus its bias."""
    both = tl.load(both_ptr + row, mask=live, other=0.0)[:, None]
    bias0, bias1 = load_vector(bias_ptr, C, C0, C1)
    x0, x1 = load_floats(mid_ptr, row, live, C, C0, C1)
    x0 += y0 * both + bias0
    if C1 > 0:
        x1 += y1 * both + bias1
    store_rows(out_ptr, row, live, x0, x1, C, C0, C1)
