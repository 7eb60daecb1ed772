"""From a name to arrays: the user's folder first, then the cache, then the public download, converted once."""

import importlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from multilinear.data.arrays import ArrayData, Split, load_npz, save_npz
from multilinear.data.catalog import DATASET_NAMES, MEDMNIST_CLASSES, MULTI_LABEL, class_names
from multilinear.data.idx import find_idx, load_idx
from multilinear.data.images import open_image
from multilinear.errors import MultilinearError, check_choice

FLOWER_SIZE = 224
TINY_IMAGENET_SIZE = 64
TINY_IMAGENET_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_IMAGENET_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"


def load_dataset(name: str, folder: str | Path | None = None, *, download: bool = True) -> ArrayData:
    """Return the set called `name` (one of `DATASET_NAMES`).

    It is looked for as `folder/<name>.npz`, then (MNIST and Fashion-MNIST) as the published idx files in
    `folder/<name>` or `folder`, then in the cache (`cache_folder`), and at last downloaded into the cache.
    Processes that train together should let one of them load first, else each downloads for itself.

    >>> data = load_dataset("digits")
    >>> len(data.train), len(data.test), data.image_size, data.channels
    (1437, 360, (8, 8), 1)
    """
    if name in MULTI_LABEL:
        raise MultilinearError(
            f"{name} has several labels per image; only sets with one are read: {', '.join(DATASET_NAMES)}"
        )
    check_choice("dataset", name, DATASET_NAMES)
    found = _from_folder(name, Path(folder)) if folder is not None else None
    if found is not None:
        return found
    if name == "digits":
        return _digits()
    cached = cache_folder() / f"{name}.npz"
    if cached.is_file():
        return load_npz(cached, name=name, classes=class_names(name))
    wanted = f"put {name}.npz into {folder if folder is not None else cached.parent}"
    if not download:
        raise MultilinearError(f"{name} is not on this machine; {wanted}, or allow the download")
    data = _download(name, cached.parent, wanted)
    save_npz(data, cached)
    return data


def cache_folder() -> Path:
    """Where converted downloads are kept: $MULTILINEAR_CACHE, else ~/.cache/multilinear.

    >>> cache_folder().is_absolute()
    True
    """
    chosen = os.environ.get("MULTILINEAR_CACHE")
    return (Path(chosen) if chosen else Path("~/.cache/multilinear")).expanduser().absolute()


def _from_folder(name: str, folder: Path) -> ArrayData | None:
    if not folder.is_dir():
        raise MultilinearError(f"no folder {folder}; make it and put {name}.npz there, or leave the folder out")
    packed = folder / f"{name}.npz"
    if packed.is_file():
        return load_npz(packed, name=name, classes=class_names(name))
    if name in ("mnist", "fashion-mnist"):
        # the folder named after the set goes first: both sets use the same file names
        for place in (folder / name, folder):
            files = find_idx(place)
            if files is not None:
                return load_idx(name, files, class_names(name) or [])
    return None


def _digits() -> ArrayData:
    """The 1797 handwritten digits that come with scikit-learn, a stratified fifth as test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int64)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    classes = class_names("digits") or []
    return ArrayData("digits", Split(images[train], labels[train]), None, Split(images[test], labels[test]), classes)


def _download(name: str, cache: Path, wanted: str) -> ArrayData:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}.") as scratch:
            if name in MEDMNIST_CLASSES:
                return _download_medmnist(name, Path(scratch), wanted)
            if name == "tiny-imagenet":
                return _download_tiny_imagenet(Path(scratch))
            return _download_torchvision(name, Path(scratch))
    except MultilinearError:
        raise
    except Exception as error:  # sockets, archives and parsers raise nearly everything when a download goes wrong
        reason = " ".join(str(error).split())
        raise MultilinearError(f"could not download {name} ({type(error).__name__}: {reason}); {wanted}") from error


def _download_medmnist(name: str, scratch: Path, wanted: str) -> ArrayData:
    try:
        medmnist = importlib.import_module("medmnist")
    except ImportError:
        raise MultilinearError(f"{name} needs `pip install medmnist` to be downloaded; or {wanted}") from None
    made = getattr(medmnist, medmnist.INFO[name]["python_class"])
    made(split="train", download=True, root=str(scratch))
    return load_npz(scratch / f"{name}.npz", name=name, classes=class_names(name))


def _download_torchvision(name: str, scratch: Path) -> ArrayData:
    from torchvision import datasets

    classes = class_names(name) or []
    if name == "flowers102":
        train, val, test = (
            _read_images(made._image_files, made._labels, FLOWER_SIZE)
            for made in (datasets.Flowers102(scratch, split=part, download=True) for part in ("train", "val", "test"))
        )
        return ArrayData(name, train, val, test, classes)
    if name == "svhn":
        parts = [datasets.SVHN(scratch, split=part, download=True) for part in ("train", "test")]
        splits = [_as_split(part.data.transpose(0, 2, 3, 1), part.labels) for part in parts]
    else:
        maker = {"cifar10": datasets.CIFAR10, "mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}[name]
        parts = [maker(scratch, train=is_train, download=True) for is_train in (True, False)]
        splits = [_as_split(part.data, part.targets) for part in parts]
    return ArrayData(name, splits[0], None, splits[1], classes)


def _download_tiny_imagenet(scratch: Path) -> ArrayData:
    from torchvision.datasets.utils import download_and_extract_archive

    download_and_extract_archive(TINY_IMAGENET_URL, str(scratch), md5=TINY_IMAGENET_MD5)
    return _read_tiny_imagenet(scratch / "tiny-imagenet-200")


def _read_tiny_imagenet(root: Path) -> ArrayData:
    """Its own test labels are not public, so that its validation images are everybody's test set."""
    codes = sorted((root / "wnids.txt").read_text().split())
    label_of = {code: label for label, code in enumerate(codes)}
    words = dict(line.split("\t", 1) for line in (root / "words.txt").read_text().splitlines() if "\t" in line)
    train = [(path, label_of[code]) for code in codes for path in sorted((root / "train" / code).rglob("*.JPEG"))]
    rows = [line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines()]
    test = [(root / "val" / "images" / row[0], label_of[row[1]]) for row in rows]
    splits = [
        _read_images([path for path, _ in pairs], [label for _, label in pairs], TINY_IMAGENET_SIZE)
        for pairs in (train, test)
    ]
    classes = [words.get(code, code).split(",")[0] for code in codes]
    return ArrayData("tiny-imagenet", splits[0], None, splits[1], classes)


def _read_images(paths: Sequence[Path], labels: Sequence[int], size: int) -> Split:
    """Images of any size, cut to a square around the centre and resized."""
    images = np.empty((len(paths), size, size, 3), np.uint8)
    for i, path in enumerate(paths):
        images[i] = np.asarray(ImageOps.fit(open_image(path), (size, size), Image.Resampling.BICUBIC))
    return _as_split(images, labels)


def _as_split(images: object, labels: object) -> Split:
    pixels = np.ascontiguousarray(images, np.uint8)
    return Split(pixels[..., None] if pixels.ndim == 3 else pixels, np.asarray(labels, np.int64))
