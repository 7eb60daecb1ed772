"""The command `multilinear`: parse, call the library, print."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from tyro.conf import Positional, arg

from multilinear import analysis, cli_encrypt, cli_ode, models
from multilinear.errors import MultilinearError
from multilinear.layers import fold
from multilinear.optimize import optimize

console = Console()

ModelName = Positional[Annotated[str, arg(metavar="MODEL", help="A model's name, or a .safetensors file.")]]
Json = Annotated[bool, arg(help="Print JSON for machines.")]
ImageSize = Annotated[tuple[int, ...] | None, arg(help="Image height and width, or one side.")]


def list_models(json: Json = False) -> None:
    """List the models of this library."""
    rows: list[dict[str, Any]] = []
    for name in models.names():
        with torch.device("meta"):
            model = models.create(name).eval()
            assert isinstance(model, models.MONet)
            config, shape = model.config, model.pretrained_cfg["input_size"]
            image = torch.zeros(1, *shape)
        with FlopCounterMode(display=False) as counter:
            model(image)
        rows.append(
            {
                "model": name,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "macs": counter.get_total_flops() // 2,
                "widths": config["widths"],
                "blocks": config["depths"],
                "image": shape[-1],
                "degree": model.degree,
            }
        )
    if json:
        return _print_json(rows)
    table = Table(
        "model", "params", "MACs", "widths", "blocks", "side", "degree", box=None, padding=(0, 1), pad_edge=False
    )
    for row in rows:
        sizes = f"{row['parameters'] / 1e6:.3f}", f"{row['macs'] / 1e9:.3f}"
        shape = _list(row["widths"]), _list(row["blocks"]), str(row["image"])
        table.add_row(row["model"], *sizes, *shape, analysis.degree_text(row["degree"]))
    console.print(table)
    console.print("Params in millions, MACs in billions at this side in pixels; any that fits works.")
    console.print("Degree: as a polynomial, with norm batch or affine.")
    return None


def info(
    model: ModelName,
    norm: Annotated[str | None, arg(help="layer, batch or affine.")] = None,
    image_size: ImageSize = None,
    depth: Annotated[int, arg(help="How many levels of modules to show.")] = 2,
    json: Json = False,
) -> None:
    """Show what a model costs: parameters, multiply-accumulates and products, by module."""
    net = _model(model, norm)
    found = analysis.cost(net, _input_size(net, image_size))
    if json:
        return _print_json({"model": model, **found.as_dict()})
    table = Table("module", "parameters", "MACs", "products", title=f"{model}: one image")
    for name, part in found.by_module.items():
        if name.count(".") < depth and (part.parameters or part.macs):
            table.add_row(name or "everything", f"{part.parameters:,}", f"{part.macs:,}", f"{part.products:,}")
    console.print(table)
    if found.paper is not None:
        console.print(
            f"the paper's closed formulas: {_millions(found.paper.parameters)} parameters, "
            f"{found.paper.flops / 1e9:.3f} G multiplications (norms left out)"
        )
    return None


def audit(
    model: ModelName,
    norm: Annotated[str | None, arg(help="layer, batch or affine.")] = None,
    folded: Annotated[bool, arg(name="fold", help="Fold the model first.")] = False,
    image_size: ImageSize = None,
    json: Json = False,
) -> None:
    """Say whether a model is a polynomial at inference, of which degree, and if not, what stands in the way."""
    net = _model(model, norm)
    if folded:
        net = fold(net)
    found = analysis.audit(net, _input_size(net, image_size))
    if json:
        return _print_json({"model": model, **found.as_dict()})
    console.print(f"[bold]{model}[/bold] is {found}")
    if found.obstacles:
        table = Table("operation", "module", "type", "times", title="not polynomial")
        for obstacle in found.obstacles:
            table.add_row(obstacle.operation, obstacle.module, obstacle.module_type, str(obstacle.times))
        console.print(table)
    return None


def predict(
    images: Positional[tuple[Path, ...]],
    weights: Path,
    top: Annotated[int, arg(help="How many classes to show.")] = 3,
    json: Json = False,
) -> None:
    """Classify image files with saved weights. A file that cannot be read is named and the others go on."""
    from multilinear.evaluate import Predictor

    if not images:
        raise MultilinearError("give one or more image files")
    predictor = Predictor(weights)
    found, broken = [], []
    # on standard error, so that what is printed stays readable by machines
    for path in track(images, "classifying", console=Console(stderr=True), disable=json, transient=True):
        try:
            found.append(predictor(path, top))
        except MultilinearError as error:
            broken.append(str(error))
    if json:
        _print_json({"predictions": [vars(prediction) for prediction in found], "errors": broken})
    else:
        table = Table(Column("image", overflow="fold"), *(f"{i + 1}." for i in range(min(top, predictor.classes))))
        for prediction in found:
            pairs = zip(prediction.labels, prediction.probabilities, strict=True)
            table.add_row(prediction.image, *(f"{label} {share:.1%}" for label, share in pairs))
        if found:
            console.print(table)
        for line in broken:
            _print_error(line)
    if broken:
        sys.exit(1)


def export(
    model: ModelName,
    out: Positional[Annotated[Path, arg(metavar="OUT.onnx")]],
    norm: Annotated[str | None, arg(help="layer, batch or affine.")] = None,
    folded: Annotated[bool, arg(name="fold", help="Fold the model first.")] = False,
) -> None:
    """Write a model as ONNX with free batch and image size."""
    from multilinear.export import export_onnx

    if out.suffix != ".onnx":
        raise MultilinearError(f"the output must end in .onnx, got {out}")
    net = _model(model, norm)
    path = export_onnx(fold(net) if folded else net, out)
    console.print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")


def train(
    recipe: Positional[Annotated[str, arg(metavar="RECIPE", help="A YAML file, or the name of a known recipe.")]],
    changes: Annotated[tuple[str, ...], arg(name="set", help="Fields to change, such as optim.lr=0.01.")] = (),
    out: Annotated[Path | None, arg(help="The run's folder; runs/<recipe>-seed<seed> if not given.")] = None,
    data: Annotated[Path | None, arg(help="Folder that holds the data; else it is downloaded and cached.")] = None,
    resume: Annotated[bool, arg(help="Go on from the last checkpoint, if there is one.")] = False,
    device: Annotated[str | None, arg(help="cpu or cuda; a GPU is taken where there is one.")] = None,
    json: Json = False,
) -> None:
    """Train a network as a recipe says; alone, or under torchrun with `-m multilinear train ...`."""
    from multilinear.train import train as run

    shown = None if json else console
    found = run(recipe, out=out, data=data, resume=resume, changes=changes, device=device, console=shown)
    if json:
        numbers = {"top1": found.test.top1, "auc": found.test.auc, "nll": found.test.nll, "seconds": found.seconds}
        return _print_json({"folder": str(found.folder), "weights": str(found.weights), found.tested_on: numbers})
    if int(os.environ.get("RANK", "0")) == 0:
        console.print(f"{found.tested_on}: {found.test}", soft_wrap=True)
        console.print(f"report: {found.report}\nweights: {found.weights}", soft_wrap=True)
    return None


def evaluate(
    weights: Positional[Annotated[Path, arg(metavar="WEIGHTS.safetensors")]],
    dataset: Positional[Annotated[str, arg(metavar="DATASET", help="The name of an image set.")]],
    folder: Annotated[Path | None, arg(name="data", help="Folder that holds the set; else the cache.")] = None,
    split: Annotated[str, arg(help="train, val or test.")] = "test",
    tta: Annotated[bool, arg(help="Also judge each image together with its mirror image.")] = False,
    speed: Annotated[bool, arg(help="Also time inference at batch sizes 1 and 256.")] = False,
    fast: Annotated[bool, arg(help="Judge, and time, what `multilinear.optimize` makes of the network.")] = False,
    batch_size: int = 256,
    json: Json = False,
    report: Annotated[Path | None, arg(metavar="OUT.html", help="Write a page with the numbers and plots.")] = None,
) -> None:
    """Judge saved weights on an image set: accuracy, AUC, calibration and, when asked, speed. With --fast as they would
    be deployed: folded, in 16 bits where these are faster, in the best runtime here."""
    from multilinear import evaluate as judge
    from multilinear.data import load_dataset
    from multilinear.errors import check_choice

    if report is not None and report.suffix != ".html":
        raise MultilinearError(f"the report must end in .html, got {report}")
    header, model = models.read_header(weights), models.load(weights)
    data = load_dataset(dataset, folder)
    part = data.splits()[check_choice("split", split, data.splits())]
    preprocessing = header.get("preprocessing") or {}
    mean, std = (preprocessing.get(key) or [0.5] * data.channels for key in ("mean", "std"))
    device, name, runtime = "cuda" if torch.cuda.is_available() else "cpu", header["architecture"], {}
    if fast:
        model = optimize(model.to(device))
        runtime = {"backend": model.backend, "dtype": str(model.dtype).removeprefix("torch.")}
        name = f"{name} ({', '.join(runtime.values())})"
    found = judge.evaluate(
        model, part.images, part.labels,
        mean=mean, std=std, batch_size=batch_size, device=device, flip=tta, progress=not json,
    )  # fmt: skip
    speeds = judge.measure_speed(model, (data.channels, *data.image_size), device=device) if speed else []
    if report is not None:
        classes = data.classes if data.num_classes == len(found.per_class) else None
        title = f"{name} on the {split} split of {data.name}"
        judge.write_report(found, report, title, classes, part.images, speeds)
    if json:
        timed = {"speed": [each.as_dict() for each in speeds]} if speeds else {}
        known = {"weights": str(weights), "data": data.name, "split": split, **runtime}
        return _print_json({**known, **found.as_dict(), **timed})
    console.print(f"[bold]{name}[/bold] on {split} of {data.name}: {found}", soft_wrap=True)
    for each in speeds:
        console.print(str(each), soft_wrap=True)
    if report is not None:
        console.print(f"report: {report}")
    return None


def demo(
    out: Annotated[Path, arg(help="Folder for the report, the weights and sample images.")] = Path("demo"),
    epochs: Annotated[int, arg(help="Passes over the training set.")] = 60,
    seed: int = 0,
) -> None:
    """Train a small polynomial network on real handwritten digits and show what it is."""
    from multilinear.demo import run_demo

    run_demo(out, epochs=epochs, seed=seed, console=console)


def encrypt() -> None:
    """Classify images that the server never sees: compile, plan, keygen, encrypt, run, serve, decrypt, demo."""
    raise MultilinearError(f"say what to do: multilinear encrypt {'|'.join(cli_encrypt.COMMANDS)}")


DESCRIPTION = "Train, read and encrypt networks of additions and multiplications."
COMMANDS: dict[str, Callable[..., None]] = {
    "models": list_models,
    "info": info,
    "audit": audit,
    "train": train,
    "evaluate": evaluate,
    "predict": predict,
    "export": export,
    "discover": cli_ode.discover,
    "encrypt": encrypt,
    "demo": demo,
    "lotka-volterra": cli_ode.lotka_volterra,
    "node-comparison": cli_ode.node_comparison,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input ends with one line on standard error and exit status 2."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    commands, prog, description = COMMANDS, "multilinear", DESCRIPTION
    if given[:1] == ["encrypt"] and len(given) > 1:
        commands, prog, given = cli_encrypt.COMMANDS, "multilinear encrypt", given[1:]
        description = str(encrypt.__doc__)
    try:
        tyro.extras.subcommand_cli_from_dict(commands, prog=prog, description=description, args=given)
    except MultilinearError as error:
        _print_error(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        _print_error("stopped")
        sys.exit(130)


def _model(name: str, norm: str | None) -> nn.Module:
    if name.endswith(".safetensors"):
        if norm is not None:
            raise MultilinearError("--norm is fixed by the weights; leave it out")
        return models.load(Path(name))
    return models.create(name, **({} if norm is None else {"norm": norm}))


def _input_size(net: nn.Module, sides: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if sides is None:
        return None
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise MultilinearError(f"--image-size takes one side or height and width, got {sides}")
    channels = analysis.input_shape(net, sides[0])[0]
    return channels, sides[0], sides[-1]


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def _print_error(text: str) -> None:
    Console(stderr=True).print(f"[red]error:[/red] {escape(text)}", highlight=False, soft_wrap=True)


def _millions(count: float) -> str:
    return f"{count / 1e6:.3f} M"


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
