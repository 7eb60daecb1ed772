"""Runs of Poly-Blocks without norms on an NVIDIA GPU, for inference in 16 bits: one kernel a block."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor, nn

from multilinear.errors import MultilinearError
from multilinear.kernels.block_sizes import TILES, Tile, align, aligned, chunk, parts
from multilinear.kernels.cpu import Mu
from multilinear.kernels.launch import launch
from multilinear.kernels.polynomial_block import block, enter

PLACES = 2**31  # in memory, which kernels count in 32 bits
LEAD = 32  # columns of u at a time
ROOM = 160 * 1024  # bytes of shared memory that tiles for large GPUs may take
SMALL = Tile(64, 4, 32, 2)  # for others, at any width


class Weights(NamedTuple):
    """Of one block, in the precision of the activations; `vectors` and `bias`, that of u, in float32."""

    AD: Tensor
    bias: Tensor
    B1: Tensor
    C1: Tensor
    A2: Tensor
    D2: Tensor | None
    B2: Tensor
    C2: Tensor
    vectors: Tensor


class Blocks(nn.Module):
    """Poly-Blocks of one width on (..., H, W, C), from the two folded Mu-Layers of each, which all have the same sizes.

    Args:
        shifts: borders of the shifts on both branches of the first Mu-Layers; there is none on those of the second.
        dtype: of the weights and of what lies between blocks; within a block sums and the stream are float32.
    """

    def __init__(
        self, blocks: Sequence[tuple[Mu, Mu]], shifts: tuple[str | None, str | None], dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert serves(*blocks[0], shifts)
        self.dtype = dtype
        # no buffers: `to` would round the vectors
        self.weights = [_pack(*pair, dtype) for pair in blocks]
        mu1, mu2 = blocks[0]
        self.channels = mu1.A[0].shape[1]
        self.device = mu1.A[0].device
        self.tile = tile_for(self.channels, self.device)
        self.wide = len(self.weights[0].AD)
        self.constants = _constants(mu1, mu2) | {"KEEP": shifts[0] == "keep", "SHIFT1": shifts[1] is not None}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.channels or x.ndim < 3 or x.device != self.device:
            raise MultilinearError(
                f"these blocks take (..., height, width, {self.channels}) on {self.device}, where they were made; got "
                f"{tuple(x.shape)} on {x.device}"
            )
        x = aligned(x.to(self.dtype).contiguous())
        height, width = x.shape[-3:-1]
        rows, stride = x.numel() // self.channels, align(self.wide)
        if rows * max(stride, self.channels) >= PLACES:
            images = x.view(-1, *x.shape[-3:])
            if len(images) == 1:
                raise MultilinearError(f"an image of {height} x {width} tokens is too large for these blocks")
            return torch.cat([self(part) for part in images.chunk(2)]).view_as(x)
        out = torch.empty_like(x)
        if rows:
            with torch.cuda.device_of(x):  # which may not be the current one
                self._run(x, out, rows, height, width, stride)
        return out

    def _run(self, x: Tensor, out: Tensor, rows: int, height: int, width: int, stride: int) -> None:
        first, *rest = self.weights
        u, following = (x.new_empty(rows, stride) for _ in range(2))
        programs = triton.cdiv(rows, self.tile.tokens)
        common = {"T": self.tile.tokens, "num_warps": self.tile.warps, "num_stages": self.tile.stages}
        known = self.constants | {"US": stride, "U": self.wide}
        widths = {name: known[name] for name in ("C", "C0", "C1", "U", "US")}
        launch(enter, programs, x, u, first.AD, first.bias, rows, **widths, J=LEAD, **common)
        for weights, after in zip(self.weights, (*rest, None), strict=True):
            ahead = after or weights
            launch(
                block, programs,
                x, u, out, following, *weights[2:], ahead.AD, ahead.bias, rows, height, width, **known,
                LAST=after is None, J1=chunk(known["R1"], self.tile.chunk), J2=chunk(known["R2"], self.tile.chunk),
                JU=LEAD, STAGES=self.tile.stages, **common,
            )  # fmt: skip
            x, u, following = out, following, u  # each program has read what it writes over, but for u


def serves(mu1: Mu, mu2: Mu, shifts: tuple[str | None, str | None]) -> bool:
    """Whether the kernel takes blocks like this: widths that are a sum of two powers of two, whole chunks and whole
    quarters, and what a processor has room for."""
    channels, rank1, rank2 = mu1.A[0].shape[1], len(mu1.A[0]), len(mu2.A[0])
    lows = [channels if mu.D is None else len(mu.D[0]) for mu in (mu1, mu2)]
    moved = shifts[0] is not None and shifts[1] in (None, shifts[0]) and (mu1.D is not None or shifts[1] is None)
    exact = channels % 16 == 0 and sum(parts(channels)) == channels <= max(TILES)
    return moved and exact and rank1 % 16 == 0 and rank2 % 16 == 0 and lows[0] % 4 == 0 and max(lows) <= max(TILES)


def tile_for(channels: int, device: torch.device) -> Tile:
    """That of the second Mu-Layer of a block with norms, which was measured and has the same parts, where it fits."""
    if device.type == "cuda" and torch.cuda.get_device_properties(device).shared_memory_per_block_optin < ROOM:
        return SMALL
    return next(table["mu2"] for most, table in TILES.items() if channels <= most)


def _constants(mu1: Mu, mu2: Mu) -> dict[str, int]:
    channels, rank1 = mu1.A[0].shape[1], len(mu1.A[0])
    low1, low2 = (channels if mu.D is None else len(mu.D[0]) for mu in (mu1, mu2))
    c, l1, l2 = (parts(width) for width in (channels, low1, low2))
    return {
        "C": channels, "C0": c[0], "C1": c[1], "R1": rank1, "L1": low1, "L10": l1[0], "L11": l1[1],
        "V1": chunk(rank1 // 4, 8), "VL1": chunk(low1 // 4, 8), "R2": len(mu2.A[0]), "L2": low2, "L20": l2[0],
        "L21": l2[1], "LOW1": mu1.D is not None, "LOW2": mu2.D is not None,
    }  # fmt: skip


def _pack(mu1: Mu, mu2: Mu, dtype: torch.dtype) -> Weights:
    def rounded(weight: Tensor) -> Tensor:
        return weight.to(dtype).contiguous()

    (A1, a1), (B1, b1), (C1, c1) = mu1.A, mu1.B, mu1.C
    (A2, a2), (B2, b2), (C2, c2) = mu2.A, mu2.B, mu2.C
    D1, d1 = mu1.D or (A1[:0], a1[:0])
    D2, d2 = mu2.D or (None, A1.new_zeros(A1.shape[1]))  # as many places as the kernel counts
    return Weights(
        AD=rounded(torch.cat([A1, D1])),
        bias=torch.cat([a1, d1]).float(),
        B1=rounded(B1),
        C1=rounded(C1),
        A2=rounded(A2),
        D2=None if D2 is None else rounded(D2),
        B2=rounded(B2),
        C2=rounded(C2),
        vectors=torch.cat([mu1.shift_a, b1, c1, a2 + mu2.shift_a, d2, b2, c2]).float(),
    )
