"""A polynomial MONet in its minimal form: one product per Mu-Layer and nothing but linear maps between them.

`AX ∘ BDX + AX = AX ∘ (BDX + 1)`, so a Mu-Layer is one product h of two affine maps. C, the shortcut, the norms and the
embedding are linear: every block's input is a linear map of the patch and of all products so far, `x = E·v` with
`v = [1, patch, h1, h2, ...]`, and goes into the next layer's maps. So v is all that is ever computed.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from multilinear.errors import MultilinearError
from multilinear.layers import FoldedMuLayer, PatchEmbed, PolyBlock, PyramidPatchEmbed, SpatialShift, fold
from multilinear.models import MONet

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Product:
    """`h = (shift(first·v) + offset) ∘ (second·v)`, with v = [1, patch, earlier products]."""

    first: Array  # (rank, inputs)
    second: Array
    offset: Array  # (rank,)
    shifts: bool

    @property
    def rank(self) -> int:
        return len(self.offset)


@dataclass(frozen=True)
class Network:
    """All there is to evaluate: products, then `head·v`, then the mean over tokens (which the client takes)."""

    products: tuple[Product, ...]
    head: Array  # (classes, inputs)
    channels: int
    patch: int  # the stride of patches
    overlap: int

    def patches(self, images: Array) -> Array:
        """Cut (B, C, H, W) into (B, tokens high, tokens wide, values), as the client does.

        Overlapping patches repeat pixels; beyond the border they are zero.
        """
        return cut_patches(images, self.patch, self.overlap)

    def forward(self, patches: Array) -> tuple[list[Array], Array]:
        """Every product (..., rank) and the logits of each token, in double precision."""
        v = np.concatenate([np.ones((*patches.shape[:-1], 1)), patches], -1)
        products = []
        for layer in self.products:
            first = v @ layer.first.T
            if layer.shifts:
                first = shift(first)
            h = (first + layer.offset) * (v @ layer.second.T)
            products.append(h)
            v = np.concatenate([v, h], -1)
        return products, v @ self.head.T


def cut_patches(images: Array, patch: int, overlap: int) -> Array:
    """(B, C, H, W) into (B, H/patch, W/patch, C * side * side) with side = patch + overlap, zeros beyond the border.

    >>> cut_patches(np.ones((1, 1, 4, 4)), 2, 2).shape
    (1, 2, 2, 16)
    """
    half, side = overlap // 2, patch + overlap
    padded = np.pad(images, ((0, 0), (0, 0), (half, half), (half, half)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side), (2, 3))[:, :, ::patch, ::patch]
    batch, channels, high, wide = windows.shape[:4]
    return windows.transpose(0, 2, 3, 1, 4, 5).reshape(batch, high, wide, channels * side * side)


def directions(rank: int) -> list[tuple[int, int]]:
    """Where each channel of a shifting layer comes from: (rows, columns) that its values move by.

    >>> directions(4)
    [(1, 0), (-1, 0), (0, 1), (0, -1)]
    """
    moves = ((1, 0), (-1, 0), (0, 1), (0, -1))
    sizes = [rank * (i + 1) // 4 - rank * i // 4 for i in range(4)]
    return [move for move, size in zip(moves, sizes, strict=True) for _ in range(size)]


def shift(x: NDArray[Any]) -> NDArray[Any]:
    """The spatial shift with zeros coming in, on (B, high, wide, rank)."""
    moved = np.zeros_like(x)
    high, wide = x.shape[1:3]
    for channel, (down, right) in enumerate(directions(x.shape[-1])):
        to_rows, from_rows = slice(max(down, 0), high + min(down, 0)), slice(max(-down, 0), high + min(-down, 0))
        to_columns = slice(max(right, 0), wide + min(right, 0))
        from_columns = slice(max(-right, 0), wide + min(-right, 0))
        moved[:, to_rows, to_columns, channel] = x[:, from_rows, from_columns, channel]
    return moved


@torch.no_grad()
def flatten(model: nn.Module) -> Network:
    """Bring a polynomial MONet into its minimal form, or say what about it cannot be encrypted.

    >>> from multilinear.models import create
    >>> len(flatten(create("monet_private_2", in_chans=1).eval()).products)
    4
    """
    _check(model)
    assert isinstance(model, MONet)
    folded = fold(copy.deepcopy(model).double())
    kernel, bias, patch, overlap = _embedding(folded.embed)
    E = np.concatenate([bias[:, None], kernel.reshape(len(kernel), -1)], 1)
    products: list[Product] = []
    for block in folded.stages[0].blocks:  # type: ignore[union-attr]
        assert isinstance(block, PolyBlock)
        for layer in (block.mu1, block.mu2):
            assert isinstance(layer, FoldedMuLayer)
            product, C = _product(layer, E)
            products.append(product)
            E = np.concatenate([E, C[:, 1:]], 1)
            E[:, 0] += C[:, 0]
    head = _affine(folded.head.fc)
    logits = head[:, 1:] @ E
    logits[:, 0] += head[:, 0]
    return Network(tuple(products), logits, model.config["in_chans"], patch, overlap)


def _check(model: nn.Module) -> None:
    if not isinstance(model, MONet):
        raise MultilinearError(f"encryption takes a MONet of this library, got {type(model).__name__}")
    config = model.config
    needed = {
        "norm": ("batch", "affine", "none"),
        "border": ("zero",),
        "shift_second": (False,),
        "global_pool": ("avg",),
    }
    for name, allowed in needed.items():
        if config[name] not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed)
            raise MultilinearError(
                f"cannot encrypt a network with {name}={config[name]!r}: it needs {choices}; train one of the "
                "monet_private models, which have all that encryption needs"
            )
    if len(config["widths"]) != 1:
        raise MultilinearError(f"cannot encrypt {len(config['widths'])} stages; train a single-stage network")
    if model.num_classes < 1:
        raise MultilinearError("the network has no classifier to encrypt")


def _embedding(embed: nn.Module) -> tuple[Array, Array, int, int]:
    if isinstance(embed, PyramidPatchEmbed):
        raise MultilinearError("this pyramid does not fold into one map of a patch; use one level, or overlap")
    assert isinstance(embed, PatchEmbed) and embed.proj.bias is not None
    return embed.proj.weight.numpy(), embed.proj.bias.numpy(), embed.stride, embed.overlap


def _affine(linear: nn.Linear) -> Array:
    """[bias | weight]: the map of [1, x]."""
    return np.concatenate([linear.bias.numpy()[:, None], linear.weight.numpy()], 1)


def _product(layer: FoldedMuLayer, E: Array) -> tuple[Product, Array]:
    def after(linear: nn.Linear, inner: Array) -> Array:
        matrix = linear.weight.numpy() @ inner
        matrix[:, 0] += linear.bias.numpy()
        return matrix

    first = after(layer.A, E)
    second = after(layer.B, E if layer.D is None else after(layer.D, E))
    offset = np.zeros(len(first)) if layer.a is None else layer.a.numpy()
    return Product(first, second, offset, isinstance(layer.shift, SpatialShift)), _affine(layer.C)
