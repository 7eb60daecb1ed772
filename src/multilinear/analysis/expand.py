"""The polynomial that a small layer is, written out: exact rational arithmetic over the layer's own graph."""

import operator
from collections.abc import Callable
from fractions import Fraction
from math import comb
from typing import Any

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from sympy.polys.domains import QQ
from sympy.polys.rings import PolyElement, ring
from torch import Tensor, nn
from torch.fx import Node

from multilinear.analysis.audit import audit
from multilinear.analysis.graph import evaluation_mode, operation_name
from multilinear.errors import MultilinearError
from multilinear.layers import fold

Array = NDArray[Any]  # of polynomials or rationals
MAX_MONOMIALS = 200_000


def expand(layer: nn.Module, shape: tuple[int, ...] | None = None, digits: int | None = None) -> Array:
    """Return the polynomials that `layer` computes, as an array of sympy expressions in the shape of its output.

    The layer is folded first (so that a batch norm is its affine map) and its weights are taken as the exact rationals
    that the floats are. Symbols are `x0, x1, ...` for a vector, `x0_1_2` for entry (0, 1, 2).

    Args:
        shape: of one input, batch dimension included where the layer needs one; a vector if not given, and one token
            for a Poly-Block.
        digits: round the coefficients to this many significant digits, for reading.

    >>> from multilinear.layers import MuLayer
    >>> layer = MuLayer(2, 1, 1, shrinkage=1)
    >>> for matrix in (layer.A, layer.B, layer.C, layer.D): nn.init.ones_(matrix.weight)
    Parameter...
    >>> expand(layer)[0]
    x0**2 + 2*x0*x1 + x0 + x1**2 + x1
    """
    if shape is None:
        width = getattr(layer, "in_features", None)
        if width is None:
            raise MultilinearError(f"expand needs the input shape of a {type(layer).__name__}")
        shape = (1, 1, width) if any(hasattr(part, "border") for part in layer.modules()) else (width,)
    folded = fold(layer).double()
    found = audit(folded, shape) if len(shape) != 4 else audit(folded, shape[1:])
    if not found.polynomial or found.degree is None:
        raise MultilinearError(f"cannot expand: {found}")
    inputs = int(np.prod(shape))
    if comb(inputs + found.degree, inputs) > MAX_MONOMIALS:
        raise MultilinearError(
            f"a polynomial of degree {found.degree} in {inputs} variables is too large to write out "
            f"(over {MAX_MONOMIALS} monomials); expand a smaller layer"
        )
    symbols = sympy.symbols(["x" + "_".join(map(str, index)) for index in np.ndindex(*shape)])
    _, *generators = ring(symbols, QQ)
    variables = np.empty(inputs, dtype=object)
    variables[:] = generators
    result = _evaluate(folded, variables.reshape(shape))
    return np.asarray(np.vectorize(lambda poly: _expression(poly, digits), otypes=[object])(result))


def _expression(value: Any, digits: int | None) -> sympy.Expr:
    expression = (
        value.as_expr() if isinstance(value, PolyElement) else sympy.Rational(value.numerator, value.denominator)
    )
    return expression if digits is None else expression.evalf(digits)


def _evaluate(model: nn.Module, variables: Array) -> Array:
    """Run the exported graph of `model` on polynomials."""
    with evaluation_mode(model):
        program = torch.export.export(model, (torch.zeros(variables.shape, dtype=torch.float64),), strict=False)
    signature = program.graph_signature
    weights = {**program.state_dict, **program.constants}
    sources = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    sources |= signature.inputs_to_lifted_tensor_constants
    values: dict[Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = _rationals(weights[sources[node.name]]) if node.name in sources else variables
        elif node.op == "call_function":
            name = operation_name(node)
            if name not in _RULES:
                raise MultilinearError(f"cannot expand the operation {name!r} of {type(model).__name__}")
            args = torch.fx.map_arg(node.args, lambda arg: values[arg])
            values[node] = _RULES[name](*args)
        elif node.op == "output":
            (result,) = node.args[0]
            return np.asarray(values[result])
    raise AssertionError("an exported graph ends in an output")


def _rationals(tensor: Tensor) -> Array:
    exact = (Fraction(number) for number in tensor.detach().double().reshape(-1).tolist())
    array = np.empty(tensor.numel(), dtype=object)
    array[:] = [QQ(number.numerator, number.denominator) for number in exact]
    return array.reshape(tuple(tensor.shape))


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = x @ weight.T
    return y if bias is None else y + bias


def _conv2d(
    x: Array, weight: Array, bias: Array | None = None, stride: Any = (1, 1), padding: Any = (0, 0), *_: Any
) -> Array:
    x = _pad(x, [padding[1], padding[1], padding[0], padding[0]])
    out, _, height, width = weight.shape
    rows = range(0, x.shape[2] - height + 1, stride[0])
    columns = range(0, x.shape[3] - width + 1, stride[1])
    matrix = weight.reshape(out, -1).T
    patches = np.stack(
        [
            np.stack([x[:, :, i : i + height, j : j + width].reshape(len(x), -1) @ matrix for j in columns], -1)
            for i in rows
        ],
        -2,
    )
    return patches if bias is None else patches + bias[:, None, None]


def _pad(x: Array, pad: Any, *_: Any) -> Array:
    widths = [(0, 0)] * (x.ndim - len(pad) // 2)
    widths += [(pad[2 * i], pad[2 * i + 1]) for i in reversed(range(len(pad) // 2))]
    return np.pad(x, widths, constant_values=QQ(0))


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    index: list[Any] = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return np.asarray(x[tuple(index)])


def _split(x: Array, sizes: list[int], dim: int = 0) -> list[Array]:
    return np.split(x, np.cumsum(sizes)[:-1], axis=dim)


def _mean(x: Array, dim: Any, keepdim: bool = False) -> Array:
    axes = tuple(dim)
    count = int(np.prod([x.shape[axis] for axis in axes]))
    return np.asarray(np.sum(x, axis=axes, keepdims=keepdim) * QQ(1, count), dtype=object)


_RULES: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "conv2d": _conv2d,
    "mul": operator.mul,
    "add": operator.add,
    "sub": operator.sub,
    "cat": lambda parts, dim=0: np.concatenate(parts, axis=dim),
    "getitem": operator.getitem,
    "slice": _slice,
    "narrow": lambda x, dim, start, length: _slice(x, dim, start, start + length),
    "split_with_sizes": _split,
    "pad": _pad,
    "permute": np.transpose,
    "view": np.reshape,
    "reshape": np.reshape,
    "flatten": lambda x, start=0, end=-1: x.reshape(
        *x.shape[:start], -1, *x.shape[x.ndim + end + 1 if end < 0 else end + 1 :]
    ),
    "mean": _mean,
    "dropout": lambda x, *_: x,
}
