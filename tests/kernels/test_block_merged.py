"""Merged branches against the plain block in float64; what they are made of on the CPU, through Triton's interpreter
in other processes, as which this file is then run."""

import copy
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import triton
from interpreted import main, run_interpreted
from test_block import agrees_with_fake, close_gradients, error, exact, perturbed, run, weights_of
from torch.nn import functional as F

from multilinear import kernels
from multilinear.kernels import hopper, hopper_plans, launch_merged
from multilinear.layers import PolyBlock


def extras_of(scales):
    """What stands next to n; the inverse of a scale as stored is that itself in this precision."""
    one, none = torch.ones(len(scales)), torch.zeros(len(scales))
    return torch.stack([*(column for r in scales.T for column in (one, one, 1 / r, none, 1 / r)), *[none] * 6], 1)


def in_turns(matrix, height):
    """Both matrices of which so many rows stand in turns."""
    return matrix.unflatten(0, (-1, 2, height)).transpose(0, 1).flatten(1, 2)


def of_tokens(keep, rows):
    """What became of the layer, for each token."""
    return torch.ones(rows) if keep is None else keep.repeat_interleave(rows // len(keep))


def forward_in_plain_code(x, out, keep, n, branches, stats, ready, roots, s, forms, eps, save):
    """What `launch_merged.mu2_merged` does."""
    rows, vectors = x.view(-1, s.channels), ready.vectors
    normed = F.layer_norm(rows, (s.channels,), eps=eps)  # the weights have taken up its scale and shift
    if roots is None:
        linear, last = vectors[forms:][: 2 * s.channels], vectors[forms:][2 * s.channels :]
        upper = in_turns(ready.stack[2 * s.channels :], 64)
        parts = (normed @ upper.mT + in_turns(linear, 64)[:, None]) * normed
    else:
        linear, last = roots.linear[:-2], roots.linear[-2:]
        parts = (normed @ in_turns(roots.roots, 64).mT + in_turns(linear, 64)[:, None]).square()
    scales = ((parts.sum(-1).T + last[:2]) / s.rank2 + eps).rsqrt()
    kept = of_tokens(keep, len(rows))
    both = scales.prod(1) * kept
    beside = torch.cat([normed, extras_of(scales)], 1)
    first, second = beside @ in_turns(ready.A2, 32).mT
    y = (first * second * both[:, None]) @ ready.C2.T + kept[:, None] * vectors[3 * s.channels : 4 * s.channels]
    out.copy_((rows + y).view_as(x))
    if save:
        n.copy_(beside)
        pair = torch.stack([second, first]) * both.sqrt()[:, None]
        branches.copy_(pair.unflatten(2, (-1, 64)).permute(1, 2, 0, 3).flatten(1))
        deviation = rows.var(1, correction=0, keepdim=True).add(eps).rsqrt()
        stats.copy_(torch.cat([scales, both[:, None], deviation], 1))


def apart(branches):
    """The second branch and the first. (The kernels have columns in another order, which only they see.)"""
    return branches.unflatten(1, (-1, 2, 64)).permute(2, 0, 1, 3).flatten(2)


def back_in_plain_code(grad, n, branches, stats, keep, inner, taken, out, ready, s, forms):
    """What `launch_merged.mu2_merged_back` does."""
    scales, root = stats[:, :2], stats[:, 2:3].sqrt()
    grad = grad.view(len(n), -1)
    inner.copy_((grad @ ready.C2) * root)
    second, first = apart(branches)
    products = torch.stack([inner * second, inner * first]) @ in_turns(ready.A2, 32)
    shifts = torch.stack([products[0, :, s.channels + 2], products[1, :, s.channels + 7]], 1)
    # the rest of the shift is in a column of its own
    shifts += torch.stack([products[0, :, s.channels + 4], products[1, :, s.channels + 9]], 1)
    along = (grad @ ready.C2 * first * second).sum(1, keepdim=True)
    taken = taken.zero_()[:, : len(n)]  # zeros at the end
    taken.copy_(((shifts - scales * along) * scales / s.rank2).T)
    normed = n[:, : s.channels]
    linear = in_turns(ready.vectors[forms:][: 2 * s.channels], 64)
    forms_of_n = normed @ in_turns(ready.stack[: 2 * s.channels], 64) + linear[:, None] / 2
    dn = products[..., : s.channels].sum(0) + (taken[..., None] * forms_of_n).sum(0)
    dn = dn - dn.mean(1, keepdim=True) - normed * (dn * normed).mean(1, keepdim=True)
    out.copy_((grad + dn * stats[:, 3:]).view_as(out))
    kept = grad * of_tokens(keep, len(n))[:, None]
    return [torch.stack([part.sum(0) for part in rows.chunk(3)]) for rows in (taken.T, kept)]


def products_in_plain_code(grad, n, branches, inner, taken, s):
    """What `launch_merged.second_lines` does, in lines that are shares of the tokens."""
    hidden, own = [], []
    for rows in torch.arange(len(n)).chunk(3):
        second, first = apart(branches[rows])
        pair = torch.stack([inner[rows] * second, inner[rows] * first]).mT @ n[rows]
        weight = grad.view(len(n), -1)[rows].T @ (first * second)
        hidden.append(torch.cat([pair.unflatten(1, (-1, 32)).transpose(0, 1).flatten(), weight.flatten()]))
        square = (taken[:, rows, None] * n[rows, : s.channels]).mT @ n[rows]
        for start in range(64, s.channels, 64):  # which the kernel leaves out
            square[:, start : start + 64, :start] = torch.nan
        own.append(square.flatten())
    return torch.stack(hidden), torch.stack(own)


@contextmanager
def merging():
    """As on a GPU that gains by it, with plain code in place of the three kernels that need one."""
    from multilinear.kernels import block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "merges", lambda weights: True)
        patch.setattr(launch_merged, "mu2_merged", forward_in_plain_code)
        patch.setattr(launch_merged, "mu2_merged_back", back_in_plain_code)
        patch.setattr(launch_merged, "second_lines", products_in_plain_code)
        yield


