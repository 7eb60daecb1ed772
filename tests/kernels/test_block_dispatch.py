"""Which Poly-Blocks are fused, and what is kept for those that are. All of it on the CPU, where none is."""

import copy
import pickle
import types

import pytest
import timm
import torch
from torch.nn import functional as F

from multilinear import kernels
from multilinear.kernels import hopper_plans
from multilinear.layers import MuLayer, PolyBlock, prepare_ahead, spatial_shift
from multilinear.layers.mu import StochasticDepth
from multilinear.models.monet import default_cfgs


def weights_of(block):
    return [block.get_parameter(name) for name in kernels.BLOCK_PARAMETERS]


def altered(change):
    block = PolyBlock(64)
    change(block)
    return block


def hook(module, *rest):
    return None


NOT_FUSED = {
    **{f"{norm} norm": PolyBlock(64, norm=norm) for norm in ("batch", "affine", "none")},
    "no shift": PolyBlock(64, shift=None),
    "one branch shifts": PolyBlock(64, shift_second=False),
    "no biases": altered(lambda b: setattr(b, "mu1", MuLayer(64, shift="keep", norm="layer", bias=False))),
    "no bias in a norm": altered(lambda b: setattr(b.mu2, "norm_b", torch.nn.LayerNorm(192, eps=1e-6, bias=False))),
    "another eps": altered(lambda b: setattr(b.mu2.norm_a, "eps", 1e-5)),
    "a hook": altered(lambda b: b.mu1.A.register_forward_hook(hook)),
    "a hook ahead": altered(lambda b: b.drop_path.register_forward_pre_hook(hook)),
    "a hook on the way back": altered(lambda b: b.mu2.register_full_backward_hook(hook)),
    "a range watched": altered(lambda b: setattr(b.mu1, "watch_range", True)),
    "the other range watched": altered(lambda b: setattr(b.mu2, "watch_range", True)),
    "a weight that is computed": altered(lambda b: torch.nn.utils.parametrizations.weight_norm(b.mu2.C)),
    "40 channels": PolyBlock(40),
    "100 channels": PolyBlock(100),
    "8 channels": PolyBlock(8),
    "too wide": PolyBlock(384, ranks=(16, 16)),
    "low ranks that are not low": PolyBlock(64, shrinkage=1),
    "a first rank above the channels": PolyBlock(64, ranks=(128, 192), shrinkage=8),
    "another border": altered(lambda b: setattr(b.mu1.shift_second, "border", "zero")),
    "a low rank without quarters": PolyBlock(64, ranks=(48, 64), shrinkage=8),
    "a rank without chunks": PolyBlock(64, ranks=(64, 100)),
}  # fmt: skip


@pytest.mark.parametrize("why", NOT_FUSED)
def test_what_is_left_to_the_plain_code(why):
    block = NOT_FUSED[why]
    assert not block._fusible(torch.zeros(1, 2, 2, block.in_features))


@pytest.mark.parametrize("shape", [(2, 2, 64), (1, 1, 2, 2, 64), (0, 2, 2, 64), (1, 2, 2, 128)])
def test_inputs_that_are_left_to_the_plain_code(shape):
    block = PolyBlock(64)
    assert block._fusible(torch.zeros(1, 2, 2, 64))
    assert not block._fusible(torch.zeros(shape))


@pytest.mark.parametrize("name", default_cfgs)
def test_registered_models_are_fused_if_published_and_not_too_wide(name):
    with torch.device("meta"):
        blocks = [part for part in timm.create_model(name).modules() if isinstance(part, PolyBlock)]
    for block in blocks:
        fused = block._fusible(torch.zeros(1, 2, 2, block.in_features))
        assert fused == ("private" not in name and block.in_features <= 256)


