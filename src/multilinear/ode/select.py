"""Which terms: fit all that are allowed, leave out what does not matter, and judge every set by its fit and size.

The judge is the extended Bayesian information criterion (Chen and Chen, 2008): a term must pay for itself, and for
having been picked from many.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln

from multilinear.errors import MultilinearError
from multilinear.ode.library import Terms
from multilinear.ode.polynomial import Floats
from multilinear.ode.shooting import JOIN, Accuracy, Shooting, Solution
from multilinear.ode.subsets import best_subsets, neighbours_alike, reduce, wald, weakest
from multilinear.ode.warm import weak_fit

FLOOR = 1e-6  # residuals below this share of a state are rounding, and no reason for another term
ROUNDING = 1e-9  # what is left of exact data by a fit to the last digit
PATIENCE = 2500  # evaluations after which a search ends where it stands; most take a third
GAMMA = 1.5  # how much having been picked from many costs; 1 is usual for many candidates
WRONG_SIGN = 1e4  # added to the criterion for a coefficient that must not be negative
COARSE = 1e-3  # noise above which the solver takes two steps between positions at most


@dataclass(frozen=True)
class Candidate:
    """A set of terms with its fit and its criterion: lower is better."""

    solution: Solution
    criterion: float

    @property
    def terms(self) -> Terms:
        return self.solution.active

    @property
    def size(self) -> int:
        return int(self.terms.sum())


class Search:
    """Fits sets of terms, each once, and keeps them all: what is nearly as good as the best is told to the user."""

    def __init__(
        self, shooting: Shooting, allowed: Terms, fixed: Floats, noise: Floats, tolerance: float = 0.0
    ) -> None:
        """Residuals below `tolerance` of a state's spread are no reason for another term."""
        self.shooting, self.allowed, self.fixed = shooting, allowed, fixed
        seen = shooting.segments.observed.any((0, 1))
        spread = np.nanstd(np.where(seen, shooting.segments.values, 0.0), axis=(0, 1))
        self.floor = max(FLOOR, tolerance) * np.where(spread > 0, spread, 1.0)
        self.coarse = tolerance > FLOOR  # the user asked for no more than a rough law
        self.weak: tuple[Floats, Floats] | None = None  # a linear system that starts of coefficients come from
        self.noise = np.maximum(noise, self.floor)
        self.counts = shooting.segments.observed.sum((0, 1))
        self.samples = int(self.counts.sum())
        self.nonnegative: Terms = np.zeros_like(allowed)  # terms whose coefficients must not be below 0
        self.seen: dict[bytes, Candidate] = {}
        self.share = 1.0  # of the samples that count: fewer where residuals are correlated
        self.record = math.inf  # the best criterion so far

    @property
    def price(self) -> float:
        """What one more term costs, about."""
        return math.log(self.samples) + 2 * math.log(max(2, int(self.allowed.sum())))

    def noise_of(self, solution: Solution) -> Floats:
        """Root mean square residuals, of states never measured the mean of the others."""
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.sqrt(solution.squares / self.counts)
        seen = self.counts > 0
        return np.asarray(np.maximum(np.where(seen, found, found[seen].mean()), self.floor))

    def unweighted(self, solution: Solution) -> Floats:
        """Data minus model, in natural units."""
        weights = self.shooting.segments.weights
        return solution.residuals if weights is None else solution.residuals / weights

    def criterion(self, solution: Solution) -> float:
        if not np.isfinite(solution.cost):
            return math.inf
        seen = self.counts > 0
        spread = self.noise_of(solution)[seen]
        misfit = float((2 * self.share * self.counts[seen] * np.log(spread)).sum())
        k, total = int(solution.active.sum()), int(self.allowed.sum())
        picked = min(k, total // 2)  # nearly all of them is as hard a choice as half
        choices = float(gammaln(total + 1) - gammaln(picked + 1) - gammaln(total - picked + 1))
        wrong = int((solution.coefficients[self.nonnegative] < 0).sum())
        return misfit + k * math.log(self.samples) + 2 * GAMMA * choices + WRONG_SIGN * wrong

    def fit(self, terms: Terms, start: Solution, *, iterations: int = 15) -> Candidate:
        """Fit `terms` from the states and coefficients of a neighbour."""
        key = terms.tobytes()
        known = self.seen.get(key)
        if known is not None:
            return known
        dropped = start.active & ~terms
        coefficients = np.where(dropped, 0.0, start.coefficients)
        solution = self.shooting.fit(start.states, coefficients, terms, self.noise, iterations=iterations)
        found = self._checked(solution)
        self.seen[key] = found
        return found

    def _checked(self, solution: Solution) -> Candidate:
        """A fit and its criterion, infinite if finer steps lead elsewhere: a field near blowing up fools a solver."""
        criterion = self.criterion(solution)
        if np.isfinite(criterion) and criterion < self.record:
            limit = 0.02 + 3 * self.noise_of(solution)
            if not (self.shooting.solver_error(solution) < limit).all():
                return Candidate(solution, math.inf)
            self.record = criterion
        return Candidate(solution, criterion)

    def restart(
        self, terms: Terms, states: Floats, joints: Sequence[float], coefficients: Floats | None = None
    ) -> Candidate:
        """Fit `terms` from states and a linear estimate, with joints that close step by step; keep what is better."""
        if coefficients is None:
            assert self.weak is not None
            coefficients = weak_fit(*self.weak, terms, self.fixed)
        for join in joints:
            loose = self.shooting.fit(states, coefficients, terms, self.noise, join=join, iterations=20)
            if not np.isfinite(loose.cost):
                break
            states, coefficients = loose.states, loose.coefficients
        solution = self.shooting.fit(states, coefficients, terms, self.noise, iterations=30)
        found = self._checked(solution)
        known = self.seen.get(terms.tobytes())
        if known is None or found.criterion < known.criterion:
            self.seen[terms.tobytes()] = found
            return found
        return known

    def sound(self) -> list[Candidate]:
        """The fits that did not blow up."""
        return [found for found in self.seen.values() if np.isfinite(found.criterion)]

    def best(self) -> Candidate:
        sound = self.sound()
        if not sound:
            raise MultilinearError("no law could be fitted: every one blows up; look at the data in a plot first")
        return min(sound, key=lambda found: found.criterion)

    def sober(self, best: Candidate) -> Candidate:
        """The choice again, if even the best fit misses something: correlated residuals are fewer than they look."""
        correlation = neighbours_alike(best.solution.residuals)
        if self.exact(best) or correlation < 2 / math.sqrt(max(self.samples, 1)):
            return best
        self.share = (1 - correlation) / (1 + correlation)
        for key, found in self.seen.items():
            if np.isfinite(found.criterion):
                self.seen[key] = Candidate(found.solution, self.criterion(found.solution))
        smaller = [found for found in self.sound() if found.size <= best.size]
        return min(smaller, key=lambda found: found.criterion)

    def refresh(self, noise: Floats, accuracy: Accuracy) -> None:
        """Forget all fits: they were made with another noise or solver."""
        self.noise = np.maximum(noise, self.floor)
        self.shooting = self.shooting.with_accuracy(accuracy)
        self.seen.clear()
        self.record = math.inf

    def exact(self, found: Candidate) -> bool:
        """Whether nothing but rounding is left, so that only fewer terms could be better."""
        return bool((self.noise_of(found.solution) <= 1.01 * self.floor).all())

    def eliminate(self, start: Candidate) -> None:
        """From `start` down: leave out the terms that matter least by the curvature, several at once at first."""
        current = start
        limit = math.inf
        while current.size > 0 and np.isfinite(current.criterion):
            remaining = weakest(current.solution, budget=0.5, most=max(1, current.size // 6))
            following = self.fit(remaining, current.solution)
            if not np.isfinite(following.criterion):
                return
            limit = min(limit, current.criterion)
            if following.criterion > limit + 4 * self.price + 40:
                return
            current = following

    def shorten(self, start: Candidate, share: float) -> Candidate:
        """As few terms as explain all but `share` more of the variance than `start` does."""
        values = self.shooting.segments.values
        seen = self.counts > 0
        total = np.nanvar(values[:, :, seen], axis=(0, 1)) * self.counts[seen]

        def unexplained(found: Candidate) -> float:
            return float((np.nansum(self.unweighted(found.solution) ** 2, (0, 1))[seen] / total).mean())

        best, limit = start, unexplained(start) + share
        while best.size > 1:
            fewer = self.fit(weakest(best.solution, budget=0.0, most=1), best.solution, iterations=30)
            if not np.isfinite(fewer.criterion) or unexplained(fewer) > limit:
                return best
            best = fewer
        return best

    def polish(self, start: Candidate, rounds: int = 12) -> Candidate:
        """Drop, add or exchange single terms as long as the criterion falls."""
        best = start
        for _ in range(rounds):
            if self.shooting.counter[0] > PATIENCE:
                return best
            found = min(self._neighbours(best), key=lambda c: c.criterion, default=best)
            if found.criterion >= best.criterion - 1e-9:
                return best
            best = found
        return best

    def _neighbours(self, current: Candidate) -> list[Candidate]:
        found = []
        strengths = wald(current.solution)
        weakest = np.argsort(strengths)[:4]
        outputs, monomials = np.nonzero(current.terms)
        for k in weakest:
            fewer = current.terms.copy()
            fewer[outputs[k], monomials[k]] = False
            if strengths[k] < 4 * self.price:
                found.append(self.fit(fewer, current.solution))
        if self.exact(current):
            return found
        found += [self.fit(terms, current.solution) for terms in self._additions(current, 3)]
        if any(c.criterion < current.criterion - 1e-9 for c in found):
            return found
        for output in range(len(current.terms)):
            rewritten = self._rewritten(current, output)
            found += [self.restart(terms, current.solution.states, (1.0, 0.05)) for terms in rewritten]
        if any(c.criterion < current.criterion - 1e-9 for c in found):
            return found
        for fewer_candidate in found[: len(weakest)]:  # exchanges, when nothing simpler helps
            if fewer_candidate.size < current.size and np.isfinite(fewer_candidate.criterion):
                additions = self._additions(fewer_candidate, 2)
                found += [self.fit(terms, fewer_candidate.solution) for terms in additions]
        return found

    def _rewritten(self, current: Candidate, output: int, count: int = 5) -> list[Terms]:
        """Other sets of terms for one equation: of all small sets those that are best by the quadratic cost."""
        solution = current.solution
        union = current.terms.copy()
        union[output] = self.allowed[output]
        point = self.shooting.evaluate(solution.states, solution.coefficients, union, self.noise, JOIN)
        if point.curvature is None or point.gradient is None:
            return []
        head = solution.states.size
        mine = head + np.flatnonzero(np.nonzero(union)[0] == output)
        others = np.setdiff1d(np.arange(len(point.curvature)), mine)
        reduced = reduce(point.curvature, point.gradient, others, mine)
        if reduced is None:
            return []
        stiffness, pull = reduced
        values = solution.coefficients[output, self.allowed[output]]
        target = stiffness @ values - pull
        places = np.flatnonzero(self.allowed[output])
        price = math.log(self.samples) + 2 * math.log(max(2, int(self.allowed.sum())))
        ranked = []
        for subset, gain in best_subsets(stiffness, target, keep=count):
            row = np.zeros_like(current.terms[output])
            row[places[subset]] = True
            ranked.append((price * len(subset) - gain, row))
        ranked.sort(key=lambda item: item[0])
        found = []
        for _, row in ranked[: count + 1]:
            terms = current.terms.copy()
            terms[output] = row
            if terms.tobytes() not in self.seen:
                found.append(terms)
        return found[:count]

    def _additions(self, current: Candidate, count: int) -> list[Terms]:
        """The most promising single additions, by how far the cost would fall if it were quadratic."""
        absent = self.allowed & ~current.terms
        if not absent.any() or not np.isfinite(current.criterion):
            return []
        solution = current.solution
        everything = self.shooting.evaluate(
            solution.states, solution.coefficients, current.terms | absent, self.noise, JOIN
        )
        if everything.curvature is None or everything.gradient is None:
            return []
        head = solution.states.size
        order = np.flatnonzero((current.terms | absent).reshape(-1))
        is_absent = absent.reshape(-1)[order]
        inside = np.concatenate([np.arange(head), head + np.flatnonzero(~is_absent)])
        outside = head + np.flatnonzero(is_absent)
        reduced = reduce(everything.curvature, everything.gradient, inside, outside)
        if reduced is None:
            return []
        gains = reduced[1] ** 2 / np.maximum(np.diag(reduced[0]), 1e-9 * np.diag(everything.curvature)[outside])
        found = []
        for k in np.argsort(-gains)[:count]:
            if gains[k] > 0.3 * self.price:
                more = current.terms.reshape(-1).copy()
                more[order[outside[k] - head]] = True
                found.append(more.reshape(current.terms.shape))
        return found


def sharpen(search: Search, solution: Solution) -> Accuracy:
    """The cheapest accuracy whose error is well below the noise of `solution`."""
    current = search.shooting.accuracy
    noise = search.noise_of(solution)
    ladder = [Accuracy(3, 1), *(Accuracy(5, 2**k) for k in range(5))]
    if noise.min() > COARSE:  # a law that needs finer steps under such noise is about to blow up
        ladder = ladder[:3]
    ladder = [a for a in ladder if a.rows * a.steps >= current.rows * current.steps] or [current]
    paths = []
    for accuracy in ladder:
        trial = search.shooting.with_accuracy(accuracy).evaluate(
            solution.states, solution.coefficients, np.zeros_like(solution.active), noise, JOIN
        )
        paths.append(trial)
        if len(paths) > 1:
            change = np.abs(paths[-1].residuals - paths[-2].residuals)
            ends = np.abs(paths[-1].cost - paths[-2].cost)
            if np.isfinite(ends) and np.nanmax(change / noise, initial=0) < 0.03 and ends < 0.1 * search.samples:
                return ladder[len(paths) - 2]
    return ladder[-1]
