"""Classify a test set encrypted, and the same images in the clear: accuracy, agreement, core-seconds, errors, sizes.

    python benchmarks/encrypted.py mnist WEIGHTS --data DIR [--images 10000] [--packing images] [--single] [--layers]
    python benchmarks/encrypted.py mnist WEIGHTS --data DIR --images 163 --tenseal 20

WEIGHTS is what `multilinear train private-...` exported. The program is calibrated on 512 training images; nothing is
chosen on the test set. Core-seconds are processor time of the server's `run` in all its processes, messages parsed and
written included. `--tenseal N` also measures TenSEAL's tutorial network on N images, in the same run. Rows are added to
the record.
"""

import argparse
import datetime
import json
import platform
import resource
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from multilinear import encrypted
from multilinear.data import ArrayData, load_dataset
from multilinear.encrypted.messages import batches
from multilinear.encrypted.trace import layer_errors
from multilinear.models import load

CALIBRATION = 512


def core_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def in_the_clear(weights: Path, program: encrypted.Program, images: np.ndarray) -> np.ndarray:
    """Logits of the network itself, in double precision."""
    model = load(weights).double()
    mean, std = np.array(program.public.mean), np.array(program.public.std)
    logits = []
    with torch.inference_mode():
        for start in range(0, len(images), 250):
            pixels = torch.tensor((images[start : start + 250] / 255 - mean) / std).permute(0, 3, 1, 2)
            logits.append(model(pixels).numpy())
    return np.concatenate(logits)


def measure(
    data: ArrayData, weights: Path, count: int, packing: str, processes: int | None, layers: bool
) -> dict[str, Any]:
    """Run `count` test images through client and server."""
    program = encrypted.compile(weights, data.train.images[:CALIBRATION], packing=packing)
    images, labels = data.test.images[:count], data.test.labels[:count]
    planned = program.plan()
    client = encrypted.Client(program.public)
    keys = client.keygen()
    server = encrypted.Server(program, keys, processes)
    spent, sent, received, found = {"encrypt": 0.0, "evaluate": 0.0, "decrypt": 0.0}, 0, 0, []
    wall = 0.0
    with Progress() as progress:
        total = batches(program.public, len(images))
        task = progress.add_task("batches", total=total)
        parts, start = client.encrypt_parts(images), core_seconds()
        for message in parts:
            spent["encrypt"] += core_seconds() - start
            start, began = core_seconds(), time.perf_counter()
            answer = server.run(message)
            spent["evaluate"] += core_seconds() - start
            wall += time.perf_counter() - began
            start = core_seconds()
            found.append(client.decrypt(answer))
            spent["decrypt"] += core_seconds() - start
            sent, received = sent + len(message), received + len(answer)
            progress.update(task, advance=batches(program.public, len(found[-1])))
            start = core_seconds()
    logits = np.concatenate(found)
    clear = in_the_clear(weights, program, images)
    difference = logits - clear
    row: dict[str, Any] = {
        "weights": weights.name,
        "images": len(images),
        "packing": packing,
        "ring": planned.ring,
        "bits": planned.modulus_bits,
        "scale_bits": program.public.parameters.scale_bits,
        "accuracy_encrypted": float((logits.argmax(1) == labels).mean()),
        "accuracy_clear": float((clear.argmax(1) == labels).mean()),
        "agreement": float((logits.argmax(1) == clear.argmax(1)).mean()),
        "logit_error": float(np.sqrt((difference**2).mean())),
        "logit_error_predicted": planned.logit_error,
        "logit_error_largest": float(np.abs(difference).max()),
        "core_seconds": spent,
        "core_seconds_an_image": spent["evaluate"] / len(images),
        "core_seconds_planned": planned.core_seconds * total,
        "wall_seconds": wall,
        "megabytes": {"keys": len(keys) / 1e6, "sent": sent / 1e6, "received": received / 1e6},
        "memory_gb_planned": planned.memory / 1e9,
        "memory_gb_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    if layers:
        del server, message, answer  # a second evaluation needs their memory
        errors = layer_errors(program, load(weights), images, processes)
        row["layer_errors"] = [{"predicted": one.predicted, "measured": one.measured} for one in errors]
    return row


def single_request(data: ArrayData, weights: Path, repeats: int = 5) -> dict[str, Any]:
    """Core-seconds of requests with one image, on a server that has answered before."""
    program = encrypted.compile(weights, data.train.images[:CALIBRATION])
    client = encrypted.Client(program.public)
    server = encrypted.Server(program, client.keygen(), processes=1)
    times = []
    for i in range(repeats + 1):
        message = client.encrypt(data.test.images[i : i + 1])
        start = core_seconds()
        server.run(message)
        times.append(core_seconds() - start)
    return {"first": times[0], "median": float(np.median(times[1:])), "n": repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("weights", type=Path, nargs="+")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--packing", default="tokens")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--single", action="store_true", help="also requests with a single image")
    parser.add_argument("--layers", action="store_true", help="also the error of every layer, on one batch")
    parser.add_argument("--tenseal", type=int, default=0, metavar="N", help="also TenSEAL's network on N images")
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{datetime.date.today()}-encrypted.json"))
    options = parser.parse_args()
    data = load_dataset(options.dataset, options.data)
    rows = []
    for weights in options.weights:
        row = measure(data, weights, options.images, options.packing, options.processes, options.layers)
        row = {"dataset": options.dataset, **row}
        if options.single:
            row["single_request_core_seconds"] = single_request(data, weights)
        rows.append(row)
        print(json.dumps(row, indent=1), flush=True)
    if options.tenseal:
        from tenseal_peer import run, train_network

        network = train_network(data.train.images, data.train.labels)
        peer = run(data.test.images, data.test.labels, network, options.tenseal)
        ratio = peer["cpu_seconds_per_image"]["evaluate"] / rows[0]["core_seconds_an_image"]
        rows.append({"dataset": options.dataset, "peer": peer, "peer_over_ours": ratio})
        print(json.dumps(rows[-1], indent=1))
    record = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    record["machine"] = {"platform": platform.platform(), "processor": platform.processor()}
    names = ("multilinear", "seal-python", "numpy", "torch")
    record["versions"] = {name: version(name) for name in names}
    record["rows"] += rows
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {options.out}")


if __name__ == "__main__":
    main()
