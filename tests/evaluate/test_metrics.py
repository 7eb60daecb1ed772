import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference
from sklearn.calibration import calibration_curve

from multilinear import MultilinearError
from multilinear.evaluate.metrics import (
    Metrics,
    acc,
    auc,
    calibration,
    class_auc,
    confusion_matrix,
    negative_log_likelihood,
    per_class_accuracy,
    top_k_accuracy,
)


@st.composite
def problems(draw, most_classes=7, ties=False):
    """Random logits and labels; with `ties`, scores repeat and some classes are absent."""
    classes, count = draw(st.integers(2, most_classes)), draw(st.integers(1, 60))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = (
        random.integers(-2, 3, (count, classes)).astype(float) if ties else 3 * random.normal(size=(count, classes))
    )
    return torch.from_numpy(logits), torch.from_numpy(random.integers(0, classes, count))


def medmnist_auc(labels, scores, task):
    """The published evaluator's definition, in its own terms."""
    if task == "binary-class":
        return reference.roc_auc_score(labels, scores[:, -1])
    return np.mean([reference.roc_auc_score(labels == i, scores[:, i]) for i in range(scores.shape[1])])


@given(problems(), st.integers(1, 7))
def test_top_k(problem, k):
    logits, labels = problem
    classes = logits.shape[1]
    k = min(k, classes)
    if k == classes:
        assert top_k_accuracy(logits, labels, k) == 1
    elif classes > 2:  # scikit-learn wants one column for two classes
        expected = reference.top_k_accuracy_score(labels, logits, k=k, labels=range(classes))
        assert top_k_accuracy(logits, labels, k) == pytest.approx(expected)
    assert top_k_accuracy(logits, labels) == pytest.approx(reference.accuracy_score(labels, logits.argmax(1)))


@given(problems(ties=True))
def test_ties_are_broken_alike_everywhere(problem):
    logits, labels = problem
    matrix = confusion_matrix(logits, labels)
    assert top_k_accuracy(logits, labels) == pytest.approx(matrix.diagonal().sum().item() / matrix.sum().item())


def test_equal_scores_are_no_success():
    assert top_k_accuracy(torch.zeros(4, 4), torch.arange(4), 1) == 0.25
    assert top_k_accuracy(torch.zeros(4, 4), torch.arange(4), 2) == 0.5


@given(problems())
def test_confusion_and_per_class(problem):
    logits, labels = problem
    classes, predicted = logits.shape[1], logits.argmax(1)
    matrix = confusion_matrix(logits, labels)
    assert matrix.tolist() == reference.confusion_matrix(labels, predicted, labels=range(classes)).tolist()
    recall = reference.recall_score(labels, predicted, labels=range(classes), average=None, zero_division=np.nan)
    np.testing.assert_allclose(per_class_accuracy(logits, labels), recall)


@given(problems())
def test_negative_log_likelihood(problem):
    logits, labels = problem
    expected = reference.log_loss(labels, logits.softmax(1), labels=range(logits.shape[1]))
    assert negative_log_likelihood(logits, labels) == pytest.approx(expected, rel=1e-9)


@given(problems(), st.integers(1, 20))
def test_calibration(problem, bins):
    logits, labels = problem
    probabilities = logits.softmax(1)
    found = calibration(probabilities, labels, bins)
    confidence, right = probabilities.max(1).values.numpy(), (probabilities.argmax(1) == labels).numpy()
    # scikit-learn gives the two lists of the bins that are not empty
    accuracy, sure = calibration_curve(right, confidence, n_bins=bins, pos_label=True)
    filled = found.count > 0
    np.testing.assert_allclose(found.accuracy[filled], accuracy)
    np.testing.assert_allclose(found.confidence[filled], sure)
    weights = found.count[filled].numpy() / len(labels)
    assert found.error == pytest.approx((weights * abs(accuracy - sure)).sum())
    assert found.accuracy[~filled].isnan().all()


def test_calibration_by_hand():
    probabilities = torch.tensor([[0.95, 0.05], [0.85, 0.15], [0.5, 0.5]])
    found = calibration(probabilities, torch.tensor([0, 1, 0]), bins=10)
    assert found.count.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 1, 1]  # the upper edge belongs to a bin
    assert found.error == pytest.approx((0.5 + 0.85 + 0.05) / 3)


