"""Numbers that judge a classifier, as plain functions of its scores and the true labels, and their collection in parts.

Scores are (samples, classes). Where two classes tie, the first one is the prediction, in every function alike.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from multilinear.errors import MultilinearError, check_choice

TASKS = ("multi-class", "binary-class", "ordinal-regression")


def top_k_accuracy(scores: Tensor, labels: Tensor, k: int = 1) -> float:
    """The share of samples whose true class is among the `k` highest scores.

    >>> top_k_accuracy(torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.3, 0.2]]), torch.tensor([1, 1]))
    0.5
    """
    labels = check_labels(scores, labels)
    classes = scores.shape[1]
    if not 1 <= k <= classes:
        raise MultilinearError(f"k={k} does not fit {classes} classes; give 1 to {classes}")
    true = scores.gather(1, labels[:, None])
    earlier = torch.arange(classes, device=scores.device) < labels[:, None]
    rank = ((scores > true) | ((scores == true) & earlier)).sum(1)
    return (rank < k).double().mean().item()


def confusion_matrix(scores: Tensor, labels: Tensor) -> Tensor:
    """Counts: row is the true class, column the predicted one.

    >>> confusion_matrix(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3]]), torch.tensor([1, 1, 0])).tolist()
    [[1, 0], [1, 1]]
    """
    labels = check_labels(scores, labels)
    classes = scores.shape[1]
    return torch.bincount(labels * classes + scores.argmax(1), minlength=classes**2).reshape(classes, classes)


def per_class_accuracy(scores: Tensor, labels: Tensor) -> Tensor:
    """The share of each class that is recognised; NaN for a class without samples.

    >>> per_class_accuracy(torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.2, 0.0]]), torch.tensor([1, 1])).tolist()
    [nan, 0.5, nan]
    """
    counts = confusion_matrix(scores, labels).double()
    return counts.diagonal() / counts.sum(1)


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> float:
    """The mean of -log(probability of the true class), in nats.

    >>> round(negative_log_likelihood(torch.zeros(4, 10), torch.arange(4)), 4)  # log 10
    2.3026
    """
    labels = check_labels(logits, labels)
    return F.cross_entropy(logits.double(), labels).item()


@dataclass(frozen=True)
class Calibration:
    """How far confidence is from accuracy, overall and in bins of equal width; an empty bin holds NaN twice."""

    error: float
    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "error": self.error,
            "edges": self.edges.tolist(),
            "confidence": without_nan(self.confidence),
            "accuracy": without_nan(self.accuracy),
            "count": self.count.tolist(),
        }


def calibration(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Calibration:
    """The expected calibration error over `bins` bins (lower, upper], and the bins for a reliability plot.

    >>> round(calibration(torch.tensor([[0.9, 0.1], [0.7, 0.3]]), torch.tensor([0, 1])).error, 6)  # (0.1 + 0.7) / 2
    0.4
    """
    labels = check_labels(probabilities, labels)
    check_probabilities(probabilities)
    if bins < 1:
        raise MultilinearError(f"a calibration needs 1 bin or more, got {bins}")
    confidence, prediction = probabilities.double().max(1)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    place = torch.bucketize(confidence, edges[1:-1])
    count = torch.bincount(place, minlength=bins)
    sure = torch.bincount(place, weights=confidence, minlength=bins)
    right = torch.bincount(place, weights=(prediction == labels).double(), minlength=bins)
    error = (sure - right).abs().sum().item() / len(labels)
    return Calibration(error, edges, sure / count, right / count, count)


class Auc(NamedTuple):
    """The mean over classes, and how many were left out of it for want of samples in or outside the class."""

    mean: float
    left_out: int


def class_auc(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Area under the ROC curve of each class against the rest; NaN where a class has no samples, or all of them.

    >>> class_auc(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]]), torch.tensor([0, 0, 1])).tolist()
    [0.5, 0.5]
    """
    labels = check_labels(probabilities, labels)
    check_probabilities(probabilities)
    found = []
    for index, scores in enumerate(probabilities.unbind(1)):
        inside, outside = scores[labels == index], scores[labels != index].sort().values
        # the area is the chance that a sample of the class scores above one of the rest, a tie counted half
        below = torch.searchsorted(outside, inside).sum() + torch.searchsorted(outside, inside, right=True).sum()
        pairs = 2 * len(inside) * len(outside)
        found.append(below.item() / pairs if pairs else math.nan)
    return torch.tensor(found, dtype=torch.float64)


def auc(probabilities: Tensor, labels: Tensor, task: str = "multi-class") -> Auc:
    """AUC as MedMNIST defines it: of class 1 when binary, else the mean over classes. NaN if no class has one.

    >>> auc(torch.tensor([[0.8, 0.1, 0.1], [0.3, 0.6, 0.1]]), torch.tensor([0, 1]))
    Auc(mean=1.0, left_out=1)
    """
    values = class_auc(probabilities, labels)
    if _is_binary(task, probabilities):
        values = values[1:]
    return Auc(values.nanmean().item(), int(values.isnan().sum()))


def acc(probabilities: Tensor, labels: Tensor, task: str = "multi-class") -> float:
    """ACC as MedMNIST defines it: class 1 over one half when binary, else the highest probability.

    >>> acc(torch.tensor([[0.8, 0.2], [0.3, 0.7]]), torch.tensor([0, 0]), "binary-class")
    0.5
    """
    labels = check_labels(probabilities, labels)
    check_probabilities(probabilities)
    binary = _is_binary(task, probabilities)
    prediction = (probabilities[:, 1] > 0.5).long() if binary else probabilities.argmax(1)
    return (prediction == labels).double().mean().item()


