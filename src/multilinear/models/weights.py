"""Models by name, and their weights on disk: safetensors with a JSON header that rebuilds the network.

The header is the safetensors metadata entry `multilinear`. Nothing here unpickles, and nothing of a file is allocated
before the names and shapes in it fit the network that its header describes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from timm.models._hub import save_for_hf
from torch import Tensor, nn

from multilinear.errors import MultilinearError
from multilinear.files import write_atomically
from multilinear.layers import fold, is_folded
from multilinear.models.monet import MONet

FORMAT_VERSION = 1


def names() -> list[str]:
    """The models of this library, as timm knows them.

    >>> "monet_ms_t" in names()
    True
    """
    return [name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith("multilinear.")]


def create(name: str, **arguments: Any) -> nn.Module:
    """Build one of our models, or any other that timm knows, by name.

    >>> create("monet_micro", in_chans=1, norm="batch").num_classes
    10
    """
    if not timm.is_model(name):
        raise MultilinearError(f"unknown model {name!r}; known: {', '.join(names())}, and every model of timm")
    own = name in names()
    if own and "num_classes" not in arguments:
        arguments["num_classes"] = timm.get_pretrained_cfg(name).num_classes
    try:
        return timm.create_model(name, **arguments)  # type: ignore[no-any-return]
    except TypeError as error:
        raise MultilinearError(f"model {name!r} does not take these arguments: {error}") from error


def save(
    model: nn.Module,
    path: str | Path,
    *,
    labels: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
) -> Path:
    """Write `model` so that `load` rebuilds it.

    A path that ends in `.safetensors` gives one file. Any other path is a folder in the layout of timm's hub: after an
    upload `timm.create_model("hf-hub:you/name")` loads it, and before it `"local-dir:path"` does.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "net.safetensors"
    >>> load(save(create("monet_micro"), path)).num_classes
    10
    """
    path = Path(path)
    if not isinstance(model, MONet):
        raise MultilinearError(f"save takes a MONet, got {type(model).__name__}")
    cfg = getattr(model, "pretrained_cfg", {})
    if path.suffix != ".safetensors":
        if is_folded(model):
            raise MultilinearError("a folded model has no timm layout; save it as one .safetensors file")
        arguments = {key: value for key, value in model.config.items() if key != "num_classes"}
        named = {} if labels is None else {"label_names": list(labels)}
        described = model.pretrained_cfg
        model.pretrained_cfg = {**described, **(preprocessing or {})}  # timm writes what it finds there
        try:
            save_for_hf(model, str(path), model_config=named, model_args=arguments, safe_serialization=True)
        except OSError as error:
            raise MultilinearError(f"could not write {path}: {error}") from error
        finally:
            model.pretrained_cfg = described
        return path
    header = {
        "version": FORMAT_VERSION,
        "architecture": cfg.get("architecture") or "monet_t",
        "arguments": model.config,
        "folded": is_folded(model),
        "labels": None if labels is None else list(labels),
        "preprocessing": dict(preprocessing or {key: cfg[key] for key in _PREPROCESSING if key in cfg}),
    }
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    write_atomically(path, lambda part: save_file(state, part, {"multilinear": json.dumps(header)}))
    return path


_PREPROCESSING = ("input_size", "mean", "std", "interpolation", "crop_pct")


def read_header(path: str | Path) -> dict[str, Any]:
    """What a weights file says of itself, checked: version, architecture, arguments, folded, labels, preprocessing.

    >>> import tempfile
    >>> path = save(create("monet_micro"), Path(tempfile.mkdtemp()) / "net.safetensors")
    >>> read_header(path)["architecture"]
    'monet_micro'
    """
    path = Path(path)
    _refuse_pickle(path)
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("multilinear")
    except (SafetensorError, OSError) as error:
        raise MultilinearError(f"{path} is not a readable safetensors file, perhaps truncated: {error}") from error
    if text is None:
        raise MultilinearError(f"{path} has no multilinear header; load it into a model: load(path, model)")
    try:
        header = json.loads(text)
        version, architecture, arguments = header["version"], header["architecture"], header["arguments"]
    except (ValueError, KeyError, TypeError) as error:
        raise MultilinearError(f"{path} has a damaged multilinear header ({error!r}); save the model again") from error
    if version != FORMAT_VERSION:
        raise MultilinearError(f"{path} has format version {version}, this release reads {FORMAT_VERSION}; upgrade")
    if architecture not in names() or not isinstance(arguments, dict):
        raise MultilinearError(f"{path} holds {architecture!r}, which is none of: {', '.join(names())}")
    return header  # type: ignore[no-any-return]


def load(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Read a weights file: rebuild its network from the header, or fill the `model` given. In evaluation mode.

    >>> import tempfile
    >>> path = save(create("monet_micro"), Path(tempfile.mkdtemp()) / "net.safetensors")
    >>> load(path).training
    False
    """
    path = Path(path)
    if not path.is_file():
        raise MultilinearError(f"no weights file at {path}")
    if model is None:
        header = read_header(path)
        with torch.device("meta"):
            _check_fit(path, _rebuild(header, path).state_dict())
        model = _rebuild(header, path)
    _refuse_pickle(path)
    _check_fit(path, model.state_dict())
    model.load_state_dict(load_file(path))
    return model.eval()


def _rebuild(header: Mapping[str, Any], path: Path) -> nn.Module:
    """The network that a header describes. Whatever the header says, this ends soon and in one clear line."""
    try:
        with safe_open(path, "pt") as file:
            tensors = len(list(file.keys()))
        if sum(header["arguments"].get("depths", [])) > tensors:  # each block has several
            raise MultilinearError("it asks for more blocks than the file has tensors")
        model = create(header["architecture"], **header["arguments"])
        return fold(model) if header.get("folded") else model
    except Exception as error:  # arguments of a wrong type or size fail anywhere inside
        raise MultilinearError(f"{path} has a header that describes no model of ours: {error}") from error


def _check_fit(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Compare names and shapes without reading any tensor."""
    try:
        with safe_open(path, "pt") as file:
            found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError) as error:
        raise MultilinearError(f"{path} is not a readable safetensors file, perhaps truncated: {error}") from error
    for key, tensor in expected.items():
        if key not in found:
            raise MultilinearError(f"{path} is a checkpoint of another model: it has no {key!r}")
        if found[key] != tuple(tensor.shape):
            raise MultilinearError(
                f"{path} is a checkpoint of another model: {key!r} has shape {found[key]}, not {tuple(tensor.shape)}"
            )
    surplus = next((key for key in found if key not in expected), None)
    if surplus is not None:
        raise MultilinearError(f"{path} is a checkpoint of another model: it also holds {surplus!r}")


def _refuse_pickle(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(2)
    except OSError as error:
        raise MultilinearError(f"cannot read {path}: {error.strerror}") from error
    if start in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise MultilinearError(
            f"{path} is a pickle, which could run code; convert it to safetensors where you trust it"
        )
