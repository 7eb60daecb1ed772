"""Export to ONNX, with batch and image size left open."""

import warnings
from pathlib import Path

import torch
from torch import nn

from multilinear.analysis.graph import evaluation_mode, input_shape
from multilinear.errors import MultilinearError
from multilinear.files import write_atomically


def export_onnx(model: nn.Module, path: str | Path, input_size: int | tuple[int, ...] | None = None) -> Path:
    """Write `model` as one ONNX file with inputs `image` (batch, channels, height, width) and output `logits`.

    The batch size is free, and so are height and width: any that the patching divides.

    >>> import tempfile
    >>> from multilinear.models import create
    >>> export_onnx(create("monet_micro"), Path(tempfile.mkdtemp()) / "micro.onnx").name
    'micro.onnx'
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MultilinearError("ONNX export needs the extra: pip install 'multilinear[export]'") from error
    path = Path(path)
    channels, height, width = input_shape(model, input_size)
    embed = getattr(model, "embed", None)
    step = int(getattr(embed, "stride", 1))
    # an example of several patches with different sides, so that neither is taken for a constant
    example = torch.zeros(2, channels, height + 2 * step, width + 4 * step)
    batch, rows, columns = (torch.export.Dim(name) for name in ("batch", "rows", "columns"))
    shape = {0: batch, 2: step * rows, 3: step * columns}
    with evaluation_mode(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        program = torch.onnx.export(
            model, (example,), dynamo=True, verbose=False, dynamic_shapes=(shape,),
            input_names=["image"], output_names=["logits"],
        )  # fmt: skip
    if program is None:
        raise MultilinearError("the ONNX exporter returned nothing; this model cannot be exported")
    write_atomically(path, lambda part: program.save(part))
    return path
