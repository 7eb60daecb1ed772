"""The commands that read equations: parse, call the library, print."""

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from multilinear.errors import MultilinearError

if TYPE_CHECKING:
    from multilinear.ode import PolynomialODE

console = Console()


def discover(
    data: Positional[Annotated[Path, arg(metavar="CSV", help="A table with a header line; empty cells are missing.")]],
    time: Annotated[str | None, arg(help="The time column; found by its name if not given.")] = None,
    states: Annotated[str, arg(help="State columns, such as x,y; all others if not given.")] = "",
    inputs: Annotated[str, arg(help="Columns of known inputs, such as u.")] = "",
    run: Annotated[str | None, arg(help="A column that tells separate runs apart.")] = None,
    degree: Annotated[str, arg(help="Highest degree of a term, or auto.")] = "auto",
    order: Annotated[int, arg(help="2 if states are positions whose velocities were not measured.")] = 1,
    noise: Annotated[str, arg(help="additive, relative, log (relative, positive states), or auto.")] = "auto",
    populations: Annotated[bool, arg(help="Each rate is proportional to its own state.")] = False,
    positive: Annotated[bool, arg(help="No term may push a state at zero below zero.")] = False,
    fix: Annotated[tuple[str, ...], arg(help="Known coefficients, such as x:y=1.")] = (),
    forbid: Annotated[tuple[str, ...], arg(help="Terms an equation must not have, such as x:x*y.")] = (),
    tolerance: Annotated[float, arg(help="Share of a state's spread that no term need explain.")] = 0.0,
    json: Annotated[bool, arg(help="Print JSON for machines.")] = False,
    report: Annotated[Path | None, arg(help="Write a page with pictures and a forecast.")] = None,
    plot: Annotated[Path | None, arg(help="Write a picture of the fit.")] = None,
) -> None:
    """Find the equations behind a table of measurements."""
    from multilinear.ode import figures, page
    from multilinear.ode.estimator import PolynomialODE
    from multilinear.ode.table import read_table

    table = read_table(data, time=time, states=_list(states), inputs=_list(inputs), run=run)
    if degree != "auto" and not degree.isdecimal():
        raise MultilinearError(f"--degree must be auto or a whole number, got {degree!r}")
    if plot is not None:
        figures.check_picture(plot)
    with Console(stderr=True).status("looking for a law") as status:
        model = PolynomialODE(
            "auto" if degree == "auto" else int(degree), names=table.names, inputs=table.input_names, order=order,
            noise=noise, populations=populations, positive=positive, fix=_fixed(fix), forbid=_forbidden(forbid),
            tolerance=tolerance, progress=status.update,
        )  # fmt: skip
        model.fit(table.times, table.states, table.inputs)
    if json:
        sys.stdout.write(json_module.dumps({**page.as_json(model), "time": table.time_name}, indent=2) + "\n")
    else:
        _print_law(model, table.time_name)
    with Console(stderr=True).status("writing the report, with a forecast of the last fifth"):
        if report is not None:
            page.write_page(model, report, f"The law behind {data.name}")
        if plot is not None:
            figures.save(model.plot(), plot)
    for path in (report, plot):
        if path is not None and not json:
            console.print(f"wrote {path}", highlight=False, markup=False)


def _print_law(model: "PolynomialODE", time: str) -> None:
    from multilinear.ode import page

    for note in page.notes(model):
        console.print(note, style="yellow", highlight=False, markup=False)
    console.print(model.law.text(), style="bold", highlight=False, soft_wrap=True)
    grid = Table("equation", "term", "coefficient", "95% interval", box=None, pad_edge=False)
    for name, term, row in page.coefficient_rows(model.law):
        grid.add_row(f"d{name}/dt", term, f"{row.estimate:.5g}", f"{row.low:.5g} to {row.high:.5g}")
    console.print(grid)
    if not model.verdict.identified:
        for other in model.alternatives:
            text = other.law.text().replace("\n", "; ")
            console.print(
                f"or {text} (difference {other.difference:.1f})", style="dim", highlight=False, soft_wrap=True
            )
    if page.constants(model):
        console.print("constant: " + "; ".join(page.constants(model)), highlight=False)
    kind = "relative noise" if model.found.noise_is_relative else "noise"
    spread = ", ".join(f"{name} {value:.3g}" for name, value in model.noise.items())
    console.print(f"R² {model.score():.4f}; {kind}: {spread}; time: {time}", highlight=False, markup=False)


