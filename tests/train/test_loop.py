"""Runs from beginning to end, and what happens when they are stopped in the middle."""

import json
import multiprocessing
import os
import random
import resource
import signal
import time

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import multilinear as ml
from multilinear.data import ArrayData, Split, save_npz
from multilinear.models import read_header
from multilinear.train import Recipe, train
from multilinear.train.checkpoint import read_checkpoint, write_checkpoint

SMALL = {
    "model": {"name": "monet_micro", "arguments": {"patches": [1], "depths": [1], "drop_path_rate": 0.1}},
    "data": {"name": "digits"},
    "augment": {"crop": 1, "mixup": 0.5, "cutmix": 0.5, "erase": 0.1},
    "optim": {"lr": 4e-3, "warmup_epochs": 1, "ema": 0.9},
    "run": {"epochs": 3, "batch_size": 64, "save_every": 4, "select": "ema"},
}


def small(**sections):
    return {name: {**SMALL[name], **sections.get(name, {})} for name in SMALL}


def test_a_run_leaves_everything_one_needs(tmp_path):
    result = train(small(run={"epochs": 2}), out=tmp_path / "run", device="cpu")
    names = {path.name for path in result.folder.iterdir()}
    assert {"recipe.yaml", "log.csv", "log.jsonl", "last.safetensors", "model.safetensors", "report.html"} <= names
    rows = [json.loads(line) for line in (result.folder / "log.jsonl").read_text().splitlines()]
    assert rows == result.history
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[1]["loss"] < rows[0]["loss"]
    again = train(result.folder / "recipe.yaml", out=tmp_path / "again", device="cpu")
    assert [row["loss"] for row in again.history] == [row["loss"] for row in result.history]
    model = ml.load(result.weights)
    assert read_header(result.weights)["labels"] == [str(digit) for digit in range(10)]
    assert model.num_classes == 10
    assert "data:image/png" in result.report.read_text()


def test_the_digits_recipe_learns(tmp_path):
    result = train("digits", out=tmp_path / "run", changes=["run.epochs=15", "optim.warmup_epochs=3"], device="cpu")
    assert result.test.top1 > 0.96


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulation_is_the_same_step(tmp_path, optimizer):
    plain = {
        "augment": dict.fromkeys(("crop", "mixup", "cutmix", "erase"), 0),
        "optim": {"name": optimizer, "ema": 0.0},
    }
    arguments = {"patches": [1], "depths": [1]}
    whole, parts = (
        train(
            small(**plain, model={"arguments": arguments}, run={"epochs": 1, "accumulate": n, "select": "last"}),
            out=tmp_path / f"{n}", device="cpu",
        )
        for n in (1, 4)
    )  # fmt: skip
    assert whole.history[0]["loss"] == pytest.approx(parts.history[0]["loss"], rel=1e-4)


def test_best_by_validation_and_patience(tmp_path):
    recipe = small(data={"hold_out": 200}, run={"epochs": 12, "select": "best", "patience": 2, "metric": "auc"},
                   optim={"lr": 1e-9, "warmup_epochs": 0, "min_lr": 0.0, "ema": 0.0})  # fmt: skip
    result = train(recipe, out=tmp_path / "run", device="cpu")
    assert len(result.history) < 12  # nothing is learned at that rate, so patience ends
    assert all("val_auc" in row for row in result.history)
    assert (result.folder / "best.safetensors").exists()


def test_the_best_epoch_by_validation_loss(tmp_path):
    recipe = small(data={"hold_out": 200}, run={"epochs": 4, "select": "best", "metric": "loss"})
    result = train(recipe, out=tmp_path / "run", device="cpu")
    losses = [row["val_loss"] for row in result.history]
    _, header = read_checkpoint(result.folder / "last.safetensors")
    assert header["position"]["best_epoch"] == losses.index(min(losses)) + 1


# --- kills -----------------------------------------------------------------------------------------------------------

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["multilinear.train"])


def run_in_child(recipe, out, errors=None):
    torch.set_num_threads(1)
    try:
        train(recipe, out=out, device="cpu", resume=True)
    except ml.MultilinearError as error:
        if errors is not None:
            errors.put(str(error))


def run_to_the_end(recipe, out):
    child = CONTEXT.Process(target=run_in_child, args=(recipe, out))
    child.start()
    child.join(120)
    assert child.exitcode == 0


