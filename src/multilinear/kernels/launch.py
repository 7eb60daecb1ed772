"""Launches kernels, or only has them compiled, many at the same time."""

import contextvars
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from inspect import signature
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


def _compiled_by(threads: ThreadPoolExecutor) -> AbstractContextManager[Any]:
    mode = getattr(triton, "AsyncCompileMode", None)  # since 3.5
    if mode is None:
        return nullcontext()
    options = {"ignore_errors": True} if "ignore_errors" in signature(mode).parameters else {}  # since 3.6
    context: AbstractContextManager[Any] = mode(threads, **options)
    return context


@contextmanager
def together() -> Iterator[None]:
    """What `kernels.compile_together` does; one after the other with a Triton that is too old for that. A kernel that
    cannot be compiled says so where it is used."""
    global _compiling
    with ThreadPoolExecutor(os.cpu_count()) as threads, _compiled_by(threads):
        _compiling = contextvars.copy_context()
        try:
            yield
        finally:
            _compiling = None


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """For what runs beside the rest."""
    return torch.cuda.Stream(device)


def beside(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Start products that end in gradients of parameters beside what follows; the result waits for them."""
    if device.type != "cuda":
        return work
    main, side = torch.cuda.current_stream(device), side_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        work()
        done = side.record_event()
    held = [work]  # with all that it reads, whose memory would else be used again too early

    def join() -> None:
        main.wait_event(done)
        held.clear()

    return join
