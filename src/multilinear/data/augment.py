"""Augmentation of whole batches on the device.

No Python per image and no shape that depends on data, so that a CUDA graph can hold it. Images come as uint8
(B, H, W, C) and leave as normalised floats (B, C, H, W).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

POLICIES = ("none", "trivial", "rand")


@dataclass(frozen=True)
class Mixed:
    """Images and what they are mixed from: class `first` with weight `share`, `second` with the rest."""

    images: Tensor
    first: Tensor
    second: Tensor
    share: Tensor


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 (B, H, W, C) to floats (B, C, H, W) with the given statistics, in channels-last memory.

    >>> normalise(torch.full((1, 2, 2, 1), 255, dtype=torch.uint8), torch.zeros(1), torch.ones(1)).max().item()
    1.0
    """
    return ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2)


def crop_and_flip(images: Tensor, padding: int, flip: bool) -> Tensor:
    """Move each image by up to `padding` pixels along both sides (zeros come in), and mirror every other one.

    >>> crop_and_flip(torch.ones(2, 8, 8, 3, dtype=torch.uint8), 2, True).shape
    torch.Size([2, 8, 8, 3])
    """
    count, height, width, _ = images.shape
    device = images.device
    rows = torch.arange(height, device=device).expand(count, height)
    columns = torch.arange(width, device=device).expand(count, width)
    if flip:
        mirror = torch.rand(count, 1, device=device) < 0.5
        columns = torch.where(mirror, width - 1 - columns, columns)
    if padding:
        images = F.pad(images, (0, 0, padding, padding, padding, padding))
        rows = rows + torch.randint(0, 2 * padding + 1, (count, 1), device=device)
        columns = columns + torch.randint(0, 2 * padding + 1, (count, 1), device=device)
    batch = torch.arange(count, device=device)[:, None, None]
    return images[batch, rows[:, :, None], columns[:, None, :]]


def erase(images: Tensor, probability: float) -> Tensor:
    """Random erasing: a rectangle of 2 to 33% of the area becomes zero (the mean, once images are normalised).

    >>> erase(torch.ones(4, 3, 16, 16), 1.0).min().item()
    0.0
    """
    count, _, height, width = images.shape
    area = torch.empty(count, device=images.device).uniform_(0.02, 1 / 3)
    ratio = torch.empty(count, device=images.device).uniform_(math.log(0.3), math.log(3.3)).exp()
    chosen = torch.rand(count, device=images.device) < probability
    box = _boxes((area * ratio).sqrt(), (area / ratio).sqrt(), height, width)
    return torch.where((box & chosen[:, None, None])[:, None], 0.0, images)


def mix(images: Tensor, labels: Tensor, mixup: float, cutmix: float, probability: float = 1.0) -> Mixed:
    """Mixup or CutMix (one of the two per image where both alphas are positive) with the reversed batch.

    >>> mixed = mix(torch.rand(4, 3, 8, 8), torch.arange(4), 0.5, 0.5)
    >>> bool(((0 <= mixed.share) & (mixed.share <= 1)).all())
    True
    """
    count, _, height, width = images.shape
    device, other = images.device, images.flip(0)
    cut = torch.rand(count, device=device) < (0.5 if mixup > 0 and cutmix > 0 else float(cutmix > 0))
    share = torch.where(cut, _beta(cutmix or 1.0, count, device), _beta(mixup or 1.0, count, device))
    share = torch.where(torch.rand(count, device=device) < probability, share, 1.0)
    side = (1 - share).sqrt()
    box = _boxes(side, side, height, width)
    cut_share = 1 - box.float().mean((1, 2))
    blend = share[:, None, None, None]
    mixed = torch.where(
        cut[:, None, None, None], torch.where(box[:, None], other, images), blend * images + (1 - blend) * other
    )
    return Mixed(mixed, labels, labels.flip(0), torch.where(cut, cut_share, share))


def _beta(alpha: float, count: int, device: torch.device) -> Tensor:
    gamma = torch._standard_gamma(torch.full((2, count), alpha, device=device))
    share: Tensor = gamma[0] / (gamma[0] + gamma[1]).clamp_min(1e-12)
    return share


