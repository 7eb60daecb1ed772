"""Discovery: exact laws, noisy and incomplete data, what a user may know beforehand, and plain answers to bad input."""

import math

import numpy as np
import pytest
import sympy
from scipy.integrate import solve_ivp

from multilinear.errors import MultilinearError
from multilinear.ode import Library, PolynomialODE, conserved, discover
from multilinear.ode.invariants import linear_relation
from multilinear.ode.library import term_names
from multilinear.ode.page import as_json, notes


def solve(law, times, start):
    return solve_ivp(law, (times[0], times[-1]), start, "DOP853", times, rtol=1e-11, atol=1e-12).y.T


def predator(_, s):
    return [1.5 * s[0] - s[0] * s[1], -3 * s[1] + s[0] * s[1]]


TIMES = np.linspace(0, 10, 80)
CLEAN = solve(predator, TIMES, [1.0, 1.0])
TRUTH = {"x": {"x": 1.5, "x*y": -1.0}, "y": {"y": -3.0, "x*y": 1.0}}


def terms(model):
    law = model.law
    texts = term_names(Library(len(law.names), law.polynomial.degree, len(law.inputs)), [*law.names, *law.inputs])
    return {
        name: {text: value for text, value in zip(texts, row, strict=True) if value}
        for name, row in zip(law.names, law.polynomial.coefficients, strict=True)
    }


def check(model, tolerance):
    found = terms(model)
    assert {name: set(row) for name, row in found.items()} == {name: set(row) for name, row in TRUTH.items()}
    for name, row in TRUTH.items():
        for term, value in row.items():
            assert found[name][term] == pytest.approx(value, rel=tolerance)


def test_exact_data():
    model = PolynomialODE(2).fit(TIMES, CLEAN)
    check(model, 1e-9)
    assert model.degree_found == 2
    assert model.verdict.explained and model.verdict.identified
    assert model.score() == pytest.approx(1)
    assert notes(model) == []


def test_noise_gaps_and_missing_values_and_intervals_that_cover():
    generator = np.random.default_rng(3)
    times = np.sort(generator.uniform(0, 10, 90))
    states = solve(predator, np.concatenate([[0], times]), [1.0, 1.0])[1:]
    noisy = states + 0.03 * states.std(0) * generator.normal(size=states.shape)
    noisy[generator.random(noisy.shape) < 0.3] = np.nan
    model = discover(times, noisy, degree=2)
    check(model, 0.05)
    for row in model.intervals:
        value = {(0, (1, 0)): 1.5, (0, (1, 1)): -1.0, (1, (0, 1)): -3.0, (1, (1, 1)): 1.0}[row.output, row.exponents]
        assert row.low - 0.02 < value < row.high + 0.02
    for name, column in zip("xy", states.T, strict=True):
        assert model.noise[name] == pytest.approx(0.03 * column.std(), rel=0.3)


def test_degree_is_found():
    times = np.linspace(0, 12, 90)
    states = solve(lambda _, s: [s[1], (1 - s[0] ** 2) * s[1] - s[0]], times, [2.0, 0.0])
    noisy = states + 0.01 * np.random.default_rng(0).normal(size=states.shape)
    model = PolynomialODE().fit(times, noisy)
    assert model.degree_found == 3
    assert set(terms(model)["y"]) == {"x", "y", "x**2*y"}


def test_several_trajectories():
    times = np.linspace(0, 3, 25)
    runs = [solve(predator, times, start) for start in ([1.0, 1.0], [3.0, 0.5])]
    check(PolynomialODE(2).fit([times, times], runs), 1e-6)


def test_known_inputs():
    times = np.linspace(0, 20, 200)
    u = np.sin(0.7 * times)
    states = solve(lambda t, s: [-0.5 * s[0] + 2 * np.interp(t, times, u)], times, [0.0])
    model = PolynomialODE(2, inputs=("u",)).fit(times, states, u)
    found = terms(model)["x"]
    assert set(found) == {"x", "u"}
    assert found["u"] == pytest.approx(2, rel=1e-2)
    assert model.predict(times, [0.0], u)[:, 0] == pytest.approx(states[:, 0], abs=0.02)
    with pytest.raises(MultilinearError, match="inputs"):
        model.predict(times, [0.0])


def test_fixed_and_forbidden_terms():
    model = PolynomialODE(2, fix={"x": {"x": 1.5}}, forbid={"y": ["1", "x", "y**2"]}).fit(TIMES, CLEAN)
    assert terms(model)["x"] == pytest.approx(TRUTH["x"], rel=1e-6)
    assert (0, (1, 0)) not in {(row.output, row.exponents) for row in model.intervals}
    with pytest.raises(MultilinearError, match="unknown state 'z'"):
        PolynomialODE(2, fix={"z": {"x": 1.0}}).fit(TIMES, CLEAN)
    with pytest.raises(MultilinearError, match="cannot read the term"):
        PolynomialODE(2, forbid={"x": ["sin(x)"]}).fit(TIMES, CLEAN)


