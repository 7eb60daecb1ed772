"""A Poly-Block with layer norms as one operator: its weights made ready, its kernels launched."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from multilinear.kernels import BLOCK_PARAMETERS, block_forward, block_small, block_weights, hopper
from multilinear.kernels.block_sizes import (
    Merged,
    Prepared,
    Sizes,
    align,
    aligned,
    chunk,
    constants,
    offsets,
    sizes_of,
    tiles,
)
from multilinear.kernels.launch import launch


def _new(weights: Sequence[Tensor], dtype: torch.dtype) -> Prepared:
    """Memory for the fields."""
    s, new = sizes_of(weights), weights[0].new_empty
    shapes = [(s.rank1 + s.low1, s.channels), (s.rank1, s.low1), (s.channels, s.rank1), (s.rank2, s.channels + 16),
              (s.rank2, s.low2 + 16), (s.channels, s.rank2), (s.rank2 + s.channels + 8 + s.low2, s.channels),
              (s.rank2 + s.low2 + 8, s.low2)]  # fmt: skip
    floats = [(offsets(s).end,), (s.rank2, s.channels + 1), (s.rank2, s.low2 + 1)]
    return Prepared(
        *(new(shape, dtype=dtype) for shape in shapes), *(new(shape, dtype=torch.float32) for shape in floats)
    )


def prepare_now(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The fields of `Prepared` from the parameters `BLOCK_PARAMETERS`."""
    s, ready = sizes_of(weights), _new(weights, dtype)
    columns, size, tile = 16, 4096, 32
    wide, low = s.channels, s.low2
    kernel = block_weights.pack
    matrices = [wide * rank for rank in (s.rank1, s.low1, s.rank1, s.rank2, s.low2)]
    programs = sum(triton.cdiv(width + 1, columns) for width in (wide, low, s.low1))
    programs += sum(triton.cdiv(matrix, size) for matrix in matrices) + 11  # and as many vectors
    launch(
        kernel, programs,
        *(weight.contiguous() for weight in weights), *ready, **constants(s, kernel.arg_names),
        ROWS=min(256, triton.next_power_of_2(s.rank2)), COLUMNS=columns, BLOCK=size, num_warps=8,
    )  # fmt: skip
    kernel = block_weights.grams
    programs = sum(triton.cdiv(width + 8, tile) * triton.cdiv(width + 1, tile) for width in (wide, low))
    launch(
        kernel, programs,
        ready.first, ready.second, ready.stack, ready.low_stack, ready.vectors, **constants(s, kernel.arg_names),
        ROWS=128, TILE=tile, num_warps=4,
    )  # fmt: skip
    return list(ready)


def merge(weights: Sequence[Tensor], dtype: torch.dtype) -> Merged:
    """The fields of `Merged`."""
    named = dict(zip(BLOCK_PARAMETERS, weights, strict=True))
    B, D, b, d = (named[f"mu2.{name}"].double() for name in ("B.weight", "D.weight", "B.bias", "D.bias"))
    wide = D.shape[1]
    named |= {"mu2.B.weight": (B @ D).float(), "mu2.B.bias": (B @ d + b).float()}
    named |= {"mu2.D.weight": torch.eye(wide, device=B.device), "mu2.D.bias": torch.zeros(wide, device=B.device)}
    ready = Prepared(*prepare_now(list(named.values()), dtype))
    first, second = (matrix.view(-1, 64, wide + 16) for matrix in (ready.A2, ready.B2))
    second = torch.cat([second[..., :wide], second.new_zeros(len(second), 64, 5), second[..., wide:-5]], -1)
    factors = [torch.linalg.qr(matrix.double(), mode="r").R for matrix in (ready.first, ready.second)]
    roots = torch.stack([R[:wide].view(-1, 64, wide + 1) for R in factors], 1).view(2 * wide, wide + 1)
    rest = torch.stack([R[wide, wide].square() for R in factors])
    return Merged(
        torch.stack([first, second], 1).view(-1, wide + 16),
        roots[:, :wide].to(dtype).contiguous(),
        torch.cat([roots[:, wide], rest]).float(),
    )


prepare = torch.library.custom_op("multilinear::poly_block_prepare", prepare_now, mutates_args=())


