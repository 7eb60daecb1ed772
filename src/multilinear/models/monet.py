"""MONet, from *Multilinear Operator Networks* (Cheng, Chrysos, Georgopoulos, Cevher; ICLR 2024).

A pyramid patch embedding, Poly-Blocks, a global mean and a linear head. No activation functions, no attention, and no
parameter tied to the image size. One stage of one width (`monet_t`, `monet_s`) or four stages (`monet_ms_t`,
`monet_ms_s`). Sizes, and where the paper's own figures do not add up, are in docs/models.md.
"""

from collections.abc import Sequence
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead, calculate_drop_path_rates
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from multilinear.errors import MultilinearError
from multilinear.layers import DEFAULT_INIT, PatchEmbed, PolyBlock, PyramidPatchEmbed, init_weights, prepare_ahead
from multilinear.models.release import from_release


class Downsample(nn.Module):
    """Halve the token grid with a 3x3 convolution of stride 2, on (B, H, W, C)."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_dim, out_dim, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x.permute(0, 3, 1, 2))
        return y.permute(0, 2, 3, 1)


class Stage(nn.Module):
    """Blocks of one width, behind a down-sampling where the stage is not the first."""

    grad_checkpointing = False

    def __init__(self, in_dim: int | None, dim: int, drop_paths: Sequence[float | None], **block: Any) -> None:
        super().__init__()
        self.downsample = nn.Identity() if in_dim is None else Downsample(in_dim, dim)
        self.blocks = nn.Sequential(*(PolyBlock(dim, drop_path=rate, **block) for rate in drop_paths))

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x).contiguous()  # the same memory layout ahead of every block: compiled once
        if self.grad_checkpointing and self.training:
            return checkpoint_seq(self.blocks, x)  # type: ignore[no-any-return]
        y: Tensor = self.blocks(x)
        return y


class MONet(nn.Module):
    """Multilinear Operator Network on images (B, C, H, W) of any size that the patching divides.

    Args:
        widths: channels of each stage; one entry for the single-stage network.
        depths: Poly-Blocks of each stage.
        patches: levels of the pyramid patch embedding.
        norm: `"layer"` as published, `"batch"` or `"affine"` for a network that is a polynomial at inference.
        fuse: how pyramid levels meet, `"add"` or `"concat"`.
        border: what a spatial shift does at the border, `"keep"` or `"zero"`.
        shift_second: False keeps the second branch of each shifting Mu-Layer in place.
        ranks: hidden widths of the two Mu-Layers of every block; `width` and `expansion * width` if not given.
        overlap: in place of the pyramid, patches of the one size in `patches` that share this many pixels.
        drop_path_rate: stochastic depth of the last block; it rises linearly from 0.

    >>> import torch
    >>> net = MONet(widths=(16,), depths=(2,), patches=(2,), num_classes=10)
    >>> net(torch.randn(1, 3, 28, 32)).shape
    torch.Size([1, 10])
    """

    def __init__(
        self,
        widths: Sequence[int],
        depths: Sequence[int],
        patches: Sequence[int],
        *,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        expansion: int = 3,
        shrinkage: int = 4,
        norm: str = "layer",
        fuse: str = "add",
        border: str = "keep",
        shift_second: bool = True,
        ranks: Sequence[int] | None = None,
        overlap: int = 0,
        init: str = DEFAULT_INIT,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if len(widths) != len(depths) or not widths:
            raise MultilinearError(f"widths and depths need one entry per stage, got {list(widths)} and {list(depths)}")
        if ranks is not None and len(ranks) != 2:
            raise MultilinearError(f"ranks are two numbers, one for each Mu-Layer of a block; got {list(ranks)}")
        if overlap and len(patches) != 1:
            raise MultilinearError(f"overlapping patches have one level, got {list(patches)}")
        self.config: dict[str, Any] = {
            "widths": list(widths), "depths": list(depths), "patches": list(patches), "in_chans": in_chans,
            "num_classes": num_classes, "global_pool": global_pool, "expansion": expansion, "shrinkage": shrinkage,
            "norm": norm, "fuse": fuse, "border": border, "shift_second": shift_second,
            "ranks": None if ranks is None else list(ranks), "overlap": overlap, "init": init, "drop_rate": drop_rate,
            "drop_path_rate": drop_path_rate,
        }  # fmt: skip
        self.pretrained_cfg: dict[str, Any] = {}  # timm fills it in
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = widths[-1]
        self.embed: PyramidPatchEmbed | PatchEmbed
        if overlap:
            self.embed = PatchEmbed(patches[0], in_chans, widths[0], overlap=overlap, init=init)
        else:
            self.embed = PyramidPatchEmbed(patches, in_chans, widths[0], fuse=fuse, init=init)
        rates: list[list[float | None]] = [[None] * depth for depth in depths]
        if drop_path_rate > 0:
            rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        branch_scale = (2 * sum(depths)) ** -0.5
        stages, before, stride = [], None, self.embed.stride
        self.feature_info = []
        for i, (width, stage_rates) in enumerate(zip(widths, rates, strict=True)):
            stages.append(
                Stage(
                    before, width, stage_rates, expansion=expansion, shrinkage=shrinkage, norm=norm, shift=border,
                    shift_second=shift_second, ranks=None if ranks is None else tuple(ranks),
                    branch_scale=branch_scale, init=init,
                )
            )  # fmt: skip
            stride *= 1 if before is None else 2
            before = width
            self.feature_info.append({"num_chs": width, "reduction": stride, "module": f"stages.{i}"})
        self.stages = nn.Sequential(*stages)
        self.head = ClassifierHead(widths[-1], num_classes, global_pool, drop_rate, input_fmt="NHWC")
        for stage in stages:
            init_weights(stage.downsample, init)
        init_weights(self.head, init)

    @property
    def degree(self) -> int:
        """Total degree of the polynomial that the network is when its norms are affine: 4 per block."""
        return int(4 ** sum(self.config["depths"]))

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks = [(r"^stages\.(\d+)", None)] if coarse else [
            (r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None),
        ]  # fmt: skip
        return {"stem": r"^embed", "blocks": blocks}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def get_classifier(self) -> nn.Module:
        return self.head.fc  # type: ignore[no-any-return]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = self.config["num_classes"] = num_classes
        if global_pool is not None:
            self.config["global_pool"] = global_pool
        self.head.reset(num_classes, global_pool)
        init_weights(self.head, self.config["init"])

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Features after the stages `indices` (a MONet has no final norm, so `norm` changes nothing)."""
        if output_fmt not in ("NCHW", "NHWC"):
            raise MultilinearError(f"unknown output_fmt {output_fmt!r}; known: NCHW, NHWC")
        take, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        x = self.embed(x)
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x)
            if i in take:
                intermediates.append(x.permute(0, 3, 1, 2) if output_fmt == "NCHW" else x)
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return list(take)

    def forward_features(self, x: Tensor) -> Tensor:
        prepare_ahead(self.stages, x)
        y: Tensor = self.stages(self.embed(x))
        return y

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x, pre_logits=pre_logits)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _cfg(side: int = 224, num_classes: int = 1000, first_conv: str = "embed.levels.0") -> dict[str, Any]:
    return {
        "url": "", "num_classes": num_classes, "input_size": (3, side, side), "pool_size": None, "crop_pct": 1.0,
        "interpolation": "bicubic", "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD,
        "first_conv": first_conv, "classifier": "head.fc", "fixed_input_size": False, "license": "mit",
        "paper_name": "Multilinear Operator Networks", "paper_ids": "arXiv:2401.17992",
    }  # fmt: skip


