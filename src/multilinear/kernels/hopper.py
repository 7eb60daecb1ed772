"""Launches the kernels that are made for Hopper, where Triton can build them."""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from multilinear.kernels.block_sizes import Offsets, Prepared, Sizes
from multilinear.kernels.hopper_plans import PRODUCTS, REGISTERS, First, Plan, Return, Through
from multilinear.kernels.launch import launch


def pieces(low: int, chunk: int) -> tuple[int, int]:
    """Whole chunks, and the width of the rest, that hold the low rank and the five columns next to it."""
    whole, rest = divmod(low + 5, chunk)
    if rest > 32 or (rest > 16 and chunk == 32):
        return whole + 1, 0
    return whole, 0 if rest == 0 else 16 if rest <= 16 else 32


@lru_cache
def processors(device: torch.device) -> int:
    """How many programs run at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def reciprocal(divisor: int) -> int:
    """What a number is multiplied with, and then divided by 2^32, in place of a division: exact if the number times the
    divisor is less than that. It has 31 bits from 3 on.

    >>> 783 * reciprocal(28) >> 32
    27
    """
    return -(-(2**32) // divisor)


@lru_cache
def _layout(width: int) -> Any:
    from triton.experimental.gluon import language

    return language.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=2)


def tiled(matrix: Tensor, height: int, width: int) -> Any:
    """A matrix of which tiles are copied."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(matrix, [*matrix.shape], [*matrix.stride()], [height, width], _layout(width))


def lift(
    x: Tensor, u: Tensor, norms: Tensor, ready: Prepared, s: Sizes, plan: First, bias: int, eps: float, save: bool
) -> None:
    """What `block_forward.lift` does; with `save` also the mean of each row of x and what makes its variance 1."""
    from multilinear.kernels import hopper_lift

    rows, low = len(u), max(16, triton.next_power_of_2(s.low1))
    groups = triton.cdiv(rows, 64 * plan.groups)
    launch(
        hopper_lift.lift, min(groups, plan.programs * processors(x.device)),
        tiled(x.view(rows, -1), 64, 64), tiled(u, 64, 64), tiled(u, 64, low), tiled(ready.lifting, 64, 64),
        tiled(ready.lifting, low, 64), norms, ready.vectors, groups, rows, eps, C=s.channels, L1=s.low1, LOW=low,
        BIAS=bias, GROUPS=plan.groups, TILES=plan.tiles, TRAIN=save, REGISTERS=plan.registers, num_warps=4,
        maxnreg=plan.registers,
    )  # fmt: skip


def mu1(
    x: Tensor, u: Tensor, out: Tensor, stats: Tensor, keep: Tensor | None, ready: Prepared, s: Sizes,
    plan: First, start: int, eps: float, save: bool,
) -> None:  # fmt: skip
    """What `block_forward.mu1` does."""
    from multilinear.kernels import hopper_mu1

    height, width = x.shape[-3:-1]
    rows = len(u)
    groups = triton.cdiv(rows, 64 * plan.groups)
    launch(
        hopper_mu1.mu1, min(groups, plan.programs * processors(x.device)),
        tiled(x.view(rows, -1), 64, 64), tiled(out.view(rows, -1), 64, 64), tiled(ready.B1, 64, 16),
        tiled(ready.C1, 64, 64), u, stats, keep, ready.vectors, groups, rows, height * width, height, width,
        reciprocal(height), reciprocal(width), eps, C=s.channels, L1=s.low1, LOWS=triton.cdiv(s.low1, 16),
        STRIDE=u.stride(0), MU1=start, GROUPS=plan.groups, TILES=plan.tiles, TRAIN=save, DROP=keep is not None,
        REGISTERS=plan.registers, num_warps=4, maxnreg=plan.registers,
    )  # fmt: skip


