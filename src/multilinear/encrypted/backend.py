"""The thin interface to SEAL (package `seal-python`): keys, ciphertexts as arrays of residues, and four operations.

Ciphertexts live as residues (parts, primes, degree) in NTT form. SEAL writes an uncompressed ciphertext as a header of
fixed length and then these residues, so going back and forth is a copy. A self-test at start-up checks that this is so.
"""

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multilinear.encrypted import residues as exact
from multilinear.encrypted.parameters import PRIME_BITS, Parameters
from multilinear.encrypted.residues import Residues
from multilinear.errors import MultilinearError

Array = NDArray[np.float64]


def _seal() -> Any:
    try:
        return importlib.import_module("seal")
    except ImportError:
        raise MultilinearError("encryption needs SEAL: pip install 'multilinear[encrypted]'") from None


@lru_cache(maxsize=2)
def ring(parameters: Parameters) -> "Ring":
    """The ring of these parameters, made and tested once."""
    return Ring(parameters)


class Ring:
    """A context of SEAL, and its ciphertexts as residues.

    >>> made = ring(Parameters(8192, 2))
    >>> len(made.primes), made.fast
    (3, True)
    """

    def __init__(self, parameters: Parameters) -> None:
        parameters.check()
        seal = _seal()
        self.parameters, self.seal, self.scale = parameters, seal, parameters.scale
        wanted = seal.EncryptionParameters(seal.scheme_type.ckks)
        wanted.set_poly_modulus_degree(parameters.degree)
        chain = seal.CoeffModulus.Create(parameters.degree, [PRIME_BITS] * (parameters.depth + 2))
        wanted.set_coeff_modulus(chain)
        self.context = seal.SEALContext(wanted, True, seal.sec_level_type.tc128)
        if not self.context.parameters_set():  # SEAL has its own table
            raise MultilinearError(f"SEAL refuses these parameters: {self.context.parameter_error_message()}")
        self.primes = [int(prime.value()) for prime in chain[:-1]]
        self.evaluator = seal.Evaluator(self.context)
        self.encoder = seal.CKKSEncoder(self.context)
        self._headers: dict[tuple[int, int], bytes] = {}  # of ciphertexts, by parts and primes
        self._plain_headers: dict[int, bytes] = {}  # of plaintexts, by primes
        self.fast = self._self_test()

    def encode(self, values: Array) -> Residues:
        """Residues (primes, degree) of a plaintext with these slots, at the scale."""
        data = self.encoder.encode(np.ascontiguousarray(values, np.float64), self.scale).to_bytes()
        count = len(self.primes) * self.parameters.degree
        return np.frombuffer(data[len(data) - 8 * count :], np.uint64).reshape(len(self.primes), -1)

    def decode(self, residues: Residues) -> Array:
        """The slots of a plaintext (primes, degree) in units of the scale."""
        plain = self.seal.Plaintext()
        plain.load_bytes(self.context, self._plain_headers[len(residues)] + np.ascontiguousarray(residues).tobytes())
        plain.scale(self.scale)
        return np.asarray(self.encoder.decode(plain), np.float64)

    def residues(self, ciphertext: Any) -> Residues:
        """The residues (parts, primes, degree) of a ciphertext."""
        data: bytes = ciphertext.to_string()
        shape = ciphertext.size(), ciphertext.coeff_modulus_size(), self.parameters.degree
        return np.frombuffer(data[len(data) - 8 * int(np.prod(shape)) :], np.uint64).reshape(shape)

    def ciphertext(self, residues: Residues) -> Any:
        """The ciphertext with these residues; SEAL checks that they are in range."""
        parts, primes, _ = residues.shape
        made = self.seal.Ciphertext()
        made.load_bytes(self.context, self._headers[parts, primes] + residues.tobytes())
        return made

    def _self_test(self) -> bool:
        """Learn the headers with a key that is thrown away, and whether products on residues are exact.

        Raises where SEAL stores ciphertexts otherwise; returns False where only the fast product fails.
        """
        seal, slots = self.seal, self.parameters.slots
        generator = seal.KeyGenerator(self.context)
        encryptor = seal.Encryptor(self.context, generator.secret_key())
        decryptor = seal.Decryptor(self.context, generator.secret_key())
        values = np.random.default_rng(0).uniform(-1, 1, (2, slots))
        pair = [encryptor.encrypt_symmetric(self.encoder.encode(row, self.scale)) for row in values]
        number = self.encoder.encode(values[0], self.scale)
        for primes in range(len(self.primes), 0, -1):
            data = number.to_bytes()
            self._plain_headers[primes] = data[: len(data) - 8 * primes * self.parameters.degree]
            kinds = [pair[0]] + ([self.evaluator.multiply(*pair)] if primes > 1 else [])
            for ciphertext in kinds:
                data = ciphertext.to_string()
                body = 8 * ciphertext.size() * primes * self.parameters.degree
                self._headers[ciphertext.size(), primes] = data[: len(data) - body]
                self._check_layout(ciphertext)
            if primes > 1:
                third = self.evaluator.rescale_to_next(kinds[1])
                if primes == 2:
                    data = third.to_string()
                    self._headers[3, 1] = data[: len(data) - 24 * self.parameters.degree]
                for each in (*pair, number):
                    self.evaluator.mod_switch_to_next_inplace(each)
        weights = np.array([[8191.0, -8190.0]])
        stacked = np.concatenate([self.residues(ciphertext).reshape(1, -1) for ciphertext in pair])
        product = exact.multiply(weights, stacked, self.primes[0])
        whole = weights[0].astype(int).tolist()
        expected = [(whole[0] * int(a) + whole[1] * int(b)) % self.primes[0] for a, b in stacked[:, :64].T]
        plain = seal.Plaintext()
        decryptor.decrypt(self.ciphertext(product.reshape(2, 1, -1)), plain)
        close = np.abs(self.encoder.decode(plain) - weights[0] @ values).max() < 8191 * 1e-3
        return bool(close and product[0, :64].tolist() == expected)

    def _check_layout(self, ciphertext: Any) -> None:
        found = self.residues(ciphertext)
        same = np.array_equal(self.residues(self.ciphertext(found)), found)
        below = all((found[:, i] < prime).all() for i, prime in enumerate(self.primes[: found.shape[1]]))
        if not same or not below:
            raise MultilinearError(
                "this release of seal-python stores ciphertexts in another form; pip install 'seal-python==4.4.0'"
            )


