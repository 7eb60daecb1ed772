"""The client's half: keys, encryption, decryption. It has the secret key, and no weights."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multilinear.encrypted import messages
from multilinear.encrypted.backend import Secret, ring
from multilinear.encrypted.engine import Progress
from multilinear.encrypted.plan import free_memory
from multilinear.encrypted.program import Program, Public
from multilinear.errors import MultilinearError

Array = NDArray[np.float64]
MESSAGE_BYTES = 1 << 30  # about how much `encrypt_parts` puts into one message, if there is memory for it
NOISE_LIMIT = 1e3  # times the predicted error; slots that hold nothing show what a result's noise is


class Client:
    """Encrypts images for a program and reads the results.

    >>> from multilinear.encrypted import Server, compile
    >>> from multilinear.models import create
    >>> net = create("monet_private_1", ranks=(4, 4), in_chans=1)
    >>> images = np.zeros((2, 28, 28, 1), np.uint8)
    >>> program = compile(net, images, mean=[0.5], std=[0.5])
    >>> client = Client(program.public)
    >>> server = Server(program, client.keygen())
    >>> client.decrypt(server.run(client.encrypt(images))).shape
    (2, 10)
    """

    def __init__(self, program: Program | Public, secret: bytes | None = None) -> None:
        self.public = program.public if isinstance(program, Program) else program
        self.ring = ring(self.public.parameters)
        self._secret: Secret | None = None
        self.keys = b""
        if secret is not None:
            message = messages.unpack(secret, messages.SECRET, self.public)
            self.keys, self._secret = message.keys, Secret(self.ring, bytes(message.payload))

    def keygen(self) -> bytes:
        """Make new keys; returns the evaluation keys, which are for the server."""
        self.keys = secrets.token_bytes(16)
        self._secret = Secret(self.ring)
        relin, galois = self._secret.evaluation_keys(self.public.packing.rotations())
        payload = len(relin).to_bytes(8, "little") + relin + galois
        return messages.pack(messages.KEYS, self.public, self.keys, 0, payload)

    def secret(self) -> bytes:
        """The secret key, to be kept. Whoever has it reads every image encrypted with it."""
        return messages.pack(messages.SECRET, self.public, self.keys, 0, self._key().to_bytes())

    def save_secret(self, path: str | Path) -> Path:
        """Write the secret key to a new file that only its owner can read."""
        path, secret = Path(path), self.secret()
        try:
            path.touch(mode=0o600, exist_ok=False)
            path.write_bytes(secret)
        except FileExistsError:
            raise MultilinearError(f"{path} exists; a secret key is never overwritten, choose another name") from None
        except OSError as error:
            raise MultilinearError(f"could not write {path}: {error}") from error
        return path

    def _key(self) -> Secret:
        if self._secret is None:
            raise MultilinearError("this client has no keys yet; call keygen() or give a secret key")
        return self._secret

    def encrypt(self, images: NDArray[np.uint8], progress: Progress | None = None) -> bytes:
        """Encrypt uint8 images (N, H, W, C); for many, `encrypt_parts` keeps messages small."""
        key, public = self._key(), self.public
        tokens = public.prepare(images)
        if not len(images):
            raise MultilinearError("there are no images to encrypt")
        parts = []
        size = public.packing.images
        for start in range(0, len(images), size):
            packed = public.packing.pack(tokens[start : start + size])
            for place in packed:
                for slots in place:
                    parts.append(messages.write_residues(key.encrypt(slots)))
                    if progress:
                        progress(1)
        return messages.pack(messages.IMAGES, public, self.keys, len(images), b"".join(parts))

    def encrypt_parts(self, images: NDArray[np.uint8], progress: Progress | None = None) -> Iterator[bytes]:
        """Encrypt any number of images as messages of about a gigabyte at most, one after the other."""
        room = min(MESSAGE_BYTES, free_memory() // 8)
        each = max(1, room // messages.batch_bytes(self.public)) * self.public.packing.images
        for start in range(0, len(images), each):
            yield self.encrypt(images[start : start + each], progress)

    def decrypt(self, data: bytes) -> Array:
        """The logits (N, classes) in a server's answer."""
        key, public = self._key(), self.public
        message = messages.unpack(data, messages.RESULTS, public, self.keys)
        packing, classes, degree = public.packing, len(public.labels), public.parameters.degree
        count = messages.batches(public, message.count)
        shape = count, packing.places, classes, 3, 1, degree
        residues = messages.read_residues(message.payload, shape, self.ring.primes[:1], 4)
        logits = []
        for i, batch in enumerate(residues):
            slots = np.array([[key.decrypt(one) for one in place] for place in batch])
            here = min(packing.images, message.count - i * packing.images)
            logits.append(self._read(slots * np.array(public.units)[:, None], here))
        return np.concatenate(logits)

    def _read(self, slots: Array, count: int) -> Array:
        """Mean over tokens. Slots that hold no token must be zero: where they are not, the key is a wrong one."""
        empty = self.public.packing.mask() == 0
        tokens = self.public.packing.grid[0] * self.public.packing.grid[1]
        limit = NOISE_LIMIT * max(self.public.error, 1e-6) * tokens**0.5
        if not np.abs(slots[..., empty]).max() <= limit:
            raise MultilinearError(
                "the decrypted result is noise: it was made with other keys, or altered, or its images were far beyond "
                "what the program was calibrated for"
            )
        logits: Array = self.public.packing.unpack(slots, count).mean((1, 2))
        return logits