def first_layer(
    x: Tensor, u: Tensor, out: Tensor, norms: Tensor, stats: Tensor, keep: Tensor | None, ready: Prepared, s: Sizes,
    slots: int, place: Offsets, eps: float, save: bool,
) -> None:  # fmt: skip
    """What `lift` and `mu1` do, for images that are one tile; with `save` u is left shifted."""
    from multilinear.kernels import hopper_image

    rows = x.numel() // s.channels
    groups = triton.cdiv(rows, 128)
    limit = REGISTERS[2][1]
    launch(
        hopper_image.first_layer, min(groups, processors(x.device)),
        *(tiled(part.view(rows, -1), 128, 64) for part in (x, out, u if save else x)), tiled(ready.lifting, 64, 64),
        tiled(ready.C1, 64, 64), tiled(ready.B1, 64, 16), norms, stats, keep, ready.vectors, groups, rows, eps,
        C=s.channels, L1=s.low1, BIAS=place.bias, MU1=place.mu1, SLOTS=slots, TRAIN=save, DROP=keep is not None,
        num_warps=8, maxnreg=limit,
    )  # fmt: skip


def mu1_back(
    grad: Tensor, u: Tensor, norms: Tensor, stats: Tensor, keep: Tensor | None, E: Tensor, h: Tensor, db: Tensor,
    d: Tensor, ready: Prepared, s: Sizes, plan: First, start: int, image: bool,
) -> Tensor:  # fmt: skip
    """What `block_backward.mu1_back` does: parts of the sums for the gradients of the norms' parameters. For an `image`
    that is a tile u is as `first_layer` leaves it, and E what `lift_back` would make of it."""
    from multilinear.kernels import hopper_mu1_back

    height, width = grad.shape[-3:-1]
    j, rows = plan.chunk, len(u)
    groups = triton.cdiv(rows, 64 * plan.groups)
    programs = min(groups, plan.programs * processors(u.device))
    sums = stats.new_empty(programs * plan.groups, 4, s.channels)
    launch(
        hopper_mu1_back.mu1_back, programs,
        tiled(grad.view(rows, -1), 64, 64), tiled(h, 64, j), tiled(E, 64, j), tiled(db, 64, j), tiled(E, 64, 16),
        tiled(d, 64, 16), tiled(ready.B1, j, 16), tiled(ready.C1, 64, j), tiled(u, 64, j), tiled(u, 64, 16), u,
        norms, stats, keep, ready.vectors, sums, groups, rows, height * width, height, width, reciprocal(height),
        reciprocal(width), C=s.channels, L1=s.low1, LOWS=triton.cdiv(s.low1, 16), STRIDE=u.stride(0), MU1=start, J=j,
        GROUPS=plan.groups, TILES=plan.tiles, DROP=keep is not None, IMAGE=image, REGISTERS=plan.registers,
        num_warps=4, maxnreg=plan.registers,
    )  # fmt: skip
    return sums


def mu2(
    x: Tensor, out: Tensor, keep: Tensor | None, n: Tensor, d: Tensor, stats: Tensor, ready: Prepared, s: Sizes,
    plan: Plan, forms: int, eps: float, save: bool,
) -> None:  # fmt: skip
    """What `block_forward.mu2` does."""
    from multilinear.kernels import hopper_mu2

    j = plan.chunk
    whole, tail = pieces(s.low2, j)
    rows, tokens = x.numel() // s.channels, x.shape[-3] * x.shape[-2]
    groups = triton.cdiv(rows, 64 * plan.groups)
    registers, limit = REGISTERS[plan.groups]
    launch(
        hopper_mu2.mu2, min(groups, processors(x.device)),
        tiled(x.view(rows, -1), 64, 64), tiled(out.view(rows, -1), 64, 64), tiled(n if save else ready.A2, 64, 64),
        tiled(ready.A2, j, 64), tiled(ready.A2, j, 16), tiled(ready.B2, j, j), tiled(ready.B2, j, tail or 16),
        tiled(ready.C2, 64, j), tiled(ready.gram, j, 64), tiled(ready.D2, j, 64), tiled(ready.low_gram, j, j),
        tiled(ready.low_gram, j, tail or 16), keep, n, d, stats, ready.vectors, groups, rows, tokens, eps,
        C=s.channels, R2=s.rank2, L2=s.low2, P2=whole, TAIL=tail, J=j, GROUPS=plan.groups, SLOTS=plan.slots,
        SLOTS_C=plan.slots_c, STAGED=plan.staged, STAGED_LOW=plan.staged_low, SPARE=plan.spare,
        FORMS=forms, TRAIN=save, DROP=keep is not None, REGISTERS=registers, num_warps=4, maxnreg=limit,
    )  # fmt: skip


