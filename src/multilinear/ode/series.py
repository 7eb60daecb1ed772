"""Measured trajectories, checked, put into natural units and cut into segments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from multilinear.errors import MultilinearError
from multilinear.ode.polynomial import Floats
from multilinear.ode.shooting import Segments

UNKNOWNS = 300  # start values of segments to aim at, over all states
FEWEST = 6  # values of a state that a fit takes
MOST = 2000  # rows that a fit takes
ENORMOUS = 1e100  # squares and products of larger values overflow


@dataclass(frozen=True)
class Series:
    """One trajectory in natural units: times from 0, states of size about 1; NaN where nothing was measured.

    Rows of NaN are put into long gaps, so that the solver's steps are of similar length.
    """

    times: Floats  # (n,)
    values: Floats  # (n, d)
    inputs: Floats | None  # (n, u)
    measured: NDArray[np.int64]  # rows that are in the data


@dataclass(frozen=True)
class Units:
    """What one natural unit is in the data's units."""

    time: float
    states: Floats
    inputs: Floats

    def to_data(self, coefficients: Floats, exponents: NDArray[np.int64]) -> Floats:
        """Coefficients (d, M) of the natural law in the data's units."""
        scales = np.concatenate([self.states, self.inputs])
        monomial = np.prod(scales**exponents, axis=1)
        return np.asarray(coefficients * self.states[:, None] / monomial / self.time)

    def to_natural(self, coefficients: Floats, exponents: NDArray[np.int64]) -> Floats:
        return np.asarray(coefficients / self.to_data(np.ones_like(coefficients), exponents))


def as_list(values: object) -> list[Floats]:
    """One array or several, as float arrays."""
    items = list(values) if isinstance(values, list | tuple) and np.ndim(values[0]) > 0 else [values]
    try:
        return [np.asarray(item, dtype=np.float64) for item in items]
    except (TypeError, ValueError) as error:
        raise MultilinearError("times and states must be numbers; missing ones are NaN") from error


def check_series(times: Sequence[Floats], states: Sequence[Floats], inputs: Sequence[Floats] | None) -> None:
    """Raise one clear line for what cannot be a set of measured trajectories."""
    if len(times) != len(states) or (inputs is not None and len(inputs) != len(states)):
        raise MultilinearError(f"{len(times)} arrays of times for {len(states)} trajectories; give one for each")
    widths = {x.shape[1] if x.ndim == 2 else -1 for x in states}
    if len(widths) != 1 or min(widths) < 1:
        raise MultilinearError(f"states must be (samples, d), the same d everywhere; got {[x.shape for x in states]}")
    for k, (t, x) in enumerate(zip(times, states, strict=True)):
        where = f"trajectory {k + 1}: " if len(times) > 1 else ""
        if t.shape != (len(x),):
            raise MultilinearError(f"{where}{len(x)} rows of states need as many times, got shape {t.shape}")
        if not np.isfinite(t).all():
            raise MultilinearError(f"{where}time {int(np.argmin(np.isfinite(t))) + 1} is missing or not finite")
        if np.isinf(x).any():
            raise MultilinearError(f"{where}states must be finite, or NaN where missing")
        if np.abs(t).max(initial=0) > ENORMOUS or np.nanmax(np.abs(x), initial=0) > ENORMOUS:
            raise MultilinearError(f"{where}values beyond {ENORMOUS:g} cannot be fitted; use other units")
        steps = np.diff(t)
        if (steps <= 0).any():
            row = int(np.argmax(steps <= 0)) + 1
            word = "is there twice" if steps[row - 1] == 0 else f"comes after {t[row - 1]:g}"
            raise MultilinearError(
                f"{where}times must increase: {t[row]:g} in row {row + 1} {word}; sort the rows, average repeated "
                "times, or give separate runs as separate trajectories"
            )
        if inputs is not None and (inputs[k].ndim != 2 or len(inputs[k]) != len(x) or not np.isfinite(inputs[k]).all()):
            raise MultilinearError(f"{where}inputs must be ({len(x)}, u) and finite")


def check_data(
    times: Sequence[Floats], states: Sequence[Floats], inputs: Sequence[Floats] | None, names: Sequence[str], log: bool
) -> None:
    """`check_series`, and what fitting needs: enough samples, states that change, positive ones for log noise."""
    check_series(times, states, inputs)
    stacked = np.concatenate(states)
    for name, column in zip(names, stacked.T, strict=True):
        seen = column[np.isfinite(column)]
        if len(seen) < FEWEST:
            raise MultilinearError(f"{name} has {len(seen)} values; a law needs at least {FEWEST} of each state")
        if np.ptp(seen) <= 1e-12 * np.abs(seen).max():
            raise MultilinearError(f"{name} never changes (it is always {seen[0]:g}); leave it out")
        if log and seen.min() <= 0:
            raise MultilinearError(f"log noise needs positive values; {name} has {seen.min():g}")
    if max(len(t) for t in times) < 2:
        raise MultilinearError("every trajectory has one row only; a law needs rows that follow each other")


