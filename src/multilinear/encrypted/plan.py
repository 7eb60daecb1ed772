"""What a program will cost, told beforehand: security, sizes, memory, time and error."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multilinear.encrypted import messages, residues
from multilinear.encrypted.backend import EvaluationKeys, Secret, ring
from multilinear.encrypted.engine import COLUMNS, Engine
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
    """Seconds of one core for one batch, from a few operations timed here."""
    public = program.public
    parameters, places = public.parameters, public.packing.places
    made = ring(parameters)
    secret = Secret(made)
    rotations = public.packing.rotations()[:1]
    keys = EvaluationKeys(made, *secret.evaluation_keys(rotations), rotations)
    one = secret.encrypt(np.zeros(parameters.slots))
    switch = _time(lambda: keys.product(one, one, finish=True))
    bare = _time(lambda: keys.product(one, one, finish=False))
    rotate = _time(lambda: keys.rotate(one, rotations[0])) if rotations else 0.0
    weights = np.concatenate([program.layers[-1].first, program.layers[-1].second])
    source = np.ones((weights.shape[1], 2, parameters.degree), np.uint64)
    found = np.zeros((len(weights), 2, parameters.degree), np.uint64)

    def linear_block() -> None:
        stacked = np.concatenate([source[:, 0, :COLUMNS]])
        found[:, 0, :COLUMNS] = residues.multiply(weights, stacked, made.primes[0])

    linear = _time(linear_block) / (weights.size * COLUMNS)  # of one weight and one residue
    data = messages.write_residues(one)

    def arrival() -> None:
        hashlib.sha256(data).digest()
        source[:, :, :1] = messages.read_residues(memoryview(data), one.shape, made.primes, 1)[0, 0, 0]

    primes = parameters.primes
    total = _time(arrival) * public.inputs * places
    for i, layer in enumerate(program.layers):
        here, last = primes - i, i == len(program.layers) - 1
        share = here * (here + 1) / (primes * (primes + 1))  # transforms of switching keys, pair by pair of primes
        total += linear * 2 * layer.first.size * 2 * parameters.degree * here * places
        total += layer.rank * places * (bare * here / primes if last else switch * share)
        total += layer.rank * places * rotate * share if layer.shifts else 0.0
    return total


def _time(work: Callable[[], object], repeats: int = 3) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)
