"""The kernels for few tokens against the plain block in float64; on the CPU through Triton's interpreter, in another
process, as which this file is then run."""

import copy

import pytest
import torch
from interpreted import main, run_interpreted

from multilinear import kernels
from multilinear.kernels import block_small
from multilinear.kernels.block_small import PLANS, Plan, Share
from multilinear.layers import PolyBlock

# channels, border and images: tiles that span some of those, or lines, or are not full; grids with one line or column
CASES = [
    (64, "keep", (3, 3, 5)),
    (64, "zero", (2, 4, 4)),
    (64, "zero", (5, 1, 3)),
    (128, "zero", (2, 3, 5)),
    (192, "keep", (1, 7, 7)),
    (192, "zero", (2, 3, 3)),
]
# the same work shared out in other ways: more tokens, more chunks, more programs or one
OTHERS = [
    (64, (1, 5, 7), Plan(Share(16, 4, 16), Share(32, 4), Share(32, 4, 32))),
    (192, (1, 14, 14), Plan(Share(64, 4, 64), Share(64, 8), Share(64, 8, 192))),
    (64, (2, 3, 7), Plan(Share(64, 4, 32), Share(16, 4), Share(16, 4, 64))),
]


def block_of(dim, border="keep"):
    """One with no parameter left at a round number, and frozen."""
    block = PolyBlock(dim, shift=border, shrinkage=8)
    with torch.no_grad():
        for weight in block.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return block.eval().requires_grad_(False)


def error(found, block, x):
    expected = copy.deepcopy(block).double()(x.double())
    return ((found.double() - expected).norm() / expected.norm()).item()


@torch.no_grad()
def interpret():
    from multilinear.kernels import block as host

    asked, few_tokens = [], host._few_tokens

    def record(x, ready, sizes, plan, *rest):
        asked.append(plan)
        return few_tokens(x, ready, sizes, plan, *rest)

    host._few_tokens = record
    blocks = {}
    for dim, border, images in CASES:
        block = blocks.get(dim) or block_of(dim)
        block.mu1.shift.border = block.mu1.shift_second.border = border
        blocks[dim] = block
        x = torch.randn(*images, dim)
        found = block._fused(x, torch.float32)
        assert error(found, block, x) < 1e-5, (dim, border, images)
    assert len(asked) == len(CASES)
    x = torch.randn(2, 3, 3, 64).half()
    assert error(blocks[64].half()._fused(x, torch.float16), blocks[64], x) < 2e-3
    blocks[64].float()
    for dim, images, plan in OTHERS:
        block_small.PLANS = {(dim, dim // 8, 4096): plan}
        x = torch.randn(*images, dim)
        found = blocks[dim]._fused(x, torch.float32)
        assert asked[-1] == plan
        assert error(found, blocks[dim], x) < 1e-5, plan
    assert torch.equal(blocks[dim]._fused(x, torch.float32), found)
    count = len(asked)
    block_small.PLANS = {}
    assert error(blocks[64]._fused(torch.ones(1, 2, 2, 64), torch.float32), blocks[64], torch.ones(1, 2, 2, 64)) < 1e-5
    assert len(asked) == count


def test_in_the_interpreter():
    run_interpreted(__file__, "interpret")


@pytest.mark.parametrize(("channels", "low", "most"), PLANS)
def test_shares_are_whole(channels, low, most):
    plan = block_small.plan_for(channels, channels, low, 3 * channels, 3 * low, most)
    assert plan == PLANS[channels, low, most]
    assert 3 * channels % plan.mu2.width == 0
    assert plan.lift.width & (plan.lift.width - 1) == 0
    for share in plan:
        assert share.tokens % 16 == 0 and share.tokens <= 32


def test_who_is_left_to_the_kernels_for_many_tokens():
    assert block_small.plan_for(64, 64, 8, 192, 24, 4096) is not None
    assert block_small.plan_for(64, 64, 8, 192, 24, 4097) is None
    assert block_small.plan_for(64, 64, 16, 192, 48, 16) is None
    assert block_small.plan_for(64, 32, 8, 192, 24, 16) is None
    assert block_small.plan_for(64, 64, 8, 128, 24, 16) is None


@pytest.mark.parametrize(("width", "expected"), [(24, (32, 0)), (48, (64, 0)), (72, (64, 32)), (144, (128, 32))])
def test_parts_of_low_ranks_have_more_columns_than_a_tile_has_rows(width, expected):
    assert block_small.low_parts(width) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "border", "images"),
    [*CASES, (64, "keep", (1, 56, 56)), (128, "keep", (1, 28, 28)), (192, "keep", (1, 14, 14))],
)
def test_cuda_agrees_with_float64(dim, border, images, dtype, monkeypatch):
    torch.manual_seed(0)
    block = block_of(dim, border).cuda().to(dtype)
    x = torch.randn(*images, dim, device="cuda", dtype=dtype)
    found = block(x)
    for _ in range(20):
        assert torch.equal(block(x), found)
    monkeypatch.setattr(block_small, "PLANS", {})
    before = error(block(x), block, x)
    assert error(found, block, x) < min(1e-2, 1.1 * before + 1e-4)


@pytest.mark.gpu
def test_cuda_one_after_the_other_in_a_graph():
    """Each kernel starts ahead of the end of the one before; what it reads is there nevertheless."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(block_of(192) for _ in range(4))).cuda().bfloat16()
    images = torch.randn(6, 1, 7, 7, 192, device="cuda").bfloat16()
    x = images[0].clone()
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        net(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = net(x)
    for image in images:
        x.copy_(image)
        graph.replay()
        kernels.use_kernels(False)
        try:
            expected = net(image)
        finally:
            kernels.use_kernels(True)
        assert (out - expected).norm() < 2e-2 * expected.norm()


if __name__ == "__main__":
    main({"interpret": interpret})
