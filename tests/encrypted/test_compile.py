import numpy as np
import pytest
import torch

from multilinear.encrypted import Program, compile
from multilinear.errors import MultilinearError
from multilinear.models import save


def test_weights_files_bring_their_preprocessing_and_labels(small, tmp_path):
    labels = ["ant", "bee", "cat", "dog"]
    path = save(small.model, tmp_path / "w.safetensors", labels=labels, preprocessing={"mean": [0.3], "std": [0.4]})
    program = compile(path, small.images)
    assert program.public.labels == tuple(labels)
    assert np.abs(program.simulate(small.images) - small.logits).max() < 5 * program.public.error


def test_labels_that_are_numbers_are_saved_too(small, tmp_path):
    program = compile(small.model, small.images, labels=range(4))
    assert Program.load(program.save(tmp_path / "a.program")).public.labels == ("0", "1", "2", "3")


def test_a_channel_that_died_is_no_loss(trained, pictures, in_the_clear):
    model = trained(pictures(40))
    norm = model.stages[0].blocks[0].mu1.norm_a.bn
    with torch.no_grad():
        norm.weight[0], norm.bias[0] = 0, 0.5
    program = compile(model, pictures(40), mean=[0.3], std=[0.4])
    assert np.abs(program.simulate(pictures(40)) - in_the_clear(model, pictures(40))).max() < 0.01


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((4, 8, 8, 1)), "calibration images are uint8 .* got float64"),
        (np.zeros((4, 8, 8, 3), np.uint8), "calibration images are uint8 \\(N, H, W, 1\\)"),
        (np.zeros((0, 8, 8, 1), np.uint8), "at least one"),
        (np.zeros((8, 8), np.uint8), "calibration images are uint8"),
        (np.zeros((4, 9, 8, 1), np.uint8), "9x8 is not divisible by the patching's 4"),
        (np.zeros((1, 256, 256, 1), np.uint8), "64x64 tokens does not fit the 4096 slots"),
        (
            np.zeros((4, 0, 0, 1), np.uint8),
            ".",
        ),
    ],
)
def test_bad_calibration_images_are_named(small, images, message):
    with pytest.raises(MultilinearError, match=message):
        compile(small.model, images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": ["a"]}, "1 labels for 4 classes"),
        ({"mean": [0.5, 0.5]}, "mean and std need 1 entries"),
        ({"std": [0.0]}, "std positive"),
        ({"packing": "rows"}, "unknown packing 'rows'"),
    ],
)
def test_bad_options_are_named(small, options, message):
    with pytest.raises(MultilinearError, match=message):
        compile(small.model, small.images, **options)


def test_a_mean_of_zero_may_be_an_array(small):
    program = compile(small.model, small.images, mean=np.zeros(1), std=np.ones(1))
    assert program.public.mean == (0.0,)


def test_too_many_blocks_are_refused_and_told_how_many_fit(trained, pictures):
    with pytest.raises(MultilinearError, match="128-bit security .* At most 14 fit: use 7 blocks or fewer"):
        compile(trained(pictures(4), depths=(8,), ranks=(2, 2)), pictures(4))


@pytest.mark.parametrize(
    ("part", "value"),
    [("embed.levels.0", np.nan), ("stages.0.blocks.0.mu2.C", np.nan), ("head.fc", np.nan), ("embed.levels.0", 1e200)],
)
def test_networks_of_no_finite_value_are_refused(trained, pictures, part, value):
    model = trained(pictures(20)).double()
    with torch.no_grad():
        model.get_submodule(part).weight.fill_(value)
    with pytest.raises(MultilinearError):
        compile(model, pictures(20))


def test_a_network_that_leaves_no_room_below_the_modulus_is_refused(trained, pictures, monkeypatch):
    monkeypatch.setattr("multilinear.encrypted.compiler.SPARE_BITS", 30)
    model = trained(pictures(2, 3, (28, 28)), patches=(14,), overlap=2, widths=(2,), ranks=(2, 2), norm="none")
    layer, weight = model.stages[0].blocks[0].mu2, model.embed.proj.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        weight[0] = 1  # the sum of all pixels, which is large
        weight[1, 0, 7, 7], weight[1, 0, 7, 8] = 1, -1  # zero on an image of one colour
        layer.A.weight.copy_(torch.eye(2))
        layer.D.weight.copy_(torch.eye(2))
        layer.B.weight.copy_(torch.eye(2).flip(0))
        layer.B.bias.fill_(-1)
        layer.alpha.fill_(1)
    with pytest.raises(
        MultilinearError, match=r"Mu-Layer 2 reaches 0 .* \d+ bits are left below the modulus, 30 are needed"
    ):
        compile(model, np.full((2, 28, 28, 3), 255, np.uint8))


def test_packing_follows_from_the_images_at_a_time_and_the_memory(small, monkeypatch):
    assert compile(small.model, small.images).public.packing.kind == "tokens"
    assert compile(small.model, small.images, at_a_time=10_000).public.packing.kind == "images"
    monkeypatch.setattr("multilinear.encrypted.compiler.free_memory", lambda: 1_000_000)
    program = compile(small.model, small.images, at_a_time=10_000)
    assert program.public.packing.kind == "tokens"
    assert program.public.program == program.identity()
    with pytest.raises(MultilinearError, match="at_a_time must be at least 1"):
        compile(small.model, small.images, at_a_time=0)
