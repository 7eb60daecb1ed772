import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from multilinear.errors import MultilinearError
from multilinear.layers import PatchEmbed, PyramidPatchEmbed


def test_two_levels_add_a_coarse_embedding_to_the_reduced_fine_one():
    embed = PyramidPatchEmbed([14, 7], 3, 8).double()
    image = torch.randn(2, 3, 28, 42, dtype=torch.float64)
    fine, coarse = embed.levels
    reduced = F.conv2d(fine(image), embed.reduce[0].weight, embed.reduce[0].bias, stride=2)
    torch.testing.assert_close(embed(image), (reduced + coarse(image)).permute(0, 2, 3, 1))


def test_one_level_reduces_by_two():
    assert PyramidPatchEmbed([7], 3, 8)(torch.zeros(1, 3, 28, 28)).shape == (1, 2, 2, 8)


@given(st.sampled_from([[1], [2], [4, 2], [8, 2], [8, 4, 2], [6, 2]]), st.sampled_from(["add", "concat"]),
       st.integers(1, 4))  # fmt: skip
def test_any_list_of_levels(levels, fuse, channels):
    embed = PyramidPatchEmbed(levels, channels, 4, fuse=fuse)
    side = embed.stride
    assert side == max(max(levels), 2 * min(levels))
    assert embed(torch.randn(1, channels, 2 * side, 3 * side)).shape == (1, 2, 3, 4)


def test_a_size_that_does_not_fit_names_the_nearest():
    with pytest.raises(ValueError, match="image size 224x224 is not divisible by the patching's 9; .* 216 or 225"):
        PatchEmbed(9, 3, 4)(torch.zeros(1, 3, 224, 224))
    with pytest.raises(ValueError, match="height 28, width 28 or 32"):
        PyramidPatchEmbed([2], 3, 4)(torch.zeros(1, 3, 28, 30))


def test_bad_levels():
    with pytest.raises(ValueError, match="7 does not divide 16"):
        PyramidPatchEmbed([16, 7], 3, 4)
    with pytest.raises(ValueError, match="one or more positive sizes"):
        PyramidPatchEmbed([], 3, 4)
    with pytest.raises(ValueError, match="unknown fusion 'max'; known: add, concat"):
        PyramidPatchEmbed([4], 3, 4, fuse="max")


def test_overlapping_patches_see_their_neighbours_and_zeros_past_the_border():
    embed = PatchEmbed(4, 1, 5, overlap=4).double()
    image = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    padded = F.pad(image, (2, 2, 2, 2))
    corner = (embed.proj.weight * padded[:, :, :8, :8]).sum((1, 2, 3)) + embed.proj.bias
    tokens = embed(image)
    assert tokens.shape == (1, 2, 2, 5)
    torch.testing.assert_close(tokens[0, 0, 0], corner)
    with pytest.raises(MultilinearError, match="even number"):
        PatchEmbed(4, 1, 5, overlap=3)


@pytest.mark.parametrize(
    ("levels", "fuse", "dim", "one"), [([2], "add", 64, True), ([2, 4], "concat", 64, True), ([7], "add", 16, False)]
)
def test_a_pyramid_with_more_weights_than_one_convolution_becomes_that(levels, fuse, dim, one):
    embed = PyramidPatchEmbed(levels, 3, dim, fuse=fuse)
    found = embed.as_one()
    assert isinstance(found, PatchEmbed) == one
    images = torch.randn(2, 3, 28, 56)
    torch.testing.assert_close(found(images), embed(images), atol=1e-4, rtol=1e-4)
