"""A Poly-Block with layer norms as one operator: its weights made ready, its kernels launched."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from multilinear.kernels import (
    BLOCK_PARAMETERS,
    block_forward,
    block_small,
    block_weights,
    hopper,
    hopper_plans,
    launch_merged,
)
from multilinear.kernels.block_sizes import (
    Prepared,
    Roots,
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


def merges(weights: Sequence[Tensor]) -> bool:
    """Whether a block with these weights takes the second branch's matrices as one."""
    return hopper_plans.on_gpu(weights[0]) and hopper_plans.plan_merged(sizes_of(weights)) is not None


def _new(weights: Sequence[Tensor], dtype: torch.dtype, merged: bool) -> Prepared:
    """Memory for the fields."""
    s, new = sizes_of(weights), weights[0].new_empty
    wide = s.channels
    if merged:
        last, low = [(2 * s.rank2, wide + 16), (0,), (wide, s.rank2), (4 * wide, wide), (0,)], wide
    else:
        last, low = [(s.rank2, wide + 16), (s.rank2, s.low2 + 16), (wide, s.rank2),
                     (s.rank2 + wide + 8 + s.low2, wide), (s.rank2 + s.low2 + 8, s.low2)], s.low2  # fmt: skip
    shapes = [(s.rank1 + s.low1, wide), (s.rank1, s.low1), (wide, s.rank1), *last]
    floats = [(offsets(s).end,), (s.rank2, wide + 1), (s.rank2, low + 1)]
    return Prepared(
        *(new(shape, dtype=dtype) for shape in shapes), *(new(shape, dtype=torch.float32) for shape in floats)
    )


def _merged_factors(named: dict[str, Tensor], s: Sizes) -> dict[str, Tensor]:
    """The parameters with both matrices of the second branch, and their biases, in the place of its last. These and the
    first branch's bias have taken up the norm ahead of them."""
    A, a, B, b, D, d = (named[f"mu2.{part}.{name}"] for part in "ABD" for name in ("weight", "bias"))
    shapes = (s.rank2, s.channels), (s.rank2,), (s.rank2,), (s.low2,)
    matrix, bias, first, low = (B.new_empty(shape, dtype=torch.float32) for shape in shapes)
    kernel, rows = block_weights.shift_biases, 16
    launch(
        kernel, triton.cdiv(s.rank2, rows) + triton.cdiv(s.low2, rows),
        A, a, D, d, named["norm1.bias"], first, low, **constants(s, kernel.arg_names), ROWS=rows,
        BLOCK=triton.next_power_of_2(s.channels), num_warps=4,
    )  # fmt: skip
    kernel, tall, wide = block_weights.merge_factors, 64, 32
    launch(
        kernel, triton.cdiv(s.rank2, tall) * triton.cdiv(s.channels + 1, wide),
        B, b, D, low, named["norm1.weight"], matrix, bias, **constants(s, kernel.arg_names), ROWS=tall, COLUMNS=wide,
        DEPTH=64, num_warps=4,
    )  # fmt: skip
    return named | {"mu2.B.weight": matrix, "mu2.B.bias": bias, "mu2.A.bias": first}


