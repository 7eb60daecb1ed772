"""The loop: the same on a CPU, a GPU, or many under torchrun."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from multilinear.errors import MultilinearError
from multilinear.evaluate import Evaluation
from multilinear.files import write_atomically
from multilinear.layers import check_image_size, collect_statistics, compile_blocks
from multilinear.layers.norm import BatchNorm
from multilinear.models import MONet, create, load, save
from multilinear.train.batches import Batches, open_batches
from multilinear.train.checkpoint import assign, gather_state, read_checkpoint, restore_state, whole, write_checkpoint
from multilinear.train.config import Recipe
from multilinear.train.distributed import Processes, spread
from multilinear.train.log import Bar, Dashboards, Row, progress_bar, write_history
from multilinear.train.optim import Average, build_optimizers, learning_rate, set_learning_rate
from multilinear.train.step import Step, augment_batch

STATISTICS_BATCHES = 64  # for batch norms, at the end
CHECK_EVERY = 50  # steps between looks at the loss on a GPU, each of which waits for it


@dataclass
class Position:
    """How far a run has come."""

    epoch: int = 0
    step: int = 0  # inside the epoch
    best: float = -math.inf
    best_epoch: int = -1
    loss_sum: float = 0.0  # of this epoch's steps so far
    seconds: float = 0.0


class Run:
    """One training run in `out`: builds everything, trains, keeps checkpoints, and leaves the exported weights."""

    def __init__(
        self, recipe: Recipe, out: Path, data: Path | None, processes: Processes, console: Console | None
    ) -> None:
        self.recipe, self.out, self.processes = recipe, out, processes
        self.console = console if processes.is_main else None
        self.device = processes.device
        self.cuda = self.device.type == "cuda"
        torch.manual_seed(recipe.run.seed)
        self.batches: Batches = open_batches(recipe, data, processes)
        if (recipe.run.select == "best" or recipe.run.patience) and not self.batches.has_validation:
            raise MultilinearError(
                f"run.select 'best' and run.patience need a validation split, which {recipe.data.name} has not; "
                "set data.hold_out to a number of training images"
            )
        self.model = self._build_model()
        torch.manual_seed(recipe.run.seed + 1 + processes.rank)  # same weights everywhere, different augmentation
        if self.cuda:
            torch.set_float32_matmul_precision("high")
        if recipe.run.compile == "always" or (recipe.run.compile == "gpu" and self.cuda):
            compile_blocks(self.model)
        wrapped = spread(self.model, processes, recipe.run.fsdp)
        optimizers = build_optimizers(self.model, recipe.optim)
        average = Average(self.model, recipe.optim.ema) if recipe.optim.ema else None
        statistics = tuple(torch.tensor(values, device=self.device) for values in (self.batches.mean, self.batches.std))
        frequencies = torch.tensor(self.batches.frequencies, device=self.device) if recipe.optim.balance else None
        self.step = Step(self.model, wrapped, optimizers, average, recipe, (statistics[0], statistics[1]), frequencies)
        self.position = Position()
        self.history: list[Row] = []
        self.first_step_seconds = 0.0
        self.saved_at = time.perf_counter()
        self.share = 0.0  # of the peak learning rate, at the last step

    def _build_model(self) -> MONet:
        recipe, batches = self.recipe, self.batches
        arguments: dict[str, Any] = {"in_chans": batches.channels, "num_classes": len(batches.classes)}
        for name, value in arguments.items():
            given = recipe.model.arguments.get(name, value)
            if given != value:
                raise MultilinearError(f"model.arguments.{name} is {given}, but {recipe.data.name} has {value}")
        model = create(recipe.model.name, **{**arguments, **recipe.model.arguments})
        if not isinstance(model, MONet):
            raise MultilinearError(f"training takes the models of this library, got {recipe.model.name!r}")
        check_image_size(*batches.image_size, model.embed.stride)
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.cuda else model

    @property
    def checkpoint(self) -> Path:
        return self.out / "last.safetensors"

    def prepare(self, resume: bool) -> None:
        """Refuse to overwrite a run, or take up the one that is there."""
        if self.processes.is_main:
            for leftover in self.out.glob(".*.part"):  # of a write that a kill cut off
                leftover.unlink(missing_ok=True)
        self.processes.barrier()
        if self.checkpoint.exists() and not resume:
            raise MultilinearError(f"{self.out} holds a run already; continue it with --resume or choose another --out")
        if self.checkpoint.exists():
            state, header = read_checkpoint(self.checkpoint)
            self._check_same_recipe(header["recipe"])
            restore_state(self.step, state)
            self.position = Position(**header["position"])
            self.history = header["history"]
            self.step.loss_sum.fill_(self.position.loss_sum)
            self.step.steps_summed = self.position.step
            if self.processes.rank:  # the file has the main process's generator; the others need their own
                torch.manual_seed(hash((self.recipe.run.seed, self.processes.rank, *header["position"].values())))
        elif self.processes.is_main:
            text = yaml.safe_dump(self.recipe.as_dict(), sort_keys=False)
            write_atomically(self.out / "recipe.yaml", lambda part: part.write_text(text))

    def _check_same_recipe(self, saved: dict[str, Any]) -> None:
        for section, values in self.recipe.as_dict().items():
            for name, value in values.items():
                if saved.get(section, {}).get(name) != value:
                    old = saved.get(section, {}).get(name)
                    raise MultilinearError(
                        f"{self.out} was started with {section}.{name}={old!r}, not {value!r}; use the same recipe"
                    )

    def train(self) -> None:
        """From the current position to the end, or to where patience ends."""
        run, steps = self.recipe.run, self.batches.steps
        start = time.perf_counter() - self.position.seconds
        dashboards = Dashboards(self.out, self.recipe.as_dict()) if self.processes.is_main else None
        done = self.position.epoch * steps + self.position.step
        with progress_bar(self.console, run.epochs * steps, done) as bar:
            while self.position.epoch < run.epochs and not self._out_of_patience():
                began = time.perf_counter()
                first = self.position.step
                self._epoch(bar, start)
                loss = self._loss()  # waits for the device, so that the time is the epoch's
                took = time.perf_counter() - began
                row: Row = {
                    "epoch": self.position.epoch + 1,
                    "loss": loss,
                    "lr": self.share * self.recipe.optim.lr,
                    "images_per_second": round((steps - first) * run.batch_size / took, 1),
                    "epoch_seconds": round(took, 4),
                }
                self.position.epoch += 1
                self.position.step = 0
                row |= self._validate()
                self.position.seconds = time.perf_counter() - start
                self.history.append(row)
                bar.say(_summary(row))
                self._save_if_due()
                if self.processes.is_main:
                    write_history(self.out, self.history)
                    if dashboards is not None:
                        dashboards.add(row)
        if dashboards is not None:
            dashboards.close()

    def _epoch(self, bar: Bar, start: float) -> None:
        run = self.recipe.run
        self.model.train()
        for images, labels in self.batches.epoch(self.position.epoch, self.position.step):
            self.share = self._share()
            set_learning_rate(list(self.step.optimizers), self.share)
            if self.cuda and self.processes.world == 1 and self.first_step_seconds == 0:
                get_ready = self.step.capture if run.graph and run.accumulate == 1 else self.step.compile
                get_ready(images, labels)
            self.step(images, labels)
            self.position.step += 1
            bar.advance()
            if self.first_step_seconds == 0:
                if self.cuda:
                    torch.cuda.synchronize()
                self.first_step_seconds = time.perf_counter() - start
            if not self.cuda or self.position.step % CHECK_EVERY == 0:
                self._check_loss()
                self.batches.check(self.recipe.data.broken_limit)
            if run.save_every and self.position.step % run.save_every == 0 and self.position.step < self.batches.steps:
                self.position.seconds = time.perf_counter() - start
                self._save()

    def _share(self) -> float:
        steps = self.batches.steps
        here = self.position.epoch * steps + self.position.step
        return learning_rate(self.recipe.optim, here, self.recipe.run.epochs * steps, steps)

    def _check_loss(self) -> None:
        if not math.isfinite(self.step.loss_sum.item()):
            good = (
                f"the last good checkpoint is {self.checkpoint}"
                if self.checkpoint.exists()
                else "nothing was saved yet"
            )
            here = self.position.epoch * self.batches.steps + self.position.step
            raise MultilinearError(
                f"the loss is not finite at step {here} (epoch {self.position.epoch + 1}), learning rate "
                f"{self.share * self.recipe.optim.lr:.3g}; {good}; try a lower optim.lr or optim.clip"
            )

    def _loss(self) -> float:
        self._check_loss()
        return float(self.processes.mean(torch.tensor(self.step.mean_loss())).item())

    def _validate(self) -> Row:
        """Score the validation split when it is due, and keep the best weights."""
        run = self.recipe.run
        due = run.evaluate_every and (
            self.position.epoch % run.evaluate_every == 0 or self.position.epoch == run.epochs
        )
        if not due or not self.batches.has_validation:
            return {}
        with self.averaged(run.select != "last"):
            found = self.score("val")
            value = {"accuracy": found.top1, "auc": found.auc, "loss": -found.nll}[run.metric]
            if value > self.position.best:
                self.position.best, self.position.best_epoch = value, self.position.epoch
                if run.select == "best":
                    self.export(self.out / "best.safetensors")
        return {"val_accuracy": found.top1, "val_auc": found.auc, "val_loss": found.nll}

    def _out_of_patience(self) -> bool:
        waited = self.position.epoch - max(self.position.best_epoch, 0)
        return bool(self.recipe.run.patience) and waited > self.recipe.run.patience

    def score(self, split: str) -> Evaluation:
        """Judge the current weights. Compiled code would be compiled again for every batch size, so run it plain."""
        amp = self.cuda and self.recipe.run.precision == "bf16"
        with torch.compiler.set_stance("force_eager"):
            return self.batches.score(self.model, split, amp)

    def averaged(self, wanted: bool = True) -> "_Averaged":
        """The averaged weights in the model inside, its own again after."""
        return _Averaged(self.step.average if wanted else None)

    def collect(self) -> None:
        """Statistics of batch norms for the weights that are kept, where the recipe wants them.

        From batches augmented as in training: a polynomial of high degree is at home where it was trained, and with
        statistics of clean images it is elsewhere (CIFAR-10, 3 blocks: 81% instead of 84%).
        """
        if self.recipe.run.collect_statistics and any(isinstance(part, BatchNorm) for part in self.model.modules()):
            with torch.compiler.set_stance("force_eager"):
                collect_statistics(self.model, islice(self._augmented(), STATISTICS_BATCHES))

    def _augmented(self) -> Iterator[torch.Tensor]:
        for images, labels in self.batches.epoch(self.position.epoch, 0):
            yield augment_batch(images, labels, self.recipe.augment, self.step.mean, self.step.std).images

    def restore(self, path: Path) -> None:
        """Take the weights of an exported file."""
        exported = load(path).state_dict()
        for key, value in self.model.state_dict().items():
            assign(value, exported[key].to(self.device))

    def export(self, path: Path) -> None:
        """Write the current weights. Every process must call this."""
        model, batches = self.model, self.batches
        if self.recipe.run.fsdp and self.processes.world > 1:
            state = {key: whole(value).cpu() for key, value in model.state_dict().items()}
            model = MONet(**model.config)
            model.load_state_dict(state)
            model.pretrained_cfg = self.model.pretrained_cfg
        preprocessing = {
            "input_size": [batches.channels, *batches.image_size],
            "mean": list(batches.mean),
            "std": list(batches.std),
            "interpolation": "bicubic",
            "crop_pct": batches.crop,
        }
        if self.processes.is_main:
            save(model, path, labels=batches.classes, preprocessing=preprocessing)

    def _save_if_due(self) -> None:
        due = time.perf_counter() - self.saved_at >= self.recipe.run.save_seconds
        if self.processes.agree(due or self.position.epoch == self.recipe.run.epochs or self._out_of_patience()):
            self._save()

    def _save(self) -> None:
        self.saved_at = time.perf_counter()
        self.position.loss_sum = float(self.processes.mean(self.step.loss_sum).item())
        self._check_loss()
        state = gather_state(self.step)
        if self.processes.is_main:
            header = {"position": vars(self.position), "history": self.history, "recipe": self.recipe.as_dict()}
            write_checkpoint(self.checkpoint, state, header)
        self.processes.barrier()


class _Averaged:
    def __init__(self, average: Average | None) -> None:
        self.average = average
        self.backup: list[torch.Tensor] = []

    def __enter__(self) -> None:
        if self.average is not None:
            self.backup = [live.detach().clone() for live in self.average.live]
            for live, mean in zip(self.average.live, self.average.tensors, strict=True):
                live.detach().copy_(mean)

    def __exit__(self, *_: object) -> None:
        if self.average is not None:
            for live, old in zip(self.average.live, self.backup, strict=True):
                live.detach().copy_(old)


def _summary(row: Row) -> str:
    parts = [f"loss {row['loss']:.3f}", f"{row['images_per_second']:,.0f} images/s"]
    if "val_accuracy" in row:
        parts.insert(1, f"val {row['val_accuracy']:.2%}")
    return ", ".join(parts)
