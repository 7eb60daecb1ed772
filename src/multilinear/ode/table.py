"""A CSV of measurements: which columns are time, states, inputs and runs; read with care, since files lie."""

import csv
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multilinear.errors import MultilinearError, check_choice
from multilinear.ode.polynomial import Floats

MOST_BYTES = 200_000_000
MOST_COLUMNS = 1000
MISSING = {"", "na", "n/a", "nan", "null", "none", "-", "?"}
TIMES = ("time", "year", "day", "days", "hour", "hours", "seconds", "date")
COMMENTS = ("#", "%")


@dataclass(frozen=True)
class Table:
    """Trajectories out of a file."""

    times: list[Floats]
    states: list[Floats]
    inputs: list[Floats] | None
    names: tuple[str, ...]
    input_names: tuple[str, ...]
    time_name: str


def read_table(
    path: Path,
    *,
    time: str | None = None,
    states: Sequence[str] = (),
    inputs: Sequence[str] = (),
    run: str | None = None,
) -> Table:
    """Read a CSV (or text with spaces, tabs or semicolons) with a header line; empty and NaN cells are missing values.

    Args:
        time: the time column; the one that is named like one, or the first, if not given.
        states: the state columns; all other columns of numbers if not given.
        run: a column that tells separate trajectories apart.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "data.csv"
    >>> _ = file.write_text("t,x,y\\n0,1,2\\n1,,3\\n")
    >>> table = read_table(file)
    >>> table.names, table.states[0].tolist()
    (('x', 'y'), [[1.0, 2.0], [nan, 3.0]])
    """
    header, rows = _cells(path)
    if time is None:
        time = next((name for name in header if _is_time(name)), header[0])
    check_choice("time column", time, header)
    given = [*states, *inputs, *([run] if run else [])]
    for name in given:
        check_choice("column", name, header)
    if len({time, *given}) < len(given) + 1:
        raise MultilinearError("time, states, inputs and runs must be different columns")
    if not states:
        states = [name for name in header if name not in (time, run, *inputs)]
    if not states:
        raise MultilinearError(f"{path} has only the column {time!r}; a law needs time and at least one state")
    columns = {name: _numbers(path, name, [row[header.index(name)] for row in rows]) for name in (*states, *inputs)}
    clock = _numbers(path, time, [row[header.index(time)] for row in rows])
    if np.isnan(clock).any():
        raise MultilinearError(f"{path}: the time {time!r} is missing in row {int(np.argmax(np.isnan(clock))) + 1}")
    groups = [row[header.index(run)] for row in rows] if run else [""] * len(rows)
    keys = list(dict.fromkeys(groups))
    picks = [np.array([group == key for group in groups]) for key in keys]
    x = np.stack([columns[name] for name in states], axis=1)
    u = np.stack([columns[name] for name in inputs], axis=1) if inputs else None
    return Table(
        [clock[pick] for pick in picks],
        [x[pick] for pick in picks],
        None if u is None else [u[pick] for pick in picks],
        tuple(symbol(name) for name in states),
        tuple(symbol(name) for name in inputs),
        time,
    )


def symbol(name: str) -> str:
    """A column's name as a variable's: letters, digits and _.

    >>> symbol("Hare (thousands)"), symbol("2nd")
    ('Hare_thousands', '_2nd')
    """
    text = re.sub(r"\W+", "_", unicodedata.normalize("NFKC", name)).strip("_") or "x"
    return f"_{text}" if text[0].isdigit() else text


def _is_time(name: str) -> bool:
    """By its first word, such as in `time (s)`; a capital T may be a temperature."""
    word = re.split(r"[\W_]", name)[0]
    return word == "t" or word.lower() in TIMES


def _cells(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows, comment lines left out, all of one length."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise MultilinearError(f"{path} is larger than {MOST_BYTES // 10**6} MB; give an excerpt")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise MultilinearError(f"no file at {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise MultilinearError(f"{path} is not readable text: {error.__class__.__name__}") from error
    if "\0" in text:
        raise MultilinearError(f"{path} is not a text file")
    numbered = [(k, line) for k, line in enumerate(text.splitlines(), 1) if line.strip()]
    numbered = [(k, line) for k, line in numbered if not line.lstrip().startswith(COMMENTS)]
    lines = [line for _, line in numbered]
    if len(lines) < 2:
        raise MultilinearError(f"{path} has {len(lines)} lines; a header and rows of numbers are needed")
    split = next((mark for mark in (",", ";", "\t") if mark in lines[0]), None)
    try:
        cells = list(csv.reader(lines, delimiter=split)) if split else [line.split() for line in lines]
    except csv.Error as error:
        raise MultilinearError(f"{path} is not a readable CSV: {error}") from error
    table = [[cell.strip() for cell in row] for row in cells]
    header = table[0]
    if all(_is_number(cell) for cell in header):
        raise MultilinearError(f"{path} has no header; name the columns in its first line, such as t,x,y")
    if len(header) > MOST_COLUMNS:
        raise MultilinearError(f"{path} has {len(header)} columns; {MOST_COLUMNS} at most")
    if not all(header):
        raise MultilinearError(f"{path}: column {header.index('') + 1} has no name; name it, or take it out")
    if len({symbol(name) for name in header}) != len(header):
        raise MultilinearError(f"{path}: two columns have the same name; each needs its own")
    for (number, _), row in zip(numbered[1:], table[1:], strict=False):  # a quoted cell may run over several lines
        if len(row) != len(header):
            raise MultilinearError(f"{path}: line {number} has {len(row)} cells, the header {len(header)}")
    return header, table[1:]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _numbers(path: Path, name: str, cells: Sequence[str]) -> Floats:
    values = np.full(len(cells), np.nan)
    for k, cell in enumerate(cells):
        if cell.lower() in MISSING:
            continue
        if not _is_number(cell) or "_" in cell:
            raise MultilinearError(
                f"{path}: {cell[:40]!r} in column {name!r} is not a number; give dates as numbers, gaps as NaN"
            )
        values[k] = float(cell)
    return values