def test_populations_with_relative_noise():
    generator = np.random.default_rng(0)
    measured = CLEAN * np.exp(0.1 * generator.normal(size=CLEAN.shape))
    model = PolynomialODE(2, populations=True, noise="log").fit(TIMES, measured)
    check(model, 0.1)
    assert model.noise["x"] == pytest.approx(0.1, rel=0.3)


def test_positions_without_velocities():
    times = np.linspace(0, 20, 120)
    x = np.exp(-0.05 * times) * np.cos(2 * times) + 0.005 * np.random.default_rng(0).normal(size=120)
    model = PolynomialODE(2, order=2).fit(times, x)
    found = terms(model)
    assert found["x"] == {"v_x": 1.0}
    assert found["v_x"]["x"] == pytest.approx(-4.0025, rel=0.01)
    assert found["v_x"]["v_x"] == pytest.approx(-0.1, rel=0.15)


def test_a_conserved_sum_is_found_and_said():
    times = np.linspace(0, 30, 50)
    states = solve(
        lambda _, s: [-0.5 * s[0] * s[1], 0.5 * s[0] * s[1] - 0.15 * s[1], 0.15 * s[1]], times, [0.97, 0.03, 0.0]
    )
    model = PolynomialODE(2, names=("S", "I", "R")).fit(times, states)
    found = terms(model)
    assert {name: set(row) for name, row in found.items()} == {"S": {"S*I"}, "I": {"S*I", "I"}, "R": {"I"}}
    assert any("S + I + R = 1" in note for note in notes(model))
    assert as_json(model)["conserved"] == ["S + I + R = 1"]


def test_energy_is_recognised():
    times = np.linspace(0, 5, 60)
    model = PolynomialODE(1, names=("x", "v")).fit(times, np.stack([np.cos(2 * times), -2 * np.sin(2 * times)], 1))
    (energy,) = conserved(model.law)
    x, v = sympy.symbols("x v")
    assert energy.coeff(x**2) / energy.coeff(v**2) == pytest.approx(4, rel=1e-4)


def test_white_noise_is_not_explained():
    generator = np.random.default_rng(1)
    model = PolynomialODE(2).fit(np.arange(40.0), generator.normal(size=(40, 2)))
    assert not model.verdict.explained
    assert "No polynomial system" in notes(model)[0]


def test_positive_systems_have_no_term_that_takes_from_nothing():
    generator = np.random.default_rng(0)
    times = np.linspace(0, 6, 40)
    states = np.stack([np.exp(-times), 1 - 0.9 * np.exp(-times)], 1) + 0.01 * generator.normal(size=(40, 2))
    model = PolynomialODE(2, positive=True, conserve=False).fit(times, states)
    for row in model.intervals:
        if row.exponents[row.output] == 0:
            assert row.estimate >= 0


def test_a_tolerance_brings_a_shorter_law():
    times = np.linspace(0, 10, 120)
    states = solve(lambda _, s: [s[1], -4 * s[0] - 0.02 * s[0] ** 3], times, [1.0, 0.0])
    noisy = states + 1e-4 * np.random.default_rng(0).normal(size=states.shape)
    assert "x**3" in terms(PolynomialODE(3).fit(times, noisy))["y"]
    short = PolynomialODE(3, tolerance=0.05).fit(times, noisy)
    assert set(terms(short)["y"]) == {"x"}


def test_what_a_model_gives():
    model = PolynomialODE(2).fit(TIMES, CLEAN)
    assert model.predict(TIMES, CLEAN[0])[-1] == pytest.approx(CLEAN[-1], rel=1e-5)
    assert model.predict(TIMES[20:]) == pytest.approx(CLEAN[20:], rel=1e-4)
    assert model.to_function()(0.0, np.array([1.0, 1.0])) == pytest.approx([0.5, -2.0])
    assert r"\frac{\mathrm{d}x}{\mathrm{d}t}" in model.to_latex()
    assert len(model.plot().axes) == 2
    assert model.score(TIMES, CLEAN) == pytest.approx(1)
    assert set(as_json(model)) >= {"equations", "intervals", "degree", "noise", "score"}
    assert sympy.sympify(as_json(model)["equations"]["x"]).free_symbols == set(sympy.symbols("x y"))


def test_a_solution_that_blows_up_says_when():
    times = np.linspace(0, 0.8, 30)
    model = PolynomialODE(2).fit(times, 1 / (1 - times))
    with pytest.raises(MultilinearError, match="blows up after t = 0.9"):
        model.predict(np.linspace(0, 2, 50), [1.0])


def test_a_state_of_pure_noise_is_not_explained_by_slack_between_segments():
    generator = np.random.default_rng(0)
    times = np.linspace(0, 5, 100)
    states = np.stack([np.cos(times), -np.sin(times), np.zeros(100)], 1) + 0.01 * generator.normal(size=(100, 3))
    states[:, 2] = generator.normal(size=100)
    model = PolynomialODE(1).fit(times, states)
    assert not model.verdict.explained
    assert "how z changes" in notes(model)[0]
    assert abs(model.score() - model.verdict.r2) < 0.2


