import numpy as np
import pytest
import sympy
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import multilinear as ml
from multilinear.layers import MuLayer, PolyBlock


class TestAudit:
    def test_the_published_network_is_not_a_polynomial_and_each_layer_norm_is_named(self):
        model = ml.create("monet_ms_t")
        found = ml.audit(model)
        assert not found.polynomial
        assert found.degree is found.depth is None
        norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
        assert {obstacle.module for obstacle in found.obstacles} == norms
        assert {obstacle.operation for obstacle in found.obstacles} == {"layer_norm"}

    @pytest.mark.parametrize("norm", ["batch", "affine"])
    def test_with_a_foldable_norm_it_is_one(self, norm):
        folded = ml.fold(ml.create("monet_ms_t", norm=norm))
        found = ml.audit(folded)
        assert found.polynomial
        assert found.obstacles == []
        assert found.degree == 4**34 == folded.degree
        assert found.depth == 68
        assert found.operations["product"] == 68

    @pytest.mark.parametrize(
        ("name", "reasons"),
        [
            ("resnet50", {"relu", "max_pool2d"}),
            ("vit_tiny_patch16_224", {"layer_norm", "gelu", "scaled_dot_product_attention"}),
            ("mixer_s32_224", {"layer_norm", "gelu"}),
        ],
    )
    def test_other_networks_are_not_and_why(self, name, reasons):
        found = ml.audit(timm.create_model(name), (3, 224, 224))
        assert not found.polynomial
        assert {obstacle.operation for obstacle in found.obstacles} == reasons
        assert all(reason in str(found) for reason in reasons)

    @pytest.mark.parametrize(
        ("function", "degree", "depth"),
        [
            (lambda x: x + 1, 1, 0),
            (lambda x: x * x * x, 3, 2),
            (lambda x: (x * x) * (x * x), 4, 2),
            (lambda x: x**5, 5, 3),
            (lambda x: x / 2 + x.mean(), 1, 0),
            (lambda x: x @ x.transpose(-1, -2), 2, 1),
            (lambda x: torch.addcmul(x, x, x), 2, 1),
            (lambda x: torch.einsum("bij,bjk,bkl->bil", x, x, x), 3, 1),
            (lambda x: 2 / x, None, None),
            (lambda x: x.abs(), None, None),
            (lambda x: x**0.5, None, None),
            (lambda x: x / x.mean(), None, None),
            (lambda x: torch.where(x > 0, x, 2 * x), None, None),
            (lambda x: torch.div(x, 2, rounding_mode="floor"), None, None),
            (lambda x: x.relu() * 0, None, None),
            (lambda x: x.int().float(), None, None),
            (lambda x: x.double() + 1, 1, 0),
            (lambda x: torch.cat(torch.split(x, 1, dim=1), dim=1), 1, 0),
        ],
    )
    def test_degree_and_depth_of_plain_functions(self, function, degree, depth):
        class Net(nn.Module):
            def forward(self, x):
                return function(x)

        found = ml.audit(Net(), (3, 3))
        assert (found.degree, found.depth, found.polynomial) == (degree, depth, degree is not None)

    def test_a_batch_norm_on_statistics_of_the_batch_is_no_affine_map(self):
        assert not ml.audit(nn.BatchNorm2d(3, track_running_stats=False), (3, 2, 2)).polynomial
        assert ml.audit(nn.BatchNorm2d(3), (3, 2, 2)).degree == 1

    def test_the_mode_of_every_module_is_restored(self):
        model = ml.create("monet_micro").train()
        model.stages[0].blocks[0].eval()
        before = [module.training for module in model.modules()]
        ml.audit(model)
        assert [module.training for module in model.modules()] == before


@pytest.fixture(scope="module")
def cost_of_monet_t():
    return ml.cost(ml.create("monet_t"))


class TestCost:
    @pytest.mark.parametrize(("name", "side"), [("monet_ms_t", 64), ("monet_nano", 32), ("resnet18", 64),
                                                ("vit_tiny_patch16_224", 224), ("mixer_s32_224", 224)])  # fmt: skip
    def test_macs_equal_torchs_own_counter(self, name, side):
        model = ml.create(name).eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 3, side, side))
        found = ml.cost(model, side)
        assert found.macs == counter.get_total_flops() // 2
        assert found.parameters == sum(p.numel() for p in model.parameters())

    def test_products_are_the_papers(self, cost_of_monet_t):
        tokens, width, expansion, blocks = 256, 192, 3, 32
        assert cost_of_monet_t.products == blocks * tokens * width * (1 + expansion)

    def test_parts_add_up(self):
        found = ml.cost(ml.create("monet_nano"))
        parts = [found.by_module[name] for name in ("embed", "stages", "head")]
        assert sum(part.parameters for part in parts) == found.parameters
        assert sum(part.macs for part in parts) == found.macs

    def test_the_papers_formulas_give_the_papers_figures(self, cost_of_monet_t):
        paper = cost_of_monet_t.paper
        assert round(paper.parameters / 1e6, 1) == 14.0
        assert round(paper.flops / 1e9, 1) == 3.6
        assert ml.cost(ml.create("monet_ms_t", depths=(1, 1, 1, 1)), 64).paper is None

    def test_formulas_and_counts_agree_but_for_norms_and_the_two_slips(self, cost_of_monet_t):
        found = cost_of_monet_t
        c, r, s, tokens, classes = 192, 3, 4, 256, 1000
        norms_and_alphas = 2 * c + 2 * 2 * (c + r * c) + 2
        slip = c * (r / s - 1 / s)
        assert found.parameters == found.paper.parameters + 32 * (norms_and_alphas + slip)
        assert found.macs + found.products == found.paper.flops - (tokens - 1) * c * classes


