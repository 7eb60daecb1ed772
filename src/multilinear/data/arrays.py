"""Image sets that fit in memory: checked when made, one .npz layout on disk (the one MedMNIST publishes)."""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from multilinear.errors import MultilinearError
from multilinear.files import write_atomically

MAX_BYTES = 8 * 2**30
CHANNELS = (1, 3)


@dataclass(frozen=True, eq=False)
class Split:
    """Images (uint8, N x H x W x C) with one label each (int64, N)."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class ArrayData:
    """A named image set; what is wrong with it is said when it is made, not in the middle of training.

    >>> images, labels = np.zeros((4, 8, 8, 1), np.uint8), np.array([0, 1, 0, 1])
    >>> data = ArrayData("toy", Split(images, labels), None, Split(images, labels), ["cat", "dog"])
    >>> data.channels, data.image_size, data.num_classes
    (1, (8, 8), 2)
    """

    name: str
    train: Split
    val: Split | None
    test: Split
    classes: list[str]

    def __post_init__(self) -> None:
        if not self.classes:
            raise MultilinearError(f"{self.name} has no class names; give one for each label")
        for part, split in self.splits().items():
            _check_split(f"{part} of {self.name}", split, self.classes)
            if split.images.shape[1:] != self.train.images.shape[1:]:
                raise MultilinearError(
                    f"images in {part} of {self.name} are {_shape(split.images)}, "
                    f"those in train {_shape(self.train.images)}; make them the same"
                )

    def splits(self) -> dict[str, Split]:
        """The splits there are, by name: train, then val if any, then test."""
        found = {"train": self.train, "val": self.val, "test": self.test}
        return {part: split for part, split in found.items() if split is not None}

    @property
    def channels(self) -> int:
        return int(self.train.images.shape[3])

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width."""
        return int(self.train.images.shape[1]), int(self.train.images.shape[2])

    @property
    def num_classes(self) -> int:
        return len(self.classes)


def load_npz(path: str | Path, *, name: str | None = None, classes: Sequence[str] | None = None) -> ArrayData:
    """Read `{train,val,test}_{images,labels}` (val may be missing), named after the file unless `name` says otherwise.

    Class names come from an array `classes` in the file, else from `classes`, else they are the label numbers.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "toy.npz"
    >>> grey, labels = np.zeros((2, 8, 8), np.uint8), np.array([[0], [2]])
    >>> np.savez(path, train_images=grey, train_labels=labels, test_images=grey, test_labels=labels)
    >>> data = load_npz(path)
    >>> data.name, data.train.images.shape, data.classes
    ('toy', (2, 8, 8, 1), ['0', '1', '2'])
    """
    path = Path(path)
    arrays = _read_arrays(path)
    splits = {part: _as_split(path, part, arrays) for part in ("train", "val", "test")}
    train, test = splits["train"], splits["test"]
    if train is None or test is None:
        wanted = "train_images, train_labels, test_images and test_labels"
        raise MultilinearError(f"{path} has the arrays {', '.join(sorted(arrays)) or '(none)'}; it needs {wanted}")
    if "classes" in arrays:
        classes = [str(label) for label in arrays["classes"].ravel()]
    elif classes is None:
        highest = max(int(split.labels.max(initial=0)) for split in splits.values() if split is not None)
        classes = [str(label) for label in range(highest + 1)]
    return ArrayData(name or path.stem, train, splits["val"], test, list(classes))


def save_npz(data: ArrayData, path: str | Path) -> Path:
    """Write `data` so that `load_npz` gives it back, class names included; not compressed, so that it reads fast.

    >>> import tempfile
    >>> split = Split(np.zeros((2, 8, 8, 3), np.uint8), np.array([0, 1]))
    >>> data = ArrayData("toy", split, None, split, ["cat", "dog"])
    >>> load_npz(save_npz(data, Path(tempfile.mkdtemp()) / "toy.npz")).classes
    ['cat', 'dog']
    """
    path = Path(path)
    arrays: dict[str, Any] = {"classes": np.array(data.classes)}
    for part, split in data.splits().items():
        arrays[f"{part}_images"], arrays[f"{part}_labels"] = split.images, split.labels

    def write(part: Path) -> None:
        with part.open("wb") as file:  # given a name instead, numpy would append .npz to it
            np.savez(file, **arrays)

    write_atomically(path, write)
    return path


def hold_out(data: ArrayData, size: float, seed: int = 0) -> ArrayData:
    """Take a stratified validation split out of train: a share if `size` is below 1, else a number of images.

    A set that already has a validation split comes back as it is.

    >>> split = Split(np.zeros((10, 8, 8, 1), np.uint8), np.arange(10) % 2)
    >>> parts = hold_out(ArrayData("toy", split, None, split, ["cat", "dog"]), 0.2).splits()
    >>> {part: np.bincount(split.labels).tolist() for part, split in parts.items()}
    {'train': [4, 4], 'val': [1, 1], 'test': [5, 5]}
    """
    if data.val is not None:
        return data
    held = stratified_mask(data.train.labels, size, seed)
    train, val = (Split(data.train.images[mask], data.train.labels[mask]) for mask in (~held, held))
    return replace(data, train=train, val=val)


