"""Fields whose law can be read: polynomial vector fields, fitting them, and their equations."""

from multilinear.ode.fields import MuField
from multilinear.ode.fit import Fit, fit_field
from multilinear.ode.polynomial import Polynomial, expand_layers, monomials
from multilinear.ode.solve import flow

__all__ = ["Fit", "MuField", "Polynomial", "expand_layers", "fit_field", "flow", "monomials"]
