"""Fused kernels behind the same functions as the plain PyTorch code. Nobody else imports triton.

`MULTILINEAR_KERNELS=0` in the environment, or `use_kernels(False)`, switches to the plain code everywhere.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from multilinear.kernels.cpu import Mu

# The parameters of a Poly-Block in the order in which its fused form takes them.
_MU = ("A.weight", "A.bias", "D.weight", "D.bias", "B.weight", "B.bias", "C.weight", "C.bias",
       "norm_a.weight", "norm_a.bias", "norm_b.weight", "norm_b.bias", "alpha")  # fmt: skip
BLOCK_PARAMETERS = ("norm1.weight", "norm1.bias", *(f"{mu}.{name}" for mu in ("mu1", "mu2") for name in _MU))

_enabled = os.environ.get("MULTILINEAR_KERNELS", "1") != "0"
_computing = True


def use_kernels(enabled: bool) -> None:
    """Switch the fused kernels on or off for everything that runs, or is compiled, afterwards.

    >>> use_kernels(True)
    """
    global _enabled
    _enabled = enabled


@contextmanager
def compile_together() -> Iterator[None]:
    """Inside, the fused kernels of GPUs compute nothing and are compiled instead, all at the same time.

    Run a training step in it on a batch of the size to come, and the first real one does not wait for one kernel after
    the other. What the step computes is undefined: throw it away.

    >>> with compile_together():
    ...     y = torch.ones(1) * 2
    >>> y.item()
    2.0
    """
    global _computing
    if not _enabled or not torch.cuda.is_available() or find_spec("triton") is None:
        yield
        return
    from multilinear.kernels.launch import together

    try:
        _computing = False
        with together():
            yield
    finally:
        _computing = True


def computing() -> bool:
    """Whether kernels compute, so that what they write may be kept; not so inside `compile_together`.

    >>> computing()
    True
    """
    return _computing


def blocks_for(dtype: torch.dtype) -> bool:
    """Whether whole Poly-Blocks have a kernel on this CPU, for inference in `dtype`. The first call may compile it.

    >>> blocks_for(torch.float64)
    False
    """
    from multilinear.kernels import cpu

    return _enabled and cpu.blocks_for(dtype)


def polynomial_blocks(
    blocks: "Sequence[tuple[Mu, Mu]]", shifts: tuple[str | None, str | None], dtype: torch.dtype
) -> nn.Module | None:
    """Poly-Blocks without norms as one module, for inference in 16 bits where their weights are: on an NVIDIA GPU that
    Triton compiles for. None if that is elsewhere or their sizes are others than the kernel's.

    >>> polynomial_blocks([], (None, None), torch.float32) is None
    True
    """
    if not blocks or dtype not in (torch.bfloat16, torch.float16) or find_spec("triton") is None:
        return None
    weight = blocks[0][0].A[0]
    if not fused_for(weight) or torch.cuda.get_device_capability(weight.device)[0] < 8:
        return None
    from multilinear.kernels import polynomial

    return polynomial.Blocks(blocks, shifts, dtype) if polynomial.serves(*blocks[0], shifts) else None


def fused_for(x: Tensor) -> bool:
    """Whether the fused kernels serve `x`: on an NVIDIA GPU, in a floating type, and not while exporting.

    >>> fused_for(torch.zeros(1))
    False
    """
    # torch 2.11 says "exporting" whenever it compiles, so ask for that first
    return (
        _enabled
        and x.is_cuda
        and torch.version.hip is None
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (torch.compiler.is_dynamo_compiling() or not torch.compiler.is_exporting())
    )


def normed_product(
    a: Tensor,
    b: Tensor,
    norm_a: tuple[Tensor, Tensor],
    norm_b: tuple[Tensor, Tensor],
    alpha: Tensor,
    eps: float,
    border: str | None = None,
) -> Tensor:
    """`p + alpha * p * q` for the layer norms p of `a` and q of `b`, in one pass over memory each way. GPU only.

    With a `border`, `a` is still to be shifted; without gradients, and if `shift_serves`.

    >>> callable(normed_product)
    True
    """
    from multilinear.kernels.product import fused_normed_product, fused_shifted_product

    if border is not None:
        shifted: Tensor = fused_shifted_product(
            a.contiguous(), b.contiguous(), *norm_a, *norm_b, alpha, eps, border == "keep"
        )
        return shifted
    out: Tensor = fused_normed_product(a.contiguous(), b.contiguous(), *norm_a, *norm_b, alpha, eps)[0]
    return out


def shift_serves(a: Tensor) -> bool:
    """Whether a product takes `a` (..., H, W, C) ahead of its spatial shift: whole quarters, and any at all.

    >>> shift_serves(torch.zeros(1, 2, 2, 8)), shift_serves(torch.zeros(2, 2, 6))
    (True, False)
    """
    return a.ndim >= 3 and a.shape[-1] % 4 == 0 and a.numel() > 0


@torch.compiler.assume_constant_result
def on_hopper(device: torch.device) -> bool:
    """Whether `device` is a GPU such as the H100 or the H200, for whose shared memory the tiles of a block are made.

    >>> on_hopper(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def block_dtype(x: Tensor) -> torch.dtype | None:
    """The precision in which the fused block serves `x`, or None if the plain code does: 16 bits, autocast or not.

    >>> block_dtype(torch.zeros(1)) is None
    True
    """
    if not fused_for(x) or not on_hopper(x.device):
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def block_serves(rows: int, channels: int, ranks: tuple[int, int], lows: tuple[int, int]) -> bool:
    """Whether the fused block takes these sizes: tokens, channels, and both Mu-Layers' ranks and low ranks.

    >>> callable(block_serves)
    True
    """
    from multilinear.kernels.block_sizes import Sizes, align
    from multilinear.kernels.hopper_plans import plan_merged

    sizes = Sizes(channels, ranks[0], lows[0], ranks[1], lows[1])
    kept = 0 if plan_merged(sizes) is None else 2 * sizes.rank2
    widest = max(align(sizes.rank2 + channels + sizes.low2 + 8, 32), sizes.rank1 + sizes.low1 + 8, kept)
    return sizes.served() and rows * widest < 2**31  # places in memory are numbers of 32 bits


def prepare_block(weights: Sequence[Tensor], dtype: torch.dtype, inference: bool = False) -> list[Tensor]:
    """What the fused block reads, from the parameters `BLOCK_PARAMETERS`; for inference more than that, if it helps.

    >>> callable(prepare_block)
    True
    """
    from multilinear.kernels.block import merges, prepare, prepare_now, roots_of

    with torch.no_grad():
        weights = [weight.detach() for weight in weights]
        if torch.compiler.is_compiling():
            prepared: list[Tensor] = prepare(weights, dtype)
            return prepared
        with torch.cuda.device_of(weights[0]):
            ready = prepare_now(weights, dtype)
            if inference and merges(weights) and not torch.cuda.is_current_stream_capturing():
                ready += roots_of(ready)
            return ready


def prepare_beside(weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], torch.cuda.Event]:
    """The same beside what follows, and the moment from which on it is there. GPU only.

    >>> callable(prepare_beside)
    True
    """
    from multilinear.kernels.launch import side_stream

    device = weights[0].device
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        return prepare_block(weights, dtype), side.record_event()


