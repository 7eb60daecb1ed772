"""Classify image files with a saved network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.data import create_transform
from torch import Tensor, nn

from multilinear.data import open_image
from multilinear.errors import MultilinearError
from multilinear.models import load, read_header


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, best first."""

    image: str
    labels: list[str]
    probabilities: list[float]


class Predictor:
    """A network with the preprocessing and class names of its weights file.

    >>> import tempfile
    >>> from PIL import Image
    >>> from multilinear.models import create, save
    >>> folder = Path(tempfile.mkdtemp())
    >>> Image.new("RGB", (40, 30)).save(folder / "black.png")
    >>> net = Predictor(save(create("monet_micro"), folder / "net.safetensors", labels=list("abcdefghij")))
    >>> len(net(folder / "black.png", top=3).labels)
    3
    """

    def __init__(self, weights: str | Path) -> None:
        header = read_header(weights)
        self.model: nn.Module = load(weights)
        arguments = header["arguments"]
        self.channels = int(arguments["in_chans"])
        self.classes = int(arguments["num_classes"])
        if self.classes < 1:
            raise MultilinearError(f"{weights} has no classifier (num_classes=0); predict needs one")
        self.labels = _labels(header.get("labels"), self.classes)
        self.transform = _transform(header.get("preprocessing") or {}, self.channels)

    def __call__(self, path: str | Path, top: int = 5) -> Prediction:
        image: Tensor = self.transform(open_image(path, self.channels))
        with torch.inference_mode():
            probabilities = self.model(image[None])[0].softmax(-1)
        values, indices = probabilities.topk(min(top, self.classes))
        return Prediction(str(path), [self.labels[int(i)] for i in indices], [float(value) for value in values])


def _labels(labels: Sequence[str] | None, classes: int) -> list[str]:
    if labels is None or len(labels) != classes:
        return [str(i) for i in range(classes)]
    return [str(label) for label in labels]


def _transform(preprocessing: Mapping[str, Any], channels: int) -> Any:
    size = tuple(preprocessing.get("input_size") or (channels, 224, 224))
    mean, std = (list(preprocessing.get(key) or [default]) for key, default in (("mean", 0.5), ("std", 0.5)))
    if len(mean) != channels:  # weights for RGB statistics used on grey images, or the reverse
        mean, std = [sum(mean) / len(mean)] * channels, [sum(std) / len(std)] * channels
    return create_transform(
        (channels, *size[1:]),
        mean=mean,
        std=std,
        interpolation=str(preprocessing.get("interpolation") or "bicubic"),
        crop_pct=float(preprocessing.get("crop_pct") or 1.0),
    )
