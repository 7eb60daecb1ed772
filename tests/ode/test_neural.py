import math

import pytest
import torch
from torch import nn

from multilinear.errors import MultilinearError
from multilinear.layers import MuLayer
from multilinear.ode.neural import BlowUp, NeuralODE, count_parameters, node, poly_node

ENDS = torch.tensor([0.0, 1.0])


class Law(nn.Module):
    def __init__(self, law):
        super().__init__()
        self.law = law

    def forward(self, x):
        return self.law(x)


@pytest.mark.parametrize(
    ("make", "arguments", "count"),
    [
        (node, {}, 1253),
        (node, {"augment": 5}, 1583),
        (node, {"augment": 1}, 1319),
        (node, {"time": False}, 1221),
        (poly_node, {}, 518),
        (poly_node, {"augment": 5}, 888),
        (poly_node, {"order": 4}, 993),
    ],
)
def test_parameter_counts(make, arguments, count):
    torch.manual_seed(0)  # some random fields blow up
    model = make(**arguments)
    assert count_parameters(model) == count
    assert model(torch.randn(3, 2)).shape == (3, 1)


class TestFlow:
    def test_exact_solutions(self):
        x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        turn = NeuralODE(Law(lambda x: torch.stack([-x[:, 1], x[:, 0]], 1)), 2, tolerance=1e-6)
        end = turn.flow(x, ENDS)[-1]
        torch.testing.assert_close(end[0], torch.tensor([math.cos(1), math.sin(1)]), atol=1e-4, rtol=0)
        quick = NeuralODE(Law(lambda x: x * x), 1, tolerance=1e-6)
        assert quick.flow(torch.tensor([[0.5]]), ENDS)[-1].item() == pytest.approx(1.0, abs=1e-4)

    def test_the_field_sees_the_time(self):
        clock = NeuralODE(Law(lambda x: 2 * x[:, 1:]), 1, time=True)
        found = clock.flow(torch.zeros(3, 1), torch.tensor([0.0, 0.5, 1.0]))
        torch.testing.assert_close(found[:, 0, 0], torch.tensor([0.0, 0.25, 1.0]), atol=1e-4, rtol=0)

    def test_points_start_with_zeros_in_the_added_dimensions(self):
        x = torch.randn(4, 2)
        start = node(augment=3).flow(x, ENDS)[0]
        assert torch.equal(start[:, :2], x)
        assert not start[:, 2:].any()

    def test_evaluations_are_those_of_one_solve(self):
        asked = []
        model = NeuralODE(Law(lambda x: asked.append(1) or -x), 2)
        for _ in range(2):
            asked.clear()
            model(torch.ones(3, 2))
            assert model.evaluations == len(asked) == 2 + 6 * ((len(asked) - 2) // 6)

    def test_gradients_are_those_of_the_flow(self):
        rate = nn.Linear(1, 1, bias=False)
        nn.init.constant_(rate.weight, -0.5)
        NeuralODE(rate, 1, tolerance=1e-6).flow(torch.ones(1, 1), ENDS)[-1].sum().backward()
        assert rate.weight.grad.item() == pytest.approx(math.exp(-0.5), abs=1e-3)

    @pytest.mark.parametrize("shape", [(4, 3), (2,), (0, 2)])
    def test_points_of_another_shape(self, shape):
        with pytest.raises(MultilinearError, match=r"points must be \(n, 2\) with n of at least 1, got \("):
            node()(torch.zeros(shape))

    @pytest.mark.parametrize("times", [[1.0, 0.0], [0.0, 0.0], [0.0], [0.0, math.nan]])
    def test_times_that_do_not_increase(self, times):
        with pytest.raises(MultilinearError, match="times must be at least two and increase, got"):
            node().flow(torch.zeros(1, 2), torch.tensor(times))


class TestPolynomial:
    @pytest.mark.parametrize("order", [2, 4, 8])
    def test_the_field_is_a_polynomial_of_that_order(self, order):
        """Differences of order + 1 along a line vanish, those of `order` do not."""
        torch.manual_seed(0)
        model = poly_node(order=order, hidden=8).double()
        assert all(isinstance(layer, MuLayer) for layer in model.field)
        start, way = torch.randn(2, 3, dtype=torch.float64)
        values = model.field(start + torch.linspace(-1, 1, order + 2, dtype=torch.float64)[:, None] * way)
        last = values.diff(n=order, dim=0)
        assert last.abs().max() > 1e-6
        assert (last[1] - last[0]).abs().max() < 1e-9 * max(1, values.abs().max().item())

    @pytest.mark.parametrize("order", [1, 3, 6, 0])
    def test_orders_that_no_stack_has(self, order):
        with pytest.raises(MultilinearError, match=f"order {order}: .* must be 2, 4, 8"):
            poly_node(order=order)


class TestGuard:
    def test_a_state_that_grows_without_bound(self):
        model = NeuralODE(Law(lambda x: x * x), 1)  # 1 / (0.5 - t) from 2
        with pytest.raises(BlowUp, match=r"passed the limit of 1000 at t = 0.4\d+ of 1: .*; use a lower learning rate"):
            model(torch.full((3, 1), 2.0))
        assert model.evaluations > 0

    def test_one_bad_point_among_many(self):
        with pytest.raises(BlowUp):
            NeuralODE(Law(lambda x: x * x), 1)(torch.cat([torch.zeros(500, 1), torch.full((1, 1), 5.0)]))

    def test_the_end_is_looked_at_too(self):
        with pytest.raises(BlowUp, match="a state of length 3 passed the limit of 2 at t = 1 of 1"):
            NeuralODE(Law(lambda x: torch.full_like(x, 3.0)), 1, norm_limit=2)(torch.zeros(1, 1))

    def test_a_stiff_field(self):
        with pytest.raises(BlowUp, match=r"the solver passed the limit of 100 evaluations at t = 0\.0"):
            NeuralODE(Law(lambda x: -1e5 * x), 1, evaluation_limit=100)(torch.ones(1, 1))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_field_that_is_not_finite(self, bad):
        with pytest.raises(BlowUp, match="the field is not finite at t = 0 of 1"):
            NeuralODE(Law(lambda x: x * bad), 1)(torch.ones(1, 1))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_points_that_are_not_finite(self, bad):
        with pytest.raises(BlowUp):
            poly_node()(torch.tensor([[bad, 0.0]]))

    def test_a_trial_step_that_overflows_is_repeated_with_a_smaller_one(self):
        """The field overflows past 1, where the exact flow does not go but a long first trial does."""
        wall = NeuralODE(Law(lambda x: torch.where(x > 1.05, torch.inf, 20 * (1 - x))), 1)
        assert wall.flow(torch.zeros(1, 1), ENDS)[-1].item() == pytest.approx(1, abs=0.01)

    def test_weights_that_are_too_large(self):
        torch.manual_seed(0)
        model = poly_node(order=8)
        with torch.no_grad():
            for parameter in model.field.parameters():
                parameter.mul_(10)
        with pytest.raises(BlowUp):
            model(torch.randn(16, 2))
