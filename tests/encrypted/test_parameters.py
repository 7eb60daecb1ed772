import pytest
import seal

from multilinear.encrypted import SECURE_BITS, Parameters
from multilinear.encrypted.backend import Ring
from multilinear.encrypted.parameters import PRIME_BITS
from multilinear.errors import MultilinearError

DEEPEST = {8192: 2, 16384: 6, 32768: 14}


@pytest.mark.parametrize("degree", [0, 1024, 2048, 4096, 8192, 16384, 32768, 65536])
def test_only_parameters_of_the_table_pass(degree):
    for depth in range(-1, 20):
        if 1 <= depth <= DEEPEST.get(degree, 0):
            Parameters(degree, depth).check()
            assert Parameters(degree, depth).bits <= SECURE_BITS[degree]
        else:
            with pytest.raises(MultilinearError, match="128-bit security|ring size"):
                Parameters(degree, depth).check()
            with pytest.raises(MultilinearError, match="128-bit security|ring size"):
                Ring(Parameters(degree, depth))


def test_a_program_gets_the_smallest_ring():
    for depth in range(1, 15):
        found = Parameters.for_depth(depth)
        assert found.degree == min(degree for degree, most in DEEPEST.items() if depth <= most)
        found.check()


@pytest.mark.parametrize("degree", DEEPEST)
def test_the_deepest_rings_work(degree):
    made = Ring(Parameters(degree, DEEPEST[degree]))
    assert made.fast and len(made.primes) == DEEPEST[degree] + 1
    assert all(prime.bit_length() == PRIME_BITS for prime in made.primes) and len(set(made.primes)) == len(made.primes)


@pytest.mark.parametrize("degree", DEEPEST)
def test_the_table_of_seal_agrees(degree):
    for depth, allowed in ((DEEPEST[degree], True), (DEEPEST[degree] + 1, False)):
        wanted = seal.EncryptionParameters(seal.scheme_type.ckks)
        wanted.set_poly_modulus_degree(degree)
        wanted.set_coeff_modulus(seal.CoeffModulus.Create(degree, [PRIME_BITS] * (depth + 2)))
        assert seal.SEALContext(wanted, True, seal.sec_level_type.tc128).parameters_set() is allowed
    assert seal.CoeffModulus.MaxBitCount(degree) == SECURE_BITS[degree]
