import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multilinear as ml
from multilinear.layers import MuLayer
from multilinear.ode import MuField, Polynomial, expand_layers, fit_field, flow, monomials


@given(st.integers(1, 4), st.integers(0, 4))
def test_there_are_as_many_monomials_as_there_should_be(dim, degree):
    found = monomials(dim, degree)
    assert len(found) == sympy.binomial(dim + degree, degree)
    assert len({tuple(row) for row in found.tolist()}) == len(found)
    assert list(found.sum(1)) == sorted(found.sum(1))


@given(st.integers(0, 100), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
@settings(deadline=None, max_examples=40)
def test_arithmetic_is_that_of_functions(seed, dim, first, second):
    generator = np.random.default_rng(seed)
    p, q = (
        Polynomial(dim, degree, generator.normal(size=(2, len(monomials(dim, degree))))) for degree in (first, second)
    )
    x = generator.normal(size=(5, dim))
    np.testing.assert_allclose((p * q)(x), p(x) * q(x), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose((p + q)(x), p(x) + q(x), rtol=1e-9, atol=1e-9)
    weight, bias = generator.normal(size=(3, 2)), generator.normal(size=3)
    np.testing.assert_allclose(p.linear(weight, bias)(x), p(x) @ weight.T + bias, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layers", [1, 2])
def test_expansion_is_the_network_and_agrees_with_the_symbolic_one(layers):
    torch.manual_seed(0)
    stack = [MuLayer(2, 3, shrinkage=1).double() for _ in range(layers)]
    found = expand_layers(stack)
    assert found.degree == 2**layers
    x = torch.randn(7, 2, dtype=torch.float64)
    np.testing.assert_allclose(found(x.numpy()), torch.nn.Sequential(*stack)(x).detach().numpy(), rtol=1e-9)
    symbolic = ml.expand(torch.nn.Sequential(*stack), (2,))
    for ours, exact in zip(found.to_sympy(["x0", "x1"]), symbolic, strict=True):
        difference = sympy.Poly(sympy.expand(ours - exact), *sympy.symbols("x0 x1")).coeffs()
        assert max(abs(float(value)) for value in difference) < 1e-10


class TestFlow:
    @pytest.mark.parametrize("duration", [0.1, 0.5, 1.0])
    def test_exact_solutions(self, duration):
        time = torch.tensor([duration], dtype=torch.float64)
        one = torch.ones(1, 1, dtype=torch.float64)
        assert flow(lambda x: -2 * x, one, time).item() == pytest.approx(np.exp(-2 * duration), rel=1e-9)
        assert flow(lambda x: x * x, 0.5 * one, time).item() == pytest.approx(1 / (2 - duration), rel=1e-9)
        circle = flow(lambda x: torch.stack([-x[..., 1], x[..., 0]], -1), torch.tensor([[1.0, 0.0]]).double(), time)
        np.testing.assert_allclose(circle[0].numpy(), [np.cos(duration), np.sin(duration)], atol=1e-11)

    def test_order_ten(self):
        time, one = torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
        coarse, fine = (abs(flow(lambda x: -x, one, time, steps).item() - np.exp(-1)) for steps in (1, 2))
        assert np.log2(coarse / fine) == pytest.approx(10, abs=1)

    def test_durations_differ_in_a_batch(self):
        times = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
        ends = flow(lambda x: -x, torch.ones(3, 1, dtype=torch.float64), times)
        np.testing.assert_allclose(ends[:, 0].numpy(), np.exp(-times.numpy()), rtol=1e-11)


class TestFit:
    def test_a_damped_oscillator_at_irregular_times(self):
        generator = np.random.default_rng(0)
        times = np.sort(generator.uniform(0, 6, 40))
        wave = np.exp(-0.1 * times)
        states = np.stack([wave * np.cos(2 * times), wave * np.sin(2 * times)], 1)
        torch.manual_seed(0)
        field = MuField(2)
        assert fit_field(field, times, states).loss < 1e-10
        linear = field.polynomial().coefficients[:, 1:3]
        np.testing.assert_allclose(linear, [[-0.1, -2.0], [2.0, -0.1]], atol=1e-5)

    @pytest.mark.parametrize(
        ("times", "states", "message"),
        [
            ([0, 1], [[1], [2]], "at least 3 samples, got 2"),
            ([0, 1, 1], [[1], [2], [3]], "times must increase: sample 2 comes at 1.0, not after 1.0"),
            ([0, 2, 1], [[1], [2], [3]], "times must increase"),
            ([0, 1, 2], [[1], [np.nan], [3]], "must be finite"),
            ([0, 1, 2], [1, 2, 3], r"must be \(samples,\) and \(samples, d\)"),
        ],
    )
    def test_bad_data_is_one_clear_line(self, times, states, message):
        with pytest.raises(ml.MultilinearError, match=message):
            fit_field(MuField(1), np.array(times), np.array(states, dtype=float))

    def test_a_start_that_blows_up_is_slowed_down(self):
        torch.manual_seed(0)
        field = MuField(1)
        with torch.no_grad():
            for parameter in field.parameters():
                parameter.mul_(20)
        times = np.linspace(0, 2, 15)
        assert fit_field(field, times, np.exp(-times)[:, None]).loss < 1e-6

    def test_a_blow_up_that_nothing_helps_is_said(self):
        field = MuField(1)
        with torch.no_grad():
            field.layers[0].A.weight.fill_(torch.inf)
        times = np.linspace(0, 10, 5)
        with pytest.raises(ml.MultilinearError, match="blows up within one segment"):
            fit_field(field, times, np.ones((5, 1)) + times[:, None])


def test_equations_read_well():
    field = MuField(2)
    with torch.no_grad():
        for parameter in field.parameters():
            parameter.zero_()
        field.layers[0].C.bias.copy_(torch.tensor([1.5, -2.0]))
    assert {name: str(value) for name, value in field.equations(["a", "b"]).items()} == {
        "a": "1.50000",
        "b": "-2.00000",
    }
