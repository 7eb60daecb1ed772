"""A classifier on a whole data set held as arrays: every number at once."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from multilinear.analysis.graph import evaluation_mode
from multilinear.errors import MultilinearError
from multilinear.evaluate import metrics
from multilinear.evaluate.metrics import Calibration, Metrics

Images = npt.NDArray[np.uint8] | Tensor
Labels = npt.NDArray[Any] | Tensor | Sequence[int]


@dataclass(frozen=True)
class Evaluation:
    """What a classifier gets right and wrong.

    `per_class` is NaN for a class without samples. `auc` is NaN if no class has one, and `auc_left_out` says how many
    have none. `flipped` judges the mean of the logits of each image and its mirror image, when that was asked for.
    """

    count: int
    top1: float
    top5: float | None  # with 5 classes or fewer it would say nothing
    nll: float
    auc: float
    auc_left_out: int
    calibration: Calibration
    per_class: Tensor = field(repr=False)
    confusion: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    predictions: Tensor = field(repr=False)
    confidences: Tensor = field(repr=False)
    flipped: "Evaluation | None" = field(default=None, repr=False)

    @classmethod
    def from_logits(cls, logits: Tensor, labels: Tensor, flipped: "Evaluation | None" = None) -> "Evaluation":
        """Judge logits of shape (samples, classes).

        >>> Evaluation.from_logits(torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])).top1
        0.5
        """
        logits, labels = logits.detach().cpu().double(), labels.cpu()
        labels = metrics.check_labels(logits, labels)
        broken = (~logits.isfinite().all(1)).nonzero()
        if len(broken):
            raise MultilinearError(
                f"the logits of {len(broken)} of {len(labels)} images are not finite, first at image "
                f"{int(broken[0])}; the weights or the training diverged, or amp overflows: try without it"
            )
        probabilities = logits.softmax(1)
        task = "binary-class" if logits.shape[1] == 2 else "multi-class"
        auc = metrics.auc(probabilities, labels, task)
        return cls(
            count=len(labels),
            top1=metrics.top_k_accuracy(logits, labels),
            top5=metrics.top_k_accuracy(logits, labels, 5) if logits.shape[1] > 5 else None,
            nll=metrics.negative_log_likelihood(logits, labels),
            auc=auc.mean,
            auc_left_out=auc.left_out,
            calibration=metrics.calibration(probabilities, labels),
            per_class=metrics.per_class_accuracy(logits, labels),
            confusion=metrics.confusion_matrix(logits, labels),
            labels=labels,
            predictions=logits.argmax(1),
            confidences=probabilities.max(1).values,
            flipped=flipped,
        )

    @property
    def acc(self) -> float:
        """`top1` by the name MedMNIST gives it; its threshold of one half on two classes is the same rule."""
        return self.top1

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe; without the predictions of single images."""
        found: dict[str, Any] = {
            "count": self.count,
            "top1": self.top1,
            "top5": self.top5,
            "nll": self.nll,
            "auc": None if math.isnan(self.auc) else self.auc,
            "auc_left_out": self.auc_left_out,
            "acc": self.acc,
            "calibration": self.calibration.as_dict(),
            "per_class": metrics.without_nan(self.per_class),
            "confusion": self.confusion.tolist(),
        }
        if self.flipped is not None:
            found["flipped"] = self.flipped.as_dict()
        return found

    def numbers(self) -> dict[str, str]:
        """The headline numbers, for people."""
        found = {"top-1": f"{self.top1:.2%}"}
        if self.top5 is not None:
            found["top-5"] = f"{self.top5:.2%}"
        absent = f" ({self.auc_left_out} {'class' if self.auc_left_out == 1 else 'classes'} left out)"
        found["AUC"] = "undefined" if math.isnan(self.auc) else f"{self.auc:.4f}{absent if self.auc_left_out else ''}"
        return found | {"nll": f"{self.nll:.4f}", "calibration error": f"{self.calibration.error:.2%}"}

    def __str__(self) -> str:
        line = ", ".join(f"{name} {value}" for name, value in self.numbers().items()) + f", on {self.count:,} images"
        return line if self.flipped is None else f"{line}\nwith flips: {self.flipped}"


