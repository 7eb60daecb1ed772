"""What `speed.py` leaves behind: the record, the table of figures, the targets, and accuracy against throughput.

Nothing here needs a GPU, and only `plot` needs matplotlib.
"""

import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from multilinear.files import write_atomically

Row = dict[str, Any]

# Top-1 on ImageNet-1K as published: (label, percent, by whom). The single-stage MONets have no published figure.
MONET_TABLE = "the ImageNet table of Multilinear Operator Networks, ICLR 2024"
PUBLISHED = {
    "monet_ms_t": ("MONet-T, multi-stage", 77.0, MONET_TABLE),
    "monet_ms_s": ("MONet-S, multi-stage", 81.3, MONET_TABLE),
    "resnet50": ("ResNet-50", 77.2, MONET_TABLE),
    # that table has 81.2 for DeiT-S, which is the distilled network; the one measured here is not distilled
    "deit_small_patch16_224": ("DeiT-S", 79.8, "Touvron et al., ICML 2021"),
    "resmlp_12_224": ("ResMLP-12", 76.6, MONET_TABLE),
    "resmlp_24_224": ("ResMLP-24", 79.4, MONET_TABLE),
    "mixer_b16_224": ("Mixer-B/16", 76.4, MONET_TABLE),
}


@dataclass(frozen=True)
class Target:
    """A bound on a quantity of a model's best runtime, or on its ratio to that of a peer's best runtime."""

    command: str
    part: str
    model: str
    peer: str | None
    quantity: str
    at_least: bool
    limit: float

    def __str__(self) -> str:
        limit = f"{'>=' if self.at_least else '<='} {self.limit:,g}{f' x {self.peer}' if self.peer else ''}"
        return f"{self.model} {self.part}, {self.quantity} {limit}"


TARGETS = (
    Target("gpu", "inference", "monet_ms_t", "resnet50", "images_per_second", True, 1.5),
    Target("gpu", "training", "monet_ms_t", "resnet50", "images_per_second", True, 1.0),
    Target("gpu", "training", "monet_ms_t", "resnet50", "allocated_gb", False, 1.3),
    Target("gpu", "inference", "monet_ms_s", "resmlp_24_224", "images_per_second", True, 1.0),
    Target("gpu", "training", "monet_ms_s", "resmlp_24_224", "images_per_second", True, 0.8),
    Target("gpu", "training", "monet_t_32", None, "images_per_second", True, 60_000),
    Target("gpu", "inference", "monet_t_32", None, "images_per_second", True, 200_000),
    Target("gpu", "latency", "monet_ms_t", "deit_small_patch16_224", "median_ms", False, 1.0),
    Target("gpu", "startup", "monet_ms_t", None, "seconds", False, 45),
    Target("cpu", "cpu-inference", "monet_ms_t", "resmlp_12_224", "images_per_second", True, 1.0),
    Target("cpu", "cpu-latency", "monet_nano", None, "median_ms", False, 5.0),
)


def best(rows: Sequence[Row], model: str, part: str) -> Row | None:
    """The row that counts: the fastest of a model's runtimes and batch sizes, failures left out."""
    found = [row for row in rows if row["model"] == model and row["part"] == part and "error" not in row]
    by = "images_per_second" if part in ("inference", "training", "cpu-inference") else "median_ms"
    if part == "startup":
        by = "seconds"
    return min(found, key=lambda row: -row[by] if by == "images_per_second" else row[by], default=None)


def check_targets(rows: Sequence[Row], command: str) -> list[Row]:
    """For each target of "gpu" or "cpu": the value, and "reached", "short by ...%" or "not measured"."""
    results = []
    for target in TARGETS:
        if target.command != command:
            continue
        values = []
        for name in [target.model, target.peer]:
            row = best(rows, name, target.part) if name else None
            values.append(None if row is None else row.get(target.quantity))
        value, against = values
        if target.peer:
            value = value / against if value and against else None
        verdict = "not measured"
        if value is not None:
            short = 1 - value / target.limit if target.at_least else value / target.limit - 1
            verdict = "reached" if short <= 0 else f"short by {short:.1%}"
        results.append(asdict(target) | {"target": str(target), "value": value, "verdict": verdict})
    return results


def print_report(record: dict[str, Any]) -> None:
    """The figures, what failed, and the targets."""
    peaks = record.get("peaks", {})
    if peaks:
        print(f"\nmeasured peaks: {peaks['tflops']:.0f} TFLOP/s in bf16, copy at {peaks['gb_per_second']:,.0f} GB/s")
    print(f"\n{'model':<24}{'part':<15}{'batch':>5} {'runtime':<30}{'ms (quartiles), n':<36} {'images/s':>10}  more")
    for row in record["rows"]:
        start = f"{row['model']:<24}{row['part']:<15}{row.get('batch', ''):>5} {row.get('runtime', ''):<30}"
        print(start + (f"FAILED: {row['error'][:150]}" if "error" in row else describe(row)))
    print("\ntargets (the best runtime of each counts)")
    for result in check_targets(record["rows"], record["command"]):
        value = "" if result["value"] is None else f"{result['value']:,.3g}"
        print(f"  {result['target']:<80} {value:>9}  {result['verdict']}")


