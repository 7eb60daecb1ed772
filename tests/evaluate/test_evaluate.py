import json
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn import metrics as reference
from torch import nn
from torch.utils.data import DistributedSampler

import multilinear as ml
from multilinear import MultilinearError
from multilinear.evaluate.evaluate import Evaluation, evaluate
from multilinear.evaluate.metrics import Metrics

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def example(count=37, side=8, channels=3, classes=10):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count, side, side, channels)).astype(np.uint8)
    return images, random.integers(0, classes, (count, 1)).astype(np.uint8)


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = ml.create("monet_micro", norm="batch")
    with torch.no_grad():
        net.head.fc.weight.mul_(0.02)  # untrained logits are so large that the reference clips its logarithms
    return net


def logits_of(model, images):
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    with torch.inference_mode():
        return model.eval()((pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1))


def test_every_number_against_the_reference(model):
    images, labels = example()
    found = evaluate(model, images, labels, mean=MEAN, std=STD, batch_size=8)
    logits, truth = logits_of(model, images).double(), labels[:, 0]
    shares = logits.softmax(1)
    assert found.count == 37
    assert found.top1 == found.acc == pytest.approx(reference.accuracy_score(truth, logits.argmax(1)))
    assert found.top5 == pytest.approx(reference.top_k_accuracy_score(truth, logits, k=5, labels=range(10)))
    assert found.nll == pytest.approx(reference.log_loss(truth, shares, labels=range(10)), rel=1e-4)
    assert found.auc == pytest.approx(
        np.mean([reference.roc_auc_score(truth == i, shares[:, i]) for i in range(10) if (truth == i).any()]), abs=1e-6
    )
    assert found.auc_left_out == sum(not (truth == i).any() for i in range(10))
    assert found.confusion.tolist() == reference.confusion_matrix(truth, logits.argmax(1), labels=range(10)).tolist()
    assert found.flipped is None


def test_images_may_be_a_tensor_or_read_only(model):
    images, labels = example(5)
    expected = evaluate(model, images, labels, mean=MEAN, std=STD).as_dict()
    images.setflags(write=False)
    labels.setflags(write=False)
    assert evaluate(model, images, labels, mean=MEAN, std=STD, progress=True).as_dict() == expected
    tensors = torch.from_numpy(images.copy()), torch.from_numpy(labels.copy())
    assert evaluate(model, *tensors, mean=MEAN, std=STD, device="cpu").as_dict() == expected


def test_flips_are_the_mean_with_the_mirror_image_and_stay_apart(model):
    images, labels = example(12)
    plain = evaluate(model, images, labels, mean=MEAN, std=STD)
    found = evaluate(model, images, labels, mean=MEAN, std=STD, flip=True)
    assert found.top1 == plain.top1 and found.nll == plain.nll
    both = (logits_of(model, images) + logits_of(model, images[:, :, ::-1].copy())) / 2
    assert found.flipped is not None
    assert found.flipped.nll == pytest.approx(Evaluation.from_logits(both, torch.from_numpy(labels)).nll, rel=1e-5)
    assert found.flipped.nll != found.nll
    assert "with flips" in str(found) and "with flips" not in str(plain)
    assert "flipped" in found.as_dict() and "flipped" not in plain.as_dict()


def test_each_module_gets_its_mode_back(model):
    images, labels = example(3)
    model.train()
    model.embed.eval()
    before = [module.training for module in model.modules()]
    evaluate(model, images, labels, mean=MEAN, std=STD)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(MultilinearError):
        evaluate(model, images, labels + 250, mean=MEAN, std=STD)
    assert [module.training for module in model.modules()] == before


def test_two_classes_one_of_them_absent():
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    images, labels = example(6)
    found = evaluate(net, images, 0 * labels, mean=MEAN, std=STD)
    assert found.top5 is None
    assert math.isnan(found.auc) and found.auc_left_out == 1
    assert "AUC undefined" in str(found)
    data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert data["auc"] is None and data["per_class"][1] is None


def test_reduced_precision_weights_are_fed_in_kind():
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).bfloat16()
    assert evaluate(net, *example(6, classes=3), mean=MEAN, std=STD).count == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.full(4, 10)}, "label 10 of sample 0 does not fit a head of 10 outputs"),
        ({"labels": np.zeros((4, 14), int)}, "several labels per sample"),
        ({"labels": []}, "no images to evaluate"),
        ({"labels": [0, 1]}, "4 images came with 2 labels"),
        ({"images": np.zeros((0, 8, 8, 3), np.uint8), "labels": []}, "no images to evaluate"),
        ({"images": np.zeros((4, 8, 8), np.uint8)}, r"images\[..., None\]"),
        ({"images": np.zeros((4, 8, 8, 3))}, "must be uint8 .* got float64"),
        ({"images": np.zeros((4, 8, 8, 1), np.uint8), "mean": [0.5], "std": [0.5]}, "wants 3 channels, .* have 1"),
        ({"mean": [0.5]}, r"images of 3 channels need 3 means .* mean=\[0.5\]"),
        ({"std": [0.2, 0.0, 0.2]}, "positive deviations"),
        ({"amp": True}, "amp needs a CUDA device, the model is on cpu"),
        ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"distributed": True}, "distributed=True needs torch.distributed"),
    ],
)
def test_bad_input_is_one_clear_line(model, change, message):
    images, labels = example(4)
    arguments = {"images": images, "labels": labels, "mean": MEAN, "std": STD} | change
    with pytest.raises(MultilinearError, match=message) as error:
        evaluate(model, **arguments)
    assert "\n" not in str(error.value)


