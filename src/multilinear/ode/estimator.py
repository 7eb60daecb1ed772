"""`discover(t, X)`: the polynomial law behind measured trajectories, with intervals and a plain verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import sympy
from matplotlib.figure import Figure

from multilinear.errors import MultilinearError, check_choice
from multilinear.ode import invariants
from multilinear.ode.conclude import Alternative, Found, conclude
from multilinear.ode.known import Known, own_terms
from multilinear.ode.law import Interval, Law
from multilinear.ode.library import Library
from multilinear.ode.pipeline import Pipeline, Progress
from multilinear.ode.polynomial import Floats, Polynomial
from multilinear.ode.select import Candidate
from multilinear.ode.series import (
    all_series,
    as_numbers,
    check_data,
    check_series,
    first_complete,
    natural_units,
    read_data,
    thin,
    without_single_rows,
)
from multilinear.ode.verdict import Verdict, judge
from multilinear.ode.warm import enough_rows

MOST = 2000  # rows that a fit takes
MOST_TERMS = 600  # in all equations together
MANY = 300  # rows from which on terms are searched in a part of them
NOISES = ("auto", "additive", "relative", "log")
STRONG = 6.0  # difference of the criterion that speaks for a higher degree
HIGHEST = {1: 5, 2: 4, 3: 3}  # degree tried with "auto", by the number of states; 2 for more states


class PolynomialODE:
    """Find dx/dt as polynomials in the states, from noisy, irregular, incomplete measurements.

    Args:
        degree: highest degree of a term; "auto" tries 2 and up.
        names: of the states; x, y, z or x1, x2, ... if not given.
        inputs: names of the inputs that `fit` gets.
        order: 2 if states are positions: each gets its velocity as a further, unmeasured state.
        noise: "additive", "relative" (grows with the state), "log" (the same for positive states, exactly), or "auto".
        populations: each rate is proportional to its own state, as for living things.
        positive: no term may push a state at zero below zero.
        fix: known coefficients, such as {"x": {"y": 1.0}} for dx/dt = y + ...
        forbid: terms that an equation must not have, such as {"x": ["1", "x*y"]}.
        conserve: look for sums of states that stay constant, and use them.
        tolerance: residuals below this share of a state's spread are no reason for another term.
        progress: told in a line what was done, each step.

    >>> t = np.linspace(0, 4, 40)
    >>> x = np.stack([np.cos(2 * t), -2 * np.sin(2 * t)], axis=1)
    >>> model = PolynomialODE(degree=2, names=("x", "v")).fit(t, x)
    >>> model.print()
    dx/dt = 1.0*v
    dv/dt = -4.0*x
    """

    def __init__(
        self,
        degree: int | Literal["auto"] = "auto",
        *,
        names: Sequence[str] | None = None,
        inputs: Sequence[str] = (),
        order: int = 1,
        noise: str = "auto",
        populations: bool = False,
        positive: bool = False,
        fix: Mapping[str, Mapping[str, float]] | None = None,
        forbid: Mapping[str, Sequence[str]] | None = None,
        conserve: bool = True,
        tolerance: float = 0.0,
        progress: Progress | None = None,
    ) -> None:
        if degree != "auto" and (not isinstance(degree, int) or not 1 <= degree <= 8):
            raise MultilinearError(f"degree must be from 1 to 8, or 'auto'; got {degree!r}")
        if order not in (1, 2):
            raise MultilinearError(f"order must be 1 or 2, got {order}")
        self.degree: int | Literal["auto"] = degree
        self.order, self.noise_model = order, check_choice("noise", noise, NOISES)
        if order == 2 and (noise == "log" or populations or positive):
            raise MultilinearError("order 2 is for positions, which are no populations, not positive, not of log noise")
        self.names = tuple(map(str, names)) if names is not None else None
        self.input_names = tuple(map(str, inputs))
        if not 0 <= tolerance < 1:
            raise MultilinearError(f"tolerance is a share of each state's spread, from 0 to below 1; got {tolerance}")
        self.conserve, self.tolerance = conserve, tolerance
        self.known = Known(populations, positive, dict(fix or {}), dict(forbid or {}))
        self.progress = progress or (lambda _: None)
        self._found: Found | None = None

    def fit(self, t: Any, X: Any, inputs: Any = None) -> "PolynomialODE":
        """Find the law. One trajectory (n,), (n, d), or a list of each; NaN where nothing was measured."""
        times, states, forced = read_data(t, X, inputs)
        check_series(times, states, forced)
        self._name(states, forced)
        times, states, forced = without_single_rows(times, states, forced)
        check_data(states, self.measured, self.noise_model == "log")
        times, states, forced = thin(times, states, forced, MOST)
        self.data = (times, states, forced)
        self.relation: invariants.Relation | None = None
        free = self.order == 1 and self.known == Known(positive=self.known.positive) and forced is None
        if self.conserve and free and self.noise_model != "log":
            self.relation = invariants.linear_relation(states)
        if self.relation is not None:
            self._fit_related(times, states, self.relation)
        else:
            self._fit(times, states, forced)
        return self

    def like(self) -> "PolynomialODE":
        """Another one with the same options, not fitted."""
        return PolynomialODE(
            self.degree, names=self.names, inputs=self.input_names, order=self.order, noise=self.noise_model,
            populations=self.known.populations, positive=self.known.positive, fix=self.known.fix,
            forbid=self.known.forbid, conserve=self.conserve, tolerance=self.tolerance, progress=self.progress,
        )  # fmt: skip

    def _name(self, states: Sequence[Floats], forced: Sequence[Floats] | None) -> None:
        """Settle the names of states and inputs for these data."""
        width = states[0].shape[1] if states[0].ndim == 2 else 0
        usual = ("x", "y", "z")[:width] if width <= 3 else tuple(f"x{k + 1}" for k in range(width))
        self.measured = self.names or usual
        if len(self.measured) != width:
            raise MultilinearError(f"{len(self.measured)} names for {width} states")
        count = 0 if forced is None else forced[0].shape[-1]
        self.inputs = self.input_names or tuple(f"u{k + 1}" for k in range(count))
        if len(self.inputs) != count:
            raise MultilinearError(f"{len(self.inputs)} names for {count} inputs")
        velocities = tuple(f"v_{name}" for name in self.measured) if self.order == 2 else ()
        everything = (*self.measured, *velocities, *self.inputs)
        if len(set(everything)) < len(everything):
            raise MultilinearError(f"states and inputs need different names, got {', '.join(everything)}")
        for name in everything:
            if not name.isidentifier():
                raise MultilinearError(f"{name!r} cannot name a variable; use letters, digits and _")

    def _fit(self, times: list[Floats], states: list[Floats], forced: list[Floats] | None) -> None:
        names, slopes_of = self.measured, {}
        if self.order == 2:
            d = len(names)
            slopes_of = {d + j: j for j in range(d)}
            names = names + tuple(f"v_{name}" for name in names)
            states = [np.hstack([x, np.full_like(x, np.nan)]) for x in states]
        units = natural_units(times, states, forced, slopes_of)
        series = all_series(times, states, forced, units)
        few = series
        if sum(len(t) for t in times) > MANY:  # search in a part of the rows that still shows the motion, then fit all
            few = all_series(*thin(times, states, forced, enough_rows(series, MANY // 2)), units)
        d = len(names)
        best: tuple[Candidate, Pipeline] | None = None
        worse = 0
        measured = sum(int(np.isfinite(x).sum()) for x in states)
        for degree in self._degrees(names, measured):
            library = Library(d, degree, len(self.inputs))
            allowed, fixed = self.known.terms(library, names, self.inputs, units, slopes_of)
            if best is not None and allowed.sum() > 0.45 * measured:
                break  # more terms than the data could tell apart
            options: dict[str, Any] = {"noise": self.noise_model, "tolerance": self.tolerance, "slopes_of": slopes_of}
            pipeline = Pipeline(few, library, allowed, fixed, **options)
            if self.known.positive:
                pipeline.search.nonnegative = ~own_terms(library)
            found = pipeline.run(self.progress, best[0] if best else None)
            self.progress(f"degree {degree}: {found.size} terms, criterion {found.criterion:.1f}")
            if best is None or found.criterion < best[0].criterion - STRONG:
                best, worse = (found, pipeline), 0
            else:
                worse += 1
            verdict = judge(*best)
            white = verdict.correlation < 2 / math.sqrt(measured)
            if pipeline.search.exact(best[0]) or (verdict.explained and (worse or white)):
                break
        assert best is not None
        if few is not series:
            small = best[1]
            pipeline = Pipeline(series, small.library, small.allowed, small.fixed, **options)
            pipeline.search.nonnegative = small.search.nonnegative
            best = pipeline.refine(best[0], self.progress), pipeline
        sober = best[1].search.sober(best[0])
        self._found = conclude(sober, best[1], units, names, self.inputs)

    def _degrees(self, names: Sequence[str], measured: int) -> list[int]:
        variables = len(names) + len(self.inputs)
        if self.degree == "auto":
            least = max(2, self.known.least_degree((*names, *self.inputs)))
            if len(names) * math.comb(variables + least, least) > max(MOST_TERMS, 0.45 * measured) and least == 2:
                least = 1
            degrees = list(range(least, max(least, HIGHEST.get(len(names), 2)) + 1 if least > 1 else 2))
        else:
            degrees = [self.degree]
        count = len(names) * math.comb(variables + degrees[0], degrees[0])
        if count > MOST_TERMS:
            raise MultilinearError(
                f"{count} terms of degree {degrees[0]} in {variables} variables are too many; choose fewer states, or "
                "a lower degree"
            )
        return degrees

    def _fit_related(self, times: list[Floats], states: list[Floats], relation: invariants.Relation) -> None:
        """Fit with all states, and without each that a conserved sum ties to the others; keep the shortest law."""
        names = self.measured
        options: dict[str, Any] = {
            "positive": self.known.positive, "noise": self.noise_model, "tolerance": self.tolerance,
            "progress": self.progress, "conserve": False,
        }  # fmt: skip
        outcomes = [PolynomialODE(self.degree, names=names, **options).fit(times, states).found]
        for gone in relation.members():
            kept = [j for j in range(len(names)) if j != gone]
            part = PolynomialODE(self.degree, names=[names[j] for j in kept], **options)
            part.fit(times, [x[:, kept] for x in states])
            forbid = invariants.other_terms(part.law, relation, gone, names)
            whole = PolynomialODE(part.polynomial.degree, names=names, forbid=forbid, **options).fit(times, states)
            # rivals were looked for without the state that is gone
            verdict = replace(whole.verdict, belief=part.verdict.belief)
            outcomes.append(replace(whole.found, verdict=verdict))
        self._found = min(
            outcomes, key=lambda one: (not one.verdict.explained, len(one.law.intervals), -one.verdict.r2)
        )

    @property
    def found(self) -> Found:
        if self._found is None:
            raise MultilinearError("nothing was fitted yet; call fit(t, X) first")
        return self._found

    @property
    def law(self) -> Law:
        return self.found.law

    @property
    def verdict(self) -> Verdict:
        """Whether the law explains the data, and whether they could tell it from its rivals."""
        return self.found.verdict

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Rivals that the data allow, the closest first."""
        return self.found.alternatives

    @property
    def short(self) -> Law | None:
        """A law of far fewer terms that explains nearly as much, if there is one."""
        return self.found.short

    @property
    def degree_found(self) -> int:
        return self.found.degree

    @property
    def noise(self) -> dict[str, float]:
        """Standard deviation of each measured state's noise; a share of it where `found.noise_is_relative`."""
        return {name: self.found.noise[name] for name in self.measured}

    @property
    def starts(self) -> tuple[Floats, ...]:
        """The fitted first state of each trajectory."""
        return self.found.starts

    @property
    def polynomial(self) -> Polynomial:
        return self.law.polynomial

    @property
    def equations(self) -> dict[str, sympy.Expr]:
        """Right-hand sides by the states' names."""
        return self.law.equations()

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """One row a coefficient: equation, exponents, estimate, and the ends of its 95% interval."""
        return self.law.intervals

    def predict(self, t: Any, x0: Any = None, inputs: Any = None) -> Floats:
        """States (n, d) at times `t` from `x0` at the first of them, or from the first trajectory's fitted start."""
        times, start = as_numbers(t), as_numbers(self.starts[0] if x0 is None else x0).reshape(-1)
        if times.ndim != 1 or len(times) == 0 or not np.isfinite(times).all() or (np.diff(times) <= 0).any():
            raise MultilinearError("predict needs increasing, finite times")
        if len(start) != len(self.law.names):
            raise MultilinearError(f"x0 must have {len(self.law.names)} values, for {', '.join(self.law.names)}")
        if (inputs is None) != (not self.inputs):
            raise MultilinearError("predict needs inputs exactly where fit had them")
        forced = None if inputs is None else as_numbers(inputs)
        if forced is not None:
            forced = forced.reshape(len(forced), -1)
            if forced.shape != (len(times), len(self.inputs)):
                raise MultilinearError(f"inputs must be ({len(times)}, {len(self.inputs)}), got {forced.shape}")
        if x0 is None and times[0] != (first := self.data[0][0][0]):
            if forced is None and times[0] > first:
                return self.law.solve(np.concatenate([[first], times]), start)[1:]
            raise MultilinearError("say x0: the times do not start where the data do")
        return self.law.solve(times, start, forced)

    def score(self, t: Any = None, X: Any = None, inputs: Any = None) -> float:
        """R2 of solutions from the fitted starts, mean over states; of new data, from their first complete row."""
        if t is None:
            times, states, forced = self.data
            starts = self.starts
        else:
            if self.order == 2:
                raise MultilinearError("new data have no velocities to start from; fit them, or use predict with x0")
            times, states, forced = first_complete(*read_data(t, X, inputs))
            starts = tuple(x[0] for x in states)
        try:
            found = [
                self.law.solve(one, start, None if forced is None else forced[k])
                for k, (one, start) in enumerate(zip(times, starts, strict=True))
            ]
        except MultilinearError:
            return -math.inf
        stacked, model = np.concatenate(states), np.concatenate(found)[:, : states[0].shape[1]]
        if self.noise_model == "log":
            stacked, model = np.log(stacked), np.log(np.maximum(model, 1e-300))
        total = np.nansum((stacked - np.nanmean(stacked, 0)) ** 2, 0)
        return float(np.mean(1 - np.nansum((stacked - model) ** 2, 0) / np.maximum(total, 1e-300)))

    def print(self) -> None:
        """Show the equations."""
        print(self.law.text())  # noqa: T201  # what a user asks for by this name

    def to_latex(self) -> str:
        return self.law.to_latex()

    def to_function(self) -> Any:
        return self.law.to_function()

    def plot(self) -> Figure:
        """Data with the fitted trajectories."""
        from multilinear.ode.figures import draw_fit

        return draw_fit(self)


def discover(t: Any, X: Any, input_values: Any = None, **options: Any) -> PolynomialODE:
    """`PolynomialODE(**options).fit(t, X, input_values)`.

    >>> t = np.linspace(0, 3, 30)
    >>> discover(t, np.exp(-t)).print()
    dx/dt = -1.0*x
    """
    return PolynomialODE(**options).fit(t, X, input_values)
