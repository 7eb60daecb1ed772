"""Poly-Blocks of a network that one kernel can run together, and their weights as such kernels take them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from multilinear.kernels import cpu
from multilinear.layers import PolyBlock
from multilinear.layers.mu import FoldedMuLayer, MuLayer, is_watched
from multilinear.layers.shift import SpatialShift


class Form(NamedTuple):
    """What blocks must have in common to run together: channels, `eps` of their layer norms, None for folded ones
    without, borders of the shifts on both branches of the first Mu-Layer, and the sizes of all matrices."""

    channels: int
    eps: float | None
    shifts: tuple[str | None, str | None]
    sizes: tuple[torch.Size | None, ...]


class Run(NamedTuple):
    """Blocks of one form, and where they stand."""

    parent: nn.Module
    name: str
    blocks: list[PolyBlock]
    form: Form

    def replace(self, module: nn.Module) -> None:
        setattr(self.parent, self.name, module)


def runs(root: nn.Module) -> Iterator[Run]:
    """Every module below `root` that a kernel may stand for."""
    for parent in root.modules():
        if _blocks_in(parent):
            continue  # served as a whole, or not at all
        for name, child in parent.named_children():
            blocks = [child] if isinstance(child, PolyBlock) else _blocks_in(child)
            forms = {_form(block) for block in blocks}
            if len(forms) == 1 and (form := forms.pop()) is not None:
                yield Run(parent, name, blocks, form)


def _blocks_in(module: nn.Module) -> list[PolyBlock]:
    """The Poly-Blocks of a sequence of nothing else; empty for any other module."""
    parts = list(module) if isinstance(module, nn.Sequential) else []
    blocks = [part for part in parts if isinstance(part, PolyBlock)]
    return blocks if len(blocks) == len(parts) else []


def _form(block: PolyBlock) -> Form | None:
    """None for a block that no kernel knows."""
    layers = (block.mu1, block.mu2)
    kind = (type(block), *map(type, layers))  # a subclass may do anything
    eps: set[float | None]
    if kind == (PolyBlock, MuLayer, MuLayer):
        norms = [block.norm1, *(norm for mu in layers for norm in (mu.norm_a, mu.norm_b))]
        eps = {norm.eps if isinstance(norm, nn.LayerNorm) and norm.bias is not None else None for norm in norms}
        known = block.norm2 is None and len(eps) == 1 and None not in eps
    else:
        eps = {None}
        folded = kind == (PolyBlock, FoldedMuLayer, FoldedMuLayer)
        known = folded and type(block.norm1) is nn.Identity and type(block.norm2) is nn.Identity
    if not known or block.in_features % cpu.CHANNELS or any(is_watched(part) for part in block.modules()):
        return None
    shifts = [shift for mu in layers for shift in (mu.shift, mu.shift_second)]
    borders = [_border(shift) for shift in shifts]
    if any(type(shift) not in (nn.Identity, SpatialShift) for shift in shifts) or any(borders[2:]):
        return None
    if len({*borders} - {None}) > 1:
        return None
    sizes = [None if part is None else part.weight.shape for mu in layers for part in (mu.A, mu.D, mu.B, mu.C)]
    return Form(block.in_features, eps.pop(), (borders[0], borders[1]), tuple(sizes))


def _border(shift: nn.Module) -> str | None:
    return shift.border if isinstance(shift, SpatialShift) else None


@torch.no_grad()
def pairs(blocks: list[PolyBlock]) -> list[tuple[cpu.Mu, cpu.Mu]]:
    """The weights of both Mu-Layers of each block, as kernels for runs take them."""
    return [(_weights(block.mu1, block.norm1), _weights(block.mu2, block.norm1)) for block in blocks]


def _weights(layer: MuLayer | FoldedMuLayer, before: nn.Module) -> cpu.Mu:
    """A Mu-Layer's weights with the affine maps of its norms folded as far as the norms themselves let them."""
    A, B, C = (_map(linear) for linear in (layer.A, layer.B, layer.C))
    D = None if layer.D is None else _map(layer.D)
    if isinstance(layer, FoldedMuLayer):
        one, zero = torch.ones_like(A[1]), torch.zeros_like(A[1])
        return cpu.Mu(A, D, B, C, one, zero if layer.a is None else layer.a, one, zero)
    assert isinstance(before, nn.LayerNorm) and D is not None
    A, D = _after(A, before), _after(D, before)
    if _border(layer.shift) is None:  # a shift mixes tokens, and their means with them
        A = _centred(A)
    norm_a, norm_b = layer.norm_a, layer.norm_b
    assert isinstance(norm_a, nn.LayerNorm) and isinstance(norm_b, nn.LayerNorm)
    # p + alpha * p * q = p * (1 + alpha * q)
    return cpu.Mu(
        A, D, _centred(B), C, norm_a.weight, norm_a.bias, layer.alpha * norm_b.weight, 1 + layer.alpha * norm_b.bias
    )


def _map(linear: nn.Linear) -> cpu.Map:
    weight = linear.weight.float()
    return weight, torch.zeros_like(weight[:, 0]) if linear.bias is None else linear.bias.float()


def _after(linear: cpu.Map, norm: nn.LayerNorm) -> cpu.Map:
    weight, bias = linear
    return weight * norm.weight, bias + weight @ norm.bias.float()


def _centred(linear: cpu.Map) -> cpu.Map:
    """Without the mean over outputs, which a layer norm behind it takes away anyhow."""
    weight, bias = linear
    return weight - weight.mean(0), bias - bias.mean()
