import json
import time

import pytest
import torch
from torch import nn

import multilinear as ml
from multilinear import MultilinearError
from multilinear.evaluate.speed import measure_speed


class Sleeper(nn.Module):
    """Takes two milliseconds for an image."""

    def forward(self, images):
        assert not self.training
        time.sleep(0.002 * len(images))
        return images


def test_the_clock_is_right():
    net = Sleeper().train()
    one, four = measure_speed(net, (1, 2, 2), (1, 4), seconds=0.1)
    assert net.training
    assert one.batch_size == 1 and four.batch_size == 4
    assert one.n >= 5 and four.n >= 5
    for speed, least in ((one, 2), (four, 8)):
        assert least <= speed.lower_ms <= speed.median_ms <= speed.upper_ms
        assert speed.images_per_second == pytest.approx(1000 * speed.batch_size / speed.median_ms)
        assert speed.images_per_second <= 500
    assert "batch 4" in str(four) and "images/s on cpu" in str(four)
    assert json.loads(json.dumps(one.as_dict()))["device"].startswith("cpu, ")


@pytest.mark.parametrize(("sizes", "seconds"), [((), 1.0), ((0,), 1.0), ((1,), 0.0)])
def test_bad_input(sizes, seconds):
    with pytest.raises(MultilinearError, match="batch sizes of 1 or more and seconds above 0"):
        measure_speed(Sleeper(), (1, 2, 2), sizes, seconds=seconds)


@pytest.mark.gpu
def test_on_a_gpu():
    (speed,) = measure_speed(ml.create("monet_micro"), (3, 32, 32), (8,), device="cuda", seconds=0.2)
    assert speed.device == torch.cuda.get_device_name()
    assert speed.median_ms > 0
    with pytest.raises(MultilinearError, match="does not fit into the memory"):
        measure_speed(nn.Linear(1, 1), (10**6, 1), (10**6,), "cuda")
