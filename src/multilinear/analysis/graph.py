"""Walk the exported graph of a network and say of every operation what it does to a polynomial.

A value carries the total degree of the polynomial that it is in the input, and the multiplicative depth: how many
products of two data-dependent values lie on the longest path to it. Weights have degree 0. An operation that is not on
a list here counts as `other`: the audit may call a polynomial unproven, never the reverse.
"""

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from multilinear.errors import MultilinearError

# Sums, means, copies and re-arrangements: linear in all tensors that they take.
LINEAR = frozenset(
    "add sub rsub neg sum mean cat stack view reshape _unsafe_view flatten unflatten permute transpose t slice select "
    "narrow split split_with_sizes chunk unbind squeeze unsqueeze expand expand_as repeat clone contiguous copy to "
    "_to_copy type_as alias detach lift_fresh_copy pad constant_pad_nd avg_pool2d adaptive_avg_pool2d roll flip "
    "movedim swapaxes pixel_shuffle pixel_unshuffle upsample_nearest2d upsample_bilinear2d upsample_bicubic2d "
    "im2col unfold cumsum diagonal trace getitem identity".split()
)
# Operation -> positions of its factors; every other tensor that it takes is added.
MULTILINEAR: dict[str, tuple[int, ...]] = {
    "mul": (0, 1), "matmul": (0, 1), "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "outer": (0, 1),
    "linear": (0, 1), "conv1d": (0, 1), "conv2d": (0, 1), "conv3d": (0, 1), "convolution": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2), "addcmul": (1, 2), "einsum": (1,),
}  # fmt: skip
# Linear in the first argument as long as the others do not depend on the data.
LINEAR_IN_FIRST = frozenset("div true_divide index index_select gather embedding take".split())
_CONTRACTIONS = frozenset("matmul mm bmm mv dot linear conv1d conv2d conv3d convolution addmm baddbmm".split())


@dataclass(frozen=True)
class Value:
    """Degree (None where the value is no polynomial) and multiplicative depth."""

    degree: int | None
    depth: int


@dataclass(frozen=True)
class Operation:
    """One step of the network that depends on its input."""

    name: str
    module: str
    module_type: str
    kind: str  # "linear", "product" or "other"
    macs: int  # multiply-accumulates of a matrix product or convolution
    products: int  # multiplications of an elementwise product of two data-dependent tensors


