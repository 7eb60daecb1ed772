"""The program in whole numbers without encryption: what a noiseless evaluation would decrypt to, digit by digit."""

import numpy as np
from numpy.typing import NDArray

from multilinear.encrypted.network import Array, shift
from multilinear.encrypted.parameters import PRIME_BITS
from multilinear.encrypted.program import Program

Whole = NDArray[np.int64]
_LOW_BITS = 20


def simulate(program: Program, images: NDArray[np.uint8], chunk: int = 256) -> Array:
    """Logits (N, classes) of the program's integer twin.

    Values are whole numbers at the program's scale, weights are whole numbers, and a product is divided by 2**54 and
    rounded. The encrypted result differs from it by the encryption's noise alone.
    """
    parts = [_logits(program, images[i : i + chunk]) for i in range(0, max(1, len(images)), chunk)]
    logits: Array = np.concatenate(parts).mean((1, 2))
    return logits


def _logits(program: Program, images: NDArray[np.uint8]) -> Array:
    patches = program.public.prepare(images)
    v = np.concatenate([np.ones((*patches.shape[:-1], 1)), patches], -1)
    scale = program.public.parameters.scale
    whole: Whole = np.rint(v * scale).astype(np.int64)
    one = np.int64(scale)
    for layer in program.layers:
        first = _exact(whole, layer.first)
        if layer.shifts:
            first = shift(first)
        first = first + one * layer.offset.astype(np.int64)
        second = _exact(whole, layer.second)
        h = np.rint(first.astype(np.float64) * second.astype(np.float64) / 2.0**PRIME_BITS).astype(np.int64)
        whole = np.concatenate([whole, h], -1)
    logits: Array = _exact(whole, program.head).astype(np.float64) / scale * np.array(program.public.units)
    return logits


def _exact(values: Whole, weights: Array) -> Whole:
    """`weights·v` exactly, in two float64 products: low bits and the rest."""
    low = (values & (2**_LOW_BITS - 1)).astype(np.float64)
    high = (values >> _LOW_BITS).astype(np.float64)
    total: Whole = (high @ weights.T).astype(np.int64) << _LOW_BITS
    total += (low @ weights.T).astype(np.int64)
    return total
