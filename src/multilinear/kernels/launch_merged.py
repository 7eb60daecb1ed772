"""Launches the kernels of the second Mu-Layer that take both matrices of its second branch as one."""

import triton
from torch import Tensor

from multilinear.kernels import block_sums
from multilinear.kernels.block_sizes import Prepared, Roots, Sizes, constants
from multilinear.kernels.hopper import processors, tiled
from multilinear.kernels.hopper_plans import MERGED, REGISTERS
from multilinear.kernels.launch import launch


def mu2_merged(
    x: Tensor, out: Tensor, keep: Tensor | None, n: Tensor, branches: Tensor, stats: Tensor, ready: Prepared,
    roots: Roots | None, s: Sizes, forms: int, eps: float, save: bool,
) -> None:  # fmt: skip
    """What `hopper.mu2` does, with merged branches; `save` for training, and roots for inference if there are any."""
    from multilinear.kernels import hopper_merged

    plan = MERGED[s.channels, s.low2]
    rows, tokens = x.numel() // s.channels, x.shape[-3] * x.shape[-2]
    groups = triton.cdiv(rows, 64 * 2)
    registers, limit = REGISTERS[2]
    form, linear = roots or (ready.stack[2 * s.channels :], ready.vectors[forms:])
    launch(
        hopper_merged.mu2_merged, min(groups, processors(x.device)),
        tiled(x.view(rows, -1), 64, 64), tiled(out.view(rows, -1), 64, 64), tiled(n if save else ready.C2, 64, 64),
        tiled(ready.A2, 128, 64), tiled(ready.A2, 128, 16), tiled(ready.C2, 64, 64), tiled(form, 128, 64),
        keep, n, branches, stats, ready.vectors, linear, groups, rows, tokens, eps, C=s.channels, R2=s.rank2, GROUPS=2,
        SLOTS=plan.slots, SLOTS_C=plan.slots_c, ROOTS=roots is not None, TRAIN=save, DROP=keep is not None,
        REGISTERS=registers, num_warps=4, maxnreg=limit,
    )  # fmt: skip


def mu2_merged_back(
    grad: Tensor, n: Tensor, branches: Tensor, stats: Tensor, keep: Tensor | None, inner: Tensor, taken: Tensor,
    out: Tensor, ready: Prepared, s: Sizes, forms: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The way back through that: the gradient of the product of both branches, the numbers that multiply n in what
    their norms take, and the gradient of the input. Parts of the sums of those numbers, and of those for the gradient
    of the layer's last bias."""
    from multilinear.kernels import hopper_merged_back

    plan = MERGED[s.channels, s.low2]
    rows = len(n)
    groups = triton.cdiv(rows, 64 * 2)
    programs = min(groups, processors(n.device))
    registers, limit = REGISTERS[2]
    ends, sums = stats.new_empty(2 * programs, 2), stats.new_empty(2 * programs, s.channels)
    launch(
        hopper_merged_back.mu2_merged_back, programs,
        tiled(grad.view(rows, -1), 64, 64), tiled(n, 64, 64), tiled(branches, 64, 32),
        *(tiled(part.view(rows, -1), 64, 32) for part in (grad, out)),
        tiled(ready.A2, 64, 64), tiled(ready.A2, 64, 16), tiled(ready.C2, 64, 32), tiled(ready.stack, 64, 64),
        inner, stats, taken, ends, sums, ready.vectors[forms:], groups, rows, taken.shape[1], C=s.channels, R2=s.rank2,
        GROUPS=2, SLOTS=plan.back_slots, SLOTS_C=plan.back_slots_c, STAGES=plan.stages, DROP=keep is not None,
        REGISTERS=registers, num_warps=4, maxnreg=limit,
    )  # fmt: skip
    return ends, sums


def second_lines(
    grad: Tensor, n: Tensor, branches: Tensor, inner: Tensor, taken: Tensor, s: Sizes
) -> tuple[Tensor, Tensor]:
    """Lines that add up to products over all tokens: of both branches' gradients with n and its extras, and of `grad`
    with the product of the branches; and such of n, multiplied with the numbers taken, with n and its extras. Of these
    numbers there are a multiple of 32, with zeros at the end."""
    from multilinear.kernels import hopper_second_products

    plan, rows, channels, rank = MERGED[s.channels, s.low2], len(n), s.channels, s.rank2
    blocks, programs = triton.cdiv(rows, 32), processors(n.device)
    norms = min(blocks, max(1, programs // plan.share))
    splits = min(blocks, max(1, (programs - 2 * norms) // (rank // 64)))
    hidden = taken.new_empty(splits, 2 * rank * (channels + 16) + channels * rank)
    own = taken.new_empty(norms, 2 * channels * (channels + 16))
    registers, limit = REGISTERS[3]
    launch(
        hopper_second_products.second_products, rank // 64 * splits + 2 * norms,
        tiled(branches, 32, 64), tiled(inner, 32, 64), tiled(n, 32, 64), tiled(n, 32, 16),
        tiled(grad.view(rows, -1), 32, 64), tiled(taken.view(n.dtype).view(-1, 64), 32, 64), hidden, own, blocks,
        splits, taken.shape[1] // 32, C=channels, R2=rank,
        STAGES=plan.product_stages, REGISTERS=registers, num_warps=4, maxnreg=limit,
    )  # fmt: skip
    return hidden, own


def second_products(
    grad: Tensor, n: Tensor, branches: Tensor, inner: Tensor, taken: Tensor, weight: Tensor, s: Sizes
) -> Tensor:
    """Products over all tokens: those of merged branches with n, and behind them of n with itself; that with `grad` is
    the gradient of a weight."""
    hidden, own = second_lines(grad, n, branches, inner, taken, s)
    product = hidden.new_empty(2 * (s.rank2 + s.channels), s.channels + 16)
    kernel, columns = block_sums.second_sums, 256
    launch(
        kernel, sum(triton.cdiv(part, columns) for part in (hidden.shape[1], own.shape[1])) + 1,
        hidden, len(hidden), own, len(own), product, weight, **constants(s, kernel.arg_names), ROWS=16,
        COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return product
