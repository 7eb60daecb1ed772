"""How `speed.py` runs a network, and what it asks of a run: times, memory, kernels, work."""

import gc
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import timm
import torch
from speed_report import Row, summarise
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import multilinear
from multilinear.layers import collect_statistics, compile_blocks
from multilinear.train.config import OptimConfig
from multilinear.train.optim import build_optimizers, set_learning_rate

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
Call = Callable[[], object]


def build(name: str, side: int | None, device: torch.device) -> tuple[nn.Module, tuple[int, int, int]]:
    """An untrained network, and the shape of its images. A MONet's name may come with a norm: "monet_t norm=batch"."""
    name, *changes = name.split()
    config = timm.get_pretrained_cfg(name)
    if config is None:
        raise ValueError(f"timm has no network {name!r}")
    arguments: dict[str, Any] = dict(change.split("=") for change in changes)
    if side and name.startswith(("deit", "vit", "resmlp", "mixer")):
        arguments["img_size"] = side
    with device:
        model = timm.create_model(name, num_classes=config.num_classes, **arguments)
    shape = (3, side or config.input_size[-1], side or config.input_size[-1])
    if arguments.get("norm") == "batch" and device.type != "meta":  # a polynomial without statistics leaves all bounds
        with torch.no_grad():
            collect_statistics(model, [torch.randn(4, *shape, device=device) for _ in range(2)])
    return model, shape


def is_monet(model: nn.Module) -> bool:
    return isinstance(model, multilinear.MONet)


def fitting_layout(model: nn.Module) -> torch.memory_format:
    """Channels last where there are many convolutions, and for MONets as the library does: on a GPU."""
    convolutional = any(isinstance(part, nn.BatchNorm2d) for part in model.modules())
    ours = is_monet(model) and next(model.parameters()).is_cuda
    return torch.channels_last if convolutional or ours else torch.contiguous_format


