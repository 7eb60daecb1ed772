"""Where numbers sit in the slots of ciphertexts.

`tokens`: one ciphertext a channel; its slots hold many images, each a token grid with a column and a row of zeros
behind it. A spatial shift is one rotation: what crosses the border comes from, or falls into, the zeros.
`images`: one ciphertext a channel and token; its slots hold one image each. A shift only renames ciphertexts. Cheapest
by the image for thousands of images at a time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multilinear.encrypted.parameters import Parameters
from multilinear.errors import check_choice

Array = NDArray[np.float64]
PACKINGS = ("tokens", "images")


@dataclass(frozen=True)
class Packing:
    """How a batch of token grids becomes ciphertexts of `slots` numbers, and back.

    >>> Packing("tokens", (4, 4), 4096).images
    163
    """

    kind: str
    grid: tuple[int, int]
    slots: int

    @classmethod
    def make(cls, kind: str, grid: tuple[int, int], parameters: Parameters) -> "Packing":
        return cls(check_choice("packing", kind, PACKINGS), grid, parameters.slots)

    @property
    def row(self) -> int:
        """Slots from one token to that below it."""
        return self.grid[1] + 1

    @property
    def stride(self) -> int:
        """Slots of one image."""
        return (self.grid[0] + 1) * self.row if self.kind == "tokens" else 1

    @property
    def images(self) -> int:
        """Images in one batch. With one slot each, one is left empty: whether it stays zero tells a wrong key."""
        return self.slots // self.stride if self.kind == "tokens" else self.slots - 1

    @property
    def places(self) -> int:
        """Ciphertexts of one channel: 1, or one a token."""
        return 1 if self.kind == "tokens" else self.grid[0] * self.grid[1]

    def steps(self, move: tuple[int, int]) -> int:
        """The rotation (positive: towards lower slots) that moves values down and right by `move`."""
        return -(move[0] * self.row + move[1])

    def rotations(self) -> list[int]:
        """Every rotation that an evaluation needs keys for."""
        return [self.steps(move) for move in ((1, 0), (-1, 0), (0, 1), (0, -1))] if self.kind == "tokens" else []

    def source(self, place: int, move: tuple[int, int]) -> int | None:
        """With one ciphertext a token: the place whose values move into `place`, or None past the border."""
        row, column = divmod(place, self.grid[1])
        row, column = row - move[0], column - move[1]
        inside = 0 <= row < self.grid[0] and 0 <= column < self.grid[1]
        return row * self.grid[1] + column if inside else None

    def _index(self, count: int) -> NDArray[np.int64]:
        """The slots of `count` images: (count, high, wide)."""
        rows, columns = np.arange(self.grid[0]), np.arange(self.grid[1])
        return np.arange(count)[:, None, None] * self.stride + rows[:, None] * self.row + columns

    def pack(self, tokens: Array) -> Array:
        """(images, high, wide, channels) into slots (places, channels, slots)."""
        count, high, wide, channels = tokens.shape
        if self.kind == "images":
            packed = np.zeros((high * wide, channels, self.slots))
            packed[:, :, :count] = tokens.reshape(count, high * wide, channels).transpose(1, 2, 0)
            return packed
        packed = np.zeros((1, channels, self.slots))
        packed[0][:, self._index(count)] = np.moveaxis(tokens, -1, 0)
        return packed

    def unpack(self, packed: Array, count: int) -> Array:
        """The inverse of `pack` for the first `count` images."""
        if self.kind == "images":
            tokens: Array = packed[:, :, :count].transpose(2, 0, 1)
            return tokens.reshape(count, *self.grid, packed.shape[1])
        return np.moveaxis(packed[0][:, self._index(count)], 0, -1)

    def mask(self) -> Array:
        """One where a token of a full batch sits, zero elsewhere: what a constant is multiplied with."""
        ones: Array = self.pack(np.ones((self.images, *self.grid, 1)))[0, 0]
        return ones


def cheapest_first(grid: tuple[int, int], parameters: Parameters, count: int) -> list[str]:
    """Which packing to take for `count` images at a time; the second, if any, needs less memory.

    One ciphertext a token makes a batch as many times dearer as there are tokens, and holds more images.

    >>> cheapest_first((4, 4), Parameters(8192, 2), 1), cheapest_first((4, 4), Parameters(8192, 2), 10_000)
    (['tokens'], ['images', 'tokens'])
    """
    costs = {}
    for kind in PACKINGS:
        packing = Packing.make(kind, grid, parameters)
        costs[kind] = packing.places * -(-count // packing.images) if packing.images else float("inf")
    return ["images", "tokens"] if costs["images"] < costs["tokens"] else ["tokens"]
