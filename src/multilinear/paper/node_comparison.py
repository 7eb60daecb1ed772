"""The appendix 'NeuralODE Solver comparison': NODE and ANODE against the same with a polynomial field, on an annulus.

An inner disc (target -1) must leave the ring around it (target +1). The paper shows loss curves, gives no numbers, and
says that the polynomial models "easily approximate the functions and are consistently faster", with a lower loss. Here
it is counted in how many seeds that holds. All models of a seed see the same points in the same order. A run that
blows up ends there and meets no claim.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from multilinear.ode.neural import BlowUp, NeuralODE, count_parameters, node, poly_node
from multilinear.ode.polynomial import monomials
from multilinear.report import Report

GOOD = 0.99  # of fresh points on the right side: what "approximates the function" is taken to mean
FRAMES = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Variant:
    """One row of the comparison.

    >>> Variant("PolyNODE", 40, polynomial=True).parameters
    518
    """

    name: str
    epochs: int
    polynomial: bool = False
    augment: int = 0
    order: int = 2
    hidden: int = 32

    def build(self) -> NeuralODE:
        if self.polynomial:
            return poly_node(augment=self.augment, order=self.order, hidden=self.hidden)
        return node(augment=self.augment, hidden=self.hidden)

    @property
    def parameters(self) -> int:
        with torch.device("meta"):  # counting must not draw random numbers
            return count_parameters(self.build())

    def matched(self, other: "Variant") -> "Variant":
        """The same with the width that brings the number of parameters closest to that of `other`."""
        widths = [replace(self, hidden=hidden) for hidden in range(4, 4 * self.hidden)]
        place = bisect_left(widths, other.parameters, key=lambda variant: variant.parameters)
        return min(widths[place - 1 : place + 1], key=lambda variant: abs(variant.parameters - other.parameters))


PUBLISHED = (
    Variant("NODE", 40),
    Variant("PolyNODE", 40, polynomial=True),
    Variant("ANODE", 30, augment=5),
    Variant("PolyANODE", 30, polynomial=True, augment=5),
)


def variants() -> tuple[Variant, ...]:
    """The paper's four, and the polynomial ones with as many parameters as their rivals, of order 2 and 4.

    >>> [(v.name, v.hidden, v.parameters) for v in variants()][:4]
    [('NODE', 32, 1253), ('PolyNODE', 32, 518), ('PolyNODE, wider', 57, 1259), ('PolyNODE, order 4', 38, 1250)]
    """
    rows = []
    for plain, poly in zip(PUBLISHED[::2], PUBLISHED[1::2], strict=True):
        wider = replace(poly, name=f"{poly.name}, wider").matched(plain)
        higher = replace(poly, name=f"{poly.name}, order 4", order=4).matched(plain)
        rows += [plain, poly, wider, higher]
    return tuple(rows)


def annulus(seed: int, count: int = 2000) -> tuple[Tensor, Tensor]:
    """Points (count, 2), a quarter in the disc of radius 0.5, then the ring from 1 to 1.5, and targets (count, 1).

    >>> points, targets = annulus(0)
    >>> points.shape, targets.sum().item(), (points[:500].norm(dim=1).max() <= 0.5).item()
    (torch.Size([2000, 2]), 1000.0, True)
    """
    generator = torch.Generator().manual_seed(seed)
    disc = torch.arange(count) < count // 4
    low, high = torch.where(disc, 0.0, 1.0), torch.where(disc, 0.5, 1.5)
    share, turn = torch.rand(2, count, generator=generator)
    radius, angle = (low**2 + (high**2 - low**2) * share).sqrt(), 2 * math.pi * turn  # uniform by area
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), torch.where(disc, -1.0, 1.0)[:, None]


@dataclass
class Run:
    """One model from one seed. Lists are by epoch and end where a blow-up ended the run."""

    variant: Variant
    seed: int
    losses: list[float] = field(default_factory=list)  # means of the training batches
    evaluations: list[float] = field(default_factory=list)  # of the field, mean of the solves
    seconds: float = 0.0  # processor time of training, which a busy machine does not stretch
    accuracy: float = 0.0  # on fresh points; stays 0 after a blow-up
    failure: str | None = None  # how it blew up
    frames: NDArray[np.float32] | None = None  # (times, points, 2), a quarter of the points from the disc

    @property
    def loss(self) -> float:
        """Of the last epoch; infinite after a blow-up."""
        return math.inf if self.failure else self.losses[-1]

    def epochs_to(self, level: float) -> float:
        """How many epochs until the loss is below `level`; infinite if it never is, or after a blow-up."""
        first = next((epoch for epoch, loss in enumerate(self.losses, 1) if loss < level), math.inf)
        return math.inf if self.failure else first


MEASURES: dict[str, Callable[[Run], float]] = {
    "loss": lambda run: run.loss,
    "accuracy": lambda run: run.accuracy,
    "evaluations, first epoch": lambda run: run.evaluations[0],
    "evaluations, last epoch": lambda run: run.evaluations[-1],
    "seconds": lambda run: run.seconds,
}


def train(variant: Variant, seed: int, count: int = 2000) -> Run:
    """Train with Adam 1e-3 and SmoothL1 in batches of 64, then look at as many fresh points.

    >>> run = train(replace(PUBLISHED[1], epochs=2), seed=0, count=128)
    >>> len(run.losses), run.failure
    (2, None)
    """
    torch.manual_seed(seed)
    model, run = variant.build(), Run(variant, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    points, targets = annulus(seed, count)
    order = torch.Generator().manual_seed(seed)
    start = time.process_time()
    try:
        for _ in range(variant.epochs):
            found = []
            for batch in torch.randperm(len(points), generator=order).split(64):
                loss = nn.functional.smooth_l1_loss(model(points[batch]), targets[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append((loss.item() * len(batch), model.evaluations))
            run.losses.append(sum(total for total, _ in found) / len(points))
            run.evaluations.append(mean(count for _, count in found))
            run.seconds = time.process_time() - start
        with torch.no_grad():
            points, targets = annulus(seed + 1_000_000, count)
            run.accuracy = (model(points).sign() == targets).double().mean().item()
            run.frames = model.flow(annulus(seed + 1_000_000, 400)[0], torch.tensor(FRAMES))[..., :2].numpy()
    except BlowUp as error:
        run.failure = f"after {len(run.losses)} epochs: {error}"
    return run


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a model: its runs, how many finished, and [mean, standard deviation] over those that did.

    >>> run = train(replace(PUBLISHED[0], epochs=1), seed=0, count=128)
    >>> row = summary([run])[0]
    >>> row["model"], row["parameters"], row["finished"], row["loss"] == [run.loss, 0.0]
    ('NODE', 1253, 1, True)
    """
    rows = []
    for variant, group in _groups(runs):
        done = [run for run in group if not run.failure]
        row = {"model": variant.name, "parameters": variant.parameters, "runs": len(group), "finished": len(done)}
        spreads = {name: _spread([value(run) for run in done]) for name, value in MEASURES.items()}
        failures = [f"seed {run.seed}, {run.failure}" for run in group if run.failure]
        rows.append({**row, **spreads, "failures": failures})
    return rows