def thin(
    times: list[Floats], states: list[Floats], inputs: list[Floats] | None
) -> tuple[list[Floats], list[Floats], list[Floats] | None]:
    """Every k-th row where there are very many: a fit takes no more from the others than time."""
    kept = [k for k, t in enumerate(times) if len(t) > 1]  # a single row says nothing about change
    every = max(1, -(-sum(len(times[k]) for k in kept) // MOST))
    return (
        [times[k][::every] for k in kept],
        [states[k][::every] for k in kept],
        None if inputs is None else [inputs[k][::every] for k in kept],
    )


def natural_units(
    times: Sequence[Floats],
    states: Sequence[Floats],
    inputs: Sequence[Floats] | None,
    slopes_of: Mapping[int, int] = MappingProxyType({}),
) -> Units:
    """Root mean squares of the states, and a tenth of the trajectories' length."""
    stacked = np.concatenate(states)
    count = np.maximum(np.isfinite(stacked).sum(0), 1)
    scale = np.sqrt(np.nansum(stacked**2, 0) / count)
    scale = np.where(scale > 0, scale, 1.0)
    forced = np.zeros(0)
    if inputs is not None:
        forced = np.sqrt(np.mean(np.concatenate(inputs) ** 2, 0))
    unit = float(np.mean([t[-1] - t[0] for t in times])) / 10
    for slope, state in slopes_of.items():
        scale[slope] = scale[state] / unit
    return Units(unit, scale, np.where(forced > 0, forced, 1.0))


def make_series(times: Floats, states: Floats, inputs: Floats | None, units: Units) -> Series:
    """One trajectory in natural units, long gaps filled with rows of NaN."""
    t = (times - times[0]) / units.time
    gaps = np.diff(t)
    usual = 2.5 * float(np.median(gaps))
    pieces = np.maximum(1, np.ceil(gaps / usual)).astype(np.int64)
    pieces = np.minimum(pieces, 50)
    mesh = [np.linspace(a, b, k, endpoint=False) for a, b, k in zip(t[:-1], t[1:], pieces, strict=True)]
    full = np.append(np.concatenate(mesh), t[-1])
    measured = np.concatenate([[0], np.cumsum(pieces)])
    values = np.full((len(full), states.shape[1]), np.nan)
    values[measured] = states / units.states
    forced = None
    if inputs is not None:
        scaled = inputs / units.inputs
        forced = np.stack([np.interp(full, t, column) for column in scaled.T], axis=1)
    return Series(full, values, forced, measured)


def cut(series: Sequence[Series], log: bool = False) -> tuple[Segments, list[NDArray[np.int64]]]:
    """Segments of all trajectories, and for each trajectory the rows at which its segments start."""
    total = sum(len(one.times) for one in series)
    m = max(1, -(-total * series[0].values.shape[1] // UNKNOWNS))
    values, gaps, joined, inputs, slopes, starts = [], [], [], [], [], []
    for one in series:
        n, d = one.values.shape
        count = -(-n // m)
        starts.append(np.arange(count) * m)
        rows = np.full((count * m, d), np.nan)
        rows[:n] = np.log(one.values) if log else one.values
        values.append(rows.reshape(count, m, d))
        steps = np.zeros(count * m)
        steps[: n - 1] = np.diff(one.times)
        gaps.append(steps.reshape(count, m))
        joined.append(np.arange(count) < count - 1)
        if one.inputs is not None:
            u = one.inputs.shape[1]
            forced, rates = np.zeros((count * m, u)), np.zeros((count * m, u))
            forced[:n], forced[n:] = one.inputs, one.inputs[-1]
            rates[: n - 1] = np.diff(one.inputs, axis=0) / np.diff(one.times)[:, None]
            inputs.append(forced.reshape(count, m, u))
            slopes.append(rates.reshape(count, m, u))
    stacked = [np.concatenate(part) for part in (values, gaps, joined)]
    segments = Segments(
        stacked[0], stacked[1], stacked[2],
        np.concatenate(inputs) if inputs else None, np.concatenate(slopes) if slopes else None, log,
    )  # fmt: skip
    return segments, starts
