"""Arrays: what is accepted, what is refused in one line, and what survives the disk."""

import contextlib
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from multilinear.data import arrays
from multilinear.data.arrays import ArrayData, Split, channel_statistics, hold_out, load_npz, save_npz, stratified_mask
from multilinear.errors import MultilinearError


def make_split(count=6, size=8, channels=1, classes=2):
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size, channels), dtype=np.uint8)
    return Split(pixels, np.arange(count) % classes)


def make_data(train=None, val=None, test=None, classes=("cat", "dog")):
    train, test = (make_split() if split is None else split for split in (train, test))
    return ArrayData("toy", train, val, test, list(classes))


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path, **changes):
    split = make_split()
    content = {f"{part}_images": split.images for part in ("train", "val", "test")}
    content |= {f"{part}_labels": split.labels[:, None].astype(np.uint8) for part in ("train", "val", "test")}
    content |= changes
    np.savez(path, **{key: value for key, value in content.items() if value is not None})
    return path


BAD_SPLITS = {
    "float": (np.zeros((2, 8, 8, 1), np.float32), np.array([0, 1]), "float32, not uint8"),
    "nan": (np.full((2, 8, 8, 1), np.nan), np.array([0, 1]), "with NaN"),
    "no channels": (np.zeros((2, 8, 8), np.uint8), np.array([0, 1]), "N x H x W x C"),
    "four channels": (np.zeros((2, 8, 8, 4), np.uint8), np.array([0, 1]), "C = 1 or 3"),
    "zero height": (np.zeros((2, 0, 8, 1), np.uint8), np.array([0, 1]), "N x H x W x C"),
    "empty": (np.zeros((0, 8, 8, 1), np.uint8), np.zeros(0, np.int64), "is empty"),
    "counts": (np.zeros((2, 8, 8, 1), np.uint8), np.array([0]), "2 images but 1 labels"),
    "negative": (np.zeros((2, 8, 8, 1), np.uint8), np.array([-1, 0]), "from -1 to 0"),
    "too high": (np.zeros((2, 8, 8, 1), np.uint8), np.array([0, 2]), "2 classes allow 0 to 1"),
    "float labels": (np.zeros((2, 8, 8, 1), np.uint8), np.array([0.0, 1.0]), "not int64"),
    "column labels": (np.zeros((2, 8, 8, 1), np.uint8), np.array([[0], [1]]), "not int64 (N,)"),
    "size": (np.zeros((2, 9, 8, 1), np.uint8), np.array([0, 1]), "9x8x1"),
}


@pytest.mark.parametrize("part", ["train", "val", "test"])
@pytest.mark.parametrize("kind", BAD_SPLITS)
def test_bad_splits_are_refused_by_name(kind, part):
    images, labels, message = BAD_SPLITS[kind]
    with pytest.raises(MultilinearError) as caught:
        make_data(**{part: Split(images, labels)})
    assert message in one_line(caught)
    if kind != "size":
        assert f"{part} of toy" in str(caught.value)


def test_classes_are_needed():
    with pytest.raises(MultilinearError, match="no class names"):
        make_data(classes=())


@settings(max_examples=25, deadline=None)
@given(
    images=hnp.arrays(
        np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 3]))
    ),
    with_val=st.booleans(),
    names=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1), min_size=1, max_size=4),
)
def test_what_is_saved_is_loaded(images, with_val, names, tmp_path_factory):
    split = Split(images, np.arange(len(images)) % len(names))
    data = ArrayData("any", split, split if with_val else None, split, names)
    path = save_npz(data, tmp_path_factory.mktemp("npz") / "any.npz")
    again = load_npz(path)
    assert again.name == "any" and again.classes == names and list(again.splits()) == list(data.splits())
    for part, loaded in again.splits().items():
        np.testing.assert_array_equal(loaded.images, data.splits()[part].images)
        np.testing.assert_array_equal(loaded.labels, data.splits()[part].labels)
        assert loaded.labels.dtype == np.int64
    assert [entry.name for entry in path.parent.iterdir()] == ["any.npz"]


def test_grey_images_get_a_channel_and_val_may_be_missing(tmp_path):
    grey = np.zeros((3, 8, 8), np.uint8)
    data = load_npz(
        write(tmp_path / "x.npz", train_images=grey, train_labels=np.zeros(3, np.uint8), val_images=None,
              val_labels=None), classes=["a", "b"]
    )  # fmt: skip
    assert data.train.images.shape == (3, 8, 8, 1) and data.val is None and data.classes == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_images": None, "test_labels": None}, "it needs train_images"),
        ({"train_labels": None}, "has no train_labels"),
        ({"val_images": None}, "has no val_images"),
        ({"train_labels": np.zeros((6, 14), np.uint8)}, "14 labels per image"),
        ({"train_labels": np.full(6, np.nan)}, "with NaN"),
        ({"train_labels": np.array(list("abcdef"))}, "labels are whole numbers"),
        ({"train_labels": np.array(0)}, "one per image"),
        ({"train_labels": np.full(6, 2**64 - 1, np.uint64)}, "from -1"),
        ({"train_images": np.zeros((6, 8, 8), np.float32)}, "not uint8"),
        ({"train_images": np.array(3, np.uint8)}, "N x H x W x C"),
        ({"train_images": np.array([{}] * 6, object)}, "allow_pickle=False"),
        ({"test_images": np.zeros((6, 9, 9), np.uint8)}, "9x9x1"),
        ({"val_images": np.zeros((0, 8, 8), np.uint8), "val_labels": np.zeros((0, 1), np.uint8)}, "is empty"),
        ({"classes": np.array(["only"])}, "1 classes allow 0 to 0"),
    ],
)
def test_bad_files_are_refused(tmp_path, changes, message):
    with pytest.raises(MultilinearError) as caught:
        load_npz(write(tmp_path / "x.npz", **changes))
    assert message in one_line(caught)