def test_populations_stay_populations_where_a_sum_is_constant():
    times = np.linspace(0, 10, 60)
    share = 1 / (1 + 9 * np.exp(-times))
    pair = np.stack([share, 1 - share], 1)
    for model in (PolynomialODE(2, populations=True).fit(times, pair), PolynomialODE(2).fit(times, pair)):
        assert {name: set(row) for name, row in terms(model).items()} == {"x": {"x*y"}, "y": {"x*y"}}


@pytest.mark.parametrize("noise", [1e-4, 1e-2])
def test_a_constant_sum_is_found_under_noise(noise):
    times = np.linspace(0, 6, 40)
    pair = np.stack([np.exp(-times / 2), 1 - np.exp(-times / 2)], 1)
    pair += noise * np.random.default_rng(0).normal(size=pair.shape)
    assert linear_relation([pair]).weights == pytest.approx([1, 1])


def test_many_rows_each_state_at_its_own_times():
    times = np.linspace(0, 12, 2400)
    states = solve(predator, times, [1.0, 1.0])
    states[::2, 0] = states[1::2, 1] = np.nan
    check(PolynomialODE(2).fit(times, states), 1e-4)


def test_runs_of_very_different_length():
    long, short = np.linspace(0, 10, 400), np.linspace(0, 0.1, 3)
    runs = [solve(predator, t, [1.0, 1.0]) for t in (long, short)]
    check(PolynomialODE(2).fit([long, short], runs), 1e-4)


def test_inputs_that_jump_survive_many_rows():
    generator = np.random.default_rng(0)
    times = np.linspace(0, 60, 600)
    u = np.repeat(generator.choice([-1.0, 1.0], 60), 10)
    x = np.zeros(600)
    for k in range(599):
        step, middle = times[1] - times[0], (u[k] + u[k + 1]) / 2
        x[k + 1] = x[k] * np.exp(-0.5 * step) + 4 * middle * (1 - np.exp(-0.5 * step))
    found = terms(PolynomialODE(1, inputs=["u"]).fit(times, x, u))["x"]
    assert found["u"] == pytest.approx(2, rel=0.02) and found["x"] == pytest.approx(-0.5, rel=0.02)


def test_shapes_that_users_give():
    rows = [list(row) for row in CLEAN]
    check(PolynomialODE(2).fit(list(TIMES), rows), 1e-6)
    hidden = np.ma.masked_greater(CLEAN, 6.0)
    check(PolynomialODE(2).fit(TIMES, hidden), 1e-4)
    single = PolynomialODE(1).fit(TIMES, np.exp(-TIMES / 4))
    assert single.score(TIMES, np.exp(-TIMES / 4)) == pytest.approx(1)
    assert single.predict([3.0], [2.0]).tolist() == [[2.0]]
    with pytest.raises(MultilinearError, match="must be numbers"):
        single.predict(["a"], [1.0])


@pytest.mark.parametrize(
    ("times", "states", "message"),
    [
        (TIMES[:2], CLEAN[:2], "x has 2 values"),
        (TIMES, CLEAN[:-1], "79 rows of states need as many times"),
        (TIMES[::-1], CLEAN, "times must increase"),
        (np.repeat(TIMES[:40], 2), CLEAN, "is there twice"),
        (TIMES, np.column_stack([CLEAN[:, 0], np.ones(80)]), "y never changes"),
        (TIMES, np.where(CLEAN > 3, np.inf, CLEAN), "finite"),
        (TIMES, CLEAN * 1e200, "other units"),
        (np.where(TIMES > 5, np.nan, TIMES), CLEAN, "missing or not finite"),
        (TIMES, np.full((80, 2), np.nan), "x has 0 values"),
        (TIMES, [["a", "b"]] * 80, "must be numbers"),
        ([], [], "no trajectory has two rows"),
        (TIMES, CLEAN + 1e6, "subtract an offset"),
        (TIMES, np.random.default_rng(0).normal(size=(80, 40)), "too many; choose fewer states"),
    ],
)
def test_bad_input_is_named(times, states, message):
    with pytest.raises(MultilinearError, match=message):
        PolynomialODE(2).fit(times, states)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"degree": 0}, "degree must be from 1 to 8"),
        ({"order": 3}, "order must be 1 or 2"),
        ({"noise": "pink"}, "unknown noise"),
        ({"tolerance": 2.0}, "tolerance is a share"),
        ({"order": 2, "noise": "log"}, "order 2 is for positions"),
        ({"degree": "three"}, "degree must be"),
        ({"fix": {"x": 1.0}}, "fix is written"),
        ({"fix": {"x": {"x": float("nan")}}}, "finite number"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(MultilinearError, match=message):
        PolynomialODE(**options)


def test_unfitted_and_wrong_shapes():
    with pytest.raises(MultilinearError, match="nothing was fitted"):
        PolynomialODE().predict([0.0, 1.0], [1.0])
    model = PolynomialODE(2).fit(TIMES, CLEAN)
    with pytest.raises(MultilinearError, match="x0 must have 2 values"):
        model.predict(TIMES, [1.0])
    with pytest.raises(MultilinearError, match="increasing"):
        model.predict([1.0, 0.0], [1.0, 1.0])
    assert math.isfinite(model.verdict.belief)
