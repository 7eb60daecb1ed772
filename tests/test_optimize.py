"""Optimized networks against the plain ones."""

import copy
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import multilinear
from multilinear import MONet, MultilinearError, PolyBlock, kernels, optimize
from multilinear.kernels import cpu
from multilinear.layers.norm import collect_statistics
from multilinear.models import create, names

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not cpu.blocks_for(dtype), reason="no such kernel on this CPU"))
    for dtype in (torch.float32, torch.bfloat16)
]
SHAPES = [(1, 3, 16, 16), (3, 3, 24, 40), (16, 3, 40, 24), (2, 3, 4, 12), (1, 3, 4, 4), (0, 3, 8, 8)]


def network(**arguments):
    torch.manual_seed(0)
    sizes = {"widths": (32, 48), "depths": (2, 3), "patches": (2,), "num_classes": 10, **arguments}
    net = MONet(**sizes).eval()
    with torch.no_grad():
        for parameter in net.parameters():  # nothing is at a start value such as 0 or 1, where mistakes hide
            parameter.add_(0.05 * torch.randn_like(parameter))
    if sizes.get("norm") == "batch":
        collect_statistics(net, [torch.randn(8, 3, 32, 32) for _ in range(2)])
    return net


def error(found, expected):
    return ((found - expected).norm() / expected.norm().clamp_min(1e-12)).item()


