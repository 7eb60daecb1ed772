"""The idx files in which MNIST and Fashion-MNIST are published."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from multilinear.data.arrays import MAX_BYTES, ArrayData, Split
from multilinear.errors import MultilinearError

_UNSIGNED_BYTE = 8
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def read_idx(path: str | Path, dimensions: int) -> np.ndarray:
    """Read one idx file of bytes, plain or .gz, that must have `dimensions` dimensions.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "labels-idx1-ubyte"
    >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
    >>> read_idx(path, 1).tolist()
    [7, 2, 1]
    """
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * dimensions)
            magic = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
            if head[:4] != magic or len(head) < 4 + 4 * dimensions:
                raise MultilinearError(
                    f"{path} starts with {head[:4].hex() or 'nothing'}, not {magic.hex()}; it is not "
                    f"an idx file of bytes with {dimensions} dimension(s), get it again"
                )
            shape = tuple(int(side) for side in np.frombuffer(head[4:], ">u4"))
            size = math.prod(shape)
            if size > MAX_BYTES:
                raise MultilinearError(f"{path} declares {size:,} bytes, over {MAX_BYTES:,}")
            body = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise MultilinearError(f"{path} cannot be read ({type(error).__name__}: {error}); get it again") from error
    if len(body) != size:
        more = "more" if len(body) > size else f"{len(body):,}"
        raise MultilinearError(f"{path} declares {size:,} values but holds {more}; get it again")
    return np.frombuffer(body, np.uint8).reshape(shape)


def find_idx(folder: Path) -> dict[str, Path] | None:
    """The four files of an MNIST-like set in `folder`, .gz or plain; None if there are none of them.

    >>> find_idx(Path("nowhere")) is None
    True
    """
    names = [name for pair in _FILES.values() for name in pair]
    # some mirrors write train-images.idx3-ubyte
    spellings = {name: [name, name.replace("-idx", ".idx")] for name in names}
    found = {
        name: path
        for name, options in spellings.items()
        for path in (folder / f"{option}{ending}" for option in reversed(options) for ending in (".gz", ""))
        if path.is_file()
    }
    if not found:
        return None
    missing = [name for name in names if name not in found]
    if missing:
        raise MultilinearError(f"{folder} lacks {', '.join(missing)} (plain or .gz); put all four idx files there")
    return found


def load_idx(name: str, files: dict[str, Path], classes: list[str]) -> ArrayData:
    """The set made of the four `files` that `find_idx` found.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for part in ("train", "t10k"):
    ...     _ = (folder / f"{part}-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3, *[0, 0, 0, 1] * 3, 255]))
    ...     _ = (folder / f"{part}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 1]))
    >>> load_idx("toy", find_idx(folder), ["cat", "dog"]).train.labels
    array([1])
    """
    splits = {
        part: Split(read_idx(files[images], 3)[..., None], read_idx(files[labels], 1).astype(np.int64))
        for part, (images, labels) in _FILES.items()
    }
    return ArrayData(name, splits["train"], None, splits["test"], classes)
