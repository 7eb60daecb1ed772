import io

import torch
from rich.console import Console

import multilinear as ml
from multilinear.demo import _moved, load_split, run_demo
from multilinear.evaluate import Predictor


def test_demo_learns_and_leaves_a_report_and_weights(tmp_path):
    text = io.StringIO()
    accuracy = run_demo(tmp_path, epochs=12, seed=0, console=Console(file=text, width=100))
    assert accuracy > 0.95
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "a polynomial of degree 64" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "test accuracy" in text.getvalue()
    model = ml.load(tmp_path / "digits.safetensors")
    assert ml.audit(model, 8).polynomial
    predictor = Predictor(tmp_path / "digits.safetensors")
    samples = sorted(tmp_path.glob("digit-*.png"))
    assert len(samples) == 3
    data = load_split()
    with torch.no_grad():
        expected = model(data.test_images[:3]).argmax(-1).tolist()
    found = {path.stem.split("-")[2]: predictor(path).labels[0] for path in samples}
    assert [int(found[str(i)]) for i in range(3)] == expected


def test_the_held_out_fifth_is_apart_and_balanced():
    data = load_split()
    assert len(data.test_labels) == 360
    assert len(data.train_labels) == 1437
    assert data.test_labels.bincount().min() >= 34
    train = {image.numpy().tobytes() for image in data.train_images}
    assert not any(image.numpy().tobytes() in train for image in data.test_images)


def test_moving_a_digit_keeps_its_ink_within_a_pixel():
    torch.manual_seed(0)
    image = torch.zeros(50, 1, 8, 8)
    image[:, 0, 4, 4] = 1
    moved = _moved(image)
    assert moved.sum() == 50
    places = {(int(r), int(c)) for _, _, r, c in moved.nonzero()}
    assert places == {(r, c) for r in (3, 4, 5) for c in (3, 4, 5)}
