"""`multilinear demo`: a small network learns the handwritten digits that come with scikit-learn, in about a minute."""

import shutil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.table import Table

from multilinear.analysis import audit, cost
from multilinear.data import load_dataset
from multilinear.evaluate import Evaluation, plots
from multilinear.layers import fold
from multilinear.models import load
from multilinear.report import Report
from multilinear.train import Result, train

SHOWN = 4  # digits in the terminal


def run_demo(out: Path, *, epochs: int, seed: int, console: Console) -> float:
    """Train, print, and write `report.html`, `digits.safetensors` and a few sample images to `out`."""
    changes = [f"run.epochs={epochs}", f"run.seed={seed}", f"optim.warmup_epochs={epochs / 5}"]
    shutil.rmtree(out / "run", ignore_errors=True)  # a demo begins anew each time
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only make a second thread wait
    try:
        result = train("digits", out=out / "run", changes=changes, device="cpu", console=console)
    finally:
        torch.set_num_threads(threads)
    images = load_dataset("digits").test.images
    weights = Path(shutil.copy(result.weights, out / "digits.safetensors"))
    model = load(weights)
    console.print(
        f"\ntest accuracy [bold]{result.test.top1:.2%}[/bold] on {result.test.count} held-out digits, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {result.seconds:.0f} s of training"
    )
    console.print(_sample_table(images, result.test))
    console.print(f"audit: {audit(fold(model), 8)}")
    for i in range(3):
        Image.fromarray(images[i, :, :, 0]).save(out / f"digit-{int(result.test.labels[i])}-{i}.png")
    page = _report(model, images, result).write(out / "report.html")
    console.print(f"report: {page}\nweights: {weights}\ntry: multilinear predict {out}/*.png --weights {weights}")
    return result.test.top1


def _sample_table(images: NDArray[np.uint8], test: Evaluation) -> Table:
    shades = " .:-=+*#%@"
    table = Table(title="the first held-out digits, as the network sees them", show_header=False)
    pictures, verdicts = [], []
    for i, image in enumerate(images[:SHOWN, :, :, 0]):
        table.add_column(no_wrap=True)
        pictures.append("\n".join("".join(shades[int(pixel) * 10 // 256] * 2 for pixel in row) for row in image))
        verdicts.append(f"{int(test.predictions[i])} ({test.confidences[i]:.0%}), truly {int(test.labels[i])}")
    table.add_row(*pictures)
    table.add_row(*verdicts)
    return table


def _report(model: torch.nn.Module, images: NDArray[np.uint8], result: Result) -> Report:
    folded = fold(model)
    price, small = cost(model, 8), cost(folded, 8)
    digits = [str(digit) for digit in range(10)]
    page = Report(
        "A network of additions and multiplications reads digits",
        f"{result.test.top1:.2%} of {result.test.count} held-out digits right, after {result.seconds:.0f} s.",
    )
    page.heading("Training")
    page.figure(plots.curves(result.history, ["loss", "lr"]), "Training loss and learning rate, by epoch.")
    page.heading("What it gets right and wrong")
    page.figure(plots.confusion(result.test.confusion, digits), "Confusion matrix: rows are true digits.")
    shown = plots.predictions(images, result.test, digits, cmap="gray_r")
    page.figure(shown, "The surest mistakes first, then the first right ones.")
    page.heading("What the network is")
    page.text(f"At inference it is {audit(folded, 8)}: no activation function, no division, nothing else.")
    page.table(
        ["", "parameters", "multiply-accumulates", "products"],
        [["as trained", f"{price.parameters:,}", f"{price.macs:,}", f"{price.products:,}"],
         ["folded", f"{small.parameters:,}", f"{small.macs:,}", f"{small.products:,}"]],
    )  # fmt: skip
    return page
