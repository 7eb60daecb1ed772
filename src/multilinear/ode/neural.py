"""Neural ODEs for points: NODE (Chen et al. 2018), ANODE (Dupont et al. 2019), and both with a polynomial field.

Points flow from t = 0 to 1 along a learned field and a linear head reads where they end. A polynomial field can send a
point to infinity in finite time, which an adaptive solver answers with ever smaller steps; here it ends in one error.
"""

import torch
from torch import Tensor, nn
from torchdiffeq import odeint

from multilinear.errors import MultilinearError
from multilinear.layers import MuLayer


class BlowUp(MultilinearError):
    """The flow did not reach its end: the state grew past a limit, or the solver would not get there."""


class NeuralODE(nn.Module):
    """Flow along `field` from t = 0 to 1, then a linear head with one output.

    Args:
        field: maps states (n, dim + augment) to their derivatives; with `time`, its input has t as the last column.
        dim: length of the points.
        augment: zeros appended to each point, room for the flow to go around what is in its way.
        time: whether the field sees the time.
        tolerance: of dopri5, relative and absolute.
        norm_limit: the largest length a state may reach.
        evaluation_limit: the most evaluations of the field in one solve.

    After a solve, `evaluations` is how often the field was asked. Gradients go back through the solver's own steps.

    >>> model = NeuralODE(nn.Linear(2, 2), dim=2)
    >>> model(torch.zeros(5, 2)).shape
    torch.Size([5, 1])
    >>> model.evaluations >= 14
    True
    """

    def __init__(
        self,
        field: nn.Module,
        dim: int,
        *,
        augment: int = 0,
        time: bool = False,
        tolerance: float = 1e-3,
        norm_limit: float = 1e3,
        evaluation_limit: int = 1000,
    ) -> None:
        super().__init__()
        self.field = field
        self.head = nn.Linear(dim + augment, 1)
        self.dim, self.augment, self.time = dim, augment, time
        self.tolerance, self.norm_limit, self.evaluation_limit = tolerance, norm_limit, evaluation_limit
        self.evaluations = 0

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (n, 1) for points (n, dim)."""
        y: Tensor = self.head(self.flow(x, torch.tensor([0.0, 1.0], device=x.device))[-1])
        return y

    def flow(self, x: Tensor, times: Tensor) -> Tensor:
        """States (times, n, dim + augment) of points (n, dim) that start at times[0]; raises `BlowUp`."""
        if x.ndim != 2 or x.shape[1] != self.dim or not len(x):
            raise MultilinearError(f"points must be (n, {self.dim}) with n of at least 1, got {tuple(x.shape)}")
        if times.ndim != 1 or len(times) < 2 or not bool((times.diff() > 0).all()):
            raise MultilinearError(f"times must be at least two and increase, got {times.tolist()}")
        start = nn.functional.pad(x, (0, self.augment))
        guard = _Guard(self, times)
        options = {"norm": _root_mean_square}
        try:
            states: Tensor = odeint(
                guard, start, times, rtol=self.tolerance, atol=self.tolerance, method="dopri5", options=options
            )
        except AssertionError as error:  # how torchdiffeq says that its step has become zero
            raise guard.blow_up("the solver's step became too small") from error
        finally:
            self.evaluations = guard.count
        guard.callback_step(times[-1], states[-1], times[-1])
        return states


class _Guard:
    """The field as the solver calls it, counted, with the checks that turn a blow-up into an error."""

    def __init__(self, model: NeuralODE, times: Tensor) -> None:
        self.model, self.count = model, 0
        self.reached, self.end = float(times[0]), float(times[-1])

    def __call__(self, t: Tensor, x: Tensor) -> Tensor:
        self.count += 1
        if self.count > self.model.evaluation_limit:
            raise self.blow_up(f"the solver passed the limit of {self.model.evaluation_limit} evaluations")
        if self.model.time:
            x = torch.cat([x, t.to(x.dtype).expand(len(x), 1)], 1)
        slope: Tensor = self.model.field(x)
        if self.count == 1 and not bool(slope.isfinite().all()):
            raise self.blow_up("the field is not finite")
        return slope

    def callback_step(self, t: Tensor, x: Tensor, _: Tensor) -> None:
        """Called with each accepted state; a rejected trial may be far away without harm."""
        self.reached = float(t)
        size = float(x.detach().norm(dim=1).max())
        if not size <= self.model.norm_limit:  # also true of NaN
            raise self.blow_up(f"a state of length {size:.3g} passed the limit of {self.model.norm_limit:g}")

    def blow_up(self, what: str) -> BlowUp:
        return BlowUp(
            f"{what} at t = {self.reached:.3g} of {self.end:g}: the field blows up or is stiff; "
            "use a lower learning rate, smaller weights or a lower order"
        )


def _root_mean_square(error: Tensor) -> Tensor:
    """The size of an error, by which the solver chooses its step.

    A trial step that overflows counts as a large error, so that a smaller one is tried where torchdiffeq would give up.
    Step sizes are not differentiated: the end of the flow depends on them only as far as the tolerance lets it.
    """
    return error.detach().square().mean().sqrt().nan_to_num(nan=1e9, posinf=1e9)


def node(*, dim: int = 2, augment: int = 0, hidden: int = 32, time: bool = True) -> NeuralODE:
    """A neural ODE whose field is an MLP of three layers with ReLU; with `augment` an ANODE.

    >>> count_parameters(node()), count_parameters(node(augment=5))
    (1253, 1583)
    """
    state = dim + augment
    field = nn.Sequential(
        nn.Linear(state + time, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, state)
    )
    return NeuralODE(field, dim, augment=augment, time=time)


def poly_node(*, dim: int = 2, augment: int = 0, order: int = 2, hidden: int = 32, time: bool = True) -> NeuralODE:
    """A neural ODE whose field is a polynomial of degree `order`, bare Mu-Layers; with `augment` a PolyANODE.

    >>> count_parameters(poly_node()), count_parameters(poly_node(augment=5))
    (518, 888)
    >>> len(poly_node(order=4).field)
    2
    """
    layers = order.bit_length() - 1
    if order < 2 or order != 2**layers:
        raise MultilinearError(f"order {order}: each Mu-Layer doubles it, so it must be 2, 4, 8, ...")
    state = dim + augment
    field = nn.Sequential(*(MuLayer(state + (time and i == 0), hidden, state, norm="none") for i in range(layers)))
    return NeuralODE(field, dim, augment=augment, time=time)


def count_parameters(model: nn.Module) -> int:
    """How many numbers are trained.

    >>> count_parameters(nn.Linear(2, 3))
    9
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
