"""`discover(t, X)`: the polynomial law behind measured trajectories, with intervals and a plain verdict."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import sympy
from matplotlib.figure import Figure

from multilinear.errors import MultilinearError, check_choice
from multilinear.ode import invariants
from multilinear.ode.conclude import Alternative, Found, conclude
from multilinear.ode.law import Interval, Law, find_term
from multilinear.ode.library import Library, Terms
from multilinear.ode.pipeline import Pipeline, Progress
from multilinear.ode.polynomial import Floats, Polynomial
from multilinear.ode.select import Candidate
from multilinear.ode.series import Units, as_list, check_data, make_series, natural_units, thin
from multilinear.ode.verdict import Verdict, judge

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
        if degree != "auto" and not 1 <= int(degree) <= 8:
            raise MultilinearError(f"degree must be from 1 to 8, or 'auto'; got {degree}")
        if order not in (1, 2):
            raise MultilinearError(f"order must be 1 or 2, got {order}")
        self.degree, self.order, self.noise_model = degree, order, check_choice("noise", noise, NOISES)
        if order == 2 and (noise == "log" or populations):
            raise MultilinearError("order 2 is for positions, which are neither populations nor of log noise")
        self.names, self.inputs = tuple(names) if names else None, tuple(inputs)
        if not 0 <= tolerance < 1:
            raise MultilinearError(f"tolerance is a share of each state's spread, from 0 to below 1; got {tolerance}")
        self.populations, self.positive, self.conserve, self.tolerance = populations, positive, conserve, tolerance
        self.fix, self.forbid = dict(fix or {}), dict(forbid or {})
        self.progress = progress or (lambda _: None)
        self._found: Found | None = None

    def fit(self, t: Any, X: Any, inputs: Any = None) -> "PolynomialODE":
        """Find the law. One trajectory (n,), (n, d), or a list of each; NaN where nothing was measured."""
        times, states = as_list(t), [x[:, None] if x.ndim == 1 else x for x in as_list(X)]
        forced = None if inputs is None else [u[:, None] if u.ndim == 1 else u for u in as_list(inputs)]
        names = self._names(states, forced)
        check_data(times, states, forced, names, self.noise_model == "log")
        times, states, forced = thin(times, states, forced)
        self.data = (times, states, forced)
        self.measured = names
        relation = None
        if self.conserve and self.order == 1 and not self.fix and not self.forbid and forced is None:
            relation = invariants.linear_relation(times, states)
        if relation is not None and self.noise_model != "log":
            self.relation: invariants.Relation | None = relation
            self._fit_related(times, states, names, relation)
        else:
            self.relation = None
            self._fit(times, states, forced, names)
        return self

    def like(self) -> "PolynomialODE":
        """Another one with the same options, not fitted."""
        return PolynomialODE(
            self.degree, names=self.names, inputs=self.inputs, order=self.order, noise=self.noise_model,
            populations=self.populations, positive=self.positive, fix=self.fix, forbid=self.forbid,
            conserve=self.conserve, tolerance=self.tolerance, progress=self.progress,
        )  # fmt: skip

    def _names(self, states: Sequence[Floats], forced: Sequence[Floats] | None) -> tuple[str, ...]:
        width = states[0].shape[1] if states[0].ndim == 2 else 0
        names = self.names or (("x", "y", "z")[:width] if width <= 3 else tuple(f"x{k + 1}" for k in range(width)))
        if len(names) != width or len(set(names)) != width:
            raise MultilinearError(f"{len(names)} names for {width} states; give a different name to each")
        count = 0 if forced is None else forced[0].shape[1]
        if count and not self.inputs:
            self.inputs = tuple(f"u{k + 1}" for k in range(count))
        if len(self.inputs) != count:
            raise MultilinearError(f"{len(self.inputs)} names for {count} inputs")
        for name in (*names, *self.inputs):
            if not name.isidentifier():
                raise MultilinearError(f"{name!r} cannot name a variable; use letters, digits and _")
        return tuple(names)

    def _fit(
        self, times: list[Floats], states: list[Floats], forced: list[Floats] | None, names: tuple[str, ...]
    ) -> None:
        slopes_of = {}
        if self.order == 2:
            d = len(names)
            slopes_of = {d + j: j for j in range(d)}
            names = names + tuple(f"v_{name}" for name in names)
            states = [np.hstack([x, np.full_like(x, np.nan)]) for x in states]
        units = natural_units(times, states, forced, slopes_of)
        series = [
            make_series(t, x, None if forced is None else forced[k], units)
            for k, (t, x) in enumerate(zip(times, states, strict=True))
        ]
        rows = sum(len(t) for t in times)
        few = series
        if rows > MANY:  # search in every k-th row, then fit all
            every = -(-rows // (MANY // 2))
            few = [
                make_series(t[::every], x[::every], None if forced is None else forced[k][::every], units)
                for k, (t, x) in enumerate(zip(times, states, strict=True))
            ]
        d = len(names)
        best: tuple[Candidate, Pipeline] | None = None
        worse = 0
        for degree in self._degrees(len(names)):
            library = Library(d, degree, len(self.inputs))
            allowed, fixed = self._terms(library, names, units, slopes_of)
            measured = sum(int(np.isfinite(x).sum()) for x in states)
            if best is not None and allowed.sum() > 0.45 * measured:
                break  # more terms than the data could tell apart
            options: dict[str, Any] = {"noise": self.noise_model, "tolerance": self.tolerance, "slopes_of": slopes_of}
            pipeline = Pipeline(few, library, allowed, fixed, **options)
            if self.positive:
                own = np.stack([library.exponents[:, j] > 0 for j in range(d)])
                pipeline.search.nonnegative = ~own
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
        self._found = conclude(*best, units, names, self.inputs)

    def _degrees(self, states: int) -> list[int]:
        if self.degree != "auto":
            return [int(self.degree)]
        return list(range(2, HIGHEST.get(states, 2) + 1))

    def _terms(
        self, library: Library, names: tuple[str, ...], units: Units, slopes_of: Mapping[int, int]
    ) -> tuple[Terms, Floats]:
        """Which terms may be found, and the coefficients that are given, in natural units."""
        place = {tuple(row): k for k, row in enumerate(library.exponents.tolist())}
        allowed = np.ones((library.states, len(library)), dtype=bool)
        given = np.zeros(allowed.shape)
        if self.populations:
            allowed &= np.stack([library.exponents[:, j] > 0 for j in range(library.states)])
        everything = (*names, *self.inputs)
        for equation, terms in self.forbid.items():
            for term in terms:
                exponents = find_term(term, everything)
                if exponents in place:
                    allowed[names.index(check_choice("state", equation, names)), place[exponents]] = False
        for slope, state in slopes_of.items():
            allowed[state] = False
            given[state, place[tuple(int(k == slope) for k in range(library.variables))]] = 1.0
        for equation, values in self.fix.items():
            row = names.index(check_choice("state", equation, names))
            for term, value in values.items():
                exponents = find_term(term, everything)
                if exponents not in place:
                    raise MultilinearError(f"the fixed term {term!r} has a degree above {library.degree}")
                allowed[row, place[exponents]] = False
                given[row, place[exponents]] = value
        return allowed, units.to_natural(given, library.exponents)

    def _fit_related(
        self, times: list[Floats], states: list[Floats], names: tuple[str, ...], relation: invariants.Relation
    ) -> None:
        """Fit without one of the states that a conserved sum ties together, each in turn; keep the shortest law."""
        outcomes = []
        for gone in relation.members():
            kept = [j for j in range(len(names)) if j != gone]
            options: dict[str, Any] = {
                "positive": self.positive, "tolerance": self.tolerance, "progress": self.progress, "conserve": False,
            }  # fmt: skip
            part = PolynomialODE(self.degree, names=[names[j] for j in kept], **options)
            part.fit(times, [x[:, kept] for x in states])
            forbid = invariants.other_terms(part.law, relation, gone, names)
            whole = PolynomialODE(part.polynomial.degree, names=names, forbid=forbid, **options)
            outcomes.append(whole.fit(times, states))
        best = min(outcomes, key=lambda one: (not one.verdict.explained, len(one.intervals), -one.verdict.r2))
        self._found = best.found

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
        times = np.asarray(t, np.float64)
        if times.ndim != 1 or len(times) == 0 or not np.isfinite(times).all() or (np.diff(times) <= 0).any():
            raise MultilinearError("predict needs increasing, finite times")
        start = np.asarray(self.starts[0] if x0 is None else x0, np.float64).reshape(-1)
        if len(start) != len(self.law.names):
            raise MultilinearError(f"x0 must have {len(self.law.names)} values, for {', '.join(self.law.names)}")
        forced = None if inputs is None else np.asarray(inputs, np.float64).reshape(len(times), -1)
        if (forced is None) != (not self.inputs):
            raise MultilinearError("predict needs inputs exactly where fit had them")
        if x0 is None and times[0] != self.data[0][0][0]:
            begin = np.concatenate([[self.data[0][0][0]], times])
            if forced is None and times[0] > begin[0]:
                return self.law.solve(begin, start)[1:]
            raise MultilinearError("say x0: the times do not start where the data do")
        return self.law.solve(times, start, forced)

    def score(self, t: Any = None, X: Any = None, inputs: Any = None) -> float:
        """R2 of solutions from the fitted starts, mean over states; of new data, from their own first row."""
        if t is None:
            times, states, forced = self.data
            starts = self.starts
        else:
            times, states = as_list(t), as_list(X)
            forced = None if inputs is None else as_list(inputs)
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


def discover(t: Any, X: Any, **options: Any) -> PolynomialODE:
    """`PolynomialODE(**options).fit(t, X)`.

    >>> t = np.linspace(0, 3, 30)
    >>> discover(t, np.exp(-t)).print()
    dx/dt = -1.0*x
    """
    inputs = options.pop("input_values", None)
    return PolynomialODE(**options).fit(t, X, inputs)
