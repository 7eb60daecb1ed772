"""One call that makes a network fast for inference where it is: folded, in fewer bits, and in the best runtime here."""

import copy
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multilinear import kernels
from multilinear.errors import MultilinearError, check_choice
from multilinear.kernels import cpu
from multilinear.layers import PolyBlock, PyramidPatchEmbed, compile_blocks, fold
from multilinear.layers.embed import check_image_size
from multilinear.models.monet import Downsample, MONet
from multilinear.optimize_blocks import Run, pairs, runs

BACKENDS = ("auto", "eager", "compile", "kernel", "onnx", "graph")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GRAPHS = 8  # input shapes of which a recorded CUDA graph is kept
TRIAL_LIMIT = 0.03  # in bfloat16 two blocks are off by 0.01, and by 0.3 without one of their biases


def optimize(model: nn.Module, *, backend: str = "auto", dtype: torch.dtype | None = None) -> "Optimized":
    """Return a module that computes what `model` does, faster and for inference only; `model` is not changed.

    It takes the same float images and returns float32. It stays on the device that the model is on.

    Args:
        backend: `"auto"` takes the best there is for the model and its device:

            - `"kernel"`: Poly-Blocks run as one C++ function, compiled at first use (CPU with AVX-512 or AVX2, Linux, a
              C++ compiler);
            - `"graph"`: a CUDA graph, recorded for each input shape at its first use (NVIDIA GPU);
            - `"compile"`: torch.compile;
            - `"onnx"`: ONNX Runtime (CPU, float32; `pip install 'multilinear[export]'`). Never chosen by `"auto"`;
            - `"eager"`: plain PyTorch.
        dtype: bfloat16, float16 or float32. If not given: bfloat16 where the device multiplies it faster, else float32.

    >>> from multilinear.models import create
    >>> net = create("monet_micro").eval()
    >>> images = torch.randn(2, 3, 28, 28)
    >>> fast = optimize(net, backend="eager", dtype=torch.float32)
    >>> torch.allclose(fast(images), net(images), atol=1e-4)
    True
    """
    check_choice("backend", backend, BACKENDS)
    if isinstance(model, Optimized):
        raise MultilinearError("this model is optimized already; give the model that it was made from")
    if dtype is not None and dtype not in DTYPES:
        raise MultilinearError(f"dtype must be bfloat16, float16 or float32, got {dtype}")
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if backend == "onnx" and dtype is None:
        dtype = torch.float32
    dtype = dtype or _best_dtype(device)
    folded = fold(model).requires_grad_(False)
    if backend == "auto":
        backend = _best_backend(folded, device, dtype)
    build: Callable[[nn.Module, torch.device, torch.dtype], nn.Module] = {
        "eager": _eager, "compile": _compiled, "kernel": _with_kernel, "onnx": _onnx, "graph": _graph,
    }[backend]  # fmt: skip
    return Optimized(build(folded, device, dtype), backend, dtype, model)


class Optimized(nn.Module):
    """What `optimize` returns: `backend` and `dtype` say what was chosen."""

    def __init__(self, network: nn.Module, backend: str, dtype: torch.dtype, model: nn.Module) -> None:
        super().__init__()
        self.network, self.backend, self.dtype = network, backend, dtype
        self.stride: int | None = getattr(getattr(model, "embed", None), "stride", None)
        self.config = getattr(model, "config", None)
        super().train(False)

    def train(self, mode: bool = True) -> "Optimized":
        if mode:
            raise MultilinearError("an optimized model is for inference only; train the model that it was made from")
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        if not images.is_floating_point():
            raise MultilinearError(f"images must be floating point and normalised, got {images.dtype}")
        if self.stride is not None:
            check_image_size(images.shape[-2], images.shape[-1], self.stride)
        y: Tensor = self.network(images)
        return y.float()

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}, dtype={self.dtype}"


class InType(nn.Module):
    """Run a module in `dtype`, whatever type its input has."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module.to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x.to(self.dtype))
        return y


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = device.type == "cpu" and bool({"avx512_bf16", "amx_bf16"} & cpu.features())
    return torch.bfloat16 if fast else torch.float32


def _best_backend(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cuda":
        return "graph"
    if device.type != "cpu":
        return "eager"
    if any(runs(nn.ModuleDict({"model": model}))) and kernels.blocks_for(dtype):
        return "kernel"
    return "compile" if cpu.compiler() else "eager"


def _eager(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return InType(model, dtype)


def _compiled(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    model = InType(model, dtype)
    model.compile()
    return model


# The CPU's kernel: every run of Poly-Blocks becomes one module, and convolutions take their dtype.


def _with_kernel(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    if device.type != "cpu" or not kernels.blocks_for(dtype):
        raise MultilinearError(
            f"no kernel for {dtype} on {device} here: it needs Linux, a CPU with AVX-512 or AVX2 (for bfloat16, "
            "avx512_bf16), a C++ compiler (g++), and MULTILINEAR_KERNELS not 0; backend='auto' takes what there is"
        )
    root = nn.ModuleDict({"model": model.float()})
    found = list(runs(root))
    if not found:
        raise MultilinearError("the kernel can run no Poly-Blocks of this model; backend='auto' takes what there is")
    for run in found:
        run.replace(cpu.Blocks(pairs(run.blocks), run.form.eps, run.form.shifts, dtype))
    if dtype != torch.float32:
        for parent in list(root.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Conv2d):
                    setattr(parent, name, InType(child.to(memory_format=torch.channels_last), dtype))
    model = root["model"]
    for stage in list(model.stages)[:-1] if isinstance(model, MONet) else ():
        if isinstance(stage.blocks, cpu.Blocks):
            stage.blocks.out_dtype = dtype  # as the convolution behind it takes it
    return model


# ONNX Runtime


class OnnxSession(nn.Module):
    """A network in ONNX Runtime."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        self.session = session

    def forward(self, images: Tensor) -> Tensor:
        (logits,) = self.session.run(None, {"image": images.float().contiguous().numpy()})
        return torch.from_numpy(logits)