def test_twenty_kills_lose_no_checkpoint_and_change_no_bit(tmp_path):
    recipe = small()
    run_to_the_end(recipe, tmp_path / "whole")
    generator = random.Random(0)
    out, last = tmp_path / "killed", tmp_path / "killed" / "last.safetensors"
    furthest, kills = (0, 0), 0
    while kills < 20:
        child = CONTEXT.Process(target=run_in_child, args=(recipe, out))
        child.start()
        time.sleep(generator.uniform(0.05, 1.2))
        if not child.is_alive():  # it got to the end: begin again, so that all kills hit a run
            child.join()
            assert child.exitcode == 0
            for path in out.rglob("*"):
                if path.is_file():
                    path.unlink()
            furthest = (0, 0)
            continue
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills += 1
        if last.exists():
            position = read_checkpoint(last)[1]["position"]
            here = position["epoch"], position["step"]
            assert here >= furthest
            furthest = here
        else:
            assert furthest == (0, 0)
    run_to_the_end(recipe, out)
    whole, killed = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[key], killed[key]) for key in whole)
    states = [read_checkpoint(folder / "last.safetensors")[0] for folder in (tmp_path / "whole", out)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not list(out.glob(".*.part"))


def die_in_the_middle_of_a_write(recipe, out):
    def half_a_file(tensors, path, metadata):
        with open(path, "wb") as file:
            file.write(b"\x10" * 1000)
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    import multilinear.train.checkpoint

    multilinear.train.checkpoint.save_file = half_a_file
    run_in_child(recipe, out)


def allow_a_second_epoch(last):
    """Rewrite a finished one-epoch checkpoint as one of a two-epoch run; returns its bytes."""
    state, header = read_checkpoint(last)
    header.pop("version")
    header["recipe"]["run"]["epochs"] = 2
    write_checkpoint(last, state, header)
    return last.read_bytes()


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    write_checkpoint(tmp_path / "last.safetensors", {"model/a": torch.zeros(1)}, {"version": 1})
    with pytest.raises(ml.MultilinearError, match="checkpoint version 1, this release reads 2"):
        read_checkpoint(tmp_path / "last.safetensors")


def test_a_kill_during_the_write_leaves_the_checkpoint_before(tmp_path):
    out = tmp_path / "run"
    run_to_the_end(small(run={"epochs": 1}), out)
    before = allow_a_second_epoch(out / "last.safetensors")
    child = CONTEXT.Process(target=die_in_the_middle_of_a_write, args=(small(run={"epochs": 2}), out))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert (out / "last.safetensors").read_bytes() == before
    assert list(out.glob(".*.part"))
    run_to_the_end(small(run={"epochs": 2}), out)
    assert read_checkpoint(out / "last.safetensors")[1]["position"]["epoch"] == 2
    assert not list(out.glob(".*.part"))


def fill_the_disk(recipe, out, limit, errors):
    # a real failure of write(2): no file of this process may grow past the limit
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run_in_child(recipe, out, errors)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    out = tmp_path / "run"
    run_to_the_end(small(run={"epochs": 1}), out)
    last = out / "last.safetensors"
    before = allow_a_second_epoch(last)
    errors = CONTEXT.Queue()
    recipe = small(run={"epochs": 2})
    child = CONTEXT.Process(target=fill_the_disk, args=(recipe, out, len(before) // 2, errors))
    child.start()
    message = errors.get(timeout=60)
    child.join(60)
    assert "could not write" in message
    assert "nothing that was there before is lost" in message
    assert last.read_bytes() == before
    run_to_the_end(recipe, out)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_run_is_not_overwritten_nor_resumed_with_another_recipe(tmp_path):
    out = tmp_path / "run"
    train(small(run={"epochs": 1}), out=out, device="cpu")
    with pytest.raises(ml.MultilinearError, match="holds a run already; continue it with --resume"):
        train(small(run={"epochs": 1}), out=out, device="cpu")
    with pytest.raises(ml.MultilinearError, match="was started with optim.lr=0.004, not 0.1"):
        train(small(run={"epochs": 1}, optim={"lr": 0.1}), out=out, device="cpu", resume=True)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    recipe = small(optim={"lr": 1e30, "warmup_epochs": 0, "clip": 0.0, "ema": 0.0}, run={"select": "last"})
    with pytest.raises(
        ml.MultilinearError,
        match=r"not finite at step \d+ \(epoch 1\), learning rate (1e\+30|9\.\d+e\+29); nothing was saved",
    ):
        train(recipe, out=tmp_path / "run", device="cpu")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"arguments": {"num_classes": 7}}}, "model.arguments.num_classes is 7, but digits has 10"),
        ({"model": {"arguments": {"in_chans": 3}}}, "model.arguments.in_chans is 3, but digits has 1"),
        ({"model": {"arguments": {"patches": [3]}}}, "image size 8x8 is not divisible by the patching's 6"),
        ({"run": {"batch_size": 5000}}, "run.batch_size 5000 is larger than the 1437 training images"),
        ({"data": {"name": "digitss"}}, "digitss"),
        ({"data": {"name": "folder"}}, "say which with --data DIR"),
        ({"run": {"select": "best"}}, "need a validation split, which digits has not; set data.hold_out"),
        ({"run": {"patience": 3, "evaluate_every": 0}}, "need run.evaluate_every of 1 or more"),
        ({"model": {"name": "resnet18", "arguments": {}}}, "training takes the models of this library"),
    ],
)
def test_one_clear_line_before_any_work(tmp_path, sections, message):
    with pytest.raises(ml.MultilinearError) as caught:
        train(small(**sections), out=tmp_path / "run", device="cpu")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_labels_that_do_not_match_and_empty_splits(tmp_path):
    images = np.zeros((4, 28, 28), np.uint8)
    good = {
        "train_images": images,
        "train_labels": np.arange(4) % 2,
        "test_images": images,
        "test_labels": np.arange(4) % 2,
    }
    recipe = {
        "data": {"name": "pneumoniamnist"},
        "model": {"name": "monet_micro"},
        "run": {"batch_size": 2, "epochs": 1},
    }
    for change, message in [
        ({"train_labels": np.array([0, 1, 5, 1])}, "5"),
        ({"test_images": images[:0], "test_labels": np.zeros(0, np.int64)}, "test"),
        ({"train_labels": np.array([0, 1])}, "labels"),
    ]:
        np.savez(tmp_path / "pneumoniamnist.npz", **{**good, **change})
        with pytest.raises(ml.MultilinearError) as caught:
            train(recipe, data=tmp_path, out=tmp_path / "run", device="cpu")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


