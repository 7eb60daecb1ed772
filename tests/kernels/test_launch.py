"""Kernels that run, or that are only compiled, many at the same time."""

import threading

import pytest
import torch
import triton

from multilinear import kernels
from multilinear.kernels import launch as launching
from multilinear.layers import PolyBlock


class Kernel:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.ran, self.compiled = [], []

    def __getitem__(self, grid):
        return lambda *inputs, **constants: self.ran.append((grid, inputs, constants))

    def warmup(self, *inputs, grid, **constants):
        self.compiled.append((grid, inputs, constants))


def test_a_kernel_runs():
    kernel = Kernel()
    launching.launch(kernel, 3, "x", WIDTH=4)
    assert kernel.ran == [((3,), ("x",), {"WIDTH": 4, "enable_fp_fusion": True})] and not kernel.compiled


def test_together_kernels_are_only_compiled_also_from_another_thread():
    kernel = Kernel()
    with launching.together():
        launching.launch(kernel, 3, "x", WIDTH=4)
        thread = threading.Thread(target=launching.launch, args=(kernel, 5, "y"))
        thread.start()
        thread.join()
    assert [(grid, inputs) for grid, inputs, _ in kernel.compiled] == [((3,), ("x",)), ((5,), ("y",))]
    assert kernel.compiled[0][2]["WIDTH"] == 4 and not kernel.ran
    launching.launch(kernel, 1)
    assert len(kernel.ran) == 1


def test_after_an_error_kernels_run_again():
    kernel = Kernel()
    with pytest.raises(ZeroDivisionError), launching.together():
        1 / 0  # noqa: B018
    launching.launch(kernel, 1)
    assert kernel.ran


class Mode:
    """As Triton 3.5 has it."""

    def __init__(self, executor):
        self.entered = False

    def __enter__(self):
        Mode.last = self
        self.entered = True

    def __exit__(self, *error):
        pass


@pytest.mark.parametrize("mode", [Mode, None])
def test_with_an_older_triton(mode, monkeypatch):
    if mode is None:
        monkeypatch.delattr(triton, "AsyncCompileMode")
    else:
        monkeypatch.setattr(triton, "AsyncCompileMode", mode)
    kernel = Kernel()
    with launching.together():
        launching.launch(kernel, 3, "x")
    assert len(kernel.compiled) == 1 and not kernel.ran
    assert mode is None or Mode.last.entered


def test_without_a_gpu_everything_computes():
    block, x = PolyBlock(16).eval(), torch.randn(1, 3, 3, 16)
    expected = block(x)
    with kernels.compile_together():
        assert kernels.computing() or torch.cuda.is_available()
        found = block(x)
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_what_was_undefined_is_not_kept():
    block = PolyBlock(64).cuda().bfloat16().eval().requires_grad_(False)
    x = torch.randn(2, 8, 8, 64, device="cuda").bfloat16()
    with torch.no_grad():
        with kernels.compile_together():
            assert not kernels.computing()
            block(x)
        found = block(x)
    kernels.use_kernels(False)
    try:
        expected = block(x)
    finally:
        kernels.use_kernels(True)
    assert (found - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.gpu
def test_a_step_after_it_computes():
    block = PolyBlock(128).cuda()
    x = torch.randn(2, 8, 8, 128, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16), kernels.compile_together():
        block(x).sum().backward()
    with torch.autocast("cuda", torch.bfloat16):
        (found,) = torch.autograd.grad(block(x).sum(), x)
        kernels.use_kernels(False)
        try:
            (expected,) = torch.autograd.grad(block(x).sum(), x)
        finally:
            kernels.use_kernels(True)
    assert (found - expected).norm() < 3e-2 * expected.norm()
