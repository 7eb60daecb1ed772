"""Forward kernels of a Poly-Block with layer norms.

The spatial shift is the only step that looks beyond a token, so a block is cut there. `lift` writes
`u = [A1 | D1] norm(x)`; `mu1` gathers the shifted u and does the rest of the first Mu-Layer; `mu2` is the second. Each
reads a tile of tokens once and writes it once. The hidden width of the second Mu-Layer is visited in chunks and never stored:
with A and B centred over their outputs the means of the layer norms vanish, and their variances are quadratic forms,
`|A n + a|^2 = n' (A'A) n + 2 (A'a) n + a'a`, known before the first chunk.

A width that is no power of two is held in two parts, 192 = 128 + 64, instead of being padded.
"""

import triton
import triton.language as tl


@triton.jit
def columns(start, WIDTH: tl.constexpr):
    return start + tl.arange(0, WIDTH)


@triton.jit
def load_rows(ptr, row, live, STRIDE: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr):
    """A tile of rows in two parts; the second is the first again where there is none."""
    place = row[:, None] * STRIDE
    x0 = tl.load(ptr + place + columns(0, C0)[None, :], mask=live[:, None], other=0.0)
    x1 = x0
    if C1 > 0:
        x1 = tl.load(ptr + place + columns(C0, C1)[None, :], mask=live[:, None], other=0.0)
    return x0, x1


@triton.jit
def load_floats(ptr, row, live, STRIDE: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr):
    x0, x1 = load_rows(ptr, row, live, STRIDE, C0, C1)
    return x0.to(tl.float32), x1.to(tl.float32)


