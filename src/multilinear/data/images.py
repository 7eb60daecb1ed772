"""Open an image file that may be anything: broken, empty, 16-bit, CMYK, animated, transparent or huge."""

import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from multilinear.errors import MultilinearError

MAX_PIXELS = 100_000_000
MODES = {1: "L", 3: "RGB"}


def open_image(path: str | Path, channels: int = 3) -> Image.Image:
    """Return the first frame of `path`, upright, as grey (1 channel) or RGB (3).

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "grey.png"
    >>> Image.new("I;16", (4, 4), 65535).save(path)
    >>> open_image(path).getpixel((0, 0))
    (255, 255, 255)
    """
    path = Path(path)
    if channels not in MODES:
        raise MultilinearError(f"images have 1 or 3 channels, this model wants {channels}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata is not our user's concern
            with Image.open(path) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise MultilinearError(f"{path} has {image.width}x{image.height} pixels, over {MAX_PIXELS:,}")
                image.load()
                upright = ImageOps.exif_transpose(image) or image
                return _eight_bits(upright).convert(MODES[channels])
    except MultilinearError:
        raise
    except FileNotFoundError:
        raise MultilinearError(f"no image at {path}") from None
    except Exception as error:  # Pillow's decoders raise nearly everything on damaged files
        raise MultilinearError(f"{path} is not a readable image ({type(error).__name__}: {error})") from error


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit and float images down; Pillow's own conversion would clip them to white."""
    if image.mode.startswith("I;16") or image.mode == "I":
        return Image.fromarray((np.asarray(image, np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode == "F":
        values = np.nan_to_num(np.asarray(image, np.float64))
        return Image.fromarray((255 * np.clip(values / max(values.max(), 1e-12), 0, 1)).astype(np.uint8))
    if image.mode in ("P", "LA", "PA"):
        return image.convert("RGBA")
    return image
