"""What a network costs: parameters, multiply-accumulates, and elementwise products, by module."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from multilinear.analysis.graph import input_shape, trace
from multilinear.models import MONet


@dataclass
class ModuleCost:
    parameters: int = 0
    macs: int = 0
    products: int = 0


@dataclass(frozen=True)
class PaperFormulas:
    """The closed forms of the paper's complexity analysis, as printed (one stage, one pyramid level).

    They leave out the norms, count `1/s` where the second layer's bias of D has `r/s`, and charge the head once per
    token although it comes after the mean.
    """

    parameters_embed: float
    parameters_block: float
    parameters_head: float
    parameters: float
    flops_embed: float
    flops_block: float
    flops_head: float
    flops: float


@dataclass(frozen=True)
class Cost:
    """Totals, the same by module (every prefix, `""` is the whole), and the paper's formulas where they apply."""

    parameters: int
    macs: int
    products: int
    by_module: dict[str, ModuleCost]
    paper: PaperFormulas | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def cost(model: nn.Module, input_size: int | tuple[int, ...] | None = None) -> Cost:
    """Count one image's work. `macs` are matrix products and convolutions, `products` the Hadamard products.

    >>> from multilinear.layers import MuLayer
    >>> found = cost(MuLayer(8, shrinkage=2), (8,))
    >>> found.macs, found.products
    (192, 8)
    """
    shape = input_shape(model, input_size)
    modules = {name: ModuleCost() for name, _ in model.named_modules()}
    for name, parameter in model.named_parameters():
        for prefix in _prefixes(name.rpartition(".")[0]):
            modules[prefix].parameters += parameter.numel()
    for operation in trace(model, shape).operations:
        for prefix in _prefixes(operation.module):
            modules[prefix].macs += operation.macs
            modules[prefix].products += operation.products
    whole = modules[""]
    return Cost(whole.parameters, whole.macs, whole.products, modules, _paper_formulas(model, shape))


def _prefixes(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def _paper_formulas(model: nn.Module, shape: tuple[int, ...]) -> PaperFormulas | None:
    if not isinstance(model, MONet) or len(model.config["widths"]) > 1 or len(model.config["patches"]) > 1:
        return None
    c, n, p = model.config["widths"][0], model.config["depths"][0], model.config["patches"][0]
    r, s, k = model.config["expansion"], model.config["shrinkage"], model.config["num_classes"]
    colours, height, width = shape
    tokens = (height // (2 * p)) * (width // (2 * p))
    core = c**2 * (2 * r + 2 + (r**2 + r + 2) / s)
    embed, block, head = (colours * p**2 + 4 * c + 2) * c, core + c * (4 + 2 * r + 2 / s), k * (c + 1)
    flops_embed = 4 * c * tokens * (colours * p**2 + c)
    flops_block, flops_head = tokens * core + tokens * c * (1 + r), tokens * c * k
    return PaperFormulas(
        embed, block, head, embed + n * block + head,
        flops_embed, flops_block, flops_head, flops_embed + n * flops_block + flops_head,
    )  # fmt: skip
