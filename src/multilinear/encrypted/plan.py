"""What a program will cost, told beforehand: security, sizes, memory, time and error."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from multilinear.encrypted import messages
from multilinear.encrypted.backend import EvaluationKeys, Secret, ring
from multilinear.encrypted.engine import Engine
from multilinear.encrypted.parameters import SECURE_BITS
from multilinear.encrypted.program import Program
from multilinear.errors import MultilinearError

SPARE = 0.9  # share of the free memory that a run may take


@dataclass(frozen=True)
class Plan:
    """What one batch of a program takes. Sizes are in bytes, times in seconds of one core."""

    ring: int
    modulus_bits: int
    secure_bits: int
    products: int
    packing: str
    images: int
    tokens: int
    keys: int
    upload: int
    download: int
    memory: int
    free_memory: int
    core_seconds: float
    logit_error: float
    layers: list[dict[str, Any]]

    @property
    def fits(self) -> bool:
        return self.memory <= SPARE * self.free_memory

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(program: Program) -> Plan:
    """Say what a run of `program` will take; times a few operations on this machine, a second or two."""
    public = program.public
    parameters, packing = public.parameters, public.packing
    layers = [
        {
            "rank": layer.rank,
            "shifts": layer.shifts,
            "typical": layer.typical,
            "largest": layer.largest,
            "error": float(np.sqrt((layer.errors**2).mean())),
        }
        for layer in program.layers
    ]
    return Plan(
        ring=parameters.degree,
        modulus_bits=parameters.bits,
        secure_bits=SECURE_BITS[parameters.degree],
        products=parameters.depth,
        packing=packing.kind,
        images=packing.images,
        tokens=packing.grid[0] * packing.grid[1],
        keys=(1 + len(packing.rotations())) * messages.key_bytes(parameters),
        upload=messages.batch_bytes(public),
        download=messages.result_bytes(public),
        memory=needed_memory(program),
        free_memory=free_memory(),
        core_seconds=expected_seconds(program),
        logit_error=public.error,
        layers=layers,
    )


def needed_memory(program: Program) -> int:
    """Bytes that the evaluation of a one-batch message takes: shared arrays, the message and its answer."""
    public = program.public
    return Engine.memory(program) + 3 * messages.batch_bytes(public) + 2 * messages.result_bytes(public)


def free_memory() -> int:
    """Bytes that this process may still take: free in the machine, and within its group's limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            found = min(found, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(found, 0)


def check_memory(program: Program) -> None:
    """Raise before a run that the machine has no memory for."""
    needed, free = needed_memory(program), free_memory()
    if needed > SPARE * free:
        other = "" if program.public.packing.kind == "tokens" else "; compile with packing 'tokens', which takes less"
        raise MultilinearError(f"one batch needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free{other}")


def expected_seconds(program: Program) -> float:
    """Seconds of one core for one batch: of each kind of task in each layer one is timed here."""
    public = program.public
    made = ring(public.parameters)
    secret = Secret(made)
    rotations = public.packing.rotations()[:1]
    keys = EvaluationKeys(made, *secret.evaluation_keys(rotations), rotations)
    engine = Engine(program, keys, processes=1)  # its memory is only taken where it is touched
    one = secret.encrypt(np.zeros(public.parameters.slots)).transpose(1, 0, 2)
    data = messages.write_residues(one)

    def arrival() -> None:
        hashlib.sha256(data).digest()
        engine.sources[0][:, 0, 0] = messages.read_residues(memoryview(data), one.shape, made.primes, 0)

    total = _time(arrival) * public.inputs * public.packing.places
    for i, layer in enumerate(program.layers):
        pair = engine.view(i)
        for channel in (0, layer.rank):
            pair[:, 0, channel] = one[: len(pair)]
        for work, tasks in ((engine.linear, engine.linear_tasks(i)), (engine.product, engine.product_tasks(i))):
            total += len(tasks) * _time(partial(work, tasks[0]))
    return total


def _time(work: Callable[[], object], repeats: int = 2) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)
