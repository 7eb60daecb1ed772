"""Fixed steps of high order, batched and differentiable: what fitting a smooth field to exact data needs.

The order of the solver sets the floor of the recovered coefficients' error, so the method is extrapolated: Gragg's
modified midpoint with 2, 4, 6, ... substeps, combined to order 2k (Bulirsch and Stoer).
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array", Tensor, NDArray[np.float64])
SEQUENCE = (2, 4, 6, 8, 10)


def flow(
    field: Callable[[Array], Array], state: Array, duration: Array, steps: int = 4, rows: int = len(SEQUENCE)
) -> Array:
    """States (..., d) after `duration` (...,), in `steps` steps of order 2 * `rows`.

    >>> import torch
    >>> end = flow(lambda x: -x, torch.ones(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    >>> abs(end.item() - torch.e ** -1) < 1e-13
    True
    """
    step = (duration / steps)[..., None]
    for _ in range(steps):
        state = _extrapolated(field, state, step, SEQUENCE[:rows])
    return state


def _extrapolated(field: Callable[[Array], Array], state: Array, step: Array, counts: tuple[int, ...]) -> Array:
    slope = field(state)
    table: list[Array] = []
    for count in counts:
        row = [_midpoint(field, state, slope, step, count)]
        for j, previous in enumerate(table):
            ratio = (count / counts[len(table) - 1 - j]) ** 2
            row.append(row[j] + (row[j] - previous) / (ratio - 1))
        table = row
    return table[-1]


def _midpoint(field: Callable[[Array], Array], state: Array, slope: Array, step: Array, count: int) -> Array:
    h = step / count
    before, now = state, state + h * slope
    for _ in range(count - 1):
        before, now = now, before + 2 * h * field(now)
    return 0.5 * (before + now + h * field(now))
