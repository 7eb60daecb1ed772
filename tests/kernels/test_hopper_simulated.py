"""The Hopper kernels, simulated on the CPU: whole blocks against the plain code in float64, forward and back,
at every width that they take. What is beside them runs in Triton's interpreter, and so in processes of their own, as
which this file is then run."""

import copy
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import triton
from interpreted import main, run_interpreted
from sklearn.datasets import load_digits
from test_block import close_gradients, error, exact, perturbed, run, weights_of
from torch import nn
from torch.nn import functional as F

from multilinear.kernels import block_small, hopper, hopper_plans, launch_merged
from multilinear.layers import PolyBlock

FIRST = ["lift", "mu1"], ["mu1_back", "lift_back", "first_products"]
IMAGE = ["first_layer"], ["mu1_back", "image_back", "first_products"]
SECOND = ["mu2"], ["mu2_back"]
MERGED = ["mu2_merged"], ["mu2_merged_back", "second_products"]


@contextmanager
def on_hopper(seed, version="3.6.0"):
    """As if tensors were on a GPU with two processors, so that each takes several tiles."""
    from simulated import simulating

    with pytest.MonkeyPatch.context() as patch, simulating(seed) as launched:
        patch.setattr(triton, "__version__", version)
        patch.setattr(hopper_plans, "on_gpu", lambda x: True)
        patch.setattr(block_small, "plan_for", lambda *sizes: None)  # which would take so few tokens
        for module in (hopper, launch_merged):
            patch.setattr(module, "processors", lambda device: 2)
        yield launched


def check(dim, shrinkage, grid, images, dtype, first, second, last=(), seed=0, version="3.6.0"):
    """A block in training, with paths that are dropped, and in inference."""
    torch.manual_seed(seed)
    kept = 1.25 * torch.rand(2, images).round()
    kept[:, 0] = 1.25  # or all gradients might be zero
    block = perturbed(PolyBlock(dim, shrinkage=shrinkage, drop_path=0.2)).to(dtype)
    x, grad = torch.randn(2, images, *grid, dim).to(dtype)
    forward = partial(block._fused, dtype=dtype)
    close = {torch.bfloat16: (1e-2, 2e-2), torch.float16: (1.5e-3, 4e-3)}[dtype]
    with on_hopper(seed, version) as launched:
        found = run(block, x, grad, kept, forward=forward)
    assert sorted(launched) == sorted([*first[0], *second[0], *second[1], *last, *first[1]])
    expected = exact(block, x, grad, kept)
    assert error(found[0], expected[0]) < close[0]
    close_gradients(block, found[1], expected[1], close[1])
    block.eval()
    with on_hopper(seed + 1, version) as launched, torch.no_grad():
        out = forward(x)
    assert launched == first[0] + second[0]
    assert error(out, exact(block, x, grad)[0]) < close[0]


def interpret_64():
    check(64, 8, (7, 7), 8, torch.float16, FIRST, SECOND)
    check(64, 8, (5, 9), 3, torch.bfloat16, FIRST, SECOND, seed=1, version="3.9.0")


def interpret_128():
    check(128, 8, (7, 6), 8, torch.bfloat16, FIRST, SECOND, last=["norm_back"])


def interpret_192():
    check(192, 8, (7, 7), 6, torch.float16, FIRST, SECOND, last=["norm_back"])


def interpret_256():
    check(256, 8, (7, 7), 4, torch.float16, (FIRST[0], []), SECOND)


def interpret_images():
    check(192, 4, (8, 8), 7, torch.float16, IMAGE, MERGED)


def interpret_rows_far_from_zero():
    """What `first_layer` makes of rows whose mean is many times their deviation: u, shifted, and the norm's numbers."""
    from multilinear.kernels.block import poly_block_now, prepare_now

    torch.manual_seed(0)
    block = perturbed(PolyBlock(192, shrinkage=4))
    for dtype, mean, deviation, most in ((torch.bfloat16, 30.0, 1.0, 6e-3), (torch.float16, 2e4, 300.0, 1.5e-3)):
        block.to(dtype)
        x = (deviation * torch.randn(3, 8, 8, 192) + mean * torch.tensor([1.0, -1.0, 1.0]).view(3, 1, 1, 1)).to(dtype)
        with on_hopper(0) as launched, torch.no_grad():
            ready = prepare_now(weights_of(block), dtype)
            _, saved = poly_block_now(x, None, None, weights_of(block), ready, True, block.norm1.eps, save=True)
        assert "first_layer" in launched
        plain = copy.deepcopy(block).double()
        with torch.no_grad():
            n = plain.norm1(x.double())
            u = torch.cat([plain.mu1.shift(plain.mu1.A(n)), plain.mu1.shift_second(plain.mu1.D(n))], -1).flatten(0, -2)
        assert error(saved[0][:, : u.shape[1]], u) < most, (dtype, error(saved[0][:, : u.shape[1]], u))
        rows = x.double().flatten(0, -2)
        means, scales = saved[2].view(-1, len(rows))[:2].double()
        assert error(means, rows.mean(1)) < 1e-4 and error(scales, 1 / rows.std(1, correction=0)) < 1e-2


def interpret_merged():
    check(192, 4, (5, 7), 9, torch.bfloat16, FIRST, MERGED, version="3.9.0")


def losses_on_digits(block, fused=False, without=None, steps=8):
    """Of a block alone that learns some real images of 8x8 pixels, if told so without the gradient of one parameter."""
    torch.manual_seed(0)
    digits = load_digits()
    pixels, labels = torch.tensor(digits.images[:8, ..., None] / 16.0).float(), torch.tensor(digits.target[:8])
    embed, head = nn.Linear(1, 192).requires_grad_(False), nn.Linear(192, 10).requires_grad_(False)
    x, block = embed(pixels) + torch.randn(8, 8, 192) / 2, copy.deepcopy(block)
    optimizer, losses = torch.optim.AdamW(block.parameters(), 3e-3), []
    for step in range(steps):
        with on_hopper(step) if fused else nullcontext():
            y = block._fused(x.bfloat16(), torch.bfloat16).float() if fused else block(x)
            loss = F.cross_entropy(head(F.layer_norm(y.mean((1, 2)), (192,))), labels)
            loss.backward()
        if without:
            block.get_parameter(without).grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


def train_as_plain_code_does():
    block = PolyBlock(192, shrinkage=4)
    plain, fused = losses_on_digits(block), losses_on_digits(block, fused=True)
    assert plain[-1] < plain[0] - 0.3 and (fused - plain).abs().max() < 5e-3, (fused, plain)
    for name in ("mu1.A", "mu1.D", "mu1.B", "mu1.C", "mu2.A", "mu2.B", "mu2.C"):  # so losses tell of each of these
        assert (losses_on_digits(block, without=f"{name}.weight") - plain).abs().max() > 5e-3, name


INTERPRETED = {name: value for name, value in list(globals().items()) if name.startswith("interpret_")}


@pytest.mark.parametrize("name", INTERPRETED)
def test_in_the_interpreter(name):
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    run_interpreted(__file__, name)


@pytest.mark.slow
def test_a_training_has_the_same_losses():
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    run_interpreted(__file__, "train_as_plain_code_does")


if __name__ == "__main__":
    main(INTERPRETED | {"train_as_plain_code_does": train_as_plain_code_does})
