"""The eight weight initialisers of the paper's table 'Comparison of Initialization Methods'."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from multilinear.errors import check_choice

DEFAULT_INIT = "xavier_normal"

# Each fills a matrix (out, in) in place. "pytorch" leaves what torch's own constructors drew.
INITIALISERS: dict[str, Callable[[Tensor], Any]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": lambda w: nn.init.kaiming_uniform_(w, nonlinearity="relu"),
    "kaiming_normal": lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu"),
    "lecun_normal": lambda w: nn.init.normal_(w, std=w.shape[1] ** -0.5),
    "normal": lambda w: nn.init.normal_(w, std=0.02),
    "sparse": lambda w: nn.init.sparse_(w, sparsity=0.1, std=0.02),
    "pytorch": lambda w: w,
}


def init_weights(module: nn.Module, name: str = DEFAULT_INIT, *, zero_biases: bool = True) -> None:
    """Initialise every linear map and convolution inside `module`; biases become zero, or stay as torch drew them.

    A convolution counts as the matrix that acts on a flattened patch, which is what it is.

    >>> layer = nn.Linear(3, 2)
    >>> init_weights(layer, "xavier_uniform")
    >>> layer.bias.tolist()
    [0.0, 0.0]
    """
    fill = INITIALISERS[check_choice("initialiser", name, INITIALISERS)]
    if name == "pytorch":
        return
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            fill(part.weight.data.view(part.weight.shape[0], -1))
            if part.bias is not None and zero_biases:
                nn.init.zeros_(part.bias)
