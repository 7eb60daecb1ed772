"""How fast a network is: one forward pass, timed many times."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from multilinear.analysis.graph import evaluation_mode
from multilinear.errors import MultilinearError

WARM_UP_PASSES = 3
FEWEST_PASSES = 5


@dataclass(frozen=True)
class Speed:
    """Forward passes of one batch size: `n` of them, the median and the quartiles of their milliseconds."""

    device: str
    batch_size: int
    n: int
    median_ms: float
    lower_ms: float
    upper_ms: float
    images_per_second: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"batch {self.batch_size}: {self.median_ms:.3g} ms (quartiles {self.lower_ms:.3g} to {self.upper_ms:.3g}, "
            f"n={self.n}), {self.images_per_second:,.0f} images/s on {self.device}"
        )


def measure_speed(
    model: nn.Module,
    shape: tuple[int, ...],
    batch_sizes: Sequence[int] = (1, 256),
    device: str | torch.device | None = None,
    seconds: float = 2.0,
) -> list[Speed]:
    """Time inference on random images of `shape` (channels, height, width), `seconds` for each batch size.

    Each pass waits for the one before, so batch size 1 gives the latency a single request sees. With a `device` the
    model is moved there; without, it runs where it is.

    >>> [speed.batch_size for speed in measure_speed(nn.Flatten(), (3, 8, 8), (1, 4), seconds=0.01)]
    [1, 4]
    """
    if not batch_sizes or min(batch_sizes) < 1 or seconds <= 0:
        raise MultilinearError(
            f"speed needs batch sizes of 1 or more and seconds above 0, got {list(batch_sizes)} and {seconds}"
        )
    if device is not None:
        model = model.to(device)
    example = next(model.parameters(), torch.zeros(()))
    found = []
    with evaluation_mode(model), torch.inference_mode():
        for size in batch_sizes:
            try:
                images = torch.randn(size, *shape, device=example.device).to(example.dtype)
                times = _time_passes(partial(model, images), example.device, seconds)
            except torch.OutOfMemoryError as error:
                raise MultilinearError(
                    f"batch size {size} does not fit into the memory of {example.device}; give smaller batch_sizes"
                ) from error
            lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
            found.append(
                Speed(_device_name(example.device), size, len(times), median, lower, upper, 1000 * size / median)
            )
    return found


def _time_passes(forward: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Milliseconds of each pass, after a warm-up that lasts a quarter of the time or a few passes."""
    timed = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    start, passes = time.perf_counter(), 0
    while passes < WARM_UP_PASSES or time.perf_counter() - start < seconds / 4:
        timed(forward)
        passes += 1
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < FEWEST_PASSES or time.perf_counter() - start < seconds:
        times.append(timed(forward))
    return times


def _time_on_gpu(forward: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    forward()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds


def _time_on_cpu(forward: Callable[[], object]) -> float:
    start = time.perf_counter()
    forward()
    return 1000 * (time.perf_counter() - start)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} {'thread' if threads == 1 else 'threads'}"