def test_a_model_without_a_declared_shape_says_what_it_could_not_take():
    with pytest.raises(MultilinearError, match=r"does not take images of shape \(8, 8, 3\)"):
        evaluate(nn.Sequential(nn.Flatten(), nn.Linear(5, 2)), *example(4), mean=MEAN, std=STD)


class BreaksOnWhite(nn.Module):
    def forward(self, images):
        return torch.where((images > 0).flatten(1).all(1), torch.nan, 0.0)[:, None].expand(-1, 3)


def test_the_first_image_that_breaks_the_network_is_named():
    images = np.zeros((9, 2, 2, 1), np.uint8)
    images[[6, 8]] = 255
    with pytest.raises(MultilinearError, match="logits of 2 of 9 images are not finite, first at image 6"):
        evaluate(BreaksOnWhite(), images, [0] * 9, mean=[0.5], std=[1.0], batch_size=4)


def odd_problem():
    """Of a size that makes a sampler for two processes repeat one."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(13, 4, generator=random), torch.randint(0, 4, (13,), generator=random)


def judge(rank, world, folder):
    """One process of a group: through a padding sampler by hand, and through `evaluate`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    logits, labels = odd_problem()
    metrics = Metrics(logits.shape[1])
    for places in torch.tensor(list(DistributedSampler(range(len(labels)), shuffle=True))).split(4):
        metrics.update(logits[places], labels[places], places)
    found = Evaluation.from_logits(*metrics.gather())
    alone = Metrics(2)  # one process has nothing to tell
    if rank == 0:
        alone.update(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    with torch.no_grad():
        net[1].weight.copy_(torch.linspace(-1, 1, 1920).view(10, 192).cos())
        net[1].bias.zero_()
    together = evaluate(net, *example(), mean=MEAN, std=STD, batch_size=4, flip=True, distributed=True)
    images = np.full((3, 2, 2, 1), [[[[0]]], [[[255]]], [[[0]]]], np.uint8)
    try:
        evaluate(BreaksOnWhite(), images, [0, 0, 0], mean=[0.5], std=[1.0], distributed=True)
    except MultilinearError as error:
        broken = str(error)
    answer = {"found": found.as_dict(), "alone": alone.gather()[0].tolist(), "broken": broken}
    answer["together"] = together.as_dict()
    if rank == 0:
        answer["single"] = evaluate(net, *example(), mean=MEAN, std=STD, batch_size=4, flip=True).as_dict()
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


def test_two_processes_count_every_sample_once(tmp_path):
    torch.multiprocessing.spawn(judge, (2, tmp_path), nprocs=2)
    answers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    expected = Evaluation.from_logits(*odd_problem()).as_dict()
    for answer in answers:
        assert answer["found"] == expected
        assert answer["alone"] == [[0.0, 1.0]]
        assert "1 of 3 images are not finite, first at image 1" in answer["broken"]
        # the batches differ, and with them the rounding of the sums
        for key in ("top1", "top5", "acc", "count", "confusion", "per_class"):
            assert answer["together"][key] == answers[0]["single"][key]
            assert answer["together"]["flipped"][key] == answers[0]["single"]["flipped"][key]
        assert answer["together"]["nll"] == pytest.approx(answers[0]["single"]["nll"], rel=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_and_in_reduced_precision(model):
    images, labels = example()
    expected = evaluate(model, images, labels, mean=MEAN, std=STD)
    found = evaluate(model, images, labels, mean=MEAN, std=STD, device="cuda")
    assert found.nll == pytest.approx(expected.nll, rel=1e-2)
    resident = torch.from_numpy(images).cuda(), torch.from_numpy(labels).cuda()
    assert evaluate(model, *resident, mean=MEAN, std=STD).nll == pytest.approx(found.nll, rel=1e-5)
    reduced = evaluate(model, images, labels, mean=MEAN, std=STD, amp=True, flip=True)
    assert reduced.nll == pytest.approx(expected.nll, rel=0.1)
    assert reduced.nll != found.nll


@pytest.mark.gpu
def test_a_group_of_one_over_nccl(model, tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        images, labels = example()
        found = evaluate(model, images, labels, mean=MEAN, std=STD, device="cuda", distributed=True)
        assert found.count == 37
    finally:
        dist.destroy_process_group()
