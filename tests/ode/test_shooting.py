"""Derivatives, joints and the least-squares fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilinear.ode.library import Library
from multilinear.ode.series import cut, make_series, natural_units
from multilinear.ode.shooting import Accuracy, Shooting
from multilinear.ode.subsets import best_subsets


def problem(seed=0, rows=12, log=False, inputs=False):
    generator = np.random.default_rng(seed)
    times = np.sort(generator.uniform(0, 3, rows))
    states = np.exp(generator.normal(size=(rows, 2)) * 0.3)
    states[generator.random((rows, 2)) < 0.2] = np.nan
    forced = np.sin(times)[:, None] if inputs else None
    units = natural_units([times], [states], None if forced is None else [forced])
    segments, _ = cut([make_series(times, states, forced, units)], log)
    library = Library(2, 2, int(inputs))
    return Shooting(segments, library, Accuracy(3, 2)), generator


@pytest.mark.parametrize(("log", "inputs"), [(False, False), (True, False), (False, True)])
def test_gradient_is_the_derivative_of_the_cost(log, inputs):
    shooting, generator = problem(log=log, inputs=inputs)
    states = np.exp(generator.normal(size=(len(shooting.segments.gaps), 2)) * 0.1)
    coefficients = generator.normal(size=(2, len(shooting.library))) * 0.2
    active = generator.random(coefficients.shape) < 0.7
    noise = np.array([0.3, 0.5])

    def cost(vector):
        moved = coefficients.copy()
        moved[active] = vector[states.size :]
        return shooting.evaluate(vector[: states.size].reshape(-1, 2), moved, active, noise, 0.5).cost

    vector = np.concatenate([states.reshape(-1), coefficients[active]])
    found = shooting.evaluate(states, coefficients, active, noise, 0.5).gradient
    for k in generator.choice(len(vector), 12, replace=False):
        step = np.zeros_like(vector)
        step[k] = 1e-6
        assert (cost(vector + step) - cost(vector - step)) / 2e-6 == pytest.approx(found[k], rel=1e-4, abs=1e-4)


def test_exact_data_bring_exact_coefficients():
    times = np.linspace(0, 2, 20)
    states = np.stack([np.exp(-times), np.exp(-2 * times)], axis=1)
    units = natural_units([times], [states], None)
    segments, starts = cut([make_series(times, states, None, units)])
    library = Library(2, 1)
    active = np.ones((2, 3), dtype=bool)
    begin = (states / units.states)[starts[0]]
    shooting = Shooting(segments, library, Accuracy(5, 1))
    noise = np.full(2, 1e-8)
    loose = shooting.fit(begin, np.zeros((2, 3)), active, noise, join=100.0, iterations=50)
    found = shooting.fit(loose.states, loose.coefficients, active, noise, iterations=50)
    law = units.to_data(found.coefficients, library.exponents)
    np.testing.assert_allclose(law, [[0, -1, 0], [0, 0, -2]], atol=1e-7)


def test_a_field_that_blows_up_has_infinite_cost_and_no_warning():
    shooting, _ = problem()
    wild = np.full((2, 6), 1e6)
    states = np.ones((len(shooting.segments.gaps), 2))
    assert shooting.evaluate(states, wild, wild > 0, np.ones(2), 1.0).cost == np.inf


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**31))
def test_slopes_are_derivatives_of_the_monomials(dim, degree, seed):
    generator = np.random.default_rng(seed)
    library = Library(dim, degree)
    coefficients = generator.normal(size=(dim, len(library)))
    x = generator.normal(size=dim)
    jacobian = (library.values(x[None]) @ library.slopes(coefficients))[0, dim:].reshape(dim, dim)
    for j in range(dim):
        step = np.zeros(dim)
        step[j] = 1e-6
        ahead, behind = (library.values((x + s)[None])[0] @ coefficients.T for s in (step, -step))
        np.testing.assert_allclose((ahead - behind) / 2e-6, jacobian[:, j], rtol=1e-4, atol=1e-4)


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=20)
def test_best_subsets_are_the_best_of_all(seed):
    generator = np.random.default_rng(seed)
    root = generator.normal(size=(5, 8))
    stiffness, target = root @ root.T + 0.1 * np.eye(5), generator.normal(size=5)
    for subset, gain in best_subsets(stiffness, target, 1):
        other = generator.choice(5, len(subset), replace=False)
        part = target[other]
        assert part @ np.linalg.solve(stiffness[np.ix_(other, other)], part) <= gain * (1 + 1e-6) + 1e-9
