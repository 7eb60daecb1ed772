"""The authors' released checkpoints, under our names.

The release calls the stem `fs` and `fs2`, stages `network.i.model.j.0`, down-sampling `network.i.proj` and the matrices
U1 (A), U2 (D), U3 (B) and C. Its weights were trained under its in-place shift as a GPU runs it, which is a race; ours
is the shift that was meant, so expect outputs near those of the release but not equal to them.
"""

import re
import warnings
from collections.abc import Mapping

from torch import Tensor, nn

from multilinear.errors import MultilinearError

_PARTS = {
    "norm": "norm1", "mlp1": "mu1", "mlp2": "mu2", "U1": "A", "U2": "D", "U3": "B", "C": "C", "norm3": "norm_b",
    "alpha": "alpha",
}  # fmt: skip
_BLOCK = re.compile(r"network\.(\d+)\.model\.(\d+)\.0\.(.+)")
_DOWN = re.compile(r"network\.(\d+)\.proj\.(weight|bias)")


class ReleasedWeightsWarning(UserWarning):
    """Said once for weights that were trained under the release's racing shift."""


def from_release(state: Mapping[str, Tensor], model: nn.Module | None = None) -> dict[str, Tensor]:
    """Rename the weights of the authors' multi-stage release; weights already under our names pass through.

    The release ships pickles, which this library does not open. In an environment of your own, turn one into
    safetensors first: `save_file(torch.load(path, weights_only=True), "monet.safetensors")`.

    >>> import torch
    >>> with warnings.catch_warnings(action="ignore"):
    ...     list(from_release({"fs.weight": torch.zeros(1), "network.0.model.0.0.mlp1.U2.bias": torch.zeros(1)}))
    ['embed.levels.0.weight', 'stages.0.blocks.0.mu1.D.bias']
    """
    state = {key.removeprefix("module."): value for key, value in state.items()}
    if not any(key.startswith(("fs.", "network.")) for key in state):
        return dict(state)
    warnings.warn(
        "these weights were trained under the release's in-place shift, a race on GPUs; expect outputs that differ "
        "slightly from the published ones, and fine-tune or re-evaluate before quoting an accuracy",
        ReleasedWeightsWarning,
        stacklevel=2,
    )
    # stages and down-samplings interleave under one counter; count each kind by itself
    stages = sorted({int(match[1]) for key in state if (match := _BLOCK.fullmatch(key))})
    downs = sorted({int(match[1]) for key in state if (match := _DOWN.fullmatch(key))})
    named = {_rename(key, stages, downs): value for key, value in state.items()}
    return {key: value.reshape(1) if key.endswith(".alpha") else value for key, value in named.items()}


def _rename(key: str, stages: list[int], downs: list[int]) -> str:
    if key.startswith("fs."):
        return "embed.levels.0." + key.removeprefix("fs.")
    if key.startswith("fs2."):
        return "embed.reduce.0." + key.removeprefix("fs2.")
    if key.startswith("head.1."):
        return "head.fc." + key.removeprefix("head.1.")
    if match := _DOWN.fullmatch(key):
        return f"stages.{downs.index(int(match[1])) + 1}.downsample.proj.{match[2]}"
    if match := _BLOCK.fullmatch(key):
        inside = [
            # `norm1` inside a Mu-Layer is the norm on A x, while the block's own is called `norm`
            "norm_a" if part == "norm1" else _PARTS.get(part, part)
            for part in match[3].split(".")
        ]
        return f"stages.{stages.index(int(match[1]))}.blocks.{match[2]}.{'.'.join(inside)}"
    raise MultilinearError(f"unexpected weight {key!r} in a checkpoint that looks like the authors' release")
