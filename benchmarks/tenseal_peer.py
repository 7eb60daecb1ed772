"""The convolutional MNIST network of TenSEAL's tutorial 4 on encrypted images, in core seconds per image.

    python benchmarks/tenseal_peer.py --data FOLDER [--images 20] [--out FILE.json]

Network, training and encryption parameters are those of "Tutorial 4 - Encrypted Convolution on MNIST" of
OpenMined/TenSEAL: a convolution with four 7x7 kernels and stride 3, a square, a linear layer to 64, a square, a linear
layer to 10. The image is encrypted, the weights are not, and one image is evaluated at a time. The tutorial gives
TenSEAL a thread per core; here it has one, as it is core seconds that are counted. Two threads took as many.

FOLDER holds mnist.npz. Needs `pip install tenseal==0.3.16`, which multilinear itself does not.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import tenseal
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from multilinear.data import load_dataset
from multilinear.files import write_atomically

Images = NDArray[np.uint8]  # (n, 28, 28) or (n, 28, 28, 1)

DEGREE = 8192
SCALE_BITS = 26
MODULUS_BITS = [31, *[SCALE_BITS] * 6, 31]  # one prime for each of the six multiplications; 218 bits, 128-bit security


class ConvNet(nn.Module):
    """The network in the clear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=7, stride=3)
        self.hidden = nn.Linear(256, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        convolved = self.conv(images).square().flatten(1)
        return self.output(self.hidden(convolved).square())


class EncryptedConvNet:
    """The same network with weights in the clear on one encrypted image."""

    def __init__(self, network: ConvNet) -> None:
        self.kernels = network.conv.weight[:, 0].tolist()
        self.kernel_biases = network.conv.bias.tolist()
        # TenSEAL multiplies a row vector by the matrix
        self.hidden_weight, self.hidden_bias = network.hidden.weight.T.tolist(), network.hidden.bias.tolist()
        self.output_weight, self.output_bias = network.output.weight.T.tolist(), network.output.bias.tolist()

    def __call__(self, image: tenseal.CKKSVector, windows: int) -> tenseal.CKKSVector:
        """Ten encrypted logits from the encrypted columns of an image, `windows` of them."""
        channels = [
            image.conv2d_im2col(kernel, windows) + bias
            for kernel, bias in zip(self.kernels, self.kernel_biases, strict=True)
        ]
        x = tenseal.CKKSVector.pack_vectors(channels)
        x.square_()
        x = x.mm(self.hidden_weight) + self.hidden_bias
        x.square_()
        return x.mm(self.output_weight) + self.output_bias


def scaled(images: Images) -> Tensor:
    """Images (n, 1, 28, 28) in [0, 1], as the network takes them."""
    return torch.from_numpy(np.ascontiguousarray(images)).reshape(-1, 1, 28, 28).float() / 255


def train_network(images: Images, labels: NDArray[Any], epochs: int = 10, seed: int = 0) -> ConvNet:
    """The network trained as in the tutorial: Adam, batches of 64, cross entropy, no schedule and no augmentation."""
    torch.manual_seed(seed)
    network = ConvNet()
    x, y = scaled(images), torch.from_numpy(np.asarray(labels, dtype=np.int64)).flatten()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for epoch in range(epochs):
        batches = torch.randperm(len(x)).split(64)
        total = 0.0
        for batch in batches:
            loss = nn.functional.cross_entropy(network(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1} of {epochs}: loss {total / len(batches):.4f}", flush=True)
    return network.eval().requires_grad_(False)


def make_context(threads: int = 1) -> tenseal.Context:
    """All keys and parameters, of client and server alike."""
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, DEGREE, coeff_mod_bit_sizes=MODULUS_BITS, n_threads=threads)
    context.global_scale = 2**SCALE_BITS
    context.generate_galois_keys()
    return context


def run(images: Images, labels: NDArray[Any], network: ConvNet, count: int, threads: int = 1) -> dict[str, Any]:
    """Encrypt, evaluate and decrypt the first `count` images one after the other."""
    if not 0 < count <= len(images):
        raise ValueError(f"count must be between 1 and {len(images)}, not {count}")
    pixels = scaled(images[:count])
    truth = np.asarray(labels).reshape(-1)[:count]
    with torch.no_grad():
        clear = network(pixels).numpy()
    encrypted = EncryptedConvNet(network)
    context = make_context(threads)
    height, width = network.conv.kernel_size
    stride = network.conv.stride[0]
    clock = time.process_time  # of all threads of this process, TenSEAL's own among them
    marks, logits = [], []
    start = time.perf_counter()
    for image in pixels[:, 0]:
        began = clock()
        columns, windows = tenseal.im2col_encoding(context, image.tolist(), height, width, stride)
        sent = clock()
        answer = encrypted(columns, windows)
        received = clock()
        logits.append(answer.decrypt())
        marks.append((began, sent, received, clock()))
    wall = time.perf_counter() - start
    found = np.asarray(logits)
    seconds = np.diff(marks, axis=1)
    encrypt, evaluate, decrypt = seconds.mean(axis=0).tolist()
    return {
        "library": f"tenseal {tenseal.__version__}",
        "poly_modulus_degree": DEGREE,
        "coeff_mod_bit_sizes": MODULUS_BITS,
        "scale_bits": SCALE_BITS,
        "n_threads": threads,
        "images": count,
        "accuracy": float((found.argmax(1) == truth).mean()),
        "accuracy_in_the_clear": float((clear.argmax(1) == truth).mean()),
        "agreement": float((found.argmax(1) == clear.argmax(1)).mean()),
        # the first prime leaves five bits before the point, sign included: logits with a large mean wrap around
        "logit_error": {"median": float(np.median(abs(found - clear))), "largest": float(abs(found - clear).max())},
        "cpu_seconds_per_image": {"encrypt": encrypt, "evaluate": evaluate, "decrypt": decrypt},
        "evaluate_cpu_seconds_range": [float(seconds[:, 1].min()), float(seconds[:, 1].max())],
        "wall_seconds_per_image": wall / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds mnist.npz")
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the batches are small: more threads only wait for each other
    data = load_dataset("mnist", options.data)
    network = train_network(data.train.images, data.train.labels)
    with torch.no_grad():
        guesses = network(scaled(data.test.images)).argmax(1).numpy()
    share = float((guesses == np.asarray(data.test.labels).reshape(-1)).mean())
    print(f"in the clear, all {len(guesses)} test images: accuracy {share:.2%}", flush=True)
    record = run(data.test.images, data.test.labels, network, options.images)
    record["accuracy_in_the_clear_all_test_images"] = share
    print(json.dumps(record, indent=1))
    if options.out:
        write_atomically(options.out, lambda part: part.write_text(json.dumps(record, indent=1) + "\n"))


if __name__ == "__main__":
    main()
