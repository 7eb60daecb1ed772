"""Checkpoints that survive anything: one safetensors file with all that a run needs to go on as if nothing happened.

A checkpoint replaces the one before it in a single rename, after it was written in full and flushed. Tensors are the
weights, the optimisers' state, the averaged weights and the random generators; the header has the position, the history
and the recipe. Sharded tensors are gathered on saving and shared out again on loading.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from multilinear.errors import MultilinearError
from multilinear.files import write_atomically
from multilinear.train.step import Step

VERSION = 2


def gather_state(step: Step) -> dict[str, Tensor]:
    """Everything a step changes, by name, whole and on the CPU. Every process must call this."""
    state = {f"model/{key}": value for key, value in step.model.state_dict().items()}
    for i, optimizer in enumerate(step.optimizers):
        for name, parameter in _parameters(step, optimizer):
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"optimizer/{i}/{name}/{key}"] = value
    if step.average is not None:
        state |= {f"average/{key}": value for key, value in step.average.state().items()}
        state["average_updates"] = step.average.updates
    gathered = {key: whole(value).detach().cpu().contiguous().clone() for key, value in state.items()}
    gathered["random/cpu"] = torch.get_rng_state()
    if step.device.type == "cuda":
        gathered["random/cuda"] = torch.cuda.get_rng_state(step.device)
    return gathered


def restore_state(step: Step, state: dict[str, Tensor]) -> None:
    """Put a gathered state back in place, creating the optimisers' state where no step was taken yet."""
    for key, value in step.model.state_dict().items():
        assign(value, _take(state, f"model/{key}"))
    for i, optimizer in enumerate(step.optimizers):
        for name, parameter in _parameters(step, optimizer):
            prefix = f"optimizer/{i}/{name}/"
            for key in [key for key in state if key.startswith(prefix)]:
                source = state[key]
                target = torch.zeros_like(parameter) if source.shape == parameter.shape else source.to(step.device)
                if source.ndim == 0 and not parameter.is_cuda:
                    target = source.clone()  # AdamW counts steps on the CPU there
                elif source.shape == parameter.shape:
                    assign(target, source)
                optimizer.state[parameter][key.removeprefix(prefix)] = target
    if step.average is not None:
        for key, value in step.average.state().items():
            assign(value, _take(state, f"average/{key}"))
        step.average.updates.copy_(_take(state, "average_updates"))
    torch.set_rng_state(_take(state, "random/cpu"))
    if step.device.type == "cuda" and "random/cuda" in state:
        torch.cuda.set_rng_state(state["random/cuda"], step.device)


def write_checkpoint(path: Path, state: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`."""
    text = json.dumps({"version": VERSION, **header})
    write_atomically(path, lambda part: save_file(state, part, {"multilinear-checkpoint": text}))


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state and the header of the checkpoint at `path`."""
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("multilinear-checkpoint")
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError) as error:
        raise MultilinearError(f"{path} is not a readable checkpoint: {error}") from error
    if text is None:
        raise MultilinearError(f"{path} is no checkpoint of a run (perhaps exported weights); give the run's folder")
    header = json.loads(text)
    if header.get("version") != VERSION:
        raise MultilinearError(f"{path} has checkpoint version {header.get('version')}, this release reads {VERSION}")
    return state, header


def _parameters(step: Step, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """By name, since an optimiser may hold them in any order. To be called after `state_dict`: an evaluation leaves
    sharded parameters whole, which that undoes."""
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    return [(names[id(parameter)], parameter) for group in optimizer.param_groups for parameter in group["params"]]


def whole(value: Tensor) -> Tensor:
    """A sharded tensor gathered from all processes; others as they are."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def assign(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    if target.shape != source.shape:
        raise MultilinearError(f"the checkpoint is of another model: {tuple(source.shape)}, not {tuple(target.shape)}")
    with torch.no_grad():
        if isinstance(target, DTensor):
            source = distribute_tensor(source.to(target.device), target.device_mesh, target.placements)
        target.copy_(source)


def _take(state: dict[str, Tensor], key: str) -> Tensor:
    if key not in state:
        raise MultilinearError(f"the checkpoint is of another model or recipe: it has no {key!r}")
    return state[key]
