"""The heart of a Mu-Layer between its matrices: two layer norms and their product.

Written out, that is a dozen passes over the activations forward and back. Here the forward pass reads both branches
once and writes the product; the backward pass reads them and the gradient once, computes the norms again from saved
numbers of each row, and writes both gradients. Sums over rows (the gradients of scales, shifts and alpha) are kept in
registers over all rows that a program visits. Rows are held in two parts, 1152 = 1024 + 128, and so padded less.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from multilinear.kernels.block_parts import columns
from multilinear.kernels.block_sizes import chunk, parts
from multilinear.kernels.launch import launch

# columns of a row, rounded up to a power of two -> warps of a program forward; warps and programs backward (measured on
# an H200)
TILES = {256: (1, 1, 2112), 512: (1, 1, 1584), 1024: (1, 2, 528), 2048: (1, 4, 396)}


@triton.jit
def _place(row, j, WIDTH: tl.constexpr):
    """Four columns a thread, in 16 as in 32 bits: else they would be exchanged between threads."""
    return tl.max_contiguous(tl.cast(row, tl.int64) * WIDTH + j, 4)


@triton.jit
def _load(ptr, j, WIDTH: tl.constexpr, ALL: tl.constexpr):
    """Zeros past the end of a row, if there is such a place."""
    return tl.load(ptr, mask=j < WIDTH, other=0.0) if ALL > WIDTH else tl.load(ptr)


@triton.jit
def _store(ptr, x, j, WIDTH: tl.constexpr):
    tl.store(ptr, x.to(ptr.dtype.element_ty), mask=j < WIDTH)


@triton.jit
def _load_shifted(ptr, row, j, height, width, WIDTH: tl.constexpr, KEEP: tl.constexpr, V: tl.constexpr):
    """A row from its four neighbours; where there is none, from itself or zeros. `gather` is the same for tiles of
    rows, whose layout would be exchanged between threads here."""
    y, x = row // width % height, row % width
    quarter = j * 4 // WIDTH
    step = tl.where(quarter == 0, -width, tl.where(quarter == 1, width, tl.where(quarter == 2, -1, 1)))
    border = tl.where(quarter < 2, tl.where(quarter == 0, y == 0, y == height - 1),
                      tl.where(quarter == 2, x == 0, x == width - 1))  # fmt: skip
    place = tl.cast(row, tl.int64) * WIDTH + j + tl.where(border, 0, step) * WIDTH
    place = tl.max_contiguous(tl.multiple_of(place, V), V)
    inside = j < WIDTH if KEEP else (j < WIDTH) & (border == 0)
    return tl.load(ptr + place, mask=tl.max_constancy(inside, V), other=0.0)


@triton.jit
def _load_both(
    a_ptr, b_ptr, row, j, height, width, WIDTH: tl.constexpr, ALL: tl.constexpr, SHIFT: tl.constexpr,
    KEEP: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    place = _place(row, j, WIDTH)
    b = _load(b_ptr + place, j, WIDTH, ALL)
    a = _load_shifted(a_ptr, row, j, height, width, WIDTH, KEEP, V) if SHIFT else _load(a_ptr + place, j, WIDTH, ALL)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _mean(x0, x1, WIDTH: tl.constexpr, W1: tl.constexpr):
    total = tl.sum(x0, 0)
    if W1 > 0:
        total += tl.sum(x1, 0)
    return total / WIDTH


@triton.jit
def _centre(x, mean, j, WIDTH: tl.constexpr, ALL: tl.constexpr):
    x -= mean
    return tl.where(j < WIDTH, x, 0.0) if ALL > WIDTH else x


@triton.jit
def _vectors(wa_ptr, ba_ptr, wb_ptr, bb_ptr, j, WIDTH: tl.constexpr, ALL: tl.constexpr):
    return (
        _load(wa_ptr + j, j, WIDTH, ALL).to(tl.float32), _load(ba_ptr + j, j, WIDTH, ALL).to(tl.float32),
        _load(wb_ptr + j, j, WIDTH, ALL).to(tl.float32), _load(bb_ptr + j, j, WIDTH, ALL).to(tl.float32),
    )  # fmt: skip


@triton.jit
def _store_product(out_ptr, row, j, a, b, vectors, alpha, WIDTH: tl.constexpr):
    wa, ba, wb, bb = vectors
    p = a * wa + ba
    _store(out_ptr + _place(row, j, WIDTH), p + alpha * p * (b * wb + bb), j, WIDTH)


@triton.jit
def _forward(
    a_ptr, b_ptr, out_ptr, stats_ptr, wa_ptr, ba_ptr, wb_ptr, bb_ptr, alpha_ptr, height, width, eps,
    WIDTH: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, SHIFT: tl.constexpr, KEEP: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    ALL: tl.constexpr = W0 + W1
    row = tl.program_id(0)
    j0, j1 = columns(0, W0), columns(W0, W1 if W1 > 0 else 16)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    a0, b0 = _load_both(a_ptr, b_ptr, row, j0, height, width, WIDTH, ALL, SHIFT, KEEP, V)
    a1, b1 = a0, b0
    if W1 > 0:
        a1, b1 = _load_both(a_ptr, b_ptr, row, j1, height, width, WIDTH, ALL, SHIFT, KEEP, V)
    mean_a, mean_b = _mean(a0, a1, WIDTH, W1), _mean(b0, b1, WIDTH, W1)
    a0, b0 = _centre(a0, mean_a, j0, WIDTH, ALL), _centre(b0, mean_b, j0, WIDTH, ALL)
    if W1 > 0:
        a1, b1 = _centre(a1, mean_a, j1, WIDTH, ALL), _centre(b1, mean_b, j1, WIDTH, ALL)
    scale_a = 1 / tl.sqrt(_mean(a0 * a0, a1 * a1, WIDTH, W1) + eps)
    scale_b = 1 / tl.sqrt(_mean(b0 * b0, b1 * b1, WIDTH, W1) + eps)
    vectors = _vectors(wa_ptr, ba_ptr, wb_ptr, bb_ptr, j0, WIDTH, ALL)
    _store_product(out_ptr, row, j0, a0 * scale_a, b0 * scale_b, vectors, alpha, WIDTH)
    if W1 > 0:
        vectors1 = _vectors(wa_ptr, ba_ptr, wb_ptr, bb_ptr, j1, WIDTH, ALL)
        _store_product(out_ptr, row, j1, a1 * scale_a, b1 * scale_b, vectors1, alpha, WIDTH)
    if not SHIFT:  # which is for inference
        tl.store(stats_ptr + row * 4, mean_a)
        tl.store(stats_ptr + row * 4 + 1, scale_a)
        tl.store(stats_ptr + row * 4 + 2, mean_b)
        tl.store(stats_ptr + row * 4 + 3, scale_b)


@triton.jit
def _load_three(grad_ptr, a_ptr, b_ptr, row, j, WIDTH: tl.constexpr, ALL: tl.constexpr):
    place = _place(row, j, WIDTH)
    return (
        _load(grad_ptr + place, j, WIDTH, ALL), _load(a_ptr + place, j, WIDTH, ALL), _load(b_ptr + place, j, WIDTH, ALL)
    )  # fmt: skip


@triton.jit
def _branches(loaded, vectors, stats, sums, alpha, j, WIDTH: tl.constexpr, ALL: tl.constexpr):
    """The normed branches ahead of their scales, the gradients there, and the sums with this row.

    Those of the second branch leave alpha out, so that with the scales and shifts they also give alpha's gradient.
    """
    grad, a, b = loaded
    wa, ba, wb, bb = vectors
    mean_a, scale_a, mean_b, scale_b = stats
    grad = grad.to(tl.float32)
    a = _centre(a.to(tl.float32), mean_a, j, WIDTH, ALL) * scale_a
    b = _centre(b.to(tl.float32), mean_b, j, WIDTH, ALL) * scale_b
    grad_p = grad + alpha * grad * (b * wb + bb)
    grad_q = grad * (a * wa + ba)
    sums = sums[0] + grad_p * a, sums[1] + grad_p, sums[2] + grad_q * b, sums[3] + grad_q
    return a, b, grad_p * wa, alpha * grad_q * wb, sums


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _sums(a, b, grad_a, grad_b):
    """Of a row, all at once: each by itself would wait for the other warps."""
    return tl.reduce((grad_a, grad_a * a, grad_b, grad_b * b), 0, _add_four)


@triton.jit
def _store_gradients(grad_a_ptr, grad_b_ptr, row, j, a, b, grad_a, grad_b, sums, stats, WIDTH: tl.constexpr):
    place = _place(row, j, WIDTH)
    _store(grad_a_ptr + place, (grad_a - sums[0] / WIDTH - a * (sums[1] / WIDTH)) * stats[1], j, WIDTH)
    _store(grad_b_ptr + place, (grad_b - sums[2] / WIDTH - b * (sums[3] / WIDTH)) * stats[3], j, WIDTH)


@triton.jit
def _zeros(W: tl.constexpr):
    zero = tl.zeros((W,), tl.float32)
    return zero, zero, zero, zero


@triton.jit
def _store_sums(ptr, sums, vectors, alpha, j, WIDTH: tl.constexpr):
    """The sums over rows; returns what they add to alpha's gradient."""
    _store(ptr + j, sums[0], j, WIDTH)
    _store(ptr + WIDTH + j, sums[1], j, WIDTH)
    _store(ptr + 2 * WIDTH + j, sums[2] * alpha, j, WIDTH)
    _store(ptr + 3 * WIDTH + j, sums[3] * alpha, j, WIDTH)
    return tl.sum(sums[2] * vectors[2] + sums[3] * vectors[3], 0)