# --- image folders ---------------------------------------------------------------------------------------------------


def make_folder(root, broken):
    """Two colours to tell apart, with odd but readable files, and `broken` files that nobody can read."""
    generator = np.random.default_rng(0)
    for name, colour in (("blue", 2), ("red", 0)):
        (root / name).mkdir(parents=True)
        for i in range(24):
            pixels = generator.integers(0, 80, (40, 36, 3), np.uint8)
            pixels[..., colour] += 150
            Image.fromarray(pixels).save(root / name / f"{i:02d}.png")
    red = root / "red"
    Image.fromarray(np.full((30, 30), 40000, np.uint16)).save(red / "sixteen-bit.png")
    Image.new("CMYK", (30, 30), (0, 200, 200, 0)).save(red / "cmyk.jpg")
    frames = [Image.new("P", (30, 30), i) for i in range(3)]
    frames[0].save(red / "animated.gif", save_all=True, append_images=frames[1:])
    Image.new("RGB", (6000, 4000), "red").save(red / "large.jpg")
    for i in range(broken):
        (red / f"broken-{i:02d}.png").write_bytes(b"" if i % 2 else (red / "00.png").read_bytes()[:200])


FOLDER = {
    "model": {"name": "monet_micro", "arguments": {"depths": [1]}},
    "data": {"name": "folder", "image_size": 16, "workers": 0},
    "augment": {"flip": True},
    "run": {"epochs": 2, "batch_size": 8},
}


def test_training_goes_on_past_broken_files_and_names_them(tmp_path, capsys):
    make_folder(tmp_path / "images", broken=3)
    result = train(FOLDER, data=tmp_path / "images", out=tmp_path / "run", device="cpu")
    assert len(result.history) == 2
    assert "val_accuracy" in result.history[0]
    err = " ".join(capsys.readouterr().err.split())
    assert "3 image files could not be read and were left out" in err
    page = result.report.read_text()
    assert all(f"broken-0{i}.png" in page for i in range(3))
    header = read_header(result.weights)
    assert header["labels"] == ["blue", "red"] and header["preprocessing"]["crop_pct"] == 0.875
    # no test images: what was looked at in training is not called a test
    assert result.tested_on == "val"
    assert "Validation split" in page
    assert "judged once" not in page


def test_mostly_broken_data_stops_the_run(tmp_path):
    make_folder(tmp_path / "images", broken=200)
    with pytest.raises(ml.MultilinearError, match="broken|could not be read|unreadable"):
        train(FOLDER, data=tmp_path / "images", out=tmp_path / "run", device="cpu")


def test_a_recipe_object_and_a_custom_npz(tmp_path):
    generator = np.random.default_rng(0)
    split = Split(generator.integers(0, 256, (40, 28, 28, 1), np.uint8), np.arange(40) % 9)
    save_npz(ArrayData("pathmnist", split, split, split, [str(i) for i in range(9)]), tmp_path / "pathmnist.npz")
    recipe = Recipe()
    recipe.model.name, recipe.data.name = "monet_micro", "pathmnist"
    recipe.run.epochs, recipe.run.batch_size = 1, 8
    assert train(recipe, data=tmp_path, out=tmp_path / "run", device="cpu").test.count == 40
