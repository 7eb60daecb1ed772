"""What only we can say of a network: is it a polynomial, of which degree, at what cost, and which one."""

from multilinear.analysis.audit import Audit, Obstacle, audit, degree_text
from multilinear.analysis.cost import Cost, ModuleCost, PaperFormulas, cost
from multilinear.analysis.expand import expand
from multilinear.analysis.graph import input_shape

__all__ = [
    "Audit",
    "Cost",
    "ModuleCost",
    "Obstacle",
    "PaperFormulas",
    "audit",
    "cost",
    "degree_text",
    "expand",
    "input_shape",
]