@triton.jit
def _backward(
    grad_ptr, a_ptr, b_ptr, stats_ptr, wa_ptr, ba_ptr, wb_ptr, bb_ptr, alpha_ptr, grad_a_ptr, grad_b_ptr, sums_ptr,
    rows, WIDTH: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
):  # fmt: skip
    ALL: tl.constexpr = W0 + W1
    j0, j1 = columns(0, W0), columns(W0, W1 if W1 > 0 else 16)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    vectors0, sums0 = _vectors(wa_ptr, ba_ptr, wb_ptr, bb_ptr, j0, WIDTH, ALL), _zeros(W0)
    first = tl.program_id(0)
    ahead0 = _load_three(grad_ptr, a_ptr, b_ptr, first, j0, WIDTH, ALL)
    if W1 > 0:
        vectors1, sums1 = _vectors(wa_ptr, ba_ptr, wb_ptr, bb_ptr, j1, WIDTH, ALL), _zeros(W1)
        ahead1 = _load_three(grad_ptr, a_ptr, b_ptr, first, j1, WIDTH, ALL)
    for row in range(first, rows, tl.num_programs(0)):
        later = tl.minimum(row + tl.num_programs(0), rows - 1)  # on its way while this one is dealt with
        stats = (
            tl.load(stats_ptr + row * 4), tl.load(stats_ptr + row * 4 + 1),
            tl.load(stats_ptr + row * 4 + 2), tl.load(stats_ptr + row * 4 + 3),
        )  # fmt: skip
        loaded0 = ahead0
        ahead0 = _load_three(grad_ptr, a_ptr, b_ptr, later, j0, WIDTH, ALL)
        a0, b0, grad_a0, grad_b0, sums0 = _branches(loaded0, vectors0, stats, sums0, alpha, j0, WIDTH, ALL)
        total = _sums(a0, b0, grad_a0, grad_b0)
        if W1 > 0:
            loaded1 = ahead1
            ahead1 = _load_three(grad_ptr, a_ptr, b_ptr, later, j1, WIDTH, ALL)
            a1, b1, grad_a1, grad_b1, sums1 = _branches(loaded1, vectors1, stats, sums1, alpha, j1, WIDTH, ALL)
            more = _sums(a1, b1, grad_a1, grad_b1)
            total = total[0] + more[0], total[1] + more[1], total[2] + more[2], total[3] + more[3]
            _store_gradients(grad_a_ptr, grad_b_ptr, row, j1, a1, b1, grad_a1, grad_b1, total, stats, WIDTH)
        _store_gradients(grad_a_ptr, grad_b_ptr, row, j0, a0, b0, grad_a0, grad_b0, total, stats, WIDTH)
    here = sums_ptr + first * (4 * WIDTH + 4)
    along = _store_sums(here, sums0, vectors0, alpha, j0, WIDTH)
    if W1 > 0:
        along += _store_sums(here, sums1, vectors1, alpha, j1, WIDTH)
    tl.store(here + 4 * WIDTH, along)


