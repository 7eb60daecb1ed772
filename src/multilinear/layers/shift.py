"""Spatial shift: the only way in which tokens of a MONet see their neighbours.

The widely copied in-place form reads and writes overlapping memory: it smears on a CPU and races on a GPU. This one is
out of place and means the same in eager mode, compiled, exported, on a CPU and on a GPU.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multilinear.errors import check_choice

BORDERS = ("keep", "zero")


def spatial_shift(x: Tensor, border: str = "keep") -> Tensor:
    """Move the four channel quarters of `x` (..., H, W, C) one step down, up, right and left.

    The row or column that nothing moves into keeps its own values (`border="keep"`, the published network) or becomes
    zero (`border="zero"`, which an encrypted evaluation gets for free).

    >>> x = torch.arange(4.0).reshape(2, 2, 1).expand(2, 2, 4)
    >>> spatial_shift(x)[..., 0]  # the first quarter moved down, its first row kept
    tensor([[0., 1.],
            [0., 1.]])
    """
    check_choice("border", border, BORDERS)
    if x.ndim < 3:
        raise ValueError(f"spatial_shift needs (..., H, W, C), got shape {tuple(x.shape)}")
    channels = x.shape[-1]
    sizes = [channels * (i + 1) // 4 - channels * i // 4 for i in range(4)]
    down, up, right, left = x.split(sizes, dim=-1)
    return torch.cat(
        [
            _step(down, -3, 1, border),
            _step(up, -3, -1, border),
            _step(right, -2, 1, border),
            _step(left, -2, -1, border),
        ],
        dim=-1,
    )


def _step(x: Tensor, dim: int, direction: int, border: str) -> Tensor:
    """Shift by one along `dim` (-3 rows, -2 columns), towards higher indices if `direction` is 1."""
    size = x.shape[dim]
    forward = direction > 0
    moved = x.narrow(dim, 0 if forward else 1, size - 1)
    if border == "zero":
        # F.pad counts dimensions from the last one: (channels, columns, rows), a (before, after) pair each
        pad = [0] * 6
        pad[2 * (-dim - 1) + (0 if forward else 1)] = 1
        return F.pad(moved, pad)
    edge = x.narrow(dim, 0 if forward else size - 1, 1)
    return torch.cat([edge, moved] if forward else [moved, edge], dim=dim)


class SpatialShift(nn.Module):
    """`spatial_shift` as a module.

    >>> SpatialShift()(torch.zeros(1, 3, 3, 8)).shape
    torch.Size([1, 3, 3, 8])
    """

    def __init__(self, border: str = "keep") -> None:
        super().__init__()
        self.border = check_choice("border", border, BORDERS)

    def forward(self, x: Tensor) -> Tensor:
        return spatial_shift(x, self.border)

    def extra_repr(self) -> str:
        return f"border={self.border!r}"
