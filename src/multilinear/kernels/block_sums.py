"""Kernels that add up what programs of the way back through a Poly-Block have left, in the same order each time."""

import triton
import triton.language as tl

from multilinear.kernels.block_parts import columns
from multilinear.kernels.block_weights import store_vector


@triton.jit
def partial_sum(
    task, from_ptr, count, to_ptr, WIDTH: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of `count` rows, which are LENGTH apart, every PARTS-th group summed up."""
    across: tl.constexpr = -(-WIDTH // COLUMNS)
    programs: tl.constexpr = PARTS * across
    if (task >= 0) & (task < programs):
        part = task // across
        j = columns(task % across * COLUMNS, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(part * ROWS, count, PARTS * ROWS):
            r = columns(start, ROWS)
            inside = (r < count)[:, None] & (j < WIDTH)[None, :]
            total += tl.load(from_ptr + r[:, None] * LENGTH + j[None, :], mask=inside, other=0.0)
        store_vector(to_ptr + part * STRIDE, j, tl.sum(total, 0), WIDTH)
    return task - programs


@triton.jit
def partial_sums(
    norm1_ptr, norm1_rows, norm2_ptr, norm2_rows, last2_ptr, last2_rows, mu1_ptr, mu1_rows, to_ptr, first_ptr,
    first_rows, lifting_ptr, rest_ptr, rest_rows, weight_ptr, factor_ptr,
    C: tl.constexpr, R1: tl.constexpr, US: tl.constexpr, SD1: tl.constexpr, LINE: tl.constexpr, LINE2: tl.constexpr,
    LAST2: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What programs of the way back have summed up, up to PARTS rows: three vectors of each place of the shared norm,
    or in place of those of the first the last of them and two for u, and four of the first Mu-Layer. Those of the
    second place come as two, from lines that are LINE2 apart, and the last one, LAST2 apart. And products over
    all tokens from the lines that add up to them, if there are any: that for u, then of the others the gradient of a
    weight and one for a factor."""
    width: tl.constexpr = LINE + 3 * C + 4 * R1
    task = tl.program_id(0)
    task = partial_sum(task, mu1_ptr, mu1_rows, to_ptr + LINE + 3 * C, 4 * R1, 4 * R1, width, PARTS, ROWS, COLUMNS)
    task = partial_sum(task, norm1_ptr, norm1_rows, to_ptr, LINE, LINE, width, PARTS, ROWS, COLUMNS)
    task = partial_sum(task, norm2_ptr, norm2_rows, to_ptr + LINE, 2 * C, LINE2, width, PARTS, ROWS, COLUMNS)
    task = partial_sum(task, last2_ptr, last2_rows, to_ptr + LINE + 2 * C, C, LAST2, width, PARTS, ROWS, COLUMNS)
    if first_ptr is not None:
        length: tl.constexpr = C * R1 + R1 * SD1
        task = partial_sum(task, first_ptr, first_rows, lifting_ptr, US * C, US * C, 0, 1, ROWS, COLUMNS)
        task = partial_sum(task, rest_ptr, rest_rows, weight_ptr, C * R1, length, 0, 1, ROWS, COLUMNS)
        partial_sum(task, rest_ptr + C * R1, rest_rows, factor_ptr, R1 * SD1, length, 0, 1, ROWS, COLUMNS)


@triton.jit
def second_sums(
    hidden_ptr, hidden_rows, own_ptr, own_rows, product_ptr, weight_ptr, C: tl.constexpr, R2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products over all tokens of merged branches from their lines, and of n with itself from others; and behind the
    first ones the gradient of a weight."""
    both: tl.constexpr = 2 * R2 * (C + 16)
    own: tl.constexpr = 2 * C * (C + 16)
    length: tl.constexpr = both + C * R2
    task = tl.program_id(0)
    task = partial_sum(task, hidden_ptr, hidden_rows, product_ptr, both, length, 0, 1, ROWS, COLUMNS)
    task = partial_sum(task, own_ptr, own_rows, product_ptr + both, own, own, 0, 1, ROWS, COLUMNS)
    partial_sum(task, hidden_ptr + both, hidden_rows, weight_ptr, C * R2, length, 0, 1, ROWS, COLUMNS)