def claims(runs: Sequence[Run]) -> list[tuple[str, str, int, int]]:
    """What the paper says of a polynomial model, and in how many seeds it is so: (model, claim, seeds, of how many).

    >>> runs = [train(replace(variant, epochs=1), 0, count=128) for variant in PUBLISHED[:2]]
    >>> [claim for _, claim, _, _ in claims(runs)][0]
    '"more accurately": a lower loss after the last epoch than NODE'
    """
    compared: list[tuple[str, Callable[[Run], float]]] = [
        ('"more accurately": a lower loss after the last epoch', lambda run: run.loss),
        ('"faster": fewer epochs to a loss of 0.1', lambda run: run.epochs_to(0.1)),  # a constant answer has 0.34
        ('"faster": fewer epochs to a loss of 0.01', lambda run: run.epochs_to(0.01)),
        ('"faster": less time for all epochs', lambda run: math.inf if run.failure else run.seconds),
    ]
    rivals = {(run.variant.augment, run.seed): run for run in runs if not run.variant.polynomial}
    found = []
    for variant, group in [(variant, group) for variant, group in _groups(runs) if variant.polynomial]:
        pairs = [(run, rivals[key]) for run in group if (key := (variant.augment, run.seed)) in rivals]
        for text, value in compared if pairs else []:
            wins = sum(value(ours) < value(theirs) for ours, theirs in pairs)
            found.append((variant.name, f"{text} than {pairs[0][1].variant.name}", wins, len(pairs)))
        good = sum(run.accuracy >= GOOD for run in group)
        found.append((variant.name, f'"easily approximate": {GOOD:.0%} of fresh points right', good, len(group)))
    return found


