"""The fused Poly-Block against the plain one in float64; on the CPU through Triton's interpreter, in other processes.

A check that needs the interpreter is a function `interpret_...` of this file, which is then run as a script.
"""

import copy
import subprocess
import sys

import pytest
import torch
from interpreted import main, run_interpreted
from torch.nn import functional as F

from multilinear import kernels
from multilinear.layers import PolyBlock
from multilinear.models.monet import MONet

# every width of a registered model with its shrinkage, but for those that are left to the plain code
WIDTHS = [(48, 4), (64, 8), (96, 4), (128, 8), (192, 4), (192, 8), (256, 8)]


def weights_of(block):
    return [block.get_parameter(name) for name in kernels.BLOCK_PARAMETERS]


def perturbed(block, values=()):
    """The block with no parameter left at a round number, then with `values` put into some of them."""
    with torch.no_grad():
        for weight in block.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        for name, value in dict(values).items():
            block.get_parameter(name).fill_(value)
    return block


def run(block, x, grad, factors=None, forward=None):
    """Output and gradients by name; `factors` take the place of the random ones of stochastic depth."""
    if factors is not None:
        given = iter(factors)
        block.drop_path.factors = lambda examples: next(given).to(x.dtype)
    x = x.detach().requires_grad_()
    out = (block if forward is None else forward)(x)
    found = torch.autograd.grad(out, [x, *weights_of(block)], grad.to(out.dtype))
    return out.detach(), dict(zip(("x", *kernels.BLOCK_PARAMETERS), found, strict=True))


def exact(block, x, grad, factors=None):
    return run(copy.deepcopy(block).double(), x.double(), grad.double(), factors)


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def check(block, x, factors=None):
    """One interpreted block against float64."""
    grad = torch.randn(x.shape)
    expected = exact(block, x, grad, factors)
    found = run(block, x, grad, factors, forward=lambda x: block._fused(x, torch.float32))
    ranks = [tuple(mu.B.weight.shape) for mu in (block.mu1, block.mu2)]
    case = f"{tuple(x.shape)}, {ranks}, {block.mu1.shift}, {factors}"
    assert error(found[0], expected[0]) < 1e-5, case
    for name, e in expected[1].items():
        # some gradients vanish, as those of B and D where alpha is zero
        size = size_of(block, name, expected[1])
        distance = (found[1][name].double() - e).norm() / (size if size > 0 else 1)
        assert distance < 1e-4, f"{name}: {distance}, {case}"


def interpret_widths():
    for dim, shrinkage in WIDTHS:
        check(perturbed(PolyBlock(dim, shrinkage=shrinkage)), torch.randn(2, 2, 3, dim))


def interpret_grids():
    kept = torch.tensor([0.0, 1.25, 1.25]), torch.tensor([1.25, 0.0, 1.25])
    for border in ("keep", "zero"):
        for grid in ((1, 1), (1, 4), (4, 1), (3, 5)):
            check(perturbed(PolyBlock(32, shift=border)), torch.randn(2, *grid, 32))
        check(perturbed(PolyBlock(32, shift=border, drop_path=0.2)), torch.randn(3, 3, 2, 32), kept)
        # more rows than the largest tiles have, and no multiple
        check(perturbed(PolyBlock(128, shift=border, shrinkage=8, drop_path=0.2)), torch.randn(3, 5, 9, 128), kept)
    # hidden widths that have two parts, are masked, or move in quarters that are no multiple of eight
    for ranks, shrinkage in (((32, 96), 4), ((80, 48), 4), ((96, 16), 2), ((48, 176), 4)):
        check(perturbed(PolyBlock(64, ranks=ranks, shrinkage=shrinkage)), torch.randn(2, 3, 2, 64))