def interpret_training():
    kept = torch.tensor([0.0, 1.25, 1.25]), torch.tensor([1.25, 0.0, 1.25])
    for factors, width in ((None, 64), (kept, 128)):
        block = perturbed(PolyBlock(width, shrinkage=4, drop_path=0.2 if factors else None))
        x, grad = torch.randn(2, 3, 2, 3, width)
        expected = exact(block, x, grad, factors)
        with merging():
            found = run(block, x, grad, factors, forward=partial(block._fused, dtype=torch.float32))
            with torch.no_grad():
                assert factors or torch.equal(block._fused(x, torch.float32), found[0])
        assert error(found[0], expected[0]) < 1e-5
        close_gradients(block, found[1], expected[1], 1e-5)  # as the sum for alpha may cancel


def interpret_memory():
    """Operators announce what they return."""
    from multilinear.kernels import block_gradient
    from multilinear.kernels.block import poly_block, prepare

    block = perturbed(PolyBlock(64, shrinkage=4)).requires_grad_(False)
    weights, x = weights_of(block), torch.randn(2, 2, 2, 64)
    with merging():
        prepared = agrees_with_fake(prepare, (weights, torch.float32))
        out, saved = agrees_with_fake(poly_block, (x, None, None, weights, prepared, True, 1e-6, True))
        agrees_with_fake(block_gradient.poly_block_backward, (out, x, saved, None, None, weights, prepared, True, 1e-6))


def interpret_roots():
    """What inference reads in place of gram matrices."""
    from multilinear.kernels.block import poly_block_now, prepare_now, roots_of

    block = perturbed(PolyBlock(128, shrinkage=4)).requires_grad_(False)
    with merging():
        prepared = prepare_now(weights_of(block), torch.float32)
    roots = roots_of(prepared)
    n = torch.randn(7, 128).double()
    whole = copy.deepcopy(block).double()
    mu, behind = whole.mu2, n * whole.norm1.weight + whole.norm1.bias
    linear = in_turns(roots.linear[:-2], 64)
    squares = (n @ in_turns(roots.roots, 64).double().mT + linear[:, None]).square().sum(-1).T + roots.linear[-2:]
    variances = torch.stack([branch.var(-1, correction=0) for branch in (mu.A(behind), mu.B(mu.D(behind)))], -1)
    assert error(squares / 384, variances) < 1e-6
    assert roots.roots.view(2, 2, 64, 128)[1, :, :, :64].abs().max() == 0  # blocks that are not read
    x = torch.randn(2, 3, 3, 128)
    with merging():
        out = poly_block_now(x, None, None, weights_of(block), [*prepared, *roots], True, 1e-6, False)[0]
    assert error(out, copy.deepcopy(block).double()(x.double())) < 1e-5


