"""Image folders: odd files just work, broken ones are replaced, counted and named, in any number of processes."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from multilinear.data.folder import TolerantFolder, find_splits, folder_loader, open_folder
from multilinear.errors import MultilinearError


def fill(root, classes=("cat", "dog"), count=5):
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.new("RGB", (12, 10), (40 * label, i, 0)).save(root / name / f"{i:02d}.png")
    return root


def huge_png(path):
    """A valid header that declares 60000 x 60000 pixels, and next to no data."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")))


def cut_jpeg(path):
    Image.effect_noise((64, 64), 90).save(path)
    path.write_bytes(path.read_bytes()[:700])


def animated_gif(path):
    frames = [Image.new("RGB", (12, 10), color) for color in ("red", "blue")]
    frames[0].save(path, save_all=True, append_images=frames[1:])


ODD = {
    "16bit.png": lambda path: Image.fromarray(np.full((10, 12), 40000, np.uint16)).save(path),
    "16bit.tif": lambda path: Image.fromarray(np.full((10, 12), 40000, np.uint16)).save(path),
    "float.tiff": lambda path: Image.fromarray(np.full((10, 12), 0.5, np.float32)).save(path),
    "cmyk.jpg": lambda path: Image.new("CMYK", (12, 10), (0, 255, 255, 0)).save(path),
    "animated.gif": animated_gif,
    "palette.png": lambda path: Image.new("RGB", (12, 10), "green").convert("P").save(path, transparency=0),
    "transparent.png": lambda path: Image.new("RGBA", (12, 10), (9, 9, 9, 0)).save(path),
    "grey.JPEG": lambda path: Image.new("L", (12, 10), 7).save(path),
    "bits.bmp": lambda path: Image.new("1", (12, 10), 1).save(path),
    "one.webp": lambda path: Image.new("RGB", (1, 1)).save(path),
}
BROKEN = {
    "empty.jpg": lambda path: path.write_bytes(b""),
    "text.png": lambda path: path.write_text("not an image"),
    "cut.jpg": cut_jpeg,
    "huge.png": huge_png,
    "sliver.png": lambda path: Image.new("L", (5000, 2)).save(path),
    "dangling.jpg": lambda path: path.symlink_to("nowhere.jpg"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("channels", [1, 3])
def test_odd_images_just_work(tmp_path, name, channels):
    (tmp_path / "odd").mkdir()
    ODD[name](tmp_path / "odd" / name)
    images = TolerantFolder(tmp_path, channels=channels)
    image, label = images[0]
    assert image.mode == {1: "L", 3: "RGB"}[channels] and label == 0 and images.broken() == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_replaced_by_the_next(tmp_path, name):
    fill(tmp_path)
    BROKEN[name](tmp_path / "cat" / name)
    images = TolerantFolder(tmp_path)
    place = images.paths.index(str(tmp_path / "cat" / name))
    for _ in range(2):
        image, label = images[place]
        assert (image.getpixel((0, 0)), label) == ((40, 0, 0), 1)
    assert images.broken() == [str(tmp_path / "cat" / name)]
    assert images.state.bincount(minlength=3).tolist() == [9, 1, 1]


def test_the_last_is_replaced_by_the_first(tmp_path):
    fill(tmp_path)
    (tmp_path / "dog" / "zz.png").write_bytes(b"")
    image, label = TolerantFolder(tmp_path)[10]
    assert (image.getpixel((0, 0)), label) == ((0, 0, 0), 0)


def test_nothing_readable(tmp_path):
    fill(tmp_path, count=2)
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(MultilinearError, match="none of the 4 images"):
        TolerantFolder(tmp_path)[0]


def test_a_transform_that_fails_is_not_a_broken_image(tmp_path):
    images = TolerantFolder(fill(tmp_path), transform=lambda image: image.getpixel((99, 99)))
    with pytest.raises(IndexError):
        images[0]
    assert images.broken() == []


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_what_they_find(tmp_path, workers, start):
    if start == "spawn" and workers > 1:
        pytest.skip("one spawned process says it all")
    fill(tmp_path, count=15)
    for name in ("cat/03.png", "cat/04.png", "dog/14.png"):
        (tmp_path / name).write_bytes(b"")
    images = TolerantFolder(tmp_path)
    loader = folder_loader(images, 8, 4, training=False, workers=workers)
    loader.multiprocessing_context = start
    labels = torch.cat([labels for _, labels in loader])
    assert labels.tolist() == [0] * 15 + [1] * 14 + [0]
    assert [path[-10:] for path in images.broken()] == ["cat/03.png", "cat/04.png", "dog/14.png"]
    assert images.state.bincount().tolist() == [0, 27, 3]
    images.check()
    with pytest.raises(MultilinearError, match="3 of the 30 images seen .* over 5%; the first is .*cat/03.png"):
        images.check(0.05)


def test_check_waits_for_enough_files(tmp_path):
    images = TolerantFolder(fill(tmp_path, count=20))
    images.state[:19] = 2
    images.check()
    images.state[19:21] = 1
    with pytest.raises(MultilinearError, match="19 of the 21"):
        images.check()
    images.state[19:] = 1
    images.check()


def test_what_is_not_an_image_is_left_out(tmp_path):
    fill(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("")
    (tmp_path / "cat" / "._00.png").write_text("")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "readme.md").write_text("")
    (tmp_path / "cat" / "deep").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "cat" / "deep" / "x.PNG")
    images = TolerantFolder(tmp_path)
    assert images.classes == ["cat", "dog"] and len(images) == 11


def test_folders_without_images(tmp_path):
    with pytest.raises(MultilinearError, match="no images in"):
        TolerantFolder(tmp_path)
    with pytest.raises(MultilinearError, match="no folder"):
        open_folder(tmp_path / "nowhere")
    fill(tmp_path)
    (tmp_path / "bird").mkdir()
    with pytest.raises(MultilinearError, match="class folders bird"):
        TolerantFolder(tmp_path)


@pytest.mark.parametrize("val", ["val", "validation"])
def test_splits(tmp_path, val):
    for split in ("train", val, "test"):
        fill(tmp_path / split)
    info = open_folder(tmp_path)
    assert (info.val.root, info.test.root) == (tmp_path / val, tmp_path / "test")
    assert len(info.train) == len(info.val) == 10


def test_without_a_validation_folder_some_of_train_is_held_out(tmp_path):
    for root in (fill(tmp_path / "plain"), fill(tmp_path / "split" / "train").parent):
        info = open_folder(root, val_size=0.4)
        assert np.bincount(info.val.labels).tolist() == [2, 2] and len(info.train) == 6
        assert not set(info.train.paths) & set(info.val.paths) and info.test is None
        assert info.val.paths == open_folder(root, val_size=0.4).val.paths


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, classes=("bus", "train"))
    assert find_splits(tmp_path) == {"train": tmp_path}
    assert open_folder(tmp_path).classes == ["bus", "train"]