@pytest.fixture
def no_cached_library(monkeypatch, tmp_path):
    """The kernel as on a machine that has never compiled it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu._library.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    cpu._library.cache_clear()


NETWORKS = [
    {},
    {"border": "zero"},
    {"shift_second": False},
    {"ranks": (36, 52), "shrinkage": 5},
    {"widths": (64,), "depths": (2,), "shrinkage": 8, "patches": (4,), "overlap": 4},
    {"norm": "batch"},
    {"norm": "batch", "border": "zero", "shrinkage": 8},
    {"norm": "batch", "border": "zero", "shift_second": False, "shrinkage": 1},
    {"norm": "affine", "drop_path_rate": 0.1},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arguments", NETWORKS, ids=str)
def test_kernel_agrees_with_the_plain_network(arguments, dtype):
    net = network(**arguments)
    fast = optimize(net, dtype=dtype)
    assert fast.backend == "kernel" and fast.dtype == dtype
    rounded = copy.deepcopy(net).to(dtype)
    everything = [], [], []
    for shape in SHAPES:
        images = torch.randn(shape)
        with torch.no_grad():
            outputs = net(images), fast(images), rounded(images.to(dtype)).float()
        assert outputs[1].dtype == torch.float32 and outputs[1].shape == outputs[0].shape
        for kept, output in zip(everything, outputs, strict=True):
            kept.append(output)
    expected, found, plain = (torch.cat(kept) for kept in everything)
    assert error(found, expected) < (1e-4 if dtype == torch.float32 else max(1e-2, 1.2 * error(plain, expected)))


@pytest.mark.skipif(not cpu.AVX2.needed <= cpu.features() or cpu.compiler() is None, reason="no AVX2 or no compiler")
@pytest.mark.parametrize("arguments", NETWORKS, ids=str)
def test_cpus_with_narrow_vectors_have_a_kernel_too(arguments, monkeypatch):
    monkeypatch.setattr(cpu, "features", lambda: cpu.AVX2.needed)
    net = network(**arguments)
    fast = optimize(net)
    assert fast.backend == "kernel" and fast.dtype == torch.float32 and not cpu.blocks_for(torch.bfloat16)
    for shape in SHAPES[:-1]:
        images = torch.randn(shape)
        with torch.no_grad():
            assert error(fast(images), net(images)) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_bfloat16_loses_less_than_plain_code_does(dtype):
    net = network(widths=(64,), depths=(12,))
    images = torch.randn(8, 3, 32, 32)
    with torch.no_grad():
        expected = net(images)
        plain = copy.deepcopy(net).bfloat16()(images.bfloat16()).float()
    assert error(optimize(net, dtype=dtype)(images), expected) < error(plain, expected)


@pytest.mark.parametrize("name", names())
def test_every_model_of_ours(name):
    net = create(name, depths=[1] * (4 if "_ms_" in name else 1)).eval()
    side = 8 * net.embed.stride
    images = torch.randn(1, 3, side, side // 2)
    fast = optimize(net, backend="auto" if cpu.blocks_for(torch.float32) else "eager", dtype=torch.float32)
    with torch.no_grad():
        assert error(fast(images), net(images)) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_numbers(dtype):
    fast, images, threads = optimize(network(), dtype=dtype), torch.randn(5, 3, 48, 32), torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(fast.network.stages[0].blocks(images.reshape(5, 24, 6, 32)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_images_alone_and_together_give_the_same_numbers(dtype, monkeypatch):
    fast, images = optimize(network(), dtype=dtype), torch.randn(7, 3, 24, 32)
    monkeypatch.setattr(cpu, "shared_out", lambda *sizes: (1, 1, 0))
    together = fast(images)
    for shares in ((2, 1, 7), (2, 1, 4), (2, 2, 4), (3, 2, 6), (3, 5, 5), (2, 1, 0)):
        monkeypatch.setattr(cpu, "shared_out", lambda *sizes, shares=shares: shares)
        assert torch.equal(fast(images), together)


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 70))
def test_images_are_shared_out(batch, tokens, threads):
    team, images, alone = cpu.shared_out(batch, tokens, threads)
    assert 1 <= team <= threads and images >= 1 and 0 <= alone <= batch
    assert alone % (images * team) == 0 and batch - alone < images * team
    assert images == 1 or images * tokens <= cpu.TOKENS


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_take_what_convolutions_give_and_need(dtype):
    blocks = optimize(network(), dtype=dtype).network.stages[0].blocks
    assert blocks.out_dtype == dtype
    x = torch.randn(3, 5, 7, 32).to(dtype)
    narrow, blocks.out_dtype = blocks(x), torch.float32
    assert narrow.dtype == dtype and torch.equal(narrow, blocks(x.float()).to(dtype))
    assert torch.equal(blocks(x.double()), blocks(x))
    assert torch.equal(blocks(x.transpose(1, 2)), blocks(x.transpose(1, 2).contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_outside_a_network(dtype):
    x = torch.randn(2, 5, 7, 32)
    for plain in (PolyBlock(32).eval(), nn.Sequential(nn.Identity(), PolyBlock(32), PolyBlock(32)).eval()):
        fast = optimize(plain, dtype=dtype)
        assert fast.backend == "kernel"
        with torch.no_grad():
            assert error(fast(x), plain(x)) < 2e-2
            assert error(fast(x[0]), plain(x[0])) < 2e-2
        with pytest.raises(MultilinearError, match="height, width, 32"):
            fast(x[..., :16])


def test_the_model_is_left_as_it_was():
    net = network().train()
    before = copy.deepcopy(net.state_dict())
    fast = optimize(net)
    assert net.training and not fast.training and all(p.requires_grad for p in net.parameters())
    after = net.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert not any(p.requires_grad for p in fast.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_is_a_module_of_its_own(dtype):
    fast, images = optimize(network(), dtype=dtype), torch.randn(2, 3, 16, 16)
    expected = fast(images)
    twin = copy.deepcopy(fast)
    fast.network.stages[0].blocks.packed.zero_()
    assert torch.equal(twin(images), expected)


def test_kernels_switched_off(monkeypatch):
    monkeypatch.setattr(kernels, "_enabled", False)
    fast = optimize(network())
    assert fast.backend == ("compile" if cpu.compiler() else "eager")
    with pytest.raises(MultilinearError, match="MULTILINEAR_KERNELS"):
        optimize(network(), backend="kernel")


def test_no_compiler(no_cached_library, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    net, images = network(), torch.randn(2, 3, 16, 16)
    fast = optimize(net, dtype=torch.float32)
    assert fast.backend == "eager"
    with torch.no_grad():
        assert error(fast(images), net(images)) < 1e-4
    with pytest.raises(MultilinearError, match="compiler"):
        optimize(net, backend="kernel")


def test_a_compiler_that_fails(no_cached_library, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    assert not cpu.blocks_for(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[:1])
@pytest.mark.parametrize("state", ["fresh", "damaged", "unwritable"])
def test_the_compiled_code_is_kept(no_cached_library, state, dtype):
    folder = no_cached_library / "multilinear"
    if state == "unwritable":
        folder.write_text("a file in the folder's place")
        assert cpu.blocks_for(dtype)
        return
    assert cpu.blocks_for(dtype)
    (kept,) = folder.iterdir()
    if state == "damaged":
        kept.unlink()  # not overwritten: it is loaded in this process
        kept.write_text("no library")
    written = kept.stat().st_mtime_ns
    cpu._library.cache_clear()
    assert cpu.blocks_for(dtype)
    assert [path.name for path in folder.iterdir()] == [kept.name]
    assert (kept.stat().st_mtime_ns == written) == (state == "fresh")


@pytest.mark.parametrize(("most", "missing"), [("AVX512", ""), ("AVX2", "avx512"), ("DEFAULT", "avx")])
def test_no_wider_vectors_than_those_of_pytorch(monkeypatch, most, missing):
    every = cpu.features()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: most)
    found = cpu.features.__wrapped__()
    assert found == every or missing
    assert not any(name.startswith(missing) for name in found if missing) and ("sse2" in found) == ("sse2" in every)


@pytest.mark.parametrize("flags", [set(), {"avx512f", "fma"}])
def test_other_cpus_take_the_plain_code(monkeypatch, flags):
    monkeypatch.setattr(cpu, "features", lambda: frozenset(flags))
    fast = optimize(network())
    assert fast.backend in ("compile", "eager") and fast.dtype == torch.float32


@pytest.mark.skipif(cpu.compiler() is None, reason="no C++ compiler")
def test_other_networks_are_compiled():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    images = torch.randn(2, 3, 8, 8)
    net(images)
    fast = optimize(net, dtype=torch.float32)
    assert fast.backend == "compile"
    with torch.no_grad():
        assert error(fast(images), net(images)) < 1e-4


def test_the_kernel_is_for_poly_blocks(monkeypatch):
    monkeypatch.setattr(kernels, "blocks_for", lambda dtype: True)  # as on a CPU that has it
    with pytest.raises(MultilinearError, match="no Poly-Blocks"):
        optimize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), backend="kernel", dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager(dtype):
    net, images = network(), torch.randn(2, 3, 16, 24)
    fast = optimize(net, backend="eager", dtype=dtype)
    with torch.no_grad():
        assert fast(images).dtype == torch.float32
        assert error(fast(images), net(images)) < (1e-4 if dtype == torch.float32 else 5e-2)


def test_onnx():
    pytest.importorskip("onnxruntime")
    net = create("monet_micro").eval()
    fast = optimize(net, backend="onnx")
    for shape in [(1, 3, 28, 28), (3, 3, 16, 32)]:
        images = torch.randn(shape)
        with torch.no_grad():
            assert error(fast(images), net(images)) < 1e-4
    with pytest.raises(MultilinearError, match="float32"):
        optimize(net, backend="onnx", dtype=torch.bfloat16)


def test_onnx_runtime_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MultilinearError, match="multilinear\\[export\\]"):
        optimize(network(), backend="onnx")


def test_bad_input():
    net = network()
    fast = optimize(net, backend="eager")
    with pytest.raises(MultilinearError, match="unknown backend 'fastest'; known: auto"):
        optimize(net, backend="fastest")
    with pytest.raises(MultilinearError, match="bfloat16, float16 or float32"):
        optimize(net, dtype=torch.float64)
    with pytest.raises(MultilinearError, match="optimized already"):
        optimize(fast)
    with pytest.raises(MultilinearError, match="NVIDIA"):
        optimize(net, backend="graph")
    with pytest.raises(MultilinearError, match="inference only"):
        fast.train()
    with pytest.raises(MultilinearError, match="floating point"):
        fast(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(MultilinearError, match="not divisible"):
        fast(torch.zeros(1, 3, 15, 16))
    assert "backend='eager'" in repr(fast) and fast.eval() is fast


def test_public():
    assert multilinear.optimize is optimize


@pytest.mark.gpu
def test_graphs_agree_and_results_stay():
    net = network().cuda()
    fast = optimize(net)
    assert fast.backend == "graph"
    exact = optimize(net, dtype=torch.float32)
    first = torch.randn(2, 3, 16, 16, device="cuda")
    with torch.inference_mode():
        kept = exact(first)
    assert torch.equal(exact(first), kept)  # what was recorded in that mode is replayed outside of it
    with torch.no_grad():
        for batch in range(1, 12):  # more shapes than graphs are kept of
            images = torch.randn(batch, 3, 16, 24, device="cuda")
            assert error(exact(images), net(images)) < 1e-2
            assert error(fast(images), net(images)) < 5e-2
        assert error(kept, net(first)) < 1e-2
        shapes = [torch.randn(1, 3, 16, 16 + 8 * i, device="cuda") for i in range(3)]
        found = [fast(images) for images in shapes]
        torch.cuda.empty_cache()
        junk = torch.full((1 << 26,), torch.nan, device="cuda")
        del junk
        assert all(error(fast(images), before) < 1e-3 for images, before in zip(shapes, found, strict=True))
