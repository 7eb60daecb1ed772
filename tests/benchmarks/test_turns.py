"""Two versions in turns: who is asked when, the ratio, and what goes wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import turns

ROOT = Path(__file__).parents[2]


class Pretended:
    def __init__(self, name, times, asked):
        self.name, self.times, self.asked = name, iter(times), asked

    def ask(self):
        self.asked.append(self.name)
        return next(self.times)


def test_each_round_gives_a_ratio_and_none_is_always_the_first():
    asked = []
    this, other = Pretended("this", [[1.0, 2.0, 9.0], [4.0]], asked), Pretended("other", [[3.0], [2.0]], asked)
    times, ratios = turns.take_turns([this, other], 2)
    assert asked == ["this", "other", "other", "this"]
    assert times == {"this": [1.0, 2.0, 9.0, 4.0], "other": [3.0, 2.0]}
    assert ratios == [1.5, 0.5]


def run(*options, device="cpu"):
    command = [sys.executable, str(ROOT / "benchmarks" / "turns.py"), *map(str, options), "--device", device]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_a_version_that_has_ended_is_named():
    version = turns.Version.__new__(turns.Version)
    version.name = "other"
    pipe = subprocess.PIPE
    version.process = subprocess.Popen([sys.executable, "-c", ""], stdin=pipe, stdout=pipe, text=True)
    version.process.wait()
    with version.process, pytest.raises(SystemExit, match="'other' ended"):
        version.ask()


def test_a_version_against_itself(tmp_path):
    (tmp_path / "src").symlink_to(ROOT / "src")
    small = ("--model", "monet_micro", "--batch", 2, "--rounds", 2, "--passes", 2)
    done = run(tmp_path, *small, "--out", tmp_path / "record.json")
    assert done.returncode == 0, done.stderr
    assert "times as fast" in done.stdout
    record = json.loads((tmp_path / "record.json").read_text())
    assert [(row["runtime"], row["n"]) for row in record["rows"]] == [("this", 4), ("other", 4)]
    assert str(tmp_path) not in json.dumps(record)  # records are for everybody, folders are not
    low, high = record["ratio"]["quartiles"]
    assert 0 < low <= record["ratio"]["median"] <= high and len(record["ratio"]["each"]) == 2


def test_what_cannot_be_compared(tmp_path):
    (tmp_path / "src").symlink_to(ROOT / "src")
    for options, said in (
        ((tmp_path / "src",), "has no src/multilinear; give a checkout"),
        ((tmp_path, "--rounds", 1), "2 or more"),
        ((tmp_path, "--model", "resnot"), "timm has no network 'resnot'"),
    ):
        done = run(*options, "--out", tmp_path)
        assert done.returncode and said in done.stderr
        assert not list(tmp_path.glob("*.json"))


@pytest.mark.gpu
def test_cuda_both_versions_replay_a_captured_step(tmp_path):
    (tmp_path / "src").symlink_to(ROOT / "src")
    small = ("--model", "monet_t_32", "--batch", 64, "--rounds", 2, "--passes", 2)
    done = run(tmp_path, *small, "--out", tmp_path / "record.json", device="cuda")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "record.json").read_text())["ratio"]["median"] > 0
