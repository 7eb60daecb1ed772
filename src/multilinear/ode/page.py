"""What is said of a law: plain sentences, JSON for machines, and a page with pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multilinear.ode import figures
from multilinear.ode.estimator import PolynomialODE
from multilinear.ode.law import Interval, Law, conserved
from multilinear.ode.library import Library, term_names
from multilinear.report import Report

NEARLY_CONSTANT = 0.03  # spread over mean below which a state's powers can hardly be told apart


def notes(model: PolynomialODE) -> list[str]:
    """What to know before believing the equations, most important first.

    >>> t = np.linspace(0, 3, 30)
    >>> notes(PolynomialODE(1).fit(t, np.exp(-t)))
    []
    """
    verdict, said = model.verdict, []
    rows = sum(len(t) for t in model.data[0])
    if not verdict.explained:
        said.append(
            f"No polynomial system up to degree {model.polynomial.degree} explains these data: the best says "
            f"{max(0.0, verdict.worst):.0%} of how {model.law.names[verdict.worst_state]} changes."
        )
    if not verdict.identified:
        said.append(
            f"These {rows} rows do not identify the structure: this law has {verdict.belief:.0%} of the belief among "
            "all that were tried. See the alternatives, say what you know (populations, fixed or forbidden terms), or "
            "measure more."
        )
    if verdict.explained and verdict.correlation > max(0.3, 2 / np.sqrt(rows)):
        said.append(
            f"Neighbouring residuals are alike (correlation {verdict.correlation:.2f}): the law misses something "
            "small, and its intervals are too narrow."
        )
    stacked = np.concatenate(model.data[1])
    share = np.nanstd(stacked, 0) / np.maximum(np.abs(np.nanmean(stacked, 0)), 1e-300)
    for name, value in zip(model.measured, share, strict=True):
        if value < NEARLY_CONSTANT:
            said.append(
                f"{name} changes by {value:.1%} of its size only, so its powers look alike: subtract an offset to tell "
                "them apart."
            )
    if model.relation is not None:
        said.append(
            f"{model.relation.text(model.measured)} in all rows, so one state follows from the others and many forms "
            "of the law are equivalent; this is the shortest that was found."
        )
    if model.short is not None:
        said.append("A much shorter law explains nearly as much: " + model.short.text().replace("\n", "; ") + ".")
    return said


def coefficient_rows(law: Law) -> list[tuple[str, str, Interval]]:
    """Equation, term and interval, in the order of the equations."""
    names = [*law.names, *law.inputs]
    library = Library(len(law.names), law.polynomial.degree, len(law.inputs))
    text = dict(zip(map(tuple, library.exponents.tolist()), term_names(library, names), strict=True))
    return [(law.names[row.output], text[row.exponents], row) for row in law.intervals]


def as_json(model: PolynomialODE) -> dict[str, Any]:
    """Everything that was found, as plain values.

    >>> t = np.linspace(0, 3, 30)
    >>> as_json(PolynomialODE(1).fit(t, np.exp(-t)))["degree"]
    1
    """
    intervals: dict[str, dict[str, list[float]]] = {name: {} for name in model.law.names}
    for equation, term, row in coefficient_rows(model.law):
        intervals[equation][term] = [row.low, row.high]
    score = model.score()
    return {
        "equations": _texts(model.law),
        "intervals": intervals,
        "degree": model.degree_found,
        "noise": model.noise,
        "noise_is_relative": model.found.noise_is_relative,
        "score": score if np.isfinite(score) else None,
        "r2": model.verdict.r2,
        "explained": model.verdict.explained,
        "identified": model.verdict.identified,
        "belief": model.verdict.belief,
        "start": dict(zip(model.law.names, map(float, model.starts[0]), strict=True)),
        "conserved": constants(model),
        "short": None if model.short is None else _texts(model.short),
        "alternatives": [
            {"equations": _texts(other.law), "difference": other.difference} for other in model.alternatives
        ],
        "notes": notes(model),
    }


def _texts(law: Law) -> dict[str, str]:
    return {name: str(right) for name, right in law.equations(6).items()}


def constants(model: PolynomialODE) -> list[str]:
    """What stays constant along every solution, as text."""
    if model.relation is not None:
        return [model.relation.text(model.measured)]
    if not model.verdict.explained:
        return []
    return [str(quantity) for quantity in conserved(model.law)]


def write_page(model: PolynomialODE, path: Path, title: str) -> Path:
    """Equations, intervals, pictures, forecast and alternatives on one page."""
    score = model.score()
    rows = sum(len(t) for t in model.data[0])
    page = Report(
        title, f"A law of {len(model.law.intervals)} terms, degree {model.degree_found}, R² {score:.4f}, {rows} rows."
    )
    for note in notes(model):
        page.text(note)
    page.heading("Equations")
    page.code(model.law.text())
    table = [[f"d{name}/dt", term, f"{row.estimate:.5g}", f"{row.low:.5g} to {row.high:.5g}"]
             for name, term, row in coefficient_rows(model.law)]  # fmt: skip
    page.table(["equation", "term", "coefficient", "95% interval"], table)
    kind = "a share of the state" if model.found.noise_is_relative else "standard deviation"
    page.table(["state", f"noise ({kind})"], [[name, f"{value:.3g}"] for name, value in model.noise.items()])
    if constants(model):
        page.text("Constant along every solution: " + "; ".join(constants(model)) + ".")
    page.heading("Fit")
    page.figure(figures.draw_fit(model), "Samples, and the law solved once from the fitted start.")
    page.figure(figures.draw_residuals(model), "Data minus solution; the band is two standard deviations of the noise.")
    _write_forecast(page, model)
    if len(model.law.names) > 1:
        page.heading("Phase portrait")
        page.figure(figures.draw_phase(model), "Samples and solution; arrows show where the law leads.")
    if model.alternatives:
        page.heading("Alternatives")
        page.text("Other laws that the data allow; a difference of 2 hardly tells them apart, 10 does.")
        page.table(["equations", "difference"], _alternatives(model))
    page.heading("For other programs")
    page.code(model.to_latex())
    return page.write(path)


def _write_forecast(page: Report, model: PolynomialODE) -> None:
    page.heading("Forecast")
    found = figures.forecast(model)
    if found is None:
        page.text("The law found without the last fifth of the rows could not be carried through them.")
        return
    curves, score, early = found
    page.figure(
        figures.draw_forecast(model, curves),
        f"The law found anew from the first four fifths (blue), carried on to the end (red): R² there {score:.3f}.",
    )
    page.code(early.law.text())


def _alternatives(model: PolynomialODE) -> Sequence[Sequence[object]]:
    return [[other.law.text().replace("\n", "; "), f"{other.difference:.1f}"] for other in model.alternatives]
