"""Inference with merged branches against the plain block in float64; what it is made of on the CPU, through Triton's
interpreter in another process, as which this file is then run."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import triton

from multilinear import kernels
from multilinear.kernels import hopper
from multilinear.layers import PolyBlock


def perturbed(block):
    """The block with no parameter left at a round number, and frozen."""
    with torch.no_grad():
        for weight in block.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return block.requires_grad_(False)


def weights_of(block):
    return [block.get_parameter(name) for name in kernels.BLOCK_PARAMETERS]


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def interpret():
    """What `hopper_merged` reads, by the same steps in plain code."""
    from multilinear.kernels.block import merge, prepare_now

    block = perturbed(PolyBlock(128, shrinkage=4))
    both, roots, linear = (part.double() for part in merge(weights_of(block), torch.float32))
    assert error(both[:64], prepare_now(weights_of(block), torch.float32)[3][:64].double()) == 0
    n = torch.randn(7, 128).double()
    mu = copy.deepcopy(block).double().mu2
    branches = [mu.A(n), mu.B(mu.D(n))]
    squares = (n @ roots.T + linear[:-2]).square().view(7, 2, 2, 64).sum((1, 3)) + linear[-2:]
    variances = torch.stack([branch.var(-1, correction=0) for branch in branches], -1)
    assert error(squares / 384, variances) < 1e-6
    assert roots.view(2, 2, 64, 128)[1, :, :, :64].abs().max() == 0  # blocks that are not read
    inverse = (variances + 1e-6).sqrt()
    one, none = torch.ones(7), torch.zeros(7)
    columns = [column for r in inverse.T for column in (one, one, r, none, r)]  # r as stored is r in this precision
    rows = torch.cat([n, torch.stack([*columns, *[none] * 6], 1)], 1) @ both.T
    first, second = rows.view(7, 6, 2, 64).unbind(2)
    p, q = mu.norm_a(branches[0]), mu.norm_b(branches[1])
    expected = p + mu.alpha * p * q
    assert error((first * second).flatten(1) / inverse.prod(-1, keepdim=True), expected) < 1e-5


def test_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]


def test_prepared_weights_stay_while_kernels_are_compiled(monkeypatch):
    """A recorded graph reads them."""
    made = []
    monkeypatch.setattr(kernels, "prepare_block", lambda *inputs: made.append(inputs) or [torch.zeros(1)])
    block = perturbed(PolyBlock(64))

    def prepare():
        return block._prepare(block._weights(), torch.bfloat16)

    with torch.no_grad():
        kept = prepare()
        assert prepare() is kept and len(made) == 1
        with monkeypatch.context() as compiling:
            compiling.setattr(kernels, "computing", lambda: False)
            assert prepare() is not kept
        assert prepare() is kept
    assert prepare() is not kept  # with gradients
    with torch.no_grad():
        assert prepare() is kept
        block.mu2.C.weight.requires_grad_(True)
        assert prepare() is not kept and block._prepared is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("images", "side"), [(1, 1), (5, 7), (1600, 8)])
def test_cuda_inference_with_merged_branches(images, side, dtype, monkeypatch):
    made, kernel = [], hopper.mu2_merged
    monkeypatch.setattr(hopper, "mu2_merged", lambda *inputs: [made.append(True), kernel(*inputs)])
    block = perturbed(PolyBlock(192, shrinkage=4)).cuda().requires_grad_(False)
    x = (3 * torch.randn(images, side, side, 192, device="cuda") + 0.5).to(dtype)
    block = block.to(dtype)
    with torch.no_grad():
        first = block(x)
        assert made or not triton.__version__.startswith(hopper.VERSIONS)
        assert error(first, copy.deepcopy(block).double()(x.double())) < 1e-2
        assert all(torch.equal(block(x), first) for _ in range(20))
        weights = weights_of(block)
        separate = kernels.poly_block(x, weights, kernels.prepare_block(weights, dtype), None, True, 1e-6)
        assert error(separate, first.double()) < 1e-2
        block.mu2.B.weight.mul_(-1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # where nothing is merged, and nothing kept for later
            captured = block(x)
        merged = len(made)
        now = block(x)
        assert len(made) > merged or not merged
        graph.replay()
        for out in (now, captured):
            assert error(out, copy.deepcopy(block).double()(x.double())) < 1e-2 < error(first, out.double())


if __name__ == "__main__":
    interpret()
