"""Optimisers, learning rates and averaged weights, all of them free of host synchronisation so a GPU can run ahead."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from multilinear.train.config import OptimConfig

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz iterations (Jordan et al., 2024), for weight matrices.

    Matrices of one shape are stacked and orthogonalised together: a network of many small layers would otherwise spend
    its time on launches. `lr` may be a tensor, so that a captured graph can follow a schedule.

    >>> weight = nn.Parameter(torch.eye(3))
    >>> optimizer = Muon([weight], lr=0.1)
    >>> weight.sum().backward(); optimizer.step()
    >>> bool((weight != torch.eye(3)).all())
    True
    """

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: gradients are there
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(tuple(parameter.shape), []).append(parameter)
            for parameters in shapes.values():
                self._step_stack(parameters, group)

    def _step_stack(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            buffers.append(state["momentum"])
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, buffers, momentum)  # Nesterov
        update = orthogonalise(torch.stack(list(ahead)).flatten(2))
        rows, columns = update.shape[-2:]
        update = update * max(1, rows / columns) ** 0.5
        steps = list((update * group["lr"]).view(-1, *parameters[0].shape).unbind(0))
        weights: list[Tensor] = list(parameters)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(weights, steps)


def orthogonalise(stack: Tensor, iterations: int = 5) -> Tensor:
    """Bring the singular values of every matrix in `stack` (N, rows, columns) close to 1.

    >>> singular = torch.linalg.svdvals(orthogonalise(torch.randn(2, 8, 4)))
    >>> bool(((singular > 0.5) & (singular < 1.5)).all())
    True
    """
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.transpose(-1, -2) if tall else stack
    dtype = torch.bfloat16 if stack.is_cuda else torch.float32
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(iterations):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = (x.transpose(-1, -2) if tall else x).to(stack.dtype)
    return result


def build_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices inside blocks and AdamW for the rest; no decay on vectors.

    >>> len(build_optimizers(nn.Linear(2, 2), OptimConfig()))
    1
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    cuda = any(p.is_cuda for _, p in parameters)
    muon = [p for name, p in parameters if config.name == "muon" and p.ndim == 2 and ".blocks." in name]
    taken = {id(p) for p in muon}
    # by size: one launch takes so many tensors, and a few large ones among small ones leave most of a GPU idle
    rest = sorted((p for _, p in parameters if id(p) not in taken), key=Tensor.numel)
    device = parameters[0][1].device

    def rate() -> Tensor | float:
        return torch.zeros((), device=device) if cuda else 0.0

    groups = [
        {"params": chosen, "weight_decay": decay, "lr": rate(), "peak": config.lr}
        for chosen, decay in (
            ([p for p in rest if p.ndim > 1], config.weight_decay),
            ([p for p in rest if p.ndim <= 1], 0.0),
        )
        if chosen
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=rate(), betas=(0.9, 0.99), fused=cuda, capturable=cuda))
    if muon:
        group = {"params": muon, "weight_decay": config.weight_decay, "lr": rate(), "peak": config.muon_lr}
        optimizers.append(Muon([group]))
    return optimizers


def learning_rate(config: OptimConfig, step: int, steps: int, steps_per_epoch: int) -> float:
    """Share of the peak at `step` of `steps`: linear warm-up from `warmup_lr`, then a cosine down to `min_lr`.

    >>> config = OptimConfig(lr=1.0, warmup_lr=0.1, min_lr=0.01, warmup_epochs=1)
    >>> [round(learning_rate(config, step, 40, 10), 3) for step in (0, 10, 40)]
    [0.1, 1.0, 0.01]
    """
    warmup = min(config.warmup_epochs * steps_per_epoch, steps)
    if step < warmup:
        low = config.warmup_lr / config.lr
        return low + (1 - low) * step / warmup
    low = config.min_lr / config.lr
    done = (step - warmup) / max(1.0, steps - warmup)
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def set_learning_rate(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """Set every group to `share` of its peak, in place where the rate lives on the device.

    >>> optimizers = build_optimizers(nn.Linear(2, 2), OptimConfig(lr=2.0))
    >>> set_learning_rate(optimizers, 0.5)
    >>> optimizers[0].param_groups[0]["lr"]
    1.0
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(share * group["peak"])
            else:
                group["lr"] = share * group["peak"]


class Average:
    """Exponential moving average of a model's weights and floating statistics; short at first, so it forgets the start.

    >>> net = nn.Linear(1, 1)
    >>> average = Average(net, 0.9)
    >>> net.weight.data.fill_(5.0); average.update(); average.tensors[0].item() > 0
    tensor([[5.]])
    True
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        state = {key: value for key, value in model.state_dict().items() if value.is_floating_point()}
        self.names = list(state)
        self.live = list(state.values())
        self.tensors = [value.detach().clone() for value in self.live]
        self.updates = torch.zeros((), device=self.live[0].device)

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        weight = (1 - (1 + self.updates) / (10 + self.updates)).clamp_min(1 - self.decay)
        change = torch._foreach_sub(self.live, self.tensors)
        torch._foreach_mul_(change, weight)
        torch._foreach_add_(self.tensors, change)

    def state(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.tensors, strict=True))
