"""The peers of the discovery benchmark: PySINDy as it comes, as its strongest user would run it, and told the truth.

PySINDy needs a table without gaps. Where values are missing, each variable is interpolated by a cubic spline at the
times of all rows between the first and the last time at which every variable is known, as users do.

"default" is `SINDy(feature_library=PolynomialLibrary(degree))`. For the others a grid of settings is run with PySINDy's
own differentiation, libraries and optimizers: thresholds, ridge weights, states as they are or scaled to unit
deviation, finite differences of three orders or smoothed ones (STLSQ and its ensemble), bumps of several widths and
orders (weak form). "auto" takes the setting with the lowest BIC of short predictions: the law is simulated over two
samples from every second one. On the six tuned systems this picked the right terms two to three times as often as the
BIC of one simulation of the whole series, the more usual choice, and almost as often as the truth itself. "oracle"
takes the setting with the fewest wrong terms, and among those the lowest coefficient error.

A plain neural ODE gives no terms, only trajectories.
"""

import warnings
from collections.abc import Iterator

import numpy as np
import pysindy
import sklearn
import torch
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline, make_smoothing_spline
from torch import Tensor, nn

from multilinear.ode import monomials

Floats = NDArray[np.float64]
Table = tuple[Floats, Floats]  # times (n,) and states (n, d) without gaps
Regression = tuple[Floats, Floats, Floats]  # library columns, left-hand sides, and the scale of the states (d,)

FAMILIES = ("stlsq", "ensemble", "weak")
THRESHOLDS = (0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.45, 0.7, 1.0)  # 0.1 is PySINDy's own
RIDGES = (0.05, 1e-5)  # the first is PySINDy's own; it outweighs states far below one
BUMPS = ((0.05, 4), (0.1, 4), (0.1, 8), (0.2, 8))  # half width as a share of the span (0.05 is PySINDy's own), order
AHEAD = 2  # samples that a law is asked to predict


def complete(times: Floats, states: Floats) -> Table:
    """Each variable interpolated at the times at which all are known or lie between known values."""
    known = np.isfinite(states)
    if known.all():
        return times, states
    start = max(times[column][0] for column in known.T)
    end = min(times[column][-1] for column in known.T)
    inside = times[(times >= start) & (times <= end)]
    return inside, _interpolated(times, states, inside)


def _interpolated(times: Floats, states: Floats, where: Floats) -> Floats:
    known = np.isfinite(states)
    splines = [CubicSpline(times[k], values[k]) for k, values in zip(known.T, states.T, strict=True)]
    return np.stack([spline(where) for spline in splines], axis=1)


def _uniform(times: Floats) -> bool:
    return bool(np.ptp(np.diff(times)) < 1e-6 * (times[-1] - times[0]))


def tables(times: Floats, states: Floats) -> list[Table]:
    """The complete tables that a user may make of the data: as it is or filled, and on equal steps for smoothing."""
    filled = complete(times, states)
    share = np.isfinite(states).mean()
    if share > 0.5 and _uniform(filled[0]):
        return [filled]
    # as many steps as there are values of a variable, and not fewer than 100
    steps = np.linspace(filled[0][0], filled[0][-1], max(100, round(len(times) * share)))
    return [filled, (steps, _interpolated(times, states, steps))]


def smooth(times: Floats, states: Floats) -> Floats:
    """Smoothing splines with the penalty chosen by generalised cross-validation."""
    return np.stack([make_smoothing_spline(times, column)(times) for column in states.T], axis=1)


def slopes(table: Table, family: str) -> Iterator[Table]:
    """States (smoothed where the method smooths) and their derivatives, by each differentiation method that fits."""
    times, states = table
    methods = {f"order {order}": pysindy.FiniteDifference(order=order) for order in (2, 4, 6)}
    methods["spline"] = pysindy.SmoothedFiniteDifference(smoother=lambda x: smooth(times, x), order=4)
    if _uniform(times):
        for window, order in ((7, 4), (11, 2), (19, 4)):  # the second is PySINDy's own
            keywords = {"window_length": window, "polyorder": 3}
            methods[f"window {window}"] = pysindy.SmoothedFiniteDifference(smoother_kws=keywords, order=order)
    for name, method in methods.items():
        if family == "stlsq" or name in ("order 4", "window 7", "spline"):
            slope = np.asarray(method(states, t=times))
            if np.isfinite(slope).all():  # times that almost coincide can be too much for a method
                yield np.asarray(method.smoothed_x_), slope