def integer_weights(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if not name.endswith("alpha"):
            parameter.data = torch.randint(1, 4, parameter.shape, generator=generator).float()
    return module


class TestExpand:
    @given(st.integers(0, 50), st.integers(1, 3), st.integers(1, 3))
    @settings(deadline=None, max_examples=15)
    def test_proposition_1_a_mu_layer_is_the_polynomial_of_degree_two_that_the_paper_writes(self, seed, width, rank):
        layer = integer_weights(MuLayer(width, 2, 2, shrinkage=1, bias=False), seed)
        x = sympy.symbols([f"x{i}" for i in range(width)])
        a, b, c, d = (matrix.weight.int().tolist() for matrix in (layer.A, layer.B, layer.C, layer.D))
        for i, found in enumerate(ml.expand(layer)):
            # equation 3 of the paper, term by term
            expected = sum(
                c[i][j] * (sum(a[j][t] * x[t] * b[j][w] * d[w][p] * x[p] for t in range(width) for p in range(width)
                               for w in range(len(d))) + sum(a[j][t] * x[t] for t in range(width)))
                for j in range(2)
            )  # fmt: skip
            assert sympy.expand(expected - found) == 0
            assert sympy.Poly(found, x).total_degree() == 2
            # an interaction of every pair of elements
            assert all(sympy.Poly(found, x).coeff_monomial(s * t) != 0 for s in x for t in x)

    @given(st.integers(0, 50))
    @settings(deadline=None, max_examples=8)
    def test_proposition_2_a_block_has_degree_four_with_every_interaction(self, seed):
        block = integer_weights(PolyBlock(2, expansion=1, norm="none", shift=None), seed)
        x = sympy.symbols("x0 x1")
        for found in ml.expand(block):
            poly = sympy.Poly(found, x)
            assert poly.total_degree() == 4
            assert all(poly.coeff_monomial(x[0] ** k * x[1] ** (4 - k)) != 0 for k in range(5))

    @pytest.mark.parametrize("norm", ["none", "affine", "batch"])
    @pytest.mark.parametrize("border", ["keep", "zero"])
    def test_the_polynomial_is_the_block(self, norm, border):
        torch.manual_seed(0)
        block = PolyBlock(4, expansion=1, shrinkage=2, norm=norm, shift=border).double()
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        block(torch.randn(2, 1, 2, 4, dtype=torch.float64))
        block.eval()
        shape = (1, 2, 4)
        found = ml.expand(block, shape)
        values = torch.randn(shape, dtype=torch.float64)
        names = {f"x{'_'.join(map(str, index))}": float(values[index]) for index in np.ndindex(*shape)}
        numbers = np.vectorize(lambda e: float(e.subs(names)), otypes=[float])(found)
        np.testing.assert_allclose(numbers, block(values).detach().numpy(), rtol=1e-9)

    def test_a_whole_tiny_network(self):
        torch.manual_seed(0)
        net = ml.MONet(
            widths=(2,), depths=(1,), patches=(1,), in_chans=1, num_classes=2, norm="batch", expansion=1
        ).eval()
        found = ml.expand(net, (1, 1, 2, 2))
        symbols = sorted(found[0, 0].free_symbols, key=str)
        assert found.shape == (1, 2)
        assert sympy.Poly(found[0, 0], symbols).total_degree() == ml.audit(net, (1, 2, 2)).degree == 4
        image = torch.randn(1, 1, 2, 2)
        names = {f"x0_0_{i}_{j}": float(image[0, 0, i, j]) for i in range(2) for j in range(2)}
        assert float(found[0, 1].subs(names)) == pytest.approx(net(image)[0, 1].item(), rel=1e-4)

    def test_refuses_what_is_no_polynomial_or_too_large(self):
        with pytest.raises(ml.MultilinearError, match="cannot expand: not a polynomial: .*layer_norm"):
            ml.expand(PolyBlock(2, norm="layer"))
        with pytest.raises(ml.MultilinearError, match="too large to write out"):
            ml.expand(PolyBlock(64, norm="none"))
        with pytest.raises(ml.MultilinearError, match="needs the input shape of a Sequential"):
            ml.expand(nn.Sequential(nn.Linear(2, 2)))
