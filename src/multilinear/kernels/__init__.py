"""Fused kernels behind the same functions as the plain PyTorch code. Nobody else imports triton.

`MULTILINEAR_KERNELS=0` in the environment, or `use_kernels(False)`, switches to the plain code everywhere.
"""

import os

import torch
from torch import Tensor

_enabled = os.environ.get("MULTILINEAR_KERNELS", "1") != "0"


def use_kernels(enabled: bool) -> None:
    """Switch the fused kernels on or off for everything that runs, or is compiled, afterwards.

    >>> use_kernels(True)
    """
    global _enabled
    _enabled = enabled


def blocks_for(dtype: torch.dtype) -> bool:
    """Whether whole Poly-Blocks have a kernel on this CPU, for inference in `dtype`. The first call may compile it.

    >>> blocks_for(torch.float64)
    False
    """
    from multilinear.kernels import cpu

    return _enabled and cpu.blocks_for(dtype)


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
) -> Tensor:
    """`p + alpha * p * q` for the layer norms p of `a` and q of `b`, in one pass over memory each way. GPU only.

    >>> callable(normed_product)
    True
    """
    from multilinear.kernels.product import fused_normed_product

    out: Tensor = fused_normed_product(a.contiguous(), b.contiguous(), *norm_a, *norm_b, alpha, eps)[0]
    return out