def stratified_mask(labels: np.ndarray, size: float, seed: int = 0) -> np.ndarray:
    """Mark a random share (below 1) or number of the labels, each class within one of its due.

    >>> stratified_mask(np.array([0, 0, 0, 0, 1, 1]), 0.5).reshape(3, 2).sum()
    np.int64(3)
    """
    total = len(labels)
    count = round(size * total) if 0 < size < 1 else size
    if not 0 < count < total or count != int(count):
        raise MultilinearError(
            f"cannot hold out {size} of {total} images; give a share between 0 and 1, or a whole number below {total}"
        )
    count = int(count)
    shuffled = np.random.default_rng(seed).permutation(total)
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    # equal steps along the images sorted by class give every class its share
    chosen = by_class[(2 * np.arange(count) + 1) * total // (2 * count)]
    mask = np.zeros(total, bool)
    mask[chosen] = True
    return mask


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of pixels scaled to [0, 1]; a constant channel gets deviation 1.

    >>> channel_statistics(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1))
    ((0.5,), (0.5,))
    """
    if images.dtype != np.uint8 or images.ndim != 4 or images.size == 0:
        raise MultilinearError(f"statistics need uint8 images N x H x W x C, got {images.dtype} {images.shape}")
    _, height, width, channels = images.shape
    chunk = max(1, 2**22 // (height * width))
    # counting the 256 values is exact, and needs memory for one chunk only
    counts = np.zeros((channels, 256), np.int64)
    for start in range(0, len(images), chunk):
        for channel in range(channels):
            counts[channel] += np.bincount(images[start : start + chunk, :, :, channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    shares = counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    std[counts.max(1) == counts.sum(1)] = 1.0  # so that dividing by it is harmless
    return tuple(mean.tolist()), tuple(std.tolist())


def _check_split(where: str, split: Split, classes: list[str]) -> None:
    images, labels = split.images, split.labels
    if images.dtype != np.uint8:
        has_nan = images.dtype.kind == "f" and bool(np.isnan(images).any())
        problem = f"{images.dtype}{' with NaN' if has_nan else ''}"
        raise MultilinearError(f"images in {where} are {problem}, not uint8; scale them to whole numbers 0..255")
    if images.ndim != 4 or images.shape[3] not in CHANNELS or 0 in images.shape[1:]:
        raise MultilinearError(f"images in {where} have shape {images.shape}, not N x H x W x C with C = 1 or 3")
    if labels.ndim != 1 or labels.dtype != np.int64:
        raise MultilinearError(f"labels in {where} are {labels.dtype} {labels.shape}, not int64 (N,), one per image")
    if len(images) != len(labels):
        raise MultilinearError(f"{where} has {len(images)} images but {len(labels)} labels; give one label per image")
    if len(labels) == 0:
        raise MultilinearError(f"{where} is empty; give it at least one image")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= len(classes):
        raise MultilinearError(
            f"labels in {where} run from {low} to {high}; {len(classes)} classes allow 0 to {len(classes) - 1}"
        )


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays this layout knows; others in the file are left unread."""
    wanted = {f"{part}_{kind}" for part in ("train", "val", "test") for kind in ("images", "labels")} | {"classes"}
    if not path.is_file():
        raise MultilinearError(f"no file {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {Path(entry.filename).stem: entry.file_size for entry in archive.infolist()}
        total = sum(size for key, size in sizes.items() if key in wanted)
        if total > MAX_BYTES:
            raise MultilinearError(
                f"{path} unpacks to {total:,} bytes, over {MAX_BYTES:,}; use an image folder instead"
            )
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files if key in wanted}
    except MultilinearError:
        raise
    except Exception as error:  # zip, zlib and numpy raise nearly everything on damaged files
        reason = " ".join(str(error).split())
        raise MultilinearError(
            f"{path} is not a readable npz ({type(error).__name__}: {reason}); replace it"
        ) from error
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise MultilinearError(f"{key} in {path} is not an array; write the file with numpy.savez")
    return arrays


def _as_split(path: Path, part: str, arrays: dict[str, np.ndarray]) -> Split | None:
    images, labels = arrays.get(f"{part}_images"), arrays.get(f"{part}_labels")
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        missing = "images" if images is None else "labels"
        raise MultilinearError(f"{path} has no {part}_{missing}; images and labels come together")
    if labels.ndim == 2 and labels.shape[1] > 1:
        raise MultilinearError(
            f"{part}_labels in {path} has {labels.shape[1]} labels per image; only sets with one are read"
        )
    if labels.dtype.kind not in "iub":
        has_nan = labels.dtype.kind == "f" and bool(np.isnan(labels).any())
        raise MultilinearError(
            f"{part}_labels in {path} are {labels.dtype}{' with NaN' if has_nan else ''}; labels are whole numbers"
        )
    if labels.ndim == 2:
        labels = labels[:, 0]
    return Split(images[..., None] if images.ndim == 3 else images, labels.astype(np.int64))


def _shape(images: np.ndarray) -> str:
    return "x".join(str(side) for side in images.shape[1:])
