"""Kernels that turn products and sums over all tokens into the gradients of a Poly-Block's weights.

Small steps share a launch, as in `block_weights`.
"""

import triton
import triton.language as tl

from multilinear.kernels.block_parts import columns
from multilinear.kernels.block_weights import (
    in_turns,
    load_both,
    load_tile,
    load_vector,
    norm_scale_of,
    store_both,
    store_tile,
    store_vector,
)


@triton.jit
def split(
    task, product_ptr, weight_ptr, bias_ptr, R: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A product with [input | 1] into the gradients of a matrix and its bias."""
    across: tl.constexpr = W // COLUMNS + 1
    programs: tl.constexpr = -(-R // ROWS) * across
    if (task >= 0) & (task < programs):
        r = columns(task // across * ROWS, ROWS)
        j = columns(task % across * COLUMNS, COLUMNS)
        store_both(weight_ptr, bias_ptr, r, j, load_tile(product_ptr, r, j, R, W + 1, STRIDE), R, W)
    return task - programs


@triton.jit
def total_of(ptr, j, SIZE: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr):
    return tl.sum(load_tile(ptr, tl.arange(0, PARTS), j, PARTS, SIZE, STRIDE), 0)


@triton.jit
def split_normed(
    task, product_ptr, sums_ptr, scale_ptr, shift_ptr, weight_ptr, bias_ptr, R: tl.constexpr, W: tl.constexpr,
    NEXT: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same from a product with the input ahead of its norm, of gradients that were divided by its deviation, and
    their sums times the mean and times the deviation, which are NEXT apart."""
    across: tl.constexpr = W // COLUMNS + 1
    programs: tl.constexpr = -(-R // ROWS) * across
    if (task >= 0) & (task < programs):
        r = columns(task // across * ROWS, ROWS)
        j = columns(task % across * COLUMNS, COLUMNS)
        level = total_of(sums_ptr, r, R, STRIDE, PARTS)[:, None]
        total = total_of(sums_ptr + NEXT, r, R, STRIDE, PARTS)[:, None]
        grad = (load_tile(product_ptr, r, j, R, W, W) - level) * load_vector(scale_ptr, j, W)[None, :]
        grad += total * load_vector(shift_ptr, j, W)[None, :]
        store_both(weight_ptr, bias_ptr, r, j, tl.where(j[None, :] == W, total, grad), R, W)
    return task - programs


@triton.jit
def through_product(
    product_ptr, sums_ptr, weight_ptr, j, scale, shift, R: tl.constexpr, W: tl.constexpr, NEXT: tl.constexpr,
    STRIDE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """From the same, add to columns j of the gradients of the norm's weight and bias what these R rows give."""
    for start in range(0, R, ROWS):
        r = columns(start, ROWS)
        weight = load_tile(weight_ptr, r, j, R, W, W)
        level = total_of(sums_ptr, r, R, STRIDE, PARTS)[:, None]
        scale += tl.sum(weight * (load_tile(product_ptr, r, j, R, W, W) - level), 0)
        shift += tl.sum(weight * total_of(sums_ptr + NEXT, r, R, STRIDE, PARTS)[:, None], 0)
    return scale, shift


@triton.jit
def load_taken(product_ptr, first, end, k, j, W: tl.constexpr):
    """Entries (k, j) of `K = [n | 1]' diag(k) [n | 1]`, from the rows of its products that n made, from `first` on, and
    the sum of k: it is symmetric, and of blocks of 64 x 64 only those from the diagonal on are there, of the row that
    the ones make only the last column."""
    k, j = k[:, None], j[None, :]
    above, beyond = tl.minimum(k, j), tl.maximum(k, j)
    place = (first + above) * (W + 16) + beyond
    taken = tl.load(product_ptr + place, mask=(k <= W) & (j <= W) & (k + j < 2 * W), other=0.0)
    return tl.where((k == W) & (j == W), end, taken)


@triton.jit
def through_norm(
    task, product_ptr, ends_ptr, lines, centred_ptr, scale_ptr, alpha, weight_ptr, bias_ptr, R: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ALL: tl.constexpr,
    PLACE: tl.constexpr, RUN: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The gradient of a centred matrix and its bias: of the products of gradients before the norm with its input the
    scaled and centred ones, and the matrix times those of what the norm takes from them. These follow the others; in
    turns with another branch without the last one, for which there are parts of a sum."""
    height: tl.constexpr = R if RUN == 0 else 2 * R
    across: tl.constexpr = W // COLUMNS + 1
    programs: tl.constexpr = -(-R // ROWS) * across
    if (task >= 0) & (task < programs):
        j = columns(task % across * COLUMNS, COLUMNS)
        mean = tl.zeros((COLUMNS,), tl.float32)
        for start in range(0, R, ALL):
            r = columns(start, ALL)
            scaled = load_tile(product_ptr, in_turns(r, PLACE, RUN), j, height, W + 1, W + 16)
            mean += tl.sum(scaled * load_vector(scale_ptr, r, R)[:, None], 0) / R
        r = columns(task // across * ROWS, ROWS)
        grad = load_tile(product_ptr, in_turns(r, PLACE, RUN), j, height, W + 1, W + 16)
        grad *= load_vector(scale_ptr, r, R)[:, None]
        grad = (grad - mean[None, :]) * alpha
        end = 0.0
        if RUN > 0:
            line = tl.arange(0, LINES)
            end = tl.sum(tl.load(ends_ptr + 2 * line + PLACE, mask=line < lines, other=0.0), 0)
        for start in range(0, W + 1, DEPTH):
            k = columns(start, DEPTH)
            if RUN == 0:
                taken = load_tile(product_ptr + R * (W + 16), k, j, W + 1, W + 1, W + 16)
            else:
                taken = load_taken(product_ptr, height + PLACE * W, end, k, j, W)
            grad = tl.dot(load_tile(centred_ptr, r, k, R, W + 1, W + 1), taken, grad, input_precision="tf32")
        store_both(weight_ptr, bias_ptr, r, j, grad, R, W)
    return task - programs


@triton.jit
def norm_gradients(
    task, product_ptr, centred_ptr, scale_ptr, shift_ptr, alpha, dscale_ptr, dshift_ptr, terms_ptr,
    R: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PLACE: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """The gradients of a norm's scale and shift, and each channel's share in that of alpha."""
    height: tl.constexpr = R if RUN == 0 else 2 * R
    extras: tl.constexpr = W if RUN == 0 else W + 5 * PLACE
    programs: tl.constexpr = -(-R // ROWS)
    if (task >= 0) & (task < programs):
        r = columns(task * ROWS, ROWS)
        place = in_turns(r, PLACE, RUN)
        along = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, W + 1, COLUMNS):
            j = columns(start, COLUMNS)
            product = load_tile(product_ptr, place, j, height, W + 1, W + 16)
            along += product * load_tile(centred_ptr, r, j, R, W + 1, W + 1)
        dscale = tl.sum(along, 1)
        dshift = tl.load(product_ptr + place * (W + 16) + extras + 2, mask=r < R, other=0.0)
        dshift += tl.load(product_ptr + place * (W + 16) + extras + 3, mask=r < R, other=0.0)
        store_vector(dscale_ptr, r, alpha * dscale, R)
        store_vector(dshift_ptr, r, alpha * dshift, R)
        if terms_ptr is not None:
            store_vector(terms_ptr, r, load_vector(scale_ptr, r, R) * dscale + load_vector(shift_ptr, r, R) * dshift, R)
    return task - programs


@triton.jit
def second_gradients(
    product_ptr, low_product_ptr, ends_ptr, lines, first_ptr, second_ptr, scale_a_ptr, scale_b_ptr, shift_b_ptr,
    alpha_ptr, A_ptr, a_ptr, D_ptr, d_ptr, B_ptr, b_ptr, dscale_a_ptr, dshift_a_ptr, dscale_b_ptr, dshift_b_ptr,
    terms_ptr,
    C: tl.constexpr, R2: tl.constexpr, L2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, ALL: tl.constexpr, MERGED: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """From the products of P with n and of Q with d to the gradients of the second Mu-Layer; and the terms whose
    sum is that of alpha. With merged branches both products are one, B is both matrices, and D is left out; all have
    taken up the norm ahead of them."""
    RUN: tl.constexpr = 32 if MERGED else 0
    WIDE: tl.constexpr = C if MERGED else L2
    alpha = tl.load(alpha_ptr).to(tl.float32)
    task = tl.program_id(0)
    task = through_norm(task, product_ptr, ends_ptr, lines, first_ptr, scale_a_ptr, 1.0, A_ptr, a_ptr, R2, C, ROWS,
                        COLUMNS, DEPTH, ALL, 0, RUN, LINES)  # fmt: skip
    task = through_norm(task, low_product_ptr, ends_ptr, lines, second_ptr, scale_b_ptr, alpha, B_ptr, b_ptr, R2, WIDE,
                        ROWS, COLUMNS, DEPTH, ALL, 1, RUN, LINES)  # fmt: skip
    task = norm_gradients(task, product_ptr, first_ptr, None, None, 1.0, dscale_a_ptr, dshift_a_ptr, None, R2, C, ROWS,
                          COLUMNS, 0, RUN)  # fmt: skip
    task = norm_gradients(task, low_product_ptr, second_ptr, scale_b_ptr, shift_b_ptr, alpha, dscale_b_ptr,
                          dshift_b_ptr, terms_ptr, R2, WIDE, ROWS, COLUMNS, 1, RUN)  # fmt: skip
    if not MERGED:
        split(task, product_ptr + (R2 + C + 8) * (C + 16), D_ptr, d_ptr, L2, C, C + 16, ROWS, COLUMNS)


@triton.jit
def load_behind_norm(
    weight_ptr, bias_ptr, scale_ptr, shift_ptr, r, j, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The gradient of [W | w] from that of [W | w] as it has taken up the norm ahead of it."""
    grad = load_both(weight_ptr, bias_ptr, r, j, ROWS, WIDTH) * norm_scale_of(scale_ptr, j, WIDTH)
    return grad + load_vector(bias_ptr, r, ROWS)[:, None] * load_vector(shift_ptr, j, WIDTH)[None, :]


@triton.jit
def store_norm_line(line_ptr, weight, grad, bias, j, C: tl.constexpr):
    """What rows of a matrix, whose gradient behind the norm is `grad` and that of its bias `bias`, give to those of the
    norm's scale and shift."""
    store_vector(line_ptr, j, tl.sum(weight * grad, 0), C)
    store_vector(line_ptr + C, j, tl.sum(weight * bias[:, None], 0), C)


@triton.jit
def factor_gradients(
    first_ptr, first_bias_ptr, merged_ptr, bias_ptr, A_ptr, B_ptr, D_ptr, d_ptr, scale_ptr, shift_ptr, dA_ptr, da_ptr,
    dB_ptr, db_ptr, dD_ptr, dd_ptr, lines_ptr, C: tl.constexpr, R2: tl.constexpr, L2: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """From the gradients of the first branch's [A | a] and of the second's merged [W | w], which have taken up the norm
    ahead of them, to those of all parts: for `W = B D` and `w = B d + b` these are `dW D' + dw d'` and `B' dW`. And a
    line for each ROWS rows of A, then of D, of what they give to the gradients of that norm."""
    wide: tl.constexpr = C // COLUMNS + 1
    task = tl.program_id(0)
    across: tl.constexpr = -(-L2 // COLUMNS)
    programs: tl.constexpr = -(-R2 // ROWS) * across
    firsts: tl.constexpr = -(-R2 // ROWS) * wide
    if task < programs:
        r = columns(task // across * ROWS, ROWS)
        i = columns(task % across * COLUMNS, COLUMNS)
        grad = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, C + 1, DEPTH):
            j = columns(start, DEPTH)
            left = load_behind_norm(merged_ptr, bias_ptr, scale_ptr, shift_ptr, r, j, R2, C)
            grad = tl.dot(left, tl.trans(load_both(D_ptr, d_ptr, i, j, L2, C)), grad, input_precision="tf32")
        store_tile(dB_ptr, r, i, grad, R2, L2, L2)
        if task % across == 0:
            store_vector(db_ptr, r, load_vector(bias_ptr, r, R2), R2)
    elif task < programs + firsts:
        task -= programs
        r = columns(task // wide * ROWS, ROWS)
        j = columns(task % wide * COLUMNS, COLUMNS)
        whole = load_behind_norm(first_ptr, first_bias_ptr, scale_ptr, shift_ptr, r, j, R2, C)
        store_both(dA_ptr, da_ptr, r, j, whole, R2, C)
        grad, bias = load_tile(first_ptr, r, j, R2, C, C), load_vector(first_bias_ptr, r, R2)
        store_norm_line(lines_ptr + task // wide * 2 * C, load_tile(A_ptr, r, j, R2, C, C), grad, bias, j, C)
    else:
        task -= programs + firsts
        tall = columns(task // wide * ROWS, ROWS)
        j = columns(task % wide * COLUMNS, COLUMNS)
        grad = tl.zeros((ROWS, COLUMNS), tl.float32)
        bias = tl.zeros((ROWS,), tl.float32)
        for start in range(0, R2, DEPTH):
            r = columns(start, DEPTH)
            left, right = load_tile(B_ptr, r, tall, R2, L2, L2), load_both(merged_ptr, bias_ptr, r, j, R2, C)
            grad = tl.dot(tl.trans(left), right, grad, input_precision="tf32")
            bias += tl.sum(left * load_vector(bias_ptr, r, R2)[:, None], 0)
        whole = grad * norm_scale_of(scale_ptr, j, C) + bias[:, None] * load_vector(shift_ptr, j, C)[None, :]
        store_both(dD_ptr, dd_ptr, tall, j, whole, L2, C)
        lines_ptr += (-(-R2 // ROWS) + task // wide) * 2 * C
        store_norm_line(lines_ptr, load_tile(D_ptr, tall, j, L2, C, C), grad, bias, j, C)


@triton.jit
def norm_gradients_of_both(
    task, lifting_ptr, parts_ptr, A_ptr, D_ptr, dscale_ptr, dshift_ptr, C: tl.constexpr, R1: tl.constexpr,
    L1: tl.constexpr, US: tl.constexpr, LINE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of the shared norm, from its second place and from the first."""
    width: tl.constexpr = LINE + 3 * C + 4 * R1
    programs: tl.constexpr = -(-C // ROWS)
    if (task >= 0) & (task < programs):
        j = columns(task * ROWS, ROWS)
        scale = total_of(parts_ptr + LINE, j, C, width, PARTS)
        shift = total_of(parts_ptr + LINE + C, j, C, width, PARTS)
        if LINE == 3 * C:
            scale += total_of(parts_ptr, j, C, width, PARTS)
            shift += total_of(parts_ptr + C, j, C, width, PARTS)
        else:
            sums_ptr = parts_ptr + C
            scale, shift = through_product(
                lifting_ptr, sums_ptr, A_ptr, j, scale, shift, R1, C, US, width, PARTS, COLUMNS
            )  # fmt: skip
            scale, shift = through_product(
                lifting_ptr + R1 * C, sums_ptr + R1, D_ptr, j, scale, shift, L1, C, US, width, PARTS, COLUMNS
            )  # fmt: skip
        store_vector(dscale_ptr, j, scale, C)
        store_vector(dshift_ptr, j, shift, C)
    return task - programs


@triton.jit
def first_gradients(
    lifting_ptr, factor_ptr, parts_ptr, norm_scale_ptr, norm_shift_ptr, A_weight_ptr, D_weight_ptr, scale_b_ptr,
    shift_b_ptr, alpha_ptr, terms_ptr, dnorm_scale_ptr, dnorm_shift_ptr, A_ptr, a_ptr, D_ptr, d_ptr, B_ptr,
    b_ptr, dscale_a_ptr, dshift_a_ptr, dscale_b_ptr, dshift_b_ptr, c_ptr, dalpha_ptr, second_c_ptr, second_dalpha_ptr,
    C: tl.constexpr, R1: tl.constexpr, L1: tl.constexpr, R2: tl.constexpr, SD1: tl.constexpr, US: tl.constexpr,
    LINE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """From products and partial sums to the gradients of the shared norm, of the first Mu-Layer, and of the last bias
    and alpha of the second."""
    width: tl.constexpr = LINE + 3 * C + 4 * R1
    NORMED: tl.constexpr = LINE != 3 * C  # the product for u was one with the input ahead of its norm
    task = tl.program_id(0)
    j = tl.arange(0, VECTOR)
    second_ptr, mu1_ptr = parts_ptr + LINE, parts_ptr + LINE + 3 * C
    if task == 0:
        store_vector(c_ptr, j, total_of(parts_ptr + (0 if NORMED else 2 * C), j, C, width, PARTS), C)
    elif task == 1:
        store_vector(second_c_ptr, j, total_of(second_ptr + 2 * C, j, C, width, PARTS), C)
    elif task == 2:
        store_vector(dscale_a_ptr, j, total_of(mu1_ptr, j, R1, width, PARTS), R1)
    elif task == 3:
        store_vector(dshift_a_ptr, j, total_of(mu1_ptr + R1, j, R1, width, PARTS), R1)
    elif task == 4:
        alpha = tl.load(alpha_ptr).to(tl.float32)
        dscale = total_of(mu1_ptr + 2 * R1, j, R1, width, PARTS)
        dshift = total_of(mu1_ptr + 3 * R1, j, R1, width, PARTS)
        store_vector(dscale_b_ptr, j, alpha * dscale, R1)
        store_vector(dshift_b_ptr, j, alpha * dshift, R1)
        dalpha = tl.sum(load_vector(scale_b_ptr, j, R1) * dscale + load_vector(shift_b_ptr, j, R1) * dshift, 0)
        tl.store(dalpha_ptr, dalpha.to(dalpha_ptr.dtype.element_ty))
    elif task == 5:
        dalpha = tl.sum(load_vector(terms_ptr, tl.arange(0, TERMS), R2), 0)
        tl.store(second_dalpha_ptr, dalpha.to(second_dalpha_ptr.dtype.element_ty))
    task -= 6
    sums_ptr = parts_ptr + C
    task = norm_gradients_of_both(
        task, lifting_ptr, parts_ptr, A_weight_ptr, D_weight_ptr, dnorm_scale_ptr, dnorm_shift_ptr, C, R1, L1, US, LINE,
        PARTS, ROWS, COLUMNS,
    )  # fmt: skip
    if NORMED:
        task = split_normed(
            task, lifting_ptr, sums_ptr, norm_scale_ptr, norm_shift_ptr, A_ptr, a_ptr, R1, C, US, width, PARTS, ROWS,
            COLUMNS,
        )  # fmt: skip
        task = split_normed(
            task, lifting_ptr + R1 * C, sums_ptr + R1, norm_scale_ptr, norm_shift_ptr, D_ptr, d_ptr, L1, C, US, width,
            PARTS, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        task = split(task, lifting_ptr, A_ptr, a_ptr, R1, C, C + 8, ROWS, COLUMNS)
        task = split(task, lifting_ptr + R1 * (C + 8), D_ptr, d_ptr, L1, C, C + 8, ROWS, COLUMNS)
    split(task, factor_ptr, B_ptr, b_ptr, R1, L1, SD1, ROWS, COLUMNS)
