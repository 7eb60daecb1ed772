import io

import torch
from rich.console import Console

import multilinear as ml
from multilinear.data import load_dataset
from multilinear.demo import run_demo
from multilinear.evaluate import Predictor


def test_demo_learns_and_leaves_a_report_and_weights(tmp_path):
    text = io.StringIO()
    threads = torch.get_num_threads()
    accuracy = run_demo(tmp_path, epochs=12, seed=0, console=Console(file=text, width=100))
    assert accuracy > 0.95
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "a polynomial of degree 64" in page
    assert "http" not in page
    assert "test accuracy" in text.getvalue()
    model = ml.load(tmp_path / "digits.safetensors")
    assert ml.audit(model, 8).polynomial
    predictor = Predictor(tmp_path / "digits.safetensors")
    samples = sorted(tmp_path.glob("digit-*.png"))
    assert len(samples) == 3
    assert torch.get_num_threads() == threads
    labels = load_dataset("digits").test.labels
    right = sum(int(predictor(path).labels[0]) == labels[int(path.stem.split("-")[2])] for path in samples)
    assert right >= 2


def test_the_held_out_fifth_is_apart_and_balanced():
    data = load_dataset("digits")
    assert len(data.test) == 360
    assert len(data.train) == 1437
    assert min((data.test.labels == digit).sum() for digit in range(10)) >= 34
    train = {image.tobytes() for image in data.train.images}
    assert not any(image.tobytes() in train for image in data.test.images)
