"""Twelve polynomial systems with exact coefficients, and what an observer would have measured of them.

Six are "tuned": the discovery method was developed while looking at them. Six are "fresh": kept for a run after it was
frozen. Constants are those of the textbooks where there are any. Spans are chosen so that 100 equally spaced points
resolve the fastest part of the motion (mostly less than one standard deviation from point to point, 1.6 at most) and 25
points are hard (up to three).
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import OdeSolution, solve_ivp

from multilinear.ode import Polynomial, monomials

Floats = NDArray[np.float64]
Terms = Mapping[tuple[int, tuple[int, ...]], float]  # (output, exponents) -> coefficient


@dataclass(frozen=True)
class System:
    """dx/dt = sum of terms, started at x0 and watched over span."""

    name: str
    group: str  # "tuned" or "fresh"
    dim: int
    degree: int
    terms: Terms
    x0: tuple[float, ...]
    span: tuple[float, float]


def _system(name: str, group: str, x0: tuple[float, ...], end: float, terms: Terms) -> System:
    degree = max(sum(exponents) for _, exponents in terms)
    return System(name, group, len(x0), degree, terms, x0, (0.0, end))


_ALL = (
    # predator and prey with the constants of most textbooks and of scipy's own example
    _system("lotka-volterra", "tuned", (1.0, 1.0), 10.0, {
        (0, (1, 0)): 1.5, (0, (1, 1)): -1.0,
        (1, (0, 1)): -3.0, (1, (1, 1)): 1.0,
    }),
    # Lorenz 1963: sigma 10, rho 28, beta 8/3; the start used by the SINDy papers; two and a half turns
    _system("lorenz", "tuned", (-8.0, 8.0, 27.0), 2.0, {
        (0, (1, 0, 0)): -10.0, (0, (0, 1, 0)): 10.0,
        (1, (1, 0, 0)): 28.0, (1, (0, 1, 0)): -1.0, (1, (1, 0, 1)): -1.0,
        (2, (0, 0, 1)): -8.0 / 3.0, (2, (1, 1, 0)): 1.0,
    }),
    # van der Pol, mu = 1, from near its limit cycle
    _system("van-der-pol", "tuned", (2.0, 0.0), 10.0, {
        (0, (0, 1)): 1.0,
        (1, (1, 0)): -1.0, (1, (0, 1)): 1.0, (1, (2, 1)): -1.0,
    }),
    # susceptible and infected shares (the recovered are the rest): reproduction number 4, one whole epidemic
    _system("sir", "tuned", (0.99, 0.01), 10.0, {
        (0, (1, 1)): -2.0,
        (1, (1, 1)): 2.0, (1, (0, 1)): -0.5,
    }),
    # Brunton, Proctor and Kutz 2016, "damped oscillator with cubic dynamics"
    _system("cubic-oscillator", "tuned", (2.0, 0.0), 4.0, {
        (0, (3, 0)): -0.1, (0, (0, 3)): 2.0,
        (1, (3, 0)): -2.0, (1, (0, 3)): -0.1,
    }),
    # Prigogine and Lefever 1968, A = 1, B = 3: oscillates, with spikes
    _system("brusselator", "tuned", (1.0, 1.0), 12.0, {
        (0, (0, 0)): 1.0, (0, (1, 0)): -4.0, (0, (2, 1)): 1.0,
        (1, (1, 0)): 3.0, (1, (2, 1)): -1.0,
    }),
    # three species in a chain (Chauvet et al. 2002), all rates one but the last: with 1 there the product of the first
    # and last species would be constant, and many laws would give the same curve
    _system("food-chain", "fresh", (0.5, 1.0, 2.0), 12.0, {
        (0, (1, 0, 0)): 1.0, (0, (1, 1, 0)): -1.0,
        (1, (0, 1, 0)): -1.0, (1, (1, 1, 0)): 1.0, (1, (0, 1, 1)): -1.0,
        (2, (0, 0, 1)): -1.0, (2, (0, 1, 1)): 0.88,
    }),
    # Henon and Heiles 1964, two oscillators coupled by a cubic potential, at energy 0.13 (it escapes from 1/6 on);
    # states are the two positions, then the two momenta
    _system("henon-heiles", "fresh", (0.3, 0.2, 0.1, 0.3), 20.0, {
        (0, (0, 0, 1, 0)): 1.0,
        (1, (0, 0, 0, 1)): 1.0,
        (2, (1, 0, 0, 0)): -1.0, (2, (1, 1, 0, 0)): -2.0,
        (3, (0, 1, 0, 0)): -1.0, (3, (2, 0, 0, 0)): -1.0, (3, (0, 2, 0, 0)): 1.0,
    }),
    # FitzHugh-Nagumo with the usual a = 0.7, b = 0.8, 1/tau = 0.08 and a current of 0.5: it fires again and again
    _system("fitzhugh-nagumo", "fresh", (-1.0, 1.0), 60.0, {
        (0, (0, 0)): 0.5, (0, (1, 0)): 1.0, (0, (3, 0)): -1.0 / 3.0, (0, (0, 1)): -1.0,
        (1, (0, 0)): 0.056, (1, (1, 0)): 0.08, (1, (0, 1)): -0.064,
    }),
    # degree 4: a damped spring whose potential x^2/2 + x^5/10 is steep to the right and gives way to the left. (A known
    # one, Sel'kov's glycolysis with a third power, was put aside unseen by any method: its cycle stays so far from zero
    # that the columns of a degree-4 library are dependent to one part in a million.)
    _system("quartic-spring", "fresh", (1.0, 0.0), 16.0, {
        (0, (0, 1)): 1.0,
        (1, (1, 0)): -1.0, (1, (0, 1)): -0.1, (1, (4, 0)): -0.5,
    }),
    # van der Pol, mu = 5, in Lienard's form: slow drifts and sudden jumps; one period
    _system("stiff-van-der-pol", "fresh", (2.0, 0.0), 12.0, {
        (0, (1, 0)): 5.0, (0, (3, 0)): -5.0 / 3.0, (0, (0, 1)): -5.0,
        (1, (1, 0)): 0.2,
    }),
    # Roessler 1976 with the usual a = b = 0.2, c = 5.7; two turns, with a spike of z in each
    _system("roessler", "fresh", (-6.0, -6.0, 0.1), 12.0, {
        (0, (0, 1, 0)): -1.0, (0, (0, 0, 1)): -1.0,
        (1, (1, 0, 0)): 1.0, (1, (0, 1, 0)): 0.2,
        (2, (0, 0, 0)): 0.2, (2, (0, 0, 1)): -5.7, (2, (1, 0, 1)): 1.0,
    }),
)  # fmt: skip

SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}

CONDITIONS = (
    "clean",  # 100 equally spaced points
    "clean-25",  # 25 of them
    "irregular",  # 60 sorted random times
    "noise-1",  # 100 points; Gaussian noise of 1% of each state's standard deviation
    "noise-5",
    "noise-10",
    "missing",  # 1% noise, and each entry is missing with probability 0.3
    "one-by-one",  # 1% noise, 100 d rows; the states are read in turn, one in each row
)
DETERMINISTIC = ("clean", "clean-25")  # a second seed would give the same data


def truth(system: System) -> Polynomial:
    """The right-hand side as a polynomial of the system's degree."""
    place = {tuple(row): k for k, row in enumerate(monomials(system.dim, system.degree).tolist())}
    coefficients = np.zeros((system.dim, len(place)))
    for (output, exponents), value in system.terms.items():
        coefficients[output, place[exponents]] = value
    return Polynomial(system.dim, system.degree, coefficients)


