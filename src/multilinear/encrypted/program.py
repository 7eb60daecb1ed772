"""A program: a network in whole numbers, with everything that its two halves need to know.

`Public` is what a client has: sizes, preprocessing, labels, encryption parameters, and no weights. `Program` adds the
weights for the server. Both are files of documented form (docs/encryption.md), and each knows the other by its id.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from multilinear.encrypted.network import cut_patches
from multilinear.encrypted.packing import PACKINGS, Packing
from multilinear.encrypted.parameters import Parameters
from multilinear.encrypted.residues import check_rows
from multilinear.errors import MultilinearError, check_choice
from multilinear.files import write_atomically

if TYPE_CHECKING:
    from multilinear.encrypted.plan import Plan

FORMAT_VERSION = 1
LARGEST_OFFSET = 2**20
MOST_HEADER = 1_000_000  # bytes; a real one has some thousands
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Public:
    """What both halves know."""

    program: str  # id of the whole program, a hash of everything in it
    parameters: Parameters
    packing: Packing
    image: tuple[int, int, int]  # channels, height, width
    patch: int
    overlap: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: tuple[str, ...]
    units: tuple[float, ...]  # what one unit of each output is worth in logits
    error: float  # of a logit, predicted, one standard deviation

    @property
    def inputs(self) -> int:
        """Values of one patch: ciphertexts of a batch, for each place."""
        return int(self.image[0] * (self.patch + self.overlap) ** 2)

    def prepare(self, images: NDArray[np.uint8]) -> Array:
        """Check and normalise images (B, H, W, C) or (B, H, W), and cut them: (B, high, wide, values)."""
        channels, height, width = self.image
        if images.dtype != np.uint8:
            raise MultilinearError(f"images are uint8 from 0 to 255, got {images.dtype}")
        if images.ndim == 3 and channels == 1:
            images = images[..., None]
        if images.ndim != 4 or images.shape[1:] != (height, width, channels):
            raise MultilinearError(f"this program takes images (N, {height}, {width}, {channels}), got {images.shape}")
        normalised = (images.astype(np.float64) / 255 - np.array(self.mean)) / np.array(self.std)
        return cut_patches(normalised.transpose(0, 3, 1, 2), self.patch, self.overlap)

    def as_dict(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        return {**found, "packing": self.packing.kind, "grid": list(self.packing.grid)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Public":
        """Rebuild from a file's header, checking all that is used; in particular the security."""
        try:
            parameters = Parameters(*(int(values["parameters"][name]) for name in ("degree", "depth", "scale_bits")))
            parameters.check()
            high, wide = (int(side) for side in values["grid"])
            channels, height, width = (int(side) for side in values["image"])
            patch, overlap = int(values["patch"]), int(values["overlap"])
            sizes = (high, wide, channels, height, width, patch)
            if (
                overlap % 2
                or min(sizes) < 1
                or max(*sizes, overlap) > 1024
                or overlap < 0
                or (high * patch, wide * patch) != (height, width)
            ):
                raise ValueError("sizes do not fit together")
            check_choice("packing", values["packing"], PACKINGS)
            packing = Packing.make(values["packing"], (high, wide), parameters)
            if packing.images < 1:
                raise ValueError("the grid is larger than the ring")
            mean, std, units = (tuple(float(x) for x in values[key]) for key in ("mean", "std", "units"))
            labels = tuple(str(label) for label in values["labels"])
            if (
                not len(mean) == len(std) == channels
                or len(units) != len(labels)
                or not np.isfinite([*mean, *std, *units]).all()
            ):
                raise ValueError("preprocessing or labels do not fit")
            error = float(values["error"])
            if not 0 <= error < 1e6 or max(map(abs, mean)) > 1e3 or not 1e-6 <= min(std) <= max(std) <= 1e3:
                raise ValueError("preprocessing or error out of range")
            program = str(values["program"])
            if len(bytes.fromhex(program)) != 32:
                raise ValueError("the id is no hash")
            return cls(
                program, parameters, packing, (channels, height, width), patch, overlap, mean, std, labels, units,
                error,
            )  # fmt: skip
        except MultilinearError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise MultilinearError(f"damaged program header ({error}); compile it again") from error

    def save(self, path: str | Path) -> Path:
        """Write the client's file: JSON, no weights."""
        text = json.dumps({"format": "multilinear-client", "version": FORMAT_VERSION, **self.as_dict()}, indent=1)
        write_atomically(Path(path), lambda part: part.write_text(text, encoding="utf-8"))
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Public":
        """Read a client's file."""
        path = Path(path)
        try:
            if path.stat().st_size > MOST_HEADER:
                raise MultilinearError(f"{path} is too large for a client's file")
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, MultilinearError):
                raise
            raise MultilinearError(f"{path} is not a readable client file: {error}") from error
        if not isinstance(values, dict) or values.get("format") != "multilinear-client":
            raise MultilinearError(f"{path} is not a client file; `multilinear encrypt compile` writes one")
        if values.get("version") != FORMAT_VERSION:
            raise MultilinearError(f"{path} has version {values.get('version')}, this release reads {FORMAT_VERSION}")
        return cls.from_dict(values)