def interpret_values():
    for values in (
        {"mu1.norm_b.bias": 3.0, "mu2.norm_b.bias": 3.0, "mu1.alpha": -0.7, "mu2.alpha": -0.7},
        {"mu1.norm_a.bias": -3.0, "mu2.norm_a.bias": 2.0, "norm1.bias": 1.5},
        {"mu1.alpha": 0.0, "mu2.alpha": 0.0},
        {f"{mu}.{part}.bias": 2.0 for mu in ("mu1", "mu2") for part in "ABCD"},
    ):
        block = perturbed(PolyBlock(48), values)
        check(block, torch.randn(2, 3, 3, 48) + 2)
    # biases that differ from channel to channel, as those that are all the same vanish in the norms
    block = perturbed(PolyBlock(64, shift="zero"))
    with torch.no_grad():
        for mu in (block.mu1, block.mu2):
            for part in (mu.A, mu.B, mu.D, mu.norm_a, mu.norm_b):
                part.bias.add_(3 * torch.randn_like(part.bias))
    check(block, torch.randn(2, 3, 3, 64))
    x = torch.randn(2, 2, 2, 64)
    x[0, 1, 0] = 2.0  # a row without variance
    check(perturbed(PolyBlock(64)), x)
    check(perturbed(PolyBlock(64)), torch.randn(2, 64, 3, 2).permute(0, 2, 3, 1))  # not contiguous
    block = perturbed(PolyBlock(48))
    with torch.no_grad():  # nothing is kept for a way back
        x = torch.randn(1, 2, 2, 48)
        assert error(block._fused(x, torch.float32), block.double()(x.double())) < 1e-5
    # in 16 bits, the one kind of them that the interpreter knows
    block = perturbed(PolyBlock(64, shrinkage=8)).half()
    x, grad = torch.randn(2, 2, 3, 5, 64).half()
    found = run(block, x, grad, forward=lambda x: block._fused(x, torch.float16))
    expected = exact(block, x, grad)
    assert error(found[0], expected[0]) < 2e-3
    close_gradients(block, found[1], expected[1], 5e-3)
    norm_back_over_several_tiles()
    sums_of_many_programs()


def norm_back_over_several_tiles():
    """Fewer programs than tiles, which a launch has for tens of thousands of rows only."""
    from multilinear.kernels.block_backward import norm_back

    x, dn, grad = torch.randn(3, 37, 48)
    keep = torch.randn(5)  # images of 8 rows
    norm = torch.randn(2, 48)
    out, sums = torch.empty(37, 48), torch.empty(2, 3, 48)
    norm_back[(2,)](dn, x, grad, keep, norm, out, sums, 37, 8, 1e-6, C=48, DROP=True, BLOCK=64, T=8)
    leaves = [t.double().requires_grad_() for t in (x, *norm)]
    expected = F.layer_norm(leaves[0], (48,), *leaves[1:], 1e-6)
    dx, *rest = torch.autograd.grad(expected, leaves, dn.double())
    assert error(out, grad.double() + dx) < 1e-5
    last = (grad.double() * keep.repeat_interleave(8)[:37, None]).sum(0)
    for found, e in zip(sums.sum(0), (*rest, last), strict=True):
        assert error(found, e) < 1e-5


def sums_of_many_programs():
    """More rows than a launch has for a few images, in several parts and several times as many."""
    from multilinear.kernels.block_gradient import _summed
    from multilinear.kernels.block_sizes import Sizes

    for rows in ((1, 2, 3), (5, 130, 700), (2112, 300, 5000)):
        first, second, mu1 = torch.randn(rows[0], 3, 48), torch.randn(rows[1], 3, 48), torch.randn(rows[2], 4, 32)
        lifting, rest = torch.randn(rows[1], 40, 48), torch.randn(rows[0], 32 * (48 + 16))
        weight = torch.empty(48, 32)
        apart = second[:, :2], second[:, 2]
        found, *products = _summed(first, mu1, apart, lifting, rest, weight, Sizes(48, 32, 8, 48, 12))
        assert len(found) <= 32
        assert error(products[0], lifting.double().sum(0)) < 1e-5
        ends = rest.double().sum(0).split([32 * 48, 32 * 16])
        assert error(weight.flatten(), ends[0]) < 1e-5
        assert error(products[1].flatten(), ends[1]) < 1e-5
        expected = torch.cat([part.double().sum(0).flatten() for part in (first, second, mu1)])
        assert error(found.sum(0), expected) < 1e-5