def _boxes(tall: Tensor, wide: Tensor, height: int, width: int) -> Tensor:
    """Masks (B, H, W) of rectangles with sides as shares of the image, centred anywhere, cut at the border."""
    centre = torch.rand(2, len(tall), 1, device=tall.device)
    rows = (torch.arange(height, device=tall.device) + 0.5) / height
    columns = (torch.arange(width, device=tall.device) + 0.5) / width
    inside_rows = (rows - centre[0]).abs() < tall[:, None] / 2
    inside_columns = (columns - centre[1]).abs() < wide[:, None] / 2
    return inside_rows[:, :, None] & inside_columns[:, None, :]


def apply_policy(images: Tensor, policy: str, operations: int = 1, magnitude: float = 0.5) -> Tensor:
    """TrivialAugment (`"trivial"`: one random operation of random strength) or RandAugment (`"rand"`: `operations` of
    them at `magnitude` of their range) on floats in [0, 1], (B, C, H, W).

    >>> apply_policy(torch.rand(4, 3, 8, 8), "trivial").shape
    torch.Size([4, 3, 8, 8])
    """
    if policy == "none":
        return images
    for _ in range(1 if policy == "trivial" else operations):
        count = len(images)
        choice = torch.randint(0, len(_COLOUR) + len(_GEOMETRY), (count,), device=images.device)
        strength = torch.rand(count, device=images.device) if policy == "trivial" else magnitude
        strength = strength * torch.ones(count, device=images.device)
        sign = torch.where(torch.rand(count, device=images.device) < 0.5, -1.0, 1.0)
        changed = _warp(images, choice - len(_COLOUR), strength * sign)
        for i, operation in enumerate(_COLOUR):
            changed = torch.where((choice == i)[:, None, None, None], operation(images, strength, sign), changed)
        images = changed.clamp(0, 1)
    return images


def _warp(images: Tensor, choice: Tensor, amount: Tensor) -> Tensor:
    """Rotate, shear or move where `choice` counts into `_GEOMETRY`; others stay exactly as they are."""
    matrix = torch.eye(2, 3, device=images.device).repeat(len(images), 1, 1)
    for i, (entries, most) in enumerate(_GEOMETRY):
        value = torch.where(choice == i, amount * most, 0.0)
        for row, column, function in entries:
            matrix[:, row, column] = matrix[:, row, column] + function(value)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, padding_mode="zeros", align_corners=False)
    return torch.where((choice >= 0)[:, None, None, None], moved, images)


def _same(value: Tensor) -> Tensor:
    return value


# entries (row, column, what to add to the identity there) and the largest amount
_GEOMETRY: Sequence[tuple[Sequence[tuple[int, int, Callable[[Tensor], Tensor]]], float]] = (
    (
        ((0, 0, lambda a: a.cos() - 1), (0, 1, lambda a: -a.sin()), (1, 0, torch.sin), (1, 1, lambda a: a.cos() - 1)),
        0.6,
    ),
    (((0, 1, _same),), 0.5),
    (((1, 0, _same),), 0.5),
    (((0, 2, _same),), 0.6),
    (((1, 2, _same),), 0.6),
)


def _blend(images: Tensor, towards: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Move away from or towards `towards` by up to 0.9, as brightness, colour and contrast do."""
    factor = (1 + 0.9 * strength * sign)[:, None, None, None]
    return towards + factor * (images - towards)


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images
    red, green, blue = images.split(1, dim=1)
    grey: Tensor = 0.299 * red + 0.587 * green + 0.114 * blue
    return grey.expand_as(images)


def _autocontrast(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp_min(1e-3), images)


def _posterize(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    levels = torch.exp2((8 - 6 * strength).round())[:, None, None, None]
    return (images * (levels - 1e-3)).floor() / levels


def _solarize(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return torch.where(images >= (1 - strength)[:, None, None, None], 1 - images, images)


def _sharpness(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    smooth = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return _blend(images, smooth, strength, sign)


_COLOUR: Sequence[Callable[[Tensor, Tensor, Tensor], Tensor]] = (
    lambda x, strength, sign: x,
    lambda x, strength, sign: _blend(x, torch.zeros_like(x), strength, sign),
    lambda x, strength, sign: _blend(x, _grey(x), strength, sign),
    lambda x, strength, sign: _blend(x, _grey(x.mean((2, 3), keepdim=True)), strength, sign),
    _sharpness,
    _posterize,
    _solarize,
    _autocontrast,
)
