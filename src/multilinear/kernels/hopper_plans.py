"""How a processor of the Hopper kind shares out each kernel, by the sizes of a block: measured on an H200."""

from typing import NamedTuple

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
    of 64 hidden channels, back of 32."""

    slots: int
    slots_c: int
    back_slots: int
    back_slots_c: int


# By channels and low rank, where one matrix has no more entries than two.
MERGED = {(192, 144): OneProduct(2, 2, 3, 2)}


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
