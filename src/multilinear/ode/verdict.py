"""How far to trust a law: does it explain the data, and could the data tell it from its rivals?"""

from dataclasses import dataclass

import numpy as np

from multilinear.ode.pipeline import Pipeline
from multilinear.ode.select import Candidate
from multilinear.ode.subsets import neighbours_alike


@dataclass(frozen=True)
class Verdict:
    """Share of variance explained, what the residuals look like, and the best law's share of belief."""

    r2: float  # mean over states
    worst: float  # of the state that is explained least, less what as many free numbers would explain of noise
    worst_state: int
    correlation: float  # of neighbouring residuals: 0 for noise
    belief: float  # weight of the law among all that were tried

    @property
    def explained(self) -> bool:
        return self.worst > 0.8 or (self.worst > 0.5 and self.correlation < 0.4)

    @property
    def identified(self) -> bool:
        return self.belief > 0.5


def judge(best: Candidate, pipeline: Pipeline) -> Verdict:
    search, segments = pipeline.search, pipeline.search.shooting.segments
    values, residuals = segments.values, best.solution.residuals
    seen = search.counts > 0
    with np.errstate(all="ignore"):
        values = values[:, :, seen]
        total = np.nansum((values - np.nanmean(values, (0, 1))) ** 2, (0, 1))
        share = np.nansum(search.unweighted(best.solution) ** 2, (0, 1))[seen] / np.maximum(total, 1e-300)
    differences = np.array([c.criterion - best.criterion for c in search.sound()])
    belief = 1 / float(np.exp(-0.5 * np.clip(differences, 0, 700)).sum())
    alike = 0.0 if search.exact(best) else neighbours_alike(residuals)  # rounding is not noise
    free = best.terms.sum(1)[seen] + len(pipeline.starts)
    counts = search.counts[seen]
    adjusted = 1 - share * (counts - 1) / np.maximum(1, counts - free)
    worst = int(np.argmin(adjusted))
    states = np.flatnonzero(seen)
    return Verdict(
        float(1 - share.mean()),
        float(adjusted[worst]),
        int(states[worst]),
        alike,
        min(belief, 1.0),
    )
