"""The fused kernels against float64, on the CPU through Triton's interpreter (in a process of its own)."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from multilinear.layers import MuLayer

CHECK = """
import torch
from torch.nn import functional as F
from multilinear.kernels import product
from multilinear.kernels.product import fused_normed_product, fused_shifted_product
from multilinear.layers.shift import spatial_shift
torch.manual_seed(0)
product.TILES = {size: (1, 1, 2) for size in product.TILES}  # two programs, so that each has several rows
for rows, width in [(1, 8), (5, 12), (3, 40), (7, 48), (33, 64), (4, 100), (3, 192), (2, 576), (3, 1152)]:
    a, b = (torch.randn(rows, width).requires_grad_() for _ in range(2))
    weights = [(torch.randn(width) + i % 2).requires_grad_() for i in range(4)]
    weights.append(torch.tensor(0.7, requires_grad=True))
    grad = torch.randn(rows, width)
    out, _ = fused_normed_product(a, b, *weights, 1e-6)
    found = torch.autograd.grad(out, [a, b, *weights], grad)
    exact = [t.detach().double().requires_grad_() for t in (a, b, *weights)]
    p = F.layer_norm(exact[0], (width,), exact[2], exact[3], 1e-6)
    q = F.layer_norm(exact[1], (width,), exact[4], exact[5], 1e-6)
    expected = p + exact[6] * p * q
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    for f, e in zip(found, torch.autograd.grad(expected, exact, grad.double())):
        torch.testing.assert_close(f.double(), e, rtol=1e-3, atol=1e-3)
for shape, border in [((2, 3, 5, 8), "keep"), ((1, 7, 7, 48), "zero"), ((4, 1, 384), "keep"), ((1, 2, 2, 12), "zero")]:
    (a, b), width = torch.randn(2, *shape), shape[-1]
    weights = [torch.randn(width) for _ in range(4)]
    out = fused_shifted_product(a, b, *weights, torch.tensor(0.7), 1e-6, border == "keep")
    p = F.layer_norm(spatial_shift(a, border), (width,), *weights[:2], 1e-6)
    torch.testing.assert_close(out, p + 0.7 * p * F.layer_norm(b, (width,), *weights[2:], 1e-6), rtol=1e-4, atol=1e-4)
print("agrees")
"""


def test_interpreted_kernels_agree_with_float64():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, timeout=300)
    assert found.stdout.strip() == "agrees", found.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [48, 64, 96, 128, 192, 256, 384, 576, 768, 1152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_kernels_agree_with_float64(width, dtype):
    from multilinear.kernels import normed_product

    a, b = (torch.randn(8, 20, 20, width, device="cuda").to(dtype).requires_grad_() for _ in range(2))
    weights = [torch.randn(width, device="cuda").requires_grad_() for _ in range(4)]
    alpha = torch.tensor(0.7, device="cuda", requires_grad=True)
    out = normed_product(a, b, tuple(weights[:2]), tuple(weights[2:]), alpha, 1e-6)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, [a, b, *weights, alpha], grad)
    exact = [t.detach().double().requires_grad_() for t in (a, b, *weights, alpha)]
    p = F.layer_norm(exact[0], (width,), exact[2], exact[3], 1e-6)
    q = F.layer_norm(exact[1], (width,), exact[4], exact[5], 1e-6)
    expected = p + exact[6] * p * q
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    assert ((out.double() - expected).norm() / expected.norm()).item() < tolerance
    for f, e in zip(found, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        assert ((f.double() - e).norm() / e.norm()).item() < 2 * tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("border", ["keep", "zero"])
@pytest.mark.parametrize("width", [48, 384])
def test_inference_shifts_while_it_loads(width, border):
    layer = MuLayer(width, shift=border, norm="layer").cuda().bfloat16()
    x = torch.randn(3, 7, 5, width, device="cuda").bfloat16()
    expected = layer(x)
    with torch.no_grad():
        found = layer(x)
    assert (found - expected).norm() < 1e-2 * expected.norm()
