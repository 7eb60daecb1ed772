"""Pictures of a law beside its data, and the page that `multilinear discover` writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multilinear.errors import MultilinearError
from multilinear.ode.polynomial import Floats

if TYPE_CHECKING:
    from multilinear.ode.estimator import PolynomialODE

SHARE = 0.2  # of each trajectory that the forecast must do without


def fitted(model: "PolynomialODE", fine: int = 1) -> list[tuple[Floats, Floats]]:
    """Times and states of the fitted solutions, `fine` times as many as samples; none for those that blow up."""
    found = []
    times, _, forced = model.data
    for k, (t, start) in enumerate(zip(times, model.starts, strict=True)):
        grid = _finer(t, fine)
        inputs = None
        if forced is not None:
            inputs = np.stack([np.interp(grid, t, column) for column in forced[k].T], axis=1)
        try:
            found.append((grid, model.law.solve(grid, start, inputs)))
        except MultilinearError:
            found.append((grid[:0], np.zeros((0, len(model.law.names)))))
    return found


def _finer(t: Floats, times: int) -> Floats:
    return np.interp(np.arange(times * (len(t) - 1) + 1) / times, np.arange(len(t)), t)


def _panels(count: int, margin: float, height: float) -> tuple[Figure, list[Axes]]:
    """One panel a state above each other, over the same time."""
    figure = Figure(figsize=(8, margin + height * count), layout="tight")
    panels = list(np.atleast_1d(figure.subplots(count, 1, sharex=True)))
    for axes in panels:
        axes.margins(x=0.01)
    panels[-1].set_xlabel("time")
    return figure, panels


def draw_fit(model: "PolynomialODE") -> Figure:
    """Each state: samples, and the fitted solutions."""
    times, states, _ = model.data
    curves = fitted(model, 8)
    names = model.measured
    figure, panels = _panels(len(names), 1.2, 1.7)
    for j, (axes, name) in enumerate(zip(panels, names, strict=True)):
        for k, (t, x) in enumerate(zip(times, states, strict=True)):
            color = f"C{k % 10}"
            axes.plot(t, x[:, j], ".", color=color, markersize=4, alpha=0.7)
            axes.plot(curves[k][0], curves[k][1][:, j], color=color, linewidth=1.2)
        axes.set_ylabel(name)
    return figure


def draw_residuals(model: "PolynomialODE") -> Figure:
    """Data minus solution over time, with two standard deviations of the noise."""
    times, states, _ = model.data
    curves = fitted(model)
    names = model.measured
    figure, panels = _panels(len(names), 0.8, 1.3)
    log = model.noise_model == "log"
    for j, (axes, name) in enumerate(zip(panels, names, strict=True)):
        for k, (t, x) in enumerate(zip(times, states, strict=True)):
            if len(curves[k][0]):
                model_states = curves[k][1][:, j]
                miss = np.log(x[:, j] / np.maximum(model_states, 1e-300)) if log else x[:, j] - model_states
                axes.plot(t, miss, ".", color=f"C{k % 10}", markersize=4)
        axes.axhline(0, color="0.6", linewidth=0.8)
        if log or not model.found.noise_is_relative:
            axes.axhspan(-2 * model.noise[name], 2 * model.noise[name], color="0.9", zorder=0)
        axes.set_ylabel(f"log {name}" if log else name)
    return figure


def draw_phase(model: "PolynomialODE") -> Figure:
    """The first two states against each other, with the direction that the law gives."""
    _, states, _ = model.data
    curves = fitted(model, 8)
    names = model.law.names
    figure = Figure(figsize=(5, 4.2))
    axes = figure.subplots()
    for k, x in enumerate(states):
        if x.shape[1] > 1:
            axes.plot(x[:, 0], x[:, 1], ".", color=f"C{k % 10}", markersize=4, alpha=0.7)
        axes.plot(curves[k][1][:, 0], curves[k][1][:, 1], color=f"C{k % 10}", linewidth=1.2)
    if len(names) == 2 and not model.law.inputs:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        x, y = np.meshgrid(np.linspace(left, right, 20), np.linspace(low, high, 20))
        rates = model.law.rates(np.stack([x, y], axis=-1))
        scaled = rates / np.array([right - left, high - low])
        size = np.maximum(np.linalg.norm(scaled, axis=-1, keepdims=True), 1e-300)
        axes.quiver(x, y, *np.moveaxis(scaled / size, -1, 0), color="0.75", angles="uv", zorder=0, width=0.003)
    axes.set(xlabel=names[0], ylabel=names[1])
    figure.tight_layout()
    return figure


def forecast(model: "PolynomialODE") -> tuple[list[tuple[Floats, Floats]], float, "PolynomialODE"] | None:
    """Find the law anew without the last fifth of each trajectory, and predict that fifth; None where that fails.

    Gives the predictions with their times, R2 of the fifth, and the law that made them.
    """
    times, states, forced = model.data
    ends = [max(2, int(len(t) * (1 - SHARE))) for t in times]
    early = model.like()
    try:
        early.fit(
            [t[:end] for t, end in zip(times, ends, strict=True)],
            [x[:end] for x, end in zip(states, ends, strict=True)],
            None if forced is None else [u[:end] for u, end in zip(forced, ends, strict=True)],
        )
        found, at_samples = [], []
        for k, (t, start) in enumerate(zip(times, early.starts, strict=True)):
            grid = _finer(t, 4)
            u = None if forced is None else np.stack([np.interp(grid, t, column) for column in forced[k].T], axis=1)
            found.append((grid, early.law.solve(grid, start, u)))
            at_samples.append(found[-1][1][::4])
    except MultilinearError:
        return None
    width = states[0].shape[1]
    late = np.concatenate([x[end:] for x, end in zip(states, ends, strict=True)])
    said = np.concatenate([x[end:, :width] for x, end in zip(at_samples, ends, strict=True)])
    spread = np.nanvar(np.concatenate(states), axis=0)
    if not np.isfinite(late).any():
        return None
    score = float(np.nanmean(1 - np.nanmean((late - said) ** 2, axis=0) / np.maximum(spread, 1e-300)))
    return found, score, early


def draw_forecast(model: "PolynomialODE", found: Sequence[tuple[Floats, Floats]]) -> Figure:
    times, states, _ = model.data
    names = model.measured
    figure, panels = _panels(len(names), 1.2, 1.5)
    for j, (axes, name) in enumerate(zip(panels, names, strict=True)):
        for k, (t, x) in enumerate(zip(times, states, strict=True)):
            end = max(2, int(len(t) * (1 - SHARE)))
            axes.plot(t[:end], x[:end, j], ".", color="C0", markersize=4)
            axes.plot(t[end:], x[end:, j], ".", color="C3", markersize=5)
            axes.plot(found[k][0], found[k][1][:, j], color="0.3", linewidth=1.1)
            axes.axvline(t[end - 1], color="0.7", linewidth=0.8, linestyle=":")
        axes.set_ylabel(name)
    return figure


def check_picture(path: Path) -> None:
    """Raise before the work if a picture cannot go there."""
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise MultilinearError(f"a picture's name must end in one of {', '.join(sorted(kinds))}; got {path.name!r}")
    if not path.absolute().parent.is_dir():
        raise MultilinearError(f"no folder {path.parent}")


def save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise MultilinearError(f"cannot write {path}: {error}") from error
