"""From a recipe to a trained, evaluated, resumable model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from multilinear.evaluate import Evaluation
from multilinear.train.config import Recipe, load_recipe
from multilinear.train.distributed import join
from multilinear.train.log import Row
from multilinear.train.loop import Run
from multilinear.train.report import write_run_report

__all__ = ["Recipe", "Result", "load_recipe", "train"]


@dataclass(frozen=True)
class Result:
    """What a run left: folder, exported weights, report, one row an epoch, and how it did on the test set."""

    folder: Path
    weights: Path
    report: Path
    history: list[Row]
    test: Evaluation
    tested_on: str  # "test", or "val" where an image folder has no test images
    seconds: float
    first_step_seconds: float


def train(
    recipe: str | Path | dict[str, Any] | Recipe,
    *,
    out: str | Path | None = None,
    data: str | Path | None = None,
    resume: bool = False,
    changes: Sequence[str] = (),
    device: str | None = None,
    console: Console | None = None,
) -> Result:
    """Train, evaluate on the test split once at the end, export, and write a report.

    Args:
        recipe: a YAML file, the name of one that comes with the library, a mapping, or a `Recipe`.
        out: the run's folder; `runs/<recipe>-seed<seed>` if not given.
        data: a folder that holds the data; without it known data sets are downloaded and cached.
        resume: go on from the last checkpoint in `out` if there is one.
        changes: fields to change, such as `"optim.lr=0.01"`.
        console: where to show progress; silent if not given.

    >>> import tempfile
    >>> result = train("digits", out=tempfile.mkdtemp() + "/run", changes=["run.epochs=1"], device="cpu")
    >>> len(result.history), result.weights.name
    (1, 'model.safetensors')
    """
    loaded = load_recipe(recipe, changes)
    name = Path(recipe).stem if isinstance(recipe, str | Path) else loaded.data.name
    folder = Path(out) if out is not None else Path("runs") / f"{name}-seed{loaded.run.seed}"
    with join(device) as processes:
        run = Run(loaded, folder, None if data is None else Path(data), processes, console)
        run.prepare(resume)
        run.train()
        select = loaded.run.select
        best = folder / "best.safetensors"
        if select == "best" and best.exists():
            run.restore(best)
        with run.averaged(select == "ema"):
            run.collect()
            test = run.score(run.batches.final_split)
            weights, report = folder / "model.safetensors", folder / "report.html"
            run.export(weights)
            if processes.is_main:
                write_run_report(report, run.recipe, run.history, test, run.batches)
        broken = run.batches.broken()
        if broken and processes.is_main:
            target = console or Console(stderr=True)
            target.print(f"{len(broken)} image files could not be read and were left out: {', '.join(broken[:10])}")
        processes.barrier()
        return Result(
            folder, weights, report, run.history, test, run.batches.final_split, run.position.seconds,
            run.first_step_seconds,
        )  # fmt: skip
