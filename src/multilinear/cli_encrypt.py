"""The commands under `multilinear encrypt`: parse, call the library, print."""

import json as json_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tyro.conf import Positional, arg

from multilinear.errors import MultilinearError
from multilinear.files import write_atomically

if TYPE_CHECKING:
    from multilinear.encrypted import Plan

console = Console()

Images = Positional[
    Annotated[tuple[Path, ...], arg(metavar="IMAGES", help="Image files, or one .npz of a data set (see --split).")]
]
ClientFile = Annotated[Path, arg(metavar="FILE", help="What compile wrote for clients: NAME.client.json.")]
ProgramFile = Positional[Annotated[Path, arg(metavar="PROGRAM", help="What compile wrote for the server.")]]
SecretFile = Annotated[Path, arg(metavar="FILE", help="The secret key that keygen wrote.")]
SplitName = Annotated[str, arg(help="Of an .npz: train, val or test.")]
Count = Annotated[int, arg(help="At most so many images; 0 for all.")]
Processes = Annotated[int | None, arg(help="All cores if not given.")]
Json = Annotated[bool, arg(help="Print JSON for machines.")]


def compile(
    weights: Positional[Annotated[Path, arg(metavar="WEIGHTS", help="A trained polynomial network, .safetensors.")]],
    images: Images,
    out: Annotated[Path, arg(metavar="NAME", help="Writes NAME.program and NAME.client.json.")] = Path("network"),
    packing: Annotated[str, arg(help="tokens, images, or auto: by the images that come at a time.")] = "auto",
    at_a_time: Annotated[int, arg(help="Images that will come in one message.")] = 1,
    split: SplitName = "train",
    count: Count = 512,
) -> None:
    """Turn trained weights into a program; the images calibrate it."""
    from multilinear import encrypted
    from multilinear.models.weights import read_header

    header = read_header(weights)
    side = (header.get("preprocessing") or {}).get("input_size")
    size = None if side is None else (int(side[1]), int(side[2]))
    pixels = read_images(images, int(header["arguments"]["in_chans"]), size, split, count)
    program = encrypted.compile(weights, pixels, packing=packing, at_a_time=at_a_time)
    program_file, client_file = out.with_name(out.name + ".program"), out.with_name(out.name + ".client.json")
    program.save(program_file)
    program.public.save(client_file)
    _print_plan(program.plan())
    console.print(f"for the server: {program_file}\nfor clients:    {client_file}", highlight=False, soft_wrap=True)


def plan(program: ProgramFile, json: Json = False) -> None:
    """Tell beforehand what a program takes: security, sizes, memory, time and error."""
    from multilinear import encrypted

    found = encrypted.Program.load(program).plan()
    if json:
        sys.stdout.write(json_module.dumps(found.as_dict(), indent=2) + "\n")
        return
    _print_plan(found)


def keygen(
    client: ClientFile,
    secret: Annotated[Path, arg(help="Where the secret key goes; only you may read it.")] = Path("secret.key"),
    keys: Annotated[Path, arg(help="Where the evaluation keys go; they are for the server.")] = Path("server.keys"),
) -> None:
    """Make a secret key, and the evaluation keys that go to the server."""
    from multilinear import encrypted

    owner = encrypted.Client(encrypted.Public.load(client))
    made = owner.keygen()
    owner.save_secret(secret)
    _write(keys, made)
    console.print(f"keep: {secret}\nsend: {keys} ({len(made) / 1e6:.0f} MB)", highlight=False, soft_wrap=True)


def encrypt(
    images: Images,
    client: ClientFile,
    secret: SecretFile = Path("secret.key"),
    out: Annotated[Path, arg(help="The message for the server.")] = Path("images.encrypted"),
    split: SplitName = "test",
    count: Count = 0,
) -> None:
    """Encrypt images."""
    from multilinear import encrypted
    from multilinear.encrypted import messages

    public = encrypted.Public.load(client)
    owner = encrypted.Client(public, _read(secret))
    channels, height, width = public.image
    pixels = read_images(images, channels, (height, width), split, count)
    steps = messages.batches(public, len(pixels)) * public.packing.places * public.inputs
    with _bar("encrypting", steps) as advance:
        data = owner.encrypt(pixels, advance)
    _write(out, data)
    console.print(f"{len(pixels)} images, {len(data) / 1e6:.0f} MB: {out}", highlight=False, soft_wrap=True)


