"""Fields whose law can be read: polynomial vector fields, fitting them, and their equations."""

from multilinear.ode.estimator import PolynomialODE, discover
from multilinear.ode.fields import MuField
from multilinear.ode.fit import Fit, fit_field
from multilinear.ode.law import Interval, Law, conserved
from multilinear.ode.library import Library
from multilinear.ode.polynomial import Polynomial, expand_layers, monomials
from multilinear.ode.solve import flow

__all__ = [
    "Fit",
    "Interval",
    "Law",
    "Library",
    "MuField",
    "Polynomial",
    "PolynomialODE",
    "conserved",
    "discover",
    "expand_layers",
    "fit_field",
    "flow",
    "monomials",
]
