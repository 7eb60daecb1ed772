"""Image folders too large for memory: one folder per class, read while training, damaged files passed over."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_loader
from timm.data.auto_augment import posterize
from torch.utils.data import DataLoader, Dataset

from multilinear.data.arrays import stratified_mask
from multilinear.data.images import open_image
from multilinear.errors import MultilinearError, check_choice

IMAGE_ENDINGS = (".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "validation"), "test": ("test",)}
AUTO_AUGMENT_KINDS = ("rand", "augmix", "original", "originalr", "v0", "v0r", "3a")
MAX_ASPECT = 100
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_GOOD, _BAD = 1, 2


class TolerantFolder(Dataset[tuple[Any, int]]):
    """The images under `root/<class>/`; one that cannot be read is replaced by the next that can, and remembered.

    `state` has one byte per file (0 not seen, 1 good, 2 broken) in memory that loader processes share.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> for name in ("cat", "dog"):
    ...     (root / name).mkdir()
    ...     Image.new("RGB", (8, 8)).save(root / name / "1.png")
    >>> _ = (root / "cat" / "0.png").write_bytes(b"")
    >>> images = TolerantFolder(root)
    >>> images.classes, len(images), images[0][1]
    (['cat', 'dog'], 3, 0)
    >>> [Path(name).name for name in images.broken()]
    ['0.png']
    """

    def __init__(
        self, root: str | Path, *, channels: int = 3, transform: Callable[[Image.Image], Any] | None = None
    ) -> None:
        self.root = Path(root)
        self.channels = channels
        self.transform = transform
        self.classes, self.paths, self.labels = _scan(self.root)
        self.state = torch.zeros(len(self.paths), dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        for step in range(len(self)):
            candidate = (index + step) % len(self)
            image = self._read(candidate)
            if image is not None:
                return (self.transform(image) if self.transform else image), int(self.labels[candidate])
        raise MultilinearError(f"none of the {len(self)} images under {self.root} can be read; check the files")

    def _read(self, index: int) -> Image.Image | None:
        if self.state[index] == _BAD:
            return None
        try:
            image = open_image(self.paths[index], self.channels)
            # resizing the short side of a sliver would need gigabytes
            good = max(image.size) <= MAX_ASPECT * min(image.size)
        except MultilinearError:
            good = False
        self.state[index] = _GOOD if good else _BAD
        return image if good else None

    def broken(self) -> list[str]:
        """The files found broken so far, by any loader process of this one."""
        return [self.paths[i] for i in torch.nonzero(self.state == _BAD).flatten().tolist()]

    def check(self, limit: float = 0.5, *, least: int = 20) -> None:
        """Stop a run fed on replacements: once `least` files are seen, at most `limit` of them may be broken."""
        seen, bad = int((self.state > 0).sum()), int((self.state == _BAD).sum())
        if seen >= least and bad > limit * seen:
            raise MultilinearError(
                f"{bad} of the {seen} images seen under {self.root} are broken, over {limit:.0%}; "
                f"the first is {self.broken()[0]}; repair or remove them"
            )

    def divide(self, size: float, seed: int = 0) -> tuple["TolerantFolder", "TolerantFolder"]:
        """Two folders out of one, the second with a stratified share (below 1) or number of the images."""
        held = stratified_mask(self.labels, size, seed)
        return self._selected(np.flatnonzero(~held)), self._selected(np.flatnonzero(held))

    def _selected(self, indices: np.ndarray) -> "TolerantFolder":
        part = copy.copy(self)
        part.paths = [self.paths[i] for i in indices]
        part.labels = self.labels[indices]
        part.state = self.state[torch.from_numpy(indices)].share_memory_()
        return part


@dataclass(frozen=True)
class FolderInfo:
    """What the loaders were made from; `test` is there when the folder has one."""

    classes: list[str]
    train: TolerantFolder
    val: TolerantFolder
    test: TolerantFolder | None


def find_splits(root: str | Path) -> dict[str, Path]:
    """The folders of the splits under `root`; one split "train" which is `root` itself if it has class folders only.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> for name in ("train/cat", "validation/cat"):
    ...     (root / name).mkdir(parents=True)
    >>> {split: folder.name for split, folder in find_splits(root).items()}
    {'train': 'train', 'val': 'validation'}
    """
    root = Path(root)
    if not root.is_dir():
        raise MultilinearError(f"no folder {root}; it should hold train/<class>/ and val/<class>/, or <class>/")
    # a class may be called "train", but then it holds images, not folders
    found = {
        split: next((root / name for name in names if _folders(root / name)), None)
        for split, names in SPLIT_FOLDERS.items()
    }
    if found["train"] is None:
        return {"train": root}
    return {split: folder for split, folder in found.items() if folder is not None}


def open_folder(root: str | Path, *, channels: int = 3, val_size: float = 0.1, seed: int = 0) -> FolderInfo:
    """Open every split under `root`; without a validation folder, `val_size` of train is held out for it.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> for name in ("cat", "dog"):
    ...     (root / name).mkdir()
    ...     for i in range(5):
    ...         Image.new("RGB", (8, 8)).save(root / name / f"{i}.png")
    >>> info = open_folder(root, val_size=0.2)
    >>> len(info.train), len(info.val), info.test
    (8, 2, None)
    """
    opened = {split: TolerantFolder(folder, channels=channels) for split, folder in find_splits(root).items()}
    train = opened["train"]
    for split, images in opened.items():
        extra, lacking = set(images.classes) - set(train.classes), set(train.classes) - set(images.classes)
        if extra or lacking:
            raise MultilinearError(
                f"{images.root} and {train.root} differ in classes ({split} lacks: {_some(lacking)}; "
                f"only {split} has: {_some(extra)}); give both the same class folders"
            )
    if "val" in opened:
        val = opened["val"]
    else:
        train, val = train.divide(val_size, seed)
    return FolderInfo(train.classes, train, val, opened.get("test"))


def folder_loader(
    images: TolerantFolder,
    image_size: int,
    batch_size: int,
    *,
    training: bool,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
    interpolation: str = "bicubic",
    crop_scale: tuple[float, float] = (0.08, 1.0),
    crop_pct: float = 0.875,
    flip: float = 0.5,
    color_jitter: float = 0.4,
    auto_augment: str | None = None,
    erase: float = 0.0,
    workers: int = 4,
    distributed: bool = False,
) -> DataLoader[Any]:
    """Batches of normalised (N, C, H, W) images and labels through timm: shuffled and augmented if `training`.

    When `training`, an incomplete last batch is dropped; when not, `distributed` pads the last images of some
    processes with repeats, as timm does.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> (root / "cat").mkdir()
    >>> Image.new("RGB", (30, 20)).save(root / "cat" / "1.png")
    >>> batch, labels = next(iter(folder_loader(TolerantFolder(root), 16, 4, training=False, workers=0)))
    >>> batch.shape, labels
    (torch.Size([1, 3, 16, 16]), tensor([0]))
    """
    if min(image_size, batch_size) < 1 or workers < 0:
        raise MultilinearError(
            f"image_size {image_size} and batch_size {batch_size} must be at least 1, workers {workers} at least 0"
        )
    if not 0 <= erase <= 1:
        raise MultilinearError(f"erase is a probability between 0 and 1, got {erase}")
    if not len(mean) == len(std) == images.channels:
        raise MultilinearError(f"mean {mean} and std {std} need {images.channels} values, one per channel")
    if auto_augment:
        check_choice("auto_augment", auto_augment.split("-")[0], AUTO_AUGMENT_KINDS)
    if training and len(images) < batch_size:
        raise MultilinearError(
            f"{images.root} has {len(images)} training images, fewer than one batch of {batch_size}; lower batch_size"
        )
    images = copy.copy(images)  # timm sets the transform; the state stays shared with the original
    loader: DataLoader[Any] = create_loader(
        images,
        (images.channels, image_size, image_size),
        batch_size,
        is_training=training,
        mean=mean,
        std=std,
        interpolation=interpolation,
        scale=crop_scale,
        crop_pct=crop_pct,
        hflip=flip,
        color_jitter=color_jitter,
        auto_augment=auto_augment,
        re_prob=erase,
        re_mode="pixel",
        num_workers=workers,
        distributed=distributed,
        pin_memory=torch.cuda.is_available(),
        use_prefetcher=False,
    )
    for step in getattr(images.transform, "transforms", ()):
        for op in (*getattr(step, "ops", ()), *(op for ops in getattr(step, "policy", ()) for op in ops)):
            if op.aug_fn is posterize:
                op.aug_fn = _posterized
    return loader


def _posterized(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """What timm does, but one bit stays: at an end of its strengths it leaves none, which Pillow 13 refuses."""
    return posterize(image, max(1, bits), **options)  # type: ignore[no-any-return]


def _scan(root: Path) -> tuple[list[str], list[str], np.ndarray]:
    """Class names, then every image file in a fixed order with its label."""
    classes = _folders(root)
    paths: list[str] = []
    counts: list[int] = []
    for name in classes:
        inside = sorted(
            os.path.join(folder, file)
            for folder, _, files in os.walk(root / name, followlinks=True)
            for file in files
            if file.lower().endswith(IMAGE_ENDINGS) and not file.startswith(".")
        )
        paths += inside
        counts.append(len(inside))
    if not paths:
        raise MultilinearError(f"no images in {root}/<class>/; looked for {', '.join(IMAGE_ENDINGS)}")
    empty = {name for name, count in zip(classes, counts, strict=True) if count == 0}
    if empty:
        raise MultilinearError(f"no images in the class folders {_some(empty)} of {root}; fill or remove them")
    return classes, paths, np.repeat(np.arange(len(classes)), counts)


def _folders(root: Path) -> list[str]:
    if not root.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def _some(names: set[str], most: int = 5) -> str:
    shown = ", ".join(sorted(names)[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