def interpret_product_with_the_input():
    """Gradients of the shared norm and of what follows it from a product with x instead of norm(x), for which rows were
    divided by the deviation: what kernels for Hopper leave."""
    from multilinear.kernels.block_gradient import FIRST_WRITES, _finish, _summed
    from multilinear.kernels.block_sizes import sizes_of

    block = perturbed(PolyBlock(64, shrinkage=8)).requires_grad_(False)
    weights = weights_of(block)
    named, s = dict(zip(kernels.BLOCK_PARAMETERS, weights, strict=True)), sizes_of(weights)
    x, grad, du = torch.randn(37, 64) * torch.rand(37, 1) + 3, torch.randn(37, 64), torch.randn(37, 72)
    mean, deviation = x.mean(1, keepdim=True), (x.var(1, correction=0, keepdim=True) + 1e-6).sqrt()
    scaled = du / deviation
    lines = torch.stack([part.sum(0) for part in torch.cat([grad, scaled * mean, du], 1).chunk(3)])
    second, mu1, factor = torch.randn(5, 3, 64), torch.randn(3, 4, 64), torch.randn(64, 16)
    found = {name: torch.full_like(weight, torch.nan) for name, weight in named.items()}
    found["mu1.C.weight"].zero_()  # which comes with the product for the factor
    apart = second[:, :2], second[:, 2]
    sums, *products = _summed(lines, mu1, apart, scaled.T @ x, factor, found["mu1.C.weight"], s)
    _finish(*products, sums, torch.randn(192), named, found, s)
    assert all(found[name].isfinite().all() for name in FIRST_WRITES)
    parts = "norm1", "mu1.A", "mu1.D"
    leaves = [named[f"{part}.{name}"].double().requires_grad_() for part in parts for name in ("weight", "bias")]
    n = F.layer_norm(x.double(), (64,), *leaves[:2], 1e-6)
    u = torch.cat([F.linear(n, *leaves[2:4]), F.linear(n, *leaves[4:])], 1)
    expected = torch.autograd.grad(u, leaves, du.double())
    before = second.sum(0)
    assert error(found["norm1.weight"], expected[0] + before[0]) < 1e-5
    assert error(found["norm1.bias"], expected[1] + before[1]) < 1e-5
    for name, e in zip(("A.weight", "A.bias", "D.weight", "D.bias"), expected[2:], strict=True):
        assert error(found[f"mu1.{name}"], e) < 1e-5, name
    assert error(found["mu1.C.bias"], grad.double().sum(0)) < 1e-5
    assert error(found["mu2.C.bias"], before[2].double()) < 1e-5


def interpret_operators():
    from torch.library import opcheck

    from multilinear.kernels import block_gradient
    from multilinear.kernels.block import poly_block, prepare

    block = perturbed(PolyBlock(32, expansion=1))
    weights, frozen = weights_of(block), [weight.detach() for weight in weights_of(block)]
    x = torch.randn(2, 2, 2, 32)
    kept = torch.tensor([0.0, 1.25]), torch.tensor([1.25, 1.25])
    prepared = prepare(frozen, torch.float32)
    opcheck(prepare, (frozen, torch.float32))
    opcheck(prepare, (frozen, torch.bfloat16))
    for keep in (kept, (None, None)):
        opcheck(poly_block, (x, *keep, frozen, prepared, True, 1e-6, False))
        opcheck(poly_block, (x.clone().requires_grad_(), *keep, weights, prepared, False, 1e-6, True))
        out, saved = poly_block(x, *keep, frozen, prepared, True, 1e-6, True)
        opcheck(
            block_gradient.poly_block_backward,
            (torch.randn_like(out), x, saved, *keep, frozen, prepared, True, 1e-6),
        )
    # for outputs in half precision and weights in another: shapes, types and memory are those that were announced
    x, prepared = x.half(), prepare(frozen, torch.float16)
    for save in (False, True):
        arguments = (x, None, None, frozen, prepared, True, 1e-6, save)
        out, saved = agrees_with_fake(poly_block, arguments)
    agrees_with_fake(block_gradient.poly_block_backward, (out, x, saved, None, None, frozen, prepared, True, 1e-6))


