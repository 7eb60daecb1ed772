import json
import os
import subprocess
import sys

import pytest
import torch
from PIL import Image

import multilinear as ml
from multilinear.cli import main


def run(capsys, *arguments):
    """Exit status, standard output and standard error of the command."""
    status = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    return ml.save(ml.create("monet_micro", norm="batch"), tmp_path / "net.safetensors", labels=list("abcdefghij"))


def test_models(capsys, monkeypatch):
    # two of them: the README's table is compared with all
    monkeypatch.setattr("multilinear.models.names", lambda: ["monet_ms_s", "monet_ms_t"])
    status, out, _ = run(capsys, "models")
    assert status == 0
    assert "monet_ms_t" in out
    assert "10.339" in out
    assert "4^34" in out
    rows = json.loads(run(capsys, "models", "--json")[1])
    assert {row["model"]: row["parameters"] for row in rows}["monet_ms_s"] == 32_880_688


def test_info(capsys):
    _, out, _ = run(capsys, "info", "monet_nano")
    assert "embed" in out
    assert "closed formulas" in out
    found = json.loads(run(capsys, "info", "monet_nano", "--image-size", 64, "32", "--json")[1])
    assert found["macs"] == ml.cost(ml.create("monet_nano"), (3, 64, 32)).macs


def test_audit(capsys, weights):
    _, out, _ = run(capsys, "audit", "monet_micro")
    assert "not a polynomial: 18 x layer_norm" in " ".join(out.split())
    assert "stages.0.blocks.0.norm1" in out
    found = json.loads(run(capsys, "audit", "monet_micro", "--norm", "batch", "--fold", "--json")[1])
    assert (found["polynomial"], found["degree"], found["depth"]) == (True, 64, 6)
    assert "degree 64" in run(capsys, "audit", weights)[1]


def test_evaluate_fast_judges_the_network_as_it_would_be_deployed(capsys, tmp_path):
    torch.manual_seed(0)
    net = ml.create("monet_micro", in_chans=1)
    preprocessing = {"mean": [0.5], "std": [0.3]}
    path = ml.save(net, tmp_path / "net.safetensors", preprocessing=preprocessing)
    plain, fast = (json.loads(run(capsys, "evaluate", path, "digits", "--json", *more)[1]) for more in ([], ["--fast"]))
    expected = ml.optimize(net)
    assert (fast["backend"], fast["dtype"]) == (expected.backend, str(expected.dtype).removeprefix("torch."))
    assert "backend" not in plain and fast["count"] == plain["count"] == 360
    assert fast["nll"] == pytest.approx(plain["nll"], rel=0.02)
    page = tmp_path / "fast.html"
    status, out, _ = run(capsys, "evaluate", path, "digits", "--fast", "--speed", "--tta", "--report", page)
    assert status == 0 and f"monet_micro ({expected.backend}, {fast['dtype']})" in out and "batch 256" in out
    assert f"({expected.backend}, " in page.read_text()
    colour = ml.save(ml.create("monet_micro"), tmp_path / "colour.safetensors", preprocessing=preprocessing)
    status, _, err = run(capsys, "evaluate", colour, "digits", "--fast")
    assert status == 2 and "the model wants 3 channels, the images have 1" in err


def test_predict_names_broken_files_and_goes_on(capsys, weights, tmp_path):
    good, bad, empty = tmp_path / "good.png", tmp_path / "bad.png", tmp_path / "empty.jpg"
    Image.new("CMYK", (30, 50)).save(tmp_path / "cmyk.jpg")
    Image.new("RGB", (64, 40), "red").save(good)
    bad.write_bytes(good.read_bytes()[:40])
    empty.touch()
    files = (good, bad, empty, tmp_path / "cmyk.jpg", tmp_path / "missing.png")
    status, out, err = run(capsys, "predict", *files, "--weights", weights)
    assert status == 1
    assert "good.png" in "".join(line.split("│")[1].strip() for line in out.splitlines() if "│" in line)
    lines = " ".join(err.split())
    assert "bad.png is not a readable image" in lines
    assert "empty.jpg is not a readable image" in lines
    assert "no image at" in lines
    status, out, _ = run(capsys, "predict", *files, "--weights", weights, "--json")
    found = json.loads(out)
    assert len(found["predictions"]) == 2
    assert len(found["errors"]) == 3
    assert set(found["predictions"][0]["labels"]) <= set("abcdefghij")


def test_export(capsys, weights, tmp_path):
    status, out, _ = run(capsys, "export", weights, tmp_path / "net.onnx", "--fold")
    assert status == 0
    assert (tmp_path / "net.onnx").stat().st_size > 100_000
    assert "wrote" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "monet_huge"), "unknown model 'monet_huge'; known: monet_micro,"),
        (("audit", "monet_micro", "--norm", "rms"), "unknown norm 'rms'; known: affine, batch, layer"),
        (("info", "monet_micro", "--image-size", "30"), "image size 30x30 is not divisible by the patching's 4"),
        (("predict", "x.png", "--weights", "none.safetensors"), "cannot read none.safetensors"),
        (("export", "monet_micro", "net.txt"), "must end in .onnx"),
        (("audit", "nothing.safetensors"), "no weights file at nothing.safetensors"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_the_installed_command_runs():
    command = os.path.join(os.path.dirname(sys.executable), "multilinear")
    found = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "audit" in found.stdout
