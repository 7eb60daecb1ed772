"""How a processor of the Hopper kind shares out each kernel, by the sizes of a block: measured on an H200. And which
blocks the kernels take."""

from functools import lru_cache
from typing import NamedTuple

import triton
from torch import Tensor

from multilinear.kernels.block_sizes import Sizes

# Gluon is young and changes (see `hopper_names`); with these versions of Triton the kernels were tried on a GPU, with
# the second one ahead of their last changes, which were only compiled with it.
VERSIONS = ("3.6.", "3.9.")

# Registers of a thread that multiplies, and of any at launch, for so many groups of warps.
REGISTERS = {1: (232, 128), 2: (240, 168), 3: (160, 128)}


class Plan(NamedTuple):
    """How a processor shares out the second Mu-Layer.

    Hidden channels of a chunk; groups of warps with 64 tokens each; chunks of A and B, and of C, that are kept; on the
    way forward whether n, and whether d, waits in shared memory instead of registers, and whether there are two tiles
    for x, which are needed if n is in registers; on the way back whether it goes on from the branches to x.
    """

    chunk: int
    groups: int
    slots: int
    slots_c: int = 0
    staged: bool = True
    staged_low: bool = False
    spare: bool = False
    whole: bool = False


# By channels and low rank, all of which were tried; measured on an H200. In training n is also written, from where it
# is staged.
FORWARD = {
    (64, 24): Plan(64, 3, 6, 3, staged=False, spare=True),
    (128, 48): Plan(64, 2, 4, 2, staged=False, spare=True),
    (192, 72): Plan(64, 2, 3, 2),
    (256, 96): Plan(32, 2, 3, 3, staged_low=True),
}
BACK = {
    (64, 24): Plan(64, 2, 6, 3, whole=True),
    (128, 48): Plan(64, 2, 2, 2),
    (192, 72): Plan(32, 2, 3, 2),
    (256, 96): Plan(32, 1, 3, 3),
}


class OneProduct(NamedTuple):
    """The same with the second branch's two matrices as one: chunks of both branches, and of C, that are kept; forward
    of 64 hidden channels, back of 32. There also how many chunks of what the branches gave are kept. In products over
    all tokens how many times 32 tokens are kept, and which part of the programs takes that of n with itself for one of
    both branches."""

    slots: int
    slots_c: int
    back_slots: int
    back_slots_c: int
    stages: int
    product_stages: int
    share: int


# By channels and low rank, where one matrix has no more entries than two.
MERGED = {(192, 144): OneProduct(2, 2, 3, 2, 4, 6, 11)}


class First(NamedTuple):
    """How a processor shares out the first Mu-Layer: groups of warps, tiles that each keeps (with none, x comes where u
    was), registers of a thread, programs at a time, and hidden channels of a chunk."""

    groups: int
    tiles: int
    registers: int
    programs: int = 1
    chunk: int = 64


FIRST = {
    (64, 8): First(2, 2, 128, 2),
    (128, 16): First(3, 1, 168),
    (192, 24): First(2, 1, 240),
    (192, 48): First(2, 1, 240),
    (256, 32): First(2, 0, 240),
}
LIFT = {
    (64, 8): First(2, 2, 80, 3),
    (128, 16): First(4, 1, 128),
    (192, 24): First(3, 1, 168),
    (192, 48): First(2, 2, 240),
    (256, 32): First(2, 1, 240),
}
# By channels and low rank, for images of 8x8 tokens, forward as one kernel: how many times 64 rows of weights are kept.
IMAGES = {(192, 48): 3}
FIRST_BACK = {
    (64, 8): First(2, 2, 240),
    (128, 16): First(3, 1, 168, chunk=32),
    (192, 24): First(2, 1, 240, chunk=32),
    (192, 48): First(2, 1, 240, chunk=32),
}


class Through(NamedTuple):
    """How a processor shares out the product and the norm that end the second Mu-Layer's way back: groups of warps,
    tiles of P, x and the gradient that are kept for each, and how often so many rows of the stack are."""

    groups: int
    tiles: int
    slots: int
    rows: int = 64


