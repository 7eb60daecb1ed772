"""Fold: the same function with fewer maps. Norms, scales and adjacent linear maps go into the weights."""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from multilinear.layers.embed import PatchEmbed, PyramidPatchEmbed
from multilinear.layers.mu import FoldedMuLayer, MuLayer, PolyBlock
from multilinear.layers.norm import affine_of
from multilinear.layers.shift import SpatialShift

M = TypeVar("M", bound=nn.Module)
Map = tuple[Tensor, Tensor]  # weight (out, in), bias (out)


@torch.no_grad()
def fold(model: M) -> M:
    """Return an equivalent module in evaluation mode with everything foldable folded; `model` is not changed.

    Batch and affine norms, the scalar alpha and the added `AX` of each Mu-Layer, B with D, and the levels of a pyramid
    embedding are merged; two linear maps only where the merged one has no more weights. A LayerNorm is no affine map
    and stays, so a network folds to a polynomial only with `norm="batch"`, `"affine"` or `"none"`.

    >>> layer = MuLayer(4, norm="batch").eval()
    >>> x = torch.randn(3, 4)
    >>> torch.allclose(fold(layer)(x), layer(x), atol=1e-5)
    True
    """
    folded = copy.deepcopy(model).eval()
    replacement = _folded(folded)
    if replacement is not None:
        return replacement  # type: ignore[return-value]  # a layer becomes its folded form
    for parent in list(folded.modules()):
        for name, child in list(parent.named_children()):
            replacement = _folded(child)
            if replacement is not None:
                setattr(parent, name, replacement)
    folded._multilinear_folded = True  # type: ignore[assignment]  # so that saved weights say how to rebuild it
    return folded


def is_folded(model: nn.Module) -> bool:
    """Whether `model` came out of `fold`.

    >>> is_folded(fold(MuLayer(4)))
    True
    """
    return bool(getattr(model, "_multilinear_folded", False)) or isinstance(model, FoldedMuLayer)


def _folded(module: nn.Module) -> nn.Module | None:
    if isinstance(module, PolyBlock):
        return _fold_block(module)
    if isinstance(module, MuLayer):
        return _fold_mu(module)
    if isinstance(module, PyramidPatchEmbed):
        return _fold_pyramid(module)
    return None


def _fold_block(block: PolyBlock) -> PolyBlock | None:
    norms = [affine_of(norm) for norm in (block.norm1, block.norm2) if norm is not None]
    if isinstance(block.norm1, nn.Identity):
        norms = [None, None]
    elif None in norms or block.norm2 is None:
        return None  # a LayerNorm; its Mu-Layers hold LayerNorms too
    for name, before in zip(("mu1", "mu2"), norms, strict=True):
        layer = getattr(block, name)
        folded = _fold_mu(layer, before) if isinstance(layer, MuLayer) else None
        if folded is None:
            return None
        setattr(block, name, folded)
    block.norm1 = nn.Identity()
    block.norm2 = nn.Identity()
    return block


def _fold_mu(layer: MuLayer, before: Map | None = None) -> FoldedMuLayer | None:
    """Fold a Mu-Layer with the affine map `before` it; None if its own norms are not affine."""
    first, second = _branch_affine(layer.norm_a, layer.A), _branch_affine(layer.norm_b, layer.B)
    if first is None or second is None:
        return None
    A, B, C, D = (_matrix(part) for part in (layer.A, layer.B, layer.C, layer.D))
    if before is not None:
        A, D = _after_affine(A, before), _after_affine(D, before)
    # norm_a moves before the shift: its scale always, its constant only if the shift maps constants to themselves
    scale, constant = first
    zero_border = isinstance(layer.shift, SpatialShift) and layer.shift.border == "zero"
    A = A[0] * scale[:, None], A[1] * scale + (0 if zero_border else constant)
    # first + alpha * first * second = first * (alpha * second + 1)
    scale, shift = second
    B = layer.alpha * B[0] * scale[:, None], layer.alpha * (B[1] * scale + shift) + 1
    merge = isinstance(layer.shift_second, nn.Identity) and D[0].numel() + B[0].numel() >= B[0].shape[0] * D[0].shape[1]
    if merge:
        B = B[0] @ D[0], B[0] @ D[1] + B[1]
    return FoldedMuLayer(
        _linear(A),
        None if merge else _linear(D),
        _linear(B),
        _linear(C),
        layer.shift,
        layer.shift_second,
        constant if zero_border else None,
    )


def _fold_pyramid(embed: PyramidPatchEmbed) -> PatchEmbed | None:
    """The whole pyramid is one linear map of a patch; worth merging unless that has more weights."""
    weight, bias = embed.merged()
    if weight.numel() > sum(p.numel() for p in embed.parameters()):
        return None
    merged = PatchEmbed(embed.stride, weight.shape[1], weight.shape[0], init="pytorch")
    merged.proj.weight, merged.proj.bias = nn.Parameter(weight), nn.Parameter(bias)
    return merged.eval()


def _branch_affine(norm: nn.Module, after: nn.Linear) -> Map | None:
    if isinstance(norm, nn.Identity):
        return torch.ones_like(after.weight[:, 0]), torch.zeros_like(after.weight[:, 0])
    return affine_of(norm)


def _after_affine(linear: Map, before: Map) -> Map:
    """The map `x -> W(scale * x + shift) + b` as one weight and bias."""
    scale, shift = before
    return linear[0] * scale, linear[1] + linear[0] @ shift


def _matrix(linear: nn.Linear) -> Map:
    bias = linear.bias if linear.bias is not None else torch.zeros_like(linear.weight[:, 0])
    return linear.weight, bias


def _linear(weights: Map) -> nn.Linear:
    weight, bias = weights
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return layer