class Metrics:
    """Scores and labels collected batch by batch, in one process or in many.

    Give the place of each sample in the whole data set as `indices` when a distributed sampler may repeat some: every
    sample then counts once.

    >>> metrics = Metrics(classes=2)
    >>> metrics.update(torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([1, 0]), torch.tensor([1, 0]))
    >>> metrics.update(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), torch.tensor([0]))
    >>> logits, labels = metrics.gather()
    >>> labels.tolist()
    [0, 1]
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._logits = [torch.empty(0, classes)]
        self._labels = [torch.empty(0, dtype=torch.int64)]
        self._indices = [torch.empty(0, dtype=torch.int64)]

    def update(self, logits: Tensor, labels: Tensor, indices: Tensor | None = None) -> None:
        """Add a batch. Nothing is copied off the device before `gather`."""
        labels = flat_labels(labels)
        if indices is None:
            indices = torch.full((len(labels),), -1)
        if logits.shape != (len(labels), self.classes) or indices.shape != labels.shape:
            raise MultilinearError(
                f"a batch needs logits (n, {self.classes}), n labels and n indices; "
                f"got {tuple(logits.shape)}, {tuple(labels.shape)} and {tuple(indices.shape)}"
            )
        self._logits.append(logits.detach().float())
        self._labels.append(labels)
        self._indices.append(indices.long())

    def gather(self, distributed: bool = True) -> tuple[Tensor, Tensor]:
        """Logits and labels of all processes on the CPU, each sample once, in the order of the indices if any.

        Every process of a `torch.distributed` group must call it, and every one gets the same answer. Without
        `distributed`, or without a group, it is what this process has seen.
        """
        collected = (self._logits, self._labels, self._indices)
        parts = [torch.cat([part.cpu() for part in kept]) for kept in collected]
        if distributed and dist.is_available() and dist.is_initialized():
            parts = [_gather_rows(part) for part in parts]
        logits, labels, indices = parts
        if (indices < 0).all():
            return logits, labels
        if (indices < 0).any():
            raise MultilinearError("some batches came with indices and some without; give them with all or with none")
        order = indices.argsort(stable=True)
        logits, labels, indices = logits[order], labels[order], indices[order]
        repeated = torch.zeros(len(indices), dtype=torch.bool)
        repeated[1:] = indices[1:] == indices[:-1]
        clash = (repeated[1:] & (labels[1:] != labels[:-1])).nonzero()
        if len(clash):
            raise MultilinearError(
                f"sample {int(indices[clash[0]])} came with two labels; indices must count through the whole data set"
            )
        return logits[~repeated], labels[~repeated]


def check_labels(scores: Tensor, labels: Tensor) -> Tensor:
    """Return labels as a flat int64 tensor if they fit `scores`, else say what does not.

    >>> check_labels(torch.zeros(2, 3), torch.tensor([[2], [0]])).tolist()
    [2, 0]
    """
    labels = flat_labels(labels)
    if scores.ndim != 2 or len(scores) != len(labels):
        raise MultilinearError(
            f"{len(labels)} labels need scores of shape ({len(labels)}, classes), got {tuple(scores.shape)}"
        )
    if not len(labels):
        raise MultilinearError("there are no samples to evaluate; check the data set and the split")
    classes = scores.shape[1]
    if classes < 2:
        raise MultilinearError(f"a classifier has 2 outputs or more, this one has {classes}")
    outside = ((labels < 0) | (labels >= classes)).nonzero()
    if len(outside):
        first = int(outside[0])
        raise MultilinearError(
            f"label {int(labels[first])} of sample {first} does not fit a head of {classes} outputs; "
            f"labels run from 0 to {classes - 1}: choose the data set or num_classes to match"
        )
    return labels


def check_probabilities(scores: Tensor) -> None:
    """Refuse scores that are no probabilities, such as logits.

    >>> check_probabilities(torch.tensor([[0.25, 0.75]]))
    """
    total = scores.sum(1)
    if not ((scores >= 0).all() and torch.allclose(total, torch.ones_like(total), atol=1e-2)):
        raise MultilinearError("scores are not probabilities that sum to 1; give logits.softmax(-1)")


def flat_labels(labels: Tensor) -> Tensor:
    """Labels of shape (n,) from (n,) or (n, 1).

    >>> flat_labels(torch.tensor([[1], [0]])).shape
    torch.Size([2])
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise MultilinearError(
            f"labels must be one class number per sample, got {labels.dtype} of shape {tuple(labels.shape)}; "
            "several labels per sample are not supported"
        )
    return labels.long()


def without_nan(values: Tensor) -> list[float | None]:
    """A list for JSON, which has no NaN.

    >>> without_nan(torch.tensor([0.5, math.nan]))
    [0.5, None]
    """
    return [None if math.isnan(value) else value for value in values.tolist()]


def _is_binary(task: str, scores: Tensor) -> bool:
    binary = check_choice("task", task, TASKS) == "binary-class"
    if binary and scores.shape[1] != 2:
        raise MultilinearError(f"task 'binary-class' needs 2 outputs, got {scores.shape[1]}; use 'multi-class'")
    return binary


def _gather_rows(rows: Tensor) -> Tensor:
    """Rows of all processes in the order of their ranks; they may hold different numbers of them."""
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=device))
    longest = max(int(count) for count in counts)
    padded = torch.zeros(longest, *rows.shape[1:], dtype=rows.dtype, device=device)
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)].cpu() for part, count in zip(parts, counts, strict=True)])
