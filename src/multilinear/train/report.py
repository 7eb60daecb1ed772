"""The page at the end of a run."""

from pathlib import Path

import yaml

from multilinear.evaluate import Evaluation, plots
from multilinear.report import Report
from multilinear.train.config import Recipe
from multilinear.train.log import Row


def write_run_report(
    path: Path, recipe: Recipe, history: list[Row], test: Evaluation, classes: list[str], broken: list[str]
) -> Path:
    """Curves, results on the test split, the recipe, and the files that could not be read.

    >>> import tempfile, torch
    >>> test = Evaluation.from_logits(torch.eye(2), torch.tensor([0, 1]))
    >>> rows = [{"epoch": 1, "loss": 2.0, "lr": 0.1}]
    >>> write_run_report(Path(tempfile.mkdtemp()) / "r.html", Recipe(), rows, test, ["a", "b"], []).name
    'r.html'
    """
    page = Report(
        f"{recipe.model.name} on {recipe.data.name}",
        f"{test.top1:.2%} of {test.count:,} test images right, after {len(history)} epochs.",
    )
    page.heading("Training")
    keys = ["loss", "val_accuracy"] if any("val_accuracy" in row for row in history) else ["loss"]
    page.figure(plots.curves(history, [*keys, "lr"]), "By epoch.")
    page.heading("Test split, judged once, at the end")
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
