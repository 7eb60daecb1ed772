"""From the best fit in natural units to what a user gets: the law with intervals, its rivals, its noise."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from multilinear.errors import MultilinearError
from multilinear.ode.law import Interval, Law
from multilinear.ode.pipeline import Pipeline
from multilinear.ode.polynomial import Floats, Polynomial
from multilinear.ode.select import Candidate
from multilinear.ode.series import Units
from multilinear.ode.verdict import Verdict, judge

RIVALS = 5  # alternatives to name at most
CLOSE = 6.0  # difference of the criterion up to which a rival is named
TRIED = 30  # laws looked at for one that can be solved from end to end
NEARLY = 0.001  # of the variance that a much shorter law may leave unexplained


@dataclass(frozen=True)
class Alternative:
    """Another law that the data allow."""

    law: Law
    difference: float  # of the criterion: 2 is hardly, 10 strongly in favour of the best


@dataclass(frozen=True)
class Found:
    """All that a fit leaves."""

    law: Law
    degree: int
    starts: tuple[Floats, ...]
    noise: dict[str, float]
    verdict: Verdict
    alternatives: tuple[Alternative, ...]
    short: Law | None
    noise_is_relative: bool  # a share of the state, or of the state's units


class _Reader:
    """Turns candidates into laws in the data's units."""

    def __init__(self, pipeline: Pipeline, units: Units, names: tuple[str, ...], inputs: tuple[str, ...]) -> None:
        self.pipeline, self.units, self.names, self.inputs = pipeline, units, names, inputs
        largest = np.abs(np.concatenate([curve.states for curve in pipeline.smoothed])).max(0)
        self.largest = np.maximum(largest, 1e-6) * units.states

    def law(self, found: Candidate) -> Law:
        library = self.pipeline.library
        kept = found.terms | (self.pipeline.fixed != 0)
        table = self.units.to_data(np.where(kept, found.solution.coefficients, 0.0), library.exponents)
        polynomial = Polynomial(library.variables, library.degree, table)
        return Law(self.names, self.inputs, polynomial, self._intervals(found), self.largest)

    def lives(self, found: Candidate) -> bool:
        """Whether the law, solved once from its own starts, comes through all trajectories without blowing up."""
        law = self.law(found)
        for one, start in zip(self.pipeline.series, self.starts(found), strict=True):
            inputs = None if one.inputs is None else one.inputs * self.units.inputs
            try:
                law.solve(one.times * self.units.time, start, inputs)
            except MultilinearError:
                return False
        return True

    def starts(self, found: Candidate) -> tuple[Floats, ...]:
        firsts = np.cumsum([0, *(len(rows) for rows in self.pipeline.starts[:-1])])
        return tuple(found.solution.states[k] * self.units.states for k in firsts)

    def _intervals(self, found: Candidate) -> tuple[Interval, ...]:
        solution, search, exponents = found.solution, self.pipeline.search, self.pipeline.library.exponents
        freedom = max(1, search.samples - found.size - len(self.pipeline.starts) * solution.states.shape[1])
        wide = float(student.ppf(0.975, freedom)) * math.sqrt(search.samples / freedom)
        # the fit was weighted with the noise it found, so its covariance is in the right units
        errors = np.zeros(solution.active.shape)
        errors[solution.active] = np.sqrt(np.maximum(np.diag(solution.covariance()), 0.0)) * wide
        values, errors = (self.units.to_data(part, exponents) for part in (solution.coefficients, errors))
        return tuple(
            Interval(int(j), tuple(exponents[k].tolist()), float(values[j, k]), float(values[j, k] - errors[j, k]),
                     float(values[j, k] + errors[j, k])) for j, k in zip(*np.nonzero(solution.active), strict=True)
        )  # fmt: skip


def conclude(
    best: Candidate, pipeline: Pipeline, units: Units, names: tuple[str, ...], inputs: tuple[str, ...]
) -> Found:
    """What to tell of the best candidate."""
    reader, search = _Reader(pipeline, units, names, inputs), pipeline.search
    best = _living(best, reader)
    kept = (best.terms | (pipeline.fixed != 0)).any(0)
    share = pipeline.relative or search.shooting.segments.log
    spread = search.noise_of(best.solution) * (1.0 if share else units.states)
    verdict = judge(best, pipeline)
    rivals = []
    for other in sorted(search.sound(), key=lambda found: found.criterion)[: RIVALS + 1]:
        difference = other.criterion - best.criterion
        if other.terms.tobytes() != best.terms.tobytes() and difference < CLOSE:
            rivals.append(Alternative(reader.law(other), float(difference)))
    return Found(
        law=reader.law(best),
        degree=int(pipeline.library.exponents[kept].sum(1).max(initial=0)),
        starts=reader.starts(best),
        noise=dict(zip(names, map(float, spread), strict=True)),
        verdict=verdict,
        alternatives=tuple(rivals),
        short=_shorter(best, reader),
        noise_is_relative=share,
    )


def _living(best: Candidate, reader: _Reader) -> Candidate:
    """The best law that does not blow up between the first row and the last: short segments may hide that it does."""
    ranked = sorted(reader.pipeline.search.sound(), key=lambda found: found.criterion)
    for found in (best, *ranked[:TRIED]):
        if reader.lives(found):
            return found
    return best


def _shorter(best: Candidate, reader: _Reader) -> Law | None:
    """A law of far fewer terms that explains nearly as much, if there is one: real data have small effects."""
    search = reader.pipeline.search
    if best.size < 4 or search.exact(best):
        return None
    found = search.shorten(best, NEARLY)
    return reader.law(found) if found.size <= 0.6 * best.size else None
