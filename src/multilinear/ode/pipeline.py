"""From trajectories to a law: starts, fits, elimination and polish, with noise and solver settled on the way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from multilinear.ode.library import Library, Terms
from multilinear.ode.polynomial import Floats
from multilinear.ode.select import ROUNDING, Candidate, Search, sharpen
from multilinear.ode.series import Series, cut
from multilinear.ode.shooting import JOIN, Accuracy, Shooting, Solution
from multilinear.ode.warm import (
    FINE,
    Smooth,
    grows_with_state,
    residual_noise,
    sizes_of,
    smooth,
    weak_fit,
    weak_supports,
    weak_system,
)

TIGHTENING = (1.0, 0.05)  # joints of segments, in units of the noise, before they close
FROM_DATA = (100.0, 1.0, 0.05)  # the same for a start that trusts the states and not the law
ROUGH = 1e-2  # noise that the first fits reckon with at least
MOST_CHEATS = 8  # laws thrown out at the end, one after the other
SLACK = 6.0  # rise of the criterion with tighter joints that gives a law away
Progress = Callable[[str], None]


class Pipeline:
    """Everything that is tried for one library."""

    def __init__(
        self,
        series: Sequence[Series],
        library: Library,
        allowed: Terms,
        fixed: Floats,
        *,
        noise: str = "auto",
        tolerance: float = 0.0,
        slopes_of: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`slopes_of` says which states were not measured and are the slope of which other."""
        self.series, self.library, self.allowed, self.fixed = series, library, allowed, fixed
        segments, self.starts = cut(series, noise == "log")
        self.smoothed = [smooth(one, noise == "log", slopes_of) for one in series]
        self.relative = noise == "relative" or (noise == "auto" and grows_with_state(series, self.smoothed))
        if self.relative:
            pairs = zip(series, self.smoothed, strict=True)
            sizes = cut([replace(one, values=sizes_of(curve.samples)) for one, curve in pairs])[0].values
            segments = replace(segments, weights=1 / np.nan_to_num(sizes, nan=1.0))
        self.states = np.concatenate([c.samples[rows] for c, rows in zip(self.smoothed, self.starts, strict=True)])
        self.smooth_noise = residual_noise(series, self.smoothed, self.relative, noise == "log")
        self.smooth_noise = np.where(segments.observed.any((0, 1)), self.smooth_noise, self.smooth_noise.max())
        shooting = Shooting(segments, library, Accuracy())
        # begin by getting it roughly right: with the weights of exact data a law that is not quite one never settles
        self.search = Search(shooting, allowed, fixed, np.maximum(self.smooth_noise, ROUGH), tolerance)
        self.weak = weak_system(series, self.smoothed, library)
        self.search.weak = self.weak

    def run(self, progress: Progress, earlier: Candidate | None = None) -> Candidate:
        """The best law, `earlier` (of a smaller library) among the candidates."""
        search = self.search
        if earlier is not None:
            self._take_over(earlier)
        self._first_candidates(progress)
        self._settle(progress)
        self._second_candidates(progress)
        self._settle(progress)
        densest = max(search.sound(), key=lambda c: c.size)
        if not search.exact(search.best()):
            search.eliminate(densest)
        search.eliminate(search.best())
        progress(f"eliminated to {search.best().size}, {search.best().criterion:.1f}")
        best = search.polish(search.best())
        progress(f"polished to {best.size}, {best.criterion:.1f}, {len(search.seen)} fits")
        if not search.exact(best):
            self._second_candidates(progress)  # along a better path than before
            best = search.polish(search.best())
            progress(f"polished again to {best.size}, {best.criterion:.1f}, {len(search.seen)} fits")
        return self._final(best, progress)

    def refine(self, earlier: Candidate, progress: Progress) -> Candidate:
        """A law found in a part of these data: fit it to all of them, and see whether they ask for other terms."""
        search, old = self.search, earlier.solution
        search.restart(np.zeros_like(self.allowed), self.states, ())
        search.restart(earlier.terms, self.states, TIGHTENING, old.coefficients)
        search.noise = np.maximum(search.noise_of(search.best().solution), search.noise)
        self._settle(progress)
        best = search.polish(search.best(), rounds=4)
        progress(f"with all data {best.size}, {best.criterion:.1f}, {len(search.seen)} fits")
        return self._final(best, progress)

    def _final(self, best: Candidate, progress: Progress) -> Candidate:
        search = self.search
        for _ in range(3):
            noise, accuracy = search.noise_of(best.solution), sharpen(search, best.solution)
            if np.abs(np.log(noise / search.noise)).max() < 0.1 and accuracy == search.shooting.accuracy:
                break
            search.refresh(noise, accuracy)
            best = search.polish(search.fit(best.terms, best.solution, iterations=40))
            progress(f"settled on {best.size}, {best.criterion:.1f}")
        best = self._honest(best)
        if search.exact(best) and not search.coarse:
            best = self._to_the_last_digit(best)
        return best

    def _honest(self, best: Candidate) -> Candidate:
        """The best law that needs no slack: a large coefficient can make much of small steps at the joints."""
        search = self.search
        for _ in range(MOST_CHEATS):
            old = best.solution
            tight = search.shooting.fit(
                old.states, old.coefficients, best.terms, search.noise, join=JOIN / 30, iterations=15
            )
            criterion = search.criterion(tight)
            if criterion < best.criterion + SLACK:
                return best
            search.seen[best.terms.tobytes()] = Candidate(tight, criterion)  # what it is worth without slack
            search.record = np.inf
            if best.terms.tobytes() == search.best().terms.tobytes():
                return search.best()
            best = search.polish(search.best(), rounds=4)
        return best

    def _to_the_last_digit(self, best: Candidate) -> Candidate:
        """The same terms with finer weights and steps: exact data deserve exact coefficients."""
        search, old = self.search, best.solution
        fine = Search(search.shooting, self.allowed, self.fixed, search.noise)
        fine.floor = np.full_like(search.noise, ROUNDING)
        found, noise = old, fine.floor
        for _ in range(2):  # to rounding error, and again by what really is left
            shooting = search.shooting.with_accuracy(sharpen(fine, found))
            found = shooting.fit(found.states, found.coefficients, best.terms, noise, iterations=40)
            if not np.isfinite(found.cost):
                return best
            noise = fine.noise_of(found)
        if search.criterion(found) > best.criterion + 1e-6:
            return best
        exact = Candidate(found, best.criterion)
        search.seen[best.terms.tobytes()] = exact
        return exact

    def _first_candidates(self, progress: Progress) -> None:
        search = self.search
        search.restart(np.zeros_like(self.allowed), self.states, ())  # what is left if nothing else holds
        for terms in weak_supports(*self.weak, self.allowed, self.fixed):
            found = search.restart(terms, self.states, TIGHTENING)
            progress(f"weak form, {int(terms.sum())} terms: {found.criterion:.1f}")
        if self.allowed.sum() < 0.45 * search.samples:
            for begin in (weak_fit(*self.weak, self.allowed, self.fixed), self.fixed):
                joints = FROM_DATA if begin is self.fixed else TIGHTENING
                found = search.restart(self.allowed, self.states, joints, begin)
                progress(f"all {int(self.allowed.sum())} terms: {found.criterion:.1f}")

    def _take_over(self, earlier: Candidate) -> None:
        """Fit the terms of a law over a library of lower degree: monomials of low degree come first in both."""
        old, count = earlier.solution, earlier.terms.shape[1]
        terms, coefficients = np.zeros_like(self.allowed), self.fixed.copy()
        terms[:, :count] = earlier.terms
        coefficients[:, :count] = old.coefficients
        self.search.noise = old.noise
        start = Solution(old.states, coefficients, terms, old.noise, np.inf, old.residuals)
        self.search.fit(terms, start, iterations=30)

    def _second_candidates(self, progress: Progress) -> None:
        """The weak form again, along the best model's path: between samples it is closer than any spline."""
        search = self.search
        best = search.best()
        curves = self.path(best.solution)
        weak = weak_system(self.series, curves, self.library)
        if not all(np.isfinite(part).all() for part in weak):
            return
        search.weak = weak
        for terms in weak_supports(*weak, self.allowed, self.fixed):
            found = search.restart(terms, best.solution.states, TIGHTENING)
            progress(f"along the path, {int(terms.sum())} terms: {found.criterion:.1f}")

    def _settle(self, progress: Progress) -> None:
        """Noise from the best fit and a solver to match, until neither changes."""
        search = self.search
        for _ in range(4):
            best = search.best()
            noise, accuracy = search.noise_of(best.solution), sharpen(search, best.solution)
            if np.abs(np.log(noise / search.noise)).max() < 0.3 and accuracy == search.shooting.accuracy:
                return
            ranked = sorted(search.sound(), key=lambda c: c.criterion)
            again = [*ranked[:2], max(ranked, key=lambda c: c.size)]
            search.refresh(noise, accuracy)
            for candidate in again:
                search.fit(candidate.terms, candidate.solution, iterations=40)
            progress(f"noise {noise}, {accuracy}, best {search.best().size}: {search.best().criterion:.1f}")

    def path(self, solution: Solution) -> list[Smooth]:
        """The model's states on the fine grid of each trajectory."""
        fine = self.search.shooting.path(solution, FINE)
        found, first = [], 0
        for one, rows in zip(self.series, self.starts, strict=True):
            points = fine[first : first + len(rows)].reshape(-1, self.library.states)
            first += len(rows)
            count = FINE * (len(one.times) - 1) + 1
            times = np.interp(np.arange(count) / FINE, np.arange(len(one.times)), one.times)
            found.append(Smooth(times, points[:count], points[:count:FINE]))
        return found
