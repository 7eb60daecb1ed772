"""Kernels that make the weights of a Poly-Block ready: `pack` scales, centres and converts, then `grams` multiplies.

Dozens of small steps share a launch. Each takes the first so many programs of a line and returns where that goes on: a
program does the one step whose place it has, and passes by the others.
"""

import triton
import triton.language as tl

from multilinear.kernels.block_parts import columns


@triton.jit
def load_tile(ptr, r, j, ROWS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Entries (r, j) of a (ROWS, WIDTH) matrix; zero outside."""
    inside = (r < ROWS)[:, None] & (j < WIDTH)[None, :]
    return tl.load(ptr + r[:, None] * STRIDE + j[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_vector(ptr, j, SIZE: tl.constexpr):
    return tl.load(ptr + j, mask=j < SIZE, other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, r, j, x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    inside = (r < ROWS)[:, None] & (j < WIDTH)[None, :]
    tl.store(ptr + r[:, None] * STRIDE + j[None, :], x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_vector(ptr, j, x, SIZE: tl.constexpr):
    tl.store(ptr + j, x.to(ptr.dtype.element_ty), mask=j < SIZE)


@triton.jit
def store_both(weight_ptr, bias_ptr, r, j, x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A tile of a matrix whose last column, past the WIDTH others, is a bias."""
    store_tile(weight_ptr, r, j, x, ROWS, WIDTH, WIDTH)
    last = (r < ROWS)[:, None] & (j == WIDTH)[None, :]
    tl.store(bias_ptr + r[:, None] + j[None, :] * 0, x.to(bias_ptr.dtype.element_ty), mask=last)


@triton.jit
def load_both(weight_ptr, bias_ptr, r, j, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    last = (r < ROWS)[:, None] & (j == WIDTH)[None, :]
    bias = tl.load(bias_ptr + r[:, None] + j[None, :] * 0, mask=last, other=0.0).to(tl.float32)
    return load_tile(weight_ptr, r, j, ROWS, WIDTH, WIDTH) + bias


@triton.jit
def norm_scale_of(ptr, j, WIDTH: tl.constexpr):
    """What columns of [W | w] are multiplied with if W takes up the scale of the norm ahead of it, if there is one."""
    return tl.where(j < WIDTH, load_vector(ptr, j, WIDTH), 1.0)[None, :] if ptr is not None else 1.0


@triton.jit
def in_turns(r, PLACE: tl.constexpr, RUN: tl.constexpr):
    """Where row r is if two matrices stand in turns, RUN rows of each, and this is the first or the second of them;
    r itself if RUN is 0."""
    return r if RUN == 0 else r // RUN * (2 * RUN) + PLACE * RUN + r % RUN


@triton.jit
def copy(task, from_ptr, to_ptr, scale, shift, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    programs: tl.constexpr = -(-SIZE // BLOCK)
    if (task >= 0) & (task < programs):
        j = columns(task * BLOCK, BLOCK)
        store_vector(to_ptr, j, load_vector(from_ptr, j, SIZE) * scale + shift, SIZE)
    return task - programs


@triton.jit
def mean_of(weight_ptr, bias_ptr, j, R: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The means of columns j over the outputs."""
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, R, ROWS):
        total += tl.sum(load_both(weight_ptr, bias_ptr, columns(start, ROWS), j, R, W), 0)
    return (total / R)[None, :]


@triton.jit
def pack_factor(
    task, weight_ptr, bias_ptr, matrix_ptr, vector_ptr, R: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A matrix and its bias, centred over the outputs."""
    programs: tl.constexpr = W // COLUMNS + 1
    if (task >= 0) & (task < programs):
        j = columns(task * COLUMNS, COLUMNS)
        mean = mean_of(weight_ptr, bias_ptr, j, R, W, ROWS, COLUMNS)
        for start in range(0, R, ROWS):
            r = columns(start, ROWS)
            both = load_both(weight_ptr, bias_ptr, r, j, R, W) - mean
            store_both(matrix_ptr, vector_ptr, r, j, both, R, W)
    return task - programs


@triton.jit
def pack_branch(
    task, weight_ptr, bias_ptr, norm_ptr, scale_ptr, shift_ptr, alpha, one, matrix_ptr, stack_ptr, centred_ptr,
    R: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PLACE: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """The same with its norm's scale next to the columns that `extras` multiplies: the bias and the norm's shift, as
    stored and what that leaves. In turns with another branch it shares the matrix, and has its extras behind the
    other's; else it is also put on the stack. And without the scale in float32. With the scale of the norm ahead of it,
    that is part of the matrix."""
    height: tl.constexpr = R if RUN == 0 else 2 * R
    programs: tl.constexpr = W // COLUMNS + 1
    if (task >= 0) & (task < programs):
        kind = matrix_ptr.dtype.element_ty
        j = columns(task * COLUMNS, COLUMNS)
        mean = mean_of(weight_ptr, bias_ptr, j, R, W, ROWS, COLUMNS)
        for start in range(0, R, ROWS):
            r = columns(start, ROWS)
            both = (load_both(weight_ptr, bias_ptr, r, j, R, W) - mean) * norm_scale_of(norm_ptr, j, W)
            store_tile(centred_ptr, r, j, both, R, W + 1, W + 1)
            both *= (load_vector(scale_ptr, r, R) * alpha)[:, None]
            place = in_turns(r, PLACE, RUN)
            store_tile(matrix_ptr, place, j, both, height, W, W + 16)
            if RUN == 0:
                store_tile(stack_ptr, r, j, both, R, W, W)
            if task == programs - 1:  # the bias is among the columns
                bias = tl.sum(tl.where((j == W)[None, :], both, 0.0), 1)[:, None]
                shift = (load_vector(shift_ptr, r, R) * alpha + one)[:, None]
                bias_left = bias - bias.to(kind).to(tl.float32)
                shift_left = shift - shift.to(kind).to(tl.float32)
                e = tl.arange(0, 16)[None, :] - (0 if RUN == 0 else 5 * PLACE)
                shifts = tl.where((e == 2) | (e == 3), shift, tl.where(e == 4, shift_left, 0.0))
                entries = tl.where(e == 0, bias, tl.where(e == 1, bias_left, shifts))
                store_tile(matrix_ptr + W, place, tl.arange(0, 16), entries, height, 16, W + 16)
    return task - programs


@triton.jit
def pack(
    norm_scale, norm_shift, mu1_A, mu1_a, mu1_D, mu1_d, mu1_B, mu1_b, mu1_C, mu1_c, mu1_scale_a, mu1_shift_a,
    mu1_scale_b, mu1_shift_b, mu1_alpha, mu2_A, mu2_a, mu2_D, mu2_d, mu2_B, mu2_b, mu2_C, mu2_c, mu2_scale_a,
    mu2_shift_a, mu2_scale_b, mu2_shift_b, mu2_alpha,
    lifting_ptr, B1_ptr, C1_ptr, A2_ptr, B2_ptr, C2_ptr, stack_ptr, low_stack_ptr, vectors_ptr, first_ptr, second_ptr,
    C: tl.constexpr, R1: tl.constexpr, L1: tl.constexpr, R2: tl.constexpr, L2: tl.constexpr,
    MU1: tl.constexpr, FORMS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """All parameters, taken in their order, as the other kernels read them, but for what `grams` adds. With merged
    branches these have taken up the norm ahead of them: of both matrices only the first one's scale is left to do."""
    RUN: tl.constexpr = 32 if MERGED else 0
    WIDE: tl.constexpr = C if MERGED else L2
    alpha1 = tl.load(mu1_alpha).to(tl.float32)
    alpha2 = tl.load(mu2_alpha).to(tl.float32)
    task = pack_branch(tl.program_id(0), mu2_A, mu2_a, norm_scale if MERGED else None, mu2_scale_a, mu2_shift_a, 1.0,
                       0.0, A2_ptr, stack_ptr, first_ptr, R2, C, ROWS, COLUMNS, 0, RUN)  # fmt: skip
    task = pack_branch(task, mu2_B, mu2_b, None, mu2_scale_b, mu2_shift_b, alpha2, 1.0, B2_ptr, low_stack_ptr,
                       second_ptr, R2, WIDE, ROWS, COLUMNS, 1, RUN)  # fmt: skip
    task = pack_factor(task, mu1_B, mu1_b, B1_ptr, vectors_ptr + MU1, R1, L1, ROWS, COLUMNS)
    task = copy(task, mu2_C, C2_ptr, 1.0, 0.0, C * R2, BLOCK)
    task = copy(task, mu1_A, lifting_ptr, 1.0, 0.0, R1 * C, BLOCK)
    task = copy(task, mu1_D, lifting_ptr + R1 * C, 1.0, 0.0, L1 * C, BLOCK)
    task = copy(task, mu1_C, C1_ptr, 1.0, 0.0, C * R1, BLOCK)
    if not MERGED:
        task = copy(task, mu2_D, stack_ptr + (R2 + C + 8) * C, 1.0, 0.0, L2 * C, BLOCK)
        task = copy(task, mu2_d, vectors_ptr + FORMS + C, 1.0, 0.0, L2, BLOCK)
    task = copy(task, norm_scale, vectors_ptr, 1.0, 0.0, C, BLOCK)
    task = copy(task, norm_shift, vectors_ptr + C, 1.0, 0.0, C, BLOCK)
    task = copy(task, mu1_c, vectors_ptr + 2 * C, 1.0, 0.0, C, BLOCK)
    task = copy(task, mu2_c, vectors_ptr + 3 * C, 1.0, 0.0, C, BLOCK)
    task = copy(task, mu1_scale_a, vectors_ptr + MU1 + R1, 1.0, 0.0, R1, BLOCK)
    task = copy(task, mu1_shift_a, vectors_ptr + MU1 + 2 * R1, 1.0, 0.0, R1, BLOCK)
    task = copy(task, mu1_scale_b, vectors_ptr + MU1 + 3 * R1, alpha1, 0.0, R1, BLOCK)
    task = copy(task, mu1_shift_b, vectors_ptr + MU1 + 4 * R1, alpha1, 1.0, R1, BLOCK)
    task = copy(task, mu1_a, vectors_ptr + BIAS, 1.0, 0.0, R1, BLOCK)
    copy(task, mu1_d, vectors_ptr + BIAS + R1, 1.0, 0.0, L1, BLOCK)


@triton.jit
def gram(
    task, centred_ptr, out_ptr, linear_ptr, constant_ptr, R: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, PLACE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A tile of `M' M` for M = [A | a] as stored: A'A, 2 A'a and a'a, the first two perhaps in turns with those of
    another, and then behind both A'A once more, for quadratic forms, which take blocks of RUN rows and columns from the
    diagonal on, those beyond it doubled; if not, below the first A'a and seven rows of zeros."""
    across: tl.constexpr = W // TILE + 1
    programs: tl.constexpr = ((W + 7) // TILE + 1) * across
    if (task >= 0) & (task < programs):
        kind = out_ptr.dtype.element_ty
        i = columns(task // across * TILE, TILE)
        j = columns(task % across * TILE, TILE)
        form = tl.zeros((TILE, TILE), tl.float32)
        for start in range(0, R, ROWS):
            r = columns(start, ROWS)
            left = load_tile(centred_ptr, r, i, R, W + 1, W + 1).to(kind).to(tl.float32)
            right = load_tile(centred_ptr, r, j, R, W + 1, W + 1).to(kind).to(tl.float32)
            # numbers of 16 bits are exact in TF32
            form = tl.dot(tl.trans(left), right, form, input_precision="tf32")
        store_tile(out_ptr, in_turns(i, PLACE, RUN), j, form, W + 8 if RUN == 0 else 2 * W, W, W)
        if RUN > 0:
            beyond = j[None, :] // RUN - i[:, None] // RUN
            upper = tl.where(beyond > 0, 2 * form, tl.where(beyond == 0, form, 0.0))
            store_tile(out_ptr + 2 * W * W, in_turns(i, PLACE, RUN), j, upper, 2 * W, W, W)
        bias = (i == W)[:, None]
        tl.store(linear_ptr + i[:, None] * 0 + in_turns(j, PLACE, RUN)[None, :], 2 * form, mask=bias & (j < W)[None, :])
        tl.store(constant_ptr + i[:, None] * 0 + j[None, :] * 0, form, mask=bias & (j == W)[None, :])
    return task - programs


@triton.jit
def grams(
    first_ptr, second_ptr, stack_ptr, low_stack_ptr, vectors_ptr,
    C: tl.constexpr, R2: tl.constexpr, L2: tl.constexpr, FORMS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """The quadratic forms of both branches of the second Mu-Layer."""
    linear_ptr = vectors_ptr + FORMS
    task = tl.program_id(0)
    if MERGED:
        constants_ptr = linear_ptr + 2 * C
        task = gram(task, first_ptr, stack_ptr, linear_ptr, constants_ptr, R2, C, ROWS, TILE, 0, 64)
        gram(task, second_ptr, stack_ptr, linear_ptr, constants_ptr + 1, R2, C, ROWS, TILE, 1, 64)
    else:
        low_linear_ptr, constants_ptr = linear_ptr + C + L2, linear_ptr + C + 2 * L2
        task = gram(task, first_ptr, stack_ptr + R2 * C, linear_ptr, constants_ptr, R2, C, ROWS, TILE, 0, 0)
        gram(task, second_ptr, low_stack_ptr + R2 * L2, low_linear_ptr, constants_ptr + 1, R2, L2, ROWS, TILE, 1, 0)


@triton.jit
def shift_bias(
    task, weight_ptr, bias_ptr, shift_ptr, out_ptr, R: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The bias of a matrix that takes up the shift of the norm ahead of it."""
    programs: tl.constexpr = -(-R // ROWS)
    if (task >= 0) & (task < programs):
        r = columns(task * ROWS, ROWS)
        j = tl.arange(0, BLOCK)
        more = load_tile(weight_ptr, r, j, R, W, W) * load_vector(shift_ptr, j, W)[None, :]
        store_vector(out_ptr, r, load_vector(bias_ptr, r, R) + tl.sum(more, 1), R)
    return task - programs


@triton.jit
def shift_biases(
    A_ptr, a_ptr, D_ptr, d_ptr, shift_ptr, first_ptr, low_ptr, C: tl.constexpr, R2: tl.constexpr, L2: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of both matrices of the second Mu-Layer that are behind the norm."""
    task = shift_bias(tl.program_id(0), A_ptr, a_ptr, shift_ptr, first_ptr, R2, C, ROWS, BLOCK)
    shift_bias(task, D_ptr, d_ptr, shift_ptr, low_ptr, L2, C, ROWS, BLOCK)


@triton.jit
def merge_factors(
    B_ptr, b_ptr, D_ptr, d_ptr, scale_ptr, out_ptr, bias_ptr, C: tl.constexpr, R2: tl.constexpr, L2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of `B [D | d] + [0 | b]`: both matrices of a second branch as one, where D takes up the scale of the norm
    ahead of it."""
    across: tl.constexpr = C // COLUMNS + 1
    r = columns(tl.program_id(0) // across * ROWS, ROWS)
    j = columns(tl.program_id(0) % across * COLUMNS, COLUMNS)
    both = tl.where((j == C)[None, :], load_vector(b_ptr, r, R2)[:, None], 0.0)
    for start in range(0, L2, DEPTH):
        k = columns(start, DEPTH)
        factor = load_tile(B_ptr, r, k, R2, L2, L2)
        both = tl.dot(factor, load_both(D_ptr, d_ptr, k, j, L2, C), both, input_precision="tf32x3")
    both *= norm_scale_of(scale_ptr, j, C)
    store_both(out_ptr, bias_ptr, r, j, both, R2, C)