def test_sizes_that_are_served():
    assert kernels.block_serves(10_000, 64, (64, 192), (16, 48))
    assert not kernels.block_serves(2**31, 64, (64, 192), (16, 48))
    most = 2**31 // 320  # columns of the widest matrix
    assert kernels.block_serves(most, 64, (64, 192), (16, 48))
    assert not kernels.block_serves(most + 1, 64, (64, 192), (16, 48))
    assert not kernels.block_serves(2**31 // 1024, 64, (512, 16), (512, 4))  # the first Mu-Layer's is wider


def test_branches_that_are_kept_count_as_well(monkeypatch):
    """In training both of them stand side by side, and are written by places of 32 bits."""
    sizes = 192, (192, 576), (48, 144)
    for merged, columns in ((None, 928), ("a plan", 1152)):
        monkeypatch.setattr(hopper_plans, "plan_merged", lambda _, merged=merged: merged)
        most = (2**31 - 1) // columns
        assert kernels.block_serves(most, *sizes) and not kernels.block_serves(most + 1, *sizes)


def test_never_on_the_cpu(monkeypatch):
    def fail(*arguments):
        raise AssertionError

    monkeypatch.setattr(kernels, "poly_block", fail)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1, 2, 2, 48, dtype=dtype)
        assert kernels.block_dtype(x) is None
        assert PolyBlock(48).to(dtype)(x).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.block_dtype(x) is None


@pytest.fixture
def copied(monkeypatch):
    """Weights are prepared by copying them, as the kernel for that needs a GPU."""
    from multilinear.kernels import block

    monkeypatch.setattr(block, "prepare_now", lambda weights, dtype: [w.to(dtype, copy=True) for w in weights])


@pytest.mark.usefixtures("copied")
def test_frozen_weights_are_prepared_once_while_nothing_changes():
    block = PolyBlock(32).requires_grad_(False)

    def prepared(dtype=torch.bfloat16):
        return block._prepare(weights_of(block), dtype)

    with torch.no_grad():
        first = prepared()
        assert prepared() is first
        assert prepared(torch.float16) is not first
        for change in (
            lambda: block.mu2.B.weight.mul_(2),
            lambda: block.mu1.alpha.fill_(0.5),
            lambda: block.load_state_dict(PolyBlock(32).state_dict()),
            lambda: setattr(block.norm1, "bias", torch.nn.Parameter(torch.ones(32), requires_grad=False)),
        ):
            first = prepared()
            change()
            second = prepared()
            assert second is not first and prepared() is second
            for found, expected in zip(second, kernels.prepare_block(weights_of(block), torch.bfloat16), strict=True):
                assert torch.equal(found, expected)
    assert prepared() is not prepared()  # with gradients
    with torch.inference_mode():
        assert prepared() is prepared()
        made = PolyBlock(32).requires_grad_(False)  # its weights count no changes
        assert made._prepare(weights_of(made), torch.float16) is not made._prepare(weights_of(made), torch.float16)


@pytest.mark.usefixtures("copied")
def test_weights_that_train_are_prepared_each_time():
    block = PolyBlock(32)
    with torch.no_grad():
        before = block._prepare(weights_of(block), torch.bfloat16)
        block.mu1.A.weight.data.add_(1)  # a change that a tensor does not count
        assert not torch.equal(block._prepare(weights_of(block), torch.bfloat16)[2], before[2])


@pytest.mark.usefixtures("copied")
def test_prepared_weights_stay_out_of_copies_and_files():
    block = PolyBlock(32).requires_grad_(False)
    names = set(block.state_dict())
    with torch.no_grad():
        first = block._prepare(weights_of(block), torch.bfloat16)
        for twin in (copy.deepcopy(block), copy.copy(block), pickle.loads(pickle.dumps(block))):
            assert set(twin.state_dict()) == names
            twin.load_state_dict(block.state_dict())
            twin.mu1.A.weight.add_(1)
            assert not torch.equal(twin._prepare(weights_of(twin), torch.bfloat16)[2], first[2])
    assert set(block.state_dict()) == names == {name for name, _ in block.named_parameters()}


@pytest.mark.usefixtures("copied")
def test_what_a_failed_capture_prepared_is_not_used():
    block, x = PolyBlock(32), torch.randn(1, 2, 2, 32)
    stale = [torch.zeros(1)]
    expected = block(x)
    block._ahead = torch.bfloat16, stale, None
    assert torch.equal(block(x), expected) and block._ahead is None
    block._ahead = torch.bfloat16, stale, None
    assert block._prepare(weights_of(block), torch.bfloat16) is not stale and block._ahead is None


