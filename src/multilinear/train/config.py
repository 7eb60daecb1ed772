"""A run is one YAML file, and a YAML file is these dataclasses: every field in sight, with its default and checks."""

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from multilinear.data.augment import POLICIES
from multilinear.errors import MultilinearError, check_choice

FOLDER_POLICIES = ("none", "auto", "rand")


@dataclass
class ModelConfig:
    name: str = "monet_nano"
    arguments: dict[str, Any] = field(default_factory=dict)  # for the model's constructor: norm, drop_path_rate, ...


@dataclass
class DataConfig:
    name: str = "digits"  # a known data set, or "folder" for an image folder given with --data
    hold_out: int = 0  # training images kept for validation where the data set has no validation split
    image_size: int = 224  # image folders only
    workers: int = 4  # image folders only
    broken_limit: float = 0.5  # stop when more than this share of the files seen cannot be read


@dataclass
class AugmentConfig:
    crop: int = 0  # pixels of padding for random crops; image folders use random resized crops instead
    flip: bool = False
    policy: str = "none"
    operations: int = 2  # of the "rand" policy
    magnitude: float = 0.5  # of the "rand" policy, from 0 to 1
    erase: float = 0.0
    mixup: float = 0.0  # alpha
    cutmix: float = 0.0  # alpha
    mix_probability: float = 1.0


@dataclass
class OptimConfig:
    name: str = "adamw"
    lr: float = 1e-3
    warmup_lr: float = 0.0
    min_lr: float = 1e-5
    warmup_epochs: float = 5.0
    weight_decay: float = 0.05
    muon_lr: float = 0.02  # of the matrices, with name "muon"
    clip: float = 1.0  # gradient norm; 0 for none
    smoothing: float = 0.1
    balance: bool = False  # all classes count alike, however rare: log-frequencies are added to the logits in training
    range_penalty: float = 0.0  # on the mean fourth power of all products: polynomials with short tails
    ema: float = 0.0  # decay of averaged weights; 0 for none


@dataclass
class RunConfig:
    epochs: int = 100
    batch_size: int = 128  # over all processes and accumulation steps together
    accumulate: int = 1
    precision: str = "bf16"  # on a GPU, while a CPU computes in float32; or "float32", or "bf16-always"
    compile: str = "gpu"  # compile the blocks there, "always" or "never"
    graph: bool = True  # on one GPU: capture the whole step, augmentation included
    fsdp: bool = False
    seed: int = 0
    evaluate_every: int = 1  # epochs; 0 for only at the end
    save_every: int = 0  # steps between checkpoints inside an epoch; 0 for none
    save_seconds: float = 0.0  # at ends of epochs: at least this long after the last one, and always at the very end
    select: str = "last"  # "last", "ema", or "best" on the validation split
    metric: str = "accuracy"  # what "best" and patience look at; or "auc" or "loss"
    patience: int = 0  # epochs without a better validation result before stopping; 0 for never
    collect_statistics: bool = True  # of batch norms, for the weights that are kept


