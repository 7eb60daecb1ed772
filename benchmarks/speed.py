"""How fast MONets are beside networks of timm that users would take instead, all in one run.

    python benchmarks/speed.py gpu [--models NAME ...] [--parts inference latency ...] [--out FOLDER] [--quick]
    python benchmarks/speed.py cpu [--runtimes "eager f32" ...]
    python benchmarks/speed.py plot RECORD.json

On the GPU: inference in bf16 at batch 256 (small images 1024, 2112 and 4224), latency at batch 1, training steps (bf16
autocast, f32 weights, fused AdamW, random images that are on the device already), seconds to the first training step of
a fresh process with empty compile caches, and for each MONet the kernels that take the time, and the clock and power of
the GPU after a second of it. Each figure is the median over single passes, with quartiles.
Every network is measured in several runtimes; all are written, and the best of each network counts. Peers are compiled
whole, MONets by `multilinear.optimize` and by their blocks; "graph" is a captured CUDA graph.

Shares of the machine: FLOPs are those of matrix products and convolutions, bytes those of their operands and results in
bf16 without the weights, as if all else were fused into them; a training step counts three times a forward pass. The
peaks are a large matrix product and a large copy, timed in the same run.

"monet_ms_t norm=batch" is the network as a polynomial: `--models monet_ms_t "monet_ms_t norm=batch"`.

On the CPU the runtimes take turns, pass by pass, so that what else the machine does falls on all of them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from speed_report import Recorder, Row, plot, print_report, record_path, summarise
from speed_runtimes import (
    TrainingStep,
    build,
    clock_and_power,
    forward_call,
    free_memory,
    is_monet,
    measure_peaks,
    peak_memory,
    shares,
    start_afresh,
    time_passes,
    top_kernels,
    wait,
    work_per_image,
)

import multilinear
from multilinear import kernels

# those that targets need come first, in case the run is cut short
MODELS = (
    "monet_ms_t", "resnet50", "monet_t_32", "deit_small_patch16_224", "monet_ms_s", "resmlp_24_224",
    "monet_t", "resmlp_12_224", "mixer_b16_224",
)  # fmt: skip
PARTS = ("inference", "latency", "training", "startup", "profile")
# small images leave a GPU idle at 256; 2112 are 16 a processor of an H200
BATCHES = {"monet_t_32": (1024, 2112, 4224)}
STARTUP_MODELS = ("monet_ms_t", "resnet50")
CPU_RUNTIMES = (
    "eager f32", "eager bf16", "compile f32", "compile bf16", "compile bf16 freezing", "onnx f32",
    "optimize f32", "optimize bf16",
)  # fmt: skip
OPTIMIZED = hasattr(multilinear, "optimize")


class GpuRun:
    """Everything that `gpu` measures, written down as it comes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.graphs = self.device.type == "cuda" and not options.no_graph
        self.recorder = Recorder(record_path(options.out, "gpu"), "gpu", vars(options), self.device)
        self.record = self.recorder.record
        if not OPTIMIZED:
            self.record["notes"] = ["no multilinear.optimize here: compiled blocks stand in for it"]
        if "peaks" not in self.record:
            self.record["peaks"] = measure_peaks(self.device)
        print(self.record["machine"], self.record["versions"], self.record["peaks"], flush=True)

    def run(self) -> None:
        options = self.options
        if "startup" in options.parts:
            for name in STARTUP_MODELS if options.startup is None else options.startup:
                self.first_step(name)
        for i, name in enumerate(options.models):
            try:
                self.measure(name)
                wait(self.device)
            except RuntimeError as error:
                self.go_on_in_a_new_process(name, options.models[i + 1 :], error)
        self.recorder.save()
        print_report(self.record)
        print(f"record: {self.recorder.path}")

    def measure(self, name: str) -> None:
        parts, start = self.options.parts, time.perf_counter()
        try:
            self.record["models"][name] = work_per_image(name, self.options.side)
        except Exception as error:
            self.record["models"][name] = {"error": repr(error)}
        for batch in self.options.batch or BATCHES.get(name, (256,)):
            if "inference" in parts:
                self.inference(name, "inference", batch)
            if "training" in parts:
                self.training(name, batch)
        if "latency" in parts:
            self.inference(name, "latency", 1)
        print(f"{name}: {time.perf_counter() - start:.0f} s in all", flush=True)

    def inference(self, name: str, part: str, batch: int) -> None:
        latency = part == "latency"
        runtimes = ["compile bf16"] + ["compile bf16 reduce-overhead"] * latency
        if name.startswith("monet"):
            runtimes = ["optimize bf16"] * OPTIMIZED + ["blocks bf16"]
        for runtime in runtimes:
            failed = self.one_inference(name, part, batch, runtime)
            if failed and runtime == "optimize bf16":  # it may want weights of single precision
                self.one_inference(name, part, batch, "optimize f32")

    def one_inference(self, name: str, part: str, batch: int, runtime: str) -> bool:
        """Whether it failed."""
        start_afresh(self.device)
        with self.recorder.measurement(model=name, part=part, batch=batch, runtime=runtime) as row:
            row |= self.timed_inference(name, part == "latency", batch, runtime)
        return "error" in row

    @torch.no_grad()
    def timed_inference(self, name: str, latency: bool, batch: int, runtime: str) -> Row:
        passes, warm_up = (200, 20) if latency else (30, 5)
        if self.options.quick:
            passes, warm_up = passes // 3, 3
        torch.manual_seed(0)
        model, shape = build(name, self.options.side, self.device)
        images = torch.randn(batch, *shape, device=self.device)
        expected = model.eval()(images[:8])
        start = time.perf_counter()
        call = forward_call(runtime, model, images)
        error = relative_error(call()[:8], expected)
        wait(self.device)
        row: Row = {"build_seconds": time.perf_counter() - start, "logit_error": error}
        free_memory(self.device)  # the peak is that of this runtime, not of the check above
        row |= summarise(time_passes(call, self.device, passes, warm_up, alone=latency), batch)
        row |= peak_memory(self.device) | self.shares(name, row, 1)
        if "profile" in self.options.parts and is_monet(model) and not latency:
            row |= top_kernels(call, self.device) | clock_and_power(call, self.device, row["median_ms"])
        return row

    def training(self, name: str, batch: int) -> None:
        start_afresh(self.device)
        plain = "eager" if self.options.no_compile else "blocks" if name.startswith("monet") else "compile"
        fields = {"model": name, "part": "training", "batch": batch}
        step = None
        with self.recorder.measurement(**fields, runtime=plain) as row:
            start = time.perf_counter()
            step = TrainingStep(name, self.options.side, batch, self.device, compiled=not self.options.no_compile)
            with torch.cuda.stream(step.stream):
                with kernels.compile_together():
                    step()
                step()
                wait(self.device)
                row["build_seconds"] = time.perf_counter() - start
                row |= self.timed_steps(name, step, batch)
        if step is not None and "error" not in row and self.graphs:
            with self.recorder.measurement(**fields, runtime=f"{plain} graph") as row, torch.cuda.stream(step.stream):
                start = time.perf_counter()
                replay = step.capture()
                replay()
                wait(self.device)
                row["build_seconds"] = time.perf_counter() - start
                row |= self.timed_steps(name, replay, batch)

    def timed_steps(self, name: str, call: Any, batch: int) -> Row:
        passes, warm_up = (8, 2) if self.options.quick else (20, 3)
        row = summarise(time_passes(call, self.device, passes, warm_up), batch)
        row |= peak_memory(self.device) | self.shares(name, row, 3)
        if "profile" in self.options.parts and name.startswith("monet"):
            row |= top_kernels(call, self.device) | clock_and_power(call, self.device, row["median_ms"])
        return row

    def shares(self, name: str, row: Row, passes: int) -> Row:
        work = self.record["models"][name]
        return {} if "error" in work else shares(row, work, self.record["peaks"], passes)

    def first_step(self, name: str) -> None:
        """From the start of a fresh process, nothing compiled before, to the end of its first training step."""
        options = self.options
        batch = options.batch[0] if options.batch else 256
        command = [sys.executable, __file__, "first-step", name, "--device", options.device, "--batch", str(batch)]
        command += ["--side", str(options.side)] if options.side else []
        command += [flag for flag in ("--no-graph", "--no-compile") if getattr(options, flag[2:].replace("-", "_"))]
        with (
            self.recorder.measurement(model=name, part="startup", batch=batch) as row,
            tempfile.TemporaryDirectory() as folder,
        ):
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            start = time.time()
            done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, timeout=150)
            if done.returncode:
                raise RuntimeError(done.stderr[-2500:])
            moments = json.loads(done.stdout.splitlines()[-1])
            # as it trains: a step that is captured as a graph first is over once it has been replayed
            row |= {"n": 1, "seconds": max(moments.values()) - start}
            row |= {f"seconds_{kind}": moment - start for kind, moment in moments.items()}

    def go_on_in_a_new_process(self, lost: str, models: list[str], error: Exception) -> None:
        """A kernel that went wrong takes the whole process's device with it, but not the networks that are left."""
        with self.recorder.measurement(model=lost, part="device lost"):
            raise error
        arguments = [sys.executable, __file__, "gpu", "--append", "--startup", "--models", *models]
        options = self.options
        arguments += ["--parts", *options.parts, "--device", options.device, "--out", str(self.recorder.path)]
        arguments += ["--side", str(options.side)] if options.side else []
        arguments += ["--batch", *map(str, options.batch)] if options.batch else []
        for flag in ("quick", "no_graph", "no_compile"):
            arguments += [f"--{flag.replace('_', '-')}"] if getattr(options, flag) else []
        sys.exit(subprocess.run(arguments).returncode)


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Of the norms; None where the untrained network's head gives zeros. A runtime that gives others has failed."""
    if not torch.isfinite(logits).all():
        raise ArithmeticError("logits are not finite")
    norm = expected.float().norm().item()
    error = (logits.float() - expected.float()).norm().item() / norm if norm else None
    if error is not None and error > 0.1:
        raise ArithmeticError(f"logits are off by {error:.2g}")
    return error


