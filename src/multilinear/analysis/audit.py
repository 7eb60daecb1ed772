"""Is a network a polynomial at inference? Of which degree, how deep, and if not: what stands in the way?"""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from multilinear.analysis.graph import input_shape, trace


@dataclass(frozen=True)
class Obstacle:
    """An operation that is no polynomial of its input, and the module that it sits in."""

    operation: str
    module: str
    module_type: str
    times: int


@dataclass(frozen=True)
class Audit:
    """What `audit` found. `degree` and `depth` are None where the network is not a polynomial."""

    polynomial: bool
    degree: int | None
    depth: int | None
    operations: dict[str, int]
    obstacles: list[Obstacle]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.operations.items())
        if self.polynomial:
            return f"a polynomial of degree {degree_text(self.degree)}, multiplicative depth {self.depth} ({counts})"
        ways = Counter()  # type: Counter[str]
        for obstacle in self.obstacles:
            ways[obstacle.operation] += obstacle.times
        reasons = ", ".join(f"{count} x {name}" for name, count in ways.most_common())
        return f"not a polynomial: {reasons} ({counts})"


def audit(model: nn.Module, input_size: int | tuple[int, ...] | None = None) -> Audit:
    """Walk the exported graph of `model` in evaluation mode and classify every operation.

    The degree is that of the network as a formal polynomial: an upper bound that generic weights attain.

    >>> from multilinear.layers import MuLayer
    >>> print(audit(MuLayer(4), (4,)))
    a polynomial of degree 2, multiplicative depth 1 (6 linear, 1 product, 0 other)
    """
    traced = trace(model, input_shape(model, input_size))
    kinds = Counter(operation.kind for operation in traced.operations)
    places = Counter((op.name, op.module, op.module_type) for op in traced.operations if op.kind == "other")
    polynomial = not places
    return Audit(
        polynomial=polynomial,
        degree=traced.output.degree if polynomial else None,
        depth=traced.output.depth if polynomial else None,
        operations={kind: kinds[kind] for kind in ("linear", "product", "other")},
        obstacles=[Obstacle(*place, times) for place, times in places.items()],
    )


def degree_text(degree: int | None) -> str:
    """A degree that people can read: powers of 4 by their exponent, once they are long.

    >>> degree_text(16), degree_text(4**34), degree_text(None)
    ('16', '4^34', '-')
    """
    if degree is None:
        return "-"
    exponent = (degree.bit_length() - 1) // 2
    if degree > 10_000 and degree == 4**exponent:
        return f"4^{exponent}"
    return str(degree) if degree < 10**9 else f"{degree:.2e}"
