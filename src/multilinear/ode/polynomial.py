"""Polynomials as tables of coefficients: exact arithmetic on arrays, sympy only for printing.

A `Polynomial` maps vectors x in R^d to vectors in R^n. Row k of `exponents` is a monomial, column k of `coefficients`
how much of it each output has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement

import numpy as np
import sympy
from numpy.typing import NDArray

from multilinear.errors import MultilinearError
from multilinear.layers import MuLayer

Floats = NDArray[np.float64]


@lru_cache(maxsize=64)
def monomials(dim: int, degree: int) -> NDArray[np.int64]:
    """Exponents of all monomials in `dim` variables up to `degree`, by degree: 1, x, y, x^2, xy, y^2, ...

    >>> monomials(2, 2).tolist()
    [[0, 0], [1, 0], [0, 1], [2, 0], [1, 1], [0, 2]]
    """
    rows = [
        np.bincount(np.array(chosen, dtype=np.int64), minlength=dim)
        for total in range(degree + 1)
        for chosen in combinations_with_replacement(range(dim), total)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, dim)


@lru_cache(maxsize=64)
def _product_table(dim: int, first: int, second: int) -> NDArray[np.int64]:
    """Where the product of monomial i (up to degree `first`) and j (up to `second`) stands in the list of products."""
    place = {tuple(row): k for k, row in enumerate(monomials(dim, first + second).tolist())}
    sums = monomials(dim, first)[:, None, :] + monomials(dim, second)[None, :, :]
    return np.array([[place[tuple(entry)] for entry in row] for row in sums.tolist()], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Polynomial:
    """A vector of polynomials of one degree in the same variables.

    >>> x = Polynomial.variables(2)
    >>> (x * x)(np.array([3.0, 2.0])).tolist()
    [9.0, 4.0]
    """

    dim: int
    degree: int
    coefficients: Floats  # (outputs, monomials up to the degree)

    @classmethod
    def variables(cls, dim: int) -> "Polynomial":
        """The identity: each variable as a polynomial of degree 1."""
        return cls(dim, 1, np.hstack([np.zeros((dim, 1)), np.eye(dim)]))

    def __call__(self, x: Floats) -> Floats:
        """Values at points (..., dim), as (..., outputs)."""
        powers = np.prod(x[..., None, :] ** monomials(self.dim, self.degree), axis=-1)
        return np.asarray(powers @ self.coefficients.T)

    def __add__(self, other: "Polynomial") -> "Polynomial":
        degree = max(self.degree, other.degree)
        return Polynomial(self.dim, degree, self._padded(degree) + other._padded(degree))

    def __mul__(self, other: "Polynomial") -> "Polynomial":
        """Entry by entry."""
        table = _product_table(self.dim, self.degree, other.degree)
        products = self.coefficients[:, :, None] * other.coefficients[:, None, :]
        result = np.zeros((len(products), len(monomials(self.dim, self.degree + other.degree))))
        for row, values in zip(result, products, strict=True):
            np.add.at(row, table.ravel(), values.ravel())
        return Polynomial(self.dim, self.degree + other.degree, result)

    def linear(self, weight: Floats, bias: Floats | None = None) -> "Polynomial":
        """A matrix applied to the outputs, and a constant added."""
        mixed = weight @ self.coefficients
        if bias is not None:
            mixed[:, 0] += bias
        return Polynomial(self.dim, self.degree, mixed)

    def _padded(self, degree: int) -> Floats:
        extra = len(monomials(self.dim, degree)) - self.coefficients.shape[1]
        return np.pad(self.coefficients, ((0, 0), (0, extra)))

    def to_sympy(self, names: Sequence[str], digits: int | None = None, threshold: float = 0.0) -> list[sympy.Expr]:
        """Expressions in the symbols `names`; coefficients up to `threshold` in size are left out.

        >>> Polynomial.variables(2).linear(np.array([[2.0, 0.0]])).to_sympy(["x", "y"])
        [2.0*x]
        """
        if len(names) != self.dim:
            raise MultilinearError(f"{len(names)} names for {self.dim} variables")
        symbols = sympy.symbols(list(names))
        terms = [
            sympy.Mul(*(s ** int(e) for s, e in zip(symbols, row, strict=True)))
            for row in monomials(self.dim, self.degree)
        ]
        return [
            sympy.Add(*(sympy.Float(value, digits or 15) * term
                        for value, term in zip(row, terms, strict=True) if abs(value) > threshold))
            for row in self.coefficients
        ]  # fmt: skip


def expand_layers(layers: Sequence[MuLayer]) -> Polynomial:
    """The polynomial that a stack of bare Mu-Layers is, in milliseconds where symbolic algebra takes seconds.

    >>> import torch
    >>> layer = MuLayer(2, 3, 2).double()
    >>> x = torch.randn(5, 2, dtype=torch.float64)
    >>> np.allclose(expand_layers([layer])(x.numpy()), layer(x).detach().numpy())
    True
    """
    current = Polynomial.variables(layers[0].in_features)
    for layer in layers:
        weights = [(m.weight.detach().double().numpy(), m.bias.detach().double().numpy()) for m in
                   (layer.A, layer.D, layer.B, layer.C)]  # fmt: skip
        first = current.linear(*weights[0])
        second = current.linear(*weights[1]).linear(*weights[2])
        alpha = float(layer.alpha.detach())
        product = first * second
        scaled = Polynomial(product.dim, product.degree, alpha * product.coefficients)
        current = (scaled + first).linear(*weights[3])
    return current
