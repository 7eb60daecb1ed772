"""A law that was found: names, coefficients with intervals, equations for reading, and its solutions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import sympy
from scipy.integrate import solve_ivp

from multilinear.errors import MultilinearError
from multilinear.ode.polynomial import Floats, Polynomial, monomials

LIMIT = 1e3  # a solution this many times larger than all data is taken to blow up
EVALUATIONS = 200_000  # of the field in one solve


class Interval(NamedTuple):
    """A coefficient of the law: which equation, which monomial, its estimate and where it lies with 95% confidence."""

    output: int
    exponents: tuple[int, ...]
    estimate: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Law:
    """dx/dt as polynomials in named states, and in named inputs after them.

    >>> from multilinear.ode.polynomial import Polynomial
    >>> decay = Law(("x",), (), Polynomial(1, 1, np.array([[0.0, -2.0]])), (), np.ones(1))
    >>> decay.equations()
    {'x': -2.0*x}
    >>> bool(np.isclose(decay.solve(np.array([0.0, 1.0]), np.array([1.0]))[-1, 0], np.exp(-2)))
    True
    """

    names: tuple[str, ...]
    inputs: tuple[str, ...]
    polynomial: Polynomial
    intervals: tuple[Interval, ...]
    largest: Floats  # of each state in the data: what blowing up is measured by

    def equations(self, digits: int | None = None) -> dict[str, sympy.Expr]:
        found = self.polynomial.to_sympy([*self.names, *self.inputs], digits)
        return dict(zip(self.names, found, strict=True))

    def to_latex(self) -> str:
        """An aligned block of equations, three digits.

        >>> from multilinear.ode.polynomial import Polynomial
        >>> print(Law(("x",), (), Polynomial(1, 1, np.array([[0.0, -2.0]])), (), np.ones(1)).to_latex())
        \\begin{aligned}
        \\frac{\\mathrm{d}x}{\\mathrm{d}t} &= - 2.0 x
        \\end{aligned}
        """
        rows = [
            rf"\frac{{\mathrm{{d}}{sympy.latex(sympy.Symbol(name))}}}{{\mathrm{{d}}t}} &= {sympy.latex(right)}"
            for name, right in self.equations(3).items()
        ]
        return "\\begin{aligned}\n" + " \\\\\n".join(rows) + "\n\\end{aligned}"

    def rates(self, states: Floats, inputs: Floats | None = None) -> Floats:
        """dx/dt at states (..., d) and inputs (..., u)."""
        return self.polynomial(states if inputs is None else np.concatenate([states, inputs], axis=-1))

    def to_function(self) -> Callable[..., Floats]:
        """A function f(t, x) as scipy's solvers take it; f(t, x, u) where there are inputs."""
        polynomial = self.polynomial

        def field(t: float, x: Floats, u: Floats | None = None) -> Floats:
            point = np.asarray(x, np.float64)
            if (u is None) != (not self.inputs):
                raise MultilinearError(f"the law has the inputs {list(self.inputs)}; call f(t, x, u) with them")
            return polynomial(point if u is None else np.concatenate([point, np.atleast_1d(u)]))

        return field

    def solve(self, times: Floats, start: Floats, inputs: Floats | None = None) -> Floats:
        """States (times, d) from `start` at times[0]; inputs (times, u) are joined by lines.

        A solution that leaves every bound, or a solver that goes on for ever, ends with an error that says when.
        """
        times = np.asarray(times, np.float64)
        if len(times) == 1:
            return np.asarray(start, np.float64)[None].copy()
        bound = LIMIT * np.maximum(self.largest, np.abs(start)) + 1e-12
        calls = 0

        def field(t: float, x: Floats) -> Floats:
            nonlocal calls
            calls += 1
            if calls > EVALUATIONS:
                raise MultilinearError(f"solving the law takes for ever near t = {t:.4g}; it may be too stiff there")
            forced = None if inputs is None else np.array([np.interp(t, times, column) for column in inputs.T])
            return self.rates(x, forced)

        def far(t: float, x: Floats) -> float:
            return float(np.max(np.abs(x) / bound) - 1)

        far.terminal = True  # type: ignore[attr-defined]
        with np.errstate(all="ignore"):
            try:
                solved = solve_ivp(
                    field,
                    (times[0], times[-1]),
                    start,
                    "LSODA",
                    times,
                    rtol=1e-8,
                    atol=1e-10 * self.largest,
                    events=far,
                )
            except (ValueError, OverflowError, FloatingPointError) as error:
                raise MultilinearError(f"the law could not be solved from {np.asarray(start).tolist()}") from error
        states = np.asarray(solved.y.T)
        if len(states) < len(times) or not np.isfinite(states).all():
            end = float(solved.t[-1]) if len(solved.t) else float(times[0])
            raise MultilinearError(f"the solution blows up after t = {end:.4g}; predict up to there, or another start")
        return states

    def text(self) -> str:
        """The equations, one a line, four digits."""
        width = max(len(name) for name in self.names)
        rows = [f"d{name}/dt{' ' * (width - len(name))} = {right}" for name, right in self.equations(4).items()]
        return "\n".join(rows)


