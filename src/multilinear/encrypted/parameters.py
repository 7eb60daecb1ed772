"""The numbers behind the encryption: ring size, chain of primes, scales; and what 128-bit security allows."""

from dataclasses import dataclass

from multilinear.errors import MultilinearError

# Most bits of all primes together for 128-bit security with a ternary secret (classical attacks):
# Albrecht et al., Homomorphic Encryption Security Standard, 2018, table 1.
SECURE_BITS = {4096: 109, 8192: 218, 16384: 438, 32768: 881}
PRIME_BITS = 54  # = scale + two weights of 13 to 16 bits, so that a product of two rows is back at the scale
SCALES = (22, 24, 26, 28)  # bits: less, and the noise weighs more; more, and less is left for the weights
HALF_BITS = 27  # a residue is two halves, each exact in a float64 product of up to 2**26 in weights


@dataclass(frozen=True)
class Parameters:
    """A ring and its chain: one prime below, one for each product, and one for switching keys.

    >>> Parameters.for_depth(6)
    Parameters(degree=16384, depth=6, scale_bits=24)
    """

    degree: int  # N: ciphertexts are pairs of polynomials of this degree, with N / 2 slots
    depth: int  # products one after the other
    scale_bits: int = 24  # numbers are stored times two to this

    @classmethod
    def for_depth(cls, depth: int) -> "Parameters":
        """The smallest secure ring for a network of `depth` Mu-Layers."""
        bits = cls(0, depth).bits
        for degree, most in SECURE_BITS.items():
            if bits <= most and degree >= 8192:
                return cls(degree, depth)
        largest = max(SECURE_BITS.values())
        fitting = largest // PRIME_BITS - 2
        raise MultilinearError(
            f"{depth} Mu-Layers need {bits} bits of modulus; 128-bit security allows {largest} at the largest ring "
            f"(32768). At most {fitting} fit: use {fitting // 2} blocks or fewer"
        )

    @property
    def primes(self) -> int:
        """How many data primes a fresh ciphertext has."""
        return self.depth + 1

    @property
    def bits(self) -> int:
        return PRIME_BITS * (self.depth + 2)

    @property
    def scale(self) -> float:
        return 2.0**self.scale_bits

    @property
    def slots(self) -> int:
        return self.degree // 2

    def check(self) -> None:
        """Refuse parameters that the 128-bit table does not cover, wherever they came from."""
        most = SECURE_BITS.get(self.degree)
        if most is None:
            raise MultilinearError(f"ring size {self.degree} is not one of {', '.join(map(str, SECURE_BITS))}")
        if self.scale_bits not in SCALES:
            raise MultilinearError(f"a scale of {self.scale_bits} bits is not one of {', '.join(map(str, SCALES))}")
        if self.depth < 1 or self.bits > most:
            raise MultilinearError(
                f"{self.bits} bits of modulus at ring size {self.degree} are beyond 128-bit security, which allows "
                f"{most}; nothing is encrypted with them"
            )
