"""`multilinear demo`: a small network learns the handwritten digits that come with scikit-learn, in about a minute."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from multilinear.analysis import audit, cost
from multilinear.layers import collect_statistics, fold
from multilinear.models import create, save
from multilinear.report import Report

BATCH = 64
LEARNING_RATE = 4e-3


@dataclass
class Digits:
    """1797 real digits of 8x8 grey pixels in [0, 1], a stratified fifth held out."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass
class History:
    loss: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)
    seconds: float = 0.0


def load_split() -> Digits:
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    return Digits(images[train], labels[train], images[test], labels[test])


def run_demo(out: Path, *, epochs: int, seed: int, console: Console) -> float:
    """Train, print, and write `report.html`, `digits.safetensors` and a few sample images to `out`."""
    data = load_split()
    torch.manual_seed(seed)
    model = create("monet_micro", in_chans=1, patches=(1,), norm="batch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only make a second thread wait
    try:
        history = train(model, data, epochs, console)
    finally:
        torch.set_num_threads(threads)
    logits = evaluate(model, data.test_images)
    accuracy = _accuracy(logits, data.test_labels)
    found = audit(fold(model), 8)
    console.print(
        f"\ntest accuracy [bold]{accuracy:.2%}[/bold] on {len(data.test_labels)} held-out digits, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {history.seconds:.0f} s of training"
    )
    console.print(_sample_table(data, logits))
    console.print(f"audit: {found}")
    preprocessing = {"input_size": [1, 8, 8], "mean": [0.0], "std": [1.0], "interpolation": "bicubic", "crop_pct": 1.0}
    labels = [str(digit) for digit in range(10)]
    weights = save(model, out / "digits.safetensors", labels=labels, preprocessing=preprocessing)
    for i in range(3):
        pixels = (data.test_images[i, 0] * 255).to(torch.uint8).numpy()
        Image.fromarray(pixels).save(out / f"digit-{int(data.test_labels[i])}-{i}.png")
    page = _report(model, data, history, logits, accuracy).write(out / "report.html")
    console.print(f"report: {page}\nweights: {weights}\ntry: multilinear predict {out}/*.png --weights {weights}")
    return accuracy


def train(model: nn.Module, data: Digits, epochs: int, console: Console) -> History:
    """AdamW, one rise and fall of the learning rate, digits moved by up to one pixel."""
    count = len(data.train_labels)
    steps = count // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=epochs * steps, pct_start=0.2)
    history, start = History(), time.perf_counter()
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=epochs, state="")
        for _ in range(epochs):
            model.train()
            order, losses = torch.randperm(count), []
            for batch in order[: steps * BATCH].split(BATCH):
                loss = F.cross_entropy(
                    model(_moved(data.train_images[batch])), data.train_labels[batch], label_smoothing=0.1
                )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
            history.loss.append(float(np.mean(losses)))
            history.test_accuracy.append(_accuracy(evaluate(model, data.test_images), data.test_labels))
            progress.update(task, advance=1, state=f"loss {history.loss[-1]:.3f}")
        collect_statistics(model, [data.train_images])
    history.seconds = time.perf_counter() - start
    return history


def evaluate(model: nn.Module, images: Tensor) -> Tensor:
    model.eval()
    with torch.inference_mode():
        logits: Tensor = model(images)
    return logits


def _moved(images: Tensor) -> Tensor:
    """Each image moved by -1, 0 or 1 pixel along both sides, by indexing a padded copy."""
    count, _, height, width = images.shape
    padded = F.pad(images, (1, 1, 1, 1))[:, 0]
    rows = torch.randint(0, 3, (count, 1)) + torch.arange(height)
    columns = torch.randint(0, 3, (count, 1)) + torch.arange(width)
    return padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]][:, None]


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(-1) == labels).double().mean().item()


def _sample_table(data: Digits, logits: Tensor) -> Table:
    shades = " .:-=+*#%@"
    table = Table(title="the first held-out digits, as the network sees them", show_header=False)
    for _ in range(4):
        table.add_column(no_wrap=True)
    pictures, verdicts = [], []
    for image, label, scores in zip(data.test_images[:4], data.test_labels[:4], logits[:4], strict=True):
        pictures.append("\n".join("".join(shades[min(int(p * 10), 9)] * 2 for p in row) for row in image[0].tolist()))
        share = scores.softmax(-1).max().item()
        verdicts.append(f"{int(scores.argmax())} ({share:.0%}), truly {int(label)}")
    table.add_row(*pictures)
    table.add_row(*verdicts)
    return table


def _report(model: nn.Module, data: Digits, history: History, logits: Tensor, accuracy: float) -> Report:
    folded = fold(model)
    found, price, small = audit(folded, 8), cost(model, 8), cost(folded, 8)
    page = Report(
        "A network of additions and multiplications reads digits",
        f"{accuracy:.2%} of {len(data.test_labels)} held-out handwritten digits right, after {history.seconds:.0f} s.",
    )
    page.heading("Training")
    page.figure(
        _curves(history), "Training loss, and accuracy on the held-out fifth, by epoch (shown, never used to choose)."
    )
    page.heading("What it gets right and wrong")
    page.figure(_confusion(data.test_labels, logits), "Confusion matrix: rows are true digits, columns predictions.")
    page.figure(_samples(data, logits), "Every mistake first, then the first right ones.")
    page.heading("What the network is")
    page.text(f"At inference it is {found}: no activation function, no division, nothing else.")
    page.table(
        ["", "parameters", "multiply-accumulates", "products"],
        [["as trained", f"{price.parameters:,}", f"{price.macs:,}", f"{price.products:,}"],
         ["folded", f"{small.parameters:,}", f"{small.macs:,}", f"{small.products:,}"]],
    )  # fmt: skip
    return page


def _curves(history: History) -> Figure:
    figure = Figure(figsize=(8, 3))
    left, right = figure.subplots(1, 2)
    left.plot(history.loss)
    left.set(xlabel="epoch", ylabel="training loss")
    right.plot([100 * value for value in history.test_accuracy])
    right.set(xlabel="epoch", ylabel="held-out accuracy, %", ylim=(80, 100.5))
    figure.tight_layout()
    return figure


def _confusion(labels: Tensor, logits: Tensor) -> Figure:
    counts = torch.zeros(10, 10, dtype=torch.int64)
    counts.index_put_((labels, logits.argmax(-1)), torch.ones((), dtype=torch.int64), accumulate=True)
    figure = Figure(figsize=(4.2, 4.2))
    axes = figure.subplots()
    axes.imshow(counts.sqrt().numpy(), cmap="Blues")
    for row in range(10):
        for column in range(10):
            if counts[row, column]:
                axes.text(column, row, str(int(counts[row, column])), ha="center", va="center",
                          color="white" if row == column else "black", fontsize=8)  # fmt: skip
    axes.set(xticks=range(10), yticks=range(10), xlabel="predicted", ylabel="true")
    return figure


def _samples(data: Digits, logits: Tensor) -> Figure:
    wrong = logits.argmax(-1) != data.test_labels
    order = torch.cat([wrong.nonzero()[:, 0], (~wrong).nonzero()[:, 0]])[:16]
    figure = Figure(figsize=(8, 2.4))
    for place, i in zip(figure.subplots(2, 8).flat, order.tolist(), strict=True):
        place.imshow(data.test_images[i, 0].numpy(), cmap="gray_r")
        guess, label = int(logits[i].argmax()), int(data.test_labels[i])
        place.set_title(f"{guess}" if guess == label else f"{guess}, is {label}", fontsize=8,
                        color="black" if guess == label else "crimson")  # fmt: skip
        place.axis("off")
    return figure