@given(problems(ties=True))
def test_class_auc(problem):
    logits, labels = problem
    probabilities = logits.softmax(1)
    for index, value in enumerate(class_auc(probabilities, labels).tolist()):
        inside = (labels == index).numpy()
        if inside.all() or not inside.any():
            assert math.isnan(value)
        else:
            assert value == pytest.approx(reference.roc_auc_score(inside, probabilities[:, index]))


@given(problems())
def test_auc_and_acc_are_those_of_medmnist(problem):
    logits, labels = problem
    classes, scores = logits.shape[1], logits.softmax(1)
    # every class must be there, or the published evaluator fails
    labels = torch.cat([labels, torch.arange(classes)])
    scores = torch.cat([scores, scores[:1].expand(classes, -1)])
    tasks = ["multi-class", "ordinal-regression"] + (["binary-class"] if classes == 2 else [])
    for task in tasks:
        found = auc(scores, labels, task)
        assert found.left_out == 0
        assert found.mean == pytest.approx(medmnist_auc(labels.numpy(), scores.numpy(), task))
        predicted = scores[:, -1] > 0.5 if task == "binary-class" else scores.argmax(1)
        assert acc(scores, labels, task) == pytest.approx(reference.accuracy_score(labels, predicted))


def test_auc_leaves_out_absent_classes():
    scores = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.2, 0.3], [0.2, 0.7, 0.1]])
    assert auc(scores, torch.tensor([0, 0, 1])) == (1.0, 1)
    assert auc(scores, torch.tensor([0, 1, 0])) == (0.25, 1)
    only = auc(scores, torch.tensor([0, 0, 0]))
    assert math.isnan(only.mean) and only.left_out == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top_k_accuracy(torch.zeros(1, 10), torch.tensor([10])), "label 10 of sample 0 .* 10 outputs"),
        (lambda: top_k_accuracy(torch.zeros(2, 3), torch.tensor([0, -1])), "label -1 of sample 1"),
        (lambda: top_k_accuracy(torch.zeros(2, 3), torch.tensor([0, 1]), 4), "k=4 .* 1 to 3"),
        (lambda: confusion_matrix(torch.zeros(0, 3), torch.zeros(0).long()), "no samples"),
        (lambda: confusion_matrix(torch.zeros(2, 3), torch.tensor([0])), "1 labels need scores of shape"),
        (lambda: confusion_matrix(torch.zeros(2, 1), torch.tensor([0, 0])), "2 outputs or more"),
        (lambda: confusion_matrix(torch.zeros(2, 3), torch.zeros(2)), "one class number per sample, got torch.float32"),
        (lambda: confusion_matrix(torch.zeros(2, 3), torch.zeros(2, 14).long()), "several labels per sample"),
        (lambda: auc(torch.randn(2, 3), torch.tensor([0, 1])), "give logits.softmax"),
        (
            lambda: auc(torch.ones(2, 4) / 4, torch.tensor([0, 1]), "multi-label"),
            "unknown task 'multi-label'; known: b",
        ),
        (lambda: auc(torch.ones(2, 4) / 4, torch.tensor([0, 1]), "binary-class"), "needs 2 outputs, got 4"),
        (lambda: calibration(torch.ones(2, 4) / 4, torch.tensor([0, 1]), 0), "1 bin or more, got 0"),
        (lambda: Metrics(3).update(torch.zeros(2, 4), torch.tensor([0, 1])), r"logits \(n, 3\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(MultilinearError, match=message):
        call()


@settings(max_examples=30)
@given(problems(), st.integers(1, 20))
def test_batches_in_any_order_and_repeated_give_the_whole(problem, size):
    logits, labels = problem[0].float(), problem[1]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(size))
    metrics, plain = Metrics(logits.shape[1]), Metrics(logits.shape[1])
    for places in torch.cat([order, order[:3]]).split(size):
        metrics.update(logits[places], labels[places, None], places)
    for places in torch.arange(len(labels)).split(size):
        plain.update(logits[places], labels[places])
    for found in (metrics.gather(), plain.gather()):
        assert torch.equal(found[0], logits)
        assert torch.equal(found[1], labels)


def test_indices_must_make_sense():
    mixed = Metrics(2)
    mixed.update(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([0]))
    mixed.update(torch.zeros(1, 2), torch.tensor([0]))
    with pytest.raises(MultilinearError, match="with all or with none"):
        mixed.gather()
    clashing = Metrics(2)
    clashing.update(torch.zeros(3, 2), torch.tensor([0, 0, 1]), torch.tensor([4, 7, 7]))
    with pytest.raises(MultilinearError, match="sample 7 came with two labels"):
        clashing.gather()
