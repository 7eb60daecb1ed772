"""The commands under `multilinear encrypt`, and the two example scripts, as a user would run them."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from multilinear.cli import main
from multilinear.data import load_dataset, save_npz
from multilinear.encrypted_demo import run_demo
from multilinear.errors import MultilinearError
from multilinear.train import train

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encrypted")
    save_npz(load_dataset("digits"), folder / "digits.npz")
    changes = ["run.epochs=20", "model.arguments.ranks=[16, 24]"]
    result = train("private-digits", out=folder / "run", changes=changes, device="cpu")
    (folder / "weights.safetensors").write_bytes(result.weights.read_bytes())
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    if not (folder / "digits.program").exists():
        main(["encrypt", "compile", "weights.safetensors", "digits.npz", "--out", "digits"])
    return folder


def test_from_weights_to_classes(here, capsys):
    client = ["--client", "digits.client.json"]
    main(["encrypt", "keygen", *client])
    assert (here / "secret.key").stat().st_mode & 0o777 == 0o600
    main(["encrypt", "encrypt", "digits.npz", *client, "--count", "30"])
    main(["encrypt", "run", "digits.program"])
    capsys.readouterr()
    main(["encrypt", "decrypt", "results.encrypted", *client, "--json"])
    found = [row["label"] for row in json.loads(capsys.readouterr().out)]
    labels = load_dataset("digits").test.labels[:30]
    assert np.mean([int(label) == truth for label, truth in zip(found, labels, strict=True)]) > 0.8
    with pytest.raises(SystemExit):
        main(["encrypt", "keygen", *client])
    assert "never overwritten" in " ".join(capsys.readouterr().err.split())


def test_plan_for_people_and_machines(here, capsys):
    main(["encrypt", "plan", "digits.program"])
    assert "128 bits: 216 of 218" in capsys.readouterr().out
    main(["encrypt", "plan", "digits.program", "--json"])
    assert json.loads(capsys.readouterr().out)["ring"] == 8192


def test_image_files_are_taken_too(here, capsys):
    for i, image in enumerate(load_dataset("digits").test.images[:3]):
        Image.fromarray(image[..., 0]).resize((32, 32)).save(here / f"digit-{i}.png")
    main(["encrypt", "keygen", "--client", "digits.client.json", "--secret", "other.key", "--keys", "other.keys"])
    images = [f"digit-{i}.png" for i in range(3)]
    main(["encrypt", "encrypt", *images, "--client", "digits.client.json", "--secret", "other.key", "--out", "few"])
    main(["encrypt", "run", "digits.program", "--images", "few", "--keys", "other.keys", "--out", "answer"])
    capsys.readouterr()
    main(["encrypt", "decrypt", "answer", "--client", "digits.client.json", "--secret", "other.key"])
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "weights.safetensors"], "holds no program"),
        (["plan", "missing.program"], "not a readable program"),
        (["compile", "weights.safetensors", "missing.png"], "no image"),
        (["compile", "weights.safetensors", "digits.npz", "--packing", "boxes"], "unknown packing"),
        (["compile", "weights.safetensors", "digits.npz", "--split", "night"], "has no night split"),
        (["encrypt", "digits.npz", "--client", "digits.client.json", "--secret", "no.key"], "cannot read no.key"),
        (["keygen", "--client", "digits.npz"], "not a readable client file"),
        (["run", "digits.program", "--keys", "digits.npz"], "no message of this library"),
    ],
)
def test_bad_input_is_one_line(here, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["encrypt", *arguments])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_a_command_the_choices_are_named(capsys):
    with pytest.raises(SystemExit):
        main(["encrypt"])
    assert "keygen" in capsys.readouterr().err


def test_the_two_example_scripts(here):
    server = subprocess.Popen(
        [sys.executable, EXAMPLES / "encrypted_server.py", "digits.program", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().split()[-1]
        client = [sys.executable, EXAMPLES / "encrypted_client.py", f"http://127.0.0.1:{port}"]
        done = subprocess.run(client, capture_output=True, text=True, timeout=120, check=True)
    finally:
        server.terminate()
        server.communicate()
    truth, found = (json.loads(line.split(":")[1]) for line in done.stdout.splitlines())
    assert np.mean(np.array(truth) == found) > 0.7


def test_demo():
    console = Console(file=io.StringIO(), width=120)
    assert run_demo(count=20, seed=0, console=console) == 1.0
    assert "who knew what" in console.file.getvalue()
    with pytest.raises(MultilinearError, match="not possible"):
        run_demo(count=0, seed=0, console=console)
