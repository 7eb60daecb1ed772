import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from multilinear.data.augment import Mixed, apply_policy, crop_and_flip, erase, mix, normalise
from multilinear.models import MONet
from multilinear.train.checkpoint import gather_state, restore_state
from multilinear.train.config import AugmentConfig, OptimConfig, Recipe
from multilinear.train.optim import Average, Muon, build_optimizers, orthogonalise, set_learning_rate
from multilinear.train.step import Step, augment_batch, mixed_loss


@given(st.floats(0, 1), st.floats(0, 0.5), st.integers(2, 6))
@settings(deadline=None)
def test_the_loss_is_cross_entropy_with_soft_targets(share, smoothing, classes):
    logits = torch.randn(5, classes, dtype=torch.float64)
    first, second = torch.randint(classes, (5,)), torch.randint(classes, (5,))
    mixed = Mixed(logits, first, second, torch.full((5,), share, dtype=torch.float64))
    targets = share * F.one_hot(first, classes) + (1 - share) * F.one_hot(second, classes).double()
    expected = F.cross_entropy(logits.float(), targets.float(), label_smoothing=smoothing)
    torch.testing.assert_close(mixed_loss(logits, mixed, smoothing).float(), expected, rtol=1e-4, atol=1e-5)


class TestAugment:
    images = torch.randint(0, 256, (64, 8, 10, 3), dtype=torch.uint8)

    def test_nothing_asked_nothing_changed(self):
        labels = torch.arange(64)
        found = augment_batch(self.images, labels, AugmentConfig(), torch.zeros(3), torch.ones(3))
        torch.testing.assert_close(found.images, self.images.permute(0, 3, 1, 2) / 255)
        assert (found.share == 1).all()

    def test_normalise(self):
        mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
        found = normalise(self.images, mean, std)
        torch.testing.assert_close(found[3, 1], (self.images[3, :, :, 1] / 255 - 0.2) / 0.6)

    def test_every_crop_is_a_window_of_the_padded_image_or_its_mirror(self):
        found = crop_and_flip(self.images, 2, True)
        padded = F.pad(self.images, (0, 0, 2, 2, 2, 2))
        seen = set()
        for image, source in zip(found, padded, strict=True):
            matches = [
                (top, left, mirrored)
                for top in range(5)
                for left in range(5)
                for mirrored in (False, True)
                if torch.equal(image, source[top : top + 8, left : left + 10].flip(1) if mirrored
                               else source[top : top + 8, left : left + 10])
            ]  # fmt: skip
            assert matches
            seen.update(matches)
        assert len({place[:2] for place in seen}) > 10
        assert {place[2] for place in seen} == {False, True}

    @pytest.mark.parametrize(("mixup", "cutmix"), [(0.5, 0.0), (0.0, 0.5), (0.5, 0.5)])
    def test_shares_say_what_was_mixed(self, mixup, cutmix):
        # image i is constant i, so that the mean of a mixture tells its share
        images = torch.arange(64.0)[:, None, None, None].expand(64, 3, 16, 16)
        found = mix(images, torch.arange(64), mixup, cutmix)
        expected = found.share * found.first + (1 - found.share) * found.second
        torch.testing.assert_close(found.images.mean((1, 2, 3)), expected, rtol=1e-4, atol=1e-3)
        assert found.share.std() > 0.1

    def test_mix_probability(self):
        images = torch.rand(2000, 1, 4, 4)
        found = mix(images, torch.zeros(2000, dtype=torch.long), 1.0, 0.0, probability=0.3)
        assert (found.share == 1).float().mean().item() == pytest.approx(0.7, abs=0.05)

    def test_erasing_takes_a_rectangle_from_a_share_of_the_images(self):
        found = erase(torch.ones(2000, 1, 16, 16), 0.25)
        holes = (found == 0).float().mean((1, 2, 3))
        assert (holes > 0).float().mean().item() == pytest.approx(0.25, abs=0.05)
        assert holes.max() < 0.6

    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("policy", ["trivial", "rand"])
    def test_policies_keep_range_and_shape_and_do_something(self, policy, channels):
        images = torch.rand(256, channels, 12, 12)
        found = apply_policy(images, policy, operations=2, magnitude=0.9)
        assert found.shape == images.shape
        assert found.min() >= 0
        assert found.max() <= 1
        changed = ((found - images).abs().amax((1, 2, 3)) > 1e-3).float().mean()
        assert changed > 0.5

    def test_no_policy_is_no_change(self):
        images = torch.rand(2, 3, 4, 4)
        assert apply_policy(images, "none") is images


