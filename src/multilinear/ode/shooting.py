"""Multiple shooting: find start values of short segments and coefficients so that the segments join and meet the data.

One long solve from a first value is a hopeless search: it blows up, or forgets. Cut into segments with free starts
the problem is nearly linear. Segments are solved together in one batch with exact derivatives; a stiff penalty joins
them, so that at the end they are one trajectory.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from multilinear.ode.library import Library, Sensitive, Terms
from multilinear.ode.polynomial import Floats
from multilinear.ode.solve import flow

JOIN = 1e-3  # how far segments may miss each other, in units of the noise


@dataclass(frozen=True)
class Segments:
    """Samples cut into S segments of up to m positions."""

    values: Floats  # (S, m, d), NaN where nothing was measured
    gaps: Floats  # (S, m): time from each position to the next, 0 past the end
    joined: NDArray[np.bool_]  # (S,): whether the next segment goes on where this one ends
    inputs: Floats | None = None  # (S, m, u)
    input_slopes: Floats | None = None
    log: bool = False  # whether noise is on the logarithm
    weights: Floats | None = None  # (S, m, d): where noise grows with the state, one over its size

    @property
    def observed(self) -> NDArray[np.bool_]:
        return np.isfinite(self.values)


@dataclass(frozen=True)
class Accuracy:
    """Of the solver inside segments: rows of extrapolation, so order 2 * rows, and steps between two positions."""

    rows: int = 3
    steps: int = 1


@dataclass(frozen=True)
class Solution:
    """States at the segments' starts, coefficients, and how well they do."""

    states: Floats  # (S, d)
    coefficients: Floats  # (d, M)
    active: Terms
    noise: Floats  # (d,): the scale of residuals that the fit was weighted with
    cost: float
    residuals: Floats  # (S, m, d): data minus model, times weights; NaN where nothing was measured
    curvature: Floats | None = None  # of half the cost in (states, coefficients)
    gradient: Floats | None = None

    @property
    def squares(self) -> Floats:
        """Sum of squared residuals of each state."""
        return np.asarray(np.nansum(self.residuals**2, axis=(0, 1)))

    def covariance(self) -> Floats:
        """Of the active coefficients, given the noise."""
        assert self.curvature is not None
        count = int(self.active.sum())
        scale = 1 / np.sqrt(np.maximum(np.diag(self.curvature), 1e-300))
        scaled = self.curvature * scale[:, None] * scale
        scaled[np.diag_indices_from(scaled)] += 1e-14
        try:
            inverse = cho_solve(cho_factor(scaled), np.eye(len(scaled))[:, -count:]) if count else np.zeros((0, 0))
        except LinAlgError:
            inverse = np.linalg.pinv(scaled)[:, -count:]
        return np.asarray((inverse * scale[:, None] * scale[-count:])[-count:]) if count else np.zeros((0, 0))