@dataclass(frozen=True)
class Layer:
    """One product in whole numbers: `(shift(first·v) + offset) ∘ (second·v) · scale / 2**54`."""

    first: Array  # (rank, inputs), whole numbers
    second: Array
    offset: Array  # (rank,), times the mask
    shifts: bool
    units: Array  # (rank,): what one unit of the product is worth in the network's own numbers
    errors: Array  # (rank,): predicted standard deviation of the product's error, in its units
    largest: float  # product on the calibration images, in its units
    typical: float  # root mean square, in its units

    @property
    def rank(self) -> int:
        return len(self.offset)


@dataclass(frozen=True)
class Program:
    """The server's half: the public part, and the weights."""

    public: Public
    layers: tuple[Layer, ...]
    head: Array  # (classes, inputs), whole numbers

    def plan(self) -> "Plan":
        """What a run will take: security, sizes, memory, time and error. Times a few operations here."""
        from multilinear.encrypted.plan import plan

        return plan(self)

    def simulate(self, images: NDArray[np.uint8]) -> Array:
        """Logits of the program in whole numbers without encryption, which an encrypted run gives up to its noise."""
        from multilinear.encrypted.simulate import simulate

        return simulate(self, images)

    def save(self, path: str | Path) -> Path:
        """Write the server's file: safetensors with 16-bit weights and a JSON header."""
        tensors: dict[str, NDArray[Any]] = {"head": self.head.astype(np.int16)}
        layers = []
        for i, layer in enumerate(self.layers):
            tensors |= {f"{i}.{name}": getattr(layer, name).astype(np.int16) for name in ("first", "second")}
            tensors |= {f"{i}.offset": layer.offset.astype(np.int32)}
            tensors |= {f"{i}.{name}": getattr(layer, name) for name in ("units", "errors")}
            layers.append({"shifts": layer.shifts, "largest": layer.largest, "typical": layer.typical})
        header = {"format": "multilinear-program", "version": FORMAT_VERSION, **self.public.as_dict(), "layers": layers}
        metadata = {"multilinear-program": json.dumps(header)}
        write_atomically(Path(path), lambda part: save_file(tensors, part, metadata))
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Program":
        """Read a server's file, checking shapes, sizes and security."""
        path = Path(path)
        try:
            with safe_open(path, "numpy") as file:
                text = (file.metadata() or {}).get("multilinear-program")
                if text is None:
                    raise MultilinearError(f"{path} holds no program; `multilinear encrypt compile` makes one")
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, TypeError) as error:
            raise MultilinearError(f"{path} is not a readable program: {error}") from error
        try:
            header = json.loads(text)
            if header["version"] != FORMAT_VERSION:
                raise MultilinearError(f"{path} has version {header['version']}, this release reads {FORMAT_VERSION}")
            layers = tuple(
                Layer(
                    first=tensors[f"{i}.first"].astype(np.float64),
                    second=tensors[f"{i}.second"].astype(np.float64),
                    offset=tensors[f"{i}.offset"].astype(np.float64),
                    shifts=bool(row["shifts"]),
                    units=tensors[f"{i}.units"],
                    errors=tensors[f"{i}.errors"],
                    largest=float(row["largest"]),
                    typical=float(row["typical"]),
                )
                for i, row in enumerate(header["layers"])
            )  # fmt: skip
            program = cls(Public.from_dict(header), layers, tensors["head"].astype(np.float64))
            program.check()
        except MultilinearError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise MultilinearError(f"{path} is a damaged program ({error!r}); compile it again") from error
        return program

    def check(self) -> None:
        """Raise unless all shapes fit, weights are exact on residues, and the id is that of the contents."""
        public = self.public
        public.parameters.check()
        width = 1 + public.inputs
        for layer in self.layers:
            if layer.first.shape != (layer.rank, width) or layer.second.shape != (layer.rank, width):
                raise MultilinearError("damaged program: the layers' sizes do not follow from each other")
            offset = layer.offset
            if not (np.abs(offset) <= LARGEST_OFFSET).all() or not (offset == np.rint(offset)).all():
                raise MultilinearError("damaged program: offsets that are no whole numbers or too large")
            check_rows(layer.first)
            check_rows(layer.second)
            width += layer.rank
        if self.head.shape != (len(public.labels), width) or len(self.layers) != public.parameters.depth:
            raise MultilinearError("damaged program: head or depth do not fit the layers")
        check_rows(self.head)
        if public.program != self.identity():
            raise MultilinearError("damaged program: its contents do not have the id it names")

    def identity(self) -> str:
        """The hash of everything that decides what the program computes."""
        described = {key: value for key, value in self.public.as_dict().items() if key != "program"}
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        for layer in self.layers:
            digest.update(str((layer.shifts, layer.first.shape)).encode())
            for part in (layer.first, layer.second, layer.offset):
                digest.update(np.ascontiguousarray(part, dtype="<i4").tobytes())
        digest.update(np.ascontiguousarray(self.head, dtype="<i4").tobytes())
        return digest.hexdigest()