def mu2_back(
    grad: Tensor, x: Tensor, n: Tensor, d: Tensor, stats: Tensor, keep: Tensor | None, h: Tensor, P: Tensor, Q: Tensor,
    ready: Prepared, s: Sizes, plan: Plan, forms: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `block_backward.mu2_back` and the product for d after it do. If the plan goes on, also what that for n and
    `block_backward.norm_back` do: the gradient of x, and parts of the sums for those of the norm's weight and bias and
    of the layer's last bias."""
    from multilinear.kernels import hopper_back

    j, rows, tokens = plan.chunk, len(n), x.shape[-3] * x.shape[-2]
    whole, tail = pieces(s.low2, j)
    narrow = tail or 16
    groups = triton.cdiv(rows, 64 * plan.groups)
    programs = min(groups, processors(n.device))
    registers, limit = REGISTERS[plan.groups]
    out = torch.empty_like(x)
    sums = x.new_empty(programs * plan.groups, 3, s.channels, dtype=torch.float32)
    launch(
        hopper_back.mu2_back, programs,
        tiled(grad.view(rows, -1), 64, 64), tiled(n, 64, 64), tiled(n, 64, 16), tiled(d, 64, j),
        tiled(d, 64, narrow), tiled(x.view(rows, -1), 64, 64), tiled(out.view(rows, -1), 64, 64), tiled(h, 64, j),
        tiled(P, 64, j), tiled(Q, 64, j), tiled(P, 64, 64), tiled(ready.A2, j, 64), tiled(ready.A2, j, 16),
        tiled(ready.B2, j, j), tiled(ready.B2, j, narrow), tiled(ready.C2, 64, j), tiled(ready.low_gram, j, j),
        tiled(ready.low_gram, j, narrow), tiled(ready.D2, j, 64), tiled(ready.gram, j, 64),
        stats, P, Q, ready.vectors, keep, sums, groups, rows, tokens, eps,
        C=s.channels, R2=s.rank2, L2=s.low2, P2=whole, TAIL=tail, J=j, GROUPS=plan.groups, SLOTS=plan.slots,
        SLOTS_C=plan.slots_c, FORMS=forms, SP=P.stride(0), SQ=Q.stride(0), DROP=keep is not None,
        WHOLE=plan.whole, REGISTERS=registers, num_warps=4, maxnreg=limit,
    )  # fmt: skip
    return out, sums


def norm_back(
    P: Tensor, x: Tensor, grad: Tensor, keep: Tensor | None, ready: Prepared, s: Sizes, plan: Through, eps: float
) -> tuple[Tensor, Tensor]:
    """What the product `P @ ready.stack` and `block_backward.norm_back` after it do."""
    from multilinear.kernels import hopper_norm_back

    rows, tokens = len(P), x.shape[-3] * x.shape[-2]
    groups = triton.cdiv(rows, 64 * plan.groups)
    programs = min(groups, processors(x.device))
    registers, limit = REGISTERS[plan.groups]
    out = torch.empty_like(x)
    sums = x.new_empty(programs * plan.groups, 3, s.channels, dtype=torch.float32)
    launch(
        hopper_norm_back.norm_back, programs,
        tiled(P, 64, 64), tiled(x.view(rows, -1), 64, 64), tiled(grad.view(rows, -1), 64, 64),
        tiled(out.view(rows, -1), 64, 64), tiled(ready.stack, plan.rows, 128), tiled(ready.stack, plan.rows, 64),
        keep, ready.vectors, sums, groups, rows, tokens, eps, C=s.channels, SP=P.shape[1], J=plan.rows,
        GROUPS=plan.groups, TILES=plan.tiles, SLOTS=plan.slots, DROP=keep is not None, REGISTERS=registers,
        num_warps=4, maxnreg=limit,
    )  # fmt: skip
    return out, sums


def lift_back(
    E: Tensor, x: Tensor, grad: Tensor, keep: Tensor | None, norms: Tensor, ready: Prepared, s: Sizes, plan: Return
) -> tuple[Tensor, Tensor, Tensor]:
    """What `block_backward.lift_back` does, up to the norm's output: the gradients of x and of u, of this each row
    divided by the deviation of x; and parts of sums: of the gradient of the output, and of those rows times the mean of
    x and times its deviation."""
    from multilinear.kernels import hopper_lift_back

    height, width = x.shape[-3:-1]
    rows = len(E)
    programs = min(triton.cdiv(rows, 64 * plan.groups), processors(x.device))
    out, du = torch.empty_like(x), torch.empty_like(E)
    sums = x.new_empty(programs * plan.groups, s.channels + 2 * E.stride(0), dtype=torch.float32)
    launch(
        hopper_lift_back.lift_back, programs,
        tiled(x.view(rows, -1), 64, 64), tiled(grad.view(rows, -1), 64, 64), tiled(out.view(rows, -1), 64, 64),
        tiled(du, 64, 64), tiled(ready.lifting, 64, 64), tiled(ready.lifting, 16, 64), E.view(torch.int32), keep,
        norms, ready.vectors, sums, rows, height, width, reciprocal(height), reciprocal(width), C=s.channels,
        L1=s.low1, STRIDE=E.stride(0), GROUPS=plan.groups, TILES=plan.tiles, STAGES=plan.spare, DROP=keep is not None,
        REGISTERS=plan.registers, num_warps=4, maxnreg=plan.registers,
    )  # fmt: skip
    return out, du, sums


def image_back(
    du: Tensor, x: Tensor, grad: Tensor, keep: Tensor | None, norms: Tensor, ready: Prepared, s: Sizes, plan: Return
) -> tuple[Tensor, Tensor]:
    """What is left of `lift_back` for images that are a tile, whose du is there: the gradient of x, and the sums."""
    from multilinear.kernels import hopper_image_back

    rows = len(du)
    programs = min(triton.cdiv(rows, 64 * plan.groups), processors(x.device))
    out = torch.empty_like(x)
    sums = x.new_empty(programs * plan.groups, s.channels + 2 * du.stride(0), dtype=torch.float32)
    launch(
        hopper_image_back.image_back, programs,
        *(tiled(part.view(rows, -1), 64, 64) for part in (x, grad, out, du)), tiled(ready.lifting, 64, 64),
        tiled(ready.lifting, 16, 64), keep, norms, ready.vectors, sums, rows, C=s.channels, L1=s.low1,
        STRIDE=du.stride(0), GROUPS=plan.groups, DROP=keep is not None, REGISTERS=plan.registers, num_warps=4,
        maxnreg=plan.registers,
    )  # fmt: skip
    return out, sums


@lru_cache
def _share(blocks: int, programs: int, first: int, rest: int) -> int:
    """How many programs take a job of that size, and the others the rest, so that all end at about the same time."""
    return min(
        range(1, programs), key=lambda k: max(-(-blocks // k) * first, -(-blocks // (programs - k)) * rest)
    )  # fmt: skip


def first_products(
    du: Tensor, x: Tensor, grad: Tensor, h: Tensor, db: Tensor, d: Tensor, s: Sizes
) -> tuple[Tensor, Tensor]:
    """Lines that add up to `du' x`, and such that add up to `grad' h` and behind it `db' d`."""
    from multilinear.kernels import hopper_products

    rows, channels, lifted, low = len(du), s.channels, du.shape[1], d.shape[1]
    tokens, stages = PRODUCTS[channels]
    blocks, programs, groups = triton.cdiv(rows, tokens), processors(x.device), channels // 64
    split = _share(blocks, programs, lifted + channels, 3 * channels + low)
    first = x.new_empty(split, lifted, channels, dtype=torch.float32)
    rest = x.new_empty(programs - split, channels * (channels + low), dtype=torch.float32)
    registers, limit = REGISTERS[groups]
    launch(
        hopper_products.first_products, programs,
        *(tiled(matrix.view(rows, -1), tokens, 64) for matrix in (du, x, grad, h, db, d)), first, rest, blocks,
        split, C=channels, US=lifted, SD1=low, TOKENS=tokens, STAGES=stages, REGISTERS=registers, num_warps=4,
        maxnreg=limit,
    )  # fmt: skip
    return first, rest