def evaluate(
    model: nn.Module,
    images: Images,
    labels: Labels,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int = 256,
    device: str | torch.device | None = None,
    amp: bool = False,
    flip: bool = False,
    distributed: bool = False,
    progress: bool = False,
) -> Evaluation:
    """Run `model` over uint8 images (samples, height, width, channels), scaled to [0, 1] and normalised.

    With a `device` the model is moved there; without, it runs where it is. `amp` uses bfloat16 on a CUDA device.
    With `distributed`, every process of the group must call this: each takes its share, and all get the same answer.

    >>> images, labels = np.zeros((4, 2, 2, 1), np.uint8), [0, 0, 1, 0]
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    >>> print(evaluate(model, images, labels, mean=[0.0], std=[1.0]).top1)
    0.75
    """
    if device is not None:
        model = model.to(device)
    example = next(model.parameters(), torch.zeros(()))
    if amp and example.device.type != "cuda":
        raise MultilinearError(f"amp needs a CUDA device, the model is on {example.device}; leave it out")
    if batch_size < 1:
        raise MultilinearError(f"batch_size must be 1 or more, got {batch_size}")
    _check_images(model, images, len(labels), mean, std)
    # a copy of an array, because torch warns of those that are only open for reading
    labels = metrics.flat_labels(labels.cpu() if isinstance(labels, Tensor) else torch.from_numpy(np.array(labels)))
    center, scale = (255 * torch.tensor(values, device=example.device).reshape(-1, 1, 1) for values in (mean, std))

    def logits_of(batch: Images) -> tuple[Tensor, Tensor | None]:
        """Logits, and their mean with those of the mirror images."""
        pixels = torch.as_tensor(batch).to(example.device).permute(0, 3, 1, 2).float()
        pixels = ((pixels - center) / scale).to(example.dtype)
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            logits: Tensor = model(pixels).float()
            return logits, (logits + model(pixels.flip(-1)).float()) / 2 if flip else None

    with evaluation_mode(model), torch.inference_mode():
        try:
            classes = logits_of(images[[0]])[0].shape[-1]
        except (RuntimeError, AssertionError) as error:
            raise MultilinearError(
                f"the model does not take images of shape {tuple(images.shape[1:])}: {str(error).splitlines()[0]}"
            ) from error
        metrics.check_labels(torch.empty(1, classes).expand(len(labels), classes), labels)
        plain, mirrored = Metrics(classes), Metrics(classes)
        for places in _batches(len(labels), batch_size, distributed, progress):
            logits, mean_of_both = logits_of(images[places.numpy()])
            plain.update(logits, labels[places], places)
            if mean_of_both is not None:
                mirrored.update(mean_of_both, labels[places], places)
    flipped = Evaluation.from_logits(*mirrored.gather(distributed)) if flip else None
    return Evaluation.from_logits(*plain.gather(distributed), flipped)


def _batches(count: int, batch_size: int, distributed: bool, progress: bool) -> Iterator[Tensor]:
    places = torch.arange(count)
    if distributed:
        if not (dist.is_available() and dist.is_initialized()):
            raise MultilinearError("distributed=True needs torch.distributed; initialise it, or leave it out")
        places = places[dist.get_rank() :: dist.get_world_size()]
    # on standard error, so that what a command prints stays readable by machines
    yield from track(
        places.split(batch_size), "evaluating", console=Console(stderr=True), disable=not progress, transient=True
    )


def _check_images(model: nn.Module, images: Images, count: int, mean: Sequence[float], std: Sequence[float]) -> None:
    if str(images.dtype).removeprefix("torch.") != "uint8" or images.ndim != 4:
        raise MultilinearError(
            f"images must be uint8 of shape (samples, height, width, channels), got {images.dtype} of shape "
            f"{tuple(images.shape)}; a grey array without channels needs images[..., None]"
        )
    if not len(images) or not count:
        raise MultilinearError("there are no images to evaluate; check the data set and the split")
    if len(images) != count:
        raise MultilinearError(f"{len(images)} images came with {count} labels; give one label for each")
    channels = images.shape[-1]
    if len(mean) != channels or len(std) != channels or min(std) <= 0:
        raise MultilinearError(
            f"images of {channels} channels need {channels} means and {channels} positive deviations, "
            f"got mean={list(mean)} and std={list(std)}"
        )
    config = getattr(model, "config", None)
    expected = config.get("in_chans", channels) if isinstance(config, dict) else channels
    if expected != channels:
        raise MultilinearError(
            f"the model wants {expected} channels, the images have {channels}; "
            "build the model with in_chans to match, or convert the images"
        )