# By channels and low rank again, where it is faster than a product and a norm of their own.
NORM_BACK = {(128, 48): Through(2, 9, 4), (192, 72): Through(2, 9, 6, 32)}


class Return(NamedTuple):
    """The same for the way back through shift and lift: groups of warps, tiles of x and of the gradient that each
    keeps, and spare tiles; if these are too few for all of du, its rest goes where the gradient will come."""

    groups: int
    tiles: int
    spare: int

    @property
    def registers(self) -> int:
        return {2: 240, 3: 168}[self.groups]


# By channels and the first low rank.
LIFT_BACK = {
    (64, 8): Return(3, 2, 2),
    (128, 16): Return(2, 2, 3),
    (192, 24): Return(2, 1, 2),
    (192, 48): Return(2, 1, 2),
}


# By channels, for the products over all tokens that end the first Mu-Layer's way back: how many come at a time, and how
# many times as many are kept.
PRODUCTS = {64: (64, 7), 128: (64, 4), 192: (32, 5)}


def on_gpu(x: Tensor) -> bool:
    """Whether x is where these kernels run."""
    return x.is_cuda


@lru_cache
def plan_first(s: Sizes, rows: int, height: int, width: int, keep_border: bool) -> First | None:
    """The plan for the first Mu-Layer, or None if the kernel does not take it."""
    return FIRST.get((s.channels, s.low1)) if _shifts(s, rows, height, width, keep_border) else None


@lru_cache
def plan_image(s: Sizes, rows: int, height: int, width: int, keep_border: bool) -> int | None:
    """What `IMAGES` says of an image that is one tile, or None. Views of its lines go beyond the line that they start
    at, which Triton 3.9 refuses."""
    there = height == width == 8 and _shifts(s, rows, height, width, keep_border)
    there = there and triton.__version__.startswith("3.6.")
    return IMAGES.get((s.channels, s.low1)) if there else None


@lru_cache
def plan_first_back(s: Sizes, rows: int, height: int, width: int, keep_border: bool) -> First | None:
    """The same for the way back down to u."""
    return FIRST_BACK.get((s.channels, s.low1)) if _shifts(s, rows, height, width, keep_border) else None


@lru_cache
def plan_lift_back(s: Sizes, rows: int, height: int, width: int, keep_border: bool) -> Return | None:
    """The same for the rest of the way back, through shift, lift and norm."""
    return LIFT_BACK.get((s.channels, s.low1)) if _shifts(s, rows, height, width, keep_border) else None


def _shifts(s: Sizes, rows: int, height: int, width: int, keep_border: bool) -> bool:
    """Whether the kernels of the first Mu-Layer find a token's neighbours in such a grid."""
    exact = min(height, width) > 2 and rows * max(height, width) < 2**32  # see `reciprocal`
    return triton.__version__.startswith(VERSIONS) and keep_border and exact and s.rank1 == s.channels


@lru_cache
def plan_lift(s: Sizes) -> First | None:
    """The same for the step ahead of its shift."""
    known = triton.__version__.startswith(VERSIONS)
    return LIFT.get((s.channels, s.low1)) if known and s.rank1 == s.channels else None


@lru_cache
def plan_for(s: Sizes, save: bool) -> Plan | None:
    """The plan for a block of these sizes, or None if the kernels do not take it; `save` for training."""
    plan = FORWARD.get((s.channels, s.low2)) if _known(s) else None
    return plan._replace(staged=True) if plan is not None and save else plan


@lru_cache
def plan_merged(s: Sizes) -> OneProduct | None:
    """The same with the matrices of the second branch as one, forward and back."""
    return MERGED.get((s.channels, s.low2)) if _known(s) else None


@lru_cache
def plan_back(s: Sizes) -> Plan | None:
    """The same for the way back."""
    return BACK.get((s.channels, s.low2)) if _known(s) else None


@lru_cache
def plan_norm_back(s: Sizes) -> Through | None:
    """The same for its last step, where the plan for the way back does not go on to it."""
    return NORM_BACK.get((s.channels, s.low2)) if _known(s) else None


def _known(s: Sizes) -> bool:
    # what is kept, and how it goes round, was counted for the published hidden width
    return triton.__version__.startswith(VERSIONS) and s.rank2 == 3 * s.channels
