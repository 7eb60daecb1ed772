"""Exact matrix products on the residues of ciphertexts.

A plaintext matrix times a vector of ciphertexts is, prime by prime, a matrix product modulo that prime. Residues of 54
bits are split in halves of 27, each of which a float64 matrix product handles exactly (Bae, Cheon, Hanrot, Park and
Stehle, "Plaintext-ciphertext matrix multiplication and FHE bootstrapping: fast and fused", CRYPTO 2024).
"""

import numpy as np
from numpy.typing import NDArray

from multilinear.encrypted.parameters import HALF_BITS
from multilinear.errors import MultilinearError

Residues = NDArray[np.uint64]
Array = NDArray[np.float64]
LARGEST_ROW = 2**25  # sum of absolute weights in a row: times a half of 27 bits, still exact in float64

_MASK = np.uint64(2**HALF_BITS - 1)
_SHIFT = np.uint64(HALF_BITS)
_ROWS = 32  # at a time, so that they stay in the processor's cache


def check_rows(weights: Array) -> None:
    """Raise unless products with these whole-numbered weights are exact."""
    if np.abs(weights).sum(1).max(initial=0) > LARGEST_ROW or not (weights == np.rint(weights)).all():
        raise MultilinearError("weights that are no whole numbers, or too large for exact products on residues")


def multiply(weights: Array, residues: Residues, prime: int) -> Residues:
    """`weights @ residues` modulo a `prime` of 54 bits, for whole-numbered weights (out, in), residues (in, columns).

    >>> multiply(np.array([[2.0, -1.0]]), np.array([[3], [4]], dtype=np.uint64), 2**54 - 33)
    array([[2]], dtype=uint64)
    """
    low = weights @ (residues & _MASK).astype(np.float64)
    high = weights @ (residues >> _SHIFT).astype(np.float64)
    return _combine(low, high, prime)


def multiply_plainly(weights: Array, residues: Residues, prime: int) -> Residues:
    """The same in Python's own integers: slow, and right on any machine.

    >>> multiply_plainly(np.array([[2.0, -1.0]]), np.array([[3], [4]], dtype=np.uint64), 97)
    array([[2]], dtype=uint64)
    """
    rows = weights.astype(np.int64).astype(object)
    found: Residues = (rows @ residues.astype(object) % prime).astype(np.uint64)
    return found


def _combine(low: Array, high: Array, prime: int) -> Residues:
    """`high * 2**27 + low` modulo `prime`: the quotient in floats is off by at most one, the rest wraps exactly."""
    found = np.empty(low.shape, np.uint64)
    unsigned = np.uint64(prime)
    for start in range(0, len(low), _ROWS):
        rows = slice(start, start + _ROWS)
        quotient = high[rows] * (2.0**HALF_BITS / prime)
        whole = np.floor(quotient, out=quotient).astype(np.int64)
        total = high[rows].astype(np.int64)
        total <<= HALF_BITS
        total -= np.multiply(whole, prime, out=whole)
        total += low[rows].astype(np.int64)
        remainder = total.view(np.uint64)  # what is below zero is now at the top, so the smaller one is right
        np.minimum(remainder, remainder + unsigned, out=remainder)
        np.minimum(remainder, remainder - unsigned, out=found[rows])
    return found


def add(first: Residues, second: Residues, prime: int) -> Residues:
    """Sum modulo `prime` of residues below it.

    >>> add(np.array([90], dtype=np.uint64), np.array([10], dtype=np.uint64), 97)
    array([3], dtype=uint64)
    """
    total = first + second
    found: Residues = np.minimum(total, total - np.uint64(prime))  # what is below zero wraps to the top
    return found
