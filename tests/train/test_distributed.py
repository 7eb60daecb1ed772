"""Two processes do what one does, and a worker that dies is started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

RECIPE = {
    "model": {"name": "monet_micro", "arguments": {"patches": [1], "depths": [1]}},
    "data": {"name": "digits", "hold_out": 64},  # evaluated in between, which must not confuse checkpoints
    "optim": {"lr": 4e-3, "warmup_epochs": 1},
    "run": {"epochs": 2, "batch_size": 64, "save_every": 3},
}


def command(folder, out, processes, *options, restarts=0):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
             f"--max-restarts={restarts}"]  # fmt: skip
    if processes == 1:
        start = [sys.executable]
    train = ["-m", "multilinear", "train", str(path), "--out", str(out), "--device", "cpu", "--json", *options]
    return [*start, *train]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def run(*arguments, **options):
    found = subprocess.run(
        command(*arguments, **options), env=environment(), capture_output=True, text=True, timeout=240
    )
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run(folder, folder / "run", 1)
    return losses(folder / "run")


def test_two_processes_equal_one(tmp_path, alone):
    run(tmp_path, tmp_path / "run", 2)
    assert losses(tmp_path / "run") == pytest.approx(alone, abs=1e-5)


def test_two_sharded_processes_equal_one(tmp_path, alone):
    run(tmp_path, tmp_path / "run", 2, "--set", "run.fsdp=true")
    assert losses(tmp_path / "run") == pytest.approx(alone, abs=1e-5)


def test_a_dead_worker_is_started_again_and_the_run_goes_on(tmp_path, alone):
    out = tmp_path / "run"
    torchrun = subprocess.Popen(
        command(tmp_path, out, 2, "--resume", restarts=3),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.time() + 120
    while not (out / "last.safetensors").exists():
        assert time.time() < deadline
        assert torchrun.poll() is None
        time.sleep(0.01)
    workers = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    try:
        _, errors = torchrun.communicate(timeout=120)
    finally:
        torchrun.kill()
    assert torchrun.returncode == 0, errors.decode()[-3000:]
    assert losses(out) == pytest.approx(alone, abs=1e-4)