def first_step(options: argparse.Namespace) -> None:
    """In the fresh process: print when the first step was over, when a captured one was, and what came before when."""
    moments = {"imported": time.time()}
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    step = TrainingStep(options.model, options.side, options.batch, device, compiled=not options.no_compile)
    wait(device)
    moments["built"] = time.time()
    with torch.cuda.stream(step.stream):
        with kernels.compile_together():
            step()
        moments["compiled"] = time.time()
        step()
        wait(device)
        moments["plain"] = time.time()
        if step.monet and device.type == "cuda" and not options.no_graph:
            step.capture()()
            wait(device)
            moments["graph"] = time.time()
    print(json.dumps(moments))


@torch.no_grad()
def take_turns(
    recorder: Recorder, part: str, models: list[str], batch: int, side: int | None, options: argparse.Namespace
) -> None:
    """Prepare every runtime of every network, then time them in turns."""
    device, calls, rows = torch.device("cpu"), {}, {}
    for name in models:
        for runtime in options.runtimes:
            if runtime.startswith("optimize") and not (OPTIMIZED and name.startswith("monet")):
                continue
            fields = {"model": name, "part": part, "batch": batch, "runtime": runtime}
            try:
                torch.manual_seed(0)
                model, shape = build(name, side, device)
                images = torch.randn(batch, *shape)
                expected = model.eval()(images[:2])
                start = time.perf_counter()
                call = forward_call(runtime, model, images)
                error = relative_error(call()[:2], expected)
                rows[name, runtime] = fields | {"build_seconds": time.perf_counter() - start, "logit_error": error}
                calls[name, runtime] = call
                print(f"{name} {runtime}: ready after {rows[name, runtime]['build_seconds']:.1f} s", flush=True)
            except Exception as failure:
                with recorder.measurement(**fields):
                    raise failure
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    rounds = (4 if options.quick else 12) * (1 if batch > 1 else 10)
    for _ in range(rounds):
        for key, call in calls.items():
            times[key] += time_passes(call, device, 1, 1 if batch == 1 else 0)
    for key, row in rows.items():
        with recorder.measurement(**row) as filled:
            filled |= summarise(times[key], batch)