@dataclass
class Recipe:
    """A whole run.

    >>> Recipe().run.epochs
    100
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def check(self) -> None:
        """Raise one clear line for the first value that makes no sense."""
        folder = self.data.name == "folder"
        check_choice("augment.policy", self.augment.policy, FOLDER_POLICIES if folder else POLICIES)
        check_choice("optim.name", self.optim.name, ("adamw", "muon"))
        check_choice("run.precision", self.run.precision, ("bf16", "bf16-always", "float32"))
        check_choice("run.compile", self.run.compile, ("gpu", "always", "never"))
        check_choice("run.select", self.run.select, ("last", "ema", "best"))
        check_choice("run.metric", self.run.metric, ("accuracy", "auc", "loss"))
        for name, value in (("run.epochs", self.run.epochs), ("run.batch_size", self.run.batch_size),
                            ("run.accumulate", self.run.accumulate), ("optim.lr", self.optim.lr)):  # fmt: skip
            if value <= 0:
                raise MultilinearError(f"{name} must be positive, got {value}")
        for name, share in (("augment.erase", self.augment.erase), ("optim.ema", self.optim.ema),
                            ("optim.smoothing", self.optim.smoothing), ("augment.magnitude", self.augment.magnitude),
                            ("augment.mix_probability", self.augment.mix_probability),
                            ("data.broken_limit", self.data.broken_limit)):  # fmt: skip
            if not 0 <= share <= 1:
                raise MultilinearError(f"{name} must be between 0 and 1, got {share}")
        if self.run.batch_size % self.run.accumulate:
            raise MultilinearError(
                f"run.batch_size {self.run.batch_size} is not divisible by run.accumulate {self.run.accumulate}"
            )
        if (self.run.select == "best" or self.run.patience) and self.run.evaluate_every < 1:
            raise MultilinearError("run.select 'best' and run.patience need run.evaluate_every of 1 or more")
        if self.run.select == "ema" and self.optim.ema == 0:
            raise MultilinearError("run.select is 'ema' but optim.ema is 0; set optim.ema to a decay such as 0.999")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def find_recipe(name: str) -> Path:
    """The path of a recipe: a file, or the name of one that comes with the library.

    >>> find_recipe("digits").name
    'digits.yaml'
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise MultilinearError(f"no recipe at {path}")
        return path
    known = {file.stem: file for folder in _FOLDERS for file in sorted(folder.glob("*.yaml"))}
    return known[check_choice("recipe", name, known)]


# beside the package in an installed wheel, at the root of a checkout
_FOLDERS = (Path(__file__).parents[1] / "recipes", Path(__file__).parents[3] / "recipes")


def load_recipe(source: str | Path | dict[str, Any] | Recipe, changes: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe, with `changes` such as `"optim.lr=0.01"` on top.

    >>> load_recipe({"run": {"epochs": 3}}, ["optim.lr=1e-2"]).optim.lr
    0.01
    """
    values: Any = source.as_dict() if isinstance(source, Recipe) else source
    where = "recipe"
    if isinstance(source, str | Path):
        path = find_recipe(str(source))
        where = path.name
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
            raise MultilinearError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    recipe: Recipe = _build(Recipe, values, where, "")
    for change in changes:
        _override(recipe, change)
    recipe.check()
    return recipe


def _override(recipe: Recipe, change: str) -> None:
    key, equals, text = change.partition("=")
    section, dot, name = key.partition(".")
    if not equals or not dot:
        raise MultilinearError(f"a change is written section.field=value, such as optim.lr=0.01; got {change!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise MultilinearError(f"cannot read the value of {change!r}") from error
    check_choice("section", section, [item.name for item in dataclasses.fields(recipe)])
    part = getattr(recipe, section)
    if section == "model" and name.startswith("arguments."):
        part.arguments[name.removeprefix("arguments.")] = value
        return
    updated = _build(type(part), {**dataclasses.asdict(part), name: value}, "command line", section)
    setattr(recipe, section, updated)


def _build(kind: Any, values: Any, where: str, prefix: str) -> Any:
    """Turn a mapping into the dataclass `kind`, checking names and types."""
    if not isinstance(values, dict):
        raise MultilinearError(f"{where}: {prefix or 'the recipe'} must be a mapping, got {type(values).__name__}")
    hints = typing.get_type_hints(kind)
    arguments = {}
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if name not in hints:
            close = difflib.get_close_matches(str(name), hints, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise MultilinearError(f"{where}: unknown field {path!r}{hint}; known: {', '.join(hints)}")
        expected = hints[name]
        if dataclasses.is_dataclass(expected):
            arguments[name] = _build(expected, value, where, path)
        else:
            arguments[name] = _convert(value, expected, where, path)
    return kind(**arguments)


def _convert(value: Any, expected: Any, where: str, path: str) -> Any:
    if isinstance(expected, types.UnionType):
        if value is None:
            return None
        expected = next(option for option in typing.get_args(expected) if option is not types.NoneType)
    if expected is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 1e-3 as text
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    base = typing.get_origin(expected) or expected
    if not isinstance(value, base) or (base is int and isinstance(value, bool)):
        names = {float: "a number", int: "a whole number", str: "text", bool: "true or false", dict: "a mapping"}
        raise MultilinearError(f"{where}: {path} must be {names.get(base, base.__name__)}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise MultilinearError(f"{where}: {path} must be finite, got {value}")
    return value
