"""Train a recipe with several seeds and record test accuracy, spread, speed and settings.

    python benchmarks/accuracy.py cifar10 --data DIR --seeds 0 1 2 [--set run.epochs=72 ...] [--out benchmarks/results]

Prints one line a seed and a summary, and writes <date>-<recipe>.json beside the curves. Nothing is chosen on the test
set: each run judges its last (or averaged, or validation-best) weights on it once.
"""

import argparse
import datetime
import json
import platform
import statistics
import tempfile
from pathlib import Path

import timm
import torch

import multilinear
from multilinear.train import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="changes", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--runs", type=Path, default=Path(tempfile.mkdtemp()), help="where the runs' folders go")
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        folder = options.runs / f"{Path(options.recipe).stem}-seed{seed}"
        result = train(options.recipe, out=folder, data=options.data, changes=[*options.changes, f"run.seed={seed}"])
        epochs = [row["epoch_seconds"] for row in result.history]
        rows.append(
            {
                "seed": seed,
                "test_accuracy": result.test.top1,
                "test_auc": result.test.auc,
                "epochs": len(epochs),
                "epoch_seconds_median": statistics.median(epochs),
                "train_seconds": result.seconds,
                "first_step_seconds": result.first_step_seconds,
                "loss": [row["loss"] for row in result.history],
            }
        )
        print({key: value for key, value in rows[-1].items() if key != "loss"}, flush=True)
    accuracies = [row["test_accuracy"] for row in rows]
    spread = statistics.stdev(accuracies) if len(rows) > 1 else 0.0
    print(f"{options.recipe}: {statistics.mean(accuracies):.2%} +- {spread:.2%} over {len(rows)} seeds")
    record = {
        "recipe": options.recipe,
        "changes": options.changes,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "versions": {"multilinear": multilinear.__version__, "torch": torch.__version__, "timm": timm.__version__},
        "mean": statistics.mean(accuracies),
        "spread": spread,
        "runs": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{datetime.date.today()}-{Path(options.recipe).stem}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {path}")


if __name__ == "__main__":
    main()
