"""Tables from files: formats, bad ones, and random ones, which must never end in a traceback."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multilinear.cli import main
from multilinear.errors import MultilinearError
from multilinear.ode import PolynomialODE
from multilinear.ode.table import read_table


def write(folder, text):
    path = Path(folder) / "data.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("mark", [",", ";", "\t", "  "])
def test_separators_comments_and_missing_values(tmp_path, mark):
    rows = [["# from a lab"], ["time", "x", "y"], ["0", "1", "2"], ["1", "nan", "3"], ["2", "NA", "4e0"]]
    table = read_table(write(tmp_path, "\n".join(mark.join(row) for row in rows)))
    assert table.names == ("x", "y")
    assert table.times[0].tolist() == [0, 1, 2]
    assert np.isnan(table.states[0][1:, 0]).all() and table.states[0][:, 1].tolist() == [2, 3, 4]


def test_time_is_found_by_name_and_runs_are_told_apart(tmp_path):
    path = write(tmp_path, "run,x,Year\na,1,0\na,2,1\nb,3,0\nb,4,1\n")
    table = read_table(path, run="run")
    assert table.time_name == "Year"
    assert [x.tolist() for x in table.states] == [[[1], [2]], [[3], [4]]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 lines"),
        ("t,x\n", "1 lines"),
        ("t\n1\n2\n", "has only the column"),
        ("1,2\n3,4\n", "no header"),
        ("t,x\n0,1\n1\n", "line 3 has 1 cells"),
        ("t,x\n0,one\n", "'one' in column 'x' is not a number"),
        ("t,x\n0,1_000\n", "is not a number"),
        ("t,x\n,1\n", "time 't' is missing in row 1"),
        ("t,x,x\n0,1,2\n", "same name"),
        ("t,,x\n0,1,2\n", "column 2 has no name"),
        ("# a comment\n\nt,x\n0,1\n1\n", "line 5 has 1 cells"),
        ("t,x\n2020-01-01,1\n", "give dates as numbers"),
        (b"t,x\n\xff\xfe,1\n", "not readable text"),
        (b"t,x\n0,\0\n", "not a text file"),
    ],
)
def test_bad_tables_are_named(tmp_path, text, message):
    with pytest.raises(MultilinearError, match=message):
        read_table(write(tmp_path, text))


def test_a_state_called_s_is_not_time(tmp_path):
    assert read_table(write(tmp_path, "x,time (s),T\n0,1,2\n1,2,3\n")).time_name == "time (s)"
    path = write(tmp_path, "week,S,I\n0,0.9,0.1\n1,0.8,0.2\n")
    assert read_table(path).time_name == "week"
    with pytest.raises(MultilinearError, match="different columns"):
        read_table(path, states=["week", "S"])


def test_unknown_columns_and_missing_files(tmp_path):
    path = write(tmp_path, "t,x\n0,1\n")
    with pytest.raises(MultilinearError, match="unknown column 'z'"):
        read_table(path, states=["z"])
    with pytest.raises(MultilinearError, match="no file at"):
        read_table(tmp_path / "none.csv")


def decay_file(folder):
    t = np.linspace(0, 4, 30)
    rows = "\n".join(f"{a:.6f},{b:.9f}" for a, b in zip(t, 3 * np.exp(-0.7 * t), strict=True))
    return write(folder, f"t,conc (mM)\n{rows}\n")


def test_the_command_prints_equations_and_writes_files(tmp_path, capsys):
    path = decay_file(tmp_path)
    main(["discover", str(path), "--report", str(tmp_path / "r.html"), "--plot", str(tmp_path / "p.png")])
    out = capsys.readouterr().out
    assert "dconc_mM/dt = -0.7*conc_mM" in out
    assert "<h2>Forecast</h2>" in (tmp_path / "r.html").read_text()
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_the_command_prints_json(tmp_path, capsys):
    main(["discover", str(decay_file(tmp_path)), "--json", "--degree", "2"])
    found = json.loads(capsys.readouterr().out)
    assert found["equations"] == {"conc_mM": "-0.7*conc_mM"}
    assert found["degree"] == 1 and found["score"] > 0.999
    low, high = found["intervals"]["conc_mM"]["conc_mM"]
    assert low < -0.7 < high


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--degree", "two"], "--degree must be auto"),
        (["--fix", "x=1"], "--fix is written"),
        (["--forbid", "x"], "--forbid is written"),
        (["--time", "clock"], "unknown time column"),
        (["--noise", "pink"], "unknown noise"),
        (["--states", "x [/b]"], "unknown column 'x [/b]'"),
        (["--plot", "fit.xyz"], "a picture's name must end in"),
        (["--plot", "no/where.png"], "no folder no"),
    ],
)
def test_bad_options_end_with_one_line(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        main(["discover", str(decay_file(tmp_path)), *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def attempt(folder, text):
    """The whole way of a file, with a small library; True if it gave a law, False if one clear line."""
    message = ""
    try:
        table = read_table(write(folder, text))
        PolynomialODE(1, names=table.names).fit(table.times, table.states)
    except MultilinearError as error:
        message = str(error)
    assert "\n" not in message and len(message) < 400
    return not message


@given(st.text(max_size=200) | st.binary(max_size=200))
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_gives_a_law_or_one_line(tmp_path, text):
    attempt(tmp_path, text)


def fuzzed(generator):
    """A table that was nearly good: numbers of all sizes, gaps, repeats, words, odd separators."""
    columns = generator.randint(1, 4)
    rows = generator.randint(0, 7) if generator.random() < 0.95 else generator.randint(8, 14)  # long ones take long
    cells = ["", "nan", "1", "0", "-1", "1e308", "-1e-300", "inf", "x", "1,5", "1e99", "0x10", "\u0663", '"', "7 8"]
    mark = generator.choice([",", ",", ",", ";", "\t", " "])
    lines = [mark.join(generator.choice(["t", "x", "y", "z", "time", "", "a b", "1"]) for _ in range(columns))]
    if generator.random() < 0.7:
        lines = [mark.join(["t", "x", "y", "z"][:columns])]
    for k in range(rows):
        row = [str(k if generator.random() < 0.95 else generator.choice(cells))]
        for _ in range(columns - 1):
            usual = f"{generator.gauss(0, 1):.3f}" if generator.random() < 0.5 else f"{2.0**-k:.6f}"
            row.append(usual if generator.random() < 0.85 else generator.choice(cells))
        lines.append(mark.join(row if generator.random() < 0.98 else row[:-1]))
    return "\n".join(lines)


def run_fuzz(folder, count, seed):
    generator = random.Random(seed)
    return sum(attempt(folder, fuzzed(generator)) for _ in range(count))


def test_fuzzed_tables(tmp_path):
    assert 0 < run_fuzz(tmp_path, 200, 0) < 200


@pytest.mark.slow
def test_ten_thousand_fuzzed_tables(tmp_path):
    assert run_fuzz(tmp_path, 10_000, 1) > 100