def write_page(runs: Sequence[Run], path: Path) -> Path:
    """The table, what of the paper's claims holds, the curves and the particles.

    >>> import tempfile
    >>> run = train(replace(PUBLISHED[1], epochs=1), seed=0, count=128)
    >>> write_page([run], Path(tempfile.mkdtemp()) / "page.html").name
    'page.html'
    """
    rows, seeds, blown = summary(runs), {run.seed for run in runs}, sum(run.failure is not None for run in runs)
    lead = f"Annulus in the plane, {len(seeds)} seeds, {len(runs)} runs, {blown} of them blew up."
    page = Report("Neural ODEs with polynomial fields", lead)
    page.heading("Models")
    cells = [[row["model"], row["parameters"], f"{row['finished']} of {row['runs']}"] for row in rows]
    numbers = [[_text(row[name]) for name in MEASURES] for row in rows]
    page.table(["model", "parameters", "finished", *MEASURES], [a + b for a, b in zip(cells, numbers, strict=True)])
    page.text(
        "Mean ± standard deviation over the runs that finished: where some did not, this flatters the model. Loss: of "
        "the last training epoch. Accuracy: on fresh points. Evaluations: of the field, in one solve. "
        "'Wider' and 'order 4' have the width that matches their rival's parameters, which the paper does not do. A "
        f"field of order 2 in two states and the time is {2 * len(monomials(3, 2))} numbers however wide its layer is."
    )
    page.heading("What the paper says of the polynomial models, seed by seed")
    claimed = [[name, claim, f"{k} of {n} seeds"] for name, claim, k, n in claims(runs)]
    page.table(["model", "claim", "holds in"], claimed)
    if failures := [[row["model"], failure] for row in rows for failure in row["failures"]]:
        page.heading("Runs that blew up")
        page.table(["model", "how"], failures)
    page.heading("Curves")
    page.figure(curves(runs), "Mean of the runs that got so far; the band is from the lowest to the highest.")
    page.heading("Particles")
    page.figure(_particles(runs), "Fresh points on their way, first two dimensions, of the first run that finished.")
    return page.write(path)


def curves(runs: Sequence[Run]) -> Figure:
    """Loss and evaluations by epoch, NODEs on the left and ANODEs on the right.

    >>> run = train(replace(PUBLISHED[0], epochs=2), seed=0, count=128)
    >>> len(curves([run]).axes)
    4
    """
    figure = Figure(figsize=(10, 6.6))
    axes = figure.subplots(2, 2, sharex="col", gridspec_kw={"wspace": 0.25})
    for variant, group in _groups(runs):
        column = int(variant.augment > 0)
        done = sum(not run.failure for run in group)
        label = f"{variant.name} ({variant.parameters}), {done} of {len(group)} finished"
        _band(axes[0, column], [run.losses for run in group], label)
        _band(axes[1, column], [run.evaluations for run in group], label)
        axes[0, column].legend(fontsize=7)
    for column in (0, 1):
        axes[0, column].set(yscale="log", ylabel="SmoothL1 loss")
        axes[1, column].set(yscale="log", ylabel="evaluations a solve", xlabel="epoch")
    return figure


def _particles(runs: Sequence[Run]) -> Figure:
    groups = _groups(runs)
    figure = Figure(figsize=(8, 2.5 * len(groups)))
    axes = figure.subplots(len(groups), len(FRAMES), squeeze=False)
    for place, at in zip(axes[0], FRAMES, strict=True):
        place.set_title(f"t = {at:g}")
    for row, (variant, group) in zip(axes, groups, strict=True):
        frames = next((run.frames for run in group if run.frames is not None), None)
        row[0].set_ylabel(variant.name if frames is not None else f"{variant.name}: none finished")
        for place, points in zip(row, [] if frames is None else frames, strict=False):
            place.plot(*points[len(points) // 4 :].T, ".", color="tab:red", markersize=2)
            place.plot(*points[: len(points) // 4].T, ".", color="tab:blue", markersize=2)
    return figure


def _groups(runs: Sequence[Run]) -> list[tuple[Variant, list[Run]]]:
    seen = dict.fromkeys(run.variant for run in runs)
    return [(variant, [run for run in runs if run.variant == variant]) for variant in seen]


def _spread(values: Sequence[float]) -> list[float] | None:
    return [mean(values), stdev(values) if len(values) > 1 else 0.0] if values else None


def _text(spread: list[float] | None) -> str:
    return "none finished" if spread is None else f"{spread[0]:.3g} ± {spread[1]:.2g}"


def _band(axes: Axes, series: Sequence[Sequence[float]], label: str) -> None:
    by_epoch = [[values[i] for values in series if len(values) > i] for i in range(max(map(len, series)))]
    epochs = range(1, len(by_epoch) + 1)
    (line,) = axes.plot(epochs, [mean(values) for values in by_epoch], label=label)
    axes.fill_between(epochs, [*map(min, by_epoch)], [*map(max, by_epoch)], color=line.get_color(), alpha=0.2, lw=0)