def prepare_now(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The fields of `Prepared` from the parameters `BLOCK_PARAMETERS`, with merged branches where a GPU gains by it."""
    merged = merges(weights)
    s, ready = sizes_of(weights), _new(weights, dtype, merged)
    named = {name: weight.contiguous() for name, weight in zip(BLOCK_PARAMETERS, weights, strict=True)}
    columns, size, tile = 16, 4096, 32
    wide, low = s.channels, s.channels if merged else s.low2
    if merged:
        named = _merged_factors(named, s)
    fields = ready._replace(B2=ready.A2) if merged else ready
    kernel = block_weights.pack
    matrices = [wide * rank for rank in (s.rank1, s.low1, s.rank1, s.rank2, 0 if merged else s.low2)]
    programs = sum(triton.cdiv(width + 1, columns) for width in (wide, low, s.low1))
    programs += sum(triton.cdiv(matrix, size) for matrix in matrices) + 11 - merged  # and as many vectors
    launch(
        kernel, programs,
        *named.values(), *fields, **constants(s, kernel.arg_names), MERGED=merged,
        ROWS=triton.next_power_of_2(s.rank2), COLUMNS=columns, BLOCK=size, num_warps=8,
    )  # fmt: skip
    kernel = block_weights.grams
    programs = sum(triton.cdiv(width + 8, tile) * triton.cdiv(width + 1, tile) for width in (wide, low))
    launch(
        kernel, programs,
        ready.first, ready.second, ready.stack, ready.low_stack, ready.vectors, **constants(s, kernel.arg_names),
        MERGED=merged, ROWS=64, TILE=tile, num_warps=4,
    )  # fmt: skip
    return list(ready)


def roots_of(prepared: Sequence[Tensor]) -> Roots:
    """The fields of `Roots`, from prepared weights with merged branches."""
    ready = Prepared(*prepared)
    factors = [torch.linalg.qr(matrix.double(), mode="r").R for matrix in (ready.first, ready.second)]
    wide = ready.first.shape[1] - 1
    roots = torch.stack([R[:wide].view(-1, 64, wide + 1) for R in factors], 1).view(2 * wide, wide + 1)
    rest = torch.stack([R[wide, wide].square() for R in factors])
    return Roots(roots[:, :wide].to(ready.A2.dtype).contiguous(), torch.cat([roots[:, wide], rest]).float())


prepare = torch.library.custom_op("multilinear::poly_block_prepare", prepare_now, mutates_args=())


@prepare.register_fake
def _(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return list(_new(weights, dtype, merges(weights)))


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
    x: Tensor, u: Tensor, mid: Tensor, norms: Tensor, stats: Tensor, keep: Tensor | None, ready: Prepared, s: Sizes,
    keep_border: bool, eps: float, save: bool,
) -> None:  # fmt: skip
    """u, and the value between the Mu-Layers from it. If images are single tiles, u is left shifted, without `save` not
    at all."""
    height, width = x.shape[-3:-1]
    rows = x.numel() // s.channels
    slots = hopper_plans.plan_image(s, rows, height, width, keep_border) if hopper_plans.on_gpu(x) else None
    if slots is not None:
        hopper.first_layer(x, u, mid, norms, stats, keep, ready, s, slots, offsets(s), eps, save)
        return
    ahead = hopper_plans.plan_lift(s) if hopper_plans.on_gpu(x) else None
    if ahead is not None:
        hopper.lift(x, u, norms, ready, s, ahead, offsets(s).bias, eps, save)
    else:
        tile = tiles(s)["lift"]
        kernel = block_forward.lift
        launch(
            kernel, triton.cdiv(rows, tile.tokens),
            x, u, ready.lifting, ready.vectors, rows, eps, **constants(s, kernel.arg_names),
            T=tile.tokens, J=tile.chunk, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    first = hopper_plans.plan_first(s, rows, height, width, keep_border) if hopper_plans.on_gpu(x) else None
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


def _new_norms(x: Tensor, s: Sizes) -> Tensor:
    """Memory for two numbers of each token, which only kernels for Hopper leave."""
    there = hopper_plans.on_gpu(x) and hopper_plans.plan_lift(s) is not None
    return x.new_empty((2, x.numel() // s.channels) if there else 0, dtype=torch.float32)


def _second_widths(s: Sizes, merged: bool) -> tuple[int, int]:
    """Widths of what the second Mu-Layer leaves for the way back."""
    return s.channels + 16, 2 * s.rank2 if merged else s.low2 + 16


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
    """The block's output, and with `save` what the way back needs: u, the value between the Mu-Layers, statistics of x
    (if a kernel for Hopper has them) and of the first layer, what the second's branches read, and its statistics. If
    its branches are merged, in place of the value between the layers and of what they read, what both read and give."""
    fields = len(Prepared._fields)
    s, ready = sizes_of(weights), Prepared(*prepared[:fields])
    x = aligned(x)
    height, width = x.shape[-3:-1]
    rows = x.numel() // s.channels
    few = block_small.plan_for(*s, rows) if not (save or ready.merged or keep1 is not None) else None
    if few is not None:
        return _few_tokens(x, ready, s, few, keep_border, eps), []
    u = x.new_empty(rows, align(s.rank1 + s.low1))
    out, mid = torch.empty_like(x), torch.empty_like(x)
    stats1, stats2 = (x.new_empty((rows, 3 + more) if save else 0, dtype=torch.float32) for more in (0, ready.merged))
    norms = _new_norms(x, s) if save else x.new_empty(0)
    _first_layer(x, u, mid, norms, stats1, keep1, ready, s, keep_border, eps, save)
    n, d = (x.new_empty((rows, width) if save else 0) for width in _second_widths(s, ready.merged))
    plan = hopper_plans.plan_for(s, save) if hopper_plans.on_gpu(x) else None
    if ready.merged:
        roots = Roots(*prepared[fields:]) if prepared[fields:] else None
        launch_merged.mu2_merged(mid, out, keep2, n, d, stats2, ready, roots, s, offsets(s).forms, eps, save)
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
    return out, [u, mid.new_empty(0) if ready.merged else mid, norms, stats1, n, d, stats2] if save else []


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
    merged = merges(weights)
    stats1, stats2 = (x.new_empty(rows, 3 + more, dtype=torch.float32) for more in (0, merged))
    u, n, d = (x.new_empty(rows, width) for width in (align(s.rank1 + s.low1), *_second_widths(s, merged)))
    mid = x.new_empty(0) if merged else torch.empty_like(x)
    return torch.empty_like(x), [u, mid, _new_norms(x, s), stats1, n, d, stats2]
