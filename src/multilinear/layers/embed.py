"""From an image (B, C, H, W) to tokens (B, H', W', C'): one patch size, or a pyramid of them."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multilinear.errors import MultilinearError, check_choice
from multilinear.layers.init import DEFAULT_INIT, init_weights

FUSIONS = ("add", "concat")


def check_image_size(height: int, width: int, stride: int) -> None:
    """Raise, with the nearest sizes that fit, unless `stride` divides both sides.

    >>> check_image_size(28, 56, 14)
    """
    if height % stride or width % stride:
        fitting = [sorted({max(side // stride, 1) * stride, -(-side // stride) * stride}) for side in (height, width)]
        near = " or ".join(str(side) for side in fitting[0])
        if height != width:
            near = f"height {near}, width " + " or ".join(str(side) for side in fitting[1])
        raise MultilinearError(
            f"image size {height}x{width} is not divisible by the patching's {stride}; nearest that fit: {near}"
        )


def embed_patches(image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Tokens (B, H', W', C') of patches that do not overlap: a convolution as wide as its step, as one product.

    >>> image, weight, bias = torch.randn(2, 3, 8, 12), torch.randn(5, 3, 4, 4), torch.randn(5)
    >>> tokens = F.conv2d(image, weight, bias, stride=4).permute(0, 2, 3, 1)
    >>> torch.allclose(embed_patches(image, weight, bias), tokens, atol=1e-4)
    True
    >>> torch.allclose(embed_patches(image.to(memory_format=torch.channels_last), weight, bias), tokens, atol=1e-4)
    True
    """
    size = weight.shape[-1]
    batch, chans, height, width = image.shape
    if torch.is_autocast_enabled(image.device.type):
        image = image.to(torch.get_autocast_dtype(image.device.type))  # ahead of the copy that cuts patches
    rows, columns = height // size, width // size
    if image.is_contiguous(memory_format=torch.channels_last):
        patches = image.permute(0, 2, 3, 1).view(batch, rows, size, columns, size, chans).permute(0, 1, 3, 2, 4, 5)
        weight = weight.permute(0, 2, 3, 1)
    else:
        patches = image.reshape(batch, chans, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
    return F.linear(patches.flatten(3), weight.flatten(1), bias)


def compose_kernels(inner: Tensor, inner_bias: Tensor, outer: Tensor, outer_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel of a convolution (kernel = stride = p) followed by another (kernel = stride = q): one of p * q.

    >>> compose_kernels(torch.ones(4, 3, 2, 2), torch.ones(4), torch.ones(5, 4, 2, 2), torch.ones(5))[0].shape
    torch.Size([5, 3, 4, 4])
    """
    weight = torch.einsum("omyx,micd->oiycxd", outer, inner)
    out, chans, q, p = weight.shape[:4]
    return weight.reshape(out, chans, q * p, q * p), torch.einsum("omyx,m->o", outer, inner_bias) + outer_bias


class PatchEmbed(nn.Module):
    """Patches, each mapped linearly to a token. They share `overlap` pixels with their neighbours, zeros at the border.

    >>> PatchEmbed(4, 3, 16, overlap=4)(torch.randn(2, 3, 8, 12)).shape
    torch.Size([2, 2, 3, 16])
    """

    def __init__(self, patch: int, in_chans: int, dim: int, *, overlap: int = 0, init: str = DEFAULT_INIT) -> None:
        super().__init__()
        if overlap < 0 or overlap % 2:
            raise MultilinearError(f"patches overlap by an even number of pixels, half on each side; got {overlap}")
        self.stride, self.overlap = patch, overlap
        self.proj = nn.Conv2d(in_chans, dim, patch + overlap, stride=patch, padding=overlap // 2)
        init_weights(self, init, zero_biases=False)  # see PyramidPatchEmbed

    def forward(self, image: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            check_image_size(image.shape[-2], image.shape[-1], self.stride)
        if self.overlap == 0 and image.is_cuda and self.proj.bias is not None:
            return embed_patches(image, self.proj.weight, self.proj.bias)  # faster there, also on the way back
        tokens: Tensor = self.proj(image)
        return tokens.permute(0, 2, 3, 1)


class PyramidPatchEmbed(nn.Module):
    """The paper's pyramid: embed fine patches, reduce, and fuse with the embedding of coarser patches.

    `patches` lists the levels, in any order; each size must divide the next larger one. One level `p` means patches of
    p reduced by a 2x2 convolution of stride 2 (tokens of 2p pixels). With more levels the finer tokens are reduced to
    the grid of the next coarser level and fused with it, up to the coarsest, which gives the token size.

    Args:
        fuse: `"add"` as in the paper, or `"concat"`: concatenation and a 1x1 convolution, its U-Net variant.

    >>> PyramidPatchEmbed([14, 7], 3, 16)(torch.randn(1, 3, 28, 28)).shape
    torch.Size([1, 2, 2, 16])
    """

    def __init__(
        self, patches: Sequence[int], in_chans: int, dim: int, *, fuse: str = "add", init: str = DEFAULT_INIT
    ) -> None:
        super().__init__()
        sizes = sorted(patches)
        if not sizes or sizes[0] < 1:
            raise MultilinearError(f"patches must be one or more positive sizes, got {list(patches)}")
        for fine, coarse in pairwise(sizes):
            if coarse % fine or coarse == fine:
                raise MultilinearError(f"pyramid levels must divide each other: {fine} does not divide {coarse}")
        check_choice("fusion", fuse, FUSIONS)
        self.levels = nn.ModuleList(nn.Conv2d(in_chans, dim, size, stride=size) for size in sizes)
        ratios = [coarse // fine for fine, coarse in pairwise(sizes)] or [2]
        self.reduce = nn.ModuleList(nn.Conv2d(dim, dim, ratio, stride=ratio) for ratio in ratios)
        self.mix = nn.ModuleList(nn.Conv2d(2 * dim, dim, 1) for _ in sizes[1:]) if fuse == "concat" else None
        self.stride = max(sizes[-1], 2 * sizes[0])
        # An erased or padded region is zero. If its tokens were too, they would stay so, block after block, until the
        # shift brings others, and the gradient of a norm of zeros is 1 / sqrt(eps): together more than a float holds.
        init_weights(self, init, zero_biases=False)

    def forward(self, image: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            check_image_size(image.shape[-2], image.shape[-1], self.stride)
        if image.is_cuda and self._reduces_weights():
            return embed_patches(image, *self.merged())
        x = self.levels[0](image)
        for i, reduce in enumerate(self.reduce):
            x = reduce(x)
            if i + 1 < len(self.levels):
                coarse = self.levels[i + 1](image)
                x = x + coarse if self.mix is None else self.mix[i](torch.cat([x, coarse], dim=1))
        tokens: Tensor = x
        return tokens.permute(0, 2, 3, 1)

    @torch.no_grad()
    def as_one(self) -> "PyramidPatchEmbed | PatchEmbed":
        """The same map as one convolution, where that has fewer weights; for inference, since it is a copy.

        >>> PyramidPatchEmbed([2], 3, 64).as_one().stride
        4
        """
        if not self._reduces_weights():
            return self
        weight, bias = self.merged()
        one = PatchEmbed(self.stride, weight.shape[1], weight.shape[0]).to(weight)
        one.proj.weight.copy_(weight)
        assert one.proj.bias is not None
        one.proj.bias.copy_(bias)
        return one

    def _reduces_weights(self) -> bool:
        """Whether the whole pyramid as one map has fewer weights than its parts: then it is also faster."""
        level, last = self.levels[0], self.reduce[-1]
        assert isinstance(level, nn.Conv2d) and isinstance(last, nn.Conv2d)
        return last.out_channels * level.in_channels * self.stride**2 <= sum(p.numel() for p in self.parameters())

    def merged(self) -> tuple[Tensor, Tensor]:
        """Kernel and bias of the one convolution that the whole pyramid is, as differentiable as its parts."""
        weight, bias = _kernel(self.levels[0])
        with torch.autocast("cuda" if weight.is_cuda else "cpu", enabled=False):
            for i, reduce in enumerate(self.reduce):
                weight, bias = compose_kernels(weight, bias, *_kernel(reduce))
                if i + 1 < len(self.levels):
                    coarse, coarse_bias = _kernel(self.levels[i + 1])
                    if self.mix is None:
                        weight, bias = weight + coarse, bias + coarse_bias
                    else:
                        both = torch.cat([weight, coarse]), torch.cat([bias, coarse_bias])
                        weight, bias = compose_kernels(*both, *_kernel(self.mix[i]))
        return weight, bias


def _kernel(conv: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(conv, nn.Conv2d) and conv.bias is not None
    return conv.weight, conv.bias
