"""Norms over the last dimension. Which one a network has decides what the network is.

- `layer`: divides by a data-dependent root. The published network; not a polynomial.
- `batch`: statistics of the training data, so an affine map at inference: the network is a polynomial.
- `affine`: a learned scale and shift and nothing else: a polynomial in training too.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from multilinear.errors import check_choice


class Affine(nn.Module):
    """A learned scale and shift of the last dimension.

    >>> Affine(2, scale=3.0)(torch.ones(2)).tolist()
    [3.0, 3.0]
    """

    def __init__(self, dim: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), scale))
        self.bias = nn.Parameter(torch.zeros(dim))

    @property
    def scale(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias

    def extra_repr(self) -> str:
        return str(self.weight.numel())


class BatchNorm(nn.Module):
    """Batch normalisation of the last dimension, over all leading ones.

    It holds an ordinary `nn.BatchNorm1d`, so that tools which look for one (SyncBatchNorm's converter) find it.

    >>> BatchNorm(4)(torch.randn(2, 3, 3, 4)).shape
    torch.Size([2, 3, 3, 4])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(dim)

    @property
    def scale(self) -> Tensor:
        return self.bn.weight

    def forward(self, x: Tensor) -> Tensor:
        flat: Tensor = self.bn(x.reshape(-1, x.shape[-1]))
        return flat.reshape(x.shape)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        """The scale and shift that this norm is at inference."""
        bn = self.bn
        assert bn.running_mean is not None and bn.running_var is not None
        scale = bn.weight * torch.rsqrt(bn.running_var + bn.eps)
        return scale, bn.bias - bn.running_mean * scale


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": lambda dim: nn.LayerNorm(dim, eps=1e-6),
    "batch": BatchNorm,
    "affine": Affine,
    "none": lambda dim: nn.Identity(),
}


def make_norm(name: str, dim: int) -> nn.Module:
    """Build the norm called `name` for vectors of length `dim`.

    >>> make_norm("affine", 8)
    Affine(8)
    """
    return NORMS[check_choice("norm", name, NORMS)](dim)


def affine_of(norm: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The (scale, shift) of a norm that is an affine map at inference, else None.

    >>> affine_of(make_norm("layer", 2)) is None
    True
    """
    if isinstance(norm, Affine):
        return norm.weight, norm.bias
    if isinstance(norm, BatchNorm):
        return norm.as_affine()
    return None


@torch.no_grad()
def collect_statistics(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace the statistics of every batch norm in `model` by the plain average over `batches`.

    Running averages belong to weights that moved meanwhile, and not to the network that is kept. A polynomial of high
    degree feels that more than other networks do. The batches should be like those of training.

    >>> norm = BatchNorm(1)
    >>> collect_statistics(norm, [torch.full((4, 1), 3.0)])
    >>> norm.bn.running_mean.item()
    3.0
    """
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm1d)]
    momenta = [norm.momentum for norm in norms]
    modes = [(part, part.training) for part in model.modules()]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        norm.train()
    try:
        for batch in batches:
            model(batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for part, mode in modes:
            part.training = mode