def _strong(table: Table, scales: list[Floats], degree: int, family: str) -> Iterator[Regression]:
    for states, slope in slopes(table, family):
        for scale in scales:
            columns = pysindy.PolynomialLibrary(degree=degree).fit_transform(states / scale)
            yield np.asarray(columns), slope / scale, scale


def _weak(table: Table, scales: list[Floats], degree: int) -> Iterator[Regression]:
    """Both sides integrated against bumps."""
    grids = [table]
    if len(table[0]) <= 120:
        # the integrals follow straight lines from point to point: finer steps along a spline may help
        finer = np.linspace(table[0][0], table[0][-1], 4 * len(table[0]) - 3)
        grids.append((finer, _interpolated(*table, finer)))
    for times, states in grids:
        for width, order in BUMPS:
            try:
                library = pysindy.WeakPDELibrary(
                    function_library=pysindy.PolynomialLibrary(degree=degree),
                    spatiotemporal_grid=times,
                    H_xt=width * (times[-1] - times[0]),
                    p=order,
                )
            except (ValueError, TypeError):  # PySINDy 2.1 stumbles over a bump that holds fewer than two samples
                continue
            for scale in scales:
                model = pysindy.SINDy(feature_library=library, optimizer=pysindy.STLSQ(threshold=0))
                model.fit(states / scale, t=times)
                yield model.optimizer.Theta_, np.asarray(library.convert_u_dot_integral(states / scale)), scale


def default(times: Floats, states: Floats, degree: int) -> Floats:
    """Coefficients (d, monomials) by PySINDy as it comes."""
    times, states = complete(times, states)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = pysindy.SINDy(feature_library=pysindy.PolynomialLibrary(degree=degree)).fit(states, t=times)
    return np.asarray(model.coefficients())


def candidates(family: str, times: Floats, states: Floats, degree: int) -> Floats:
    """Coefficients (settings, d, monomials) of the laws that the grid of a family finds, each once."""
    # the input checks of scikit-learn are a third of the time
    with warnings.catch_warnings(), sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        warnings.simplefilter("ignore")  # thresholds that leave no term
        return np.unique(np.stack(list(_candidates(family, times, states, degree))), axis=0)


def _candidates(family: str, times: Floats, states: Floats, degree: int) -> Iterator[Floats]:
    exponents = monomials(states.shape[1], degree)
    for table in tables(times, states):
        scales = [np.ones(states.shape[1]), table[1].std(axis=0)]
        if family == "ensemble":  # twenty fits for one, so a smaller grid: what served it best on the tuned ones
            scales = scales[:1]
        setups = _weak(table, scales, degree) if family == "weak" else _strong(table, scales, degree, family)
        for columns, target, scale in setups:
            # scaled states get a time scale as well, so that thresholds mean the same for slow and fast systems
            scaled = scale is not scales[0]
            rate = np.sqrt(np.mean(target**2) / np.mean(columns[:, 0] ** 2)) if scaled else 1.0
            back = rate * scale[:, None] / np.prod(scale**exponents, axis=1)
            for ridge in RIDGES if family == "stlsq" else RIDGES[1:]:
                for threshold in THRESHOLDS[::2] if family == "ensemble" else THRESHOLDS:
                    optimizer = pysindy.STLSQ(threshold=threshold, alpha=ridge)
                    if family == "ensemble":
                        optimizer = pysindy.EnsembleOptimizer(opt=optimizer, bagging=True)
                    yield back * optimizer.fit(columns, target / rate).coef_


