import numpy as np
import pytest
import torch

from multilinear import MultilinearError
from multilinear.evaluate import plots
from multilinear.evaluate.evaluate import Evaluation
from multilinear.evaluate.metrics import calibration
from multilinear.evaluate.speed import Speed

SPEED = Speed("cpu, 1 thread", 8, 10, 2.0, 1.5, 2.5, 4000.0)


@pytest.fixture
def found():
    torch.manual_seed(0)
    logits, labels = torch.randn(30, 7), torch.randint(0, 6, (30,))  # nobody is of class 6
    return Evaluation.from_logits(logits, labels, flipped=Evaluation.from_logits(logits / 2, labels))


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_confusion_has_numbers_only_while_they_can_be_read():
    few = plots.confusion(torch.tensor([[5, 0], [2, 3]]), ["a$b$", "dog"]).axes[0]
    assert texts(few) == ["5", "2", "3"]
    assert [label.get_text() for label in few.get_xticklabels()] == [r"a\$b\$", "dog"]
    long = plots.confusion(torch.eye(20, dtype=torch.int64), ["immature granulocytes (myelocytes and others)"] * 20)
    assert long.axes[0].get_yticklabels()[0].get_text() == "immature granulocytes (myel…"
    many = plots.confusion(torch.eye(21, dtype=torch.int64)).axes[0]
    assert texts(many) == []


def test_reliability_draws_the_bins_that_hold_something():
    figure = plots.reliability(calibration(torch.tensor([[0.95, 0.05], [0.65, 0.35]]), torch.tensor([0, 1]), bins=10))
    assert [(round(bar.get_x(), 1), bar.get_height()) for bar in figure.axes[0].patches] == [(0.6, 0.0), (0.9, 1.0)]


def test_per_class_shows_the_worst(found):
    axes = plots.per_class(found.per_class).axes[0]
    heights = [bar.get_width() for bar in axes.patches]
    assert heights == sorted(heights) and len(heights) == 6
    crowd = plots.per_class(torch.linspace(0, 1, 100)).axes[0]
    assert len(crowd.patches) == 40
    assert "worst 40" in crowd.get_xlabel()


def test_curves_skip_gaps_and_share_panels():
    rows = [{"epoch": 1, "train_loss": 2.0}, {"epoch": 2, "train_loss": 1.0, "test_loss": 1.5, "accuracy": None}]
    rows.append({"epoch": 3, "accuracy": 0.7, "test_loss": 1.2})
    left, right = plots.curves(rows, [("train_loss", "test_loss"), "accuracy"]).axes
    assert [line.get_xdata().tolist() for line in left.lines] == [[1, 2], [2, 3]]
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["train loss", "test loss"]
    assert right.lines[0].get_ydata().tolist() == [0.7]
    with pytest.raises(MultilinearError, match="no values to plot for speed; known: accuracy, epoch"):
        plots.curves(rows, ["speed"])
    with pytest.raises(MultilinearError, match="no values to plot for loss"):
        plots.curves([], ["loss"])


@pytest.mark.parametrize("channels", [1, 3])
def test_mistakes_come_first_the_surest_of_them_ahead(found, channels):
    images = torch.zeros(30, 4, 4, channels, dtype=torch.uint8)
    figure = plots.predictions(images, found, most=10, columns=4)
    titles = [axes.get_title() for axes in figure.axes]
    assert len(titles) == 10
    wrong = (found.predictions != found.labels).nonzero()[:, 0]
    surest = wrong[found.confidences[wrong].argmax()]
    assert titles[0] == f"{int(found.predictions[surest])}, is {int(found.labels[surest])}"
    assert all("is" in title for title in titles[: min(10, len(wrong))])


def test_long_names_keep_within_their_image():
    found = Evaluation.from_logits(torch.eye(2), torch.tensor([1, 1]))
    figure = plots.predictions(np.zeros((2, 4, 4, 1)), found, ["smooth muscle", "cancer-associated stroma"])
    assert [axes.get_title() for axes in figure.axes] == ["smooth muscle\nis cancer-associa…", "cancer-associated…"]


def test_bad_input(found):
    with pytest.raises(MultilinearError, match="2 class names came for 7 classes"):
        plots.confusion(found.confusion, ["a", "b"])
    with pytest.raises(MultilinearError, match=r"need them as \(30, height, width, 1 or 3\), got \(5, 4, 4, 1\)"):
        plots.predictions(np.zeros((5, 4, 4, 1)), found)


def test_report_holds_everything(found, tmp_path):
    classes = [f"<{i}>" for i in range(7)]
    images = np.zeros((30, 8, 8, 3), np.uint8)
    path = plots.write_report(found, tmp_path / "a" / "report.html", "A & B", classes, images, [SPEED])
    page = path.read_text()
    assert page.count("data:image/png") == 4
    for text in ("A &amp; B", "with flips", "(1 class left out)", "4,000", "1.5 to 2.5", f"{found.top1:.2%} of 30"):
        assert text in page
    plain = plots.write_report(Evaluation.from_logits(torch.eye(2), torch.tensor([0, 0])), tmp_path / "b.html", "B")
    assert "undefined" in plain.read_text()
    assert "Speed" not in plain.read_text()
