"""The Mu-Layer and the Poly-Block of *Multilinear Operator Networks* (ICLR 2024), equation 1 and figure 2."""

from typing import Any

import torch
from torch import Tensor, nn

from multilinear import kernels
from multilinear.layers.embed import PatchEmbed, PyramidPatchEmbed
from multilinear.layers.init import DEFAULT_INIT, init_weights
from multilinear.layers.norm import Affine, BatchNorm, make_norm
from multilinear.layers.shift import SpatialShift


class StochasticDepth(nn.Module):
    """Leave a whole branch out of random examples in training, and scale up the others.

    The rate is a tensor, so that compiled blocks of different rates are one and the same code.

    >>> StochasticDepth(0.5).eval()(torch.ones(2, 1, 1, 3)).sum().item()
    6.0
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop_prob = rate
        self.register_buffer("keep", torch.tensor(1.0 - rate), persistent=False)
        self.keep: Tensor

    def factors(self, examples: int) -> Tensor:
        """What each example is multiplied with in training: 0, or the inverse of the share that is kept."""
        return (torch.rand(examples, device=self.keep.device) < self.keep) / self.keep

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * self.factors(x.shape[0]).to(x.dtype).view(-1, *(1,) * (x.ndim - 1))

    def extra_repr(self) -> str:
        return str(self.drop_prob)


class MuLayer(nn.Module):
    """`Y = C[(AX) ∘ (BDX) + AX]` over the last dimension: a drop-in replacement for an MLP without an activation.

    Args:
        in_features: length of the input vectors (..., in_features).
        hidden_features: the rank m; `in_features` if not given.
        out_features: length of the output vectors; `in_features` if not given.
        shrinkage: D maps to m // shrinkage, so that the second branch is of low rank.
        norm: put on both branches; `"none"` is the bare equation.
        shift: the border of a spatial shift on both branches (`"keep"` or `"zero"`), or None for no shift.
        shift_second: False leaves the second branch in place, so that B and D merge into one matrix.
        bias: whether the four matrices have biases.
        init: one of `multilinear.layers.INITIALISERS`.

    >>> MuLayer(8, out_features=3)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 3])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        *,
        shrinkage: int = 4,
        norm: str = "none",
        shift: str | None = None,
        shift_second: bool = True,
        bias: bool = True,
        init: str = DEFAULT_INIT,
    ) -> None:
        super().__init__()
        hidden = hidden_features or in_features
        low_rank = max(1, hidden // shrinkage)
        self.in_features = in_features
        self.out_features = out_features or in_features
        self.A = nn.Linear(in_features, hidden, bias=bias)
        self.D = nn.Linear(in_features, low_rank, bias=bias)
        self.B = nn.Linear(low_rank, hidden, bias=bias)
        self.C = nn.Linear(hidden, self.out_features, bias=bias)
        self.shift = nn.Identity() if shift is None else SpatialShift(shift)
        self.shift_second = SpatialShift(shift) if shift is not None and shift_second else nn.Identity()
        self.norm_a = make_norm(norm, hidden)
        self.norm_b = make_norm(norm, hidden)
        self.alpha = nn.Parameter(torch.ones(1))  # one entry, as sharding has no place for a scalar
        self.watch_range = False
        self.range: Tensor | None = None  # of the last products, by their mean fourth power, which a penalty may hold
        init_weights(self, init)

    def forward(self, x: Tensor) -> Tensor:
        first = self.A(x)
        second = self.B(self.shift_second(self.D(x)))
        norm_a, norm_b = self.norm_a, self.norm_b
        if isinstance(norm_a, nn.LayerNorm) and isinstance(norm_b, nn.LayerNorm) and kernels.fused_for(first):
            shift, border = self.shift, None
            watched = shift._forward_hooks or shift._forward_pre_hooks
            if type(shift) is SpatialShift and not (torch.is_grad_enabled() or watched) and kernels.shift_serves(first):
                border = shift.border  # the kernel shifts while it loads
            else:
                first = shift(first)
            weights = (norm_a.weight, norm_a.bias), (norm_b.weight, norm_b.bias)
            product = kernels.normed_product(first, second, *weights, self.alpha, norm_a.eps, border)
        else:
            first = norm_a(self.shift(first))
            product = first + self.alpha * first * norm_b(second)
        if self.watch_range:
            self.range = product.float().square().square().mean()
        y: Tensor = self.C(product)
        return y


class FoldedMuLayer(nn.Module):
    """What `fold` makes of a Mu-Layer: `Y = C[(shift(AX) + a) ∘ (B shift(DX))]`, one product and no sum.

    The second branch has a shift of its own, as a Mu-Layer's may stay in place.


    `alpha`, the norms and the added `AX` have gone into the weights, since `AX ∘ BDX + AX = AX ∘ (BDX + 1)`. D is
    None where B and D were merged. `a` is None unless the shift has a zero border, past which a constant cannot move.
    """

    def __init__(
        self,
        A: nn.Linear,
        D: nn.Linear | None,
        B: nn.Linear,
        C: nn.Linear,
        shift: nn.Module,
        shift_second: nn.Module,
        a: Tensor | None,
    ) -> None:
        super().__init__()
        self.in_features = A.in_features
        self.out_features = C.out_features
        self.A, self.D, self.B, self.C = A, D, B, C
        self.shift, self.shift_second = shift, shift_second
        self.a = None if a is None else nn.Parameter(a)

    def forward(self, x: Tensor) -> Tensor:
        first = self.shift(self.A(x))
        if self.a is not None:
            first = first + self.a
        second = self.B(x) if self.D is None else self.B(self.shift_second(self.D(x)))
        y: Tensor = self.C(first * second)
        return y


class PolyBlock(nn.Module):
    """Two Mu-Layers with shortcuts on (..., H, W, C): `x += mu1(norm(x)); x += mu2(norm(x))`, where mu1 shifts.

    A LayerNorm is shared by both places, as published. The other norms are not: a BatchNorm keeps statistics, and the
    two places have different ones.

    Args:
        dim: channels C.
        expansion: the second Mu-Layer's hidden width is `expansion * dim`.
        ranks: hidden widths of both Mu-Layers; `dim` and `expansion * dim` if not given.
        shift_second: whether the second branch of the first Mu-Layer shifts too, as published.
        drop_path: rate of stochastic depth on both branches; None for none.
        branch_scale: what `batch` and `affine` norms on the product's second factor start from, and an `affine` norm
            ahead of a branch too: those keep no range by themselves.

    >>> PolyBlock(8)(torch.randn(1, 4, 4, 8)).shape
    torch.Size([1, 4, 4, 8])
    """

    def __init__(
        self,
        dim: int,
        *,
        expansion: int = 3,
        shrinkage: int = 4,
        norm: str = "layer",
        ranks: tuple[int, int] | None = None,
        shift: str | None = "keep",
        shift_second: bool = True,
        drop_path: float | None = None,
        branch_scale: float = 1.0,
        init: str = DEFAULT_INIT,
    ) -> None:
        super().__init__()
        self.in_features = self.out_features = dim
        self.norm1 = make_norm(norm, dim)
        self.norm2 = None if norm == "layer" else make_norm(norm, dim)
        rank1, rank2 = ranks or (dim, expansion * dim)
        shared = {"shrinkage": shrinkage, "norm": norm, "init": init}
        self.mu1 = MuLayer(dim, rank1, shift=shift, shift_second=shift_second, **shared)  # type: ignore[arg-type]
        self.mu2 = MuLayer(dim, rank2, **shared)  # type: ignore[arg-type]
        self.drop_path = nn.Identity() if drop_path is None else StochasticDepth(drop_path)
        # Nothing bounds a polynomial of high degree off the data that its norms have seen: start close to linear.
        for place in (self.norm1, self.norm2):
            if isinstance(place, Affine):
                nn.init.constant_(place.weight, branch_scale)
        for product in (self.mu1.norm_b, self.mu2.norm_b):
            if isinstance(product, Affine | BatchNorm):
                nn.init.constant_(product.scale, branch_scale)

        self._prepared: tuple[object, list[Tensor]] | None = None  # for the fused form, while weights stay as they are
        self._ahead: tuple[torch.dtype, list[Tensor], torch.cuda.Event] | None = None  # for the next captured pass

    def forward(self, x: Tensor) -> Tensor:
        dtype = kernels.block_dtype(x)
        if dtype is not None and self._fusible(x):
            return self._fused(x, dtype)
        if self._ahead is not None:
            self._take_ahead(None)
        norm2 = self.norm1 if self.norm2 is None else self.norm2
        x = x + self.drop_path(self.mu1(self.norm1(x)))
        x = x + self.drop_path(self.mu2(norm2(x)))
        return x

    def fuses(self) -> bool:
        """Whether 16-bit images would take the fused form where this block is.

        >>> PolyBlock(64).fuses()  # on a CPU
        False
        """
        weight = self.mu1.A.weight
        example = weight.new_empty(1, 1, 1, self.in_features)
        return kernels.fused_for(weight) and kernels.on_hopper(weight.device) and self._fusible(example)

    def _fusible(self, x: Tensor) -> bool:
        """Whether this is the published block, nobody looks inside, and the kernels take its sizes."""
        mu1, mu2 = self.mu1, self.mu2
        if not (isinstance(mu1, MuLayer) and isinstance(mu2, MuLayer) and isinstance(mu1.shift, SpatialShift)):
            return False
        norms = (self.norm1, mu1.norm_a, mu1.norm_b, mu2.norm_a, mu2.norm_b)
        published = (
            self.norm2 is None
            and all(
                type(norm) is nn.LayerNorm and norm.eps == mu1.norm_a.eps and norm.bias is not None for norm in norms
            )
            and isinstance(mu1.shift_second, SpatialShift)
            and mu1.shift_second.border == mu1.shift.border
            and isinstance(mu2.shift, nn.Identity)
            and all(  # and no subclass: a parametrised layer's weight is no parameter
                type(part) is nn.Linear and part.bias is not None
                for mu in (mu1, mu2)
                for part in (mu.A, mu.B, mu.C, mu.D)
            )
        )
        fits = x.ndim == 4 and x.numel() > 0 and x.shape[-1] == self.in_features
        if not published or not fits or mu1.watch_range or mu2.watch_range:
            return False
        ranks, lows = zip(*(mu.B.weight.shape for mu in (mu1, mu2)), strict=True)
        watched = any(is_watched(part) for part in self.modules() if part is not self)
        return not watched and kernels.block_serves(x.numel() // x.shape[-1], x.shape[-1], ranks, lows)

    def _weights(self) -> list[Any]:
        """In the order of `kernels.BLOCK_PARAMETERS`."""
        weights: list[Any] = [self.norm1.weight, self.norm1.bias]
        for mu in (self.mu1, self.mu2):
            for part in (mu.A, mu.D, mu.B, mu.C, mu.norm_a, mu.norm_b):
                weights += [part.weight, part.bias]
            weights.append(mu.alpha)
        return weights

    def _fused(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        weights = self._weights()
        kept = None
        if self.training and isinstance(self.drop_path, StochasticDepth):
            kept = self.drop_path.factors(x.shape[0]), self.drop_path.factors(x.shape[0])
        prepared = self._prepare(weights, dtype)
        assert isinstance(self.mu1.shift, SpatialShift)
        eps = float(self.mu1.norm_a.eps)  # type: ignore[arg-type]
        y = kernels.poly_block(x.to(dtype), weights, prepared, kept, self.mu1.shift.border == "keep", eps)
        return y.to(x.dtype)

    def _take_ahead(self, dtype: torch.dtype | None) -> list[Tensor] | None:
        """What `prepare_ahead` made, if it is of that type; a capture asks that it is waited for either way."""
        assert self._ahead is not None
        (made_for, prepared, there), self._ahead = self._ahead, None
        if not (prepared[0].is_cuda and torch.cuda.is_current_stream_capturing()):  # where it was made has failed
            return None
        torch.cuda.current_stream(prepared[0].device).wait_event(there)
        return prepared if made_for == dtype else None

    def _prepare(self, weights: list[nn.Parameter], dtype: torch.dtype) -> list[Tensor]:
        """Prepared weights, kept from one pass to the next if they are frozen."""
        if self._ahead is not None and (ahead := self._take_ahead(dtype)) is not None:
            return ahead
        frozen = not any(weight.requires_grad or weight.is_inference() for weight in weights)
        if not frozen:
            self._prepared = None
        inference = frozen and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not inference or not kernels.computing():  # what is kept stays: a recorded graph may read it
            return kernels.prepare_block(weights, dtype, inference)
        key = dtype, *((weight.data_ptr(), weight._version) for weight in weights)
        if self._prepared is not None and self._prepared[0] == key:
            return self._prepared[1]
        prepared = kernels.prepare_block(weights, dtype, inference)
        if not (prepared[0].is_cuda and torch.cuda.is_current_stream_capturing()):  # there only with each replay
            self._prepared = key, prepared
        return prepared


def is_watched(module: nn.Module) -> bool:
    """Whether somebody has put a hook on this module, which something in its place would leave out.

    >>> is_watched(PolyBlock(8))
    False
    """
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def prepare_ahead(model: nn.Module, x: Tensor) -> None:
    """In a training step that is captured, fused blocks prepare their weights beside the layers that come first.

    >>> prepare_ahead(PolyBlock(64), torch.zeros(1, 2, 2, 64))  # on a CPU: nothing
    """
    if torch.compiler.is_compiling() or not (x.is_cuda and torch.is_grad_enabled()):
        return
    dtype = kernels.block_dtype(x) if torch.cuda.is_current_stream_capturing() else None
    if dtype is None:
        return
    for block in model.modules():
        if isinstance(block, PolyBlock) and block.fuses():
            block._ahead = dtype, *kernels.prepare_beside(block._weights(), dtype)


def compile_blocks(model: nn.Module, *more: type[nn.Module]) -> None:
    """Compile the embedding, every Poly-Block and modules of `more` types in place; blocks of one width and mode share
    one compilation.

    Blocks that run as fused kernels are left as they are, and so is all else in a network that has no others: then the
    first step comes sooner, and no step later.

    >>> compile_blocks(nn.Linear(1, 1))
    """
    torch._dynamo.config.recompile_limit = 64  # widths of stages times training and evaluation
    kinds = (PatchEmbed, PolyBlock, PyramidPatchEmbed, *more)
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    fused = [module for module in modules if isinstance(module, PolyBlock) and module.fuses()]
    if len(fused) == sum(isinstance(module, PolyBlock) for module in modules) > 0:
        return
    for module in modules:
        if module not in fused:
            module.compile()
