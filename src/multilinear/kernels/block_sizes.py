"""Sizes of a Poly-Block, and what follows from them: parts and chunks, places in memory, tiles and constants."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import triton
from torch import Tensor

from multilinear.kernels import BLOCK_PARAMETERS, block_small


class Sizes(NamedTuple):
    """Widths of a block: channels, both ranks and the low ranks of both second branches."""

    channels: int
    rank1: int
    low1: int
    rank2: int
    low2: int

    def served(self) -> bool:
        """Whether the kernels take these: whole chunks and whole quarters, and tiles that fit a processor.

        Those were made for the published shapes, hidden widths of one and three times the channels and low ranks of a
        quarter of that; of more than 256 channels one large product after the other is faster.
        """
        exact = all(sum(parts(width)) == width for width in (self.channels, self.rank1))
        whole = self.rank1 % 16 == 0 and self.rank1 > 16 and self.rank2 % 16 == 0 and self.low1 % 4 == 0
        fits = max(self.rank1, 4 * self.low1) <= self.channels <= max(TILES) and 4 * self.low2 <= 3 * self.channels
        return exact and whole and fits


def parts(width: int) -> tuple[int, int]:
    """The largest power of two up to `width`, and one that covers the rest; both are 16 or more, as products need."""
    first = max(16, 1 << (width.bit_length() - 1))
    rest = width - first
    return first, 0 if rest <= 0 else max(16, triton.next_power_of_2(rest))


def align(width: int, unit: int = 8) -> int:
    """Rows of 16 bytes or a multiple, so that they load at once."""
    return -(-width // unit) * unit


def aligned(x: Tensor) -> Tensor:
    """The same from an address that tiles can be copied from, which not every part of another tensor has."""
    return x.clone() if x.data_ptr() % 16 else x


def chunk(width: int, most: int = 64) -> int:
    """The largest power of two, up to `most`, that divides `width`."""
    return min(most, width & -width)


def chunk_of_many(s: "Sizes", most: int) -> int:
    """The same for the channels and the first rank, of which there are two chunks or more: the kernels of the way back
    load again what they have stored, and without a loop Triton 3.6 does not keep that order."""
    return chunk(math.gcd(s.channels, s.rank1), min(most, s.rank1 // 2))


class Prepared(NamedTuple):
    """What the kernels read: matrices in the precision of the activations, all vectors in one float32 tensor.

    `stack` and `low_stack` hold what the gradients of the second Mu-Layer's branches are multiplied with: rows of A2,
    the gram matrix, a row that goes with its bias, seven of zeros, and D2; and the same of B2 without the last.
    `first` and `second` hold A and B of the second Mu-Layer next to their biases, centred over the outputs.

    With merged branches B is both matrices of the second one. `A2` then holds 32 rows of each branch in turns, the
    second one's extras behind the first one's, `stack` 64 rows of each gram matrix in turns, and behind them the same
    of their blocks of 64 x 64 from the diagonal on, those beyond it doubled; B2 and `low_stack` are empty. Both
    branches have taken up the scale and shift of the norm ahead of them.
    """

    lifting: Tensor
    B1: Tensor
    C1: Tensor
    A2: Tensor
    B2: Tensor
    C2: Tensor
    stack: Tensor
    low_stack: Tensor
    vectors: Tensor
    first: Tensor
    second: Tensor

    @property
    def merged(self) -> bool:
        return len(self.B2) == 0

    @property
    def D2(self) -> Tensor:
        return self.stack[len(self.A2) + self.stack.shape[1] + 8 :]

    @property
    def gram(self) -> Tensor:
        return self.stack[len(self.A2) : len(self.A2) + self.stack.shape[1]]

    @property
    def low_gram(self) -> Tensor:
        return self.low_stack[len(self.B2) : len(self.B2) + self.low_stack.shape[1]]


class Roots(NamedTuple):
    """What comes after that for inference with merged branches.

    `roots` holds the triangular factors of both with their biases, in the same turns as the gram matrices, without
    their last columns: products with these have the same squares as the branches; `linear` those columns, and at the
    end what is left of both.
    """

    roots: Tensor
    linear: Tensor


def sizes_of(weights: Sequence[Tensor]) -> Sizes:
    named = dict(zip(BLOCK_PARAMETERS, weights, strict=True))
    return Sizes(
        named["mu1.A.weight"].shape[1], *named["mu1.B.weight"].shape, *named["mu2.B.weight"].shape
    )  # fmt: skip


class Offsets(NamedTuple):
    """Where groups of vectors start in `Prepared.vectors`."""

    mu1: int
    forms: int
    bias: int
    end: int


def offsets(s: Sizes) -> Offsets:
    mu1 = 4 * s.channels
    forms = mu1 + 5 * s.rank1
    bias = forms + s.channels + 2 * s.low2 + 2
    return Offsets(mu1, forms, bias, bias + s.rank1 + s.low1)


class Tile(NamedTuple):
    """Tokens of a tile, warps, hidden channels of a chunk, chunks on their way from memory, and the most registers of a
    thread, where fewer than Triton would take let more programs run."""

    tokens: int
    warps: int
    chunk: int
    stages: int
    registers: int | None = None


# Tiles of each kernel for blocks of up to so many channels, measured on an H200. 64 tokens always go with 4 warps: with
# 8, two groups of warps share the rows of a product, and Triton 3.6 then computes some of them wrongly.
TILES = {
    64: {"lift": Tile(64, 4, 64, 1), "mu1": Tile(64, 4, 64, 2), "mu2": Tile(64, 4, 32, 3),
         "mu2_back": Tile(64, 4, 64, 2), "mu1_back": Tile(64, 4, 32, 2, 128), "lift_back": Tile(64, 4, 32, 3)},
    128: {"lift": Tile(64, 4, 64, 1), "mu1": Tile(64, 4, 64, 1), "mu2": Tile(64, 4, 64, 2),
          "mu2_back": Tile(128, 8, 32, 3), "mu1_back": Tile(64, 4, 64, 2), "lift_back": Tile(64, 4, 32, 2)},
    192: {"lift": Tile(64, 4, 64, 3), "mu1": Tile(64, 4, 64, 1), "mu2": Tile(128, 8, 32, 3),
          "mu2_back": Tile(128, 8, 32, 2), "mu1_back": Tile(64, 4, 64, 2, 168), "lift_back": Tile(64, 4, 32, 2, 128)},
    256: {"lift": Tile(64, 4, 64, 1), "mu1": Tile(64, 4, 64, 1), "mu2": Tile(128, 8, 32, 2),
          "mu2_back": Tile(64, 4, 32, 2), "mu1_back": Tile(64, 4, 32, 2), "lift_back": Tile(64, 4, 32, 2, 160)},
}  # fmt: skip


@lru_cache
def tiles(s: Sizes) -> dict[str, Tile]:
    return next(table for most, table in TILES.items() if s.channels <= most)


def steps(tile: Tile, width: int) -> dict[str, int | None]:
    """The constants of a tile whose rows of `width` numbers are visited in steps, of eight numbers for each thread."""
    block = triton.next_power_of_2(width)
    step = min(tile.tokens, max(1, 256 * tile.warps // block))
    return {"T": tile.tokens, "STEP": step, "BLOCK": block, "num_warps": tile.warps, "maxnreg": tile.registers}


def constants(s: Sizes, names: Sequence[str]) -> dict[str, int]:
    """The constants of a kernel that follow from the sizes."""
    known = _constants(s)
    return {name: known[name] for name in names if name in known}


@lru_cache
def _constants(s: Sizes) -> dict[str, int]:
    c, r1, l1, l2 = (parts(width) for width in (s.channels, s.rank1, s.low1, s.low2))
    place, low = offsets(s), block_small.low_parts(s.low2)
    return {
        "C": s.channels, "C0": c[0], "C1": c[1], "R1": s.rank1, "R10": r1[0], "R11": r1[1],
        "L1": s.low1, "L10": l1[0], "L11": l1[1], "R2": s.rank2, "L2": s.low2, "L20": l2[0], "L21": l2[1],
        "P20": low[0], "P21": low[1], "X20": parts(s.low2 + 16)[0], "X21": parts(s.low2 + 16)[1],
        "U": s.rank1 + s.low1, "US": align(s.rank1 + s.low1), "MU1": place.mu1, "FORMS": place.forms,
        "BIAS": place.bias, "V1": chunk(s.rank1 // 4, 8), "VL1": chunk(s.low1 // 4, 8),
        "SP": align(s.rank2 + s.channels + 8 + s.low2, 32), "SQ": s.rank2 + s.low2 + 8, "SD1": align(s.low1 + 1),
    }  # fmt: skip