def _onnx(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    if device.type != "cpu" or dtype != torch.float32:
        raise MultilinearError(f"backend 'onnx' is for float32 on a CPU, got {dtype} on {device}; leave dtype out")
    try:
        import onnxruntime
    except ImportError as error:
        raise MultilinearError("ONNX Runtime needs the extra: pip install 'multilinear[export]'") from error
    from multilinear.export import export_onnx

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = export_onnx(model, Path(folder) / "model.onnx")
        return OnnxSession(onnxruntime.InferenceSession(path.read_bytes(), options, ["CPUExecutionProvider"]))


# NVIDIA GPUs: kernels of small networks end before the next one is launched, so launch them all at once.


class CudaGraphs(nn.Module):
    """Replays one recorded CUDA graph for each shape and type of input; the least recently used of `GRAPHS` is dropped.

    Inputs are copied into, and outputs out of, memory of the graph's own, so a result is the caller's to keep. Inputs
    come to their type on the way.
    """

    def __init__(self, network: InType) -> None:
        super().__init__()
        self.network = network
        self._graphs: OrderedDict[object, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = OrderedDict()

    def forward(self, images: Tensor) -> Tensor:
        kind = images.shape, images.dtype
        if kind not in self._graphs:
            if len(self._graphs) >= GRAPHS:
                self._graphs.popitem(last=False)
            self._graphs[kind] = self._record(images)
        self._graphs.move_to_end(kind)
        graph, static, out = self._graphs[kind]
        static.copy_(images)
        graph.replay()
        return out.clone()

    @torch.inference_mode(False)  # or a graph recorded in that mode could not be replayed outside of it
    @torch.no_grad()
    def _record(self, images: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        static = images.to(self.network.dtype, copy=True)
        with torch.cuda.device(images.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries set themselves up in the first passes, which a graph cannot hold
                with kernels.compile_together():
                    self.network(static)
                for _ in range(3):
                    self.network(static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = self.network(static).float()
        return graph, static, out


def _fuse_polynomials(root: nn.Module, dtype: torch.dtype) -> bool:
    """Put fused kernels in the place of folded Poly-Blocks, and say whether all there are have one now. These come from
    whatever compiler is here, so each form of blocks is first tried beside plain code."""
    fused = [
        (run, module)
        for run in runs(root)
        if run.form.eps is None
        and (module := kernels.polynomial_blocks(pairs(run.blocks), run.form.shifts, dtype)) is not None
    ]
    faults = {form: _fault(run, dtype) for form, run in {run.form: run for run, _ in fused}.items()}
    for form, fault in faults.items():
        if fault:
            warnings.warn(
                f"the fused kernel for blocks of {form.channels} channels without norms is not used: {fault}. Compiled "
                "plain code runs in its place, with the same results. Please report this with your versions of torch "
                "and triton and your GPU",
                RuntimeWarning,
                stacklevel=4,
            )
    for run, module in fused:
        if not faults[run.form]:
            run.replace(module)
    return bool(fused) and not any(isinstance(module, PolyBlock) for module in root.modules())


@torch.no_grad()
def _fault(run: Run, dtype: torch.dtype) -> str:
    """What is wrong with the fused kernel for blocks of this form; empty if nothing is. Two blocks with random weights
    go over several tiles of tokens, none of which may be off by much."""
    try:
        twin = copy.deepcopy(run.blocks[0]).float()
        numbers = torch.Generator(next(twin.parameters()).device).manual_seed(0)
        for name, weight in twin.named_parameters():
            size = 0.5 if ".C." in name else 1.0  # else products of products soon leave the range of 16 bits
            weight.normal_(std=size * weight.shape[-1] ** -0.5 if weight.ndim == 2 else 0.5, generator=numbers)
        x = torch.empty(5, 9, 11, run.form.channels, device=numbers.device, dtype=torch.float32)
        expected = twin(twin(x.normal_(generator=numbers)))
        module = kernels.polynomial_blocks(pairs([twin, twin]), run.form.shifts, dtype)
        assert module is not None
        off = ((module(x).float() - expected).norm(dim=-1) / expected.norm(dim=-1)).mean().item()
    except Exception as error:  # of many kinds: of the compiler, the assembler, the driver, too little memory
        return " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])
    return "" if off < TRIAL_LIMIT else f"its results are off by {off:.2g} of their size"


def _graph(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    if device.type != "cuda":
        raise MultilinearError(f"backend 'graph' needs a model on an NVIDIA GPU, this one is on {device}")
    root = nn.ModuleDict({"model": model})
    fused = _fuse_polynomials(root, dtype)
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PyramidPatchEmbed):
                setattr(parent, name, child.as_one().requires_grad_(False))
            elif isinstance(child, Downsample):
                child.to(memory_format=torch.channels_last)  # as its input is, or its weights are copied at each pass
    model = InType(root["model"], dtype)
    if not fused and torch.cuda.get_device_capability(device)[0] >= 7:  # or there is no Triton to compile with
        compile_blocks(model, Downsample)
    return CudaGraphs(model)
