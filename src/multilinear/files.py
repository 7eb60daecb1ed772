"""Writing files so that a crash, a kill or a full disk never costs what was there before."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from multilinear.errors import MultilinearError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place: never half a file, never the old one lost.

    >>> folder = Path(tempfile.mkdtemp())
    >>> write_atomically(folder / "a.txt", lambda part: part.write_text("done"))
    >>> (folder / "a.txt").read_text()
    'done'
    """
    part: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        part = Path(name)
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.chmod(0o644)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise MultilinearError(f"could not write {path}: {error}; nothing that was there before is lost") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
