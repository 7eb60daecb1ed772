"""The terms that a law may have, and how fast the states and their sensitivities move under it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from multilinear.ode.polynomial import Floats, monomials

Terms = NDArray[np.bool_]  # (states, monomials): which equation may hold, or holds, which monomial


@dataclass(frozen=True, eq=False)
class Library:
    """All monomials up to `degree` in `states` states and `inputs` known inputs.

    >>> Library(2, 2).exponents.shape
    (6, 2)
    """

    states: int
    degree: int
    inputs: int = 0

    @property
    def variables(self) -> int:
        return self.states + self.inputs

    @cached_property
    def exponents(self) -> NDArray[np.int64]:
        return monomials(self.variables, self.degree)

    def __len__(self) -> int:
        return len(self.exponents)

    def values(self, x: Floats) -> Floats:
        """Monomials (..., M) at points (..., variables)."""
        powers = np.ones((*x.shape, self.degree + 1))
        for k in range(1, self.degree + 1):
            powers[..., k] = powers[..., k - 1] * x
        result = powers[..., 0, self.exponents[:, 0]]
        for j in range(1, self.variables):
            result = result * powers[..., j, self.exponents[:, j]]
        return np.asarray(result)

    @cached_property
    def _lowered(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """For each state j: which monomials contain it, and where their derivatives' monomials stand."""
        place = {tuple(row): k for k, row in enumerate(self.exponents.tolist())}
        found = []
        for j in range(self.states):
            has = np.flatnonzero(self.exponents[:, j])
            lower = self.exponents[has].copy()
            lower[:, j] -= 1
            found.append((has, np.array([place[tuple(row)] for row in lower.tolist()], dtype=np.int64)))
        return found

    def slopes(self, coefficients: Floats) -> Floats:
        """A matrix (M, d + d*d) that maps monomials to dx/dt and to its Jacobian: derivatives are monomials too."""
        d, count = self.states, len(self)
        jacobian = np.zeros((count, d, d))
        for j, (has, lower) in enumerate(self._lowered):
            np.add.at(jacobian[:, :, j], lower, (coefficients[:, has] * self.exponents[has, j]).T)
        return np.hstack([coefficients.T, jacobian.reshape(count, d * d)])


class Sensitive:
    """The field of states together with their derivatives to start values and to the active coefficients.

    It moves arrays (segments, variables, 1 + states + active): values, then derivatives. Inputs are further rows that
    move with given slopes.
    """

    def __init__(self, library: Library, coefficients: Floats, active: Terms, derivatives: bool = True) -> None:
        self.library, self.derivatives = library, derivatives
        self.matrix = library.slopes(coefficients) if derivatives else coefficients.T
        self.outputs, self.monomials = np.nonzero(active)
        self.columns = 1 + library.states + np.arange(len(self.outputs))
        self.input_slopes: Floats | None = None

    def start(self, x: Floats, inputs: Floats | None) -> Floats:
        """The array to begin with at states (segments, states)."""
        d = self.library.states
        width = 1 + (d + len(self.outputs) if self.derivatives else 0)
        moving = np.zeros((len(x), self.library.variables, width))
        moving[:, :d, 0] = x
        if inputs is not None:
            moving[:, d:, 0] = inputs
        if self.derivatives:
            moving[:, np.arange(d), 1 + np.arange(d)] = 1.0
        return moving

    def __call__(self, moving: Floats) -> Floats:
        d = self.library.states
        terms = self.library.values(moving[..., 0])
        rates = terms @ self.matrix
        result = np.zeros_like(moving)
        result[:, :d, 0] = rates[:, :d]
        if self.input_slopes is not None:
            result[:, d:, 0] = self.input_slopes
        if self.derivatives:
            jacobian = rates[:, d:].reshape(-1, d, d)
            result[:, :d, 1:] = jacobian @ moving[:, :d, 1:]
            result[:, self.outputs, self.columns] += terms[:, self.monomials]
        return result


def term_names(library: Library, names: Sequence[str]) -> list[str]:
    """Monomials as text that sympy reads.

    >>> term_names(Library(2, 2), ["x", "y"])
    ['1', 'x', 'y', 'x**2', 'x*y', 'y**2']
    """
    texts = []
    for row in library.exponents.tolist():
        parts = [name if e == 1 else f"{name}**{e}" for name, e in zip(names, row, strict=True) if e]
        texts.append("*".join(parts) or "1")
    return texts
