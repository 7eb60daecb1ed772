import gc
import hashlib
import multiprocessing
import struct
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np
import pytest
import seal

from multilinear.encrypted import Client, Server, messages
from multilinear.encrypted.backend import Secret
from multilinear.encrypted.service import Service
from multilinear.errors import MultilinearError


def reachable(root):
    """Everything that can be got at from `root`, but for code."""
    code = ModuleType, type, FunctionType, BuiltinFunctionType, MethodType
    seen, queue = {}, [root]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, code):
            continue
        seen[id(thing)] = thing
        queue += gc.get_referents(thing)
        queue += [vars(thing)] if hasattr(thing, "__dict__") else []
        if isinstance(thing, np.ndarray) and thing.base is not None:
            queue.append(thing.base)
    return list(seen.values())


def as_bytes(thing):
    if isinstance(thing, bytes | bytearray | memoryview):
        return bytes(thing)
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    if isinstance(thing, seal.KSwitchKeys | seal.Ciphertext):
        return bytes(thing.to_string())
    return thing.encode(errors="replace") if isinstance(thing, str) else b""


def traces_of(client):
    """Pieces of the secret polynomial: as SEAL writes it, and as residues travel."""
    key = client._secret.to_bytes()
    degree, primes = client.public.parameters.degree, client.public.parameters.primes + 1
    residues = np.frombuffer(key[len(key) - 8 * degree * primes :], np.uint64)
    starts = range(0, len(residues), degree // 2)
    raw = [residues[start : start + 8].tobytes() for start in starts]
    return raw + [messages.write_residues(residues[start : start + 8]) for start in starts]


def leaks(root, client):
    things = reachable(root)
    held = [type(thing) for thing in things if isinstance(thing, Secret | Client | seal.SecretKey | seal.Decryptor)]
    pieces = traces_of(client)
    return held + [piece for thing in things if (data := as_bytes(thing)) for piece in pieces if piece in data]


def test_the_walk_finds_a_secret_where_there_is_one(small):
    found = leaks(small.client, small.client)
    assert {Client, Secret, seal.SecretKey, seal.Decryptor} <= set(found)
    assert leaks({"a": [small.client.secret()]}, small.client)
    assert leaks([np.frombuffer(small.client.secret(), np.uint8)], small.client)


def test_a_server_that_has_run_holds_no_secret(small, encrypted):
    server = Server(small.program, small.keys, 1)
    server.run(encrypted)
    assert len(reachable(server)) > 100
    assert not leaks(server, small.client)


def test_a_service_that_has_run_holds_no_secret(small, encrypted):
    service = Service(small.program, 1)
    assert service.handle("/keys", small.keys)[0] == 200
    assert service.handle("/run", encrypted)[0] == 200
    assert any(isinstance(thing, seal.RelinKeys) for thing in reachable(service))
    assert not leaks(service, small.client)


def test_nothing_that_is_sent_contains_the_secret(small, encrypted, answered):
    for message in (small.keys, encrypted, answered):
        assert not leaks([message], small.client)
    assert small.client.secret()[messages.HEADER_BYTES :] not in small.keys + encrypted


def residues_in(client, message):
    public = client.public
    shape = public.inputs, 2, len(client.ring.primes), public.parameters.degree
    return messages.read_residues(memoryview(message)[messages.HEADER_BYTES :], shape, client.ring.primes, 2)


def test_the_same_image_is_never_encrypted_to_the_same_bytes(small):
    first, second = (residues_in(small.client, small.client.encrypt(small.images[:1])) for _ in range(2))
    assert (first == second).mean() < 1e-3
    channels = first[:, 1].reshape(len(first), -1)  # the random parts of one message differ too
    assert len({channel[:4].tobytes() for channel in channels}) == len(channels)


def write_encrypted(client, image, path):
    path.write_bytes(client.encrypt(image))


def test_forked_processes_do_not_share_randomness(small, tmp_path):
    context = multiprocessing.get_context("fork")
    paths = [tmp_path / name for name in "ab"]
    children = [context.Process(target=write_encrypted, args=(small.client, small.images[:1], path)) for path in paths]
    for child in children:
        child.start()
    for child in children:
        child.join()
    written = [*(path.read_bytes() for path in paths), small.client.encrypt(small.images[:1])]
    one, two, three = (residues_in(small.client, message) for message in written)
    assert max((one == two).mean(), (one == three).mean(), (two == three).mean()) < 1e-3


@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_another_key_reads_noise_and_says_so(parts, pictures, kind):
    made = parts(pictures(20), kind, ranks=(4, 4), num_classes=2)
    answer = made.server.run(made.client.encrypt(made.images[:2]))
    other = Client(made.public)
    other.keygen()
    with pytest.raises(MultilinearError, match="belong to other keys"):
        other.decrypt(answer)
    payload = answer[messages.HEADER_BYTES :]
    forged = messages.pack(messages.RESULTS, made.public, other.keys, 2, payload)
    with pytest.raises(MultilinearError, match="the decrypted result is noise: it was made with other keys"):
        other.decrypt(forged)
    assert np.abs(made.client.decrypt(answer) - made.logits[:2]).max() < 20 * made.public.error


def test_an_altered_answer_reads_as_noise_though_its_checksum_fits(small, answered):
    residues = bytearray(answered[messages.HEADER_BYTES :])
    residues[7 * 100 : 7 * 101] = bytes(7)
    altered = messages.pack(messages.RESULTS, small.public, small.client.keys, 3, bytes(residues))
    with pytest.raises(MultilinearError, match="noise"):
        small.client.decrypt(altered)


def bad_images(small, good):
    payload, owner = good[messages.HEADER_BYTES :], small.client.keys
    flipped = bytearray(good)
    flipped[-1] ^= 1
    too_large = messages.pack(messages.IMAGES, small.public, owner, 3, b"\xff" * len(payload))
    return {
        "altered": bytes(flipped),
        "truncated": good[:-1],
        "another program": good[:12] + hashlib.sha256(b"").digest() + good[44:],
        "too long": good + b"\0",
        "no message": b"GET / HTTP/1.1" + bytes(200),
        "0 bytes": b"",
        "other keys": messages.pack(messages.IMAGES, small.public, bytes(16), 3, payload),
        "images take": good[:60] + struct.pack("<I", 2**32 - 1) + good[64:],
        "no ciphertext": too_large,
        "got evaluation keys": small.keys,
    }


def test_a_server_refuses_what_is_bad_and_goes_on(small, encrypted, answered):
    for message, data in bad_images(small, encrypted).items():
        with pytest.raises(MultilinearError, match=message):
            small.server.run(data)
    assert small.server.run(encrypted) == answered


@pytest.mark.parametrize("processes", [1, 2])
def test_images_that_are_not_encrypted_are_refused(small, encrypted, answered, processes):
    server = Server(small.program, small.keys, processes)
    zeros = bytes(len(encrypted) - messages.HEADER_BYTES)
    with pytest.raises(MultilinearError):
        server.run(messages.pack(messages.IMAGES, small.public, small.client.keys, 3, zeros))
    assert server.run(encrypted) == answered


@pytest.mark.parametrize("processes", [1, 2])
def test_keys_without_the_rotations_are_refused(small, encrypted, processes):
    relin, galois = small.client._secret.evaluation_keys([1])
    payload = len(relin).to_bytes(8, "little") + relin + galois
    keys = messages.pack(messages.KEYS, small.public, small.client.keys, 0, payload)
    with pytest.raises(MultilinearError, match="rotation"):
        Server(small.program, keys, processes).run(encrypted)


def test_damaged_keys_are_refused_though_their_checksum_fits(small):
    payload = small.keys[messages.HEADER_BYTES :]
    split = int.from_bytes(payload[:8], "little")
    bad = [
        b"",
        payload[:4],
        payload[:8],
        payload[: 8 + split],
        payload[:-1],
        payload[8:],
        bytes(8) + payload[8:],
        b"\xff" * 8 + payload[8:],
        b"\xff" * len(payload),
        payload[:8] + payload[8 + split :] + payload[8 : 8 + split],
        payload[: 8 + split] + b"garbage",
        payload[:2000] + b"\xff" * 64 + payload[2064:],
    ]
    for one in bad:
        with pytest.raises(MultilinearError, match="evaluation keys"):
            Server(small.program, messages.pack(messages.KEYS, small.public, small.client.keys, 0, one), 1)


def test_damaged_secrets_are_refused(small):
    payload = small.client.secret()[messages.HEADER_BYTES :]
    for one in (b"", payload[:-1], payload[:100] + b"\xff" * 64 + payload[164:], b"\xff" * len(payload)):
        with pytest.raises(MultilinearError, match="not a secret key"):
            Client(small.public, messages.pack(messages.SECRET, small.public, small.client.keys, 0, one))


def test_a_secret_file_is_for_its_owner_and_never_overwritten(small, tmp_path):
    path = small.client.save_secret(tmp_path / "secret.key")
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    assert Client(small.public, before).keys == small.client.keys
    other = Client(small.public)
    other.keygen()
    with pytest.raises(MultilinearError, match="exists; a secret key is never overwritten"):
        other.save_secret(path)
    assert path.read_bytes() == before
    with pytest.raises(MultilinearError, match="could not write"):
        other.save_secret(tmp_path / "no" / "folder")


def test_a_client_without_keys_leaves_no_file(small, tmp_path):
    with pytest.raises(MultilinearError, match="no keys yet"):
        Client(small.public).save_secret(tmp_path / "secret.key")
    assert not (tmp_path / "secret.key").exists()
