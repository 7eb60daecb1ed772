"""Whether a change made a network faster: this version and another one in turns, in the same run.

    git worktree add ../before main~1
    python benchmarks/turns.py ../before --model monet_t_32 --part training --batch 2112
    python benchmarks/turns.py ../before --model monet_ms_t --part inference --batch 16 --device cpu

Each version has a process of its own that stays ready, and both are asked for some passes in turns, so that what else
the machine does, and how warm it is, falls on both. Each round gives a ratio of their medians. Training is a step as
`speed.py` takes it, on a GPU captured; inference goes by `multilinear.optimize`. Both must fit into memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from speed_report import Recorder, Row, record_path, summarise
from speed_runtimes import TrainingStep, build, clock_and_power, forward_call, time_passes, wait

import multilinear
from multilinear import kernels


def call_of(options: argparse.Namespace) -> Callable[[], object]:
    """What is timed, ready to be called."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    if options.part == "inference":
        model, shape = build(options.model, None, device)
        images = torch.randn(options.batch, *shape, device=device)
        return torch.no_grad()(forward_call(f"optimize {options.precision}", model, images))
    step = TrainingStep(options.model, None, options.batch, device, compiled=device.type == "cuda")
    if step.stream is None:
        return step
    with torch.cuda.stream(step.stream):
        with kernels.compile_together():
            step()
        step()
        return step.capture()


def serve(options: argparse.Namespace) -> None:
    """In the process of one version: some passes for each line that comes in, and their times."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what anybody else prints is no answer
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    device, start = torch.device(options.device), time.perf_counter()
    call = call_of(options)
    time_passes(call, device, 1, 2)
    ready = {"source": str(Path(multilinear.__file__).parent), "build_seconds": time.perf_counter() - start}
    print(json.dumps(ready), file=answers, flush=True)
    for asked in sys.stdin:
        answer: Any = time_passes(call, device, options.passes, 1)
        if asked.strip() == "power":
            answer = clock_and_power(call, device, summarise(answer, options.batch)["median_ms"])
        wait(device)
        print(json.dumps(answer), file=answers, flush=True)


class Version:
    """A process that serves the version in a folder."""

    def __init__(self, name: str, folder: Path, running: ExitStack) -> None:
        self.name, source = name, (folder / "src").resolve()
        path = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, __file__, *sys.argv[1:], "--serve"]
        environment = os.environ | {"PYTHONPATH": path}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        running.callback(self.process.kill)
        self.about: Row = self.answer()
        imported = Path(self.about.pop("source")).resolve()
        if imported.parent != source:
            raise SystemExit(f"turns.py: {imported} was imported, not what is in {source}")
        described = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
        self.about["version"] = subprocess.run(described, capture_output=True, text=True).stdout.strip()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"turns.py: the process of the version called {self.name!r} ended; its error is above")
        return json.loads(line)

    def ask(self, what: str = "time") -> Any:
        assert self.process.stdin is not None
        if self.process.poll() is None:  # or that it has ended is the answer
            print(what, file=self.process.stdin, flush=True)
        return self.answer()


def take_turns(versions: list[Version], rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Times of both, and of each round how many times as fast this version was."""
    times: dict[str, list[float]] = {version.name: [] for version in versions}
    ratios = []
    for i in range(rounds):
        found = {version.name: version.ask() for version in versions[:: -1 if i % 2 else 1]}  # none is always the first
        ratios.append(statistics.median(found["other"]) / statistics.median(found["this"]))
        for name, more in found.items():
            times[name] += more
        print(f"round {i + 1} of {rounds}: {ratios[-1]:.3f}x", file=sys.stderr, flush=True)
    return times, ratios


def compare(options: argparse.Namespace) -> None:
    if not (options.other / "src" / "multilinear" / "__init__.py").is_file():
        raise SystemExit(
            f"turns.py: {options.other} has no src/multilinear; give a checkout, as git worktree add makes"
        )
    settings = {name: value for name, value in vars(options).items() if name not in ("other", "out", "serve")}
    recorder = Recorder(record_path(options.out, "turns"), "turns", settings, torch.device(options.device))
    with ExitStack() as running:
        this, other = (
            Version(*named, running) for named in (("this", Path(__file__).parents[1]), ("other", options.other))
        )
        times, ratios = take_turns([this, other], options.rounds)
        for version in (this, other):
            fields = {"model": options.model, "part": options.part, "batch": options.batch, "runtime": version.name}
            with recorder.measurement(**fields, **version.about) as row:
                row |= summarise(times[version.name], options.batch) | version.ask("power")
    ratio = summarise(ratios, 1)
    low, middle, high = (ratio[f"{which}_ms"] for which in ("lower", "median", "upper"))
    recorder.record["ratio"] = {"each": ratios, "median": middle, "quartiles": [low, high]}
    recorder.save()
    print(f"this version is {middle:.3f} times as fast ({low:.3f} to {high:.3f}, {options.rounds} rounds)")
    print(f"record: {recorder.path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--model", default="monet_ms_t")
    parser.add_argument("--part", choices=("training", "inference"), default="training")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--precision", choices=("bf16", "f32"), default="bf16", help="of inference")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--passes", type=int, default=10, help="of each version in a round")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="a folder, or a .json file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.rounds, options.passes) < 2:
        parser.error("--rounds and --passes are 2 or more, or there would be no quartiles")
    serve(options) if options.serve else compare(options)


if __name__ == "__main__":
    main()
