"""What the kernels of a Poly-Block are made of: tiles of rows, products with matrices, norms, quadratic forms, shifts.

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
        entries = tl.load(place, mask=(k < K)[:, None] & (j < J)[None, :], other=0.0)
    elif MASK_K:
        entries = tl.load(place, mask=(k < K)[:, None], other=0.0)
    elif MASK_J:
        entries = tl.load(place, mask=(j < J)[None, :], other=0.0)
    else:
        entries = tl.load(place)
    return entries


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
           SJ: tl.constexpr, SC: tl.constexpr, MASK_J: tl.constexpr = False):  # fmt: skip
    """Add columns `h` times rows j of a (J, C) matrix to (y0, y1)."""
    y0 = tl.dot(h, load_matrix(ptr, j, columns(0, C0), J, C, SJ, SC, MASK_J, C0 > C), y0)
    if C1 > 0:
        y1 = tl.dot(h, load_matrix(ptr, j, columns(C0, C1), J, C, SJ, SC, MASK_J, C0 + C1 > C), y1)
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
    x_ptr, row, live, mean, scale, n0, n1, weight_ptr, bias_ptr, gram_ptr, linear_ptr, constant_ptr,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """The same for n = norm(x), chunk by chunk: x is read again, since a chunk cannot be cut out of a register."""
    form = tl.zeros(mean.shape, tl.float32) + tl.load(constant_ptr)
    for start in range(0, C, J):
        j = columns(start, J)
        x = tl.load(x_ptr + row[:, None] * C + j[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        n = (x - mean[:, None]) * scale[:, None] * tl.load(weight_ptr + j)[None, :] + tl.load(bias_ptr + j)[None, :]
        gradient = multiply(n0, n1, gram_ptr, j, C, C0, C1, C, 1, C, False) + tl.load(linear_ptr + j)[None, :]
        form += tl.sum(gradient * n.to(n0.dtype).to(tl.float32), 1)
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
def remainder(x, divisor):
    """x % divisor and x // divisor for small numbers, which need no division: far from rounding, as halves are."""
    quotient = ((x.to(tl.float32) + 0.5) * (1.0 / divisor)).to(tl.int32)
    return x - quotient * divisor, quotient


@triton.jit
def neighbours(tile, local, height, width, KEEP: tl.constexpr):
    """Where the four shifted quarters of tokens `tile + local` come from: offsets in rows, and whether there is such a
    token."""
    x, lines = remainder(tile % width + local, width)
    y, _ = remainder((tile // width) % height + lines, height)
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
    u_ptr, tile, local, live, height, width, first, j, R: tl.constexpr, STRIDE: tl.constexpr, KEEP: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """Columns `first + j` of u after the spatial shift of its R channels that start at `first`; V of them always move
    together, and are loaded at once if the mask says so too."""
    a, b, c, d, in_a, in_b, in_c, in_d = neighbours(tile, local, height, width, KEEP)
    quarter = (j * 4) // R
    source = (tile + local)[:, None] + pick(quarter, a, b, c, d)
    inside = live[:, None] & (j < R)[None, :]
    if not KEEP:
        inside = inside & (
            pick(quarter, in_a.to(tl.int32), in_b.to(tl.int32), in_c.to(tl.int32), in_d.to(tl.int32)) > 0
        )
    place = source * STRIDE + (first + j)[None, :]
    place = tl.max_contiguous(tl.multiple_of(place, [1, V]), [1, V])
    return tl.load(u_ptr + place, mask=tl.max_constancy(inside, [1, V]), other=0.0)


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
def gather_rows(
    u_ptr, tile, local, live, height, width, first: tl.constexpr, R: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr,
    STRIDE: tl.constexpr, KEEP: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    x0 = gather(u_ptr, tile, local, live, height, width, first, columns(0, R0), R, STRIDE, KEEP, V)
    x1 = x0
    if R1 > 0:
        x1 = gather(u_ptr, tile, local, live, height, width, first, columns(R0, R1), R, STRIDE, KEEP, V)
    return x0, x1


@triton.jit
def hold(x, CUDA: tl.constexpr):
    """The same. Triton moves what follows a load, and waits for it, next to that load; this stays where it is, so that
    all loads ahead of it start at once."""
    if CUDA:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=PACK)
    return x


@triton.jit
def hold_pair(x0, x1, C1: tl.constexpr, CUDA: tl.constexpr):
    y0 = hold(x0, CUDA)
    y1 = y0
    if C1 > 0:
        y1 = hold(x1, CUDA)
    return y0, y1
