"""Find the equations of twelve systems from a table of numbers: ours, PySINDy and a neural ODE in one run.

    OMP_NUM_THREADS=1 python benchmarks/discovery.py [--group tuned|fresh|all] [--conditions clean noise-5 ...]
        [--methods ours weak-auto ...] [--seeds 5] [--processes 1] [--out benchmarks/results]

All methods see the same numbers and are told the true degree. A cell counts the problems whose terms are exactly right
(every output, every monomial) and gives the median over all its problems of the relative coefficient error
|found - true| / |true|, where a method that fails or passes the time limit has an infinite error. Conditions without
chance run once, the others with each seed. The systems are in `discovery_systems.py`, what the peers do is told in
`discovery_peers.py`. Writes <date>-discovery.json and .png.
"""

import argparse
import datetime
import json
import math
import multiprocessing
import os
import platform
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import discovery_peers as peers
import numpy as np
import torch
from discovery_systems import CONDITIONS, DETERMINISTIC, SYSTEMS, System, sample, truth
from matplotlib.figure import Figure
from numpy.typing import NDArray

from multilinear.ode import PolynomialODE

Floats = NDArray[np.float64]
Row = dict[str, Any]

LIMIT = 60  # seconds for one problem and one job, a whole grid of settings included
NOISY = ("noise-1", "noise-5", "noise-10", "missing", "one-by-one")
NEURAL = ("clean", "noise-5")  # where the neural ODE runs, with the first seed only: it is slow and finds no terms
# a job may serve two methods: the same grid of settings, chosen from without and with the truth
JOBS: dict[str, tuple[str, ...]] = {
    "ours": ("ours",),
    "default": ("sindy-default",),
    "stlsq": ("sindy-auto", "sindy-oracle"),
    "ensemble": ("ensemble-auto", "ensemble-oracle"),
    "weak": ("weak-auto", "weak-oracle"),
    "neural": ("neural-ode",),
}
METHODS = (
    "ours", "sindy-default", "sindy-auto", "ensemble-auto", "weak-auto",
    "sindy-oracle", "ensemble-oracle", "weak-oracle", "neural-ode",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One job on one set of numbers."""

    system: str
    condition: str
    seed: int
    job: str


class TimeLimit(BaseException):
    """Not an Exception, so that no method takes it for a failure of its own and goes on."""


def solve(task: Task) -> list[Row]:
    """The scores of each method that the job serves."""
    torch.set_num_threads(1)
    np.random.seed(task.seed)  # PySINDy draws from the global generator
    system = SYSTEMS[task.system]
    times, states, clean = sample(system, task.condition, task.seed)
    about = {"system": system.name, "group": system.group, "condition": task.condition, "seed": task.seed}
    started = time.perf_counter()
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(LIMIT)
    try:
        results = _run(task, system, times, states, clean)
    except (TimeLimit, Exception) as failure:  # one failure must not cost the run; it is recorded and counted below
        reason = f"{type(failure).__name__}: {failure}"
        lost = {"seconds": time.perf_counter() - started, "failure": reason, "right": False, "error": math.inf,
                "trajectory": math.inf}  # fmt: skip
        results = dict.fromkeys(JOBS[task.job], lost)
    finally:
        signal.alarm(0)
    return [{**about, "method": method, **scores} for method, scores in results.items()]


def _stop(signum: int, frame: FrameType | None) -> None:
    raise TimeLimit(f"longer than {LIMIT} s")


def _run(task: Task, system: System, times: Floats, states: Floats, clean: Floats) -> dict[str, Row]:
    started = time.perf_counter()

    def scored(found: Floats, seconds: float | None = None) -> Row:
        seconds = seconds or time.perf_counter() - started
        return {"seconds": seconds, **score(system, found), "trajectory": trajectory_error(system, found, times, clean)}

    if task.job == "ours":
        model = PolynomialODE(degree=system.degree).fit(times, states)
        return {"ours": {**scored(model.polynomial.coefficients), **coverage(system, model.intervals)}}
    if task.job == "default":
        return {"sindy-default": scored(peers.default(times, states, system.degree))}
    if task.job == "neural":
        path = peers.neural_path(times, states, clean[0], task.seed)
        return {"neural-ode": {"seconds": time.perf_counter() - started, "trajectory": distance(path, clean)}}
    auto, oracle = JOBS[task.job]
    laws = peers.candidates(task.job, times, states, system.degree)
    tried = time.perf_counter() - started
    chosen = scored(laws[peers.choose_by_bic(laws, times, states, system.degree)])
    told = scored(laws[peers.choose_by_truth(laws, truth(system).coefficients)], tried)
    return {auto: {**chosen, "laws": len(laws)}, oracle: {**told, "laws": len(laws)}}


def score(system: System, found: Floats) -> Row:
    """Terms and coefficients against the true ones."""
    true = truth(system).coefficients
    missing, extra = int(((true != 0) & (found == 0)).sum()), int(((true == 0) & (found != 0)).sum())
    error = float(np.linalg.norm(found - true) / np.linalg.norm(true))
    return {"right": missing + extra == 0, "missing": missing, "extra": extra,
            "error": error if math.isfinite(error) else math.inf}  # fmt: skip


def coverage(system: System, intervals: list[tuple[int, tuple[int, ...], float, float, float]]) -> Row:
    """How many true non-zero coefficients were found, and how many of them lie in their 95% intervals."""
    known = [(system.terms.get((output, tuple(exponents))), low, high) for output, exponents, _, low, high in intervals]
    inside = [low <= value <= high for value, low, high in known if value is not None]
    return {"intervals": len(inside), "covered": sum(inside)}


def trajectory_error(system: System, found: Floats, times: Floats, clean: Floats) -> float:
    """How far the law's path from the true start is from the noise-free one."""
    longest = (times[-1] - times[0]) / 2000
    path = peers.simulated(found[None], system.degree, clean[:1], np.diff(times)[None], longest)[0, 0]
    return distance(np.vstack([clean[:1], path]), clean)


def distance(path: Floats, clean: Floats) -> float:
    """Root mean square over states and samples, in standard deviations of each state."""
    with np.errstate(all="ignore"):
        error = float(np.sqrt(np.mean(((path - clean) / clean.std(axis=0)) ** 2)))
    return error if math.isfinite(error) else math.inf


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    jobs = [job for job, methods in JOBS.items() if set(methods) & set(options.methods)]
    for name in options.systems:
        if options.group not in ("all", SYSTEMS[name].group):
            continue
        for condition in options.conditions:
            for seed in range(1 if condition in DETERMINISTIC else options.seeds):
                for job in jobs:
                    if job != "neural" or (condition in NEURAL and seed == 0):
                        yield Task(name, condition, seed, job)


def summarise(rows: list[Row]) -> Row:
    """One cell: counts, medians and spreads."""
    by_seed: dict[int, list[bool]] = defaultdict(list)
    for row in rows:
        by_seed[row["seed"]].append(row["right"])
    shares = [sum(seed) / len(seed) for seed in by_seed.values()]
    return {
        "n": len(rows),
        "right": sum(row["right"] for row in rows),
        "right_by_seed": [min(shares), max(shares)],
        "error": _median(rows, "error"),
        "error_quartiles": _quartiles(rows, "error"),
        "seconds": _median(rows, "seconds"),
        "seconds_quartiles": _quartiles(rows, "seconds"),
    }


def _median(rows: list[Row], key: str) -> float:
    values = sorted(row[key] for row in rows)
    return values[(len(values) - 1) // 2] if len(values) % 2 else sum(values[len(values) // 2 - 1 :][:2]) / 2


def _quartiles(rows: list[Row], key: str) -> list[float]:
    return np.quantile([row[key] for row in rows], [0.25, 0.75], method="nearest").tolist()


def tabulate(rows: list[Row], group: str) -> dict[str, dict[str, Row]]:
    """Print the table of a group and return its cells by condition and method."""
    rows = [row for row in rows if group in ("all", row["group"])]
    methods = [m for m in METHODS if any(row["method"] == m for row in rows) and m != "neural-ode"]
    conditions = [c for c in CONDITIONS if any(row["condition"] == c for row in rows)]
    cells: dict[str, dict[str, Row]] = {}
    for condition in [*conditions, "all"]:
        cells[condition] = {
            method: summarise(
                [row for row in rows if row["method"] == method and condition in ("all", row["condition"])]
            )
            for method in methods
        }

    def line(first: str, cell: Callable[[Row], str], condition: str) -> None:
        print(f"| {first:<12} | " + " | ".join(f"{cell(cells[condition][m]):<15}" for m in methods) + " |")

    systems = len({row["system"] for row in rows})
    print(f"\n{group}, {systems} systems: problems with exactly the right terms, median relative coefficient error")
    print(f"| {'data':<12} | " + " | ".join(f"{method:<15}" for method in methods) + " |")
    print("|---" * (len(methods) + 1) + "|")
    for condition in cells:
        line(condition, lambda cell: f"{cell['right']}/{cell['n']}, {cell['error']:.1e}", condition)
    line("seconds", lambda cell: f"{cell['seconds']:.2g}", "all")
    return cells


def trajectories(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Median distance from the noise-free path, on the problems that the neural ODE was given."""
    found: dict[str, dict[str, float]] = {}
    for condition in NEURAL:
        rows_here = [row for row in rows if row["condition"] == condition and row["seed"] == 0]
        methods = [m for m in METHODS if any(row["method"] == m for row in rows_here)]
        found[condition] = {m: _median([row for row in rows_here if row["method"] == m], "trajectory") for m in methods}
        if methods:
            values = ", ".join(f"{method} {value:.1e}" for method, value in found[condition].items())
            print(f"path from the true start, median relative RMSE, {condition}, first seed: {values}")
    return found


def covered(rows: list[Row]) -> Row:
    """Share of true coefficients inside our 95% intervals on noisy data, where the terms are right and anywhere."""
    noisy = [row for row in rows if row.get("intervals") and row["condition"] in NOISY]
    found = {}
    for name, some in (("terms right", [row for row in noisy if row["right"]]), ("all", noisy)):
        count = sum(row["intervals"] for row in some)
        if count:
            found[name] = {"coefficients": count, "covered": sum(row["covered"] for row in some) / count}
            print(
                f"95% intervals, noisy data, {name}: {found[name]['covered']:.1%} of {count} true coefficients inside"
            )
    return found


def draw(cells: dict[str, dict[str, Row]], path: Path) -> None:
    """Bars: share of problems with exactly the right terms."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    methods = list(cells["all"])
    for k, method in enumerate(methods):
        shares = [cell[method]["right"] / cell[method]["n"] for cell in cells.values()]
        places = np.arange(len(shares)) + (k - (len(methods) - 1) / 2) * 0.8 / len(methods)
        # what was told the truth is drawn pale: no user can have it
        axes.bar(places, shares, 0.8 / len(methods), label=method, alpha=0.4 if method.endswith("oracle") else 1.0)
    axes.set_xticks(range(len(cells)), list(cells))
    axes.set_ylabel("exactly the right terms")
    axes.set_ylim(0, 1)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] \
        if info.exists() else []  # fmt: skip
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _plain(value: Any) -> Any:
    """JSON has no infinity: null stands for it."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--group", choices=["tuned", "fresh", "all"], default="all")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS), metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5, help="how many, for the conditions with chance")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    waiting, rows = list(tasks(options)), []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for done, found in enumerate(pool.imap_unordered(solve, waiting), start=1):
            rows += [row for row in found if row["method"] in options.methods]
            if done % 50 == 0:
                print(f"{done} of {len(waiting)}", flush=True)
    for row in rows:
        if "failure" in row:
            print("failed:", *(row[key] for key in ("method", "system", "condition", "seed", "failure")))
    groups = [group for group in ("tuned", "fresh") if any(row["group"] == group for row in rows)]
    cells = {group: tabulate(rows, group) for group in ([*groups, "all"] if len(groups) > 1 else groups)}
    record = {
        "about": "null in place of an error: a failure or a law that blows up; seeds and n are given for each cell",
        "hardware": hardware(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("multilinear", "pysindy", "numpy", "scipy", "scikit-learn", "torch")},
        "seeds": options.seeds,
        "processes": options.processes,
        "limit_seconds": LIMIT,
        "cells": cells,
        "paths": trajectories(rows),
        "intervals": covered(rows),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{datetime.date.today()}-discovery.json"
    lines = ",\n".join(json.dumps(_plain(row)) for row in rows)
    path.write_text(json.dumps(_plain(record), indent=1)[:-2] + f',\n "rows": [\n{lines}\n]\n}}\n')
    draw(cells[groups[0] if len(groups) == 1 else "all"], path.with_suffix(".png"))
    print(f"record: {path}")


if __name__ == "__main__":
    main()