class Moment:
    """Stands for an event on a side stream."""

    waited = 0


@pytest.fixture
def capture(monkeypatch):
    """As while a step is captured on a GPU, for blocks that are fused; tells how often it was waited for."""
    from multilinear.layers import mu

    moment = Moment()

    class Stream:
        def wait_event(self, event):
            event.waited += 1

    class Prepared(list):
        def __getitem__(self, i):
            return types.SimpleNamespace(is_cuda=True, device="cuda")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(kernels, "block_dtype", lambda x: torch.bfloat16)
    monkeypatch.setattr(kernels, "prepare_beside", lambda weights, dtype: (Prepared(), moment))
    monkeypatch.setattr(mu.PolyBlock, "fuses", lambda block: True)
    return moment


@pytest.mark.usefixtures("copied")
def test_a_captured_step_uses_once_what_was_prepared_beside_it(capture):
    model = torch.nn.Sequential(PolyBlock(32), torch.nn.Identity())
    prepare_ahead(model, types.SimpleNamespace(is_cuda=True))
    block = model[0]
    first = block._prepare(weights_of(block), torch.bfloat16)
    assert first == [] and capture.waited == 1 and block._ahead is None
    assert block._prepare(weights_of(block), torch.bfloat16) != [] and capture.waited == 1
    # in another precision, or where the plain code runs, it is waited for and not used
    prepare_ahead(model, types.SimpleNamespace(is_cuda=True))
    assert block._prepare(weights_of(block), torch.float16) != [] and capture.waited == 2
    prepare_ahead(model, types.SimpleNamespace(is_cuda=True))
    block.mu1.watch_range = True
    block(torch.zeros(1, 2, 2, 32))
    assert capture.waited == 3 and block._ahead is None


@pytest.mark.parametrize("border", ["keep", "zero", None])
@pytest.mark.parametrize("width", [8, 6])
def test_a_layer_shifts_once_whoever_does_it(monkeypatch, border, width):
    """Without gradients the kernel for the product may shift; a stand-in for it computes the same."""
    layer, x = MuLayer(width, shift=border, norm="layer"), torch.randn(2, 5, 4, width)
    expected, asked = layer(x), []

    def product(a, b, norm_a, norm_b, alpha, eps, border=None):
        asked.append(border)
        a = a if border is None else spatial_shift(a, border)
        p, q = (F.layer_norm(y, y.shape[-1:], *norm, eps) for y, norm in ((a, norm_a), (b, norm_b)))
        return p + alpha * p * q

    monkeypatch.setattr(kernels, "fused_for", lambda x: True)
    monkeypatch.setattr(kernels, "normed_product", product)
    torch.testing.assert_close(layer(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
        seen = []
        layer.shift.register_forward_hook(lambda *_: seen.append(1))  # who looks at the shift finds it
        torch.testing.assert_close(layer(x), expected)
    assert asked == [None, border if width == 8 else None, None] and seen == [1]


def test_factors_of_stochastic_depth():
    torch.manual_seed(0)
    drop = StochasticDepth(0.2)
    factors = drop.factors(20_000)
    assert set(factors.tolist()) == {0.0, 1.25}
    assert abs(factors.mean().item() - 1) < 0.02
    x = torch.randn(50, 3, 4)
    torch.manual_seed(1)
    found = drop(x)
    torch.manual_seed(1)
    assert torch.equal(found, x * drop.factors(50).view(-1, 1, 1))
    assert torch.equal(drop.eval()(x), x)


@pytest.mark.parametrize(("capability", "fused"), [((9, 0), True), ((8, 0), False), ((12, 0), False)])
def test_only_where_the_tiles_fit(capability, fused, monkeypatch):
    class OnGpu:
        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (kernels.block_dtype(OnGpu()) == torch.bfloat16) == fused
    kernels.use_kernels(False)
    assert kernels.block_dtype(OnGpu()) is None
    kernels.use_kernels(True)


def test_asking_for_the_device_breaks_no_graph():
    compiled = torch.compile(lambda x: x - 1 if kernels.on_hopper(x.device) else x + 1, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(2)).tolist() == [1, 1]
