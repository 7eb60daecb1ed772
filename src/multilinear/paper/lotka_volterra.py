"""Section 4.3 of the paper: a polynomial neural ODE learns the Lotka-Volterra system and prints its equation.

The paper trains on 100 points in [0, 10] and recovers 1.56 x - 1.12001 x y and -3.10 y + 1.21001 x y: an error of 1e-5.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sympy
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from multilinear.errors import MultilinearError
from multilinear.ode import MuField, Polynomial, fit_field, monomials
from multilinear.report import Report

NAMES = ("x", "y")
PUBLISHED = {"x": "1.56*x - 1.12001*x*y", "y": "-3.10*y + 1.21001*x*y"}
# (output, exponents) -> value; everything else is zero
TERMS = {(0, (1, 0)): 1.56, (0, (1, 1)): -1.12, (1, (0, 1)): -3.10, (1, (1, 1)): 1.21}


def truth() -> Polynomial:
    """The true right-hand side.

    >>> truth().to_sympy(NAMES)
    [-1.12*x*y + 1.56*x, 1.21*x*y - 3.1*y]
    """
    rows = [tuple(row) for row in monomials(2, 2).tolist()]
    table = np.zeros((2, len(rows)))
    for (output, exponents), value in TERMS.items():
        table[output, rows.index(exponents)] = value
    return Polynomial(2, 2, table)


def sample(times: NDArray[np.float64], law: Polynomial) -> NDArray[np.float64]:
    """States (samples, 2) of `law` from (1, 1) at `times`, to rounding error."""
    solved = solve_ivp(
        lambda _, state: law(state), (times[0], times[-1]), [1.0, 1.0], "DOP853", times, rtol=1e-13, atol=1e-14
    )
    if not solved.success:
        raise MultilinearError(f"the recovered system could not be solved: {solved.message}")
    return np.asarray(solved.y.T)


@dataclass(frozen=True)
class Recovery:
    """One seed: the largest error of any coefficient (those that should be zero included), steps, seconds."""

    seed: int
    error: float
    losses: list[float]
    seconds: float
    law: Polynomial
    equations: dict[str, sympy.Expr]


def recover(seed: int, points: int = 100) -> Recovery:
    """Train a Mu-Layer field from random weights on `points` samples and read its equation.

    >>> recover(0, points=25).error < 1e-6
    True
    """
    torch.manual_seed(seed)
    times = np.linspace(0, 10, points)
    field = MuField(2)
    start = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are tiny: threads would wait for each other, for minutes on a busy machine
    try:
        fit = fit_field(field, times, sample(times, truth()))
    finally:
        torch.set_num_threads(threads)
    seconds = time.perf_counter() - start
    law = field.polynomial()
    error = float(np.abs(law.coefficients - truth().coefficients).max())
    return Recovery(seed, error, fit.losses, seconds, law, field.equations(NAMES))


def write_page(found: Sequence[Recovery], points: int, path: Path) -> Path:
    """Loss curves, the equation beside the paper's, and the trajectory."""
    worst = max(recovery.error for recovery in found)
    page = Report(
        "Lotka-Volterra from a Mu-Layer field",
        f"{points} points, {len(found)} random starts, largest coefficient error {worst:.1e} (the paper: about 1e-5).",
    )
    page.heading("Equations")
    rows = [[f"d{name}/dt", PUBLISHED[name], str(found[0].equations[name])] for name in NAMES]
    page.table(["", "the paper's", f"ours (seed {found[0].seed})"], rows)
    page.heading("Starts")
    page.table(
        ["seed", "largest coefficient error", "steps", "seconds"],
        [[r.seed, f"{r.error:.1e}", len(r.losses) - 1, f"{r.seconds:.1f}"] for r in found],
    )
    page.figure(_curves(found), "Root mean square miss of the segments, by step; one line a start.")
    page.figure(_trajectory(found[0], points), "Samples, and the recovered system solved from the first one.")
    return page.write(path)


def _curves(found: Sequence[Recovery]) -> Figure:
    figure = Figure(figsize=(6, 3.4))
    axes = figure.subplots()
    for recovery in found:
        axes.semilogy(recovery.losses, alpha=0.6)
    axes.set(xlabel="step", ylabel="miss")
    return figure


def _trajectory(recovery: Recovery, points: int) -> Figure:
    times, fine = np.linspace(0, 10, points), np.linspace(0, 10, 600)
    samples, solved = sample(times, truth()), sample(fine, recovery.law)
    figure = Figure(figsize=(9, 3.4))
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    for i, name in enumerate(NAMES):
        (line,) = left.plot(fine, solved[:, i], label=name)
        left.plot(times, samples[:, i], ".", color=line.get_color(), markersize=4)
    left.set(xlabel="t")
    left.legend()
    right.plot(*solved.T)
    right.plot(*samples.T, ".", markersize=4)
    right.set(xlabel="x", ylabel="y")
    figure.tight_layout()
    return figure