class TestMuon:
    def test_orthogonalise_keeps_singular_vectors(self):
        torch.manual_seed(0)
        stack = torch.randn(3, 6, 10, dtype=torch.float64).float()
        u, _, v = torch.linalg.svd(stack, full_matrices=False)
        found = u.transpose(-1, -2) @ orthogonalise(stack) @ v.transpose(-1, -2)
        diagonal = torch.diagonal(found, dim1=-2, dim2=-1)
        assert ((diagonal > 0.5) & (diagonal < 1.4)).all()
        assert (found - torch.diag_embed(diagonal)).abs().max() < 1e-2

    def test_stacked_matrices_step_as_if_alone(self):
        torch.manual_seed(0)
        weights = [torch.randn(4, 6) for _ in range(3)]
        gradients = [torch.randn(4, 6) for _ in range(3)]
        together = [nn.Parameter(weight.clone()) for weight in weights]
        for parameter, gradient in zip(together, gradients, strict=True):
            parameter.grad = gradient
        Muon(together, lr=0.1, weight_decay=0.1).step()
        for weight, gradient, found in zip(weights, gradients, together, strict=True):
            alone = nn.Parameter(weight.clone())
            alone.grad = gradient
            Muon([alone], lr=0.1, weight_decay=0.1).step()
            torch.testing.assert_close(found, alone)

    def test_minimises(self):
        torch.manual_seed(0)
        target, weight = torch.randn(8, 8), nn.Parameter(torch.zeros(8, 8))
        optimizer = Muon([weight], lr=0.05)
        for _ in range(200):
            optimizer.zero_grad()
            (weight - target).square().sum().backward()
            optimizer.step()
        assert (weight - target).square().mean() < 0.05 * target.square().mean()


