"""Fit a field to a trajectory by short segments and second-order steps; descent through one long solve stalls.

Each pair of neighbouring samples is a segment of its own: from one sample the field must flow to the next. All segments
are solved together, in a batch, and Levenberg-Marquardt steps with exact derivatives bring the misses to rounding
error. Samples are taken as exact.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as default

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, jacfwd

from multilinear.errors import MultilinearError
from multilinear.ode.solve import flow


@dataclass
class Fit:
    """How a fit went: the root mean square of the scaled misses after each step."""

    losses: list[float] = default(default_factory=list)

    @property
    def loss(self) -> float:
        return self.losses[-1]


def fit_field(
    field: nn.Module,
    times: NDArray[np.float64],
    states: NDArray[np.float64],
    *,
    iterations: int = 200,
    tolerance: float = 1e-13,
    steps: int = 4,
) -> Fit:
    """Change the parameters of `field` until its flow meets `states` (samples, d) at `times` (samples,).

    >>> from multilinear.ode.fields import MuField
    >>> _ = torch.manual_seed(0)
    >>> times = np.linspace(0, 2, 15)
    >>> decay = MuField(1)
    >>> fit_field(decay, times, np.exp(-times)[:, None]).loss < 1e-9
    True
    """
    start, end, durations, scale = _segments(times, states)
    names = [name for name, _ in field.named_parameters()]
    shapes = [parameter.shape for parameter in field.parameters()]
    sizes = [shape.numel() for shape in shapes]

    def misses(vector: Tensor) -> Tensor:
        parts = zip(names, vector.split(sizes), shapes, strict=True)
        weights = {name: part.reshape(shape) for name, part, shape in parts}
        reached = flow(lambda x: functional_call(field, weights, (x,)), start, durations, steps)
        return ((reached - end) / scale).reshape(-1)

    vector = torch.cat([parameter.detach().reshape(-1) for parameter in field.parameters()]).double()
    vector, losses = _levenberg_marquardt(misses, vector, iterations, tolerance)
    with torch.no_grad():
        for parameter, part in zip(field.parameters(), vector.split(sizes), strict=True):
            parameter.copy_(part.reshape(parameter.shape))
    return Fit(losses)


def _segments(times: NDArray[np.float64], states: NDArray[np.float64]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    times, states = np.asarray(times, np.float64), np.asarray(states, np.float64)
    if states.ndim != 2 or times.shape != (len(states),):
        raise MultilinearError(f"times {times.shape} and states {states.shape} must be (samples,) and (samples, d)")
    if len(times) < 3:
        raise MultilinearError(f"a fit needs at least 3 samples, got {len(times)}")
    if not (np.isfinite(times).all() and np.isfinite(states).all()):
        raise MultilinearError("times and states must be finite; leave out or fill samples that are missing")
    if (np.diff(times) <= 0).any():
        where = int(np.argmax(np.diff(times) <= 0)) + 1
        raise MultilinearError(
            f"times must increase: sample {where} comes at {times[where]}, not after {times[where - 1]}"
        )
    scale = torch.from_numpy(np.maximum(states.std(0), 1e-12))
    data = torch.from_numpy(states)
    return data[:-1], data[1:], torch.from_numpy(np.diff(times)), scale


def _levenberg_marquardt(
    misses: Callable[[Tensor], Tensor], vector: Tensor, iterations: int, tolerance: float
) -> tuple[Tensor, list[float]]:
    """Damped Gauss-Newton. A step that leads to larger or non-finite misses is not taken, and damping grows."""
    current = misses(vector)
    for _ in range(30):  # a random start may blow up within a segment: begin with a slower field
        if math.isfinite(_rms(current)):
            break
        vector = 0.7 * vector
        current = misses(vector)
    losses = [_rms(current)]
    if not math.isfinite(losses[0]):
        raise MultilinearError("the field blows up within one segment, however small its parameters; look at the data")
    damping, rejected = 1e-2, 0
    for _ in range(iterations):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, when it loads its forward derivatives
            jacobian = jacfwd(misses)(vector)
        gradient, curvature = jacobian.T @ current, jacobian.T @ jacobian
        while rejected < 30:
            # the parametrisation has symmetries, so the curvature is singular: damp all directions alike
            damped = curvature + damping * curvature.diagonal().mean() * torch.eye(len(vector), dtype=vector.dtype)
            trial = vector - torch.linalg.solve(damped, gradient)
            found = misses(trial)
            if _rms(found) < losses[-1]:
                break
            damping, rejected = damping * 4, rejected + 1
        if rejected >= 30:
            break
        vector, current, rejected = trial, found, 0
        damping = max(damping / 5, 1e-15)
        losses.append(_rms(current))
        if losses[-1] < tolerance or losses[-2] - losses[-1] < 1e-4 * losses[-1] < 1e-14:
            break
    return vector, losses


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