def lotka_volterra(
    seeds: Annotated[tuple[int, ...], arg(help="Random starts.")] = tuple(range(20)),
    points: Annotated[int, arg(help="Samples in [0, 10].")] = 100,
    report: Annotated[Path | None, arg(metavar="OUT.html", help="Write a page with curves and equations.")] = None,
    json: Annotated[bool, arg(help="Print JSON for machines.")] = False,
) -> None:
    """Repeat the paper's experiment on the Lotka-Volterra system: learn it, print the equation, count the starts."""
    from rich.progress import track

    from multilinear.paper import lotka_volterra as experiment

    if not seeds or points < 4:
        raise MultilinearError(f"needs a seed and at least 4 points, got {len(seeds)} seeds and {points} points")
    found = [experiment.recover(seed, points) for seed in track(seeds, "starts", console=console, disable=json)]
    errors = [recovery.error for recovery in found]
    if report is not None:
        experiment.write_page(found, points, report)
    if json:
        equations = {name: str(value) for name, value in found[0].equations.items()}
        found_json = {"points": points, "seeds": list(seeds), "errors": errors, "equations": equations}
        sys.stdout.write(json_module.dumps(found_json, indent=2) + "\n")
        return
    for name, value in found[0].equations.items():
        console.print(f"d{name}/dt = {value}    [dim](the paper: {experiment.PUBLISHED[name]})[/dim]")
    counts = ", ".join(f"{sum(e <= limit for e in errors)} to {limit:g}" for limit in (1e-8, 1e-6))
    console.print(f"largest coefficient error {max(errors):.1e} over {len(errors)} starts ({counts})")


def node_comparison(
    seeds: Annotated[tuple[int, ...], arg(help="Random starts.")] = tuple(range(10)),
    published_only: Annotated[bool, arg(help="Only the paper's four models, none of matched size.")] = False,
    epochs: Annotated[int | None, arg(help="Fewer or more than the paper's 40 and 30.")] = None,
    report: Annotated[Path | None, arg(metavar="OUT.html", help="Write a page with curves and particles.")] = None,
    json: Annotated[bool, arg(help="Print JSON for machines.")] = False,
) -> None:
    """Repeat the paper's comparison of neural ODEs: NODE and PolyNODE, ANODE and PolyANODE, on the annulus."""
    from dataclasses import replace

    from rich.progress import track

    from multilinear.paper import node_comparison as experiment

    if not seeds or (epochs is not None and epochs < 1):
        raise MultilinearError(f"needs a seed and an epoch, got {len(seeds)} seeds and {epochs} epochs")
    models = experiment.PUBLISHED if published_only else experiment.variants()
    if epochs is not None:
        models = tuple(replace(model, epochs=epochs) for model in models)
    pairs = [(model, seed) for seed in seeds for model in models]
    runs = [experiment.train(*pair) for pair in track(pairs, "runs", console=console, disable=json)]
    if report is not None:
        experiment.write_page(runs, report)
    rows, claims = experiment.summary(runs), experiment.claims(runs)
    if json:
        sys.stdout.write(json_module.dumps({"models": rows, "claims": claims}, indent=2) + "\n")
        return
    grid = Table("model", "parameters", "finished", "loss", "accuracy", "evaluations", box=None, pad_edge=False)
    for row in rows:
        cells = [_spread(row[key]) for key in ("loss", "accuracy", "evaluations, last epoch")]
        grid.add_row(row["model"], str(row["parameters"]), f"{row['finished']} of {row['runs']}", *cells)
    console.print(grid)
    for model, claim, held, count in claims:
        console.print(f"{model}: {claim}: {held} of {count} seeds", highlight=False)


def _spread(pair: list[float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:.3g} ± {pair[1]:.2g}"


def _list(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _fixed(texts: tuple[str, ...]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for text in texts:
        left, equals, value = text.rpartition("=")
        equation, colon, term = left.partition(":")
        try:
            number = float(value)
        except ValueError:
            equals = ""
        if not equals or not colon:
            raise MultilinearError(f"--fix is written equation:term=value, such as x:y=1; got {text!r}")
        found.setdefault(equation.strip(), {})[term.strip()] = number
    return found


def _forbidden(texts: tuple[str, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in texts:
        equation, colon, term = text.partition(":")
        if not colon:
            raise MultilinearError(f"--forbid is written equation:term, such as x:x*y; got {text!r}")
        found.setdefault(equation.strip(), []).append(term.strip())
    return found
