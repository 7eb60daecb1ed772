"""Which blocks the Hopper kernels take, and what they are launched with; what they compute is tested on a GPU."""

import inspect

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from multilinear.kernels import hopper, hopper_plans
from multilinear.kernels.block_sizes import Sizes


def block(channels, shrinkage):
    return Sizes(channels, channels, channels // shrinkage, 3 * channels, 3 * channels // shrinkage)


@pytest.fixture(autouse=True)
def tried_version(monkeypatch):
    """As with a version of Triton that was tried; plans are remembered, so forget them."""
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    plans = [value for name, value in vars(hopper_plans).items() if name.startswith("plan_")]
    assert len(plans) == 9
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


@given(st.integers(1, 300), st.sampled_from([32, 64]))
def test_pieces_hold_the_low_rank_and_five_columns(low, chunk):
    whole, rest = hopper.pieces(low, chunk)
    assert rest in (0, 16, 32) and rest < chunk
    assert low + 5 <= whole * chunk + rest < low + 5 + chunk


@given(st.integers(3, 2**16), st.data())
def test_a_product_stands_for_a_division(divisor, data):
    number = data.draw(st.integers(0, (2**32 - 1) // divisor))
    assert hopper.reciprocal(divisor) < 2**31
    assert number * hopper.reciprocal(divisor) >> 32 == number // divisor


@pytest.mark.parametrize(("channels", "shrinkage"), [(64, 8), (128, 8), (192, 8), (192, 4), (256, 8)])
def test_published_widths_have_plans(channels, shrinkage):
    sizes = block(channels, shrinkage)
    assert sizes.served()
    if hopper_plans.plan_merged(sizes) is None:
        assert hopper_plans.plan_for(sizes, save=False) is not None
        # in training n is written from where it is staged
        assert hopper_plans.plan_for(sizes, save=True).staged
        assert hopper_plans.plan_back(sizes) is not None
    assert hopper_plans.plan_lift(sizes) is not None
    assert hopper_plans.plan_first(sizes, 784, 28, 28, keep_border=True) is not None


@pytest.mark.parametrize(("channels", "low"), hopper_plans.FIRST_BACK)
def test_the_way_back_keeps_weights_and_tiles_in_shared_memory(channels, low):
    plan = hopper_plans.plan_first_back(block(channels, channels // low), 784, 28, 28, keep_border=True)
    assert channels % plan.chunk == 0 and plan.groups in (2, 3) and plan.tiles in (1, 2)
    weights = (channels + max(16, triton.next_power_of_2(low))) * channels
    tiles = plan.groups * 64 * (plan.tiles * 2 * channels + plan.chunk)
    # a group's sums also exchange half a chunk of float32, and a processor has 227 KiB for its programs
    assert plan.programs * (2 * (weights + tiles) + plan.groups * 128 * plan.chunk) < 227 * 1024
    assert plan.programs * plan.groups * 128 * plan.registers <= 2**16


@pytest.mark.parametrize(("channels", "low"), hopper_plans.MERGED)
def test_branches_are_merged_where_that_costs_nothing_and_fits(channels, low):
    sizes = block(channels, 3 * channels // low)
    plan = hopper_plans.plan_merged(sizes)
    assert sizes.channels * sizes.rank2 <= sizes.low2 * (sizes.channels + sizes.rank2)
    assert sizes.rank2 % 64 == 0
    tokens, branches, last = 2 * 64 * (channels + 64), 128 * (channels + 16), 64 * channels
    assert 2 * (tokens + plan.slots * branches + plan.slots_c * last) + 512 < 227 * 1024
    tokens = 2 * 64 * (channels + plan.stages * 64 + 16)
    vectors = 4 * 4 * channels
    assert 2 * tokens + plan.back_slots * branches + plan.back_slots_c * last + vectors + 512 < 227 * 1024
    assert plan.product_stages * 32 * 2 * (2 * channels + 3 * 64 + 16) + 512 < 227 * 1024
    # 64 hidden channels for each of the other programs, of which there are some even on small GPUs
    assert plan.share >= 2 and 16 - 2 * (16 // plan.share) >= sizes.rank2 // 64


@given(st.integers(0, 63))
def test_columns_in_their_own_order_stand_where_their_thread_is(column):
    parts = pytest.importorskip("multilinear.kernels.hopper_parts")
    place = parts.own_place.fn(column)
    assert parts.own_place.fn(place) == column
    assert torch.arange(64).view(2, 4, 4, 2).transpose(1, 2).flatten()[place] == column
    # of four threads with the same row each has two columns of eight in a product, and eight of 32 in that order
    assert place // 8 % 4 == column // 2 % 4 and place // 32 == column // 32
    layout = parts.own_columns(64)
    assert [base for base in layout.reg_bases if base[0] == 0] == [[0, 1], [0, 2], [0, 4], [0, 32]]
    assert layout.lane_bases[:2] == [[0, 8], [0, 16]]


@pytest.mark.parametrize(("channels", "low"), hopper_plans.LIFT_BACK)
def test_the_way_back_from_the_shift_fits_a_processor(channels, low):
    plan = hopper_plans.plan_lift_back(block(channels, channels // low), 784, 28, 28, keep_border=True)
    # sums take two spare tiles; du takes the gradient's if they are too few, and so there is no other set of tiles
    assert plan.spare >= 2 and (plan.spare > channels // 64 or plan.tiles == 1)
    weights, columns = (channels + 16 * -(-low // 16)) * channels, (2 + plan.groups) * 64 * 16
    tiles = plan.groups * 64 * (2 * plan.tiles * channels + 64 * plan.spare)
    assert 2 * (weights + columns + tiles) + 512 < 227 * 1024
    assert plan.groups * 128 * plan.registers <= 2**16


@pytest.mark.parametrize(("channels", "low"), hopper_plans.LIFT_BACK)
def test_products_over_all_tokens_take_what_comes_back_from_the_shift(channels, low):
    tokens, stages = hopper_plans.PRODUCTS[channels]
    assert tokens % 16 == 0 and stages >= 2 and low < 64
    assert stages * (3 * channels // 64 + 1) * tokens * 128 + 512 < 227 * 1024


@given(st.integers(1, 10**5), st.integers(2, 200), st.integers(1, 1000), st.integers(1, 1000))
def test_programs_are_shared_out_between_two_jobs_as_evenly_as_can_be(blocks, programs, first, rest):
    def time(share):
        return max(-(-blocks // share) * first, -(-blocks // (programs - share)) * rest)

    share = hopper._share(blocks, programs, first, rest)
    assert time(share) == min(map(time, range(1, programs)))


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "low"), hopper_plans.LIFT_BACK)
@pytest.mark.parametrize("rows", [1, 100, 64 * 132 * 3 + 13])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_products_over_all_tokens(channels, low, rows, dtype):
    sizes = block(channels, channels // low)
    widths = channels + low, channels, channels, channels, channels, -(-(low + 1) // 8) * 8
    du, x, grad, h, db, d = (torch.randn(rows, width, device="cuda").to(dtype) for width in widths)
    first, rest = hopper.first_products(du, x, grad, h, db, d, sizes)
    assert torch.equal(first, hopper.first_products(du, x, grad, h, db, d, sizes)[0])
    output, factor = rest.double().sum(0).split([channels * channels, channels * widths[-1]])
    for found, (left, right) in zip(
        (first.double().sum(0), output, factor), ((du, x), (grad, h), (db, d)), strict=True
    ):
        expected = left.double().T @ right.double()
        assert (found.view_as(expected) - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(("channels", "low"), hopper_plans.NORM_BACK)
def test_one_plan_leads_back_to_the_input(channels, low):
    assert not hopper_plans.plan_back(block(channels, 3 * channels // low)).whole


@pytest.mark.parametrize(("channels", "low"), hopper_plans.NORM_BACK)
def test_the_last_norm_keeps_enough_tiles_in_shared_memory(channels, low):
    plan = hopper_plans.plan_norm_back(block(channels, 3 * channels // low))
    # two tiles of P and all of x are held at a time, and one chunk of the stack while the next is multiplied
    assert plan.tiles >= channels // 64 + 2 and plan.slots >= 2 and 64 % plan.rows == 0
    columns, barriers = (2 + plan.groups) * 64 * 16, 2 * (plan.groups * plan.tiles + plan.slots)
    numbers = plan.groups * plan.tiles * 64 * 64 + plan.slots * plan.rows * channels + columns
    assert 2 * numbers + 8 * barriers + 512 < 227 * 1024


@pytest.mark.parametrize(
    "sizes", [block(48, 4), block(96, 4), block(384, 8), Sizes(64, 64, 8, 256, 24), Sizes(64, 64, 8, 192, 16)]
)
def test_others_have_none(sizes):
    assert hopper_plans.plan_for(sizes, save=False) is None
    assert hopper_plans.plan_back(sizes) is None
    assert hopper_plans.plan_norm_back(sizes) is None
    assert hopper_plans.plan_merged(sizes) is None


@pytest.mark.parametrize("plan", [hopper_plans.plan_first, hopper_plans.plan_first_back, hopper_plans.plan_lift_back])
def test_the_first_layer_needs_a_border_that_stays_and_a_grid_that_divides_exactly(plan):
    sizes = block(64, 8)
    assert plan(sizes, 784, 28, 28, keep_border=True) is not None
    assert plan(sizes, 784, 28, 28, keep_border=False) is None
    assert plan(sizes, 56, 2, 28, keep_border=True) is None
    assert plan(sizes, 2**24, 2**12, 2**12, keep_border=True) is None
    assert plan(Sizes(64, 32, 8, 192, 24), 784, 28, 28, keep_border=True) is None
    assert hopper_plans.plan_lift(Sizes(64, 32, 8, 192, 24)) is None


@pytest.mark.parametrize(("channels", "low"), hopper_plans.IMAGES)
def test_images_that_are_one_tile_have_plans_for_all_of_the_first_layer(channels, low):
    sizes = block(channels, channels // low)
    slots = hopper_plans.plan_image(sizes, 64, 8, 8, keep_border=True)
    back = hopper_plans.plan_first_back(sizes, 64, 8, 8, keep_border=True)
    assert back.tiles == 1 and back.chunk < channels
    assert hopper_plans.plan_lift_back(sizes, 64, 8, 8, keep_border=True).groups == 2
    assert hopper_plans.plan_lift(sizes) is not None  # whose memory for two numbers a token they use
    assert low % 16 == 0 and low <= 64
    # two places for 128 tokens, and one for the low rank; weights in turns and B; vectors
    numbers = 128 * (2 * channels + 64) + (slots * 64 + low) * channels
    assert 2 * numbers + 4 * (9 * channels + 64) + 4096 < 227 * 1024


@pytest.mark.parametrize(
    ("height", "width", "keep_border"), [(8, 7, True), (4, 16, True), (16, 16, True), (8, 8, False)]
)
def test_other_grids_are_no_single_tile(height, width, keep_border):
    assert hopper_plans.plan_image(block(192, 4), height * width, height, width, keep_border) is None
    assert hopper_plans.plan_image(block(192, 8), 64, 8, 8, keep_border=True) is None


def test_a_later_triton_has_no_single_tile(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert hopper_plans.plan_image(block(192, 4), 64, 8, 8, keep_border=True) is None
    assert hopper_plans.plan_first(block(192, 4), 64, 8, 8, keep_border=True) is not None


@given(st.integers(1, 64))
def test_vectors_come_in_runs_that_cover_all_pieces(pieces):
    parts = pytest.importorskip("multilinear.kernels.hopper_parts")
    count = parts.runs(pieces)
    runs = [(parts.run_start(pieces, i), parts.run(pieces, i)) for i in range(count)]
    assert [piece for start, length in runs for piece in range(start, start + length)] == list(range(pieces))
    assert all(length & (length - 1) == 0 for _, length in runs)


@pytest.mark.parametrize("version", ["3.5.1", "3.7.0", "4.0.0"])
def test_other_versions_of_triton_take_the_other_kernels(monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    sizes = block(64, 8)
    assert (
        hopper_plans.plan_for(sizes, save=False)
        is hopper_plans.plan_back(sizes)
        is hopper_plans.plan_lift(sizes)
        is None
    )
    assert hopper_plans.plan_norm_back(block(128, 8)) is None
    assert hopper_plans.plan_first(sizes, 784, 28, 28, keep_border=True) is None
    assert hopper_plans.plan_first_back(sizes, 784, 28, 28, keep_border=True) is None
    assert hopper_plans.plan_lift_back(sizes, 784, 28, 28, keep_border=True) is None
    assert hopper_plans.plan_merged(block(192, 4)) is None


@pytest.mark.parametrize("name", ["load_tile", "store_tile", "load_each", "meet", "reinterpret"])
def test_names_that_changed_are_those_of_this_triton(name):
    """One that was given up is still there, takes whatever it is called with and fails."""
    names = pytest.importorskip("multilinear.kernels.hopper_names")
    function = getattr(names, name)
    assert triton.language.core.is_builtin(function)
    assert all(taken.kind != taken.VAR_POSITIONAL for taken in inspect.signature(function).parameters.values())