def test_splits_must_have_the_same_classes(tmp_path):
    fill(tmp_path / "train", classes=("cat", "dog"))
    fill(tmp_path / "val", classes=("cat", "fox"))
    with pytest.raises(MultilinearError, match="val lacks: dog; only val has: fox"):
        open_folder(tmp_path)


def both_loaders(root, image_size, batch_size, *, mean=(0.5,) * 3, val_size=0.1, **options):
    info = open_folder(root, channels=len(mean), val_size=val_size)
    train, val = (
        folder_loader(images, image_size, batch_size, training=training, mean=mean, **options)
        for images, training in ((info.train, True), (info.val, False))
    )
    return train, val, info


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("auto_augment", [None, "rand-m9-mstd0.5-inc1", "augmix-m3-w3", "3a"])
def test_loaders(tmp_path, channels, auto_augment):
    mean = (0.5,) * channels
    train, val, info = both_loaders(
        fill(tmp_path, count=10), 16, 6, mean=mean, std=mean, workers=0, auto_augment=auto_augment, erase=1.0
    )
    for batch, labels in train:
        assert batch.shape == (6, channels, 16, 16) and labels.dtype == torch.int64 and batch.isfinite().all()
    batch, labels = next(iter(val))
    assert batch.shape == (2, channels, 16, 16) and batch.abs().max() <= 1
    assert labels.tolist() == info.val.labels.tolist()
    assert (info.train.state == 1).sum() == 18


@pytest.mark.parametrize("auto_augment", ["rand-m10-inc1", "rand-m0", "augmix-m10", "original"])
def test_posterizing_leaves_a_bit(tmp_path, auto_augment):
    train, _, _ = both_loaders(fill(tmp_path, count=10), 16, 6, workers=0, auto_augment=auto_augment)
    step = next(step for step in train.dataset.transform.transforms if hasattr(step, "ops") or hasattr(step, "policy"))
    ops = getattr(step, "ops", None) or [op for policy in step.policy for op in policy]
    ops = [op for op in ops if "Posterize" in op.name]
    image = Image.linear_gradient("L").convert("RGB")
    assert ops
    for op in ops:
        op.prob = 1
        assert len(op(image).getcolors()) in (2, 4, 8, 16, 32, 64, 128)
        assert len(op.aug_fn(image, 0).getcolors()) == 2


def test_training_order_follows_the_seed(tmp_path):
    train, _, _ = both_loaders(fill(tmp_path, count=20), 8, 4, workers=2, erase=0.5)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        loader = folder_loader(train.dataset, 8, 4, training=True, workers=2, erase=0.5)
        runs.append(torch.cat([batch for batch, _ in loader]))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_augment": "best"}, "unknown auto_augment 'best'; known: 3a"),
        ({"erase": 1.5}, "between 0 and 1"),
        ({"workers": -1}, "workers -1"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 64}, "8 training images, fewer than one batch of 64"),
        ({"mean": (0.5,)}, "need 1 values"),
        ({"val_size": 0}, "cannot hold out 0 of 10"),
    ],
)
def test_bad_options(tmp_path, options, message):
    fill(tmp_path)
    with pytest.raises(MultilinearError, match=message):
        both_loaders(tmp_path, **{"image_size": 8, "batch_size": 4, "val_size": 0.2, "workers": 0, **options})
