import struct
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilinear.encrypted import Parameters, Public, messages
from multilinear.encrypted.packing import Packing
from multilinear.errors import MultilinearError

# a ring that nothing is encrypted with, so that every byte of a message can be tried
PUBLIC = Public(
    "ab" * 32, Parameters(16, 1), Packing("tokens", (1, 1), 8), (1, 2, 2), 2, 0, (0.5,), (0.5,), ("a", "b"),
    (1.0, 1.0), 0.1,
)  # fmt: skip
OWNER = bytes(range(16))
COUNT = 3  # two batches of two
PAYLOADS = {
    messages.KEYS: bytes(range(200)),
    messages.IMAGES: np.random.default_rng(0).bytes(2 * messages.batch_bytes(PUBLIC)),
    messages.RESULTS: np.random.default_rng(1).bytes(2 * messages.result_bytes(PUBLIC)),
    messages.SECRET: bytes(range(100)),
}
# where things are in the header
VERSION_AT, KIND_AT, PROGRAM_AT, KEYS_AT, COUNT_AT, END = 8, 10, 12, 44, 60, 104


def written(kind=messages.IMAGES, public=PUBLIC):
    counted = kind in (messages.IMAGES, messages.RESULTS)
    return messages.pack(kind, public, OWNER, COUNT if counted else 0, PAYLOADS[kind])


def read(data, kind=messages.IMAGES, keys=OWNER):
    return messages.unpack(bytes(data), kind, PUBLIC, keys)


def changed(data, at, form, *values):
    edited = bytearray(data)
    struct.pack_into(form, edited, at, *values)
    return bytes(edited)


def refused(data, message=None, **options):
    with pytest.raises(MultilinearError, match=message) as error:
        read(data, **options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("kind", PAYLOADS)
def test_what_is_written_is_read(kind):
    message = read(written(kind), kind)
    assert message.keys == OWNER and bytes(message.payload) == PAYLOADS[kind]
    assert message.count == (COUNT if kind in (messages.IMAGES, messages.RESULTS) else 0)
    assert len(written(kind)) == messages.HEADER_BYTES + len(PAYLOADS[kind]) == END + len(PAYLOADS[kind])


@given(st.sampled_from(list(PAYLOADS)), st.integers(1, 255), st.data())
@settings(deadline=None, max_examples=300)
def test_every_flipped_byte_of_a_payload_is_found(kind, flip, data):
    message = bytearray(written(kind))
    message[data.draw(st.integers(END, len(message) - 1))] ^= flip
    refused(message, "altered on the way", kind=kind)


@given(st.sampled_from(list(PAYLOADS)), st.integers(1, 255), st.integers(0, END - 1))
@settings(deadline=None, max_examples=300)
def test_every_flipped_byte_of_a_header_is_found(kind, flip, at):
    message = bytearray(written(kind))
    message[at] ^= flip
    refused(message, kind=kind)


@given(st.sampled_from(list(PAYLOADS)), st.integers(1, 255), st.integers(KEYS_AT, COUNT_AT - 1))
@settings(deadline=None, max_examples=50)
def test_a_flipped_owner_is_found_by_a_reader_who_knows_none(kind, flip, at):
    message = bytearray(written(kind))
    message[at] ^= flip
    refused(message, kind=kind, keys=None)


@pytest.mark.parametrize("kind", PAYLOADS)
def test_every_truncation_is_found(kind):
    message = written(kind)
    for length in range(len(message)):
        refused(message[:length], "truncated", kind=kind)


@given(st.sampled_from(list(PAYLOADS)), st.binary(min_size=1, max_size=50))
@settings(deadline=None, max_examples=50)
def test_appended_bytes_are_found(kind, more):
    refused(written(kind) + more, "too long", kind=kind)


@given(st.binary(max_size=400))
@settings(deadline=None, max_examples=200)
def test_any_bytes_are_refused_with_one_line(data):
    for kind in PAYLOADS:
        refused(data, kind=kind)
        refused(b"MULTILIN" + data, kind=kind)
        refused(written(kind)[:KEYS_AT] + data, kind=kind)


@pytest.mark.parametrize("kind", PAYLOADS)
def test_another_kind_is_named(kind):
    for other in set(PAYLOADS) - {kind}:
        refused(written(other), "^expected [a-z ]+, got [a-z ]+$", kind=kind)
    refused(changed(written(kind), KIND_AT, "<H", 999), "got kind 999", kind=kind)


def test_another_program_other_keys_and_another_version_are_named():
    refused(changed(written(), PROGRAM_AT, "32s", b"\xcd" * 32), "another program \\(cdcdcdcd, not abababab\\)")
    refused(written(), "other keys \\(00010203, not ffffffff\\)", keys=b"\xff" * 16)
    refused(changed(written(), VERSION_AT, "<H", 2), "format version 2, this release reads 1")
    refused(b"PK\3\4" + written()[4:], "no message of this library")


@pytest.mark.parametrize("kind", [messages.IMAGES, messages.RESULTS])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 2**31, 2**32 - 1])
def test_a_count_that_does_not_fit_the_length_is_refused(kind, count):
    refused(changed(written(kind), COUNT_AT, "<I", count), f"{count} images take", kind=kind)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
@pytest.mark.parametrize("count", [COUNT, 2**31])
def test_absurd_sizes_are_refused_before_anything_is_made_of_them(length, count):
    tracemalloc.start()
    start = time.perf_counter()
    for kind in PAYLOADS:
        data = changed(written(kind), COUNT_AT, "<IQ", count, length)
        refused(data, "truncated, or too long", kind=kind)
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 1 and peak < 1e6


@pytest.mark.parametrize("kind", [messages.KEYS, messages.SECRET])
def test_keys_larger_than_any_are_refused_unread(kind):
    payload = bytes(messages.largest_keys(PUBLIC) + 1)
    refused(messages.pack(kind, PUBLIC, OWNER, 0, payload), "more than the keys of this program can have", kind=kind)


def test_a_payload_of_another_length_is_refused_though_its_checksum_is_right():
    for length in (0, len(PAYLOADS[messages.IMAGES]) - 7, len(PAYLOADS[messages.IMAGES]) + 7):
        refused(messages.pack(messages.IMAGES, PUBLIC, OWNER, COUNT, bytes(length)), f"3 images take .* has {length}")


PRIMES = [2**54 - 33, 97]


@given(st.lists(st.tuples(st.integers(0, PRIMES[0] - 1), st.integers(0, PRIMES[1] - 1)), min_size=1, max_size=9))
@settings(deadline=None, max_examples=100)
def test_residues_are_read_as_written(pairs):
    residues = np.array(pairs, np.uint64)
    data = messages.write_residues(residues)
    assert len(data) == 7 * residues.size
    found = messages.read_residues(memoryview(data), residues.shape, PRIMES, 1)
    assert found.dtype == np.uint64 and np.array_equal(found, residues)


@pytest.mark.parametrize(
    "pair", [(PRIMES[0], 0), (0, PRIMES[1]), (2**56 - 1, 0), (0, 2**54)], ids=["first", "second", "most", "swapped"]
)
def test_residues_not_below_their_prime_are_refused(pair):
    data = messages.write_residues(np.array([[0, 0], pair, [96, 96]], np.uint64))
    with pytest.raises(MultilinearError, match="numbers that no ciphertext of this program has"):
        messages.read_residues(memoryview(data), (3, 2), PRIMES, 1)
