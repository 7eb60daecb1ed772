"""The evaluation of one batch: linear maps on residues, then products, layer by layer, over several processes.

Processes are forked and share the arrays: SEAL holds Python's lock, so that threads would wait for each other.
"""

import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import product

import numpy as np
from threadpoolctl import threadpool_limits

from multilinear.encrypted import residues as exact
from multilinear.encrypted.backend import EvaluationKeys
from multilinear.encrypted.network import directions
from multilinear.encrypted.program import Program
from multilinear.encrypted.residues import Array, Residues
from multilinear.errors import MultilinearError

COLUMNS = 2048  # of residues handled at a time
Progress = Callable[[int], None]  # told how many steps are done
Task = tuple[int, ...]


def shared(shape: Sequence[int]) -> Residues:
    """An array of zeros that forked processes write into."""
    count = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, max(1, count) * 8), np.uint64, count).reshape(shape)


class Engine:
    """Evaluates batches of one program with one client's keys.

    Sources of a linear map are arrays (primes, places, channels, parts, degree): the fresh ciphertexts, then each
    layer's products, which have one prime fewer each. Dropping primes is leaving out the last ones.
    """

    def __init__(self, program: Program, keys: EvaluationKeys, processes: int) -> None:
        public = program.public
        self.program, self.keys, self.ring = program, keys, keys.ring
        self.packing, self.degree = public.packing, public.parameters.degree
        places, primes = self.packing.places, public.parameters.primes
        self.mask = self.ring.encode(self.packing.mask())
        self.sources = [shared((primes, places, public.inputs, 2, self.degree))]
        for i, layer in enumerate(program.layers[:-1]):
            self.sources.append(shared((primes - 1 - i, places, layer.rank, 2, self.degree)))
        # the last products keep three parts and both primes: only the few logits made of them are rescaled
        self.sources.append(shared((2, places, program.layers[-1].rank, 3, self.degree)))
        self.maps = [np.concatenate([layer.first, layer.second]) for layer in program.layers]
        sizes = [(primes - i) * len(rows) * 2 for i, rows in enumerate(self.maps)]
        self.pair = shared((max(sizes) * places * self.degree,))
        self.processes = processes
        self.pool: ProcessPoolExecutor | None = None

    @staticmethod
    def memory(program: Program) -> int:
        """Bytes of shared arrays that an engine for this program takes."""
        public = program.public
        primes, unit = public.parameters.primes, public.packing.places * public.parameters.degree * 8
        ranks = [layer.rank for layer in program.layers]
        sources = primes * public.inputs * 2 + sum((primes - 1 - i) * rank * 2 for i, rank in enumerate(ranks[:-1]))
        pairs = max((primes - i) * rank * 4 for i, rank in enumerate(ranks))
        return (sources + 6 * ranks[-1] + pairs) * unit

    def __enter__(self) -> "Engine":
        global _CURRENT
        if self.processes > 1:
            _CURRENT = self
            fork = multiprocessing.get_context("fork")
            self.pool = ProcessPoolExecutor(self.processes, fork, _one_thread)
        return self

    def __exit__(self, *_: object) -> None:
        global _CURRENT
        _CURRENT = None
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool = None

    @staticmethod
    def steps(program: Program) -> int:
        """How often `progress` is told of something in one batch."""
        parameters, places = program.public.parameters, program.public.packing.places
        blocks = parameters.degree // COLUMNS
        linear = sum(2 * (parameters.primes - i) for i in range(len(program.layers)))
        return places * (linear * blocks + sum(layer.rank for layer in program.layers))

    def run(self, progress: Progress | None = None) -> Residues:
        """Evaluate what is in `sources[0]`; returns (places, classes, 3, 1, degree)."""
        for i in range(len(self.maps)):
            for work, tasks in ((_linear, self.linear_tasks(i)), (_product, self.product_tasks(i))):
                for _ in self._each(work, tasks):
                    if progress:
                        progress(1)
        return np.stack([self._logits(place) for place in range(self.packing.places)])

    def view(self, index: int) -> Residues:
        """The results of linear map `index`: (primes, places, rows, parts, degree)."""
        primes = len(self.ring.primes) - index
        shape = primes, self.packing.places, len(self.maps[index]), 2, self.degree
        return self.pair[: int(np.prod(shape))].reshape(shape)

    def linear_tasks(self, index: int) -> list[Task]:
        """What layer `index` takes before its products."""
        primes, places, _, parts, _ = self.view(index).shape
        sizes = range(primes), range(places), range(parts), range(0, self.degree, COLUMNS)
        return [(index, *rest) for rest in product(*sizes)]

    def product_tasks(self, index: int) -> list[Task]:
        """The products of layer `index`."""
        rank = self.program.layers[index].rank
        return [(index, place, channel) for place in range(self.packing.places) for channel in range(rank)]

    def _each(self, work: Callable[["Engine", Task], None], tasks: list[Task]) -> Iterator[None]:
        if self.pool is None:
            for task in tasks:
                work(self, task)
                yield
            return
        names = [(work.__name__, task) for task in tasks]
        try:
            yield from self.pool.map(_run_task, names, chunksize=max(1, len(tasks) // (16 * self.processes)))
        except BrokenProcessPool:
            raise MultilinearError("a process of the evaluation was killed, perhaps for want of memory") from None

    def linear(self, task: Task) -> None:
        """One block of columns of one linear map, modulo one prime."""
        index, prime, place, part, start = task
        columns = slice(start, start + COLUMNS)
        blocks = [source[prime, place, :, part, columns] for source in self.sources[: index + 1]]
        rows = self._multiply(self.maps[index], self._with_constant(blocks, prime, part, columns), prime)
        self.view(index)[prime, place, :, part, columns] = rows

    def _with_constant(self, blocks: list[Residues], prime: int, part: int, columns: slice) -> Residues:
        """The vector v: the constant one, which is not encrypted and so in the first part alone, and the blocks."""
        constant = self.mask[prime : prime + 1, columns]
        return np.concatenate([constant if part == 0 else np.zeros_like(constant), *blocks])

    def _multiply(self, weights: Array, residues: Residues, prime: int) -> Residues:
        multiply = exact.multiply if self.ring.fast else exact.multiply_plainly
        return multiply(weights, residues, self.ring.primes[prime])

    def product(self, task: Task) -> None:
        """One channel's product: shift, offset, multiply, relinearise, rescale."""
        index, place, channel = task
        layer, pair = self.program.layers[index], self.view(index)
        first = pair[:, place, channel].transpose(1, 0, 2)
        if layer.shifts:
            move = directions(layer.rank)[channel]
            if self.packing.kind == "tokens":
                first = self.keys.rotate(np.ascontiguousarray(first), self.packing.steps(move))
            else:
                source = self.packing.source(place, move)
                first = np.zeros_like(first) if source is None else pair[:, source, channel].transpose(1, 0, 2)
        first = self._offset(np.array(first), layer.offset[channel])
        second = np.ascontiguousarray(pair[:, place, layer.rank + channel].transpose(1, 0, 2))
        last = index == len(self.program.layers) - 1
        found = self.keys.product(first, second, finish=not last)
        self.sources[index + 1][:, place, channel] = found.transpose(1, 0, 2)

    def _logits(self, place: int) -> Residues:
        """The head: its part on the last products, rescaled, and that on everything before, modulo the first prime."""
        last, classes = self.sources[-1], len(self.program.head)
        before = self.program.head.shape[1] - last.shape[2]
        weights = np.ascontiguousarray(self.program.head[:, before:])
        flat = [self._multiply(weights, last[prime, place].reshape(last.shape[2], -1), prime) for prime in range(2)]
        made = np.stack([rows.reshape(classes, 3, -1) for rows in flat], 2)  # (classes, parts, primes, degree)
        logits = np.stack([self.keys.rescale(one) for one in made])
        weights = np.ascontiguousarray(self.program.head[:, :before])
        for part in range(2):
            blocks = [source[0, place, :, part] for source in self.sources[:-1]]
            rows = self._multiply(weights, self._with_constant(blocks, 0, part, slice(None)), 0)
            logits[:, part, 0] = exact.add(logits[:, part, 0], rows, self.ring.primes[0])
        return logits

    def _offset(self, first: Residues, offset: float) -> Residues:
        if offset:
            for i, prime in enumerate(self.ring.primes[: first.shape[1]]):
                constant = exact.multiply(np.array([[offset]]), self.mask[i : i + 1], prime)[0]
                first[0, i] = exact.add(first[0, i], constant, prime)
        return first


def _linear(engine: Engine, task: Task) -> None:
    engine.linear(task)


def _product(engine: Engine, task: Task) -> None:
    engine.product(task)


_CURRENT: Engine | None = None  # what forked processes work on
_WORK = {"_linear": _linear, "_product": _product}


def _one_thread() -> None:
    threadpool_limits(1)


def _run_task(named: tuple[str, Task]) -> None:
    assert _CURRENT is not None
    _WORK[named[0]](_CURRENT, named[1])


def usable_processes(wanted: int | None) -> int:
    """How many processes to use: all cores if not given, one where processes cannot be forked (or not from here)."""
    if wanted is not None and wanted < 1:
        raise MultilinearError(f"processes must be at least 1, got {wanted}")
    if "fork" not in multiprocessing.get_all_start_methods() or multiprocessing.current_process().daemon:
        return 1
    return wanted or len(os.sched_getaffinity(0))