def describe(row: Row) -> str:
    """One row's figures in one line."""
    if "seconds" in row:
        start = "seconds_"
        moments = [f"{key[len(start) :]} after {row[key]:.1f}" for key in row if key.startswith(start)]
        return f"{row['seconds']:.1f} s to the end of the first training step, n={row['n']}  {', '.join(moments)}"
    times = f"{row['median_ms']:.4g} ({row['lower_ms']:.4g} to {row['upper_ms']:.4g}), n={row['n']}"
    more = []
    if "allocated_gb" in row:
        more.append(f"{row['allocated_gb']:.1f} GB ({row['reserved_gb']:.1f} reserved)")
    if "compute_share" in row:
        more.append(f"{row['tflops']:.1f} TFLOP/s, {row['compute_share']:.0%} of matmul")
        more.append(f"{row['memory_share']:.0%} of copy")
    if "watt" in row:
        more.append(
            f"{row['clock_mhz']:.0f} of {row['most_mhz']:.0f} MHz at {row['watt']:.0f} of {row['most_watt']:.0f} W"
        )
    if row.get("logit_error") is not None:
        more.append(f"logits off by {row['logit_error']:.2g}")
    if "build_seconds" in row:
        more.append(f"ready after {row['build_seconds']:.1f} s")
    return f"{times:<36} {row['images_per_second']:>10,.0f}  {', '.join(more)}"


def summarise(milliseconds: Sequence[float], batch: int) -> Row:
    """n, median and quartiles of the times of single passes."""
    lower, median, upper = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return {
        "n": len(milliseconds),
        "median_ms": median,
        "lower_ms": lower,
        "upper_ms": upper,
        "images_per_second": 1000 * batch / median,
    }


class Recorder:
    """Keeps the record on disk up to date, so that a run that is cut short has lost nothing."""

    def __init__(self, path: Path, command: str, options: dict[str, Any], device: torch.device) -> None:
        self.path, self.start = path, time.perf_counter()
        self.record: dict[str, Any] = {
            "date": str(datetime.date.today()),
            "command": command,
            "options": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
            "machine": hardware(device),
            "versions": versions(),
            "models": {},
            "rows": [],
        }
        if options.get("append") and path.exists():
            before = json.loads(path.read_text())
            self.record |= {key: before[key] for key in ("options", "peaks", "models", "rows") if key in before}

    @contextmanager
    def measurement(self, **fields: Any) -> Iterator[Row]:
        """A row to fill in. What goes wrong inside is written in its place, and the run goes on."""
        row: Row = dict(fields)
        try:
            yield row
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:3000]
        self.record["rows"].append(row)
        said = f"FAILED: {row['error'][:300]}" if "error" in row else describe(row)
        print(f"{row['model']} {row['part']} {row.get('batch', '')} {row.get('runtime', '')}: {said}", flush=True)
        self.save()

    def save(self) -> None:
        self.record["seconds"] = time.perf_counter() - self.start
        self.record["targets"] = check_targets(self.record["rows"], self.record["command"])
        text = json.dumps(self.record, indent=1, allow_nan=False) + "\n"
        write_atomically(self.path, lambda part: part.write_text(text))


def record_path(out: Path, command: str) -> Path:
    """`out` itself where it is a .json file, else today's record in that folder."""
    return out if out.suffix == ".json" else out / f"{datetime.date.today()}-speed-{command}.json"


def hardware(device: torch.device) -> dict[str, Any]:
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = named[0].partition(":")[2].strip() if named else cpu
    found: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    found["vectors"] = torch.backends.cpu.get_cpu_capability()  # which PyTorch may be told to limit
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_gb": properties.total_memory / 1e9}
    return found


def versions() -> dict[str, str | None]:
    """Asked of the modules, since one that lies on the path need not be installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "triton", "timm", "multilinear", "onnxruntime"):
        try:
            found[name] = import_module(name).__version__
        except ImportError:
            found[name] = None
    return found


def plot(record: dict[str, Any], path: Path) -> list[str]:
    """Published accuracy against measured throughput; returns the models that are in the figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    points = [(name, row) for name in PUBLISHED if (row := best(record["rows"], name, "inference")) is not None]
    if not points:
        sys.exit("this record has no inference throughput of a network with a published accuracy")
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for name, row in points:
        label, accuracy, _ = PUBLISHED[name]
        speed, ours = row["images_per_second"], name.startswith("monet")
        axes.plot(speed, accuracy, "o" if ours else "s", color="tab:red" if ours else "tab:gray")
        axes.annotate(label, (speed, accuracy), textcoords="offset points", xytext=(6, 5), fontsize=9)
    axes.set_xscale("log")
    for axis_ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis_ticks(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(axis="x", which="both", labelrotation=30, labelsize=8)
    axes.margins(x=0.4, y=0.12)
    batches = sorted({row["batch"] for _, row in points})
    machine = record["machine"].get("gpu", record["machine"]["cpu"])
    axes.set_xlabel(f"images/s, inference, bf16, batch {', '.join(map(str, batches))} (measured: {machine})")
    axes.set_ylabel("ImageNet-1K top-1, % (published)")
    axes.set_title(
        "Accuracies are the published ones, not ours; throughputs are of one run\n"
        f"median of {min(row['n'] for _, row in points)} or more passes, "
        f"torch {record['versions']['torch']}, {record['date']}",
        fontsize=9,
    )
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=150)
    return [name for name, _ in points]
