"""From a trained network to a program: choose scales, round, predict errors, refuse what cannot fit."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from multilinear.encrypted.network import Array, Network, Product, flatten, shift
from multilinear.encrypted.packing import Packing, cheapest_first
from multilinear.encrypted.parameters import PRIME_BITS, SCALES, Parameters
from multilinear.encrypted.plan import SPARE, free_memory, needed_memory
from multilinear.encrypted.program import LARGEST_OFFSET, Layer, Program, Public
from multilinear.errors import MultilinearError
from multilinear.layers import check_image_size
from multilinear.models import load
from multilinear.models.weights import read_header

# Products are stored at this root mean square. Larger leaves more bits to the weights that make a product, smaller to
# those that it meets next; of 1/4, 1/2, 1 and 4 this gave the smallest errors.
TYPICAL = 1.0
MOST_WEIGHT = 2**15 - 1  # 16 bits with the sign
SPARE_BITS = 8  # between the largest product seen in calibration and what the modulus holds
NOISE = 3.2  # standard deviation of fresh encryption noise


def compile(
    model: nn.Module | str | Path,
    images: NDArray[np.uint8],
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    labels: Sequence[str] | None = None,
    packing: str = "auto",
    at_a_time: int = 1,
) -> Program:
    """Make a program of a polynomial MONet.

    Args:
        model: a network, or a weights file, which also tells `mean`, `std` and `labels`.
        images: uint8 (N, H, W, C) for calibration, some hundred of the kind that will come; ranges are taken from them.
        packing: `"tokens"`, `"images"`, or `"auto"`: the cheaper one for `at_a_time` images, if memory allows.
        at_a_time: how many images will come in one message; packing by images pays from some thousands on.

    >>> from multilinear.models import create
    >>> net = create("monet_private_1", in_chans=1)
    >>> program = compile(net, np.zeros((4, 28, 28, 1), np.uint8), mean=[0.5], std=[0.5])
    >>> program.public.parameters
    Parameters(degree=8192, depth=2, scale_bits=22)
    """
    if isinstance(model, str | Path):
        header = read_header(model)
        preprocessing: dict[str, Any] = header.get("preprocessing") or {}
        mean = preprocessing.get("mean") if mean is None else mean
        std = preprocessing.get("std") if std is None else std
        labels = header.get("labels") if labels is None else labels
        model = load(model)
    network = flatten(model)
    arrays = [network.head, *(part for layer in network.products for part in (layer.first, layer.second, layer.offset))]
    if not all(np.isfinite(array).all() for array in arrays):
        raise MultilinearError("the network's weights are not finite; train it again with a lower optim.lr")
    channels = network.channels
    if images.ndim == 3 and channels == 1:
        images = images[..., None]
    if images.ndim != 4 or images.dtype != np.uint8 or images.shape[-1] != channels or not images.size:
        raise MultilinearError(
            f"calibration images are uint8 (N, H, W, {channels}) and at least one; got {images.dtype} {images.shape}"
        )
    height, width = images.shape[1:3]
    check_image_size(height, width, network.patch)
    mean, std = (tuple(float(x) for x in ([0.5] * channels if given is None else given)) for given in (mean, std))
    if len(mean) != channels or len(std) != channels or min(std) <= 0:
        raise MultilinearError(f"mean and std need {channels} entries each, std positive; got {mean} and {std}")
    classes = len(network.head)
    named = tuple(str(label) for label in (range(classes) if labels is None else labels))
    if len(named) != classes:
        raise MultilinearError(f"{len(named)} labels for {classes} classes")
    parameters = Parameters.for_depth(len(network.products))
    grid = height // network.patch, width // network.patch
    if at_a_time < 1:
        raise MultilinearError(f"at_a_time must be at least 1, got {at_a_time}")
    kinds = cheapest_first(grid, parameters, at_a_time) if packing == "auto" else [packing]
    packed = [Packing.make(kind, grid, parameters) for kind in kinds]
    if packed[-1].images < 1:
        raise MultilinearError(
            f"a grid of {grid[0]}x{grid[1]} tokens does not fit the {parameters.slots} slots of the ring"
        )
    public = Public(
        "00" * 32, parameters, packed[0], (channels, height, width), network.patch, network.overlap, mean, std, named,
        (1.0,) * classes, 0.0,
    )  # fmt: skip
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused
        parameters, layers, head, units, error = _best_scale(network, public.prepare(images), parameters)
    public = dataclasses.replace(public, parameters=parameters, units=units, error=error)
    for each in packed:
        program = Program(dataclasses.replace(public, packing=each), layers, head)
        if each is packed[-1] or needed_memory(program) <= SPARE * free_memory():
            break  # the other packing has smaller batches
    program = dataclasses.replace(program, public=dataclasses.replace(program.public, program=program.identity()))
    program.check()
    return program


@dataclass
class _Values:
    """The vector v on the calibration images in stored units, and the variance of each entry's error.

    Errors are of two kinds: rounded weights err alike at all tokens, the encryption's noise is another one at each.
    """

    v: Array  # (..., inputs)
    units: Array
    variance: Array  # (2, inputs): of rounding, of noise

    def append(self, h: Array, units: Array, variance: Array) -> None:
        self.v = np.concatenate([self.v, h], -1)
        self.units = np.concatenate([self.units, units])
        self.variance = np.concatenate([self.variance, variance], 1)

    def row_variance(self, weights: Array) -> Array:
        """Error (2, rows) of `weights·v`: what v brings, and what rounding the weights does (uniform, 1/12)."""
        power = (self.v**2).reshape(-1, self.v.shape[-1]).mean(0)
        found: Array = self.variance @ (weights**2).T + np.array([[power.sum() / 12], [0.0]])
        return found

    def rounded(self, matrix: Array, factor: Array) -> Array:
        return np.rint(matrix * self.units * factor[:, None])


Rounded = tuple[tuple[Layer, ...], Array, tuple[float, ...], float]


def _best_scale(network: Network, patches: Array, parameters: Parameters) -> tuple[Parameters, *Rounded]:
    """Round at every scale and keep the one with the smallest predicted error."""
    found: list[tuple[Parameters, *Rounded]] = []
    refusal: MultilinearError | None = None
    for bits in SCALES:
        tried = dataclasses.replace(parameters, scale_bits=bits)
        try:
            found.append((tried, *_quantise(network, patches, tried)))
        except MultilinearError as error:
            refusal = refusal or error
    if not found:
        assert refusal is not None
        raise refusal
    return min(found, key=lambda one: one[-1])


def _quantise(network: Network, patches: Array, parameters: Parameters) -> Rounded:
    constant = np.ones((*patches.shape[:-1], 1))
    inputs = patches.shape[-1]
    fresh = parameters.slots * NOISE**2 / parameters.scale**2
    variance = np.zeros((2, 1 + inputs))
    variance[1, 1:] = fresh
    values = _Values(np.concatenate([constant, patches], -1), np.ones(1 + inputs), variance)
    layers = []
    for i, product in enumerate(network.products):
        layer, h, spread = _round_product(product, values, parameters, i)
        layers.append(layer)
        values.append(h, layer.units, spread)
    head, units, error = _round_head(network.head, values, parameters)
    return tuple(layers), head, units, error


def _round_product(product: Product, values: _Values, parameters: Parameters, index: int) -> tuple[Layer, Array, Array]:
    """Choose how large the rows are so that products are of the typical size, and round them."""
    v = values.v * values.units  # in the network's numbers
    first = v @ product.first.T
    first = (shift(first) if product.shifts else first) + product.offset
    second = v @ product.second.T
    h = first * second
    if not np.isfinite(h).all():
        raise MultilinearError(
            f"Mu-Layer {index + 1} overflows on the calibration images; train with optim.range_penalty"
        )
    flat = h.reshape(-1, product.rank)
    size = np.maximum(np.sqrt((flat**2).mean(0)), 1e-12)
    widest = [np.maximum(np.abs(matrix * values.units).max(1), 1e-12) for matrix in (product.first, product.second)]
    widest[0] = np.maximum(widest[0], np.abs(product.offset) * MOST_WEIGHT / LARGEST_OFFSET)  # offsets may be larger
    # rows at f and g times the network's numbers: the product is stored f·g·scale / 2**54 times as large
    shrink = 2.0**PRIME_BITS / parameters.scale
    bits = np.sqrt(TYPICAL / size * shrink * widest[0] * widest[1]).clip(max=MOST_WEIGHT)
    f, g = bits / widest[0], bits / widest[1]
    rows, others = values.rounded(product.first, f), values.rounded(product.second, g)
    units = shrink / (f * g)
    most = np.abs(first * f).max() * np.abs(second * g).max() * parameters.scale**2
    room = PRIME_BITS * (parameters.depth + 1 - index) - 1 - math.log2(max(most, 1.0))
    if room < SPARE_BITS:
        raise MultilinearError(
            f"Mu-Layer {index + 1} reaches {np.abs(h).max():.3g} on the calibration images: {room:.0f} bits are left "
            f"below the modulus, {SPARE_BITS} are needed; train with a larger optim.range_penalty"
        )
    spread = (second * g).reshape(-1, product.rank), (first * f).reshape(-1, product.rank)
    variance = sum(
        (factor**2).mean(0) * values.row_variance(weights)
        for factor, weights in zip(spread, (rows, others), strict=True)
    ) / shrink**2 + np.array([[0.0], [rescale_variance(parameters)]])  # fmt: skip
    stored = h / units
    layer = Layer(
        rows, others, np.rint(product.offset * f), product.shifts, units, np.sqrt(variance.sum(0)),
        float(np.abs(stored).max()), float(np.sqrt((stored**2).mean())),
    )  # fmt: skip
    return layer, stored, variance


def rescale_variance(parameters: Parameters) -> float:
    """Variance in a slot of rounding when a prime is dropped: both parts round, the second meets a ternary secret."""
    return parameters.slots * (1 + 2 * parameters.degree / 3) / 12 / parameters.scale**2


def _round_head(head: Array, values: _Values, parameters: Parameters) -> tuple[Array, tuple[float, ...], float]:
    widest = np.maximum(np.abs(head * values.units).max(1), 1e-12)
    logits = np.abs((values.v * values.units) @ head.T).reshape(-1, len(head)).max(0)
    room = 2.0 ** (PRIME_BITS - 2 - SPARE_BITS) / parameters.scale  # one prime is left at the end
    factor = np.minimum(MOST_WEIGHT / widest, room / np.maximum(logits, 1e-12))
    rounded = values.rounded(head, factor)
    tokens = values.v.shape[1] * values.v.shape[2]
    # the mean over tokens: of rounding's error that part survives which an image's tokens have in common
    common = (values.v.mean((1, 2)) ** 2).sum() / (values.v**2).mean((1, 2)).sum()
    rounding, noise = values.row_variance(rounded)
    deviations = np.sqrt(rounding * common + noise / tokens) / factor
    return rounded, tuple(float(x) for x in 1 / factor), float(np.sqrt((deviations**2).mean()))
