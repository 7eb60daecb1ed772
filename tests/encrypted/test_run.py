import dataclasses
import importlib
import os
import signal

import numpy as np
import pytest
import torch

from multilinear.encrypted import Client, Program, Public, Server, compile, engine
from multilinear.encrypted.messages import HEADER_BYTES
from multilinear.encrypted.trace import layer_errors
from multilinear.errors import MultilinearError

NETWORKS = {
    "overlapping patches": {"size": (28, 28), "patches": (7,), "overlap": 6},
    "colour": {"channels": 3, "size": (8, 12), "widths": (12,)},
    "one token": {"size": (4, 4)},
    "two blocks": {"name": "monet_private_2"},
    "affine norms": {"norm": "affine"},
}


@pytest.fixture(scope="module", params=NETWORKS)
def made(request, parts, pictures):
    options = dict(NETWORKS[request.param])
    images = pictures(40, options.pop("channels", 1), options.pop("size", (8, 8)))
    return parts(images, **options)


def run(made, images, **options):
    return made.client.decrypt(made.server.run(made.client.encrypt(images, **options)))


def worst(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def test_encrypted_logits_are_those_of_the_network(made):
    found = run(made, made.images)
    assert found.shape == made.logits.shape
    assert worst(found, made.program.simulate(made.images)) < 2e-3
    assert np.abs(found - made.logits).max() < 20 * made.public.error  # errors differ much from image to image
    assert (found.argmax(1) == made.logits.argmax(1)).all()


def test_the_predicted_error_is_of_the_right_size(made):
    found = np.sqrt(((run(made, made.images) - made.logits) ** 2).mean())
    assert made.public.error / 6 < found < 3 * made.public.error


@pytest.mark.parametrize("blocks", [1, 2])
def test_every_layer_errs_as_predicted(parts, pictures, blocks):
    made = parts(pictures(60), depths=(blocks,))
    errors = layer_errors(made.program, made.model, pictures(50, seed=1), processes=1)
    assert len(errors) == 2 * blocks
    for error in errors:
        assert error.predicted / 4 < error.measured < 4 * error.predicted
        assert error.measured < 0.01


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_both_packings_give_the_same(parts, pictures, norm):
    images = pictures(40)
    tokens, slots = (parts(images, kind, norm=norm, ranks=(4, 4)) for kind in ("tokens", "images"))
    found = [run(made, images[:5]) for made in (tokens, slots)]
    assert worst(*found) < 2e-3
    assert np.abs(found[1] - slots.logits[:5]).max() < 5 * slots.public.error
    assert (found[1].argmax(1) == slots.logits[:5].argmax(1)).all()


ZEROS = {
    "first factor": ["mu1.norm_a.bn.weight", "mu1.norm_a.bn.bias"],
    "first factor of the last layer": ["mu2.norm_a.bn.weight", "mu2.norm_a.bn.bias"],
    "second factor": ["mu1.norm_b.bn.weight"],
    "what follows a layer": ["mu2.C.weight"],
    "a class": ["head.fc.weight"],
}


@pytest.mark.parametrize("kind", ["tokens", "images"])
@pytest.mark.parametrize("dead", ZEROS)
def test_networks_with_zeros_in_them_run(trained, pictures, in_the_clear, dead, kind):
    images = pictures(20)
    model = trained(images, ranks=(4, 4), num_classes=2)
    with torch.no_grad():
        for name in ZEROS[dead]:
            inside = name if name.startswith("head") else f"stages.0.blocks.0.{name}"
            weight = model.get_parameter(inside)
            weight[slice(None) if name.endswith("C.weight") else 0] = 0
    program = compile(model, images, mean=[0.3], std=[0.4], packing=kind)
    client = Client(program)
    found = client.decrypt(Server(program, client.keygen(), 1).run(client.encrypt(images[:2])))
    assert np.abs(found - in_the_clear(model, images[:2])).max() < 20 * program.public.error


def test_more_images_than_one_batch_holds(parts, pictures, monkeypatch):
    made = parts(pictures(9, size=(120, 100)), ranks=(2, 3), num_classes=3)
    assert made.public.packing.images == 5
    found = run(made, made.images)
    assert np.abs(found - made.logits).max() < 20 * made.public.error  # errors differ much from image to image
    monkeypatch.setattr("multilinear.encrypted.client.MESSAGE_BYTES", 1)
    messages = list(made.client.encrypt_parts(made.images))
    assert len(messages) == 2
    again = np.concatenate([made.client.decrypt(made.server.run(message)) for message in messages])
    assert worst(again, found) < 2e-3


def test_progress_is_told_of_every_step(small, encrypted):
    steps = []
    small.server.run(encrypted, steps.append)
    assert sum(steps) == small.server.steps(encrypted) > 0
    done = []
    small.client.encrypt(small.images[:1], done.append)
    assert sum(done) == 16


def test_two_processes_compute_the_same_bytes(small, encrypted, answered):
    assert Server(small.program, small.keys, processes=2).run(encrypted) == answered


def test_without_fast_products_the_bytes_are_the_same(parts, pictures, monkeypatch):
    made = parts(pictures(20), ranks=(1, 2), num_classes=2)
    message = made.client.encrypt(made.images[:2])
    fast = made.server.run(message)
    monkeypatch.setattr(made.server.keys.ring, "fast", False)
    assert made.server.run(message) == fast


def test_saved_programs_run(small, tmp_path):
    program = Program.load(small.program.save(tmp_path / "a.program"))
    public = Public.load(small.public.save(tmp_path / "a.json"))
    assert public == small.public == program.public
    client = Client(public)
    found = client.decrypt(Server(program, client.keygen(), 1).run(client.encrypt(small.images[:3])))
    assert np.abs(found - small.logits[:3]).max() < 5 * public.error


def test_the_client_file_holds_no_weights(small, tmp_path):
    text = small.public.save(tmp_path / "a.json").read_text()
    assert len(text) < 3000 and "first" not in text and "head" not in text


def test_a_client_made_from_a_secret_can_read(small, answered):
    again = Client(small.public, small.client.secret())
    assert np.array_equal(again.decrypt(answered), small.client.decrypt(answered))
    assert np.array_equal(again.decrypt(small.server.run(again.encrypt(small.images[:1]))).shape, (1, 4))


@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_the_plan_tells_what_it_takes(small, kind):
    program = compile(small.model, small.images, packing=kind)
    client = Client(program)
    keys, upload = client.keygen(), client.encrypt(small.images[:2])
    download = Server(program, keys, 1).run(upload)
    told = program.plan()
    assert told.upload == len(upload) - HEADER_BYTES and told.download == len(download) - HEADER_BYTES
    assert abs(told.keys - len(keys)) < 0.02 * len(keys)
    assert told.memory > told.upload and told.core_seconds > 0 and told.fits
    assert told.modulus_bits <= told.secure_bits == 218
    assert [layer["rank"] for layer in told.layers] == [6, 8] and told.logit_error == program.public.error
    assert not dataclasses.replace(told, free_memory=told.memory).fits


def test_a_run_that_has_no_memory_is_refused_beforehand(small, encrypted, monkeypatch):
    module = importlib.import_module("multilinear.encrypted.plan")  # its name in the package is the function's
    monkeypatch.setattr(module, "free_memory", lambda: 1_000_000)
    with pytest.raises(MultilinearError, match="0.0 GB are free"):
        Server(small.program, small.keys, 1).run(encrypted)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 8, 8, 1)), "uint8 from 0 to 255, got float64"),
        (np.zeros((2, 8, 12, 1), np.uint8), "takes images \\(N, 8, 8, 1\\), got"),
        (np.zeros((0, 8, 8, 1), np.uint8), "no images to encrypt"),
    ],
)
def test_images_of_another_kind_are_not_encrypted(small, images, message):
    with pytest.raises(MultilinearError, match=message):
        small.client.encrypt(images)


def test_no_images_have_no_logits(small):
    assert small.program.simulate(small.images[:0]).shape == (0, 4)


def test_a_client_without_keys_says_so(small):
    with pytest.raises(MultilinearError, match="no keys yet; call keygen"):
        Client(small.public).encrypt(small.images[:1])
    with pytest.raises(MultilinearError, match="at least 1"):
        Server(small.program, small.keys, processes=0)


def test_a_killed_process_is_told_and_the_server_goes_on(small, monkeypatch):
    server = Server(small.program, small.keys, processes=2)
    message = small.client.encrypt(small.images)
    with monkeypatch.context() as patch:
        patch.setitem(engine._WORK, "_product", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(MultilinearError, match="was killed"):
            server.run(message)
    assert np.allclose(small.client.decrypt(server.run(message)), small.logits, atol=0.01)
