"""Neural ODEs with and without a polynomial field on the paper's annulus, over several seeds, on one core.

    python benchmarks/node_comparison.py [--seeds 0 1 ... 9] [--out benchmarks/results] [--page OUT.html]

Writes <date>-node-comparison.json after every run, so that nothing is lost when it is stopped, and the curves as .png
at the end. Prints one line a run, then the claims of the paper and in how many seeds they hold.
"""

import argparse
import datetime
import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch
import torchdiffeq

import multilinear
from multilinear.files import write_atomically
from multilinear.paper.node_comparison import Run, claims, curves, summary, train, variants, write_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    stem = options.out / f"{datetime.date.today()}-node-comparison"
    runs: list[Run] = []
    for seed in options.seeds:
        for variant in variants():
            run = train(variant, seed)
            runs.append(run)
            end = (
                run.failure
                or f"loss {run.loss:.4f}, accuracy {run.accuracy:.2%}, {run.evaluations[-1]:.0f} evaluations"
            )
            print(f"seed {seed}, {variant.name}: {end}, {run.seconds:.0f} s", flush=True)
            write_record(runs, stem.with_suffix(".json"))
    curves(runs).savefig(stem.with_suffix(".png"), dpi=110, bbox_inches="tight")
    if options.page:
        write_page(runs, options.page)
    for name, claim, count, of in claims(runs):
        print(f"{name}: {claim}: {count} of {of} seeds")
    print(f"record: {stem}.json")


def write_record(runs: list[Run], path: Path) -> None:
    """One line a model, a claim and a run: long lists of losses stay out of the way."""
    head = {
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {
            "multilinear": multilinear.__version__,
            "torch": torch.__version__,
            "torchdiffeq": torchdiffeq.__version__,
        },
    }
    lines = {
        "summary": summary(runs),
        "claims": [
            {"model": name, "claim": claim, "seeds": count, "of": of} for name, claim, count, of in claims(runs)
        ],
        "runs": [_rounded(run) for run in runs],
    }
    parts = [json.dumps(head, indent=1)[:-2]]
    parts += [f' "{key}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]" for key, rows in lines.items()]
    write_atomically(path, lambda part: part.write_text(",\n".join(parts) + "\n}\n"))


def _rounded(run: Run) -> dict[str, object]:
    return {
        "variant": asdict(run.variant),
        "seed": run.seed,
        "seconds": round(run.seconds, 1),
        "accuracy": run.accuracy,
        "failure": run.failure,
        "losses": [float(f"{loss:.4g}") for loss in run.losses],
        "evaluations": [round(count, 1) for count in run.evaluations],
    }


if __name__ == "__main__":
    main()
