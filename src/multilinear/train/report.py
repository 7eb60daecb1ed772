"""The page at the end of a run."""

from pathlib import Path

import yaml

from multilinear.evaluate import Evaluation, plots
from multilinear.report import Report
from multilinear.train.batches import Batches
from multilinear.train.config import Recipe
from multilinear.train.log import Row


def write_run_report(path: Path, recipe: Recipe, history: list[Row], test: Evaluation, batches: Batches) -> Path:
    """Curves, results on the test split, the recipe, and the files that could not be read.

    >>> import tempfile, torch
    >>> from multilinear.train.batches import open_batches
    >>> from multilinear.train.distributed import Processes
    >>> batches = open_batches(Recipe(), None, Processes(0, 1, torch.device("cpu")))
    >>> test = Evaluation.from_logits(torch.eye(10), torch.arange(10))
    >>> rows = [{"epoch": 1, "loss": 2.0, "lr": 0.1}]
    >>> write_run_report(Path(tempfile.mkdtemp()) / "r.html", Recipe(), rows, test, batches).name
    'r.html'
    """
    classes, broken = batches.classes, batches.broken()
    tested = batches.final_split == "test"
    split = "test" if tested else "validation"
    page = Report(
        f"{recipe.model.name} on {recipe.data.name}",
        f"{test.top1:.2%} of {test.count:,} {split} images right, after {len(history)} epochs.",
    )
    page.heading("Training")
    keys = ["loss", "val_accuracy"] if any("val_accuracy" in row for row in history) else ["loss"]
    page.figure(plots.curves(history, [*keys, "lr"]), "By epoch.")
    page.heading("Test split, judged once, at the end" if tested else "Validation split")
    if not tested:
        page.text("There are no test images. These were looked at in training too, so expect a little less elsewhere.")
    page.table(["", *test.numbers()], [["", *test.numbers().values()]])
    page.figure(plots.confusion(test.confusion, classes), "Confusion matrix: rows are true classes.")
    page.figure(plots.per_class(test.per_class, classes), "Accuracy of each class, worst first.")
    page.figure(plots.reliability(test.calibration), "Accuracy by confidence.")
    if broken:
        page.heading(f"{len(broken)} files could not be read")
        page.code("\n".join(broken[:200]))
    page.heading("Recipe")
    page.code(yaml.safe_dump(recipe.as_dict(), sort_keys=False))
    return page.write(path)
