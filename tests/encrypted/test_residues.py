import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilinear.encrypted.backend import Secret, ring
from multilinear.encrypted.parameters import Parameters
from multilinear.encrypted.residues import LARGEST_ROW, add, check_rows, multiply, multiply_plainly
from multilinear.errors import MultilinearError

RING = ring(Parameters(8192, 2))
PRIMES = [*RING.primes, 2**54 - 33, 2**54 - 243]
MOST = 2**14 - 1


def by_python(weights, residues, prime):
    rows = [[int(weight) for weight in row] for row in weights]
    columns = [[int(value) for value in column] for column in residues.T]
    return [[sum(w * x for w, x in zip(row, column, strict=True)) % prime for column in columns] for row in rows]


@st.composite
def problems(draw):
    prime = draw(st.sampled_from(PRIMES))
    rows, inputs, columns = draw(st.integers(1, 5)), draw(st.integers(1, 7)), draw(st.integers(1, 5))
    weight = st.integers(-MOST, MOST) | st.sampled_from([-MOST, 0, 1, MOST])
    residue = st.integers(0, prime - 1) | st.sampled_from([0, 1, 2**27 - 1, prime // 2, prime - 1])
    weights = [draw(st.lists(weight, min_size=inputs, max_size=inputs)) for _ in range(rows)]
    residues = [draw(st.lists(residue, min_size=columns, max_size=columns)) for _ in range(inputs)]
    return np.array(weights, np.float64), np.array(residues, np.uint64), prime


@given(problems())
@settings(deadline=None, max_examples=150)
def test_products_are_those_of_whole_numbers(problem):
    weights, residues, prime = problem
    expected = by_python(weights, residues, prime)
    assert multiply(weights, residues, prime).tolist() == expected
    assert multiply_plainly(weights, residues, prime).tolist() == expected


@pytest.mark.parametrize("prime", RING.primes)
@pytest.mark.parametrize("signs", ["plus", "minus", "mixed"])
def test_the_longest_rows_of_the_largest_numbers_are_exact(prime, signs):
    inputs = LARGEST_ROW // MOST
    weights = np.full((1, inputs), float(MOST)) * (-1 if signs == "minus" else 1)
    if signs == "mixed":
        weights[:, ::2] *= -1
    check_rows(weights)
    values = [prime - 1, prime - 2, 2**27 - 1, 2**53 - 1, 0]
    residues = np.repeat(np.array([values], np.uint64), inputs, 0)
    assert multiply(weights, residues, prime).tolist() == by_python(weights, residues, prime)


def test_many_rows_and_random_residues(uniform):
    prime = RING.primes[1]
    weights = uniform.integers(-MOST, MOST, (70, 40), endpoint=True).astype(np.float64)
    residues = uniform.integers(0, prime, (40, 30), dtype=np.uint64)
    found = multiply(weights, residues, prime)
    assert found.dtype == np.uint64 and (found < prime).all()
    assert np.array_equal(found, multiply_plainly(weights, residues, prime))


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_sums_are_those_of_whole_numbers(data):
    prime = data.draw(st.sampled_from(PRIMES))
    residue = st.integers(0, prime - 1) | st.sampled_from([0, prime - 1])
    pairs = data.draw(st.lists(st.tuples(residue, residue), min_size=1, max_size=6))
    first, second = np.array(pairs, np.uint64).T
    assert add(first, second, prime).tolist() == [(a + b) % prime for a, b in pairs]


@pytest.mark.parametrize("row", [[0.5], [LARGEST_ROW + 1.0], [LARGEST_ROW, -1.0], [np.nan], [np.inf], [-(2.0**60)]])
def test_rows_that_would_not_be_exact_are_refused(row):
    with pytest.raises(MultilinearError, match="too large for exact products"):
        check_rows(np.array([[1.0] * len(row), row]))


def test_rows_up_to_the_limit_pass():
    check_rows(np.array([[LARGEST_ROW - 1.0, -1.0]]))
    check_rows(np.zeros((0, 3)))


def test_a_linear_map_is_the_same_as_by_seal(uniform):
    secret, evaluator = Secret(RING), RING.evaluator
    values = uniform.uniform(-3, 3, (4, RING.parameters.slots))
    weights = np.array([[MOST, -MOST, 1, -1], [-4321, 17, 16000, 2]], np.float64)
    fresh = np.stack([secret.encrypt(row) for row in values])  # (inputs, parts, primes, degree)
    for row in weights:
        terms = [
            evaluator.multiply_plain(RING.ciphertext(one), RING.encoder.encode(int(weight)))
            for one, weight in zip(fresh, row, strict=True)
        ]
        by_seal = RING.residues(evaluator.add_many(terms))
        ours = np.stack(
            [
                multiply(row[None], fresh[:, :, i].reshape(len(fresh), -1), prime)[0].reshape(2, -1)
                for i, prime in enumerate(RING.primes)
            ],
            1,
        )
        assert np.array_equal(ours, by_seal)
        assert np.array_equal(secret.decrypt(ours), secret.decrypt(by_seal))
        assert np.abs(secret.decrypt(ours) - row @ values).max() < 16
