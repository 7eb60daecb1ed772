"""What the curvature at a fit tells about terms: which matter least, and which small sets would do best."""

import math
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from multilinear.ode.library import Terms
from multilinear.ode.polynomial import Floats
from multilinear.ode.shooting import Solution

MOST_SUBSETS = 8000  # of one size, tried at once
Indices = NDArray[np.int64]


def reduce(curvature: Floats, gradient: Floats, inner: Indices, outer: Indices) -> tuple[Floats, Floats] | None:
    """Curvature and gradient in the `outer` unknowns when the `inner` ones are always at their best."""
    scale = 1 / np.sqrt(np.maximum(np.diag(curvature), 1e-300))
    normal, pull = curvature * scale[:, None] * scale, gradient * scale
    kept = normal[np.ix_(inner, inner)]
    kept[np.diag_indices_from(kept)] += 1e-12
    cross = normal[np.ix_(inner, outer)]
    try:
        solved = cho_solve(cho_factor(kept), np.column_stack([cross, pull[inner]]))
    except LinAlgError:
        return None
    stiffness = (normal[np.ix_(outer, outer)] - cross.T @ solved[:, :-1]) / scale[outer][:, None] / scale[outer]
    return stiffness, (pull[outer] - cross.T @ solved[:, -1]) / scale[outer]


def best_subsets(stiffness: Floats, target: Floats, keep: int) -> list[tuple[Indices, float]]:
    """For each small size the subsets T with the largest target_T (stiffness_TT)^-1 target_T.

    >>> [subset.tolist() for subset, _ in best_subsets(np.eye(3), np.array([1.0, 3.0, 2.0]), 1)][:2]
    [[1], [1, 2]]
    """
    scale = 1 / np.sqrt(np.maximum(np.diag(stiffness), 1e-300))
    normal = stiffness * scale[:, None] * scale
    normal[np.diag_indices_from(normal)] += 1e-10
    pull = target * scale
    total = len(pull)
    found = []
    for size in range(1, total + 1):
        if math.comb(total, size) > MOST_SUBSETS:
            break
        subsets = np.array(list(combinations(range(total), size)), dtype=np.int64)
        matrices = normal[subsets[:, :, None], subsets[:, None, :]]
        pulls = pull[subsets]
        gains = (pulls * np.linalg.solve(matrices, pulls[:, :, None])[:, :, 0]).sum(1)
        found += [(subsets[k], float(gains[k])) for k in np.argsort(-gains)[:keep]]
    return found


def neighbours_alike(residuals: Floats) -> float:
    """Correlation of neighbouring residuals, the mean over states: 0 for noise, near 1 where a law misses something.

    >>> round(neighbours_alike(np.sin(np.arange(100) / 10).reshape(100, 1, 1)), 1)
    1.0
    """
    found = []
    for j in range(residuals.shape[2]):
        line = residuals[:, :, j].reshape(-1)
        line = line[np.isfinite(line)]
        if len(line) > 4 and line.std() > 0:
            line = line - line.mean()
            found.append(float(line[1:] @ line[:-1] / (line @ line)))
    return max(0.0, float(np.mean(found))) if found else 0.0


def wald(solution: Solution) -> Floats:
    """By how much twice the cost would rise without each active term: its square over its variance."""
    variance = np.maximum(np.diag(solution.covariance()), 1e-300)
    return np.asarray(solution.coefficients[solution.active] ** 2 / variance)


def weakest(solution: Solution, budget: float, most: int) -> Terms:
    """The active terms without the weakest, one at least, more while together they cost less than `budget`."""
    outputs, monomials = np.nonzero(solution.active)
    values = solution.coefficients[solution.active].copy()
    covariance = solution.covariance()
    kept = np.arange(len(values))
    spent, dropped = 0.0, 0
    terms = solution.active.copy()
    while dropped < most and len(kept):
        variance = np.maximum(np.diag(covariance), 1e-300)
        loss = values**2 / variance
        k = int(np.argmin(loss))
        if dropped and spent + loss[k] > budget:
            break
        spent += float(loss[k])
        dropped += 1
        terms[outputs[kept[k]], monomials[kept[k]]] = False
        # the others move to where they are best without it
        values = values - covariance[:, k] * values[k] / variance[k]
        covariance = covariance - np.outer(covariance[:, k], covariance[:, k]) / variance[k]
        values, kept = np.delete(values, k), np.delete(kept, k)
        covariance = np.delete(np.delete(covariance, k, 0), k, 1)
    return terms
