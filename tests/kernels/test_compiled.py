"""The kernels compiled for a Hopper GPU that is not there: the compiler takes them, they fit into the memory of a
processor, and what is on its way stays so. The interpreter and the simulation see nothing of that.

Each size is compiled in a process of its own, as which this file is then run: Triton takes that GPU for real there.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from unittest import mock

import pytest
import torch
import triton
from test_polynomial import BLOCKS, folded, fused

SIZES = {  # channels, shrinkage, grid
    "64": (64, 8, (28, 28)), "128": (128, 8, (14, 14)), "192": (192, 8, (14, 14)), "256": (256, 8, (14, 14)),
    "192, a quarter": (192, 4, (14, 14)), "192, a quarter, images": (192, 4, (8, 8)),
}  # fmt: skip
SHARED = {90: 227 * 1024, 86: 99 * 1024}  # bytes that a program may have on GPUs of these generations
# Warnings of the assembler that products run one by one. Of these kernels it is known: they want more registers than
# there are, with the assembler that comes with Triton 3.9 more of them than with the one before.
SERIALISED = re.compile(r"\(C75(?:10|11|12|13|14|15)\)")
KNOWN = {
    "3.6.": {("64", "mu2")},
    "3.9.": {
        ("64", "mu2"), ("64", "lift_back"), ("128", "mu2"), ("192", "mu2"), ("192, a quarter", "mu2_merged_back"),
        ("192, a quarter, images", "mu2_merged_back"),
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_kernels_fit_a_gpu_that_is_not_there(size, dtype, tmp_path):
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    kernels = compiled(size, dtype, tmp_path)
    known = set().union(*(names for version, names in KNOWN.items() if triton.__version__.startswith(version)))
    names = {kernel["name"] for kernel in kernels}
    assert {"pack", "partial_sums", "first_gradients"} < names and names & {"lift", "first_layer"}
    for kernel in kernels:
        if kernel["gluon"] and (size, kernel["name"]) not in known:
            assert not kernel["serialised"], kernel


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", range(len(BLOCKS)), ids=lambda i: str(BLOCKS[i]))
def test_kernels_without_norms_fit(size, dtype, tmp_path):
    kernels = compiled(f"without norms, 90: {size}", dtype, tmp_path)
    assert sorted(kernel["name"] for kernel in kernels) == ["block", "block", "enter"]
    for kernel in kernels:
        if BLOCKS[size]["dim"] not in (48, 256):  # the one has products too narrow, the other too few registers
            assert not kernel["serialised"], kernel


@pytest.mark.slow
@pytest.mark.parametrize("size", range(len(BLOCKS)), ids=lambda i: str(BLOCKS[i]))
def test_kernels_without_norms_fit_smaller_gpus(size, tmp_path):
    kernels = compiled(f"without norms, 86: {size}", "bfloat16", tmp_path, 86)
    assert sorted(kernel["name"] for kernel in kernels) == ["block", "block", "enter"]


def compiled(size, dtype, folder, generation=90):
    """Reports on the kernels of a size, all of which the compiler and the processor take."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_DUMP_PTXAS_LOG": "1"}
    command = [sys.executable, __file__, size, dtype]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stderr[-3000:]
    kernels = json.loads(found.stdout)
    for kernel in kernels:
        assert kernel["assembled"] and kernel["shared"] <= SHARED[generation], kernel
        assert kernel["spilled"] < 1024, kernel  # bytes a thread
    return kernels


class Gpu:
    """What Triton asks a driver for."""

    def __init__(self, generation):
        self.generation = generation

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.generation, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def report(function, kernel, said):
    """What is in a compiled kernel, and what the assembler said of it."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    return {
        "name": function.fn.__name__,
        "gluon": isinstance(function, GluonJITFunction),
        "shared": kernel.metadata.shared,
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        "serialised": bool(SERIALISED.search(said)),
        "assembled": "spill stores" in said,
    }


@contextmanager
def compiling(generation=90):
    """Inside, kernels are only compiled, for that GPU; gives the reports on them."""
    from contextvars import copy_context

    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from multilinear.kernels import launch

    reports = {}
    warmup = JITFunction.warmup

    def warmup_and_report(self, *given, **named):
        with redirect_stdout(StringIO()) as said:
            kernel = warmup(self, *given, **named)
        if kernel.hash not in reports:
            reports[kernel.hash] = report(self, kernel, said.getvalue())

    driver.set_active(Gpu(generation))
    with (
        mock.patch.object(JITFunction, "warmup", warmup_and_report),
        mock.patch.object(launch, "_compiling", copy_context()),
    ):
        yield reports


def compile_all(channels, shrinkage, grid, dtype):
    """Reports on all kernels of a block, in training with and without dropped paths, and in inference."""
    from multilinear.kernels import block_small, hopper, hopper_plans, launch_merged
    from multilinear.layers import PolyBlock

    with (
        compiling() as reports,
        mock.patch.object(hopper_plans, "on_gpu", return_value=True),
        mock.patch.object(block_small, "plan_for", return_value=None),
        mock.patch.object(hopper, "processors", return_value=132),
        mock.patch.object(launch_merged, "processors", return_value=132),
    ):
        for rate in (0.2, None):
            block = PolyBlock(channels, shrinkage=shrinkage, drop_path=rate).to(dtype)
            x = torch.randn(4, *grid, channels, dtype=dtype, requires_grad=True)
            block._fused(x, dtype).sum().backward()
        with torch.no_grad():
            block.eval()._fused(x, dtype)
    return list(reports.values())


def compile_without_norms(arguments, dtype, generation):
    """Of a block without norms, and of the last one of a run."""
    from multilinear.kernels import polynomial

    module = fused(folded(2, **arguments), dtype)
    if generation == 86:
        module.tile = polynomial.SMALL
    with compiling(generation) as reports:
        module(torch.randn(4, 14, 14, arguments["dim"]))
    return list(reports.values())


def main(size, dtype):
    if size.startswith("without norms, "):
        generation, number = map(int, size.removeprefix("without norms, ").split(": "))
        found = compile_without_norms(BLOCKS[number], dtype, generation)
    else:
        found = compile_all(*SIZES[size], dtype)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], getattr(torch, sys.argv[2]))
