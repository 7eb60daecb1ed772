import contextlib
import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from multilinear.encrypted import Client, Program, Public
from multilinear.errors import MultilinearError


@pytest.fixture
def client_file(small, tmp_path):
    return small.public.save(tmp_path / "client.json")


@pytest.fixture
def program_file(small, tmp_path):
    return small.program.save(tmp_path / "a.program")


def edit_client(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def edit_program(path, tensors=(), **changes):
    with safe_open(path, "numpy") as file:
        header = json.loads(file.metadata()["multilinear-program"])
        kept = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file({**kept, **dict(tensors)}, path, {"multilinear-program": json.dumps({**header, **changes})})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": {"degree": 8192, "depth": 2, "scale_bits": 60}}, "a scale of 60 bits is not one of"),
        ({"parameters": {"degree": 8192, "depth": 3, "scale_bits": 24}}, "beyond 128-bit security"),
        ({"parameters": {"degree": 1024, "depth": 2, "scale_bits": 24}}, "ring size 1024 is not one of"),
        ({"parameters": {"degree": 8192}}, "damaged program header"),
        ({"parameters": None}, "damaged program header"),
        ({"grid": [3, 2]}, "sizes do not fit together"),
        ({"grid": [2]}, "damaged program header"),
        ({"image": [1, 8, -8]}, "sizes do not fit together"),
        ({"image": [2000, 8, 8]}, "sizes do not fit together"),
        ({"patch": 1, "grid": [1024, 1024], "image": [1, 1024, 1024]}, "larger than the ring"),
        ({"packing": "rows"}, "unknown packing"),
        ({"packing": ["tokens"]}, "unknown packing"),
        ({"mean": [0.5, 0.5]}, "preprocessing or labels"),
        ({"units": [1.0]}, "preprocessing or labels"),
        ({"mean": [float("nan")]}, "preprocessing or labels"),
        ({"program": "abcd"}, "the id is no hash"),
        ({"program": "zz" * 32}, "damaged program header"),
        ({"version": 2}, "version 2, this release reads 1"),
        ({"grid": [float("inf"), 2]}, "damaged program header"),
        ({"error": float("nan")}, "damaged program header"),
        ({"overlap": 1}, "damaged program header"),
    ],
)
def test_headers_edited_by_hand_are_refused(client_file, program_file, changes, message):
    with pytest.raises(MultilinearError, match=message):
        Public.load(edit_client(client_file, **changes))
    with pytest.raises(MultilinearError, match=f"{message}|damaged program"):
        Program.load(edit_program(program_file, **changes))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"head": np.zeros((4, 3), np.int16)}, "head or depth do not fit"),
        ({"0.first": np.zeros((6, 3), np.int16)}, "sizes do not follow"),
        ({"0.first": np.zeros((6, 17), np.int16)}, "do not have the id it names"),
        ({"0.first": np.full((6, 17), 2.0**22)}, "too large for exact products"),
        ({"0.first": np.full((6, 17), 0.5)}, "too large for exact products"),
        ({"head": np.full((4, 31), np.nan)}, "too large for exact products"),
        ({"0.offset": np.zeros(())}, "damaged program"),
        ({"1.offset": np.zeros(3, np.int32)}, "sizes do not follow"),
        ({"0.offset": np.full(6, np.nan)}, "damaged|exact products"),
    ],
)
def test_weights_edited_by_hand_are_refused(program_file, tensors, message):
    with pytest.raises(MultilinearError, match=message):
        Program.load(edit_program(program_file, tensors))


def test_offsets_that_would_not_be_exact_are_refused(small):
    layers = [dataclasses.replace(layer, offset=np.full(layer.rank, 2.0**30)) for layer in small.program.layers]
    program = dataclasses.replace(small.program, layers=tuple(layers))
    public = dataclasses.replace(small.public, program=program.identity())
    with pytest.raises(MultilinearError, match="too large"):
        dataclasses.replace(program, public=public).check()


@pytest.mark.parametrize("changes", [{"std": [0.0]}, {"std": [1e-300]}, {"mean": [1e300]}])
def test_preprocessing_that_cannot_be_encrypted_is_told_in_one_line(small, client_file, changes):
    with pytest.raises(MultilinearError):
        Client(Public.load(edit_client(client_file, **changes)), small.client.secret()).encrypt(small.images[:1])


def test_fewer_layers_than_the_depth_are_refused(program_file):
    with pytest.raises(MultilinearError, match="head or depth do not fit"):
        Program.load(edit_program(program_file, layers=[]))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"format": "other"}', "\x00", "[" * 50_000])
def test_files_that_are_no_client_file_are_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(MultilinearError, match="client file|readable"):
        Public.load(path)


def test_missing_large_and_foreign_files_are_refused(tmp_path):
    for load in (Public.load, Program.load):
        with pytest.raises(MultilinearError, match="not a readable"):
            load(tmp_path / "none")
        with pytest.raises(MultilinearError, match="not a readable"):
            load(tmp_path)
    large = tmp_path / "large.json"
    large.write_bytes(b" " * 1_000_001)
    with pytest.raises(MultilinearError, match="too large for a client's file"):
        Public.load(large)
    save_file({"x": np.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(MultilinearError, match="holds no program"):
        Program.load(tmp_path / "weights.safetensors")


def test_numbers_that_numpy_does_not_have_are_refused(tmp_path):
    path = tmp_path / "a.program"
    save_tensors({"head": torch.zeros(2, dtype=torch.bfloat16)}, path, {"multilinear-program": '{"version": 1}'})
    with pytest.raises(MultilinearError):
        Program.load(path)


@given(st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_read_or_refused(small, tmp_path, data):
    whole = small.program.save(tmp_path / "b.program").read_bytes()
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)) | st.just(len(whole)))
    path = tmp_path / "c.program"
    path.write_bytes(damaged[:cut])
    with contextlib.suppress(MultilinearError):
        Program.load(path)


def test_another_programs_messages_are_refused(small, parts, pictures):
    other = parts(pictures(20), num_classes=4, seed=1)
    assert other.public.program != small.public.program
    with pytest.raises(MultilinearError, match="belong to another program"):
        small.server.run(other.client.encrypt(pictures(1)))
    with pytest.raises(MultilinearError, match="belong to another program"):
        Client(small.public, other.client.secret())
