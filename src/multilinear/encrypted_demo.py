"""`multilinear encrypt demo`: handwritten digits, classified by a process that never sees them."""

import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from multilinear import encrypted
from multilinear.data import load_dataset
from multilinear.encrypted import Program, Server
from multilinear.errors import MultilinearError
from multilinear.models import load
from multilinear.train import train


def run_demo(*, count: int, seed: int, console: Console) -> float:
    """Train, compile, and classify `count` digits encrypted; returns the share on which both networks agree."""
    digits = load_dataset("digits")
    if not 1 <= count <= len(digits.test.images):
        raise MultilinearError(
            f"the digits have {len(digits.test.images)} test images; --count {count} is not possible"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only make a second thread wait
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        console.print("training a network of one block on 1437 digits")
        try:
            changes = [f"run.seed={seed}"]
            result = train("private-digits", out=folder / "run", changes=changes, device="cpu", console=console)
        finally:
            torch.set_num_threads(threads)
        program = encrypted.compile(result.weights, digits.train.images[:512])
        program.save(folder / "digits.program")
        program.public.save(folder / "digits.client.json")
        network = load(result.weights)
        images, labels = digits.test.images[:count], digits.test.labels[:count]
        logits, seconds, sizes = _exchange(folder, images)
    public = program.public
    mean, std = np.array(public.mean), np.array(public.std)
    pixels = torch.tensor((images / 255 - mean) / std, dtype=torch.float32).permute(0, 3, 1, 2)
    with torch.inference_mode():
        clear = network(pixels).numpy()
    agree = float((logits.argmax(1) == clear.argmax(1)).mean())
    found = program.plan()
    console.print(_who_knew_what(sizes))
    console.print(
        f"\nencrypted: [bold]{(logits.argmax(1) == labels).mean():.1%}[/bold] of {count} digits right, in the clear "
        f"{(clear.argmax(1) == labels).mean():.1%}; the same answer on {agree:.1%}; largest difference of a logit "
        f"{np.abs(logits - clear).max():.1e} (predicted about {public.error:.0e})\n"
        f"evaluation took {seconds:.1f} s; 128-bit security: {found.modulus_bits} of {found.secure_bits} bits at ring "
        f"size {found.ring}"
    )
    return agree


def _exchange(folder: Path, images: np.ndarray) -> tuple[np.ndarray, float, dict[str, int]]:
    """The client's side: everything that goes to the other process are bytes."""
    client = encrypted.Client(encrypted.Public.load(folder / "digits.client.json"))
    keys, message = client.keygen(), client.encrypt(images)
    context = multiprocessing.get_context("spawn")  # a process that shares no memory with this one
    ours, theirs = context.Pipe()
    process = context.Process(target=_server_process, args=(folder / "digits.program", theirs))
    process.start()
    theirs.close()
    try:
        ours.send_bytes(keys)
        ours.recv_bytes()
        started = time.perf_counter()
        ours.send_bytes(message)
        answer = ours.recv_bytes()
        seconds = time.perf_counter() - started
    except EOFError:
        raise MultilinearError("the server's process ended early; its error is above") from None
    finally:
        ours.close()
        process.join()
    return client.decrypt(answer), seconds, {"keys": len(keys), "images": len(message), "results": len(answer)}


def _server_process(program: Path, pipe: Connection) -> None:
    server = Server(Program.load(program), pipe.recv_bytes(), processes=len(os.sched_getaffinity(0)))
    pipe.send_bytes(b"ready")
    pipe.send_bytes(server.run(pipe.recv_bytes()))


def _who_knew_what(sizes: dict[str, int]) -> Table:
    table = Table("", "client", "server", title="who knew what")
    table.add_row("images", "yes", f"encrypted, {sizes['images'] / 1e6:.0f} MB")
    table.add_row("secret key", "yes", "no")
    table.add_row("evaluation keys", "yes", f"yes, {sizes['keys'] / 1e6:.0f} MB")
    table.add_row("weights", "no", "yes")
    table.add_row("result", "yes", f"encrypted, {sizes['results'] / 1e6:.1f} MB")
    table.add_row("number of images", "yes", "yes")
    return table
