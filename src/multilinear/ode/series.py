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
OFFSET = 2e-3  # share of a state's size that its changes must reach
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


Data = tuple[list[Floats], list[Floats], list[Floats] | None]  # times, states and inputs of each trajectory


def as_numbers(values: object) -> Floats:
    """An array of floats; masked entries are NaN."""
    try:
        if isinstance(values, np.ma.MaskedArray):
            return np.ma.filled(values.astype(np.float64), np.nan)
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise MultilinearError("times, states and inputs must be numbers; missing ones are NaN") from error


def read_data(t: object, x: object, inputs: object = None) -> Data:
    """One trajectory or several, as lists of float arrays; a single state or input may be a flat array."""
    several = isinstance(t, list | tuple) and len(t) > 0 and np.ndim(t[0]) > 0

    def split(values: object) -> list[Floats]:
        if several and isinstance(values, list | tuple):
            parts = [as_numbers(value) for value in values]
        else:
            parts = [as_numbers(values)]
        return [part[:, None] if part.ndim == 1 else part for part in parts]

    times = [as_numbers(one) for one in t] if several and isinstance(t, list | tuple) else [as_numbers(t)]
    return times, split(x), None if inputs is None else split(inputs)


def check_series(times: Sequence[Floats], states: Sequence[Floats], inputs: Sequence[Floats] | None) -> None:
    """Raise one clear line for what cannot be a set of measured trajectories."""
    if len(times) != len(states):
        raise MultilinearError(f"{len(times)} arrays of times for {len(states)} trajectories; give one for each")
    if inputs is not None and len(inputs) != len(states):
        raise MultilinearError(f"{len(inputs)} arrays of inputs for {len(states)} trajectories; give one for each")
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
        if inputs is not None:
            shape = (len(x), inputs[0].shape[-1]) if inputs[0].ndim == 2 else (len(x), 1)
            if inputs[k].shape != shape or not np.isfinite(inputs[k]).all():
                raise MultilinearError(f"{where}inputs must be {shape} and finite")


def check_data(states: Sequence[Floats], names: Sequence[str], log: bool) -> None:
    """Raise unless there are enough samples, states that change, and positive ones for log noise."""
    if not states:
        raise MultilinearError("no trajectory has two rows or more; a law needs rows that follow each other")
    stacked = np.concatenate(states)
    for name, column in zip(names, stacked.T, strict=True):
        seen = column[np.isfinite(column)]
        if len(seen) < FEWEST:
            raise MultilinearError(f"{name} has {len(seen)} values; a law needs at least {FEWEST} of each state")
        if np.ptp(seen) <= 1e-12 * np.abs(seen).max():
            raise MultilinearError(f"{name} never changes (it is always {seen[0]:g}); leave it out")
        if seen.std() < OFFSET * abs(seen.mean()):
            raise MultilinearError(
                f"{name} changes by only {seen.std() / abs(seen.mean()):.1g} of its size, so its powers look alike; "
                f"subtract an offset such as {seen.mean():.6g}"
            )
        if log and seen.min() <= 0:
            raise MultilinearError(f"log noise needs positive values; {name} has {seen.min():g}")


def without_single_rows(times: list[Floats], states: list[Floats], inputs: list[Floats] | None) -> Data:
    """A single row says nothing about change."""
    kept = [k for k, t in enumerate(times) if len(t) > 1]
    return [times[k] for k in kept], [states[k] for k in kept], None if inputs is None else [inputs[k] for k in kept]


def thin(times: list[Floats], states: list[Floats], inputs: list[Floats] | None, most: int) -> Data:
    """About `most` rows: of each state every k-th value that was measured, the first and last of each trajectory kept.

    Inputs may jump from row to row, so with inputs it is the first part of each trajectory instead.
    """
    every = max(1, -(-sum(len(t) for t in times) // most))
    if every == 1:
        return times, states, inputs
    if inputs is not None:
        ends = [max(FEWEST, len(t) // every) for t in times]
        cut_inputs = [u[:end] for u, end in zip(inputs, ends, strict=True)]
        return (
            [t[:end] for t, end in zip(times, ends, strict=True)],
            [x[:end] for x, end in zip(states, ends, strict=True)],
            cut_inputs,
        )
    found_times, found_states = [], []
    for t, x in zip(times, states, strict=True):
        some = np.full_like(x, np.nan)
        for j, column in enumerate(x.T):
            rows = np.flatnonzero(np.isfinite(column))
            rows = np.union1d(rows[::every], rows[-1:])
            some[rows, j] = column[rows]
        kept = np.asarray(np.isfinite(some).any(1))
        kept[[0, -1]] = True
        found_times.append(t[kept])
        found_states.append(some[kept])
    return found_times, found_states, None


def first_complete(times: list[Floats], states: list[Floats], inputs: list[Floats] | None) -> Data:
    """Each trajectory from its first row without a gap on."""
    check_series(times, states, inputs)
    begin = []
    for k, x in enumerate(states):
        complete = np.isfinite(x).all(1)
        if not complete.any():
            raise MultilinearError(f"trajectory {k + 1} has no row in which all states were measured, to start from")
        begin.append(int(np.argmax(complete)))
    return (
        [t[b:] for t, b in zip(times, begin, strict=True)],
        [x[b:] for x, b in zip(states, begin, strict=True)],
        None if inputs is None else [u[b:] for u, b in zip(inputs, begin, strict=True)],
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


def all_series(
    times: Sequence[Floats], states: Sequence[Floats], inputs: Sequence[Floats] | None, units: Units
) -> list[Series]:
    forced = [None] * len(times) if inputs is None else list(inputs)
    return [make_series(t, x, u, units) for t, x, u in zip(times, states, forced, strict=True)]


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
