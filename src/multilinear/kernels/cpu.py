"""Poly-Blocks as one C++ function, for x86 CPUs with AVX-512 or AVX2; it is compiled at first use and kept in a cache.

Where that cannot be (another CPU, no compiler), `blocks_for` says no and callers use the plain code.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multilinear.errors import MultilinearError

SOURCE, *HEADERS = (Path(__file__).with_name(name) for name in ("blocks.cpp", "multiply.h", "lanes.h"))
FLAGS = "-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared"


class Vectors(NamedTuple):
    """Numbers in a vector, vectors of outputs that one pass over the inputs sums up (as in lanes.h), and what the CPU
    and the compiler must know for it."""

    lanes: int
    panel: int
    needed: frozenset[str]
    flags: tuple[str, ...]


# The instructions are named, not "native", so that a cache may be shared between machines.
AVX512 = Vectors(
    16, 4, frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}),
    ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
)  # fmt: skip
AVX2 = Vectors(8, 2, frozenset({"avx2", "fma"}), ("-mavx2", "-mfma"))
CHANNELS = 16  # of which blocks have a multiple, whatever the vectors
TILE = 48  # tokens that go through a block together: what lies between its matrices then stays in the cache
LEAST = 16  # tokens for which a thread is worth that others wait for it
TOKENS = 2048  # about as many go through all blocks together, whole images: what lies between these stays cached too
SHIFTS = {None: 0, "keep": 1, "zero": 2}
Map = tuple[Tensor, Tensor]  # weight (out, in), bias (out)


@dataclass(frozen=True)
class Mu:
    """`C[(scale_a P + shift_a) ∘ (scale_b Q + shift_b)]`, where P is A x and Q is B D x, each normalised or not."""

    A: Map
    D: Map | None
    B: Map
    C: Map
    scale_a: Tensor
    shift_a: Tensor
    scale_b: Tensor
    shift_b: Tensor


class Blocks(nn.Module):
    """Poly-Blocks of one width on (B, H, W, C), for inference; sums and the residual stream are float32.

    Args:
        blocks: the two Mu-Layers of each block. All blocks have the same sizes, and C is a multiple of `CHANNELS`.
        eps: of the layer norms, without affine maps, ahead of each Mu-Layer and on both its branches. B is then centred
            (its outputs have mean zero whatever its input), and so is A where it is not shifted. None for no norms.
        shifts: borders of the shifts on both branches of the first Mu-Layers.
        dtype: of the weights and of what lies between matrices, bfloat16 or float32.

    The output is float32, or in `out_dtype` if that is set to `dtype`.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[Mu, Mu]],
        eps: float | None,
        shifts: tuple[str | None, str | None],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        vectors = _vectors()
        assert vectors is not None, "Blocks needs blocks_for(dtype)"
        self.depth, self.eps, self.dtype, self.vectors = len(blocks), eps, dtype, vectors
        self.out_dtype = torch.float32
        self.dim = blocks[0][0].C[0].shape[0]
        self.shifts = [SHIFTS[shift] for shift in shifts]
        parts: list[Tensor] = []
        table: list[int] = []

        def put(values: Tensor) -> int:
            """Add to the packed weights, on a cache line's start; returns the offset in bytes."""
            offset = sum(part.numel() for part in parts)
            flat = values.contiguous().flatten().view(torch.uint8)
            parts.append(F.pad(flat, (0, -flat.numel() % 64)))
            return offset

        for mu in (mu for block in blocks for mu in block):
            for matrix in (mu.A, mu.D, mu.B, mu.C):
                if matrix is None:
                    table += [0, 0, 0, 0]
                else:
                    weight, bias = pack(matrix, dtype, vectors)
                    table += [put(weight), put(bias), bias.numel() // vectors.lanes, weight.numel() // bias.numel()]
            for vector in (mu.scale_a, mu.shift_a, mu.scale_b, mu.shift_b):
                table.append(put(F.pad(vector.float(), (0, -vector.numel() % vectors.lanes))))
            table += [mu.A[0].shape[0], mu.B[0].shape[1]]
        # offsets into one buffer rather than addresses, so that copies of this module are modules of their own
        self.register_buffer("packed", torch.cat(parts))
        self.register_buffer("table", torch.tensor(table, dtype=torch.int64))
        self.packed: Tensor
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        run = _library(self.vectors)
        assert run is not None, "Blocks needs blocks_for(dtype)"
        if x.shape[-1] != self.dim or x.ndim < 3 or {x.device.type, self.packed.device.type} != {"cpu"}:
            raise MultilinearError(
                f"these blocks take (..., height, width, {self.dim}) on the CPU, where they were made; got "
                f"{tuple(x.shape)} on {x.device}, weights on {self.packed.device}"
            )
        x = (x if x.dtype == self.dtype else x.float()).contiguous()
        out = torch.empty(x.shape, dtype=self.out_dtype)
        if out.numel() == 0:
            return out
        tokens = x.shape[-3] * x.shape[-2]
        batch = out.numel() // (tokens * self.dim)
        narrow = (x.dtype == torch.bfloat16) + 2 * (out.dtype == torch.bfloat16)
        sizes = (ctypes.c_int64 * 4)(batch, *x.shape[-3:])
        threads, images, alone = shared_out(batch, tokens, torch.get_num_threads())
        arguments = (
            x.data_ptr(), out.data_ptr(), narrow, sizes, self.packed.data_ptr(), self.table.data_ptr(), self.depth,
            self.eps or 0.0, self.eps is not None, *self.shifts, self.dtype == torch.bfloat16,
        )  # fmt: skip
        shares = alone, images, TILE, threads
        memory = torch.empty(run(*arguments, None, *shares), dtype=torch.uint8)
        run(*arguments, memory.data_ptr(), *shares)
        return out


def shared_out(batch: int, tokens: int, threads: int) -> tuple[int, int, int]:
    """How many threads take a batch of images with so many tokens each; how many images each of them takes at a time by
    itself, and how many of all are taken so. Threads that are together wait for each other after each block.

    >>> shared_out(17, 3136, 2), shared_out(3, 49, 2), shared_out(1, 49, 64)
    ((2, 1, 16), (2, 1, 2), (3, 1, 0))
    """
    threads = max(1, min(threads, batch * tokens // LEAST))
    images = max(1, min(TOKENS // tokens, batch // threads))
    return threads, images, batch // (images * threads) * (images * threads)


def pack(matrix: Map, dtype: torch.dtype, vectors: Vectors) -> Map:
    """Weights in the order in which the C++ code reads them, both sides padded with zeros; the bias in float32.

    >>> [part.numel() for part in pack((torch.ones(9, 3), torch.ones(9)), torch.bfloat16, AVX512)]
    [64, 16]
    """
    weight, bias = matrix
    lanes = vectors.lanes
    pair = 2 if dtype == torch.bfloat16 else 1
    outputs, inputs = weight.shape
    weight = F.pad(weight, (0, -inputs % pair, 0, -outputs % lanes)).to(dtype)
    panels = weight.split(vectors.panel * lanes)
    ordered = [part.t().reshape(-1, pair, part.shape[0]).transpose(1, 2).flatten() for part in panels]
    return torch.cat(ordered), F.pad(bias.float(), (0, -outputs % lanes))


@functools.cache
def features() -> frozenset[str]:
    """Instruction sets of this CPU, as Linux names them; empty where it does not say. Of those with vectors only what
    PyTorch uses, which `ATEN_CPU_CAPABILITY` may limit.

    >>> "avx512_bf16" in features() or "avx512_bf16" not in features()
    True
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    named = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    wide = {"AVX512": (), "AVX2": ("avx512", "amx")}.get(torch.backends.cpu.get_cpu_capability(), ("avx", "amx"))
    return frozenset(name for name in named if not name.startswith(wide))


def blocks_for(dtype: torch.dtype) -> bool:
    """Whether `Blocks` runs here: the CPU has the instructions, and the code is or can be compiled.

    >>> blocks_for(torch.float64)
    False
    """
    vectors = _vectors()
    known = dtype == torch.float32 or (dtype == torch.bfloat16 and vectors == AVX512 and "avx512_bf16" in features())
    return known and vectors is not None and _library(vectors) is not None


def _vectors() -> Vectors | None:
    """The widest that this CPU has."""
    return next((vectors for vectors in (AVX512, AVX2) if vectors.needed <= features()), None)


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use too: `CXX`, or the first found.

    >>> compiler() is None or isinstance(compiler(), str)
    True
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


@functools.cache
def _library(vectors: Vectors) -> Any | None:
    """The C++ function for these vectors, or None where it cannot be compiled or loaded."""
    flags = FLAGS + vectors.flags
    code = b"".join(part.read_bytes() for part in (SOURCE, *HEADERS))
    key = hashlib.sha256(code + " ".join(flags).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = home / "multilinear" / f"blocks-{key}.so"
    try:
        run = _load(kept, flags).multilinear_blocks
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    run.restype = number
    run.argtypes = (
        *[address] * 2, number, *[address] * 3, number, ctypes.c_float, *[number] * 4, address, *[number] * 4,
    )  # fmt: skip
    return run


def _load(kept: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """Load `kept`, compiled anew if it is not there or no library; for this process only if it cannot be written."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / kept.name
        program = compiler()
        if program is None:
            raise FileNotFoundError("no C++ compiler")
        command = [program, *flags, str(SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        library = ctypes.CDLL(str(built))
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(built, part)
            part.replace(kept)  # in one step: others may be loading it
    return library
