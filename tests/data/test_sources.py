"""Names to arrays: the order in which places are looked at, idx files, and downloads that fail."""

import gzip
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from multilinear.data import sources
from multilinear.data.arrays import ArrayData, Split, save_npz
from multilinear.data.catalog import DATASET_NAMES, class_names
from multilinear.data.idx import read_idx
from multilinear.data.sources import cache_folder, load_dataset
from multilinear.errors import MultilinearError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("MULTILINEAR_CACHE", str(folder))
    return folder


def toy(name, brightness=0, channels=1):
    split = Split(np.full((2, 4, 4, channels), brightness, np.uint8), np.array([0, 1]))
    return ArrayData(name, split, None, split, class_names(name) or ["0", "1"])


def idx_bytes(array):
    shape = b"".join(side.to_bytes(4, "big") for side in array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.tobytes()


def write_idx(folder, packed=False, brightness=9, separator="-"):
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        for kind, array in (("images-idx3", np.full((3, 5, 4), brightness, np.uint8)),
                            ("labels-idx1", np.array([1, 0, 9], np.uint8))):  # fmt: skip
            name = f"{part}-{kind}-ubyte".replace("-idx", f"{separator}idx")
            content = idx_bytes(array)
            (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)


def test_digits():
    data = load_dataset("digits")
    assert (data.channels, data.image_size, data.num_classes, data.val) == (1, (8, 8), 10, None)
    assert data.train.images.max() == 255
    shares = [np.bincount(split.labels) / len(split) for split in (data.train, data.test)]
    np.testing.assert_allclose(shares[0], shares[1], atol=0.004)


def test_the_folder_goes_before_the_cache(tmp_path, cache):
    save_npz(toy("cifar10", 1, 3), cache / "cifar10.npz")
    assert load_dataset("cifar10").train.images.max() == 1
    assert load_dataset("cifar10", tmp_path).train.images.max() == 1
    save_npz(toy("cifar10", 2, 3), tmp_path / "cifar10.npz")
    assert load_dataset("cifar10", tmp_path).train.images.max() == 2


def test_names_in_the_file_go_before_the_known_ones(tmp_path):
    split = toy("cifar10").train
    arrays = {f"{part}_{kind}": getattr(split, kind) for part in ("train", "test") for kind in ("images", "labels")}
    np.savez(tmp_path / "cifar10.npz", **arrays)
    assert load_dataset("cifar10", tmp_path).classes[0] == "airplane"
    np.savez(tmp_path / "cifar10.npz", classes=np.array(["x", "y"]), **arrays)
    assert load_dataset("cifar10", tmp_path).classes == ["x", "y"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("separator", ["-", "."])
@pytest.mark.parametrize("inside", ["", "mnist"])
def test_idx_files(tmp_path, packed, separator, inside):
    write_idx(tmp_path / inside, packed, separator=separator)
    data = load_dataset("mnist", tmp_path, download=False)
    assert data.train.images.shape == (3, 5, 4, 1) and data.test.labels.tolist() == [1, 0, 9]


def test_a_folder_named_after_the_set_tells_mnist_from_fashion(tmp_path):
    write_idx(tmp_path, brightness=1)
    write_idx(tmp_path / "fashion-mnist", brightness=2)
    assert load_dataset("fashion-mnist", tmp_path, download=False).train.images.max() == 2
    assert load_dataset("mnist", tmp_path, download=False).train.images.max() == 1


def test_a_missing_idx_file_is_named(tmp_path):
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(MultilinearError, match="lacks t10k-labels-idx1-ubyte"):
        load_dataset("mnist", tmp_path)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 200), st.booleans())
def test_cut_and_padded_idx_files(tmp_path_factory, length, packed):
    content = idx_bytes(np.zeros((2, 5, 5), np.uint8))
    path = tmp_path_factory.mktemp("idx") / ("x.gz" if packed else "x")
    changed = (content + bytes(200))[:length]
    path.write_bytes(gzip.compress(changed) if packed else changed)
    if length == len(content):
        assert read_idx(path, 3).shape == (2, 5, 5)
    else:
        with pytest.raises(MultilinearError, match="get it again"):
            read_idx(path, 3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x", b"", "starts with nothing"),
        ("x", bytes([0, 0, 8, 1, 0, 0, 0, 0]), "starts with 00000801, not 00000803"),
        ("x", bytes([0, 0, 13, 3]) + bytes(12), "idx file of bytes"),
        ("x", bytes([0, 0, 8, 3]) + b"\xff" * 12, "declares .* over"),
        ("x.gz", b"plain text", "BadGzipFile"),
        ("x.gz", gzip.compress(idx_bytes(np.zeros((2, 5, 5), np.uint8)), mtime=0)[:-12], "get it again"),
    ],
)
def test_bad_idx_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MultilinearError, match=message):
        read_idx(tmp_path / name, 3)


def test_names_are_checked(tmp_path):
    with pytest.raises(MultilinearError, match="unknown dataset 'imagenet'; known: bloodmnist, .*tissuemnist"):
        load_dataset("imagenet")
    with pytest.raises(MultilinearError, match="unknown dataset"):
        load_dataset("../secret")
    with pytest.raises(MultilinearError, match="several labels per image"):
        load_dataset("chestmnist")
    with pytest.raises(MultilinearError, match="no folder .*nowhere"):
        load_dataset("cifar10", tmp_path / "nowhere")


