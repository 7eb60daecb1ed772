"""What a run tells while it goes: a progress bar, CSV and JSON lines always, TensorBoard and W&B where installed."""

import csv
import importlib.util
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from multilinear.files import write_atomically

Row = dict[str, Any]


def write_history(folder: Path, rows: list[Row]) -> None:
    """Write `log.csv` and `log.jsonl` anew, so that a resumed run never repeats or skips an epoch there.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_history(folder, [{"epoch": 1, "loss": 2.5}])
    >>> (folder / "log.csv").read_text().split()
    ['epoch,loss', '1,2.5']
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(folder / "log.csv", lambda part: part.write_text(text.getvalue()))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(folder / "log.jsonl", lambda part: part.write_text(lines))


class Dashboards:
    """TensorBoard, if it is installed, and Weights & Biases, if it is installed and WANDB_PROJECT names a project."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._board: Any = None
        self._wandb: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"))
        if importlib.util.find_spec("wandb") is not None and os.environ.get("WANDB_PROJECT"):
            import wandb  # type: ignore[import-not-found, unused-ignore]

            self._wandb = wandb.init(project=os.environ["WANDB_PROJECT"], dir=str(folder), config=dict(config))

    def add(self, row: Row) -> None:
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, row["epoch"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=row["epoch"])

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


class Bar:
    """A progress bar over all steps of a run, with throughput and time left; silent if it is not wanted."""

    def __init__(self, progress: Progress | None, total: int, done: int) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task("", total=total, completed=done, state="")

    def advance(self, steps: int = 1) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=steps)

    def say(self, text: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, state=text)


@contextmanager
def progress_bar(console: Console | None, total: int, done: int) -> Iterator[Bar]:
    """Show a bar on `console` inside, or nothing if it is None.

    >>> with progress_bar(None, 10, 0) as bar: bar.advance()
    """
    if console is None:
        yield Bar(None, total, done)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps,"), TimeRemainingColumn(), TextColumn("left"))
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console, refresh_per_second=4) as progress:
        yield Bar(progress, total, done)