class Shooting:
    """The least-squares problem of one data set and one library."""

    def __init__(
        self, segments: Segments, library: Library, accuracy: Accuracy, counter: list[int] | None = None
    ) -> None:
        self.segments, self.library, self.accuracy = segments, library, accuracy
        self.counter = [0] if counter is None else counter  # of evaluations, by whichever accuracy

    def solver_error(self, solution: Solution) -> Floats:
        """How far finer steps lead elsewhere, at worst, in each state."""
        d, nothing = self.library.states, np.zeros_like(solution.active)
        finer = Accuracy(5, 2 * self.accuracy.steps + 2)
        ends = []
        with np.errstate(all="ignore"):
            for shooting in (self, self.with_accuracy(finer)):
                field = Sensitive(self.library, solution.coefficients, nothing, derivatives=False)
                ends.append(np.stack([now[:, :d, 0] for now in shooting._follow(field, solution.states)]))
            return np.asarray(np.abs(ends[1] - ends[0]).max((0, 1)))

    def with_accuracy(self, accuracy: Accuracy) -> "Shooting":
        return Shooting(self.segments, self.library, accuracy, self.counter)

    def _follow(self, field: Sensitive, states: Floats, fine: int = 1) -> list[Floats]:
        """The moving arrays at every position, `fine` - 1 times evenly between, and at the end."""
        segments, d = self.segments, self.library.states
        inputs = segments.inputs
        now = field.start(states, None if inputs is None else inputs[:, 0])
        found = [now]
        for q in range(segments.gaps.shape[1]):
            if inputs is not None:
                assert segments.input_slopes is not None
                now = now.copy()
                now[:, d:, 0] = inputs[:, q]
                field.input_slopes = segments.input_slopes[:, q]
            for _ in range(fine):
                now = flow(field, now, segments.gaps[:, q, None] / fine, self.accuracy.steps, self.accuracy.rows)
                found.append(now)
        return found

    def path(self, solution: Solution, fine: int) -> Floats:
        """States (S, m * fine, d) at every position and evenly between, without derivatives."""
        field = Sensitive(self.library, solution.coefficients, solution.active, derivatives=False)
        with np.errstate(all="ignore"):
            found = self._follow(field, solution.states, fine)[:-1]
        return np.stack([now[:, : self.library.states, 0] for now in found], axis=1)

    def evaluate(self, states: Floats, coefficients: Floats, active: Terms, noise: Floats, join: float) -> Solution:
        """Cost, residuals, gradient and curvature at a point. The cost is infinite where the field blows up."""
        self.counter[0] += 1
        with np.errstate(all="ignore"):
            return self._evaluate(states, coefficients, active, noise, join)

    def _evaluate(self, states: Floats, coefficients: Floats, active: Terms, noise: Floats, join: float) -> Solution:
        segments, d = self.segments, self.library.states
        count = int(active.sum())
        path = self._follow(Sensitive(self.library, coefficients, active), states)
        size, positions = len(states), segments.values.shape[1]
        unknowns = size * d + count
        local = np.zeros((size, d + count, d + count))
        local_gradient = np.zeros((size, d + count))
        residuals = np.full_like(segments.values, np.nan)
        cost = 0.0
        for q in range(positions):
            model, slope = path[q][:, :d, 0], path[q][:, :d, 1:]
            seen = segments.observed[:, q]
            if segments.log:
                slope = slope / model[:, :, None]
                model = np.log(model)
            miss = np.where(seen, segments.values[:, q] - model, 0.0)
            if segments.weights is not None:
                miss, slope = miss * segments.weights[:, q], slope * segments.weights[:, q, :, None]
            residuals[:, q] = np.where(seen, miss, np.nan)
            weighted, rows = miss / noise, np.where(seen[:, :, None], slope, 0.0) / noise[:, None]
            cost += 0.5 * float((weighted**2).sum())
            local += np.swapaxes(rows, 1, 2) @ rows
            local_gradient -= (np.swapaxes(rows, 1, 2) @ weighted[:, :, None])[:, :, 0]
        tight = 1 / (noise * join)
        ends = np.flatnonzero(segments.joined)
        reached, slope = path[-1][ends, :d, 0], path[-1][ends, :d, 1:] * tight[:, None]
        miss = (reached - states[ends + 1]) * tight
        cost += 0.5 * float((miss**2).sum())
        local[ends] += np.swapaxes(slope, 1, 2) @ slope
        local_gradient[ends] += (np.swapaxes(slope, 1, 2) @ miss[:, :, None])[:, :, 0]
        if not np.isfinite(cost) or not np.isfinite(local).all():
            return Solution(states, coefficients, active, noise, np.inf, residuals)
        curvature, gradient = np.zeros((unknowns, unknowns)), np.zeros(unknowns)
        head = curvature[: size * d, : size * d].reshape(size, d, size, d)
        each = np.arange(size)
        head[each, :, each] += local[:, :d, :d]
        gradient[: size * d] = local_gradient[:, :d].reshape(-1)
        gradient[size * d :] = local_gradient[:, d:].sum(0)
        side = local[:, :d, d:].copy()
        curvature[size * d :, size * d :] = local[:, d:, d:].sum(0)
        # the joint: minus the identity for the next segment's start
        coupling = slope[:, :, :d] * tight[:, None]
        head[ends + 1, :, ends] -= coupling
        head[ends, :, ends + 1] -= np.swapaxes(coupling, 1, 2)
        head[ends + 1, :, ends + 1] += np.diag(tight**2)
        gradient[: size * d].reshape(size, d)[ends + 1] -= miss * tight
        side[ends + 1] -= slope[:, :, d:] * tight[:, None]
        flat = side.reshape(size * d, count)
        curvature[: size * d, size * d :] = flat
        curvature[size * d :, : size * d] = flat.T
        return Solution(states, coefficients, active, noise, cost, residuals, curvature, gradient)

    def fit(
        self,
        states: Floats,
        coefficients: Floats,
        active: Terms,
        noise: Floats,
        *,
        join: float = JOIN,
        iterations: int = 30,
        tolerance: float = 1e-3,
    ) -> Solution:
        """Levenberg-Marquardt from a start. Coefficients outside `active` stay as they are.

        Ends when a step is predicted to lower the cost by less than `tolerance`; noise is the unit of the cost.
        """
        d = self.library.states
        current = self.evaluate(states, coefficients, active, noise, join)
        for _ in range(12):  # a start that blows up: begin with a slower field
            if np.isfinite(current.cost):
                break
            coefficients = np.where(active, 0.5 * coefficients, coefficients)
            current = self.evaluate(states, coefficients, active, noise, join)
        if not np.isfinite(current.cost):
            return current
        damping = 1e-3
        for _ in range(iterations):
            assert current.curvature is not None and current.gradient is not None
            diagonal = np.maximum(np.diag(current.curvature), 1e-12)
            scale = 1 / np.sqrt(diagonal)
            normal = current.curvature * scale[:, None] * scale
            gradient = current.gradient * scale
            better = None
            for _ in range(8):
                damped = normal.copy()
                damped[np.diag_indices_from(damped)] += damping
                try:
                    step = -cho_solve(cho_factor(damped, overwrite_a=True, check_finite=False), gradient)
                except LinAlgError:
                    damping *= 10
                    continue
                predicted = -float(gradient @ step) - 0.5 * float(step @ (normal @ step))
                move = step * scale
                trial_states = current.states + move[: states.size].reshape(-1, d)
                trial_coefficients = current.coefficients.copy()
                trial_coefficients[active] += move[states.size :]
                trial = self.evaluate(trial_states, trial_coefficients, active, noise, join)
                if trial.cost < current.cost:
                    better = trial
                    break
                if predicted < tolerance:
                    break
                damping *= 10 if np.isfinite(trial.cost) else 100
            if better is None:
                break
            gain = current.cost - better.cost
            damping = max(damping / 10, 1e-9)
            current = better
            if gain < tolerance:
                break
        return current