@prepare.register_fake
def _(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return list(_new(weights, dtype))


def _few_tokens(
    x: Tensor, ready: Prepared, s: Sizes, plan: block_small.Plan, keep_border: bool, eps: float
) -> Tensor:  # fmt: skip
    """The output alone, as soon as possible."""
    rows, (height, width) = x.numel() // s.channels, x.shape[-3:-1]
    columns, splits = triton.cdiv(s.rank1 + s.low1, plan.lift.width), s.rank2 // plan.mu2.width
    u, n, d = (x.new_empty(rows, wide) for wide in (align(s.rank1 + s.low1), s.channels + 16, s.low2 + 16))
    both = x.new_empty(rows, dtype=torch.float32)
    count = x.new_empty(triton.cdiv(rows, 16), dtype=torch.int32)
    parts = x.new_empty((splits, rows, s.channels) if splits > 1 else 0, dtype=torch.float32)
    out, mid = torch.empty_like(x), torch.empty_like(x)
    options = {"launch_pdl": True} if x.is_cuda else {}  # a kernel starts ahead of the end of the one before
    kernel, share = block_small.small_lift, plan.lift
    launch(
        kernel, triton.cdiv(rows, share.tokens) * columns,
        x, u, ready.lifting, ready.vectors, rows, eps, **constants(s, kernel.arg_names),
        T=share.tokens, J=share.width, SPLITS=columns, CUDA=x.is_cuda, num_warps=share.warps, **options,
    )  # fmt: skip
    kernel, share = block_small.small_mu1, plan.mu1
    launch(
        kernel, triton.cdiv(rows, share.tokens),
        x, u, mid, n, d, both, count, ready.B1, ready.C1, ready.D2, ready.gram, ready.low_gram, ready.vectors,
        rows, height, width, eps, **constants(s, kernel.arg_names),
        KEEP=keep_border, T=share.tokens, CUDA=x.is_cuda, num_warps=share.warps, **options,
    )  # fmt: skip
    kernel, share = block_small.small_mu2, plan.mu2
    hidden = chunk(share.width)
    launch(
        kernel, triton.cdiv(rows, share.tokens) * splits,
        mid, out, n, d, both, count, parts, ready.A2, ready.B2, ready.C2, ready.vectors, rows,
        **constants(s, kernel.arg_names), T=share.tokens, J=hidden, CHUNKS=share.width // hidden, SPLITS=splits,
        CUDA=x.is_cuda, num_warps=share.warps, **options,
    )  # fmt: skip
    return out


def _first_layer(
    x: Tensor, u: Tensor, mid: Tensor, stats: Tensor, keep: Tensor | None, ready: Prepared, s: Sizes,
    keep_border: bool, eps: float, save: bool,
) -> None:  # fmt: skip
    """u, and the value between the Mu-Layers from it."""
    height, width = x.shape[-3:-1]
    rows = len(u)
    ahead = hopper.plan_lift(s) if x.is_cuda else None
    if ahead is not None:
        hopper.lift(x, u, ready, s, ahead, offsets(s).bias, eps)
    else:
        tile = tiles(s)["lift"]
        kernel = block_forward.lift
        launch(
            kernel, triton.cdiv(rows, tile.tokens),
            x, u, ready.lifting, ready.vectors, rows, eps, **constants(s, kernel.arg_names),
            T=tile.tokens, J=tile.chunk, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    first = hopper.plan_first(s, rows, height, width, keep_border) if x.is_cuda else None
    if first is not None:
        hopper.mu1(x, u, mid, stats, keep, ready, s, first, offsets(s).mu1, eps, save)
    else:
        tile = tiles(s)["mu1"]
        kernel = block_forward.mu1
        launch(
            kernel, triton.cdiv(rows, tile.tokens),
            x, u, mid, stats, keep, ready.B1, ready.C1, ready.vectors, rows, height, width, eps,
            **constants(s, kernel.arg_names), KEEP=keep_border, TRAIN=save, DROP=keep is not None,
            T=tile.tokens, J=chunk(s.rank1, tile.chunk), STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip


def poly_block_now(
    x: Tensor,
    keep1: Tensor | None,
    keep2: Tensor | None,
    weights: Sequence[Tensor],
    prepared: Sequence[Tensor],
    keep_border: bool,
    eps: float,
    save: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The block's output, and with `save` what the way back needs: u, the value between the Mu-Layers, the first one's
    statistics, what the second's branches read, and its statistics."""
    fields = len(Prepared._fields)
    s, ready = sizes_of(weights), Prepared(*prepared[:fields])
    x = aligned(x)
    height, width = x.shape[-3:-1]
    rows = x.numel() // s.channels
    few = block_small.plan_for(*s, rows) if not save and keep1 is None else None
    if few is not None:
        return _few_tokens(x, ready, s, few, keep_border, eps), []
    u = x.new_empty(rows, align(s.rank1 + s.low1))
    out, mid = torch.empty_like(x), torch.empty_like(x)
    stats1, stats2 = (x.new_empty((rows, 3) if save else 0, dtype=torch.float32) for _ in range(2))
    _first_layer(x, u, mid, stats1, keep1, ready, s, keep_border, eps, save)
    n, d = (x.new_empty((rows, wide + 16) if save else 0) for wide in (s.channels, s.low2))
    plan = hopper.plan_for(s, save) if x.is_cuda else None
    merged = hopper.plan_merged(s) if prepared[fields:] and not save and keep2 is None else None
    if merged is not None:
        hopper.mu2_merged(mid, out, ready, Merged(*prepared[fields:]), merged, eps)
    elif plan is not None:
        hopper.mu2(mid, out, keep2, n, d, stats2, ready, s, plan, offsets(s).forms, eps, save)
    else:
        tile = tiles(s)["mu2"]
        kernel = block_forward.mu2
        launch(
            kernel, triton.cdiv(rows, tile.tokens),
            mid, out, keep2, n, d, stats2, ready.A2, ready.D2, ready.B2, ready.C2, ready.gram, ready.low_gram,
            ready.vectors, rows, height * width, eps, **constants(s, kernel.arg_names), DROP=keep2 is not None,
            TRAIN=save, T=tile.tokens, J=chunk(s.rank2, tile.chunk), JC=chunk(s.channels), STAGES=tile.stages,
            num_warps=tile.warps,
        )  # fmt: skip
    return out, [u, mid, stats1, n, d, stats2] if save else []


# An operator that compilers see whole. It costs half a millisecond a call, which code that runs at once does without.
poly_block = torch.library.custom_op("multilinear::poly_block", poly_block_now, mutates_args=())


@poly_block.register_fake
def _(
    x: Tensor, keep1: Any, keep2: Any, weights: Sequence[Tensor], prepared: Any, keep_border: Any, eps: Any, save: bool
) -> tuple[Tensor, list[Tensor]]:
    s = sizes_of(weights)
    rows = x.numel() // s.channels
    if not save:
        return torch.empty_like(x), []
    stats1, stats2 = (x.new_empty(rows, 3, dtype=torch.float32) for _ in range(2))
    u, n, d = (x.new_empty(rows, wide) for wide in (align(s.rank1 + s.low1), s.channels + 16, s.low2 + 16))
    return torch.empty_like(x), [u, torch.empty_like(x), stats1, n, d, stats2]
