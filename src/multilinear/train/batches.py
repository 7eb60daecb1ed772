"""Where a run's batches come from: arrays that live on the device, or image files that stream through workers."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from multilinear.data import ArrayData, channel_statistics, folder_loader, hold_out, load_dataset, open_folder
from multilinear.errors import MultilinearError
from multilinear.evaluate import Evaluation, Metrics, evaluate, evaluation_mode
from multilinear.train.config import Recipe
from multilinear.train.distributed import Processes


class Batches(Protocol):
    """What the loop needs of a data set."""

    classes: list[str]
    channels: int
    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    steps: int  # of one epoch
    crop: float  # the share of an image that is looked at when the network is used
    has_validation: bool
    frequencies: list[float]  # of the classes among the training images
    final_split: str  # judged at the end: "test", or "val" where there are no test images

    def epoch(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the batches of an epoch, from step `start` on; all of one shape and dtype."""
        ...

    def score(self, model: nn.Module, split: str, amp: bool) -> Evaluation: ...

    def broken(self) -> list[str]:
        """Files that could not be read so far."""
        ...

    def check(self, limit: float) -> None:
        """Raise if more than `limit` of the files seen are broken."""
        ...


def open_batches(recipe: Recipe, folder: Path | None, processes: Processes) -> Batches:
    """The batches that a recipe asks for.

    >>> batches = open_batches(Recipe(), None, Processes(0, 1, torch.device("cpu")))
    >>> batches.channels, len(batches.classes)
    (1, 10)
    """
    if recipe.run.batch_size % (processes.world * recipe.run.accumulate):
        raise MultilinearError(
            f"run.batch_size {recipe.run.batch_size} must be divisible by processes x accumulate, "
            f"{processes.world} x {recipe.run.accumulate}"
        )
    if recipe.data.name == "folder":
        if folder is None:
            raise MultilinearError("the recipe trains on an image folder: say which with --data DIR")
        return FolderBatches(recipe, folder, processes)
    # one process downloads and converts, the others find it cached
    if not processes.is_main:
        processes.barrier()
    data = load_dataset(recipe.data.name, folder)
    if processes.is_main:
        processes.barrier()
    if recipe.data.hold_out:
        data = hold_out(data, recipe.data.hold_out, recipe.run.seed)
    return ArrayBatches(data, recipe, processes)


class ArrayBatches:
    """A small data set, whole on the device as uint8. An epoch's order depends on the seed and its number alone."""

    crop = 1.0
    final_split = "test"

    def __init__(self, data: ArrayData, recipe: Recipe, processes: Processes) -> None:
        self.data, self.processes, self.seed = data, processes, recipe.run.seed
        self.classes, self.channels, self.image_size = data.classes, data.channels, data.image_size
        self.mean, self.std = channel_statistics(data.train.images)
        self.images = torch.tensor(data.train.images, device=processes.device)
        self.labels = torch.tensor(data.train.labels, device=processes.device)
        self.batch, self.share = recipe.run.batch_size, recipe.run.batch_size // processes.world
        self.steps = len(self.labels) // self.batch
        self.has_validation = data.val is not None
        self.frequencies = _frequencies(data.train.labels.tolist(), len(data.classes))
        if self.steps < 1:
            raise MultilinearError(
                f"run.batch_size {self.batch} is larger than the {len(self.labels)} training images of {data.name}"
            )

    def epoch(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.labels), generator=generator).to(self.processes.device)
        for step in range(start, self.steps):
            first = step * self.batch + self.processes.rank * self.share
            chosen = order[first : first + self.share]
            yield self.images[chosen], self.labels[chosen]

    def score(self, model: nn.Module, split: str, amp: bool) -> Evaluation:
        part = self.data.splits()[split]
        return evaluate(model, part.images, part.labels, mean=self.mean, std=self.std, batch_size=1024, amp=amp)

    def broken(self) -> list[str]:
        return []

    def check(self, limit: float) -> None:
        return None


class FolderBatches:
    """Image files through timm's loader. Broken ones are replaced, remembered and counted."""

    crop = 0.875

    def __init__(self, recipe: Recipe, root: Path, processes: Processes) -> None:
        self.processes, self.root = processes, root
        self.channels = int(recipe.model.arguments.get("in_chans", 3))
        grey = self.channels == 1
        self.mean: tuple[float, ...] = (0.5,) if grey else IMAGENET_DEFAULT_MEAN
        self.std: tuple[float, ...] = (0.5,) if grey else IMAGENET_DEFAULT_STD
        side = recipe.data.image_size
        self.image_size = side, side
        self.info = open_folder(root, channels=self.channels, seed=recipe.run.seed)
        self.classes = self.info.classes
        self.has_validation = True
        self.frequencies = _frequencies(self.info.train.labels.tolist(), len(self.classes))
        policy = {"none": None, "auto": "original", "rand": f"rand-m{round(10 * recipe.augment.magnitude)}-mstd0.5"}
        share = recipe.run.batch_size // processes.world
        options: dict[str, Any] = {
            "mean": self.mean,
            "std": self.std,
            "workers": recipe.data.workers,
            "distributed": processes.world > 1,
        }
        self.loader = folder_loader(
            self.info.train, side, share, training=True, flip=0.5 if recipe.augment.flip else 0.0,
            auto_augment=policy[recipe.augment.policy], **options,
        )  # fmt: skip
        options["distributed"] = False
        self.splits = {"train": self.info.train, "val": self.info.val}
        if self.info.test is not None:
            self.splits["test"] = self.info.test
        self.final_split = "test" if "test" in self.splits else "val"
        self.loaders = {  # each split as the network sees it at inference
            split: folder_loader(images, side, share, training=False, crop_pct=self.crop, **options)
            for split, images in self.splits.items()
        }
        self.steps = len(self.loader)

    def epoch(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        sampler = self.loader.sampler
        if isinstance(sampler, torch.utils.data.distributed.DistributedSampler):
            sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(self.loader):
            if step >= start:
                yield images.to(self.processes.device, non_blocking=True), labels.to(self.processes.device)

    def score(self, model: nn.Module, split: str, amp: bool) -> Evaluation:
        found = Metrics(len(self.classes))
        with evaluation_mode(model), torch.inference_mode():
            for images, labels in self.loaders[split]:
                with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                    found.update(model(images.to(self.processes.device)).float().cpu(), labels)
        return Evaluation.from_logits(*found.gather(distributed=False))

    def broken(self) -> list[str]:
        return sorted({name for images in self.splits.values() for name in images.broken()})

    def check(self, limit: float) -> None:
        self.info.train.check(limit)


def _frequencies(labels: Iterable[int], classes: int) -> list[float]:
    counts = Counter(labels)
    return [counts[label] / max(1, counts.total()) for label in range(classes)]
