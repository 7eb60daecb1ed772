"""What timm and its users expect of a model, for every model that we register."""

import functools

import numpy as np
import onnxruntime
import pytest
import timm
import torch

import multilinear as ml
from multilinear.export import export_onnx
from multilinear.models import names
from multilinear.models.monet import MONet

NAMES = names()
MULTI_STAGE = [name for name in NAMES if "_ms_" in name]


@functools.cache
def stages(name):
    """How many, from a model that is made in full."""
    return len(timm.create_model(name, num_classes=0).config["depths"])


def small(name, **arguments):
    """One block a stage: the graph of the model at a depth that compiles in seconds."""
    depths = (1,) * stages(name)
    torch.manual_seed(0)
    return ml.create(name, depths=depths, **arguments).eval()


def odd_image(model, batch=2, channels=3):
    """Not square, and an odd number of tokens on both sides."""
    step = model.embed.stride
    return torch.randn(batch, channels, 5 * step, 7 * step)


def test_all_variants_are_registered():
    assert {"monet_t", "monet_s", "monet_ms_t", "monet_ms_s", "monet_nano", "monet_micro"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
class TestEveryModel:
    @pytest.mark.parametrize("norm", ["layer", "batch", "affine"])
    def test_forward_and_backward_at_full_depth(self, name, norm):
        model = ml.create(name, num_classes=7, norm=norm)
        logits = model(odd_image(model))
        assert logits.shape == (2, 7)
        logits.square().sum().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())

    def test_grey_images(self, name):
        model = small(name, in_chans=1)
        assert model(odd_image(model, channels=1)).shape == (2, model.num_classes)

    def test_no_parameter_is_tied_to_the_size(self, name):
        model = small(name)
        step = model.embed.stride
        for rows, columns in [(1, 1), (2, 3), (9, 4)]:
            image = torch.randn(1, 3, rows * step, columns * step)
            assert torch.isfinite(model(image)).all()

    def test_features(self, name):
        model = small(name)
        image = odd_image(model)
        features = model.forward_features(image)
        assert features.shape[-1] == model.num_features
        torch.testing.assert_close(model.forward_head(features), model(image))
        assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
        final, intermediates = model.forward_intermediates(image)
        torch.testing.assert_close(final, features)
        torch.testing.assert_close(intermediates[-1].permute(0, 2, 3, 1), features)
        (only,) = model.forward_intermediates(image, indices=[0], stop_early=True, intermediates_only=True)
        torch.testing.assert_close(only, intermediates[0])

    def test_features_only(self, name):
        full = small(name)
        backbone = timm.create_model(name, features_only=True, depths=full.config["depths"])
        maps = backbone(odd_image(full))
        assert backbone.feature_info.channels() == full.config["widths"]
        assert [m.shape[1] for m in maps] == full.config["widths"]
        assert [-(-5 * full.embed.stride // r) for r in backbone.feature_info.reduction()] == [m.shape[2] for m in maps]

    def test_classifier_can_be_replaced(self, name):
        model = small(name)
        model.reset_classifier(3)
        assert model(odd_image(model)).shape == (2, 3)
        assert model.get_classifier().out_features == 3
        model.reset_classifier(0)
        assert model(odd_image(model)).shape == (2, model.num_features)

    def test_groups_cover_every_parameter_in_depth_order(self, name):
        model = small(name)
        groups = timm.models.group_parameters(model, model.group_matcher())
        assert sorted(key for group in groups.values() for key in group) == sorted(dict(model.named_parameters()))
        assert all(key.startswith("embed") for key in groups[0])

    def test_default_cfg(self, name):
        model = ml.create(name)
        cfg = model.default_cfg
        modules = dict(model.named_modules())
        assert modules[cfg["classifier"]].out_features == model.num_classes == cfg["num_classes"]
        assert isinstance(modules[cfg["first_conv"]], torch.nn.Conv2d)
        assert cfg["input_size"][1] % model.embed.stride == 0

    def test_drop_path_rises_linearly(self, name):
        model = ml.create(name, drop_path_rate=0.3)
        rates = [block.drop_path.drop_prob for stage in model.stages for block in stage.blocks]
        assert rates == pytest.approx(np.linspace(0, 0.3, len(rates)))

    def test_gradient_checkpointing_gives_the_same_gradients(self, name):
        model = small(name).train()
        image = odd_image(model)
        model(image).square().sum().backward()
        plain = {key: p.grad.clone() for key, p in model.named_parameters()}
        model.zero_grad()
        model.set_grad_checkpointing()
        model(image).square().sum().backward()
        for key, p in model.named_parameters():
            torch.testing.assert_close(p.grad, plain[key])

    def test_compiled_equals_eager(self, name):
        torch._dynamo.reset()
        model = small(name).double()  # where rounding, which differs between CPUs, hides nothing
        image = odd_image(model).double()
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(model, fullgraph=True)(image), model(image))

    def test_exported_equals_eager(self, name):
        model = small(name)
        image = odd_image(model)
        torch.testing.assert_close(torch.export.export(model, (image,)).module()(image), model(image))

    def test_onnx_with_free_batch_and_size(self, name, tmp_path):
        model = small(name)
        path = export_onnx(model, tmp_path / "model.onnx")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        step = model.embed.stride
        for batch, rows, columns in [(1, 8, 8), (3, 5, 7), (2, 4, 11)]:
            image = torch.randn(batch, 3, rows * step, columns * step)
            (found,) = session.run(None, {"image": image.numpy()})
            with torch.no_grad():
                torch.testing.assert_close(torch.from_numpy(found), model(image), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("folded", [False, True])
    def test_save_and_load(self, name, folded, tmp_path):
        model = small(name, norm="batch")
        model = ml.fold(model) if folded else model
        again = ml.load(ml.save(model, tmp_path / "model.safetensors"))
        image = odd_image(model)
        assert torch.equal(again(image), model(image))


@pytest.mark.parametrize("name", MULTI_STAGE)
def test_multi_stage_features_are_at_strides_4_to_32(name):
    backbone = timm.create_model(name, features_only=True)
    assert backbone.feature_info.reduction() == [4, 8, 16, 32]
    maps = backbone(torch.randn(1, 3, 64, 96))
    assert [tuple(m.shape[2:]) for m in maps] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    last = timm.create_model(name, features_only=True, out_indices=(1, 3))
    assert [m.shape[2] for m in last(torch.randn(1, 3, 64, 64))] == [8, 2]


def test_unknown_names_and_arguments():
    with pytest.raises(ValueError, match="unknown model 'monet_xxl'; known: monet_micro, .*monet_t_32"):
        ml.create("monet_xxl")
    with pytest.raises(ValueError, match="unknown norm 'rms'; known: affine, batch, layer"):
        ml.create("monet_micro", norm="rms")
    with pytest.raises(ValueError, match="unknown initialiser 'zeros'; known:"):
        ml.create("monet_micro", init="zeros")
    with pytest.raises(ValueError, match="does not take these arguments.*hats"):
        ml.create("monet_micro", hats=3)
    with pytest.raises(ValueError, match="one entry per stage"):
        MONet(widths=(8, 8), depths=(1,), patches=(2,))
    with pytest.raises(ValueError, match="image size 225x225 is not divisible by the patching's 14; .* 224 or 238"):
        ml.create("monet_t", depths=(1,))(torch.zeros(1, 3, 225, 225))


@pytest.mark.parametrize("hole", [slice(8, 56), slice(0, 64)])
def test_erased_and_padded_regions_have_gradients_of_the_usual_size(hole):
    torch.manual_seed(0)
    net = MONet(widths=(32, 32), depths=(8, 4), patches=(2,), num_classes=4)

    def gradients(images):
        net.zero_grad()
        net(images).logsumexp(1).sum().backward()
        return torch.cat([weight.grad.flatten() for weight in net.parameters()]).norm().item()

    images = torch.randn(2, 3, 64, 64)
    usual = gradients(images)
    images[:, :, hole, hole] = 0
    assert gradients(images) < 100 * usual
