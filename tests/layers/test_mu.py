import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from multilinear.layers import (
    INITIALISERS,
    NORMS,
    MuLayer,
    PatchEmbed,
    PolyBlock,
    compile_blocks,
    init_weights,
    spatial_shift,
)


def test_equation_one():
    layer = MuLayer(6, 8, 5, shrinkage=2, bias=False).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    a, b, c, d = (matrix.weight for matrix in (layer.A, layer.B, layer.C, layer.D))
    expected = ((x @ a.T) * (x @ d.T @ b.T) + x @ a.T) @ c.T
    torch.testing.assert_close(layer(x), expected)


@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_takes_any_leading_shape(leading, width, hidden, shrinkage):
    layer = MuLayer(width, hidden, 3, shrinkage=shrinkage)
    assert layer(torch.randn(*leading, width)).shape == (*leading, 3)


def test_drops_in_for_an_mlp_inside_sequential():
    net = torch.nn.Sequential(MuLayer(4, 16), torch.nn.Linear(4, 2))
    net(torch.randn(3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_parameters_follow_the_papers_count_without_norms_and_biases():
    c, r, s = 384, 3, 4
    block = PolyBlock(c, expansion=r, shrinkage=s, norm="none")
    weights = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    assert weights == c**2 * (2 * r + 2 + (r**2 + r + 2) / s)
    assert round(weights / 1e6, 2) == 1.70


def test_a_layer_norm_is_shared_and_a_batch_norm_is_not():
    assert PolyBlock(8, norm="layer").norm2 is None
    block = PolyBlock(8, norm="batch")
    assert block.norm2 is not None
    assert block.norm2 is not block.norm1


@pytest.mark.parametrize("norm", list(NORMS))
def test_block_gradients(norm):
    block = PolyBlock(4, norm=norm).double()
    x = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,), atol=1e-5)


def test_there_are_the_papers_eight_initialisers():
    assert len(INITIALISERS) == 8


@pytest.mark.parametrize("name", list(INITIALISERS))
def test_initialisers_differ_from_each_other_and_give_finite_outputs(name):
    torch.manual_seed(0)
    layer = MuLayer(64, init=name)
    spread = {"xavier_uniform": 0.125, "xavier_normal": 0.125, "kaiming_uniform": 0.177, "kaiming_normal": 0.177,
              "lecun_normal": 0.125, "normal": 0.02, "sparse": 0.019, "pytorch": 0.072}  # fmt: skip
    assert layer.A.weight.std().item() == pytest.approx(spread[name], rel=0.1)
    assert torch.isfinite(layer(torch.randn(2, 64))).all()
    zeros = (layer.A.weight == 0).float().mean().item()
    assert (zeros > 0.05) == (name == "sparse")


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown norm 'group'; known: affine, batch, layer, none"):
        MuLayer(4, norm="group")
    with pytest.raises(ValueError, match="unknown initialiser 'orthogonal'; known: kaiming_normal, .*xavier_uniform"):
        init_weights(torch.nn.Linear(2, 2), "orthogonal")


def test_a_second_branch_may_stay_in_place():
    layer = MuLayer(8, shift="zero", shift_second=False)
    x = torch.randn(2, 3, 3, 8)
    first, second = spatial_shift(layer.A(x), "zero"), layer.B(layer.D(x))
    torch.testing.assert_close(layer(x), layer.C(first + first * second))


def test_ranks_set_both_hidden_widths():
    block = PolyBlock(8, ranks=(5, 7), shrinkage=1)
    assert (block.mu1.A.out_features, block.mu2.A.out_features) == (5, 7)
    assert block(torch.randn(1, 3, 3, 8)).shape == (1, 3, 3, 8)


def test_products_tell_their_range_when_watched():
    layer = MuLayer(4)
    layer(torch.randn(3, 4))
    assert layer.range is None
    layer.watch_range = True
    layer(torch.zeros(3, 4))
    assert layer.range == 0


def test_only_what_no_kernel_takes_is_compiled(monkeypatch):
    net = nn.Sequential(PatchEmbed(2, 3, 16), PolyBlock(16), PolyBlock(16), nn.Flatten())
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    monkeypatch.setattr(PolyBlock, "fuses", lambda block: block is net[1])
    compile_blocks(net)
    assert compiled == [net[0], net[2]]
    compile_blocks(net, nn.Flatten)
    assert compiled[2:] == [net[0], net[2], net[3]]
    monkeypatch.setattr(PolyBlock, "fuses", lambda block: True)
    compile_blocks(net, nn.Flatten)
    assert len(compiled) == 5