@triton.jit
def store_rows(ptr, row, live, x0, x1, STRIDE: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr):
    place = row[:, None] * STRIDE
    tl.store(ptr + place + columns(0, C0)[None, :], x0.to(ptr.dtype.element_ty), mask=live[:, None])
    if C1 > 0:
        tl.store(ptr + place + columns(C0, C1)[None, :], x1.to(ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def load_matrix(
    ptr, k, j, K: tl.constexpr, J: tl.constexpr, SK: tl.constexpr, SJ: tl.constexpr,
    MASK_K: tl.constexpr, MASK_J: tl.constexpr,
):  # fmt: skip
    """Entries (k, j) of a (K, J) matrix with strides SK and SJ; zero outside, where that may happen."""
    place = ptr + k[:, None] * SK + j[None, :] * SJ
    if MASK_K and MASK_J:
        return tl.load(place, mask=(k < K)[:, None] & (j < J)[None, :], other=0.0)
    elif MASK_K:
        return tl.load(place, mask=(k < K)[:, None], other=0.0)
    elif MASK_J:
        return tl.load(place, mask=(j < J)[None, :], other=0.0)
    else:
        return tl.load(place)


@triton.jit
def multiply(
    n0, n1, ptr, j, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, J: tl.constexpr,
    SK: tl.constexpr, SJ: tl.constexpr, MASK_J: tl.constexpr,
):  # fmt: skip
    """Rows (n0, n1) times columns j of a (K, J) matrix."""
    out = tl.dot(n0, load_matrix(ptr, columns(0, K0), j, K, J, SK, SJ, K0 > K, MASK_J))
    if K1 > 0:
        out = tl.dot(n1, load_matrix(ptr, columns(K0, K1), j, K, J, SK, SJ, K0 + K1 > K, MASK_J), out)
    return out


@triton.jit
def spread(h, ptr, j, y0, y1, J: tl.constexpr, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
           SJ: tl.constexpr, SC: tl.constexpr):  # fmt: skip
    """Add columns `h` times rows j of a (J, C) matrix to (y0, y1)."""
    y0 = tl.dot(h, load_matrix(ptr, j, columns(0, C0), J, C, SJ, SC, False, C0 > C), y0)
    if C1 > 0:
        y1 = tl.dot(h, load_matrix(ptr, j, columns(C0, C1), J, C, SJ, SC, False, C0 + C1 > C), y1)
    return y0, y1


@triton.jit
def row_sum(x0, x1, C1: tl.constexpr):
    total = tl.sum(x0, 1)
    if C1 > 0:
        total += tl.sum(x1, 1)
    return total


@triton.jit
def unit_rows(x0, x1, eps, C: tl.constexpr, C1: tl.constexpr):
    """Rows with mean 0 and variance 1, the mean they had and what they were multiplied by."""
    mean = row_sum(x0, x1, C1) / C
    x0 -= mean[:, None]
    x1 -= mean[:, None]
    scale = 1 / tl.sqrt(row_sum(x0 * x0, x1 * x1, C1) / C + eps)
    return x0 * scale[:, None], x1 * scale[:, None], mean, scale


@triton.jit
def affine(x0, x1, weight_ptr, bias_ptr, C0: tl.constexpr, C1: tl.constexpr):
    y0 = x0 * tl.load(weight_ptr + columns(0, C0))[None, :] + tl.load(bias_ptr + columns(0, C0))[None, :]
    y1 = y0
    if C1 > 0:
        y1 = x1 * tl.load(weight_ptr + columns(C0, C1))[None, :] + tl.load(bias_ptr + columns(C0, C1))[None, :]
    return y0, y1


@triton.jit
def quadratic(
    n0, n1, gram_ptr, linear_ptr, constant_ptr, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr
):  # fmt: skip
    """The form `n' G n + g' n + c` of each row."""
    j = columns(0, C0)
    gradient = multiply(n0, n1, gram_ptr, j, C, C0, C1, C, 1, C, C0 > C)
    gradient += tl.load(linear_ptr + j, mask=j < C, other=0.0)[None, :]
    form = tl.sum(gradient * n0.to(tl.float32), 1) + tl.load(constant_ptr)
    if C1 > 0:
        j = columns(C0, C1)
        gradient = multiply(n0, n1, gram_ptr, j, C, C0, C1, C, 1, C, C0 + C1 > C)
        gradient += tl.load(linear_ptr + j, mask=j < C, other=0.0)[None, :]
        form += tl.sum(gradient * n1.to(tl.float32), 1)
    return form


@triton.jit
def quadratic_of_rows(
    n_ptr, row, live, n0, n1, gram_ptr, linear_ptr, constant_ptr,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """The same chunk by chunk: n is read again, since a chunk of it cannot be cut out of a register."""
    form = tl.zeros(row.shape, tl.float32) + tl.load(constant_ptr)
    for start in range(0, C, J):
        j = columns(start, J)
        n = tl.load(n_ptr + row[:, None] * (C + 16) + j[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        gradient = multiply(n0, n1, gram_ptr, j, C, C0, C1, C, 1, C, False) + tl.load(linear_ptr + j)[None, :]
        form += tl.sum(gradient * n, 1)
    return form


@triton.jit
def low_rank(
    n0, n1, D_ptr, e_ptr, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    L: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr,
):  # fmt: skip
    """d = D n + e, with zeros in padded columns."""
    j = columns(0, L0)
    d0 = multiply(n0, n1, D_ptr, j, C, C0, C1, L, 1, C, L0 > L) + tl.load(e_ptr + j, mask=j < L, other=0.0)[None, :]
    d1 = d0
    if L1 > 0:
        j = columns(L0, L1)
        d1 = multiply(n0, n1, D_ptr, j, C, C0, C1, L, 1, C, L0 + L1 > L)
        d1 += tl.load(e_ptr + j, mask=j < L, other=0.0)[None, :]
    return d0.to(n0.dtype), d1.to(n0.dtype)


@triton.jit
def neighbours(row, height, width, KEEP: tl.constexpr):
    """Where the four shifted quarters of each token come from: offsets in rows, and whether there is such a token."""
    x = row % width
    y = (row // width) % height
    up, down = y > 0, y < height - 1
    left, right = x > 0, x < width - 1
    return tl.where(up, -width, 0), tl.where(down, width, 0), tl.where(left, -1, 0), tl.where(right, 1, 0), (
        up | KEEP), (down | KEEP), (left | KEEP), (right | KEEP)  # fmt: skip


@triton.jit
def pick(quarter, a, b, c, d):
    """For each row and column the entry of the column's quarter."""
    q = quarter[None, :]
    return tl.where(q == 0, a[:, None], tl.where(q == 1, b[:, None], tl.where(q == 2, c[:, None], d[:, None])))


@triton.jit
def gather(
    u_ptr, row, live, height, width, first, j, R: tl.constexpr, STRIDE: tl.constexpr, KEEP: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Columns `first + j` of u after the spatial shift of its R channels that start at `first`."""
    a, b, c, d, in_a, in_b, in_c, in_d = neighbours(row, height, width, KEEP)
    quarter = (j * 4) // R
    source = row[:, None] + pick(quarter, a, b, c, d)
    inside = live[:, None] & (j < R)[None, :]
    if not KEEP:
        inside = inside & (
            pick(quarter, in_a.to(tl.int32), in_b.to(tl.int32), in_c.to(tl.int32), in_d.to(tl.int32)) > 0
        )
    place = source * STRIDE + (first + j)[None, :]
    if ALIGNED:  # eight channels always move together
        place = tl.max_contiguous(tl.multiple_of(place, [1, 8]), [1, 8])
    return tl.load(u_ptr + place, mask=inside, other=0.0)


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
    x0, x1, mean, scale = unit_rows(x0, x1, eps, C, C1)
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
def extras(scale, like):
    """The columns [1, 1, r, r - r', r'] of each row, for r the inverse of its scale and r' that as stored.

    They meet a branch's bias and the shift of its norm in the matrices, which so need no vectors of their own.
    """
    column = tl.arange(0, 16)[None, :]
    inverse = (1 / scale)[:, None]
    stored = inverse.to(like.dtype).to(tl.float32)
    rest = tl.where(column == 3, inverse - stored, tl.where((column == 2) | (column == 4), stored, 0.0))
    return tl.where(column < 2, 1.0, rest).to(like.dtype)


@triton.jit
def load_low(ptr, row, live, STRIDE: tl.constexpr, L: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr):
    """Rows of a width L that its parts may exceed."""
    j = columns(0, L0)
    place = row[:, None] * STRIDE
    d0 = tl.load(ptr + place + j[None, :], mask=live[:, None] & (j < L)[None, :], other=0.0)
    d1 = d0
    if L1 > 0:
        j = columns(L0, L1)
        d1 = tl.load(ptr + place + j[None, :], mask=live[:, None] & (j < L)[None, :], other=0.0)
    return d0, d1


@triton.jit
def store_low(
    ptr, row, live, d0, d1, STRIDE: tl.constexpr, L: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr
):  # fmt: skip
    j = columns(0, L0)
    place = row[:, None] * STRIDE
    tl.store(ptr + place + j[None, :], d0.to(ptr.dtype.element_ty), mask=live[:, None] & (j < L)[None, :])
    if L1 > 0:
        j = columns(L0, L1)
        tl.store(ptr + place + j[None, :], d1.to(ptr.dtype.element_ty), mask=live[:, None] & (j < L)[None, :])


@triton.jit
def mu1(
    x_ptr, u_ptr, out_ptr, stats_ptr, keep_ptr, B_ptr, C_ptr, vectors_ptr, rows, height, width, eps,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, R1: tl.constexpr, R10: tl.constexpr, R11: tl.constexpr,
    L1: tl.constexpr, L10: tl.constexpr, L11: tl.constexpr, US: tl.constexpr,
    MU1: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr, TRAIN: tl.constexpr, DROP: tl.constexpr,
    T: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x plus the rest of the first Mu-Layer from u on; in training also three numbers a row."""
    row = tl.program_id(0) * T + tl.arange(0, T)
    live = row < rows
    b_ptr = vectors_ptr + MU1
    a0, a1 = gather_rows(u_ptr, row, live, height, width, 0, R1, R10, R11, US, KEEP, ALIGNED)
    d0, d1 = gather_rows(u_ptr, row, live, height, width, R1, L1, L10, L11, US, KEEP, False)
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
        a = gather(u_ptr, row, live, height, width, 0, j, R1, US, KEEP, ALIGNED).to(tl.float32)
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
def gather_rows(
    u_ptr, row, live, height, width, first: tl.constexpr, R: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr,
    STRIDE: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    x0 = gather(u_ptr, row, live, height, width, first, columns(0, R0), R, STRIDE, KEEP, ALIGNED)
    x1 = x0
    if R1 > 0:
        x1 = gather(u_ptr, row, live, height, width, first, columns(R0, R1), R, STRIDE, KEEP, ALIGNED)
    return x0, x1


@triton.jit
def factor(
    d0, d1, B_ptr, b_ptr, R: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr,
    L: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr,
):  # fmt: skip
    """B d + b, whose rows have mean 0."""
    j = columns(0, R0)
    q0 = multiply(d0, d1, B_ptr, j, L, L0, L1, R, 1, L, False) + tl.load(b_ptr + j)[None, :]
    q1 = q0
    if R1 > 0:
        j = columns(R0, R1)
        q1 = multiply(d0, d1, B_ptr, j, L, L0, L1, R, 1, L, False) + tl.load(b_ptr + j)[None, :]
    return q0, q1


@triton.jit
def mu2(
    x_ptr, out_ptr, keep_ptr, n_ptr, d_ptr, stats_ptr, A_ptr, D_ptr, B_ptr, C_ptr, G_ptr, H_ptr, vectors_ptr,
    rows, tokens, eps,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    R2: tl.constexpr, L2: tl.constexpr, L20: tl.constexpr, L21: tl.constexpr, X20: tl.constexpr, X21: tl.constexpr,
    FORMS: tl.constexpr, DROP: tl.constexpr, TRAIN: tl.constexpr,
    T: tl.constexpr, J: tl.constexpr, JC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x plus the second Mu-Layer of norm(x); in training also what the way back starts from.

    What both branches read, n and d next to their extras, takes the way over memory: products then read it from where
    loads put it, not from registers, which are scarce. Unless it is kept, the memory is one tile for each program.
    """
    program = tl.program_id(0)
    for tile in range(program, tl.cdiv(rows, T), tl.num_programs(0)):
        row = tile * T + tl.arange(0, T)
        live = row < rows
        x0, x1 = load_floats(x_ptr, row, live, C, C0, C1)
        x0, x1, mean, scale = unit_rows(x0, x1, eps, C, C1)
        x0, x1 = affine(x0, x1, vectors_ptr, vectors_ptr + C, C0, C1)
        place = row
        if not TRAIN:
            place = program * T + tl.arange(0, T)
            tl.debug_barrier()  # the tile before has been read
        kept = place >= 0
        if TRAIN:
            kept = live
        store_rows(n_ptr, place, kept, x0, x1, C + 16, C0, C1)
        tl.debug_barrier()
        n0, n1 = load_rows(n_ptr, place, kept, C + 16, C0, C1)
        ga_ptr = vectors_ptr + FORMS
        e_ptr, hb_ptr, constants_ptr = ga_ptr + C, ga_ptr + C + L2, ga_ptr + C + 2 * L2
        form = quadratic_of_rows(n_ptr, place, kept, n0, n1, G_ptr, ga_ptr, constants_ptr, C, C0, C1, JC)
        scale_a = 1 / tl.sqrt(tl.maximum(form, 0.0) / R2 + eps)
        d0, d1 = low_rank(n0, n1, D_ptr, e_ptr, C, C0, C1, L2, L20, L21)
        form = quadratic(d0, d1, H_ptr, hb_ptr, constants_ptr + 1, L2, L20, L21)
        scale_b = 1 / tl.sqrt(tl.maximum(form, 0.0) / R2 + eps)
        store_low(d_ptr, place, kept, d0, d1, L2 + 16, L2, L20, L21)
        extra = extras(scale_a, n0)
        store_rows(n_ptr + C, place, kept, extra, extra, C + 16, 16, 0)
        extra = extras(scale_b, n0)
        store_rows(d_ptr + L2, place, kept, extra, extra, L2 + 16, 16, 0)
        scale = scale_a * scale_b
        if DROP:
            scale *= tl.load(keep_ptr + row // tokens, mask=live, other=0.0)
        if TRAIN:
            tl.store(stats_ptr + row * 3, scale_a, mask=live)
            tl.store(stats_ptr + row * 3 + 1, scale_b, mask=live)
            tl.store(stats_ptr + row * 3 + 2, scale, mask=live)
        tl.debug_barrier()
        d0, d1 = load_low(d_ptr, place, kept, L2 + 16, L2 + 16, X20, X21)
        extra, _ = load_rows(n_ptr + C, place, kept, C + 16, 16, 0)
        y0 = tl.zeros((T, C0), tl.float32)
        y1 = tl.zeros((T, C1 if C1 > 0 else 16), tl.float32)
        for start in tl.range(0, R2, J, num_stages=STAGES):
            j = columns(start, J)
            first = multiply(n0, n1, A_ptr, j, C + 16, C0, C1, R2, 1, C + 16, False)
            extras_A = load_matrix(A_ptr, columns(C, 16), j, C + 16, R2, 1, C + 16, False, False)
            first = tl.dot(extra, extras_A, first)
            second = multiply(d0, d1, B_ptr, j, L2 + 16, X20, X21, R2, 1, L2 + 16, False)
            y0, y1 = spread((first * second).to(n0.dtype), C_ptr, j, y0, y1, R2, C, C0, C1, 1, R2)
        bias_ptr = vectors_ptr + 3 * C
        if DROP:
            # the bias is dropped with the branch
            keep = tl.load(keep_ptr + row // tokens, mask=live, other=0.0)
            add_branch(x_ptr, out_ptr, bias_ptr, row, live, y0, y1, scale, keep, C, C0, C1)
        else:
            add_branch(x_ptr, out_ptr, bias_ptr, row, live, y0, y1, scale, tl.full((T,), 1.0, tl.float32), C, C0, C1)


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