def agrees_with_fake(operator, arguments):
    """The outputs, which must be as announced and each in memory of its own."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    with FakeTensorMode() as mode:
        announced = tree_leaves(operator(*tree_map_only(torch.Tensor, mode.from_tensor, arguments)))
    outputs = operator(*arguments)
    found = tree_leaves(outputs)
    for real, fake in zip(found, announced, strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())
    tensors = [t for t in (*found, *tree_leaves(arguments)) if isinstance(t, torch.Tensor) and t.numel()]
    places = [t.untyped_storage().data_ptr() for t in tensors]
    assert len(set(places)) == len(places)
    return outputs


def interpret_prepared_numbers():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for wide in (torch.float32, torch.float16):
            prepared_numbers(PolyBlock(64, shrinkage=8).to(wide), dtype)
    prepared_numbers(PolyBlock(48, ranks=(48, 272)), torch.float16)  # more rows than a program takes at once


def prepared_numbers(block, dtype):
    from multilinear.kernels.block import prepare
    from multilinear.kernels.block_sizes import Prepared

    block = perturbed(block, {"mu2.alpha": -0.7})
    frozen = [weight.detach() for weight in weights_of(block)]
    ready = Prepared(*agrees_with_fake(prepare, (frozen, dtype)))
    mu = copy.deepcopy(block).double().mu2.requires_grad_(False)
    # the interpreter cuts bfloat16 off instead of rounding
    close = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for centred, gram, stack, matrix, part, scale, shift in (
        (ready.first, ready.gram, ready.stack, ready.A2, mu.A, mu.norm_a.weight, mu.norm_a.bias),
        (ready.second, ready.low_gram, ready.low_stack, ready.B2, mu.B, mu.alpha * mu.norm_b.weight,
         mu.alpha * mu.norm_b.bias + 1),
    ):  # fmt: skip
        weight, bias = part.weight - part.weight.mean(0), part.bias - part.bias.mean()
        assert error(centred, torch.cat([weight, bias[:, None]], 1)) < 1e-6
        width = len(gram)
        assert error(gram, weight.T @ weight) < close
        assert error(stack[: len(centred)], scale[:, None] * weight) < close
        assert error(stack[len(centred) + width], weight.T @ bias) < close
        assert stack[len(centred) + width + 1 : len(centred) + width + 8].abs().max() == 0
        assert error(matrix[:, :width], scale[:, None] * weight) < close
        # what the extra columns of a row, [1, 1, r', r - r', r'] for its r and that as stored, make of the matrix's
        r = torch.rand(9).double() * 10
        stored = r.to(dtype).double()
        ones, none = torch.ones_like(r), torch.zeros_like(r)
        extras = torch.stack([ones, ones, stored, (r - stored).to(dtype).double(), stored, *[none] * 11], 1)
        expected = scale * bias + r[:, None] * shift
        found = extras @ matrix[:, width:].double().T
        # three terms, each off by the square of bfloat16's rounding, 2**-16; float16's smallest numbers are 6e-8 apart
        size = (scale * bias).abs() + (r[:, None] * shift).abs()
        assert ((found - expected).abs() < 5e-5 * size + 1e-6).all()
        assert matrix[:, width + 5 :].abs().max() == 0
    assert error(ready.D2, mu.D.weight) < close
    assert error(ready.lifting, torch.cat([block.mu1.A.weight, block.mu1.D.weight]).detach().double()) < close


INTERPRETED = {name: value for name, value in list(globals().items()) if name.startswith("interpret_")}


@pytest.mark.parametrize("name", INTERPRETED)
def test_in_the_interpreter(name):
    run_interpreted(__file__, name)


@pytest.fixture
def calls(monkeypatch):
    """Records the calls of the fused block; afterwards the kernels are on again."""
    made, fused = [], kernels.poly_block

    def record(x, *rest):
        made.append(x.dtype)
        return fused(x, *rest)

    monkeypatch.setattr(kernels, "poly_block", record)
    torch.manual_seed(0)
    yield made
    kernels.use_kernels(True)


def size_of(block, name, expected):
    """What the error of a gradient is measured by.

    Alpha's is a sum of w s + b t over channels, where alpha s and alpha t are the gradients of the norm's weight w and
    bias b. Its terms may cancel, their errors do not: measure by the terms if the sum is smaller.
    """
    size = expected[name].norm()
    alpha = block.get_parameter(name).double().abs().item() if name.endswith("alpha") else 0
    if alpha:
        norms = [f"{name.removesuffix('alpha')}norm_b.{part}" for part in ("weight", "bias")]
        parts = [block.get_parameter(norm).double() * expected[norm] for norm in norms]
        size = max(size, sum(part.norm() for part in parts) / alpha)
    return size


def close_gradients(block, found, expected, tolerance):
    for name, e in expected.items():
        assert (found[name].double() - e).norm() < tolerance * size_of(block, name, expected), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "shrinkage", "side"),
    [(48, 4, 7), (96, 4, 8), (64, 8, 56), (128, 8, 28), (192, 8, 14), (192, 8, 7), (128, 8, 56), (192, 8, 28),
     (256, 8, 14), (192, 4, 8)],
)  # fmt: skip
def test_cuda_agrees_with_float64(dim, shrinkage, side, calls):
    block = perturbed(PolyBlock(dim, shrinkage=shrinkage)).cuda().bfloat16()
    x, grad = torch.randn(2, 4, side, side, dim, device="cuda").bfloat16()
    expected = exact(block, x, grad)
    found = run(block, x, grad)
    assert calls == [torch.bfloat16]
    kernels.use_kernels(False)
    plain = run(block, x, grad)
    assert len(calls) == 1
    assert error(found[0], expected[0]) < min(1e-2, 1.1 * error(plain[0], expected[0]) + 1e-4)
    close_gradients(block, found[1], expected[1], 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "shrinkage"), [(64, 8), (128, 8), (192, 4)])
def test_cuda_tokens_far_from_zero(dim, shrinkage, calls):
    """On the way back rows are divided by their deviation, and what their mean gives is taken off in the end. Where 16
    bits leave too little of such values, plain code is off too."""
    block = perturbed(PolyBlock(dim, shrinkage=shrinkage)).cuda().bfloat16()
    x, grad = torch.randn(2, 16, 8, 8, dim, device="cuda")
    x = (x * (0.5 + 3 * torch.rand_like(x[..., :1])) + 10 * torch.randn_like(x[..., :1])).bfloat16()
    grad = grad.bfloat16()
    for _ in range(2):
        found, expected = run(block, x, grad), exact(block, x, grad)
        kernels.use_kernels(False)
        plain = run(block, x, grad)
        kernels.use_kernels(True)
        assert error(found[0], expected[0]) < 1e-2
        for name, e in expected[1].items():
            most = max(2e-2 * size_of(block, name, expected[1]), 1.25 * (plain[1][name].double() - e).norm())
            assert (found[1][name].double() - e).norm() < most, name
        x[0, 0] = 20.0  # then without any variance, which makes gradients of these tokens by far the largest
    assert len(calls) == 2


@pytest.fixture
def company():
    """Another process on the same GPU: now and then it stops ours at any place, and warps wait long for each other."""
    work = "import torch; x = torch.eye(4096, device='cuda'); print('.', flush=True)\nwhile True: x = x @ x"
    with subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        yield
        process.kill()


@pytest.mark.gpu
@pytest.mark.usefixtures("company")
@pytest.mark.parametrize(
    ("dim", "shrinkage", "side"), [(64, 8, 56), (128, 8, 56), (192, 8, 28), (192, 4, 8), (256, 8, 14)]
)
def test_cuda_programs_take_several_tiles_and_always_do_the_same(dim, shrinkage, side):
    block = perturbed(PolyBlock(dim, shrinkage=shrinkage)).cuda().bfloat16()
    images = 100_000 // side**2  # a processor has four groups of warps or fewer, each with 64 tokens at a time
    x, grad = torch.randn(2, images, side, side, dim, device="cuda").bfloat16()
    expected = exact(block, x, grad)
    first = run(block, x, grad)
    assert error(first[0], expected[0]) < 1e-2
    close_gradients(block, first[1], expected[1], 2e-2)
    for _ in range(20):
        # whatever is read before it is written is now seen
        junk = [torch.full((size,), torch.nan, device="cuda") for size in (1 << 16,) * 100 + (1 << 26,) * 20]
        del junk
        out, found = run(block, x, grad)
        assert torch.equal(out, first[0])
        assert [name for name, value in found.items() if not torch.equal(value, first[1][name])] == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("border", ["keep", "zero"])
def test_cuda_under_autocast(dtype, border, calls):
    block = perturbed(PolyBlock(64, shift=border, drop_path=0.2)).cuda()
    x = torch.randn(3, 64, 7, 9, device="cuda").permute(0, 2, 3, 1)
    grad = torch.randn(64, device="cuda").expand(x.shape)
    factors = torch.tensor([[0.0, 1.25, 1.25], [1.25, 0.0, 1.25]], device="cuda")
    with torch.autocast("cuda", dtype):
        out, found = run(block, x, grad, factors)
    assert calls == [dtype]
    assert out.dtype == torch.float32 and {f.dtype for f in found.values()} == {torch.float32}
    expected = exact(block, x, grad, factors)
    assert error(out, expected[0]) < 1e-2
    close_gradients(block, found, expected[1], 2e-2)


def same(found, expected):
    """Two runs of the same kernels: as close as products of matrices in another order."""
    assert error(found[0], expected[0].double()) < 1e-3
    for name, e in expected[1].items():
        # the sum for alpha may cancel
        assert (found[1][name].double() - e.double()).norm() < 1e-2 * max(e.norm(), 1), name


@pytest.fixture
def small():
    torch.manual_seed(0)
    block = perturbed(PolyBlock(64, drop_path=0.5)).cuda().bfloat16()
    x, grad = torch.randn(2, 6, 7, 5, 64, device="cuda").bfloat16()
    return block, x, grad


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_cuda_compiled(small):
    block, x, grad = small
    block.eval()  # compiled code draws other random numbers
    same(run(block, x, grad, forward=torch.compile(block, fullgraph=True)), run(block, x, grad))


@pytest.mark.gpu
def test_cuda_checkpointed(small, calls):
    from torch.utils.checkpoint import checkpoint

    block, x, grad = small
    torch.manual_seed(1)
    expected = run(block, x, grad)
    torch.manual_seed(1)
    same(run(block, x, grad, forward=lambda x: checkpoint(block, x, use_reentrant=False)), expected)
    assert len(calls) == 3


@pytest.mark.gpu
def test_cuda_graph(small):
    block, x, grad = small
    block.eval()  # the same results at every replay
    x = x.clone().requires_grad_()

    def step():
        out = block(x)
        return out, torch.autograd.grad(out, [x, *weights_of(block)], grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, found = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        block.mu1.C.weight.mul_(2)  # weights are prepared within the graph
    graph.replay()
    found = dict(zip(("x", *kernels.BLOCK_PARAMETERS), found, strict=True))
    same((out, found), run(block, x, grad))


@pytest.mark.gpu
def test_cuda_inference_keeps_prepared_weights(small):
    block, x, _ = small
    block.eval().requires_grad_(False)
    with torch.no_grad():
        before = block(x)
        assert torch.equal(block(x), before) and block._prepared is not None
        block.mu2.C.weight.mul_(2)
        assert not torch.equal(block(x), before)
    assert error(block(x), copy.deepcopy(block).double()(x.double())) < 1e-2


@pytest.mark.gpu
def test_cuda_takes_parts_of_other_tensors(calls):
    """Neither the input nor the gradient starts at an address that a tile could be copied from."""
    block = perturbed(PolyBlock(64, shrinkage=8)).cuda().bfloat16()
    x, grad = (torch.randn(1 + 2 * 7 * 9 * 64, device="cuda").bfloat16()[1:].view(2, 7, 9, 64) for _ in range(2))
    found, expected = run(block, x, grad), exact(block, x, grad)
    assert len(calls) == 1
    assert error(found[0], expected[0]) < 1e-2
    close_gradients(block, found[1], expected[1], 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shrinkage", [4, 8])
def test_cuda_training_with_and_without_kernels(shrinkage, calls):
    images, labels = torch.randn(32, 3, 32, 32, device="cuda"), torch.randint(10, (32,), device="cuda")
    start = MONet(widths=(64,), depths=(2,), patches=(2,), num_classes=10, shrinkage=shrinkage).cuda()

    def losses():
        net = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
        found = []
        for _ in range(30):
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found)

    fused = losses()
    assert len(calls) == 60
    kernels.use_kernels(False)
    plain = losses()
    assert len(calls) == 60
    assert plain[-1] < 0.9 * plain[0]
    assert ((fused - plain).abs() < 0.02 * plain).all()


if __name__ == "__main__":
    main(INTERPRETED)