def test_vectors_are_not_decayed():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    (optimizer,) = build_optimizers(model, OptimConfig(weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {decays[id(p)] for p in model.parameters() if p.ndim > 1} == {0.3}
    assert {decays[id(p)] for p in model.parameters() if p.ndim == 1} == {0.0}


def test_tensors_are_stepped_by_size_and_kept_by_name():
    """Small ones together, large ones together; and in whatever order, a checkpoint gives each its own state."""
    torch.manual_seed(0)
    model = MONet(widths=(8,), depths=(2,), patches=(2,), num_classes=3, in_chans=1)
    step = Step(model, model, build_optimizers(model, OptimConfig()), None, Recipe(), (torch.zeros(1), torch.ones(1)))
    for group in step.optimizers[0].param_groups:
        sizes = [p.numel() for p in group["params"]]
        assert sizes == sorted(sizes)
    step(IMAGES, LABELS)
    state = gather_state(step)
    twin = copy.deepcopy(model)
    other = Step(twin, twin, [torch.optim.AdamW(twin.parameters())], None, Recipe(), (torch.zeros(1), torch.ones(1)))
    restore_state(other, state)
    for parameter, same in zip(model.parameters(), twin.parameters(), strict=True):
        for key, value in step.optimizers[0].state[parameter].items():
            assert torch.equal(value, other.optimizers[0].state[same][key])


def test_the_average_follows_the_weights():
    model = nn.Linear(1, 1)
    average = Average(model, 0.5)
    expected = model.weight.item()
    for step in range(1, 6):
        with torch.no_grad():
            model.weight.fill_(float(step))
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert average.state()["weight"].item() == pytest.approx(expected, rel=1e-5)


IMAGES = torch.randint(0, 256, (16, 8, 8, 1), dtype=torch.uint8)
LABELS = torch.tensor([0, 1, 0, 2] * 4)
FREQUENCIES = torch.tensor([0.5, 0.25, 0.25])


def one_step(**optim):
    torch.manual_seed(0)
    model = MONet(widths=(8,), depths=(1,), patches=(2,), num_classes=3, in_chans=1, norm="batch")
    before = copy.deepcopy(model)
    recipe = Recipe(optim=OptimConfig(clip=0.0, smoothing=0.0, **optim))
    sgd, statistics = torch.optim.SGD(model.parameters(), lr=0.1), (torch.zeros(1), torch.ones(1))
    frequencies = FREQUENCIES if recipe.optim.balance else None
    step = Step(model, model, [sgd], None, recipe, statistics, frequencies)
    step(IMAGES, LABELS)
    return before, model, step.mean_loss()


def test_balancing_adds_log_frequencies_to_the_logits():
    before, _, loss = one_step(balance=True)
    logits = before(normalise(IMAGES, torch.zeros(1), torch.ones(1)))
    expected = F.cross_entropy(logits + FREQUENCIES.log(), LABELS).item()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert loss != pytest.approx(one_step()[2], rel=1e-3)


def test_a_range_penalty_makes_products_smaller():
    def typical(model):
        for layer in (block := model.stages[0].blocks[0]).mu1, block.mu2:
            layer.watch_range = True
        model(normalise(IMAGES, torch.zeros(1), torch.ones(1)))
        return block.mu1.range + block.mu2.range

    assert typical(one_step(range_penalty=0.1)[1]) < typical(one_step()[1])


def test_compiling_ahead_leaves_the_run_as_it_was(monkeypatch):
    """On a CPU, where it is a whole step, so that there is something to undo."""
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *state: None)
    torch.manual_seed(0)
    model = MONet(widths=(8,), depths=(1,), patches=(2,), num_classes=3, in_chans=1, norm="batch")
    adam = torch.optim.AdamW(model.parameters())
    step = Step(model, model, [adam], None, Recipe(), (torch.zeros(1), torch.ones(1)))
    once, twice = copy.deepcopy(model.state_dict()), []
    step.compile(IMAGES, LABELS)
    for key, value in model.state_dict().items():
        assert torch.equal(value, once[key]), key
    assert all(not state.any() for states in adam.state.values() for state in states.values())
    assert step.loss_sum.item() == 0
    # and the next one is the first one
    fresh = copy.deepcopy(model)
    other = Step(fresh, fresh, [torch.optim.AdamW(fresh.parameters())], None, Recipe(), (torch.zeros(1), torch.ones(1)))
    for one in (step, other):
        torch.manual_seed(1)
        one(IMAGES, LABELS)
        twice.append(one.mean_loss())
    assert twice[0] == twice[1]
    for found, expected in zip(model.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_captured_step_is_the_same_step(dtype):
    images = torch.randint(0, 256, (3, 8, 32, 32, 3), dtype=torch.uint8, device="cuda")
    if dtype == torch.float32:  # as a loader prepares them
        images = (images.permute(0, 1, 4, 2, 3) / 255).contiguous()
    labels = torch.randint(0, 4, (3, 8), device="cuda")
    losses, weights = [], []
    for captured in (False, True):
        torch.manual_seed(0)
        model = MONet(widths=(64, 128), depths=(2, 2), patches=(2,), shrinkage=8, num_classes=4).cuda().train()
        recipe = Recipe()
        statistics = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
        step = Step(model, model, build_optimizers(model, recipe.optim), None, recipe, statistics)
        set_learning_rate(list(step.optimizers), 1.0)
        start = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        if captured:
            step.capture(images[0], labels[0])
        else:
            step.compile(images[0], labels[0])
        found = []
        for batch, target in zip(images, labels, strict=True):
            step(batch, target)
            found.append(step.mean_loss())
        losses.append(found)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert (weights[0] - weights[1]).norm() < 0.1 * (weights[0] - start).norm()
