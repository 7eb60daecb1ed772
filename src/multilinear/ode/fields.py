"""Vector fields without activations: networks whose derivative law can be read off."""

from collections.abc import Sequence

import sympy
from torch import Tensor, nn

from multilinear.layers import MuLayer
from multilinear.ode.polynomial import Polynomial, expand_layers


class MuField(nn.Module):
    """dx/dt as a stack of Mu-Layers in double precision: a polynomial of degree 2 ** layers.

    Args:
        dim: number of states.
        layers: how many Mu-Layers; one gives degree 2.
        hidden: width of each; a few more than the products that the law has.

    >>> import torch
    >>> field = MuField(2)
    >>> field(torch.zeros(5, 2, dtype=torch.float64)).shape
    torch.Size([5, 2])
    >>> field.polynomial().degree
    2
    """

    def __init__(self, dim: int, layers: int = 1, hidden: int | None = None) -> None:
        super().__init__()
        width = hidden or 2 * dim + 2
        self.layers = nn.ModuleList(MuLayer(dim, width, shrinkage=1) for _ in range(layers))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def polynomial(self) -> Polynomial:
        """The field, expanded exactly."""
        return expand_layers([layer for layer in self.layers if isinstance(layer, MuLayer)])

    def equations(self, names: Sequence[str], digits: int = 6, threshold: float = 1e-6) -> dict[str, sympy.Expr]:
        """The right-hand sides by name, rounded for reading, without terms smaller than `threshold`."""
        found = self.polynomial().to_sympy(names, digits, threshold)
        return dict(zip(names, found, strict=True))
