"""Where the error comes from: an encrypted run whose every product is decrypted, beside the network in the clear.

For development only. It holds the secret key and the weights in one place, which a deployment never does.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from multilinear.encrypted.backend import EvaluationKeys, Secret, ring
from multilinear.encrypted.engine import Engine, usable_processes
from multilinear.encrypted.network import flatten
from multilinear.encrypted.parameters import PRIME_BITS
from multilinear.encrypted.plan import check_memory
from multilinear.encrypted.program import Program


@dataclass(frozen=True)
class LayerError:
    """Errors of one layer's products (root mean square), relative to the products themselves."""

    predicted: float
    measured: float


def layer_errors(
    program: Program, model: nn.Module, images: NDArray[np.uint8], processes: int | None = None
) -> list[LayerError]:
    """Run up to one batch encrypted and compare every product with the network in the clear."""
    check_memory(program)
    public = program.public
    packing = public.packing
    tokens = public.prepare(images[: packing.images])
    clear, _ = flatten(model).forward(tokens)
    made = ring(public.parameters)
    secret = Secret(made)
    rotations = packing.rotations()
    keys = EvaluationKeys(made, *secret.evaluation_keys(rotations), rotations)
    with Engine(program, keys, usable_processes(processes)) as engine:
        for place, channels in enumerate(packing.pack(tokens)):
            for channel, slots in enumerate(channels):
                engine.sources[0][:, place, channel] = secret.encrypt(slots).transpose(1, 0, 2)
        engine.run()
        found = []
        for i, (layer, source) in enumerate(zip(program.layers, engine.sources[1:], strict=True)):
            scale = 2.0**PRIME_BITS if i == len(program.layers) - 1 else 1.0  # the last products are not rescaled
            stored = np.stack(
                [
                    [secret.decrypt(np.ascontiguousarray(source[:, place, channel].transpose(1, 0, 2))) / scale
                     for channel in range(layer.rank)]
                    for place in range(packing.places)
                ]
            )  # fmt: skip
            wanted = clear[i] / layer.units
            error = packing.unpack(stored, len(tokens)) - wanted
            size = float(np.sqrt((wanted**2).mean()))
            predicted = float(np.sqrt((layer.errors**2).mean()))
            found.append(LayerError(predicted / size, float(np.sqrt((error**2).mean())) / size))
    return found
