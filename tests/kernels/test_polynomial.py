"""Fused Poly-Blocks without norms beside the folded ones; on the CPU through Triton's interpreter, in other processes.

A check that needs the interpreter is a function `interpret_...` of this file, which is then run as a script.
"""

import re
from dataclasses import replace

import pytest
import torch
from interpreted import main, run_interpreted
from torch import nn

from multilinear import MONet, PolyBlock, fold, kernels
from multilinear.kernels import cpu
from multilinear.optimize import InType, _fault, _fuse_polynomials, optimize
from multilinear.optimize_blocks import pairs, runs

# arguments of blocks: every width of a registered model, and what networks for encrypted images have
BLOCKS = [
    {"dim": 48}, {"dim": 64, "shrinkage": 8}, {"dim": 96}, {"dim": 128, "shrinkage": 8}, {"dim": 192},
    {"dim": 192, "shrinkage": 8}, {"dim": 256, "shrinkage": 8},
    *({"dim": dim, "ranks": ranks, "shift": "zero", "shift_second": False, "shrinkage": 1}
      for dim, ranks in ((128, (64, 192)), (96, (48, 96)), (192, (64, 192)), (256, (128, 256)), (256, (128, 128)))),
]  # fmt: skip


def folded(depth, noise=0.1, **arguments):
    """A run of folded blocks in which no weight is at a round number."""
    blocks = nn.Sequential(*(PolyBlock(norm="affine", **arguments) for _ in range(depth))).eval()
    with torch.no_grad():
        for weight in blocks.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return fold(blocks).requires_grad_(False)


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def fused(blocks, dtype):
    from multilinear.kernels import polynomial

    (run,) = runs(nn.ModuleDict({"blocks": blocks}))
    return polynomial.Blocks(pairs(run.blocks), run.form.shifts, dtype)


def check(blocks, x, dtype=torch.float32, limit=1e-5):
    expected = blocks.double()(x.double())
    found = fused(blocks.float(), dtype)(x)
    assert found.shape == x.shape and found.dtype == dtype
    assert error(found, expected) < limit, (error(found, expected), blocks)


def interpret_widths():
    for arguments in BLOCKS:
        check(folded(2, **arguments), torch.randn(2, 2, 3, arguments["dim"]))


def interpret_grids():
    for border in ("keep", "zero"):
        for grid in ((1, 1), (1, 4), (4, 1), (3, 5)):
            check(folded(3, dim=32, shift=border), torch.randn(2, *grid, 32))
        for second in (True, False):
            # a low rank that is not merged though its branch stays in place; more rows than a tile has, and no multiple
            blocks = folded(2, dim=64, shift=border, shift_second=second, shrinkage=8)
            assert blocks[0].mu1.D is not None
            check(blocks, torch.randn(3, 5, 9, 64))
    # hidden widths with two parts, masked, or in quarters that are no multiple of eight
    for ranks, shrinkage in (((32, 96), 4), ((80, 48), 4), ((96, 16), 2), ((48, 176), 4), ((128, 64), 2)):
        check(folded(2, dim=64, ranks=ranks, shrinkage=shrinkage), torch.randn(2, 3, 2, 64))


def interpret_inputs():
    blocks = folded(2, dim=32)
    check(blocks, torch.randn(2, 32, 3, 2).permute(0, 2, 3, 1))  # not contiguous
    check(blocks, torch.randn(3, 2, 32))
    check(blocks, torch.randn(2, 1, 3, 2, 32))
    check(blocks, torch.randn(3 * 2 * 32 + 1)[1:].view(3, 2, 32))  # from an address that is no multiple of 16 bytes
    check(folded(1, dim=32), torch.randn(2, 3, 2, 32))
    # in 16 bits, the one kind of them that the interpreter knows
    check(folded(2, 0.02, dim=64, shrinkage=8), torch.randn(2, 3, 5, 64), torch.float16, 5e-3)
    module = fused(blocks.float(), torch.float32)
    x = torch.randn(2, 3, 2, 32)
    before = x.clone()
    first = module(x)
    assert torch.equal(x, before) and torch.equal(module(x), first)
    assert module(x[:0]).shape == (0, 3, 2, 32)


def interpret_small_tiles():
    """Those of GPUs with less shared memory."""
    from multilinear.kernels import polynomial

    for arguments in (BLOCKS[5], BLOCKS[7]):
        blocks, x = folded(2, **arguments), torch.randn(2, 5, 9, arguments["dim"])
        module = fused(blocks, torch.float32)
        assert module.tile != polynomial.SMALL
        module.tile = polynomial.SMALL
        assert error(module(x), blocks.double()(x.double())) < 1e-5


