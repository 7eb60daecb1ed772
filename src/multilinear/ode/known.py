"""What a user knows before a fit: populations, positive states, terms that are given or cannot be."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from multilinear.errors import MultilinearError, check_choice
from multilinear.ode.law import find_term
from multilinear.ode.library import Library, Terms
from multilinear.ode.polynomial import Floats
from multilinear.ode.series import Units


@dataclass(frozen=True)
class Known:
    """
    >>> Known(fix={"x": {"y**2": 1.0}}).least_degree(["x", "y"])
    2
    """

    populations: bool = False
    positive: bool = False
    fix: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    forbid: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for equation, values in self.fix.items():
            if not isinstance(values, Mapping):
                raise MultilinearError(f'fix is written {{"x": {{"y": 1.0}}}}; got {values!r} for {equation!r}')
            for term, value in values.items():
                if not isinstance(value, int | float) or not math.isfinite(value):
                    raise MultilinearError(f"the fixed coefficient of {term!r} must be a finite number, got {value!r}")

    def least_degree(self, variables: Sequence[str]) -> int:
        """Of the terms that are given."""
        return max((sum(find_term(t, variables)) for values in self.fix.values() for t in values), default=0)

    def terms(
        self, library: Library, names: Sequence[str], inputs: Sequence[str], units: Units, slopes_of: Mapping[int, int]
    ) -> tuple[Terms, Floats]:
        """Which terms may be found, and the coefficients that are given, in natural units."""
        place = {tuple(row): k for k, row in enumerate(library.exponents.tolist())}
        allowed = np.ones((library.states, len(library)), dtype=bool)
        given = np.zeros(allowed.shape)
        if self.populations:
            allowed &= own_terms(library)
        variables = (*names, *inputs)
        for equation, terms in self.forbid.items():
            for term in terms:
                exponents = find_term(term, variables)
                if exponents in place:
                    allowed[names.index(check_choice("state", equation, names)), place[exponents]] = False
        for slope, state in slopes_of.items():
            allowed[state] = False
            given[state, place[tuple(int(k == slope) for k in range(library.variables))]] = 1.0
        for equation, values in self.fix.items():
            row = names.index(check_choice("state", equation, names))
            for term, value in values.items():
                exponents = find_term(term, variables)
                if exponents not in place:
                    raise MultilinearError(f"the fixed term {term!r} has a degree above {library.degree}")
                allowed[row, place[exponents]] = False
                given[row, place[exponents]] = value
        return allowed, units.to_natural(given, library.exponents)


def own_terms(library: Library) -> Terms:
    """For each equation the terms that contain its own state."""
    return np.stack([library.exponents[:, j] > 0 for j in range(library.states)])
