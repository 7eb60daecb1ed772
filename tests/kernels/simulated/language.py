"""What Gluon kernels call: its language, products, and the assembly that they contain."""

import functools
import itertools

import torch
from triton.experimental.gluon import language as gl

from . import memory
from .memory import NAMES, TYPES, Tile, Value, elementwise, layout_of, plain
from .program import OnItsWay, Program, wait_until


def multiply(a, b, acc, use_acc=True, is_async=False):
    """A product on its way."""
    assert is_async and acc.dtype == gl.float32 and acc.shape == (a.shape[0], b.shape[1]) and a.shape[1] == b.shape[0]
    tiles = [part for part in (a, b) if isinstance(part, Tile)]
    for tile in tiles:
        tile.given_away()
        own = tile is a and not tile.turned
        (tile.memory.left if own else tile.memory.right)[tile.words] = 1 + Program.now.group.number
    left, right = (part.read() if isinstance(part, Tile) else part.data for part in (a, b))
    assert left.dtype == right.dtype
    out = left.float() @ right.float()
    return Value(acc.given + out if use_acc else out, acc.layout, OnItsWay(tiles, Program.now.group.products))


def products_done(count, deps):
    wait_until(Program.now.group.products, count)
    Program.now.wait()
    return deps[0] if len(deps) == 1 else tuple(deps)


def paired(function, kind):
    """With two numbers of 16 bits in each of 32, or with one number for both."""

    def two(x):
        return plain(x).contiguous().view(torch.int16).unflatten(-1, (-1, 2)).view(kind)

    def run(x, y):
        other = two(y) if plain(y).dtype == torch.int32 else plain(y)[..., None]
        return function(two(x), other).to(kind).flatten(-2).view(torch.int32)

    return run


@functools.lru_cache
def held_by(layout):
    """Which row and column each register of each lane of each warp has."""
    axes = []
    for bases in (layout.reg_bases, layout.lane_bases, layout.warp_bases):
        bits = itertools.product((0, 1), repeat=len(bases))  # the last one counts first
        places = [[sum(base[d] * bit for base, bit in zip(bases, taken[::-1], strict=True)) for d in (0, 1)]
                  for taken in bits]  # fmt: skip
        axes.append(torch.tensor(places))
    places = axes[0][:, None, None] + axes[1][None, :, None] + axes[2][None, None]
    return places[..., 0], places[..., 1]


def shuffled(step):
    """What the lane so far away has; the lane's own where there is none."""

    def run(x):
        places, lanes = held_by(x.layout), torch.arange(32)
        source = torch.where((lanes + step >= 0) & (lanes + step < 32), lanes + step, lanes)
        out = torch.empty_like(plain(x))
        out[places] = plain(x)[places][:, source]
        return out

    return run


def beside(first, second):
    return torch.stack([plain(second), plain(first)], -1).bfloat16().view(torch.int32)[..., 0]


# By how the code begins.
ASSEMBLY = {
    "mul.rn.bf16x2 $0, $1, $2;": lambda x, y: plain(x) * plain(y),
    "mul.rn.f16x2 $0, $1, $2;": lambda x, y: plain(x) * plain(y),
    "cvt.rn.bf16x2.f32 $0, $1, $2;": beside,
    "add.rn.bf16x2 $0, $1, $2;": paired(torch.add, torch.bfloat16),
    "add.rn.f16x2 $0, $1, $2;": paired(torch.add, torch.float16),
    "{\n    .reg .b32 low, high;": paired(lambda x, y: x.float() * y, torch.bfloat16),
    "{\n    .reg .b16 low, high;": paired(lambda x, y: x.float() * y, torch.float16),
    "shfl.sync.up.b32 $0, $1, 4, 0, -1;": shuffled(-4),
    "shfl.sync.down.b32 $0, $1, 4, 31, -1;": shuffled(4),
}


def assembly(code, constraints, values, dtype, is_pure, pack):
    (run,) = [run for start, run in ASSEMBLY.items() if code.startswith(start)]
    out = run(*values)
    assert NAMES[out.dtype] == dtype
    return Value(out, layout_of(*values))


def where(condition, x, y):
    return elementwise(torch.where)(Value(torch.as_tensor(plain(condition))), x, y)


def summed(x, axis):
    data = plain(x)
    return Value(data.float().sum(axis).to(torch.float32 if data.dtype == torch.bfloat16 else data.dtype))


def number(x):
    return Value(torch.tensor(x, dtype=torch.int32))


def same(x, *_):
    return x


def check(condition, *_):
    assert condition


class Language:
    """`gl`; layouts and types are Gluon's own."""

    def __init__(self):
        self.load, self.store, self.allocate_shared_memory = memory.load, memory.store, memory.allocate
        self.where, self.sum, self.static_range, self.static_assert = where, summed, range, check
        self.inline_asm_elementwise = assembly
        self.multiple_of = self.max_contiguous = self.max_constancy = same
        self.rsqrt, self.sqrt = elementwise(torch.rsqrt), elementwise(torch.sqrt)
        self.maximum = elementwise(lambda x, y: torch.clamp(x, min=y))
        self.umulhi = elementwise(lambda x, y: (x.long() * y >> 32).int())

    def __getattr__(self, name):
        return getattr(gl, name)

    def program_id(self, axis):
        return number(Program.now.number)

    def num_programs(self, axis):
        return number(Program.now.count)

    def num_warps(self):
        return Program.now.warps

    def warp_specialize(self, parts, warps, registers):
        Program.now.specialize(parts, warps, registers)

    def arange(self, start, end, layout=None):
        return Value(torch.arange(start, end, dtype=torch.int32))

    def full(self, shape, value, dtype, layout=None):
        return Value(torch.full(shape, value, dtype=TYPES[dtype]))

    def convert_layout(self, x, layout, assert_trivial=False):
        return Value(x.data, layout)

    def join(self, x, y):
        return Value(torch.stack([plain(x), plain(y)], -1))
