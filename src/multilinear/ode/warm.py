"""Where a fit starts: smoothed states, and coefficients from the weak form, which needs no derivatives of data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from scipy.interpolate import CubicSpline, make_smoothing_spline

from multilinear.ode.library import Library, Terms
from multilinear.ode.polynomial import Floats
from multilinear.ode.series import Series

FINE = 4  # points of the fine grid to a sample
SMALLEST = 0.02  # share of a state's usual size below which relative noise shrinks no further
NOISELESS = 1e-3  # residuals below this are the curve's own error, and tell nothing about noise
RESOLVED = 0.02  # error of a spline through a part of the rows, as a share of the spread
ENOUGH = 40  # samples of a state that its kind of noise can be told from
FAR_LIKELIER = 10.0  # difference of log likelihoods
WINDOWS = (0.08, 0.2)  # widths of test functions, as shares of a trajectory


@dataclass(frozen=True)
class Smooth:
    """A smoothed trajectory on a fine grid, and its values at the samples."""

    times: Floats
    states: Floats
    samples: Floats


def smooth(series: Series, log: bool = False, slopes_of: Mapping[int, int] = MappingProxyType({})) -> Smooth:
    """Smoothing splines, each with as much smoothing as generalised cross-validation finds; lines for few samples."""
    count = FINE * (len(series.times) - 1) + 1
    fine = np.interp(np.arange(count) / FINE, np.arange(len(series.times)), series.times)
    columns = np.zeros((count, series.values.shape[1]))
    for j, y in enumerate(series.values.T):
        seen = np.isfinite(y)
        if not seen.any():
            continue
        t, values = series.times[seen], np.log(y[seen]) if log else y[seen]
        curve = _curve(t, values)
        # past the first and last measurement of this state a spline runs away
        columns[:, j] = curve(np.clip(fine, t[0], t[-1]))
    if log:
        columns = np.exp(columns)
    for slope, state in slopes_of.items():
        columns[:, slope] = np.gradient(columns[:, state], fine)
    return Smooth(fine, columns, columns[::FINE])


def enough_rows(series: Sequence[Series], least: int) -> int:
    """How many rows show the motion: `least`, or more until splines through so many are close to the smooth curves."""
    total = sum(len(one.times) for one in series)
    curves = [(one.times, smooth(one).samples) for one in series]
    rows = least
    while rows < total:
        every = -(-total // rows)
        worst = 0.0
        for t, x in curves:
            some = np.union1d(np.arange(0, len(t), every), [len(t) - 1])
            if len(some) > 3:
                miss = np.abs(CubicSpline(t[some], x[some])(t) - x).max(0)
                worst = max(worst, float((miss / np.maximum(x.std(0), 1e-12)).max()))
        if worst < RESOLVED:
            return rows
        rows *= 2
    return total


def sizes_of(states: Floats) -> Floats:
    """What relative noise is relative to: the state, but not less than a small share of its usual size."""
    return np.asarray(np.maximum(np.abs(states), SMALLEST * np.sqrt(np.mean(states**2, axis=0)) + 1e-12))


def _residuals(series: Sequence[Series], smoothed: Sequence[Smooth], log: bool = False) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        if log:
            parts = [np.log(one.values) - np.log(curve.samples) for one, curve in zip(series, smoothed, strict=True)]
        else:
            parts = [one.values - curve.samples for one, curve in zip(series, smoothed, strict=True)]
    return np.concatenate(parts)


def residual_noise(series: Sequence[Series], smoothed: Sequence[Smooth], relative: bool, log: bool) -> Floats:
    """Root mean squares of what the smooth curves leave, 0 for states that were not measured."""
    rest = _residuals(series, smoothed, log)
    if relative:
        rest = rest / np.concatenate([sizes_of(curve.samples) for curve in smoothed])
    return np.asarray(np.sqrt(np.nansum(rest**2, 0) / np.maximum(np.isfinite(rest).sum(0), 1)))


def grows_with_state(series: Sequence[Series], smoothed: Sequence[Smooth]) -> bool:
    """Whether noise in proportion to the states is far likelier than noise of one size, given the smooth curves."""
    rest = _residuals(series, smoothed)
    sizes = np.concatenate([sizes_of(curve.samples) for curve in smoothed])
    gain = 0.0
    for miss, size in zip(rest.T, sizes.T, strict=True):
        seen = np.isfinite(miss)
        if seen.sum() < ENOUGH or np.mean(miss[seen] ** 2) < NOISELESS**2:
            continue
        even, scaled = np.mean(miss[seen] ** 2), np.mean((miss[seen] / size[seen]) ** 2)
        gain += 0.5 * seen.sum() * (np.log(even) - np.log(scaled)) - np.log(size[seen]).sum()
    return bool(gain > FAR_LIKELIER)


def _curve(t: Floats, y: Floats) -> Callable[[Floats], Floats]:
    if len(t) < 3 or np.ptp(y) == 0:
        return lambda at: np.interp(at, t, y)
    if len(t) < 6:
        return CubicSpline(t, y)  # type: ignore[no-any-return]
    try:
        curve = make_smoothing_spline(t, y)
        expected = _roughness(t, y)
        if np.sqrt(np.mean((y - curve(t)) ** 2)) > 3 * expected:
            # cross-validation has more than one valley, and took the one far from the data
            curve = _smoothed_to(t, y, expected)
    except (ValueError, np.linalg.LinAlgError):
        return CubicSpline(t, y)  # type: ignore[no-any-return]
    return curve  # type: ignore[no-any-return]


def _roughness(t: Floats, y: Floats) -> float:
    """The noise that neighbours would tell of: how far each value is from the line between those beside it."""
    right = (t[1:-1] - t[:-2]) / (t[2:] - t[:-2])
    miss = y[1:-1] - (1 - right) * y[:-2] - right * y[2:]
    return float(np.sqrt(np.mean(miss**2 / (1 + right**2 + (1 - right) ** 2))))


def _smoothed_to(t: Floats, y: Floats, noise: float) -> Callable[[Floats], Floats]:
    """The smoothing spline that leaves residuals of size `noise`."""
    unit = float(np.median(np.diff(t))) ** 3
    low, high = -12.0, 12.0
    for _ in range(24):
        middle = (low + high) / 2
        curve = make_smoothing_spline(t, y, lam=10**middle * unit)
        if np.sqrt(np.mean((y - curve(t)) ** 2)) > noise:
            high = middle
        else:
            low = middle
    return curve  # type: ignore[no-any-return]


def weak_system(series: Sequence[Series], smoothed: Sequence[Smooth], library: Library) -> tuple[Floats, Floats]:
    """Rows that say: the integral of test function times law equals minus that of its derivative times state."""
    left, right = [], []
    for one, curve in zip(series, smoothed, strict=True):
        states = curve.states
        if one.inputs is not None:
            forced = np.stack([np.interp(curve.times, one.times, column) for column in one.inputs.T], axis=1)
            states = np.hstack([states, forced])
        terms = library.values(states)
        weights = np.gradient(curve.times)
        weights[[0, -1]] /= 2
        span = curve.times[-1]
        for share in WINDOWS:
            half = max(share * span / 2, 2.5 * float(np.median(np.diff(one.times))))
            half = min(half, span / 2)
            centres = np.linspace(half, span - half, min(200, 2 * len(one.times)))
            s = (curve.times - centres[:, None]) / half
            inside = np.abs(s) < 1
            bump = np.where(inside, (1 - s**2) ** 3, 0.0)
            slope = np.where(inside, -6 * s * (1 - s**2) ** 2, 0.0) / half
            norm = 1 / np.sqrt(half)
            left.append((bump * weights) @ terms * norm)
            right.append(-((slope * weights) @ curve.states) * norm)
    return np.concatenate(left), np.concatenate(right)


def weak_fit(left: Floats, right: Floats, allowed: Terms, fixed: Floats) -> Floats:
    """Least squares for each equation over its allowed terms, a trace of ridge against collinear ones."""
    found = fixed.copy()
    for j, terms in enumerate(allowed):
        if terms.any():
            found[j, terms] = _ridge(left[:, terms], right[:, j] - left @ fixed[j])
    return found


def _ridge(a: Floats, b: Floats) -> Floats:
    size = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    scaled = a / size
    normal = scaled.T @ scaled
    normal[np.diag_indices_from(normal)] += 1e-9
    return np.asarray(np.linalg.solve(normal, scaled.T @ b) / size)


def weak_supports(left: Floats, right: Floats, allowed: Terms, fixed: Floats) -> list[Terms]:
    """Candidate sets of terms, from sparse to dense: backward elimination of each equation, cut at several prices."""
    paths = [_path(left, right[:, j] - left @ fixed[j], allowed[j]) for j in range(len(allowed))]
    found: dict[bytes, Terms] = {}
    rows = len(left) / 8  # neighbouring test functions overlap
    for price in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        support = np.zeros_like(allowed)
        for j, path in enumerate(paths):
            cost = [rows * np.log(max(error, 1e-30)) + price * np.log(rows + 2) * terms.sum() for terms, error in path]
            support[j] = path[int(np.argmin(cost))][0]
        found.setdefault(support.tobytes(), support)
    return sorted(found.values(), key=lambda terms: int(terms.sum()))


def _path(left: Floats, target: Floats, allowed: np.typing.NDArray[np.bool_]) -> list[tuple[Terms, float]]:
    """Supports from all allowed terms down to none, each without the term that mattered least, with mean squares."""
    size = np.maximum(np.linalg.norm(left, axis=0), 1e-300)
    gram = (left / size).T @ (left / size)
    moment = (left / size).T @ target
    total = float(target @ target)
    active = np.flatnonzero(allowed)
    path = []
    while True:
        terms = np.zeros(len(allowed), dtype=bool)
        terms[active] = True
        if len(active) == 0:
            path.append((terms, total / len(target)))
            return path
        inverse = np.linalg.inv(gram[np.ix_(active, active)] + 1e-9 * np.eye(len(active)))
        values = inverse @ moment[active]
        path.append((terms, max(total - float(values @ moment[active]), 0.0) / len(target)))
        active = np.delete(active, np.argmin(values**2 / np.diag(inverse)))