def forward_call(runtime: str, model: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    """A pass of `images` through `model` in a runtime such as "compile bf16 reduce-overhead"."""
    how, precision, *extra = runtime.split()
    model = model.eval().to(dtype=DTYPES[precision])
    images = images.to(DTYPES[precision])
    if how == "onnx":
        return onnx_call(model, images)
    forward: Callable[[Tensor], Tensor] = model
    if how == "optimize":
        forward = multilinear.optimize(model, dtype=DTYPES[precision])
    else:
        layout = fitting_layout(model)
        model, images = model.to(memory_format=layout), images.contiguous(memory_format=layout)
    if how == "blocks":
        compile_blocks(model)
    elif how == "compile" and "freezing" in extra:
        forward = torch.compile(model, dynamic=False, options={"freezing": True})
    elif how == "compile":
        forward = torch.compile(model, dynamic=False, mode=extra[0] if extra else None)
    if "graph" in extra:
        return captured(lambda: forward(images), torch.cuda.Stream())
    return lambda: forward(images)


def onnx_call(model: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        program = torch.onnx.export(model, (images,), dynamo=True, verbose=False, input_names=["image"])
        assert program is not None
        program.save(path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"image": images.numpy()}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def captured(call: Callable[[], Tensor], stream: torch.cuda.Stream) -> Callable[[], Tensor]:
    """The same call as a CUDA graph, warmed up and captured on `stream`."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class TrainingStep:
    """Forward, cross entropy, backward and AdamW on one batch that stays the same."""

    def __init__(self, name: str, side: int | None, batch: int, device: torch.device, compiled: bool) -> None:
        self.model, shape = build(name, side, device)
        self.monet = is_monet(self.model)
        layout = fitting_layout(self.model)
        self.model = self.model.train().to(memory_format=layout)
        self.runtime = "eager" if not compiled else "blocks" if self.monet else "compile"
        self.forward: Callable[[Tensor], Tensor] = self.model
        if compiled and self.monet:
            compile_blocks(self.model)
        elif compiled:
            self.forward = torch.compile(self.model, dynamic=False)
        on_gpu = device.type == "cuda"
        (self.optimizer,) = build_optimizers(self.model, OptimConfig())  # AdamW, fused on a GPU
        set_learning_rate([self.optimizer], 0.1)
        self.images = torch.randn(batch, *shape, device=device).contiguous(memory_format=layout)
        classes: Any = self.model.num_classes
        self.labels = torch.randint(0, classes, (batch,), device=device)
        # One stream for everything: a gradient that was once accumulated on another one cannot be captured.
        self.stream = torch.cuda.Stream() if on_gpu else None

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        # inside a captured graph weights are cast anew at each replay, which a cache would prevent
        with torch.autocast(self.images.device.type, torch.bfloat16, cache_enabled=False):
            logits = self.forward(self.images)
        loss = F.cross_entropy(logits.float(), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def capture(self) -> Callable[[], Tensor]:
        assert self.stream is not None
        self.optimizer.zero_grad(set_to_none=True)
        free_memory(self.images.device)
        return captured(self, self.stream)


def time_passes(call: Call, device: torch.device, passes: int, warm_up: int, alone: bool = False) -> list[float]:
    """Milliseconds of single passes; `alone` waits for each before the next, as a single request would."""
    for _ in range(warm_up):
        call()
    wait(device)
    if device.type != "cuda":
        times = []
        for _ in range(passes):
            start = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - start))
        return times
    if not alone:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(passes + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        wait(device)
        return [before.elapsed_time(after) for before, after in pairwise(events)]
    times = []
    for _ in range(passes):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def start_afresh(device: torch.device) -> None:
    """So that no network is compiled for shapes, or meets memory, that another one left."""
    torch._dynamo.reset()
    free_memory(device)


def peak_memory(device: torch.device) -> dict[str, float]:
    """Reserved is what the process held, cached blocks and a graph's own pool included."""
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"allocated_gb": allocated / 1e9, "reserved_gb": reserved / 1e9}


def clock_and_power(call: Call, device: torch.device, milliseconds: float) -> Row:
    """Of a GPU that has been at such passes for a second, as NVIDIA's tool says if it is there: the clock is lower than
    it could be where power is at its limit."""
    tool = shutil.which("nvidia-smi")
    if device.type != "cuda" or tool is None:
        return {}
    names = ("clock_mhz", "most_mhz", "watt", "most_watt")
    which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = "--query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit"
    for _ in range(math.ceil(1000 / milliseconds)):
        call()
    wait(device)  # passes are only asked for until then; the tool's power is a mean over a second
    for _ in range(math.ceil(500 / milliseconds)):
        call()
    answer = subprocess.run([tool, which, query, "--format=csv,noheader,nounits"], capture_output=True, text=True)
    wait(device)
    try:
        return dict(zip(names, map(float, answer.stdout.split(",")), strict=True))
    except ValueError:  # a tool that does not know
        return {}


def top_kernels(call: Call, device: torch.device, count: int = 12) -> Row:
    """The kernels of one pass that take the most time (on the CPU: operators), from three passes."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            call()
        wait(device)
    spent = [
        ((item.self_device_time_total if on_gpu else item.self_cpu_time_total) / 3e3, item)
        for item in profiler.key_averages()
    ]
    largest = sorted(spent, key=lambda pair: -pair[0])[:count]
    listed = [{"name": item.key[:160], "calls": item.count / 3, "ms": milliseconds} for milliseconds, item in largest]
    return {"kernels_ms": sum(milliseconds for milliseconds, _ in spent), "kernels": listed}


class Traffic(TorchDispatchMode):
    """Counts the elements that matrix products and convolutions read and write."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.elements += sum(leaf.numel() for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor))
        return result


def work_per_image(name: str, side: int | None) -> Row:
    """Counted without computing; two images less one leave the weights out."""
    model, shape = build(name, side, torch.device("meta"))
    flops, elements = [], []
    for batch in (1, 2):
        with torch.no_grad(), FlopCounterMode(display=False) as counter, Traffic() as traffic:
            model.eval()(torch.empty(batch, *shape, device="meta"))
        flops.append(counter.get_total_flops())
        elements.append(traffic.elements)
    return {
        "side": shape[-1],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops": flops[1] - flops[0],
        "bytes": 2 * (elements[1] - elements[0]),
    }


def measure_peaks(device: torch.device) -> dict[str, float]:
    """bf16 TFLOP/s of a large matrix product, GB/s read and written by a large copy."""
    on_gpu = device.type == "cuda"
    size, length = (8192, 2**30) if on_gpu else (512, 2**22)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.zeros(length, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    product = summarise(time_passes(lambda: a @ b, device, 20, 5), 1)["median_ms"]
    copy = summarise(time_passes(lambda: target.copy_(source), device, 20, 5), 1)["median_ms"]
    return {"tflops": 2 * size**3 / product / 1e9, "gb_per_second": 4 * length / copy / 1e6}


def shares(row: Row, work: Row, peaks: dict[str, float], passes: int) -> Row:
    """How much of the machine a row's throughput is; `passes` is 1 for inference and 3 for training."""
    tflops = passes * work["flops"] * row["images_per_second"] / 1e12
    gigabytes = passes * work["bytes"] * row["images_per_second"] / 1e9
    compute, memory = tflops / peaks["tflops"], gigabytes / peaks["gb_per_second"]
    return {"tflops": tflops, "compute_share": compute, "memory_share": memory}