def interpret_parts():
    """More numbers than places are counted: image by image."""
    from multilinear import MultilinearError
    from multilinear.kernels import polynomial

    module, x = fused(folded(2, dim=32), torch.float32), torch.randn(5, 3, 2, 32)
    whole = module(x)
    polynomial.PLACES = 6 * 40 * 2 + 1
    assert error(module(x), whole.double()) < 1e-6
    polynomial.PLACES = 6 * 40
    with pytest.raises(MultilinearError, match="3 x 2 tokens is too large"):
        module(x)
    with pytest.raises(MultilinearError, match="height, width, 32"):
        module(x[..., :16])


CHECKS = {name: value for name, value in globals().items() if name.startswith("interpret_")}


@pytest.mark.parametrize("name", CHECKS)
def test_in_the_interpreter(name):
    pytest.importorskip("triton")
    run_interpreted(__file__, name)


LEFT = {
    "no shift": {"dim": 64, "shift": None},
    "more than 256 channels": {"dim": 384},
    "channels that are no sum of two powers of two": {"dim": 112},
    "a rank without chunks": {"dim": 64, "ranks": (64, 100)},
    "a low rank without quarters": {"dim": 64, "ranks": (48, 64), "shrinkage": 8},
}


@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_to_the_plain_code(why):
    pytest.importorskip("triton")
    from multilinear.kernels import polynomial

    run = next(runs(nn.ModuleDict({"blocks": folded(1, **LEFT[why])})))
    assert not polynomial.serves(*pairs(run.blocks)[0], run.form.shifts)


def test_no_kernel_without_a_gpu():
    run = next(runs(nn.ModuleDict({"blocks": folded(1, dim=64)})))
    assert kernels.polynomial_blocks(pairs(run.blocks), run.form.shifts, torch.bfloat16) is None


def polynomial_network(**arguments):
    """Two stages, of which the second has blocks that no kernel takes."""
    torch.manual_seed(0)
    sizes = {"widths": (32, 40), "depths": (2, 1), "patches": (2,), "norm": "affine", "num_classes": 10}
    return MONet(**{**sizes, **arguments}).eval()


@pytest.fixture
def another_kernel(monkeypatch):
    """The CPU's kernel in the place of the GPU's, for 32 channels; `spoil` is what is done to its results."""
    if not cpu.blocks_for(torch.float32):
        pytest.skip("no kernel on this CPU")

    class Blocks(cpu.Blocks):
        spoil = staticmethod(lambda x: x)

        def forward(self, x):
            return self.spoil(super().forward(x))

    def blocks(pairs, shifts, dtype):
        return Blocks(pairs, None, shifts, dtype) if len(pairs[0][0].C[0]) == 32 else None

    monkeypatch.setattr(kernels, "polynomial_blocks", blocks)
    return Blocks


def test_kernels_that_work_take_the_place_of_blocks(another_kernel):
    net, images = polynomial_network(), torch.randn(2, 3, 16, 24)
    root = nn.ModuleDict({"model": fold(net)})
    assert not _fuse_polynomials(root, torch.float32)
    stages = root["model"].stages
    assert isinstance(stages[0].blocks, cpu.Blocks) and isinstance(stages[1].blocks[0], PolyBlock)
    with torch.no_grad():
        assert error(root["model"](images), net(images).double()) < 1e-4


def too_little_memory(x):
    raise MemoryError("out of resource: shared memory\nand more")


def one_tile(x):
    """Wrong from the second tile on."""
    return torch.cat([x.flatten(0, -2)[:128], 0 * x.flatten(0, -2)[128:]]).view_as(x)


FAULTS = [
    (lambda x: 1.05 * x, "off by 0.05 of"),
    (lambda x: x * torch.nan, "off by nan"),
    (one_tile, "off by 0.7"),
    (too_little_memory, "MemoryError: out of resource: shared memory[.]"),
]


