"""One training step of the CIFAR-10 recipe on a GPU, with our kernel and captured graph, and without.

    python benchmarks/step_speed.py [--batch 1024]

Times are medians of CUDA events over 30 steps after a warm-up, augmentation included. "busy" is the share of the step
in which a kernel runs, from the profiler's kernel times.
"""

import argparse
import time
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile

from multilinear.kernels import use_kernels
from multilinear.layers import compile_blocks
from multilinear.models import create
from multilinear.train.config import load_recipe
from multilinear.train.optim import Average, build_optimizers, set_learning_rate
from multilinear.train.step import Step


def measure(batch: int, *, kernels: bool, graph: bool, compiled: bool) -> float:
    """Median milliseconds of a step; prints a line."""
    use_kernels(kernels)
    torch._dynamo.reset()
    torch.manual_seed(0)
    start = time.perf_counter()
    recipe = load_recipe("cifar10")
    model = create(recipe.model.name, **recipe.model.arguments).cuda().to(memory_format=torch.channels_last).train()
    optimizers = build_optimizers(model, recipe.optim)
    if compiled:
        compile_blocks(model)
    statistics = torch.full((3,), 0.48, device="cuda"), torch.full((3,), 0.25, device="cuda")
    step = Step(model, model, optimizers, Average(model, recipe.optim.ema), recipe, statistics)
    images = torch.randint(0, 256, (batch, 32, 32, 3), dtype=torch.uint8, device="cuda")
    labels = torch.randint(0, 10, (batch,), device="cuda")
    set_learning_rate(optimizers, 0.01)
    torch.cuda.reset_peak_memory_stats()
    if graph:
        step.capture(images, labels)
    step(images, labels)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(3):
        step(images, labels)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(31)]
    events[0].record()
    for event in events[1:]:
        step(images, labels)
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    median = times[15]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step(images, labels)
        torch.cuda.synchronize()
    kernel = sum(item.self_device_time_total for item in profiler.key_averages()) / 3e3
    print(
        f"kernels={kernels} graph={graph} compiled={compiled}: {median:.2f} ms ({times[7]:.2f} to {times[22]:.2f}), "
        f"{batch / median * 1e3:,.0f} images/s, epoch {50 / batch * median:.2f} s, busy {kernel / median:.0%}, "
        f"first step after {first:.1f} s, {torch.cuda.max_memory_allocated() / 1e9:.1f} GB",
        flush=True,
    )
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1024)
    batch = parser.parse_args().batch
    torch.set_float32_matmul_precision("high")
    print(torch.cuda.get_device_name(), torch.__version__)
    ours = measure(batch, kernels=True, graph=True, compiled=True)
    plain = measure(batch, kernels=False, graph=True, compiled=True)
    eager = measure(batch, kernels=False, graph=False, compiled=False)
    print(f"ratio to compiled blocks: {plain / ours:.2f}; to eager PyTorch: {eager / ours:.2f}")


if __name__ == "__main__":
    main()
