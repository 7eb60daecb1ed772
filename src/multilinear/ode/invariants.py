"""Sums of states that stay constant (S + I + R = 1): found in the data, and used, since they make forms equivalent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from multilinear.ode.law import Law
from multilinear.ode.library import Library, term_names
from multilinear.ode.polynomial import Floats

NOISY = 1.3  # how far above the noise between neighbouring rows a constant sum may scatter
CLEAN = 1e-6  # how far a constant sum of exact data may scatter, as a share of its parts
SMALL = 0.1  # noise above this share of a sum's parts proves nothing


@dataclass(frozen=True)
class Relation:
    """weights . x = constant."""

    weights: Floats
    constant: float

    def members(self) -> list[int]:
        return [int(j) for j in np.flatnonzero(self.weights)]

    def text(self, names: Sequence[str]) -> str:
        """
        >>> Relation(np.array([1.0, 1.0, 0.0]), 1.0).text(["S", "I", "R"])
        'S + I = 1'
        """
        parts: list[str] = []
        for j in self.members():
            weight = self.weights[j]
            size = "" if abs(weight) == 1 else f"{abs(weight):.4g}*"
            sign = ("-" if weight < 0 else "") if not parts else (" - " if weight < 0 else " + ")
            parts.append(f"{sign}{size}{names[j]}")
        return "".join(parts) + f" = {self.constant:.4g}"


def linear_relation(states: Sequence[Floats]) -> Relation | None:
    """The combination of states that varies least, if it varies no more than noise would.

    >>> t = np.linspace(0, 5, 30)
    >>> linear_relation([np.stack([np.exp(-t), 1 - np.exp(-t)], axis=1)]).weights.tolist()
    [1.0, 1.0]
    """
    raw = np.concatenate(states)
    complete = raw[np.isfinite(raw).all(1)]
    if raw.shape[1] < 2 or len(complete) < 8:
        return None
    spread = complete.std(0)
    if (spread <= 0).any():
        return None
    standard = (complete - complete.mean(0)) / spread
    weights = np.linalg.svd(standard, full_matrices=False)[2][-1] / spread
    share = np.abs(weights) * spread
    weights = np.where(share > 0.05 * share.max(), weights, 0.0)
    if (weights != 0).sum() < 2:
        return None
    weights = _tidy(weights)
    sums = complete @ weights
    parts = float((np.abs(weights) * spread).max())
    rough = float(np.sqrt(np.mean(np.diff(sums) ** 2) / 2))  # what the scatter would be if it were all noise
    if float(sums.std()) > max(NOISY * rough, CLEAN * parts) or float(sums.std()) > SMALL * parts:
        return None
    return Relation(weights, float(sums.mean()))


def _tidy(weights: Floats) -> Floats:
    """Scaled so that the first is 1, and whole numbers where they are close to that."""
    scaled = weights / weights[np.flatnonzero(weights)[0]]
    whole = np.round(scaled)
    return np.asarray(np.where((np.abs(scaled - whole) < 0.03) & (whole != 0), whole, scaled))


def other_terms(part: Law, relation: Relation, gone: int, names: Sequence[str]) -> dict[str, list[str]]:
    """All terms that the full law must not have, given the law of the other states: for a last fit with all of them."""
    kept = [j for j in range(len(names)) if j != gone]
    library = Library(len(names), part.polynomial.degree)
    place = {tuple(row): k for k, row in enumerate(library.exponents.tolist())}
    values, errors = np.zeros((len(names), len(library))), np.zeros((len(names), len(library)))
    for interval in part.intervals:
        exponents = [0] * len(names)
        for position, e in zip(kept, interval.exponents, strict=True):
            exponents[position] = e
        column = place[tuple(exponents)]
        values[kept[interval.output], column] = interval.estimate
        errors[kept[interval.output], column] = (interval.high - interval.low) / 4
    weights = relation.weights / relation.weights[gone]
    total = -(weights[kept] @ values[kept])
    doubt = 3 * np.sqrt((weights[kept] ** 2) @ errors[kept] ** 2)
    largest = np.abs(values).max(initial=0)
    values[gone] = np.where(np.abs(total) > np.maximum(doubt, 1e-6 * largest), total, 0.0)  # what cancels is gone
    texts = term_names(library, names)
    return {name: [texts[k] for k in np.flatnonzero(values[j] == 0)] for j, name in enumerate(names)}
