"""Launches kernels, or only has them compiled, many at the same time."""

import contextvars
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import triton

_compiling: contextvars.Context | None = None


def launch(kernel: Any, programs: int, *inputs: Any, **constants: Any) -> None:
    """Run so many programs of a kernel; inside `together` only have it compiled. Triton is told to fuse products with
    sums, which is what it did without being told up to 3.9."""
    constants["enable_fp_fusion"] = True
    if _compiling is None:
        kernel[(programs,)](*inputs, **constants)
    else:  # in a copy of the context, since the way back has a thread of its own and two cannot be in the same
        _compiling.copy().run(kernel.warmup, *inputs, grid=(programs,), **constants)


@contextmanager
def together() -> Iterator[None]:
    """What `kernels.compile_together` does. A kernel that cannot be compiled says so where it is used."""
    global _compiling
    with ThreadPoolExecutor(os.cpu_count()) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        _compiling = contextvars.copy_context()
        try:
            yield
        finally:
            _compiling = None


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """For what runs beside the rest."""
    return torch.cuda.Stream(device)
