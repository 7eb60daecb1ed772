"""One optimisation step: augment a batch, go forward and back, clip, update, average.

On a single GPU the whole step, augmentation included, is captured as one CUDA graph: Python then only says which images
come next. Blocks are compiled one by one; they share their code, so that the first step comes soon.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from multilinear.data.augment import Mixed, apply_policy, crop_and_flip, erase, mix, normalise
from multilinear.layers import MuLayer, compile_together
from multilinear.train.config import AugmentConfig, Recipe
from multilinear.train.optim import Average

Batch = tuple[Tensor, Tensor]  # images and labels


def augment_batch(images: Tensor, labels: Tensor, config: AugmentConfig, mean: Tensor, std: Tensor) -> Mixed:
    """Everything that happens to a training batch: uint8 (B, H, W, C), or floats that a loader prepared.

    >>> images = torch.zeros(4, 8, 8, 1, dtype=torch.uint8)
    >>> augment_batch(images, torch.arange(4), AugmentConfig(crop=1), torch.zeros(1), torch.ones(1)).images.shape
    torch.Size([4, 1, 8, 8])
    """
    if images.dtype == torch.uint8:
        if config.crop or config.flip:
            images = crop_and_flip(images, config.crop, config.flip)
        if config.policy == "none":
            images = normalise(images, mean, std)
        else:
            # contiguous: reductions over strided pixels are slow
            floats = images.permute(0, 3, 1, 2).contiguous().float() / 255
            floats = apply_policy(floats, config.policy, config.operations, config.magnitude)
            images = (floats - mean[:, None, None]) / std[:, None, None]
    if config.erase:
        images = erase(images, config.erase)
    if config.mixup or config.cutmix:
        return mix(images, labels, config.mixup, config.cutmix, config.mix_probability)
    return Mixed(images, labels, labels, torch.ones(len(labels), device=labels.device))


def mixed_loss(logits: Tensor, mixed: Mixed, smoothing: float) -> Tensor:
    """Cross entropy against two classes with shares, with label smoothing.

    >>> mixed = Mixed(torch.zeros(1), torch.tensor([0]), torch.tensor([1]), torch.tensor([0.5]))
    >>> round(mixed_loss(torch.zeros(1, 2), mixed, 0.1).item(), 4)
    0.6931
    """
    logs = F.log_softmax(logits.float(), -1)
    picked = mixed.share * logs.gather(1, mixed.first[:, None])[:, 0]
    picked = picked + (1 - mixed.share) * logs.gather(1, mixed.second[:, None])[:, 0]
    return -((1 - smoothing) * picked + smoothing * logs.mean(-1)).mean()


class Step:
    """Runs optimisation steps on `model` and keeps the sum of their losses on the device."""

    def __init__(
        self,
        model: nn.Module,
        wrapped: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        average: Average | None,
        recipe: Recipe,
        statistics: tuple[Tensor, Tensor],
        frequencies: Tensor | None = None,
    ) -> None:
        self.model, self.wrapped, self.optimizers, self.average = model, wrapped, optimizers, average
        self.recipe, (self.mean, self.std) = recipe, statistics
        self.device = self.mean.device
        # Menon et al., "Long-tail learning via logit adjustment", ICLR 2021
        self.adjustment = None if frequencies is None else frequencies.clamp_min(1e-6).log()
        self.watched = [part for part in model.modules() if isinstance(part, MuLayer)]
        for part in self.watched:
            part.watch_range = recipe.optim.range_penalty > 0
        self.loss_sum = torch.zeros((), device=self.device)
        self.steps_summed = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: Batch | None = None

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Take one step on a batch that is on the device already."""
        self.steps_summed += 1
        if self._graph is None:
            self._step(images, labels)
            return
        assert self._static is not None
        self._static[0].copy_(images)
        self._static[1].copy_(labels)
        self._graph.replay()

    def mean_loss(self) -> float:
        """The mean loss since the last call. Waits for the device."""
        mean = self.loss_sum.item() / max(1, self.steps_summed)
        self.loss_sum.zero_()
        self.steps_summed = 0
        return mean

    def _step(self, images: Tensor, labels: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        parts = self.recipe.run.accumulate
        for i, (part, part_labels) in enumerate(zip(images.chunk(parts), labels.chunk(parts), strict=True)):
            last = i == parts - 1
            with self._without_sync(last):
                mixed = augment_batch(part, part_labels, self.recipe.augment, self.mean, self.std)
                with self._precision():
                    logits = self.wrapped(mixed.images)
                if self.adjustment is not None:
                    logits = logits + self.adjustment
                loss = mixed_loss(logits, mixed, self.recipe.optim.smoothing) / parts
                self._with_penalty(loss, parts).backward()
            self.loss_sum += loss.detach()
        if self.recipe.optim.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optim.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.average is not None:
            self.average.update()

    def _with_penalty(self, loss: Tensor, parts: int) -> Tensor:
        weight = self.recipe.optim.range_penalty
        ranges = [part.range for part in self.watched if part.range is not None] if weight else []
        return loss + weight / parts * torch.stack(ranges).mean() if ranges else loss

    def _precision(self) -> torch.autocast:
        precision = self.recipe.run.precision
        enabled = precision == "bf16-always" or (precision == "bf16" and self.device.type == "cuda")
        # inside a captured graph weights are cast anew at each replay, which a cache would prevent
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def _without_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        if isinstance(self.wrapped, DistributedDataParallel) and not last:
            return self.wrapped.no_sync()
        return contextlib.nullcontext()

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes."""
        found = list(self.model.state_dict().values())
        for optimizer in self.optimizers:
            found += [
                value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
            ]
        if self.average is not None:
            found += [*self.average.tensors, self.average.updates]
        return [*found, self.loss_sum]

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """The run's state is afterwards as it was before."""
        before = {tensor.data_ptr(): tensor.detach().clone() for tensor in self.tensors()}
        generator = torch.cuda.get_rng_state()
        yield
        for tensor in self.tensors():
            old = before.get(tensor.data_ptr())
            if old is None:
                tensor.detach().zero_()  # optimiser state that the first step made
            else:
                tensor.detach().copy_(old)
        torch.cuda.set_rng_state(generator)

    def compile(self, images: Tensor, labels: Tensor) -> None:
        """Have the kernels for a batch of this shape compiled at the same time, not one after the other when needed."""
        with self._unchanged(), compile_together():
            self._step(images, labels)

    def capture(self, images: Tensor, labels: Tensor) -> None:
        """Capture the step on a batch of this shape as a CUDA graph."""
        self._static = images.clone(), labels.clone()
        stream = torch.cuda.Stream()
        with self._unchanged():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                with compile_together():
                    self._step(*self._static)
                for _ in range(3):
                    self._step(*self._static)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # a loader's thread may pin memory meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step(*self._static)
        self._graph = graph