def poly_block(
    x: Tensor,
    weights: Sequence[Tensor],
    prepared: Sequence[Tensor],
    kept: tuple[Tensor, Tensor] | None,
    keep_border: bool,
    eps: float,
) -> Tensor:
    """A whole Poly-Block with layer norms on (images, height, width, channels), forward and back. GPU only.

    `kept` holds what each image's two branches are multiplied with.

    >>> callable(poly_block)
    True
    """
    from multilinear.kernels import block_gradient  # which also tells autograd the operator's way back
    from multilinear.kernels.block import poly_block as operator
    from multilinear.kernels.block import poly_block_now

    x = x.contiguous()
    save = torch.is_grad_enabled() and (x.requires_grad or any(weight.requires_grad for weight in weights))
    keep1, keep2 = kept or (None, None)
    if torch.compiler.is_compiling():
        out: Tensor = operator(x, keep1, keep2, list(weights), list(prepared), keep_border, eps, save)[0]
        return out
    with torch.cuda.device_of(x):  # which may not be the current one
        if save:
            out = block_gradient.PolyBlockNow.apply(x, keep1, keep2, prepared, keep_border, eps, *weights)
        else:
            out = poly_block_now(x, keep1, keep2, weights, prepared, keep_border, eps, save)[0]
    return out