def find_term(text: str, names: Sequence[str]) -> tuple[int, ...]:
    """The exponents of a term that a user wrote, such as `x*y**2` or `1`; parsed by hand, never evaluated.

    >>> find_term("x*y**2", ["x", "y"])
    (1, 2)
    """
    exponents = [0] * len(names)
    for part in text.replace(" ", "").replace("^", "**").replace("**", "^").split("*"):
        name, _, power = part.partition("^")
        if part == "1":
            continue
        if name not in names or (power and not power.isdigit()):
            raise MultilinearError(
                f"cannot read the term {text!r}; write it like 1, x, x*y or x**2, with {list(names)}"
            )
        exponents[names.index(name)] += int(power or 1)
    return tuple(exponents)


def conserved(law: Law, degree: int = 2, tolerance: float = 1e-6) -> list[sympy.Expr]:
    """Polynomials in the states that the law keeps constant, up to `degree`.

    >>> from multilinear.ode.polynomial import Polynomial
    >>> spring = Polynomial(2, 1, np.array([[0.0, 0.0, 1.0], [0.0, -4.0, 0.0]]))
    >>> conserved(Law(("x", "v"), (), spring, (), np.ones(2)))
    [0.25*v**2 + 1.0*x**2]
    """
    d = len(law.names)
    if law.inputs or not law.polynomial.coefficients.any(1).all():  # a state that never moves is no discovery
        return []
    if degree > 1 and (linear := conserved(law, 1, tolerance)):
        return linear  # its powers are constant too
    exponents = monomials(d, degree)[1:]
    total = degree - 1 + law.polynomial.degree
    place = {tuple(row): k for k, row in enumerate(monomials(d, total).tolist())}
    scales = np.maximum(law.largest, 1e-300)
    rates = np.zeros(
        (len(place), len(exponents))
    )  # column h: time derivative of monomial h, each state in its own size
    size = np.zeros(len(exponents))
    for h, row in enumerate(exponents):
        for j in np.flatnonzero(row):
            lower = row.copy()
            lower[j] -= 1
            for k, other in enumerate(monomials(d, law.polynomial.degree)):
                value = row[j] * law.polynomial.coefficients[j, k]
                if value:
                    scaled = value * np.prod(scales ** (lower + other)) / np.prod(scales**row)
                    rates[place[tuple((lower + other).tolist())], h] += scaled
                    size[h] += abs(scaled)
    reference = max(float(size.max(initial=0)), 1e-300)
    _, singular, directions = np.linalg.svd(rates / reference)
    singular = np.pad(singular, (0, len(exponents) - len(singular)))
    null = directions[singular < tolerance]
    symbols = sympy.symbols(list(law.names))
    found = []
    for direction in _reduced(null):
        values = direction / np.prod(scales**exponents, axis=1)
        values = values / values[np.argmax(np.abs(direction) > 1e-9)]
        found.append(
            sympy.Add(*(
                sympy.Float(round(value, 12), 4) * sympy.Mul(*(s ** int(e) for s, e in zip(symbols, row, strict=True)))
                for value, row in zip(values, exponents, strict=True) if abs(value) > 1e-9 * np.abs(values).max()
            ))
        )  # fmt: skip
    return found


def _reduced(rows: Floats) -> Floats:
    """Row echelon form, so that each invariant is as short as can be."""
    rows = rows.copy()
    pivot = 0
    for column in range(rows.shape[1]):
        if pivot == len(rows):
            break
        best = pivot + int(np.argmax(np.abs(rows[pivot:, column])))
        if abs(rows[best, column]) < 1e-6:
            continue
        rows[[pivot, best]] = rows[[best, pivot]]
        rows[pivot] /= rows[pivot, column]
        for other in range(len(rows)):
            if other != pivot:
                rows[other] -= rows[other, column] * rows[pivot]
        pivot += 1
    return np.where(np.abs(rows) < 1e-9, 0.0, rows)
