"""Figures of an evaluation or a training run, and the HTML page that holds them. No window, no global state."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from multilinear.errors import MultilinearError
from multilinear.evaluate.evaluate import Evaluation
from multilinear.evaluate.metrics import Calibration
from multilinear.evaluate.speed import Speed
from multilinear.report import Report

MOST_NUMBERED = 20  # classes: with more, the numbers and names of a confusion matrix cannot be read
MOST_BARS = 40
SHORT_TITLE = 13
LONGEST_NAME, LONGEST_LINE = 28, 18


def confusion(counts: Tensor, classes: Sequence[str] | None = None) -> Figure:
    """A confusion matrix: rows true, columns predicted. Shade is the share of the row; up to 20 classes have numbers.

    >>> figure = confusion(torch.tensor([[3, 1], [0, 4]]), ["cat", "dog"])
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['cat', 'dog']
    """
    size = len(counts)
    names = _names(classes, size)
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    side = min(2.5 + 0.38 * size, 9.0)
    figure = Figure(figsize=(side, side))
    axes = figure.subplots()
    axes.imshow(shares.sqrt().numpy(), cmap="Blues", vmin=0, vmax=1)  # the root lets rare mistakes be seen
    axes.set(xlabel="predicted", ylabel="true")
    if size <= MOST_NUMBERED:
        turned = max(map(len, names)) > 2
        axes.set_xticks(range(size), names, rotation=90 if turned else 0)
        axes.set_yticks(range(size), names)
        for row, column in counts.nonzero().tolist():
            axes.text(column, row, str(int(counts[row, column])), ha="center", va="center", fontsize=8,
                      color="white" if shares[row, column] > 0.4 else "black")  # fmt: skip
    figure.tight_layout()
    return figure


def reliability(found: Calibration) -> Figure:
    """Accuracy against confidence, bin by bin, and how many samples each bin holds.

    >>> from multilinear.evaluate.metrics import calibration
    >>> len(reliability(calibration(torch.tensor([[0.9, 0.1]]), torch.tensor([0]))).axes)
    2
    """
    figure = Figure(figsize=(4.2, 4.8))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    edges, filled = found.edges.cpu().numpy(), found.count.cpu().numpy() > 0
    left, width = edges[:-1][filled], np.diff(edges)[filled]
    upper.bar(left, found.accuracy.cpu().numpy()[filled], width, align="edge", edgecolor="white", color="C0")
    upper.plot(found.confidence.cpu().numpy()[filled], found.accuracy.cpu().numpy()[filled], "o", color="C1", ms=4)
    upper.plot([0, 1], [0, 1], "--", color="grey", lw=1)
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy", title=f"expected calibration error {found.error:.2%}")
    lower.bar(left, found.count.cpu().numpy()[filled], width, align="edge", edgecolor="white", color="grey")
    lower.set(xlabel="confidence", ylabel="samples")
    figure.tight_layout()
    return figure


def per_class(accuracy: Tensor, classes: Sequence[str] | None = None) -> Figure:
    """Accuracy by class, worst first; the 40 worst if there are more. Classes without samples are left out.

    >>> figure = per_class(torch.tensor([0.9, math.nan, 0.5]), ["a", "b", "c"])
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['c', 'a']
    """
    names = _names(classes, len(accuracy))
    order = [i for i in accuracy.argsort(stable=True).tolist() if not math.isnan(accuracy[i])]
    shown = order[:MOST_BARS]
    figure = Figure(figsize=(6, 1.2 + 0.24 * len(shown)))
    axes = figure.subplots()
    bars = axes.barh(range(len(shown)), [100 * float(accuracy[i]) for i in shown])
    axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
    axes.set_yticks(range(len(shown)), [names[i] for i in shown])
    axes.invert_yaxis()
    axes.set(xlim=(0, 108), xlabel="accuracy, %" + (f" (the worst {MOST_BARS} classes)" if shown != order else ""))
    figure.tight_layout()
    return figure


def curves(rows: Sequence[Mapping[str, Any]], keys: Sequence[str | Sequence[str]], x: str = "epoch") -> Figure:
    """Columns of a training log, one panel for each of `keys`; several names in one entry share a panel.

    A row may lack a key: the curve goes through those that have it. Rows without `x` are numbered from 0.

    >>> rows = [{"loss": 2.3}, {"loss": 1.1, "accuracy": 0.6}]
    >>> [axes.get_ylabel() for axes in curves(rows, ["loss", "accuracy"]).axes]
    ['loss', 'accuracy']
    """
    known = sorted({key for row in rows for key in row if row[key] is not None})
    panels = [[entry] if isinstance(entry, str) else list(entry) for entry in keys]
    missing = [key for panel in panels for key in panel if key not in known]
    if missing or not panels:
        raise MultilinearError(f"no values to plot for {', '.join(missing) or 'no keys'}; known: {', '.join(known)}")
    figure = Figure(figsize=(4 * len(panels), 3))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        for key in panel:
            points = [(row.get(x, i), row[key]) for i, row in enumerate(rows) if row.get(key) is not None]
            # one point makes no line
            axes.plot(*zip(*points, strict=True), marker="o" if len(points) == 1 else "", label=_spaced(key))
        axes.set(xlabel=_spaced(x), ylabel=_spaced(panel[0]) if len(panel) == 1 else "")
        if len(panel) > 1:
            axes.legend(frameon=False)
    figure.tight_layout()
    return figure


def predictions(
    images: npt.NDArray[Any] | Tensor,
    found: Evaluation,
    classes: Sequence[str] | None = None,
    *,
    most: int = 16,
    columns: int = 8,
    cmap: str = "gray",
) -> Figure:
    """A grid of images (samples, height, width, channels): the mistakes the network was surest of, then right ones.

    >>> found = Evaluation.from_logits(torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 0]))
    >>> [axes.get_title() for axes in predictions(np.zeros((2, 8, 8, 1)), found, ["cat", "dog"]).axes]
    ['dog, is cat', 'cat']
    """
    if len(images) != found.count or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise MultilinearError(
            f"predictions of {found.count} images need them as ({found.count}, height, width, 1 or 3), "
            f"got {tuple(images.shape)}"
        )
    names = _names(classes, len(found.per_class))
    wrong = found.predictions != found.labels
    mistakes = wrong.nonzero()[:, 0]
    mistakes = mistakes[found.confidences[mistakes].argsort(descending=True, stable=True)]
    order = torch.cat([mistakes, (~wrong).nonzero()[:, 0]])[:most].tolist()
    lines = math.ceil(len(order) / columns)
    figure = Figure(figsize=(columns, 1.4 * lines))
    places = list(figure.subplots(lines, columns, squeeze=False).flat)
    for spare in places[len(order) :]:
        spare.remove()
    for axes, i in zip(places, order, strict=False):
        guess, label = int(found.predictions[i]), int(found.labels[i])
        title = _title(names[guess], None if guess == label else names[label])
        image = images[i]
        _show(axes, image.cpu().numpy() if isinstance(image, Tensor) else image, cmap)
        axes.set_title(
            title,
            fontsize=6 if "\n" in title or len(title) > SHORT_TITLE else 8,
            color="black" if guess == label else "crimson",
        )
    figure.tight_layout()
    return figure


def write_report(
    evaluation: Evaluation,
    path: str | Path,
    title: str,
    classes: Sequence[str] | None = None,
    images: npt.NDArray[Any] | Tensor | None = None,
    speeds: Sequence[Speed] = (),
) -> Path:
    """Write an evaluation as one self-contained HTML page.

    >>> import tempfile
    >>> found = Evaluation.from_logits(torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 0]))
    >>> write_report(found, Path(tempfile.mkdtemp()) / "report.html", "Two pictures").name
    'report.html'
    """
    page = Report(title, f"{evaluation.top1:.2%} of {evaluation.count:,} images right.")
    page.heading("Numbers")
    judged = (
        {"": evaluation}
        if evaluation.flipped is None
        else {"as they are": evaluation, "with flips": evaluation.flipped}
    )
    page.table(["", *evaluation.numbers()], [[name, *found.numbers().values()] for name, found in judged.items()])
    if evaluation.flipped is not None:
        page.text("With flips: the mean of the logits of each image and its mirror image.")
    page.heading("What it gets right and wrong")
    page.figure(
        confusion(evaluation.confusion, classes), "Confusion matrix: rows are true classes, columns predictions."
    )
    page.figure(per_class(evaluation.per_class, classes), "Accuracy of each class, worst first.")
    if images is not None:
        page.figure(predictions(images, evaluation, classes), "The surest mistakes first, then the first right ones.")
    page.heading("How far to trust its confidence")
    page.figure(
        reliability(evaluation.calibration), "Accuracy by confidence; on the dashed line both agree. Below: samples."
    )
    if speeds:
        page.heading("Speed")
        page.table(
            ["batch", "median ms", "quartiles", "passes", "images/s", "device"],
            [[s.batch_size, f"{s.median_ms:.3g}", f"{s.lower_ms:.3g} to {s.upper_ms:.3g}", s.n,
              f"{s.images_per_second:,.0f}", s.device] for s in speeds],
        )  # fmt: skip
    return page.write(path)


def _names(classes: Sequence[str] | None, count: int) -> list[str]:
    if classes is None:
        return [str(i) for i in range(count)]
    if len(classes) != count:
        raise MultilinearError(f"{len(classes)} class names came for {count} classes; give one for each, or none")
    # matplotlib reads a pair of dollars as mathematics
    return [_shortened(str(name), LONGEST_NAME).replace("$", r"\$") for name in classes]


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _title(guess: str, label: str | None) -> str:
    """In one short line, or in two that keep within their image."""
    parts = [guess] if label is None else [guess, f"is {label}"]
    if sum(map(len, parts)) <= SHORT_TITLE:
        return ", ".join(parts)
    return "\n".join(_shortened(part, LONGEST_LINE) for part in parts)


def _show(axes: Axes, image: npt.NDArray[Any], cmap: str) -> None:
    axes.imshow(image[..., 0] if image.shape[-1] == 1 else image, cmap=cmap)
    axes.axis("off")


def _spaced(name: str) -> str:
    return name.replace("_", " ")