@pytest.mark.parametrize(("spoil", "fault"), FAULTS)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_a_kernel_that_does_not_work_is_named_and_not_used(another_kernel, spoil, fault, default):
    another_kernel.spoil = staticmethod(spoil)
    net, images = polynomial_network(depths=(3, 1)), torch.randn(2, 3, 16, 24)
    root, state = nn.ModuleDict({"model": fold(net)}), torch.get_rng_state()
    torch.set_default_dtype(default)
    try:
        with pytest.warns(RuntimeWarning, match="32 channels without norms is not used") as told:
            assert not _fuse_polynomials(root, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(told) == 1 and re.search(fault, str(told[0].message))
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        assert error(root["model"](images), net(images).double()) < 1e-4


@pytest.mark.parametrize("arguments", BLOCKS, ids=str)
@pytest.mark.parametrize(("layer", "part"), [(0, "B"), (1, "A"), (1, "C")])
def test_a_bias_that_is_forgotten_is_a_fault(another_kernel, monkeypatch, arguments, layer, part):
    def without(pair):
        changed = list(pair)
        weight, bias = getattr(pair[layer], part)
        changed[layer] = replace(pair[layer], **{part: (weight, 0 * bias)})
        return tuple(changed)

    run = next(runs(nn.ModuleDict({"blocks": folded(1, **arguments)})))
    for change, found in ((tuple, ""), (without, "its results are off by 0")):

        def blocks(pairs, shifts, dtype, change=change):
            return cpu.Blocks(list(map(change, pairs)), None, shifts, dtype)

        monkeypatch.setattr(kernels, "polynomial_blocks", blocks)
        assert _fault(run, torch.float32)[:24] == found


@pytest.mark.parametrize("arguments", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_alone_is_no_fault(monkeypatch, arguments, dtype):
    """Plain code in 16 bits, which rounds more often than the kernel, in its place."""

    def blocks(pairs, shifts, dtype):
        return nn.Sequential(InType(plain(pairs[0], shifts), dtype), InType(plain(pairs[1], shifts), dtype))

    def plain(pair, shifts):
        block = folded(1, **arguments)[0]
        for layer, weights in zip((block.mu1, block.mu2), pair, strict=True):
            for name in "ADBC":
                if getattr(layer, name) is not None:
                    weight, bias = getattr(weights, name)
                    getattr(layer, name).weight.copy_(weight), getattr(layer, name).bias.copy_(bias)
            if layer.a is not None:
                layer.a.copy_(weights.shift_a)
        return block

    monkeypatch.setattr(kernels, "polynomial_blocks", blocks)
    run = next(runs(nn.ModuleDict({"blocks": folded(1, **arguments)})))
    assert _fault(run, dtype) == ""


def test_networks_with_norms_are_left(another_kernel):
    root = nn.ModuleDict({"model": fold(polynomial_network(norm="layer"))})
    assert not _fuse_polynomials(root, torch.float32)
    assert isinstance(root["model"].stages[0].blocks[0], PolyBlock)


def test_all_blocks_or_some(another_kernel):
    root = nn.ModuleDict({"model": fold(polynomial_network(widths=(32,), depths=(2,)))})
    assert _fuse_polynomials(root, torch.float32)


def test_blocks_with_hooks_are_left():
    blocks = folded(2, dim=32)
    assert next(runs(nn.ModuleDict({"blocks": blocks})))
    blocks[1].mu1.register_forward_hook(lambda *_: None)
    assert not list(runs(nn.ModuleDict({"blocks": blocks})))


@pytest.mark.gpu
def test_optimized_networks_on_a_gpu():
    net = polynomial_network(widths=(64, 128), depths=(3, 2)).cuda()
    fast = optimize(net)
    names = [type(module).__module__ for module in fast.modules()]
    assert names.count("multilinear.kernels.polynomial") == 2
    for shape in ((1, 3, 16, 16), (5, 3, 32, 48)):
        images = torch.randn(shape, device="cuda")
        with torch.no_grad():
            assert error(fast(images), net(images).double()) < 5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arguments", BLOCKS, ids=str)
def test_on_a_gpu(arguments, dtype):
    torch.manual_seed(0)
    for grid in ((1, 1), (7, 5), (8, 8), (28, 28)):
        for depth, limit in ((1, 5e-3), (3, 1e-2)):
            blocks = folded(depth, 0.02, branch_scale=0.3, **arguments).cuda()
            x = torch.randn(37, *grid, arguments["dim"], device="cuda")
            run = next(runs(nn.ModuleDict({"blocks": blocks})))
            module = kernels.polynomial_blocks(pairs(run.blocks), run.form.shifts, dtype)
            assert module is not None
            found = module(x)
            assert error(found, blocks.double()(x.double())) < limit
            assert torch.equal(module(x), found)


if __name__ == "__main__":
    main(CHECKS)
