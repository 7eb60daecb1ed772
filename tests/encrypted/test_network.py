import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from multilinear.encrypted.network import cut_patches, directions, flatten, shift
from multilinear.errors import MultilinearError
from multilinear.layers import SpatialShift, fold
from multilinear.models import create

OVERLAPPING = {"patches": (4,), "overlap": 4}
TOUCHING = {"patches": (2,), "overlap": 0, "widths": (12,)}


def relative_change(model, size):
    network = flatten(model)
    images = torch.randn(3, network.channels, *size, dtype=torch.float64)
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(images).numpy()
    _, logits = network.forward(network.patches(images.numpy()))
    return np.abs(logits.mean((1, 2)) - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("norm", ["batch", "affine", "none"])
@pytest.mark.parametrize("patching", [OVERLAPPING, TOUCHING], ids=["overlap", "pyramid"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_flat_network_is_the_same_function(trained, pictures, blocks, norm, patching, channels):
    model = trained(pictures(20, channels, (8, 12)), depths=(blocks,), norm=norm, **patching)
    assert relative_change(model, (8, 12)) < 1e-9


@pytest.mark.parametrize("size", [(4, 4), (4, 20), (16, 4)])
@pytest.mark.parametrize("patching", [OVERLAPPING, TOUCHING], ids=["overlap", "pyramid"])
def test_any_size_of_images_will_do(trained, pictures, size, patching):
    assert relative_change(trained(pictures(20), **patching), size) < 1e-9


@pytest.mark.parametrize("ranks", [(1, 1), (2, 3), (3, 2), (7, 5)])
def test_ranks_need_not_divide_by_the_four_directions(trained, pictures, ranks):
    assert relative_change(trained(pictures(20), ranks=ranks), (8, 8)) < 1e-9


@pytest.mark.parametrize(
    "options", [{"patches": (4, 2)}, {"patches": (8, 4, 2), "fuse": "concat"}, {"shrinkage": 4, "widths": (12,)}]
)
def test_pyramids_of_several_levels_and_narrow_branches(trained, pictures, options):
    assert relative_change(trained(pictures(20, 3), **options), (16, 8)) < 1e-9


def test_a_folded_network_is_flattened_too(trained, pictures):
    assert relative_change(fold(trained(pictures(20))), (8, 8)) < 1e-9


def test_there_is_one_product_for_each_mu_layer_and_every_other_one_shifts(trained, pictures):
    network = flatten(trained(pictures(20), depths=(2,)))
    assert [product.rank for product in network.products] == [6, 8, 6, 8]
    assert [product.shifts for product in network.products] == [True, False, True, False]
    assert network.head.shape == (10, 1 + 16 + 28)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "layer"}, "norm='layer': it needs 'batch' or 'affine' or 'none'"),
        ({"border": "keep"}, "border='keep': it needs 'zero'"),
        ({"shift_second": True}, "shift_second=True: it needs False"),
        ({"global_pool": "max"}, "global_pool='max': it needs 'avg'"),
        ({"widths": (8, 8), "depths": (1, 1)}, "cannot encrypt 2 stages"),
        ({"num_classes": 0}, "no classifier"),
        ({"patches": (7,), "overlap": 0, "widths": (2,)}, "pyramid does not fold"),
    ],
)
def test_what_cannot_be_encrypted_is_named(options, message):
    model = create("monet_private_1", **{"widths": (8,), "in_chans": 1, **options})
    with pytest.raises(MultilinearError, match=message):
        flatten(model)


def test_another_module_is_refused():
    with pytest.raises(MultilinearError, match="takes a MONet of this library, got Linear"):
        flatten(nn.Linear(3, 3))


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_not_changed(trained, pictures, training):
    model = trained(pictures(20)).train(training)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    flatten(model)
    assert model.training is training
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert all(parameter.dtype == torch.float32 and parameter.requires_grad for parameter in model.parameters())


@given(
    patch=st.integers(1, 5),
    half=st.integers(0, 4),
    channels=st.integers(1, 3),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
@settings(deadline=None, max_examples=80)
def test_patches_are_those_of_a_padded_unfold(patch, half, channels, grid):
    images = torch.randn(2, channels, grid[0] * patch, grid[1] * patch, dtype=torch.float64)
    unfolded = nn.functional.unfold(images, patch + 2 * half, padding=half, stride=patch)
    found = cut_patches(images.numpy(), patch, 2 * half)
    assert found.shape[:3] == (2, *grid)
    assert np.array_equal(found.reshape(2, grid[0] * grid[1], -1), unfolded.transpose(1, 2).numpy())


@given(rank=st.integers(1, 9), high=st.integers(1, 4), wide=st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_the_shift_is_the_one_of_the_layer(rank, high, wide):
    tokens = torch.randn(2, high, wide, rank, dtype=torch.float64)
    assert len(directions(rank)) == rank
    assert np.array_equal(shift(tokens.numpy()), SpatialShift("zero")(tokens).numpy())
