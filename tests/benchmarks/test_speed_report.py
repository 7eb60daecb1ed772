"""The parts of benchmarks/speed.py that decide what is said: which row counts, the targets, the record, the figure."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import speed_report
import speed_runtimes


def throughput(model, part, images_per_second, **more):
    return {"model": model, "part": part, "batch": 256, "runtime": "compile bf16", "n": 30,
            "median_ms": 256e3 / images_per_second, "lower_ms": 1.0, "upper_ms": 2.0,
            "images_per_second": images_per_second, **more}  # fmt: skip


def record(rows):
    return {"date": "2026-01-01", "command": "gpu", "machine": {"gpu": "a GPU", "cpu": "a CPU"}, "rows": rows,
            "versions": {"torch": "2.11"}, "peaks": {"tflops": 700.0, "gb_per_second": 4000.0}}  # fmt: skip


def verdict(rows, start, command="gpu"):
    (found,) = [result for result in speed_report.check_targets(rows, command) if result["target"].startswith(start)]
    return found["value"], found["verdict"]


def test_the_best_runtime_counts_and_failures_do_not():
    rows = [
        throughput("monet_ms_t", "inference", 100.0),
        throughput("monet_ms_t", "inference", 300.0, runtime="optimize bf16"),
        throughput("monet_ms_t", "inference", 900.0, error="RuntimeError: wrong"),
        throughput("monet_ms_t", "training", 700.0),
    ]
    assert speed_report.best(rows, "monet_ms_t", "inference") is rows[1]
    rows = [row | {"part": "latency"} for row in rows]
    assert speed_report.best(rows, "monet_ms_t", "latency")["images_per_second"] == 700
    assert speed_report.best(rows, "resnet50", "latency") is None


@pytest.mark.parametrize(("ours", "said"), [(1500.0, "reached"), (1600.0, "reached"), (1350.0, "short by 10.0%")])
def test_ratio_to_a_peer(ours, said):
    rows = [throughput("monet_ms_t", "inference", ours), throughput("resnet50", "inference", 1000.0)]
    value, text = verdict(rows, "monet_ms_t inference")
    assert value == pytest.approx(ours / 1000)
    assert text == said


def test_less_is_better_for_memory_latency_and_start():
    rows = [
        throughput("monet_ms_t", "training", 100.0, allocated_gb=26.0),
        # not the row that counts, however little memory it takes
        throughput("monet_ms_t", "training", 90.0, allocated_gb=1.0),
        throughput("resnet50", "training", 100.0, allocated_gb=10.0),
        throughput("monet_ms_t", "latency", 500.0),
        throughput("deit_small_patch16_224", "latency", 400.0),
        {"model": "monet_ms_t", "part": "startup", "n": 1, "seconds": 54.0},
    ]
    assert verdict(rows, "monet_ms_t training, allocated_gb") == (pytest.approx(2.6), "short by 100.0%")
    assert verdict(rows, "monet_ms_t latency") == (pytest.approx(0.8), "reached")
    assert verdict(rows, "monet_ms_t startup") == (54.0, "short by 20.0%")


def test_what_was_not_measured_is_not_reached():
    rows = [throughput("monet_ms_t", "inference", 1e6), throughput("monet_t_32", "training", 1.0, error="no")]
    assert {result["verdict"] for result in speed_report.check_targets(rows, "gpu")} == {"not measured"}
    assert {result["command"] for result in speed_report.check_targets(rows, "cpu")} == {"cpu"}


def test_cpu_latency_has_a_bound_of_its_own():
    row = throughput("monet_nano", "cpu-latency", 1.0) | {"median_ms": 6.0}
    assert verdict([row], "monet_nano", "cpu") == (6.0, "short by 20.0%")


def test_report_names_failures_and_targets(capsys):
    rows = [throughput("monet_t_32", "training", 61_000.0), throughput("resnet50", "training", 1.0, error="no memory")]
    speed_report.print_report(record(rows))
    said = capsys.readouterr().out
    assert "FAILED: no memory" in said
    (line,) = [line for line in said.splitlines() if line.strip().startswith("monet_t_32 training, images")]
    assert line.endswith("reached")


def test_record_is_on_disk_after_each_measurement_and_failures_are_rows(tmp_path, capsys):
    path = tmp_path / "record.json"
    recorder = speed_report.Recorder(path, "gpu", {"out": tmp_path}, torch.device("cpu"))
    with recorder.measurement(model="monet_t_32", part="training", batch=2) as row:
        row |= speed_report.summarise([1.0, 2.0, 3.0, 4.0, 5.0], 2)
    assert json.loads(path.read_text())["rows"][0]["images_per_second"] == pytest.approx(2000 / 3)
    with recorder.measurement(model="resnet50", part="training"):
        raise RuntimeError("out of memory")
    assert json.loads(path.read_text())["rows"][1]["error"] == "RuntimeError: out of memory"
    assert "out of memory" in capsys.readouterr().out
    again = speed_report.Recorder(path, "gpu", {"append": True}, torch.device("cpu"))
    assert [row["model"] for row in again.record["rows"]] == ["monet_t_32", "resnet50"]


def test_figure_has_the_published_networks_that_were_measured(tmp_path):
    rows = [throughput(name, "inference", speed) for name, speed in
            [("monet_ms_t", 9000.0), ("resnet50", 5000.0), ("monet_t", 3000.0)]]  # fmt: skip
    rows.append(throughput("resmlp_12_224", "inference", 1.0, error="no"))
    path = tmp_path / "figure.png"
    assert speed_report.plot(record(rows), path) == ["monet_ms_t", "resnet50"]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_figure_needs_a_measurement(tmp_path):
    with pytest.raises(SystemExit, match="no inference throughput"):
        speed_report.plot(record([throughput("monet_t", "inference", 1.0)]), tmp_path / "figure.png")


def test_work_is_counted_as_the_library_counts_it():
    from multilinear import cost, create

    work = speed_runtimes.work_per_image("monet_micro", None)
    assert work["flops"] == 2 * cost(create("monet_micro")).macs
    assert work["parameters"] == sum(parameter.numel() for parameter in create("monet_micro").parameters())


def test_shares_of_the_machine():
    peaks = {"tflops": 100.0, "gb_per_second": 1000.0}
    work = {"flops": 1e9, "bytes": 1e7}
    found = speed_runtimes.shares({"images_per_second": 10_000.0}, work, peaks, 3)
    assert found == pytest.approx({"tflops": 30.0, "compute_share": 0.3, "memory_share": 0.3})


def test_a_training_step_trains():
    torch.manual_seed(0)
    step = speed_runtimes.TrainingStep("monet_micro", None, 4, torch.device("cpu"), compiled=False)
    losses = [step().item() for _ in range(20)]
    assert losses[-1] < losses[0]


def test_runtimes_of_one_network_agree():
    model, shape = speed_runtimes.build("monet_micro", None, torch.device("cpu"))
    images = torch.randn(2, *shape)
    with torch.no_grad():
        expected = model.eval()(images)
        found = speed_runtimes.forward_call("eager bf16", model, images)()
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_a_network_as_a_polynomial():
    torch.manual_seed(0)
    model, shape = speed_runtimes.build("monet_nano norm=batch", 16, torch.device("cpu"))
    images = torch.randn(2, *shape)
    with torch.no_grad():
        expected = model.eval()(images)
        found = speed_runtimes.forward_call("optimize f32", model, images)()
    assert shape == (3, 16, 16) and expected.abs().max() < 100
    assert (found - expected).norm() < 1e-4 * expected.norm()
    plain, polynomial = (
        speed_runtimes.work_per_image(f"monet_nano{norm}", 16)["flops"] for norm in ("", " norm=batch")
    )
    assert plain == polynomial


@pytest.mark.parametrize(
    ("said", "found"),
    [("1665, 1980, 685.4, 700.0\n", {"clock_mhz": 1665, "most_mhz": 1980, "watt": 685.4, "most_watt": 700}),
     ("1665, 1980, [N/A], 700.0\n", {}), ("", {})],
)  # fmt: skip
def test_clock_and_power_are_those_while_passes_run(monkeypatch, said, found):
    """A GPU that is not there stands in for one: passes are made ahead of the question, and what is not known is left
    out."""
    asked, passes = [], []

    def answer(command, **_):
        asked.append((command, len(passes)))
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(speed_runtimes.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(speed_runtimes.subprocess, "run", answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    waits = []
    monkeypatch.setattr(speed_runtimes, "wait", lambda device: waits.append(len(passes)))
    row = speed_runtimes.clock_and_power(lambda: passes.append(1), torch.device("cuda"), 50.0)
    assert row == found
    ((command, before),) = asked
    assert waits == [20, 30] and before == 30 and "--id=GPU-1-2" in command
    line = speed_report.describe(throughput("monet_ms_t", "training", 700.0) | row)
    assert ("1665 of 1980 MHz at 685 of 700 W" in line) == bool(found)


def test_clock_and_power_are_left_out_without_the_tool_or_a_gpu(monkeypatch):
    def no_pass():
        raise AssertionError

    monkeypatch.setattr(speed_runtimes.shutil, "which", lambda name: None)
    assert speed_runtimes.clock_and_power(no_pass, torch.device("cuda"), 50.0) == {}
    monkeypatch.setattr(speed_runtimes.shutil, "which", lambda name: name)
    assert speed_runtimes.clock_and_power(no_pass, torch.device("cpu"), 50.0) == {}


def test_a_cold_start_says_where_its_time_goes():
    row = {"seconds": 42.9, "n": 1, "seconds_imported": 8.25, "seconds_compiled": 35.0, "seconds_plain": 42.0}
    line = speed_report.describe(row)
    assert line.startswith("42.9 s") and line.endswith("imported after 8.2, compiled after 35.0, plain after 42.0")