def test_files_that_are_no_npz(tmp_path):
    whole = write(tmp_path / "whole.npz").read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name, content in {
        "empty.npz": b"",
        "text.npz": b"hello",
        "cut.npz": whole[: len(whole) // 2],
        "pickle.npz": b"\x80\x04N.",
        "npy.npz": (tmp_path / "array.npy").read_bytes(),
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MultilinearError, match=f"{name} is not a readable npz"):
            load_npz(tmp_path / name)
    with pytest.raises(MultilinearError, match="no file"):
        load_npz(tmp_path / "nowhere.npz")
    with pytest.raises(MultilinearError, match="no file"):
        load_npz(tmp_path)


def test_an_entry_that_is_no_array(tmp_path):
    path = write(tmp_path / "x.npz", train_images=None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("train_images.npy", b"hello")
    with pytest.raises(MultilinearError, match="train_images in .* is not an array"):
        load_npz(path)


@settings(max_examples=60, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_harmless(tmp_path_factory, place, value):
    path = write(tmp_path_factory.mktemp("byte") / "x.npz")
    good, content = load_npz(path), bytearray(path.read_bytes())
    content[int(place * len(content))] = value
    path.write_bytes(content)
    with contextlib.suppress(MultilinearError):
        data = load_npz(path)
        np.testing.assert_array_equal(data.train.images, good.train.images)
        np.testing.assert_array_equal(data.train.labels, good.train.labels)


def test_the_size_is_read_before_the_data(tmp_path, monkeypatch):
    path = write(tmp_path / "x.npz", unrelated=np.zeros(5000))
    monkeypatch.setattr(arrays, "MAX_BYTES", 4000)  # the arrays that are read take less, headers included
    load_npz(path)
    monkeypatch.setattr(arrays, "MAX_BYTES", 1000)
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("read before the check"))
    with pytest.raises(MultilinearError, match="over 1,000"):
        load_npz(path)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    share=st.floats(0.05, 0.9),
    seed=st.integers(0, 2**32 - 1),
)
def test_held_out_images_are_stratified_and_disjoint(counts, share, seed):
    labels = np.repeat(np.arange(len(counts)), counts)
    held = round(share * len(labels))
    if not 0 < held < len(labels):
        return
    identity = np.arange(len(labels), dtype=np.uint8).reshape(-1, 1, 1, 1)
    data = make_data(Split(identity, labels), test=Split(identity, labels), classes=[str(c) for c in counts])
    parts = hold_out(data, share, seed)
    assert len(parts.val) == held
    due = np.array(counts) * held / len(labels)
    assert np.all(np.abs(np.bincount(parts.val.labels, minlength=len(counts)) - due) <= 1)
    together = np.concatenate([parts.train.images, parts.val.images]).ravel()
    np.testing.assert_array_equal(np.sort(together), identity.ravel())
    np.testing.assert_array_equal(parts.val.images.ravel(), hold_out(data, held, seed).val.images.ravel())


def test_another_seed_holds_out_others():
    labels = np.zeros(100, np.int64)
    assert (stratified_mask(labels, 0.5, 0) != stratified_mask(labels, 0.5, 1)).any()


def test_hold_out_leaves_a_validation_split_alone():
    data = make_data(val=make_split())
    assert hold_out(data, 0.5) is data


@pytest.mark.parametrize("size", [0, -1, 6, 7, 0.01, 2.5, float("nan"), float("inf")])
def test_impossible_sizes_to_hold_out(size):
    with pytest.raises(MultilinearError, match="cannot hold out"):
        hold_out(make_data(), size)


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(1, 5), st.just(3))))
def test_statistics_match_numpy(images):
    mean, std = channel_statistics(images)
    pixels = images / 255
    np.testing.assert_allclose(mean, pixels.mean((0, 1, 2)), atol=1e-12)
    expected = pixels.std((0, 1, 2))
    np.testing.assert_allclose(std, np.where(np.ptp(images, (0, 1, 2)) == 0, 1, expected), atol=1e-12)


def test_statistics_over_several_chunks():
    images = np.random.default_rng(0).integers(0, 256, (9, 1024, 1024, 1), dtype=np.uint8)
    mean, std = channel_statistics(images)
    np.testing.assert_allclose([mean[0], std[0]], [(images / 255).mean(), (images / 255).std()], rtol=1e-9)
    with pytest.raises(MultilinearError, match="uint8 images"):
        channel_statistics(images / 255)


@pytest.mark.skipif("MULTILINEAR_TEST_DATA" not in os.environ, reason="MULTILINEAR_TEST_DATA names no folder")
@pytest.mark.parametrize(
    ("name", "counts", "channels", "classes"),
    [
        ("pneumoniamnist", [4708, 524, 624], 1, 2),
        ("breastmnist", [546, 78, 156], 1, 2),
        ("retinamnist", [1080, 120, 400], 3, 5),
    ],
)
def test_published_medmnist_files(name, counts, channels, classes):
    path = Path(os.environ["MULTILINEAR_TEST_DATA"]) / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"no {path.name}")
    data = load_npz(path)
    assert [len(split) for split in data.splits().values()] == counts
    assert (data.channels, data.image_size, data.num_classes) == (channels, (28, 28), classes)
