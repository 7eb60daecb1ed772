import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multilinear as ml
from multilinear.layers import (
    FoldedMuLayer,
    MuLayer,
    PatchEmbed,
    PolyBlock,
    PyramidPatchEmbed,
    collect_statistics,
    fold,
    is_folded,
)


def randomise(module):
    """Statistics, scales and biases that are not the ones an initialiser leaves, so that forgetting one shows."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            tensor.data = torch.rand_like(tensor) + 0.5 if tensor.ndim < 2 else torch.randn_like(tensor) * 0.3
    return module.double().eval()


def relative_change(model, x):
    with torch.no_grad():
        before, after = model(x), fold(model)(x)
    return ((before - after).norm() / before.norm()).item()


@given(
    norm=st.sampled_from(["batch", "affine", "none"]),
    shift=st.sampled_from([None, "keep", "zero"]),
    shift_second=st.booleans(),
    shrinkage=st.integers(1, 8),
    seed=st.integers(0, 100),
)
@settings(deadline=None, max_examples=60)
def test_a_folded_block_is_the_same_function(norm, shift, shift_second, shrinkage, seed):
    torch.manual_seed(seed)
    block = randomise(PolyBlock(8, norm=norm, shift=shift, shift_second=shift_second, shrinkage=shrinkage))
    assert relative_change(block, torch.randn(2, 4, 3, 8, dtype=torch.float64)) < 1e-12


@given(st.sampled_from([[2], [4, 2], [8, 2], [8, 4, 2]]), st.sampled_from(["add", "concat"]))
@settings(deadline=None, max_examples=20)
def test_a_folded_pyramid_is_one_patch_embedding(levels, fuse):
    embed = randomise(PyramidPatchEmbed(levels, 3, 16, fuse=fuse))
    assert isinstance(fold(embed), PatchEmbed)
    image = torch.randn(2, 3, 2 * embed.stride, 3 * embed.stride, dtype=torch.float64)
    assert relative_change(embed, image) < 1e-12


def test_folding_never_adds_weights():
    for embed in (PyramidPatchEmbed([16], 3, 2), MuLayer(8, shrinkage=8), MuLayer(8, 24, shrinkage=1)):
        assert sum(p.numel() for p in fold(embed).parameters()) <= sum(p.numel() for p in embed.parameters())


@pytest.mark.parametrize("norm", ["batch", "affine"])
def test_the_published_network_folds_after_statistics_were_collected(norm):
    torch.manual_seed(0)
    model = ml.create("monet_ms_t", norm=norm).double().eval()
    images = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    collect_statistics(model, [images + 0.1 * torch.randn_like(images) for _ in range(2)])
    folded = fold(model)
    with torch.no_grad():
        before, after = model(images), folded(images)
    assert torch.isfinite(before).all()
    assert ((before - after).abs().max() / before.abs().max()).item() < 1e-5
    assert sum(p.numel() for p in folded.parameters()) < sum(p.numel() for p in model.parameters())
    assert ml.audit(folded, 64).polynomial


def test_a_layer_norm_stays_and_the_function_too():
    block = PolyBlock(8, norm="layer").double()
    folded = fold(block)
    assert not any(isinstance(part, FoldedMuLayer) for part in folded.modules())
    assert relative_change(block, torch.randn(2, 4, 3, 8, dtype=torch.float64)) == 0


def test_the_original_is_not_touched():
    model = ml.create("monet_micro", norm="batch").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fold(model)
    assert model.training
    assert not is_folded(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