def choose_by_bic(laws: Floats, times: Floats, states: Floats, degree: int) -> int:
    """The law whose short predictions have the lowest BIC on what was measured."""
    inside, filled = complete(times, states)
    measured = states[np.isin(times, inside)]
    # where each row has few values, look ahead until about two of each variable have come
    ahead = round(AHEAD / np.isfinite(states).mean())
    first = np.arange(0, len(inside) - ahead, ahead)
    rows = first[:, None] + np.arange(1, ahead + 1)
    steps = inside[rows] - inside[rows - 1]
    found = simulated(laws, degree, filled[first], steps, longest=(inside[-1] - inside[0]) / 800)
    target = measured[rows]
    known = np.isfinite(target)
    with np.errstate(all="ignore"):
        squares = np.where(known, ((found - target) / np.nanstd(states, axis=0)) ** 2, 0.0).sum(axis=(1, 2))
    counts = known.sum(axis=(0, 1))
    squares = np.where(np.isfinite(squares), squares, 1e30) / counts
    terms = np.count_nonzero(laws.reshape(len(laws), -1), axis=1)
    bic = (counts * np.log(squares + 1e-30)).sum(axis=1) + terms * np.log(counts.sum())
    return int(np.argmin(bic))


def choose_by_truth(laws: Floats, truth: Floats) -> int:
    """The law with the fewest wrong terms, and among those the one with the lowest error."""
    wrong = ((laws != 0) != (truth != 0)).sum(axis=(1, 2))
    error = np.square(laws - truth).sum(axis=(1, 2))
    return int(np.lexsort((error, wrong))[0])


def simulated(laws: Floats, degree: int, starts: Floats, steps: Floats, longest: float) -> Floats:
    """States (laws, starts, samples, d) of many laws from many starts, by RK4 substeps no longer than `longest`."""
    dim = starts.shape[1]
    place = {tuple(row): k for k, row in enumerate(monomials(dim, degree).tolist())}
    parents = []
    for row in list(place)[1:]:
        variable = next(k for k, exponent in enumerate(row) if exponent)
        parents.append((place[tuple(e - (k == variable) for k, e in enumerate(row))], variable))
    columns = np.ones((len(place), len(laws), len(starts)))
    turned = np.ascontiguousarray(laws.transpose(0, 2, 1))

    def slope(x: Floats) -> Floats:
        for k, (parent, variable) in enumerate(parents, start=1):
            np.multiply(columns[parent], x[..., variable], out=columns[k])
        return np.asarray(columns.transpose(1, 2, 0) @ turned)

    count = int(np.ceil(steps.max() / longest))
    x = np.broadcast_to(starts, (len(laws), *starts.shape)).copy()
    path = []
    with np.errstate(all="ignore"):  # laws that blow up are to be found out
        for k in range(steps.shape[1]):
            h = steps[:, k, None] / count
            for _ in range(count):
                first = slope(x)
                second = slope(x + h / 2 * first)
                third = slope(x + h / 2 * second)
                x = x + h / 6 * (first + 2 * second + 2 * third + slope(x + h * third))
            path.append(x)
    return np.stack(path, axis=2)


def neural_path(times: Floats, states: Floats, start: Floats, seed: int) -> Floats:
    """States (n, d) at `times` from the true start, of a neural ODE trained to go from each sample to the next four.

    Two hidden layers of 32 on standardised states, RK4, Adam with a cosine schedule: 1000 steps on all windows at once.
    """
    torch.manual_seed(seed)
    mean, deviation = states.mean(axis=0), states.std(axis=0)
    scaled = torch.from_numpy((states - mean) / deviation)
    steps = torch.from_numpy(np.diff(times))[:, None]
    rate = float((scaled.diff(dim=0) / steps).square().mean().sqrt())
    dim = states.shape[1]
    net = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, dim)).double()

    def advance(x: Tensor, duration: Tensor, substeps: int) -> Tensor:
        h = rate * duration / substeps
        for _ in range(substeps):
            first = net(x)
            second = net(x + h / 2 * first)
            third = net(x + h / 2 * second)
            x = x + h / 6 * (first + 2 * second + 2 * third + net(x + h * third))
        return x

    ahead, rounds = 4, 1000
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds)
    windows = len(times) - ahead
    for _ in range(rounds):
        x, loss = scaled[:windows], torch.zeros((), dtype=torch.float64)
        for k in range(ahead):
            x = advance(x, steps[k : k + windows], substeps=2)
            loss = loss + (x - scaled[k + 1 : k + 1 + windows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    path = [torch.from_numpy((start - mean) / deviation)]
    with torch.no_grad():
        for step in steps:
            path.append(advance(path[-1], step, substeps=8))
    return np.asarray(torch.stack(path).numpy() * deviation + mean)