def run_cpu(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    recorder = Recorder(record_path(options.out, "cpu"), "cpu", vars(options), torch.device("cpu"))
    take_turns(recorder, "cpu-inference", options.models, options.batch, options.side, options)
    torch._dynamo.reset()
    take_turns(recorder, "cpu-latency", options.latency_models, 1, None, options)
    print_report(recorder.record)
    print(f"record: {recorder.path}")


def run_plot(options: argparse.Namespace) -> None:
    record = json.loads(options.record.read_text())
    print_report(record)
    path = options.out or options.record.with_suffix(".png")
    print(f"\n{path}: {', '.join(plot(record, path))}")


def run_gpu(options: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    GpuRun(options).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    gpu = commands.add_parser("gpu", help="networks of 224 pixels in bf16, MONets and peers")
    gpu.add_argument("--models", nargs="*", default=list(MODELS))
    gpu.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    gpu.add_argument("--batch", type=int, nargs="+", help="256 if not given; small images 1024, 2112 and 4224")
    gpu.add_argument("--startup", nargs="*", help=f"networks whose cold start is timed; {' '.join(STARTUP_MODELS)}")
    gpu.add_argument("--append", action="store_true", help="keep the rows of a record that is there already")
    cpu = commands.add_parser("cpu", help="a MONet and a peer in several runtimes, and a small MONet's latency")
    cpu.add_argument("--models", nargs="*", default=["monet_ms_t", "resmlp_12_224"])
    cpu.add_argument("--latency-models", nargs="*", default=["monet_nano"])
    cpu.add_argument("--runtimes", nargs="+", choices=CPU_RUNTIMES, default=CPU_RUNTIMES)
    cpu.add_argument("--batch", type=int, default=16)
    cpu.add_argument("--threads", type=int, default=2)
    first = commands.add_parser("first-step", help="for `gpu`: when a fresh process has taken its first step")
    first.add_argument("model")
    first.add_argument("--batch", type=int, default=256)
    for command in (gpu, cpu):
        command.add_argument("--quick", action="store_true", help="fewer passes")
        command.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="a folder, or a .json file")
    for command in (gpu, first):
        command.add_argument("--device", default="cuda")
        command.add_argument("--no-graph", action="store_true", help="capture no CUDA graphs")
        command.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    for command in (gpu, cpu, first):
        command.add_argument("--side", type=int, help="of the images; each network's own if not given")
    figure = commands.add_parser("plot", help="print a record's tables and draw accuracy against throughput")
    figure.add_argument("record", type=Path)
    figure.add_argument("--out", type=Path, help="the figure; beside the record if not given")
    options = parser.parse_args()
    {"gpu": run_gpu, "cpu": run_cpu, "first-step": first_step, "plot": run_plot}[options.command](options)


if __name__ == "__main__":
    main()