@pytest.mark.parametrize("name", DATASET_NAMES)
def test_every_set_has_its_classes(name):
    names = class_names(name)
    if name == "tiny-imagenet":
        assert names is None
    else:
        assert len(set(names)) == len(names) > 1


@pytest.mark.parametrize("name", [name for name in DATASET_NAMES if name != "digits"])
def test_without_a_download_the_missing_file_is_named(tmp_path, name):
    with pytest.raises(MultilinearError, match=f"put {name}.npz into {tmp_path}, or allow the download"):
        load_dataset(name, tmp_path, download=False)


@pytest.mark.parametrize("name", ["cifar10", "svhn", "flowers102", "mnist", "fashion-mnist"])
def test_a_failed_download_is_one_line(cache, monkeypatch, name):
    import torchvision.datasets

    def fail(*_, **__):
        raise RuntimeError("no route\nto host")

    for maker in ("CIFAR10", "SVHN", "Flowers102", "MNIST", "FashionMNIST"):
        classes = getattr(getattr(torchvision.datasets, maker), "classes", None)
        fake = type(maker, (), {"__init__": fail, "classes": classes})
        monkeypatch.setattr(torchvision.datasets, maker, fake)
    with pytest.raises(MultilinearError, match=f"could not download {name} .*no route to host.*put {name}.npz into"):
        load_dataset(name)
    assert list(cache.iterdir()) == []


def test_a_failed_tiny_imagenet_download(monkeypatch):
    import torchvision.datasets.utils as utils

    def fail(*_, **__):
        raise OSError("unreachable")

    monkeypatch.setattr(utils, "download_and_extract_archive", fail)
    with pytest.raises(MultilinearError, match="could not download tiny-imagenet .*put tiny-imagenet.npz into"):
        load_dataset("tiny-imagenet")


def test_a_cache_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MULTILINEAR_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MultilinearError, match="could not download cifar10"):
        load_dataset("cifar10")


def test_torchvision_sets_are_converted_once(cache, monkeypatch):
    import torchvision.datasets

    made = []

    class FakeSVHN:
        def __init__(self, root, split, download):
            made.append(split)
            assert Path(root).is_dir() and download
            self.data = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
            self.labels = np.array([0, 9])

    monkeypatch.setattr(torchvision.datasets, "SVHN", FakeSVHN)
    first, second = load_dataset("svhn"), load_dataset("svhn")
    assert made == ["train", "test"] and [entry.name for entry in cache.iterdir()] == ["svhn.npz"]
    assert first.train.images.shape == (2, 4, 5, 3)
    np.testing.assert_array_equal(first.train.images, second.train.images)
    np.testing.assert_array_equal(first.train.images[0, 1, 2], [7, 27, 47])


def test_medmnist_package(monkeypatch, cache):
    monkeypatch.setitem(sys.modules, "medmnist", None)
    with pytest.raises(MultilinearError, match="pip install medmnist.*put breastmnist.npz into"):
        load_dataset("breastmnist")

    def maker(split, download, root):
        save_npz(toy("breastmnist", 5), Path(root) / "breastmnist.npz")

    fake = types.SimpleNamespace(INFO={"breastmnist": {"python_class": "BreastMNIST"}}, BreastMNIST=maker)
    monkeypatch.setitem(sys.modules, "medmnist", fake)
    assert load_dataset("breastmnist").classes == ["malignant", "normal, benign"]
    assert (cache / "breastmnist.npz").is_file()


def test_flowers_are_cut_square(tmp_path):
    Image.new("RGB", (40, 30), (255, 0, 0)).save(tmp_path / "a.png")
    split = sources._read_images([tmp_path / "a.png"], [3], 16)
    assert split.images.shape == (1, 16, 16, 3) and split.images[0, 0, 0].tolist() == [255, 0, 0]


def test_tiny_imagenet_layout(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    for code, brightness in (("n02", 20), ("n01", 10)):
        (root / "train" / code / "images").mkdir(parents=True)
        Image.new("L", (64, 64), brightness).save(root / "train" / code / "images" / f"{code}_0.JPEG")
    (root / "val" / "images").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(root / "val" / "images" / "val_0.JPEG")
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n")
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tfrog\n")
    data = sources._read_tiny_imagenet(root)
    assert data.classes == ["goldfish", "frog"] and data.train.labels.tolist() == [0, 1]
    assert data.test.labels.tolist() == [1] and data.train.images[:, 0, 0, 0].tolist() == [10, 20]


def test_the_cache_has_a_default(monkeypatch):
    monkeypatch.delenv("MULTILINEAR_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "multilinear"


@pytest.mark.skipif("MULTILINEAR_TEST_DATA" not in os.environ, reason="MULTILINEAR_TEST_DATA names no folder")
@pytest.mark.parametrize("name", ["breastmnist", "pneumoniamnist", "retinamnist"])
def test_published_files_by_name(name):
    folder = Path(os.environ["MULTILINEAR_TEST_DATA"])
    if not (folder / f"{name}.npz").is_file():
        pytest.skip(f"no {name}.npz")
    data = load_dataset(name, folder, download=False)
    assert data.classes == class_names(name) and data.train.labels.max() == data.num_classes - 1