@triton.jit
def _add_up(parts_ptr, out_ptr, rows, WIDTH: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(parts_ptr + row[:, None] * STRIDE + column[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, 0), mask=column < WIDTH)


def _tile(width: int) -> tuple[int, int, int]:
    """What `TILES` says of such rows."""
    return TILES.get(max(256, triton.next_power_of_2(width)), (8, 8, 264))


@torch.library.custom_op("multilinear::normed_product", mutates_args=())
def fused_normed_product(
    a: Tensor, b: Tensor, wa: Tensor, ba: Tensor, wb: Tensor, bb: Tensor, alpha: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The product, and the statistics of each row for the way back."""
    width = a.shape[-1]
    rows = a.numel() // width
    out = torch.empty_like(a)
    stats = torch.empty(rows, 4, device=a.device, dtype=torch.float32)
    launch(
        _forward, rows, a, b, out, stats, wa, ba, wb, bb, alpha, 1, 1, eps, width, *parts(width), SHIFT=False,
        KEEP=True, V=1, num_warps=_tile(width)[0],
    )  # fmt: skip
    return out, stats


@torch.library.custom_op("multilinear::shifted_normed_product", mutates_args=())
def fused_shifted_product(
    a: Tensor, b: Tensor, wa: Tensor, ba: Tensor, wb: Tensor, bb: Tensor, alpha: Tensor, eps: float, keep_border: bool
) -> Tensor:
    """The product for `a` (..., H, W, C) ahead of its spatial shift; for inference."""
    height, across, width = a.shape[-3:]
    rows = a.numel() // width
    out = torch.empty_like(a)
    launch(
        _forward, rows, a, b, out, None, wa, ba, wb, bb, alpha, height, across, eps, width, *parts(width),
        SHIFT=True, KEEP=keep_border, V=chunk(width // 4, 4), num_warps=_tile(width)[0],
    )  # fmt: skip
    return out


@fused_shifted_product.register_fake
def _(a: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(a)


@torch.library.custom_op("multilinear::normed_product_backward", mutates_args=())
def _fused_backward(
    grad: Tensor, a: Tensor, b: Tensor, stats: Tensor, wa: Tensor, ba: Tensor, wb: Tensor, bb: Tensor, alpha: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of both branches; and those of the scales and shifts, and of alpha, one after the other."""
    width = a.shape[-1]
    rows = a.numel() // width
    grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
    _, warps, programs = _tile(width)
    programs = min(programs, rows)
    some = torch.empty(programs, 4 * width + 4, device=a.device, dtype=torch.float32)
    launch(
        _backward, programs, grad, a, b, stats, wa, ba, wb, bb, alpha, grad_a, grad_b, some, rows, width,
        *parts(width), num_warps=warps,
    )  # fmt: skip
    sums = torch.empty(4 * width + 1, device=a.device, dtype=torch.float32)
    launch(_add_up, triton.cdiv(len(sums), 32), some, sums, programs, len(sums), some.stride(0), 128, 32, num_warps=8)
    return grad_a, grad_b, sums


@fused_normed_product.register_fake
def _(a: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), a.new_empty(a.numel() // a.shape[-1], 4, dtype=torch.float32)


@_fused_backward.register_fake
def _(grad: Tensor, a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(a), torch.empty_like(b), a.new_empty(4 * a.shape[-1] + 1, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, b, wa, ba, wb, bb, alpha, _ = inputs
    ctx.save_for_backward(a, b, output[1], wa, ba, wb, bb, alpha)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    a, b, stats, *weights = ctx.saved_tensors
    grad_a, grad_b, sums = _fused_backward(grad.contiguous(), a, b, stats, *weights)
    widths = [weight.numel() for weight in weights]
    found = [part.to(like.dtype).view_as(like) for part, like in zip(sums.split(widths), weights, strict=True)]
    return grad_a, grad_b, *found, None


fused_normed_product.register_autograd(_gradients, setup_context=_save)
