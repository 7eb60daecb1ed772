"""The bytes that travel: one header of fixed length, then a payload whose length follows from it.

    8 bytes   MULTILIN
    2         format version, little-endian, as all numbers here
    2         kind: 1 evaluation keys, 2 images, 3 results, 4 secret key
    32        id of the program
    16        id of the client's keys
    4         images, for images and results
    8         length of the payload
    32        SHA-256 of everything else

Residues are written in 7 bytes each. A hash is no signature: it finds accidents, and who may talk to whom is a matter
of the connection (TLS).
"""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from multilinear.encrypted.parameters import Parameters
from multilinear.encrypted.program import Public
from multilinear.encrypted.residues import Residues
from multilinear.errors import MultilinearError

_HEADER = struct.Struct("<8sHH32s16sIQ")
_DIGEST = 32
HEADER_BYTES = _HEADER.size + _DIGEST
_MAGIC, _VERSION = b"MULTILIN", 1
_RESIDUE_BYTES = 7
KEYS, IMAGES, RESULTS, SECRET = 1, 2, 3, 4
_NAMES = {KEYS: "evaluation keys", IMAGES: "encrypted images", RESULTS: "encrypted results", SECRET: "a secret key"}


@dataclass(frozen=True)
class Message:
    """A message that was checked: complete, unharmed, of the expected kind and program."""

    keys: bytes  # id of the client's keys
    count: int
    payload: memoryview


def pack(kind: int, public: Public, keys: bytes, count: int, payload: bytes) -> bytes:
    """Put a header before `payload`."""
    program = bytes.fromhex(public.program)
    header = _HEADER.pack(_MAGIC, _VERSION, kind, program, keys, count, len(payload))
    return b"".join([header, _digest(header, payload), payload])


def _digest(header: bytes, payload: bytes | memoryview) -> bytes:
    found = hashlib.sha256(header)
    found.update(payload)
    return found.digest()


def unpack(data: bytes, kind: int, public: Public, keys: bytes | None = None) -> Message:
    """Check a message from outside: everything about it that can be checked without a key."""
    wanted = _NAMES[kind]
    if len(data) < HEADER_BYTES:
        raise MultilinearError(f"expected {wanted}, got {len(data)} bytes: the message is truncated")
    magic, version, found, program, owner, count, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise MultilinearError(f"expected {wanted}, but these bytes are no message of this library")
    if version != _VERSION:
        raise MultilinearError(f"the message has format version {version}, this release reads {_VERSION}; upgrade")
    if found != kind:
        raise MultilinearError(f"expected {wanted}, got {_NAMES.get(found, f'kind {found}')}")
    if program != bytes.fromhex(public.program):
        raise MultilinearError(
            f"these {wanted} belong to another program ({program.hex()[:8]}, not {public.program[:8]})"
        )
    if keys is not None and owner != keys:
        raise MultilinearError(f"these {wanted} belong to other keys ({owner.hex()[:8]}, not {keys.hex()[:8]})")
    if len(data) != HEADER_BYTES + length:
        raise MultilinearError(
            f"the message should have {HEADER_BYTES + length} bytes and has {len(data)}: truncated, or too long"
        )
    _check_length(kind, public, count, length)
    payload = memoryview(data)[HEADER_BYTES:]
    if _digest(data[: _HEADER.size], payload) != data[_HEADER.size : HEADER_BYTES]:
        raise MultilinearError(f"these {wanted} were altered on the way: the checksum does not match; send them again")
    return Message(owner, count, payload)


def _check_length(kind: int, public: Public, count: int, length: int) -> None:
    """Refuse sizes that no client or server of this program sends, before anything is made of them."""
    if kind in (IMAGES, RESULTS):
        per_image_batch = batch_bytes(public) if kind == IMAGES else result_bytes(public)
        expected = per_image_batch * batches(public, count)
        if count < 1 or length != expected:
            raise MultilinearError(f"{count} images take {expected} bytes in this program, the message has {length}")
    elif length > largest_keys(public):
        raise MultilinearError(
            f"{length} bytes are more than the keys of this program can have ({largest_keys(public)})"
        )


def batches(public: Public, count: int) -> int:
    """How many batches `count` images take."""
    return -(-count // public.packing.images)


def batch_bytes(public: Public) -> int:
    """Bytes of one batch of encrypted images."""
    p = public.parameters
    return public.packing.places * public.inputs * 2 * p.primes * p.degree * _RESIDUE_BYTES


def result_bytes(public: Public) -> int:
    """Bytes of one batch of results."""
    return public.packing.places * len(public.labels) * 3 * public.parameters.degree * _RESIDUE_BYTES


def key_bytes(parameters: Parameters) -> int:
    """Bytes of the key for one rotation, or for relinearisation, but for some headers."""
    return parameters.primes * 2 * (parameters.primes + 1) * parameters.degree * 8


def largest_keys(public: Public) -> int:
    """An upper bound of the evaluation keys' size."""
    count = 1 + len(public.packing.rotations())
    return (
        count * (key_bytes(public.parameters) + 256 * public.parameters.primes) + 16 * public.parameters.degree + 4096
    )


def write_residues(residues: Residues) -> bytes:
    """7 bytes a residue.

    >>> len(write_residues(np.zeros(3, np.uint64)))
    21
    """
    flat = np.ascontiguousarray(residues, "<u8").reshape(-1)
    return flat.view(np.uint8).reshape(-1, 8)[:, :_RESIDUE_BYTES].tobytes()


def read_residues(data: memoryview, shape: tuple[int, ...], primes: list[int], axis: int) -> Residues:
    """The inverse; refuses residues that are not below their prime (`axis` counts the primes)."""
    full = np.zeros((int(np.prod(shape)), 8), np.uint8)
    full[:, :_RESIDUE_BYTES] = np.frombuffer(data, np.uint8).reshape(-1, _RESIDUE_BYTES)
    residues: Residues = full.view("<u8").reshape(shape)
    for i, prime in enumerate(primes):
        if (residues[(slice(None),) * axis + (i,)] >= prime).any():
            raise MultilinearError("the message holds numbers that no ciphertext of this program has")
    return residues