INTERPRETED = {name: value for name, value in list(globals().items()) if name.startswith("interpret_")}


@pytest.mark.parametrize("name", INTERPRETED)
def test_in_the_interpreter(name):
    run_interpreted(__file__, name)


def test_prepared_weights_stay_while_kernels_are_compiled(monkeypatch):
    """A recorded graph reads them."""
    made = []
    monkeypatch.setattr(kernels, "prepare_block", lambda *inputs: made.append(inputs) or [torch.zeros(1)])
    block = perturbed(PolyBlock(64)).requires_grad_(False)

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
@pytest.mark.parametrize(("images", "side"), [(1, 1), (5, 7), (1, 8), (797, 8), (1600, 8)])
def test_cuda_inference_with_merged_branches(images, side, dtype, monkeypatch):
    made, kernel, layer = [], launch_merged.mu2_merged, hopper.first_layer
    monkeypatch.setattr(launch_merged, "mu2_merged", lambda *inputs: [made.append("second"), kernel(*inputs)])
    monkeypatch.setattr(hopper, "first_layer", lambda *inputs: [made.append("first"), layer(*inputs)])
    block = perturbed(PolyBlock(192, shrinkage=4)).cuda().requires_grad_(False)
    x = (3 * torch.randn(images, side, side, 192, device="cuda") + 0.5).to(dtype)
    block = block.to(dtype)
    with torch.no_grad():
        first = block(x)
        if triton.__version__.startswith(hopper_plans.VERSIONS):
            one_tile = side == 8 and triton.__version__.startswith("3.6.")
            assert made == (["first", "second"] if one_tile else ["second"])
        assert error(first, copy.deepcopy(block).double()(x.double())) < 1e-2
        assert all(torch.equal(block(x), first) for _ in range(20))
        weights = weights_of(block)
        without_roots = kernels.poly_block(x, weights, kernels.prepare_block(weights, dtype), None, True, 1e-6)
        assert error(without_roots, first.double()) < 1e-2
        block.mu2.B.weight.mul_(-1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # where there are no roots, and nothing is kept for later
            captured = block(x)
        now = block(x)
        graph.replay()
        for out in (now, captured):
            assert error(out, copy.deepcopy(block).double()(x.double())) < 1e-2 < error(first, out.double())


def cases(dtype=torch.bfloat16, images=5, side=7):
    block = perturbed(PolyBlock(192, shrinkage=4, drop_path=0.2)).cuda()
    x, grad = torch.randn(2, images, side, side, 192, device="cuda").to(dtype)
    factors = torch.rand(2, images, device="cuda").round() * 1.25
    return block, x, grad, factors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
# (389, 7): tiles in turns, and one not full; sides of 8 have kernels of their own
@pytest.mark.parametrize(("images", "side"), [(1, 1), (5, 7), (389, 7), (1, 8), (5, 8), (797, 8)])
def test_cuda_training_with_merged_branches(images, side, dtype, monkeypatch):
    made, kernel, last = [], launch_merged.second_lines, hopper.image_back
    monkeypatch.setattr(launch_merged, "second_lines", lambda *inputs: [made.append(True), kernel(*inputs)][1])
    monkeypatch.setattr(hopper, "image_back", lambda *inputs: [made.append(side == 8), last(*inputs)][1])
    torch.manual_seed(0)
    block, x, grad, factors = cases(dtype, images, side)
    block = block.to(dtype)
    expected, found = exact(block, x, grad, factors), run(block, x, grad, factors)
    if triton.__version__.startswith(hopper_plans.VERSIONS):
        assert made == [True] * (2 if side == 8 and triton.__version__.startswith("3.6.") else 1)
    assert error(found[0], expected[0]) < 1e-2
    close_gradients(block, found[1], expected[1], 2e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_cuda_compiled_with_merged_branches():
    torch.manual_seed(0)
    block, x, grad, _ = cases()
    block = block.bfloat16().eval()  # compiled code draws other random numbers
    found, expected = run(block, x, grad, forward=torch.compile(block, fullgraph=True)), exact(block, x, grad)
    assert error(found[0], expected[0]) < 1e-2
    close_gradients(block, found[1], expected[1], 2e-2)


if __name__ == "__main__":
    main(INTERPRETED)
