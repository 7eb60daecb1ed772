"""The heart of a Mu-Layer between its matrices: two layer norms and their product.

Written out, that is a dozen passes over the activations forward and back. Here the forward pass reads both branches
once and writes the product; the backward pass reads them and the gradient once, computes the norms again from two saved
numbers a row, and writes both gradients. Sums over rows (the gradients of scales, shifts and alpha) are kept in
registers over all rows that a program visits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from multilinear.kernels.block import chunk
from multilinear.kernels.block_backward import load_below
from multilinear.kernels.block_parts import gather
from multilinear.kernels.launch import launch

# columns of a padded row -> rows and warps of a tile forward; rows, warps and programs backward (measured on an H200)
TILES = {256: (2, 1, 2, 1, 2112), 512: (2, 4, 1, 4, 1056), 1024: (4, 8, 1, 2, 2112)}


@triton.jit
def _norm(x, mask, width):
    mean = tl.sum(x, 1) / width
    centred = tl.where(mask, x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / width
    return mean, centred, variance


@triton.jit
def _forward(
    a_ptr, b_ptr, out_ptr, stats_ptr, wa_ptr, ba_ptr, wb_ptr, bb_ptr, alpha_ptr, rows, height, width, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SHIFT: tl.constexpr, KEEP: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    mask = (row < rows)[:, None] & inside[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    alpha = tl.load(alpha_ptr).to(tl.float32)
    if SHIFT:
        local = tl.arange(0, ROWS)
        a = gather(a_ptr, tl.program_id(0) * ROWS, local, row < rows, height, width, 0, column, WIDTH, WIDTH, KEEP, V)
    else:
        a = tl.load(a_ptr + place, mask=mask, other=0.0)
    a = a.to(tl.float32)
    mean_a, centred_a, variance_a = _norm(a, mask, WIDTH)
    scale_a = 1 / tl.sqrt(variance_a + eps)
    wa = load_below(wa_ptr, column, mask).to(tl.float32)
    ba = load_below(ba_ptr, column, mask).to(tl.float32)
    p = centred_a * scale_a[:, None] * wa + ba
    b = tl.load(b_ptr + place, mask=mask, other=0.0).to(tl.float32)
    mean_b, centred_b, variance_b = _norm(b, mask, WIDTH)
    scale_b = 1 / tl.sqrt(variance_b + eps)
    wb = load_below(wb_ptr, column, mask).to(tl.float32)
    bb = load_below(bb_ptr, column, mask).to(tl.float32)
    q = centred_b * scale_b[:, None] * wb + bb
    tl.store(out_ptr + place, (p + alpha * p * q).to(out_ptr.dtype.element_ty), mask=mask)
    if not SHIFT:  # which is for inference
        tl.store(stats_ptr + row * 4, mean_a, mask=row < rows)
        tl.store(stats_ptr + row * 4 + 1, scale_a, mask=row < rows)
        tl.store(stats_ptr + row * 4 + 2, mean_b, mask=row < rows)
        tl.store(stats_ptr + row * 4 + 3, scale_b, mask=row < rows)


@triton.jit
def _backward(
    grad_ptr, a_ptr, b_ptr, stats_ptr, wa_ptr, ba_ptr, wb_ptr, bb_ptr, alpha_ptr,
    grad_a_ptr, grad_b_ptr, sums_ptr, grad_alpha_ptr, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    all_rows = tl.broadcast_to(inside[None, :], (ROWS, BLOCK))
    alpha = tl.load(alpha_ptr).to(tl.float32)
    wa = load_below(wa_ptr, column, all_rows).to(tl.float32)
    ba = load_below(ba_ptr, column, all_rows).to(tl.float32)
    wb = load_below(wb_ptr, column, all_rows).to(tl.float32)
    bb = load_below(bb_ptr, column, all_rows).to(tl.float32)
    sum_wa = tl.zeros((BLOCK,), tl.float32)
    sum_ba = tl.zeros((BLOCK,), tl.float32)
    sum_wb = tl.zeros((BLOCK,), tl.float32)
    sum_bb = tl.zeros((BLOCK,), tl.float32)
    sum_alpha = tl.zeros((BLOCK,), tl.float32)
    for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        mean_a = tl.load(stats_ptr + row * 4, mask=row < rows, other=0.0)
        scale_a = tl.load(stats_ptr + row * 4 + 1, mask=row < rows, other=0.0)
        mean_b = tl.load(stats_ptr + row * 4 + 2, mask=row < rows, other=0.0)
        scale_b = tl.load(stats_ptr + row * 4 + 3, mask=row < rows, other=0.0)
        a = tl.load(a_ptr + place, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + place, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
        unit_a = tl.where(mask, (a - mean_a[:, None]) * scale_a[:, None], 0.0)
        unit_b = tl.where(mask, (b - mean_b[:, None]) * scale_b[:, None], 0.0)
        p = unit_a * wa + ba
        q = unit_b * wb + bb
        grad_p = grad * (1 + alpha * q)
        grad_q = grad * alpha * p
        sum_alpha += tl.sum(grad * p * q, 0)
        sum_wa += tl.sum(grad_p * unit_a, 0)
        sum_ba += tl.sum(grad_p, 0)
        sum_wb += tl.sum(grad_q * unit_b, 0)
        sum_bb += tl.sum(grad_q, 0)
        inner = grad_p * wa
        along = tl.sum(inner * unit_a, 1) / WIDTH
        level = tl.sum(inner, 1) / WIDTH
        grad_a = (inner - level[:, None] - unit_a * along[:, None]) * scale_a[:, None]
        tl.store(grad_a_ptr + place, grad_a.to(grad_a_ptr.dtype.element_ty), mask=mask)
        inner = grad_q * wb
        along = tl.sum(inner * unit_b, 1) / WIDTH
        level = tl.sum(inner, 1) / WIDTH
        grad_b = (inner - level[:, None] - unit_b * along[:, None]) * scale_b[:, None]
        tl.store(grad_b_ptr + place, grad_b.to(grad_b_ptr.dtype.element_ty), mask=mask)
    here = sums_ptr + program * 4 * WIDTH + column
    tl.store(here, sum_wa, mask=inside)
    tl.store(here + WIDTH, sum_ba, mask=inside)
    tl.store(here + 2 * WIDTH, sum_wb, mask=inside)
    tl.store(here + 3 * WIDTH, sum_bb, mask=inside)
    tl.store(grad_alpha_ptr + program, tl.sum(tl.where(inside, sum_alpha, 0.0), 0))


def _tile(width: int) -> tuple[int, int, int, int, int, int]:
    """Columns of a tile, then what `TILES` says of them."""
    block = triton.next_power_of_2(width)
    return block, *TILES.get(block, (max(1, 1024 // block), 4, max(1, 1024 // block), 4, 1056))


@torch.library.custom_op("multilinear::normed_product", mutates_args=())
def fused_normed_product(
    a: Tensor, b: Tensor, wa: Tensor, ba: Tensor, wb: Tensor, bb: Tensor, alpha: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The product, and the statistics of each row for the way back."""
    width = a.shape[-1]
    rows = a.numel() // width
    out = torch.empty_like(a)
    stats = torch.empty(rows, 4, device=a.device, dtype=torch.float32)
    block, tile, warps, *_ = _tile(width)
    launch(
        _forward, triton.cdiv(rows, tile), a, b, out, stats, wa, ba, wb, bb, alpha, rows, 1, 1, eps, width, block, tile,
        SHIFT=False, KEEP=True, V=1, num_warps=warps,
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
    block, tile, warps, *_ = _tile(width)
    launch(
        _forward, triton.cdiv(rows, tile), a, b, out, None, wa, ba, wb, bb, alpha, rows, height, across, eps, width,
        block, tile, SHIFT=True, KEEP=keep_border, V=chunk(width // 4, 8), num_warps=warps,
    )  # fmt: skip
    return out


@fused_shifted_product.register_fake
def _(a: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(a)


@torch.library.custom_op("multilinear::normed_product_backward", mutates_args=())
def _fused_backward(
    grad: Tensor, a: Tensor, b: Tensor, stats: Tensor, wa: Tensor, ba: Tensor, wb: Tensor, bb: Tensor, alpha: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = a.shape[-1]
    rows = a.numel() // width
    grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
    block, _, _, tile, warps, programs = _tile(width)
    programs = min(programs, triton.cdiv(rows, tile))
    sums = torch.empty(programs, 4, width, device=a.device, dtype=torch.float32)
    grad_alpha = torch.empty(programs, device=a.device, dtype=torch.float32)
    launch(
        _backward, programs, grad, a, b, stats, wa, ba, wb, bb, alpha, grad_a, grad_b, sums, grad_alpha, rows, width,
        block, tile, num_warps=warps,
    )  # fmt: skip
    return grad_a, grad_b, sums.sum(0), grad_alpha.sum()


@fused_normed_product.register_fake
def _(a: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), a.new_empty(a.numel() // a.shape[-1], 4, dtype=torch.float32)


@_fused_backward.register_fake
def _(grad: Tensor, a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = a.new_empty(4, a.shape[-1], dtype=torch.float32)
    return torch.empty_like(a), torch.empty_like(b), sums, a.new_empty((), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, b, wa, ba, wb, bb, alpha, _ = inputs
    ctx.save_for_backward(a, b, output[1], wa, ba, wb, bb, alpha)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    a, b, stats, *weights = ctx.saved_tensors
    grad_a, grad_b, sums, grad_alpha = _fused_backward(grad.contiguous(), a, b, stats, *weights)
    vectors = [total.to(weight.dtype) for total, weight in zip(sums.unbind(0), weights, strict=False)]
    return grad_a, grad_b, *vectors, grad_alpha.to(weights[-1].dtype).reshape(weights[-1].shape), None


fused_normed_product.register_autograd(_gradients, setup_context=_save)
