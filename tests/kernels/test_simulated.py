"""What the simulation of Gluon kernels finds: small kernels that are right, or wrong in one way."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from simulated import Wrong, simulating
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from multilinear.kernels.hopper import tiled
from multilinear.kernels.hopper_names import load_tile, meet, reinterpret, store_tile
from multilinear.kernels.hopper_parts import accumulator, times, zeros

FAULTS = {
    "soon": "still on its way is read", "unfenced": "without a fence", "early": "before it is waited for",
    "over": "still being read is written over", "again": "comes to what is still being read", "hang": "never comes",
    "twice": "to the same place", "beyond": "outside of its tensor", "view": "beyond its memory",
    "bare": "not set up", "many": "more came to a barrier", "left": "on its way at the end",
    "behind": "other warps may still read is written over", "ahead": "comes to what other warps may still read",
    "loaded": "comes to what other warps may still read",
}  # fmt: skip


@gluon.jit
def copy_and_multiply(tiles, full, a_desc, b_desc, out_desc, out_ptr, FAULT: gl.constexpr):
    """a b', where a comes through registers."""
    mbarrier.expect(full.index(0), 2 * 64 * 64 * 2 + (2 if FAULT == "hang" else 0))
    load_tile(a_desc, [0, 0], full.index(0), tiles.index(0))
    load_tile(b_desc, [0, 0], full.index(0), tiles.index(0 if FAULT == "twice" else 1))
    if FAULT != "soon":
        mbarrier.wait(full.index(0), 0)
    a = tiles.index(0).load(accumulator(64)).to(gl.float32) * 2.0
    tiles.index(2).store(a.to(a_desc.dtype))
    if FAULT != "unfenced":
        fence_async_shared()
    product = times(tiles.index(2), tiles.index(1), zeros(64), True)
    if FAULT == "over":
        tiles.index(2).store(a.to(a_desc.dtype))
    if FAULT != "early":
        product = warpgroup_mma_wait(0, deps=[product])
    if FAULT == "behind":
        tiles.index(1).store(product.to(a_desc.dtype))
    if FAULT == "ahead":
        mbarrier.expect(full.index(1), 64 * 64 * 2)
        load_tile(a_desc, [0, 0], full.index(1), tiles.index(1))
    meet()
    if FAULT == "loaded":
        tiles.index(1).load(accumulator(64))
        mbarrier.expect(full.index(1), 64 * 64 * 2)
        load_tile(a_desc, [0, 0], full.index(1), tiles.index(1))
    tiles.index(2).store(product.to(a_desc.dtype))
    fence_async_shared()
    store_tile(out_desc, [0, 0], tiles.index(2))
    if FAULT == "again":
        mbarrier.expect(full.index(1), 64 * 64 * 2)
        load_tile(a_desc, [0, 0], full.index(1), tiles.index(2))
    tma.store_wait(0)
    if FAULT == "left":
        mbarrier.expect(full.index(1), 64 * 64 * 2)
        load_tile(a_desc, [0, 0], full.index(1), tiles.index(2))
        times(tiles.index(0), tiles.index(1), zeros(64), True)
    if FAULT == "beyond":
        gl.store(out_ptr + 64 * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(64))), 0.0)
    if FAULT == "view":
        reinterpret(tiles.index(2), a_desc.dtype, [2, 64, 64], a_desc.layout)
    if FAULT == "bare":
        mbarrier.arrive(full.index(2), count=1)
    if FAULT == "many":
        mbarrier.arrive(full.index(1), count=2)


@gluon.jit
def idle():
    return


@gluon.jit
def small(a_desc, b_desc, out_desc, out_ptr, FAULT: gl.constexpr):
    tiles = gl.allocate_shared_memory(a_desc.dtype, [3, 64, 64], a_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(full.index(1), count=1)
    gl.warp_specialize([
        (copy_and_multiply, (tiles, full, a_desc, b_desc, out_desc, out_ptr, FAULT)),
        (idle, ()),
    ], [1], [24])  # fmt: skip


def run_small(fault, seed):
    a, b = torch.randn(2, 64, 64).bfloat16()
    out = torch.full((64, 64), torch.nan).bfloat16()
    with simulating(seed) as launched:
        small[(1,)](*(tiled(matrix, 64, 64) for matrix in (a, b, out)), out, FAULT=fault, num_warps=4)
    assert launched == ["small"]
    return out, 2 * a.float() @ b.float().T


@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_that_is_right_gives_what_it_should(seed):
    out, expected = run_small("", seed)
    assert (out.float() - expected).norm() < 3e-3 * expected.norm()


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_and_named(fault):
    found = []
    for seed in range(5):  # some depend on who comes first
        try:
            run_small(fault, seed)
        except Wrong as error:
            found.append(str(error))
    assert found and all(FAULTS[fault] in message for message in found)


@gluon.jit
def tell(ptr, bars, value):
    gl.store(ptr, value)
    mbarrier.arrive(bars.index(0), count=1)


@gluon.jit
def hear(ptr, bars, PHASE: gl.constexpr):
    mbarrier.wait(bars.index(0), PHASE)
    gl.store(ptr + 1, gl.load(ptr) + 1)


@gluon.jit
def two_groups(ptr, value, PHASE: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    gl.warp_specialize([(hear, (ptr, bars, PHASE)), (tell, (ptr, bars, value))], [4], [24])


@pytest.mark.parametrize(("phase", "expected"), [(0, {"8"}), (1, {"1", "all wait for what never comes"})])
def test_groups_wait_for_each_other_in_any_order(phase, expected):
    """With the wrong phase one goes ahead, or waits for the next arrival."""
    found = set()
    for seed in range(20):
        numbers = torch.zeros(2, dtype=torch.int32)
        try:
            with simulating(seed):
                two_groups[(1,)](numbers, 7, PHASE=phase)
            found.add(str(numbers[1].item()))
        except Wrong as error:
            found.add(str(error))
    assert found == expected