def run(
    program: ProgramFile,
    images: Annotated[Path, arg(metavar="FILE", help="Encrypted images.")] = Path("images.encrypted"),
    keys: Annotated[Path, arg(metavar="FILE", help="The client's evaluation keys.")] = Path("server.keys"),
    out: Annotated[Path, arg(help="The encrypted answer.")] = Path("results.encrypted"),
    processes: Processes = None,
) -> None:
    """Classify encrypted images, without any secret key."""
    from multilinear import encrypted

    server = encrypted.Server(encrypted.Program.load(program), _read(keys), processes)
    data = _read(images)
    with _bar("evaluating", server.steps(data)) as advance:
        answer = server.run(data, advance)
    _write(out, answer)
    console.print(f"{len(answer) / 1e6:.1f} MB: {out}", highlight=False, soft_wrap=True)


def serve(
    program: ProgramFile,
    host: Annotated[str, arg(help="Address to listen on.")] = "127.0.0.1",
    port: int = 8000,
    processes: Processes = None,
) -> None:
    """Answer clients over HTTP until stopped: GET /program, POST /keys, POST /run."""
    from multilinear import encrypted
    from multilinear.encrypted.service import Service, make_server

    with make_server(Service(encrypted.Program.load(program), processes), host, port) as server:
        console.print(f"listening on http://{host}:{server.server_address[1]}, stop with Ctrl-C", highlight=False)
        server.serve_forever()


def decrypt(
    results: Positional[Annotated[Path, arg(metavar="FILE", help="The server's answer.")]],
    client: ClientFile,
    secret: SecretFile = Path("secret.key"),
    json: Json = False,
) -> None:
    """Read the server's answer: the class of every image, and how sure the network is."""
    from multilinear import encrypted

    public = encrypted.Public.load(client)
    logits = encrypted.Client(public, _read(secret)).decrypt(_read(results))
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    best = logits.argmax(1)
    if json:
        rows = [{"label": public.labels[k], "probability": float(p[k]), "logits": row.tolist()}
                for k, p, row in zip(best, shares, logits, strict=True)]  # fmt: skip
        sys.stdout.write(json_module.dumps(rows, indent=2) + "\n")
        return
    for i, (k, p) in enumerate(zip(best, shares, strict=True)):
        console.print(f"{i}: {public.labels[k]} ({p[k]:.1%})", highlight=False, markup=False)


def demo(count: Annotated[int, arg(help="Digits to classify.")] = 100, seed: int = 0) -> None:
    """All of it on handwritten digits: train, compile, encrypt, evaluate in another process, decrypt."""
    from multilinear.encrypted_demo import run_demo

    run_demo(count=count, seed=seed, console=console)


COMMANDS: dict[str, Callable[..., None]] = {
    "compile": compile,
    "plan": plan,
    "keygen": keygen,
    "encrypt": encrypt,
    "run": run,
    "serve": serve,
    "decrypt": decrypt,
    "demo": demo,
}


def read_images(
    paths: tuple[Path, ...], channels: int, size: tuple[int, int] | None, split: str, count: int
) -> NDArray[np.uint8]:
    """Images (N, H, W, C) from files, resized to `size`, or from a split of an .npz, which must have that size."""
    from PIL import Image

    from multilinear.data import load_npz, open_image

    if len(paths) == 1 and paths[0].suffix == ".npz":
        found = load_npz(paths[0]).splits()
        if split not in found:
            raise MultilinearError(f"{paths[0]} has no {split} split; it has {', '.join(found)}")
        images = found[split].images
    elif paths:
        opened = [open_image(path, channels) for path in paths]
        high, wide = size or (opened[0].height, opened[0].width)
        resized = [one.resize((wide, high), Image.Resampling.BICUBIC) for one in opened]
        images = np.stack([np.asarray(one).reshape(high, wide, channels) for one in resized])
    else:
        raise MultilinearError("no images given: name image files or one .npz")
    return images[:count] if count else images


def _print_plan(found: "Plan") -> None:
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_row("security", f"128 bits: {found.modulus_bits} of {found.secure_bits} bits at ring size {found.ring}")
    table.add_row("products in a row", str(found.products))
    table.add_row("one batch", f"up to {found.images} images of {found.tokens} tokens, packed by {found.packing}")
    sizes = [f"{size / 1e6:,.1f} MB" for size in (found.keys, found.upload, found.download)]
    table.add_row("keys, upload, download", ", ".join(sizes))
    verdict = "fits" if found.fits else "does NOT fit"
    table.add_row("memory", f"{found.memory / 1e9:.2f} GB of {found.free_memory / 1e9:.1f} GB free: {verdict}")
    each = found.core_seconds / found.images
    table.add_row("time", f"{found.core_seconds:.1f} core-seconds a batch, {each * 1e3:.3g} ms an image if full")
    table.add_row("error of a logit", f"{found.logit_error:.2g}")
    console.print(table)


@contextmanager
def _bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda steps: progress.update(task, advance=steps)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MultilinearError(f"cannot read {path}: {error.strerror}") from error


def _write(path: Path, data: bytes) -> None:
    write_atomically(path, lambda part: part.write_bytes(data))
