"""One small network as if it were trained, compiled, with a client and a server, for all the tests here."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from multilinear.encrypted import Client, Server, compile
from multilinear.models import create

MEAN, STD = 0.3, 0.4


def smooth_images(count, channels=1, size=(8, 8), seed=0):
    """Blurred noise: neighbouring pixels are alike, as in pictures."""
    noise = torch.rand(count, channels, *size, generator=torch.Generator().manual_seed(seed))
    blurred = torch.nn.functional.avg_pool2d(noise, 3, 1, 1)
    return (blurred * 255).byte().permute(0, 2, 3, 1).contiguous().numpy()


def as_tensor(images):
    return (torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255 - MEAN) / STD


def make_trained(images, name="monet_private_1", seed=0, **options):
    """A network with weights that no initialiser leaves, and statistics of these images."""
    torch.manual_seed(seed)
    sizes = {"widths": (8,), "ranks": (6, 8), "patches": (2,), "overlap": 0, "in_chans": images.shape[-1]}
    model = create(name, **{**sizes, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        batch = as_tensor(images).float()
        for _ in range(40):
            model.train()(batch)
    return model.eval()


@torch.no_grad()
def clear_logits(model, images):
    return copy.deepcopy(model).double()(as_tensor(images)).numpy()


def make_parts(images, packing="tokens", processes=1, **options):
    model = make_trained(images, **options)
    mean, std = [MEAN] * images.shape[-1], [STD] * images.shape[-1]
    program = compile(model, images, mean=mean, std=std, packing=packing)
    client = Client(program.public)
    keys = client.keygen()
    server = Server(program, keys, processes)
    return SimpleNamespace(
        model=model, images=images, program=program, public=program.public, client=client, keys=keys, server=server,
        logits=clear_logits(model, images),
    )  # fmt: skip


@pytest.fixture(scope="session")
def pictures():
    return smooth_images


@pytest.fixture(scope="session")
def trained():
    return make_trained


@pytest.fixture(scope="session")
def in_the_clear():
    return clear_logits


@pytest.fixture(scope="session")
def parts():
    return make_parts


@pytest.fixture(scope="session")
def small():
    """A network of one block on 8x8 images, four tokens each, at the smallest ring."""
    return make_parts(smooth_images(40), num_classes=4)


@pytest.fixture(scope="session")
def encrypted(small):
    return small.client.encrypt(small.images[:3])


@pytest.fixture(scope="session")
def answered(small, encrypted):
    return small.server.run(encrypted)


@pytest.fixture
def uniform():
    return np.random.default_rng(0)