default_cfgs = generate_default_cfgs(
    {
        "monet_t": _cfg(),
        "monet_s": _cfg(),
        "monet_ms_t": _cfg(),
        "monet_ms_s": _cfg(),
        "monet_t_28": _cfg(28, 10),
        "monet_t_32": _cfg(32, 10),
        "monet_nano": _cfg(32, 10),
        "monet_micro": _cfg(28, 10),
        "monet_private_1": _cfg(28, 10, "embed.proj"),
        "monet_private_2": _cfg(28, 10, "embed.proj"),
        "monet_private_3": _cfg(32, 10, "embed.proj"),
        "monet_private_3l": _cfg(32, 10, "embed.proj"),
        "monet_private_7": _cfg(32, 10, "embed.proj"),
    }
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> MONet:
    stages = len(kwargs["widths"])
    return build_model_with_cfg(  # type: ignore[no-any-return]
        MONet,
        variant,
        pretrained,
        pretrained_filter_fn=from_release,
        feature_cfg={"out_indices": tuple(range(stages)), "feature_cls": "getter"},
        **kwargs,
    )


@register_model
def monet_t(pretrained: bool = False, **kwargs: Any) -> MONet:
    """MONet-Tiny: 192 channels, 32 blocks, tokens of 14 pixels."""
    return _create("monet_t", pretrained, **{"widths": (192,), "depths": (32,), "patches": (7,), **kwargs})


@register_model
def monet_s(pretrained: bool = False, **kwargs: Any) -> MONet:
    """MONet-Small: 320 channels, 45 blocks, tokens of 14 pixels."""
    return _create("monet_s", pretrained, **{"widths": (320,), "depths": (45,), "patches": (7,), **kwargs})


@register_model
def monet_ms_t(pretrained: bool = False, **kwargs: Any) -> MONet:
    """Multi-stage MONet-Tiny: 34 blocks at strides 4 to 32."""
    sizes = {"widths": (64, 128, 192, 192), "depths": (4, 8, 12, 10), "patches": (2,), "shrinkage": 8}
    return _create("monet_ms_t", pretrained, **{**sizes, **kwargs})


@register_model
def monet_ms_s(pretrained: bool = False, **kwargs: Any) -> MONet:
    """Multi-stage MONet-Small: 36 blocks at strides 4 to 32."""
    sizes = {"widths": (128, 192, 256, 384), "depths": (4, 6, 12, 14), "patches": (2,), "shrinkage": 8}
    return _create("monet_ms_s", pretrained, **{**sizes, **kwargs})


@register_model
def monet_t_28(pretrained: bool = False, **kwargs: Any) -> MONet:
    """MONet-Tiny for 28-pixel images: tokens of 4 pixels."""
    return _create("monet_t_28", pretrained, **{"widths": (192,), "depths": (32,), "patches": (2,), **kwargs})


@register_model
def monet_t_32(pretrained: bool = False, **kwargs: Any) -> MONet:
    """MONet-Tiny for 32-pixel images: tokens of 4 pixels."""
    return _create("monet_t_32", pretrained, **{"widths": (192,), "depths": (32,), "patches": (2,), **kwargs})


@register_model
def monet_nano(pretrained: bool = False, **kwargs: Any) -> MONet:
    """A network for a laptop: 96 channels, 8 blocks, 32-pixel images."""
    return _create("monet_nano", pretrained, **{"widths": (96,), "depths": (8,), "patches": (2,), **kwargs})


@register_model
def monet_micro(pretrained: bool = False, **kwargs: Any) -> MONet:
    """The smallest: 48 channels, 3 blocks, 28-pixel images."""
    return _create("monet_micro", pretrained, **{"widths": (48,), "depths": (3,), "patches": (2,), **kwargs})


# What encryption needs, or gets for free: norms that fold, shifts that are rotations, patches that the client cuts, and
# a stream wider than the products, since it is never computed.
_PRIVATE = {"norm": "batch", "border": "zero", "shift_second": False, "shrinkage": 1}


@register_model
def monet_private_1(pretrained: bool = False, **kwargs: Any) -> MONet:
    """For encrypted 28-pixel images at ring size 8192: one block."""
    sizes = {"widths": (128,), "depths": (1,), "patches": (7,), "overlap": 6, "ranks": (64, 192), **_PRIVATE}
    return _create("monet_private_1", pretrained, **{**sizes, **kwargs})


@register_model
def monet_private_2(pretrained: bool = False, **kwargs: Any) -> MONet:
    """For encrypted 28-pixel images at ring size 16384: two blocks on tokens of 4 pixels."""
    sizes = {"widths": (96,), "depths": (2,), "patches": (4,), "overlap": 4, "ranks": (48, 96), **_PRIVATE}
    return _create("monet_private_2", pretrained, **{**sizes, **kwargs})


@register_model
def monet_private_3(pretrained: bool = False, **kwargs: Any) -> MONet:
    """For encrypted 32-pixel images at ring size 16384: three blocks."""
    sizes = {"widths": (192,), "depths": (3,), "patches": (4,), "overlap": 4, "ranks": (64, 192), **_PRIVATE}
    return _create("monet_private_3", pretrained, **{**sizes, **kwargs})


@register_model
def monet_private_3l(pretrained: bool = False, **kwargs: Any) -> MONet:
    """The larger one of three blocks."""
    sizes = {"widths": (256,), "depths": (3,), "patches": (4,), "overlap": 4, "ranks": (128, 256), **_PRIVATE}
    return _create("monet_private_3l", pretrained, **{**sizes, **kwargs})


@register_model
def monet_private_7(pretrained: bool = False, **kwargs: Any) -> MONet:
    """As deep as 128-bit security allows, at ring size 32768: seven blocks."""
    sizes = {"widths": (256,), "depths": (7,), "patches": (4,), "overlap": 4, "ranks": (128, 128), **_PRIVATE}
    return _create("monet_private_7", pretrained, **{**sizes, **kwargs})