class Secret:
    """A secret key: makes evaluation keys, encrypts and decrypts. Only a client has one."""

    def __init__(self, made: Ring, key: bytes | None = None) -> None:
        seal = made.seal
        self.ring = made
        try:
            self.key = (
                seal.KeyGenerator(made.context).secret_key() if key is None else made.context.from_secret_str(key)
            )
        except Exception as error:
            raise MultilinearError(f"not a secret key for this program: {error}") from error
        self.encryptor = seal.Encryptor(made.context, self.key)
        self.decryptor = seal.Decryptor(made.context, self.key)

    def to_bytes(self) -> bytes:
        return bytes(self.key.to_string())

    def evaluation_keys(self, rotations: list[int]) -> tuple[bytes, bytes]:
        """Keys to bring products back to two parts, and to rotate (empty if nothing rotates)."""
        generator = self.ring.seal.KeyGenerator(self.ring.context, self.key)
        relin = bytes(generator.create_relin_keys().to_string())
        if not rotations:
            return relin, b""
        galois = self.ring.seal.GaloisKeys()
        generator.create_galois_keys(rotations, galois)
        return relin, bytes(galois.to_string())

    def encrypt(self, values: Array) -> Residues:
        """Fresh residues (2, primes, degree) of these slots."""
        plain = self.ring.encoder.encode(np.ascontiguousarray(values), self.ring.scale)
        return self.ring.residues(self.encryptor.encrypt_symmetric(plain))

    def decrypt(self, residues: Residues) -> Array:
        """The slots of a ciphertext in units of the scale."""
        plain = self.ring.seal.Plaintext()
        self.decryptor.decrypt(self.ring.ciphertext(residues), plain)
        plain.scale(self.ring.scale)  # the header's own is that of the self-test
        return np.asarray(self.ring.encoder.decode(plain), np.float64)


class EvaluationKeys:
    """What a server holds: enough to compute, not to read.

    SEAL refuses results that are not encrypted at all, such as products of two constants. Networks have those: channels
    that died in training, borders. They are computed on their slots, which are no secret.
    """

    def __init__(self, made: Ring, relin: bytes, galois: bytes, rotations: list[int]) -> None:
        self.ring = made
        slots, twice = made.parameters.slots, 2 * made.parameters.degree
        try:
            self.relin = made.context.from_relin_str(relin)
            self.galois = made.context.from_galois_str(galois) if galois else None
            complete = self.relin.has_key(2) and all(
                self.galois is not None and self.galois.has_key(pow(3, steps % slots, twice)) for steps in rotations
            )
        except Exception as error:
            raise MultilinearError(f"these evaluation keys are damaged or of another program: {error}") from error
        if not complete:
            raise MultilinearError(
                "these evaluation keys lack a rotation that this program needs; make them with keygen"
            )

    def rotate(self, residues: Residues, steps: int) -> Residues:
        """Move the slots; positive steps towards lower ones."""
        ring = self.ring

        def encrypted() -> Residues:
            return ring.residues(ring.evaluator.rotate_vector(ring.ciphertext(residues), steps, self.galois))

        def constant() -> Residues:
            return self._constant(np.roll(ring.decode(residues[0]), -steps), residues.shape)

        return _unless_transparent(encrypted, constant)

    def product(self, first: Residues, second: Residues, finish: bool = True) -> Residues:
        """Multiply, bring back to two parts, and drop one prime; or leave three parts and all primes."""
        ring, evaluator = self.ring, self.ring.evaluator
        primes, degree = first.shape[1:]

        def encrypted() -> Residues:
            made = evaluator.multiply(ring.ciphertext(first), ring.ciphertext(second))
            if finish:
                evaluator.relinearize_inplace(made, self.relin)
                evaluator.rescale_to_next_inplace(made)
            return ring.residues(made)

        def constant() -> Residues:
            values = ring.decode(first[0]) * ring.decode(second[0]) * ring.scale
            if finish:
                return self._constant(values / ring.primes[primes - 1], (2, primes - 1, degree))
            return self._constant(values, (3, primes, degree))

        return _unless_transparent(encrypted, constant)

    def rescale(self, residues: Residues) -> Residues:
        """Drop one prime, and divide by it."""
        ring = self.ring
        parts, primes, degree = residues.shape

        def encrypted() -> Residues:
            return ring.residues(ring.evaluator.rescale_to_next(ring.ciphertext(residues)))

        def constant() -> Residues:
            return self._constant(ring.decode(residues[0]) / ring.primes[primes - 1], (parts, primes - 1, degree))

        return _unless_transparent(encrypted, constant)

    def _constant(self, values: Array, shape: tuple[int, ...]) -> Residues:
        """Residues of this shape that hold `values` (in units of the scale) in the clear."""
        found = np.zeros(shape, np.uint64)
        found[0] = self.ring.encode(values)[: shape[1]]
        return found


def _unless_transparent(encrypted: Callable[[], Residues], constant: Callable[[], Residues]) -> Residues:
    try:
        return encrypted()
    except (RuntimeError, ValueError) as error:
        if "transparent" not in str(error):
            raise
        return constant()