@dataclass(frozen=True)
class Trace:
    operations: list[Operation]
    output: Value


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode restored after.

    >>> net = nn.Dropout()
    >>> with evaluation_mode(net): print(net.training)
    False
    >>> net.training
    True
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def input_shape(model: nn.Module, input_size: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """One example's shape: as given, or (channels, side, side) from a side, or the model's own default.

    >>> input_shape(nn.Identity(), (3, 8, 8))
    (3, 8, 8)
    """
    if isinstance(input_size, tuple):
        return input_size
    cfg = getattr(model, "pretrained_cfg", None) or {}
    default = tuple(cfg.get("input_size") or ())
    channels = getattr(model, "config", {}).get("in_chans") or (default[0] if default else 3)
    if input_size is not None:
        return channels, input_size, input_size
    if not default:
        raise MultilinearError("this model has no default input size; give one, such as input_size=(3, 224, 224)")
    return (channels, *default[1:])


def trace(model: nn.Module, shape: tuple[int, ...]) -> Trace:
    """Export `model` on one example of `shape` and classify its operations.

    >>> [op.kind for op in trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (2,)).operations]
    ['linear', 'other']
    """
    parameter = next(model.parameters(), torch.zeros(()))
    example = torch.zeros(1, *shape, dtype=parameter.dtype, device=parameter.device)
    with evaluation_mode(model):
        graph = torch.export.export(model, (example,), strict=False)
    inputs = set(graph.graph_signature.user_inputs)
    values: dict[Node, Value] = {}
    operations = []
    output = Value(0, 0)
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            values[node] = Value(1 if node.name in inputs else 0, 0)
        elif node.op == "output":
            output = _join(
                [values[arg] for arg in node.all_input_nodes if arg.name in graph.graph_signature.user_outputs]
            )
        elif not _has_tensor(node) or all(values[arg].degree == 0 for arg in node.all_input_nodes):
            values[node] = Value(0, 0)
        else:
            kind, values[node] = _classify(node, values)
            if not _is_bookkeeping(node):
                operations.append(_operation(node, kind, values))
    return Trace(operations, output)


def operation_name(node: Node) -> str:
    """`aten.relu_.default` -> `relu`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1].rstrip("_")
    return "getitem" if node.target is operator.getitem else str(node.target)


def _classify(node: Node, values: dict[Node, Value]) -> tuple[str, Value]:
    name = operation_name(node)
    everything = [values[arg] for arg in node.all_input_nodes]
    joined = _join(everything)
    if name in LINEAR:
        # a cast to integers rounds, whatever the operation is called
        return ("linear", joined) if _is_floating(node) else ("other", Value(None, 0))
    if name in LINEAR_IN_FIRST:
        others = [arg for arg in node.all_input_nodes if arg is not node.args[0]]
        rounded = node.kwargs.get("rounding_mode") is not None
        return (
            ("other", Value(None, 0))
            if rounded or any(values[arg].degree != 0 for arg in others)
            else ("linear", joined)
        )
    if name in MULTILINEAR:
        factors = [values[arg] for i in MULTILINEAR[name] for arg in _nodes(node.args[i])]
        if sum(value.degree != 0 for value in factors) < 2:
            return "linear", joined
        product = _product(factors)
        return "product", _join([product, *everything]) if product.degree is not None else product
    if name in ("pow", "square"):
        exponent = 2 if name == "square" else node.args[1]
        if isinstance(exponent, int | float) and exponent >= 1 and float(exponent).is_integer():
            return ("product" if exponent > 1 else "linear"), _power(joined, int(exponent))
    # an argument that says "training" decides whether these are what their name says
    if (name == "batch_norm" and not node.args[5]) or (name == "dropout" and not node.args[2]):
        return "linear", joined
    return "other", Value(None, 0)


def _join(values: list[Value]) -> Value:
    """The degree and depth of a sum."""
    degrees = [value.degree for value in values if value.degree is not None]
    known = len(degrees) == len(values)
    return Value(max(degrees, default=0) if known else None, max((value.depth for value in values), default=0))


def _product(factors: list[Value]) -> Value:
    degrees = [value.degree for value in factors if value.degree is not None]
    known = len(degrees) == len(factors)
    return Value(sum(degrees) if known else None, max(value.depth for value in factors) + 1)


def _power(value: Value, exponent: int) -> Value:
    degree = None if value.degree is None else value.degree * exponent
    return Value(degree, value.depth + math.ceil(math.log2(exponent)))


def _operation(node: Node, kind: str, values: dict[Node, Value]) -> Operation:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, type_ = stack[-1] if stack else ("", "")
    name = operation_name(node)
    hadamard = kind == "product" and name in ("mul", "addcmul", "pow", "square")
    return Operation(
        name=name,
        module=path.removeprefix("L['self']").removeprefix("."),
        module_type=(type_ if isinstance(type_, str) else type_.__qualname__).split(".")[-1],
        kind=kind,
        macs=_macs(node, name),
        products=_tensor(node).numel() if hadamard else 0,
    )


def _macs(node: Node, name: str) -> int:
    """Multiply-accumulates: each entry of the result is a sum over the contracted dimensions."""
    if name == "scaled_dot_product_attention":
        query, key, value = (_tensor(arg) for arg in node.args[:3])
        return query.numel() * key.shape[-2] + query.shape[:-1].numel() * key.shape[-2] * value.shape[-1]
    if name not in _CONTRACTIONS:
        return 0
    first, second = (_tensor(node.args[i]) for i in MULTILINEAR[name])
    result = _tensor(node)
    if name.startswith("conv"):
        return result.numel() * second.shape[1:].numel()
    return result.numel() * first.shape[-1]


def _nodes(argument: Any) -> list[Node]:
    if isinstance(argument, Node):
        return [argument]
    return [item for item in argument if isinstance(item, Node)] if isinstance(argument, list | tuple) else []


def _tensor(node: Any) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value


def _has_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value))


def _is_floating(node: Node) -> bool:
    value = node.meta["val"]
    tensors = [value] if isinstance(value, Tensor) else [item for item in value if isinstance(item, Tensor)]
    return all(tensor.is_floating_point() for tensor in tensors)


def _is_bookkeeping(node: Node) -> bool:
    return node.target is operator.getitem
