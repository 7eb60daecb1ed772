"""One call that makes a network fast for inference where it is: folded, in fewer bits, and in the best runtime here."""

import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multilinear import kernels
from multilinear.errors import MultilinearError, check_choice
from multilinear.kernels import cpu
from multilinear.layers import PolyBlock, PyramidPatchEmbed, compile_blocks, fold
from multilinear.layers.embed import check_image_size
from multilinear.layers.mu import FoldedMuLayer, MuLayer
from multilinear.layers.shift import SpatialShift
from multilinear.models.monet import Downsample, MONet

BACKENDS = ("auto", "eager", "compile", "kernel", "onnx", "graph")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GRAPHS = 8  # input shapes of which a recorded CUDA graph is kept


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
    stride = getattr(getattr(model, "embed", None), "stride", None)
    return Optimized(build(folded, device, dtype), backend, dtype, stride)


class Optimized(nn.Module):
    """What `optimize` returns: `backend` and `dtype` say what was chosen."""

    def __init__(self, network: nn.Module, backend: str, dtype: torch.dtype, stride: int | None) -> None:
        super().__init__()
        self.network, self.backend, self.dtype, self.stride = network, backend, dtype, stride
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
    if any(_runs(nn.ModuleDict({"model": model}))) and kernels.blocks_for(dtype):
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
    runs = list(_runs(root))
    if not runs:
        raise MultilinearError("the kernel can run no Poly-Blocks of this model; backend='auto' takes what there is")
    for parent, name, blocks in runs:
        setattr(parent, name, _fused(blocks, dtype))
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


def _runs(root: nn.Module) -> Iterator[tuple[nn.Module, str, list[PolyBlock]]]:
    """Parent, name and blocks of every module below `root` that the kernel can stand for."""
    for parent in root.modules():
        if _blocks_in(parent):
            continue  # served as a whole, or not at all
        for name, child in parent.named_children():
            blocks = [child] if isinstance(child, PolyBlock) else _blocks_in(child)
            forms = {_form(block) for block in blocks}
            if len(forms) == 1 and None not in forms:
                yield parent, name, blocks


def _blocks_in(module: nn.Module) -> list[PolyBlock]:
    """The Poly-Blocks of a sequence of nothing else; empty for any other module."""
    parts = list(module) if isinstance(module, nn.Sequential) else []
    blocks = [part for part in parts if isinstance(part, PolyBlock)]
    return blocks if len(blocks) == len(parts) else []


def _form(block: PolyBlock) -> tuple[Any, ...] | None:
    """What blocks must have in common to run together; None for one that the kernel does not know."""
    layers = (block.mu1, block.mu2)
    kind = (type(block), *map(type, layers))  # a subclass may do anything
    eps: set[float | None]
    if kind == (PolyBlock, MuLayer, MuLayer):
        norms = [block.norm1, *(norm for mu in layers for norm in (mu.norm_a, mu.norm_b))]
        eps = {norm.eps if isinstance(norm, nn.LayerNorm) and norm.bias is not None else None for norm in norms}
        known = block.norm2 is None and len(eps) == 1 and None not in eps
    else:
        eps = {None}
        folded = kind == (PolyBlock, FoldedMuLayer, FoldedMuLayer)
        known = folded and type(block.norm1) is nn.Identity and type(block.norm2) is nn.Identity
    if not known or block.in_features % cpu.CHANNELS:
        return None
    shifts = [shift for mu in layers for shift in (mu.shift, mu.shift_second)]
    borders = [_border(shift) for shift in shifts]
    if any(type(shift) not in (nn.Identity, SpatialShift) for shift in shifts) or any(borders[2:]):
        return None
    if len({*borders} - {None}) > 1:
        return None
    sizes = [None if part is None else part.weight.shape for mu in layers for part in (mu.A, mu.D, mu.B, mu.C)]
    return (*eps, *borders[:2], *sizes)


def _border(shift: nn.Module) -> str | None:
    return shift.border if isinstance(shift, SpatialShift) else None


@torch.no_grad()
def _fused(blocks: list[PolyBlock], dtype: torch.dtype) -> cpu.Blocks:
    form = _form(blocks[0])
    assert form is not None
    pairs = [(_weights(block.mu1, block.norm1), _weights(block.mu2, block.norm1)) for block in blocks]
    return cpu.Blocks(pairs, form[0], (form[1], form[2]), dtype)


def _weights(layer: MuLayer | FoldedMuLayer, before: nn.Module) -> cpu.Mu:
    """A Mu-Layer's weights with the affine maps of its norms folded as far as the norms themselves let them."""
    A, B, C = (_map(linear) for linear in (layer.A, layer.B, layer.C))
    D = None if layer.D is None else _map(layer.D)
    if isinstance(layer, FoldedMuLayer):
        one, zero = torch.ones(layer.A.out_features), torch.zeros(layer.A.out_features)
        return cpu.Mu(A, D, B, C, one, zero if layer.a is None else layer.a, one, zero)
    assert isinstance(before, nn.LayerNorm) and D is not None
    A, D = _after(A, before), _after(D, before)
    if _border(layer.shift) is None:  # a shift mixes tokens, and their means with them
        A = _centred(A)
    norm_a, norm_b = layer.norm_a, layer.norm_b
    assert isinstance(norm_a, nn.LayerNorm) and isinstance(norm_b, nn.LayerNorm)
    # p + alpha * p * q = p * (1 + alpha * q)
    return cpu.Mu(
        A, D, _centred(B), C, norm_a.weight, norm_a.bias, layer.alpha * norm_b.weight, 1 + layer.alpha * norm_b.bias
    )


def _map(linear: nn.Linear) -> cpu.Map:
    weight = linear.weight.float()
    return weight, torch.zeros_like(weight[:, 0]) if linear.bias is None else linear.bias.float()


def _after(linear: cpu.Map, norm: nn.LayerNorm) -> cpu.Map:
    weight, bias = linear
    return weight * norm.weight, bias + weight @ norm.bias.float()


def _centred(linear: cpu.Map) -> cpu.Map:
    """Without the mean over outputs, which a layer norm behind it takes away anyhow."""
    weight, bias = linear
    return weight - weight.mean(0), bias - bias.mean()


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


def _graph(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    if device.type != "cuda":
        raise MultilinearError(f"backend 'graph' needs a model on an NVIDIA GPU, this one is on {device}")
    root = nn.ModuleDict({"model": model})
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PyramidPatchEmbed):
                setattr(parent, name, child.as_one().requires_grad_(False))
            elif isinstance(child, Downsample):
                child.to(memory_format=torch.channels_last)  # as its input is, or its weights are copied at each pass
    model = InType(root["model"], dtype)
    if torch.cuda.get_device_capability(device)[0] >= 7:  # or there is no Triton to compile with
        compile_blocks(model, Downsample)
    return CudaGraphs(model)