def trajectory(system: System, times: Floats) -> Floats:
    """Noise-free states (times, dim) at increasing times within the span."""
    return np.asarray(_solution(system.name)(times).T)


@lru_cache(maxsize=64)
def _solution(name: str) -> OdeSolution:
    system = SYSTEMS[name]
    law = truth(system)
    # a step limit keeps the interpolant between steps as good as the steps
    limit = (system.span[1] - system.span[0]) / 2000
    solved = solve_ivp(
        lambda _, x: law(x), system.span, system.x0, method="DOP853", rtol=1e-12, atol=1e-13,
        dense_output=True, max_step=limit,
    )  # fmt: skip
    if not solved.success:
        raise RuntimeError(f"{name}: {solved.message}")
    return solved.sol


def sample(system: System, condition: str, seed: int = 0) -> tuple[Floats, Floats, Floats]:
    """Times (n,), what was measured at them (n, dim) with NaN where nothing was, and the noise-free states there."""
    if condition not in CONDITIONS:
        raise ValueError(f"unknown condition {condition!r}; known: {', '.join(CONDITIONS)}")
    # the same seed gives each system and each condition its own numbers
    random = np.random.default_rng([seed, zlib.crc32(f"{system.name}/{condition}".encode())])
    start, end = system.span
    if condition == "irregular":
        times = np.sort(random.uniform(start, end, 60))
    else:
        times = np.linspace(start, end, {"clean-25": 25, "one-by-one": 100 * system.dim}.get(condition, 100))
    clean = trajectory(system, times)
    share = {"noise-1": 0.01, "noise-5": 0.05, "noise-10": 0.1, "missing": 0.01, "one-by-one": 0.01}.get(condition, 0.0)
    measured = clean + share * clean.std(axis=0) * random.standard_normal(clean.shape)
    if condition == "missing":
        measured[random.random(clean.shape) < 0.3] = np.nan
    if condition == "one-by-one":
        in_turn = np.arange(len(times))[:, None] % system.dim == np.arange(system.dim)
        measured[~in_turn] = np.nan
    return times, measured, clean
