"""The way back through a Poly-Block: its kernels launched, and the gradients of all parameters put together."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from multilinear.kernels import BLOCK_PARAMETERS, block_backward
from multilinear.kernels.block import (
    Prepared,
    Sizes,
    chunk,
    constants,
    offsets,
    poly_block,
    poly_block_now,
    sizes_of,
    steps,
    tiles,
)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left' right` in float32."""
    if left.is_cuda:
        return torch.mm(left.T, right, out_dtype=torch.float32)
    return left.T.float() @ right.float()


Gradients = dict[str, Tensor]


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _beside(work: Callable[[], Gradients], device: torch.device) -> Callable[[], Gradients]:
    """Start the small products that end in gradients of parameters beside what follows; the result waits for them."""
    if device.type != "cuda":
        return work
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        found = work()

    def join() -> Gradients:
        main.wait_stream(side)
        for tensor in found.values():
            tensor.record_stream(main)
        return found

    return join


def _second_layer(
    grad: Tensor, mid: Tensor, n: Tensor, d: Tensor, stats: Tensor, keep: Tensor | None, named: dict[str, Tensor],
    ready: Prepared, s: Sizes, eps: float,
) -> tuple[Tensor, Callable[[], Gradients]]:  # fmt: skip
    """The gradients of the value between the Mu-Layers and of everything in the second."""
    rows, rank, channels, low = mid.numel() // s.channels, s.rank2, s.channels, s.low2
    tile = tiles(s)["mu2_back"]
    kernel = block_backward.mu2_back
    fixed = constants(s, kernel.arg_names)
    h, P, Q = (mid.new_empty(rows, width) for width in (rank, fixed["SP"], fixed["SQ"]))
    kernel[(triton.cdiv(rows, tile.tokens),)](
        grad, n, d, stats, ready.A2, ready.B2, ready.C2, h, P, Q, rows, **fixed,
        T=tile.tokens, J=chunk(rank, tile.chunk), STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    # P = [gradient | k n | k, 0... | gradient of d] meets [A; A'A; A'a; 0...; D], and Q the same of B
    linear, low_linear = _linear_terms(ready, s)
    gap = ready.gram.new_zeros(7, channels)
    torch.mm(Q, torch.cat([ready.B2[:, :low], ready.low_gram, low_linear, gap[:, :low]]), out=P[:, -low:])
    dn = P @ torch.cat([ready.A2[:, :channels], ready.gram, linear, gap, ready.D2])
    out, totals = _through_shared_norm(dn, mid, grad, keep, ready, s, eps)

    def parameters() -> Gradients:
        product, low_product = _product(P, n), _product(Q, d)
        alpha, weight_b, bias_b = (named[f"mu2.{name}"] for name in ("alpha", "norm_b.weight", "norm_b.bias"))
        first = _through_norm(ready.first, product, named["mu2.norm_a.weight"])
        second = _through_norm(ready.second, low_product, alpha * weight_b)
        scale_b = (ready.second * low_product[:rank, : low + 1]).sum(1)
        shift_b = low_product[:rank, low + 2 : low + 4].sum(1)
        low_rank = product[-low:]
        return {
            "mu2.A.weight": first[:, :-1], "mu2.A.bias": first[:, -1],
            "mu2.D.weight": low_rank[:, :channels], "mu2.D.bias": low_rank[:, channels],
            "mu2.B.weight": second[:, :-1], "mu2.B.bias": second[:, -1],
            "mu2.C.weight": _product(grad.view(rows, channels), h),
            "mu2.norm_a.weight": (ready.first * product[:rank, : channels + 1]).sum(1),
            "mu2.norm_a.bias": product[:rank, channels + 2 : channels + 4].sum(1),
            "mu2.norm_b.weight": alpha * scale_b, "mu2.norm_b.bias": alpha * shift_b,
            "mu2.alpha": (weight_b * scale_b + bias_b * shift_b).sum(),
            "norm1.weight": totals[0], "norm1.bias": totals[1], "mu2.C.bias": totals[2],
        }  # fmt: skip

    return out, _beside(parameters, mid.device)


def _linear_terms(ready: Prepared, s: Sizes) -> tuple[Tensor, Tensor]:
    """A'a and B'b as rows: half the linear terms of the quadratic forms."""
    forms = ready.vectors[offsets(s).forms :]
    start = s.channels + s.low2
    rows = forms[: s.channels], forms[start : start + s.low2]
    first, second = ((row[None] / 2).to(ready.gram.dtype) for row in rows)
    return first, second


def _through_shared_norm(
    dn: Tensor, x: Tensor, grad: Tensor, keep: Tensor | None, ready: Prepared, s: Sizes, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and those of the norm's weight and bias and of the layer's last bias."""
    rows = x.numel() // s.channels
    block = triton.next_power_of_2(s.channels)
    tile = max(1, 512 // block)  # one warp with 16 numbers a thread; measured on an H200
    programs = min(2112, triton.cdiv(rows, tile))
    out = torch.empty_like(x)
    sums = x.new_empty(programs, 3, s.channels, dtype=torch.float32)
    block_backward.norm_back[(programs,)](
        dn, x, grad, keep, ready.vectors, out, sums, rows, x.shape[-3] * x.shape[-2], eps, C=s.channels,
        DROP=keep is not None, BLOCK=block, T=tile, num_warps=1,
    )  # fmt: skip
    return out, sums.sum(0)


def _own(x: Tensor) -> Tensor:
    """The same in memory of its own, as an operator's outputs must not share any."""
    return x.clone() if x.is_contiguous() and x.untyped_storage().nbytes() > x.nbytes else x.contiguous()


def _through_norm(matrix: Tensor, product: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a centred matrix with its bias, from products of gradients before the norm with its input."""
    rank, width = matrix.shape
    grad = weight[:, None] * product[:rank, :width]
    return torch.addmm(grad - grad.mean(0), matrix, product[rank : rank + width, :width])


def _first_layer(
    grad: Tensor, x: Tensor, u: Tensor, stats: Tensor, keep: Tensor | None, named: dict[str, Tensor], ready: Prepared,
    s: Sizes, keep_border: bool, eps: float,
) -> tuple[Tensor, Gradients]:  # fmt: skip
    """The gradients of the block's input and of everything in the first Mu-Layer."""
    rows, channels, rank, low = x.numel() // s.channels, s.channels, s.rank1, s.low1
    height, width = x.shape[-3:-1]
    tile = tiles(s)["mu1_back"]
    programs = triton.cdiv(rows, tile.tokens)
    kernel = block_backward.mu1_back
    fixed = constants(s, kernel.arg_names)
    E, h, db, d = torch.empty_like(u), *(x.new_empty(rows, width) for width in (rank, rank, fixed["SD1"]))
    sums = x.new_empty(programs, 4, rank, dtype=torch.float32)
    kernel[(programs,)](
        grad, u, stats, keep, ready.B1, ready.C1, ready.vectors, E, h, db, d, sums, rows, height, width, **fixed,
        KEEP=keep_border, DROP=keep is not None, **steps(tile, rank), J=chunk(rank, tile.chunk), STAGES=tile.stages,
    )  # fmt: skip
    tile = tiles(s)["lift_back"]
    programs = triton.cdiv(rows, tile.tokens)
    kernel = block_backward.lift_back
    out, du, n = torch.empty_like(x), torch.empty_like(u), x.new_empty(rows, channels + 8)
    norm_sums = x.new_empty(programs, 3, channels, dtype=torch.float32)
    kernel[(programs,)](
        E, x, grad, keep, ready.lifting, ready.vectors, du, out, n, norm_sums, rows, height, width, eps,
        **constants(s, kernel.arg_names), LOW=max(16, triton.next_power_of_2(fixed["US"] - rank)), KEEP=keep_border,
        DROP=keep is not None, **steps(tile, channels), J=chunk(rank, tile.chunk), STAGES=tile.stages,
    )  # fmt: skip
    norm = norm_sums.sum(0)
    lifting, factor = _product(du, n), _product(db, d)
    scale_a, shift_a, scale_b, shift_b = sums.sum(0)
    alpha, weight_b, bias_b = (named[f"mu1.{name}"] for name in ("alpha", "norm_b.weight", "norm_b.bias"))
    return out, {
        "norm1.weight": norm[0], "norm1.bias": norm[1],
        "mu1.A.weight": lifting[:rank, :channels], "mu1.A.bias": lifting[:rank, channels],
        "mu1.D.weight": lifting[rank : rank + low, :channels], "mu1.D.bias": lifting[rank : rank + low, channels],
        "mu1.B.weight": factor[:, :low], "mu1.B.bias": factor[:, low],
        "mu1.C.weight": _product(grad.view(rows, channels), h), "mu1.C.bias": norm[2],
        "mu1.norm_a.weight": scale_a, "mu1.norm_a.bias": shift_a,
        "mu1.norm_b.weight": alpha * scale_b, "mu1.norm_b.bias": alpha * shift_b,
        "mu1.alpha": (weight_b * scale_b + bias_b * shift_b).sum(),
    }  # fmt: skip


def poly_block_backward_now(
    grad: Tensor, x: Tensor, saved: Sequence[Tensor], keep1: Tensor | None, keep2: Tensor | None,
    weights: Sequence[Tensor], prepared: Sequence[Tensor], keep_border: bool, eps: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x and of all weights."""
    s, ready = sizes_of(weights), Prepared(*prepared)
    with torch.autocast(x.device.type, enabled=False):
        named = {name: weight.float() for name, weight in zip(BLOCK_PARAMETERS, weights, strict=True)}
        u, mid, stats1, n, d, stats2 = saved
        grad, second = _second_layer(grad, mid, n, d, stats2, keep2, named, ready, s, eps)
        grad, more = _first_layer(grad, x, u, stats1, keep1, named, ready, s, keep_border, eps)
        found = second()
        for name in ("norm1.weight", "norm1.bias"):  # the two places share one norm
            found[name] = found[name] + more.pop(name)
        found |= more
        return [grad, *(
            _own(found[name].to(weight.dtype).reshape(weight.shape))
            for name, weight in zip(BLOCK_PARAMETERS, weights, strict=True)
        )]  # fmt: skip


poly_block_backward = torch.library.custom_op(
    "multilinear::poly_block_backward", poly_block_backward_now, mutates_args=()
)


@poly_block_backward.register_fake
def _(grad: Tensor, x: Tensor, *rest: Any) -> list[Tensor]:
    weights: Sequence[Tensor] = rest[3]
    return [torch.empty_like(x), *(torch.empty_like(weight) for weight in weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    x, keep1, keep2, weights, prepared, ctx.keep_border, ctx.eps, _ = inputs
    ctx.lengths = len(output[1]), len(weights)
    ctx.save_for_backward(x, keep1, keep2, *output[1], *weights, *prepared)


def _saved(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """What `poly_block_backward` takes."""
    x, keep1, keep2, *rest = ctx.saved_tensors
    kept, weights = ctx.lengths
    parts = rest[:kept], keep1, keep2, rest[kept : kept + weights], rest[kept + weights :]
    return grad.contiguous(), x, *parts, ctx.keep_border, ctx.eps


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    inputs = _saved(ctx, grad)
    found = poly_block_backward(*inputs)
    return found[0], None, None, found[1:], [None] * len(inputs[6]), None, None, None


class PolyBlockNow(torch.autograd.Function):
    """The same operator without its wrapping, for code that runs at once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        keep1: Tensor | None,
        keep2: Tensor | None,
        prepared: Sequence[Tensor],
        keep_border: bool,
        eps: float,
        *weights: Tensor,
    ) -> Tensor:
        output = poly_block_now(x, keep1, keep2, weights, prepared, keep_border, eps, save=True)
        _save(ctx, (x, keep1, keep2, weights, prepared, keep_border, eps, True), output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = poly_block_backward_now(*_saved(ctx, grad))
        return found[0], None, None, None, None, None, *found[1:]


poly_block.register_autograd(_gradients, setup_context=_save)
