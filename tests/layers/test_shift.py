import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multilinear.layers import SpatialShift, spatial_shift

SIZES = [(h, w) for h in range(1, 10) for w in range(1, 10)]


def shift_by_loop(x, border):
    """Entry by entry: where does the value at (row, column, channel) come from?"""
    height, width, channels = x.shape
    y = torch.zeros_like(x)
    steps = [(-1, 0), (1, 0), (0, -1), (0, 1)]
    for row in range(height):
        for column in range(width):
            for channel in range(channels):
                quarter = next(q for q in range(4) if channel < channels * (q + 1) // 4)
                source = row + steps[quarter][0], column + steps[quarter][1]
                if 0 <= source[0] < height and 0 <= source[1] < width:
                    y[row, column, channel] = x[*source, channel]
                elif border == "keep":
                    y[row, column, channel] = x[row, column, channel]
    return y


@pytest.mark.parametrize("border", ["keep", "zero"])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_eager_equals_a_hand_written_loop(height, width, border):
    x = torch.randn(height, width, 8)
    assert torch.equal(spatial_shift(x, border), shift_by_loop(x, border))


def both_borders(x):
    return spatial_shift(x, "keep"), spatial_shift(x, "zero")


def test_compiled_equals_eager_on_every_size():
    torch._dynamo.reset()
    # sizes 1 and 2 leave an empty or a single row and are compiled for themselves
    with torch._dynamo.config.patch(recompile_limit=32):
        compiled = torch.compile(both_borders, fullgraph=True, dynamic=True)
        for height, width in SIZES:
            x = torch.randn(2, height, width, 8)
            for found, expected in zip(compiled(x), both_borders(x), strict=True):
                assert torch.equal(found, expected), (height, width)


@pytest.mark.parametrize("border", ["keep", "zero"])
def test_exported_equals_eager(border):
    shape = {1: torch.export.Dim("height", min=3), 2: torch.export.Dim("width", min=3)}
    program = torch.export.export(SpatialShift(border), (torch.zeros(1, 4, 5, 8),), dynamic_shapes=(shape,)).module()
    for height, width in SIZES:
        if min(height, width) > 2:
            x = torch.randn(1, height, width, 8)
            assert torch.equal(program(x), spatial_shift(x, border))


@pytest.mark.parametrize("border", ["keep", "zero"])
def test_gradients(border):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: spatial_shift(t, border), (x,))


def test_input_is_left_alone():
    x = torch.randn(3, 3, 4)
    before = x.clone()
    spatial_shift(x)
    assert torch.equal(x, before)


@given(st.lists(st.integers(1, 3), max_size=3), st.integers(1, 9), st.sampled_from(["keep", "zero"]))
def test_any_leading_shape_and_channel_count(leading, channels, border):
    x = torch.randn(*leading, 3, 2, channels)
    expected = torch.stack([shift_by_loop(item, border) for item in x.reshape(-1, 3, 2, channels)]).reshape(x.shape)
    assert torch.equal(spatial_shift(x, border), expected)


def test_bad_input():
    with pytest.raises(ValueError, match="unknown border 'wrap'; known: keep, zero"):
        spatial_shift(torch.zeros(2, 2, 4), "wrap")
    with pytest.raises(ValueError, match="H, W, C"):
        spatial_shift(torch.zeros(2, 4))


@pytest.mark.gpu
def test_cuda_equals_cpu():
    x = torch.randn(8, 14, 14, 64)
    for border in ("keep", "zero"):
        assert torch.equal(spatial_shift(x.cuda(), border).cpu(), spatial_shift(x, border))
