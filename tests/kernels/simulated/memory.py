"""Memory as kernels see it: registers, places in tensors, and shared memory, which keeps account of who uses it."""

import functools
import math

import torch
from triton.experimental.gluon import language as gl

from .program import OnItsWay, Program, Wrong, barrier_at, wait_until

TYPES = {
    gl.bfloat16: torch.bfloat16, gl.float16: torch.float16, gl.float32: torch.float32, gl.int32: torch.int32,
    gl.int64: torch.int64, gl.int1: torch.bool,
}  # fmt: skip
NAMES = {known: name for name, known in TYPES.items()}


class Value:
    """A tensor in registers, or a number; the result of a product only once that is done."""

    def __init__(self, data, layout=None, product=None):
        self.given, self.layout, self.product = data, layout, product

    @property
    def data(self):
        if self.product is not None and not self.product.done:
            raise Wrong("a product is used before it is waited for")
        return self.given

    shape = property(lambda self: tuple(self.given.shape))
    dtype = property(lambda self: NAMES[self.given.dtype])
    type = property(lambda self: self)

    def to(self, dtype, bitcast=False):
        return Value(self.data.view(TYPES[dtype]) if bitcast else self.data.to(TYPES[dtype]), self.layout)

    def reshape(self, *shape):
        return Value(self.data.reshape(*shape))

    def permute(self, order):
        return Value(self.data.permute(order))

    def split(self):
        return Value(self.data[..., 0]), Value(self.data[..., 1])

    def __getitem__(self, index):
        return Value(self.data[index], self.layout)

    def __bool__(self):
        return bool(self.data)

    def __index__(self):
        return int(self.data)

    __int__ = __index__


def plain(x):
    return x.data if isinstance(x, Value) else x


def layout_of(*values):
    return next((x.layout for x in values if isinstance(x, Value) and x.layout is not None), None)


def elementwise(function):
    return lambda *values: Value(torch.as_tensor(function(*map(plain, values))), layout_of(*values))


def _give_operators():
    for name in "add sub mul mod floordiv truediv and or xor lshift rshift lt le gt ge eq ne neg invert".split():
        for method in (f"__{name}__", f"__r{name}__"):
            if hasattr(torch.Tensor, method):
                setattr(Value, method, elementwise(getattr(torch.Tensor, method)))


_give_operators()


class Pointer:
    """Places in a tensor's memory."""

    def __init__(self, memory, places):
        self.memory, self.places = memory, places

    def __add__(self, step):
        return Pointer(self.memory, self.places + torch.as_tensor(plain(step)).long())

    def __getitem__(self, index):
        return Pointer(self.memory, self.places[index])

    def taken(self, mask):
        """The places, and which of them are taken; for others the first one there is."""
        places, taken = torch.broadcast_tensors(self.places, torch.as_tensor(True if mask is None else plain(mask)))
        if not ((places >= 0) & (places < len(self.memory)) | ~taken).all():
            raise Wrong("a place outside of its tensor")
        return places.where(taken, 0), taken


def load(pointer, mask=None, other=None):
    places, taken = pointer.taken(mask)
    values = pointer.memory[places]
    return Value(values if mask is None else torch.where(taken, values, plain(other)).to(values.dtype))


def store(pointer, value, mask=None):
    places, taken = pointer.taken(mask)
    values = torch.as_tensor(plain(value)).to(pointer.memory.dtype).broadcast_to(places.shape)
    pointer.memory[places[taken]] = values[taken]


class Memory:
    """Of one allocation, NaN at first. For each two bytes: copies on their way there, how many read it, which group has
    stored it without a fence since; and which group has loaded it, or given it to a product, and did not meet since, so
    that some of its warps may be behind. Of the left side of a product each warp reads only rows that are its own."""

    def __init__(self, size):
        self.bytes = torch.full((size,), 0xFF, dtype=torch.uint8)
        self.coming, self.readers, self.stored, self.loaded, self.left, self.right = (
            torch.zeros(size // 2, dtype=torch.int16) for _ in range(6)
        )
        Program.now.memories.append(self)


class Tile:
    """Shared memory: `places` says in which bytes each entry is; `turned` if rows are columns of what was allocated,
    `pairs` if its entries are two of what was."""

    def __init__(self, memory, places, dtype, layout, turned=False, pairs=False):
        self.memory, self.places, self.dtype, self.layout = memory, places, dtype, layout
        self.turned, self.pairs = turned, pairs

    shape = property(lambda self: tuple(self.places.shape))
    type = property(lambda self: self)
    words = property(lambda self: self.places // 2)

    def address(self):
        return id(self.memory), int(self.places.flatten()[0])

    def _at(self, places, turned=None):
        return Tile(self.memory, places, self.dtype, self.layout, self.turned if turned is None else turned, self.pairs)

    def index(self, i):
        return self._at(self.places[int(i)])

    def slice(self, start, length, dim=0):
        return self._at(self.places.narrow(dim, int(start), length))

    def permute(self, order):
        return self._at(self.places.permute(order), turned=not self.turned)

    def entries(self):
        return self.memory.bytes.view(TYPES[self.dtype]), self.places // TYPES[self.dtype].itemsize

    def read(self):
        data, places = self.entries()
        return data[places]

    def write(self, values):
        data, places = self.entries()
        data[places] = values

    def load(self, layout=None):
        data = self.read()
        if self.pairs:  # such views have lines beyond those that are taken
            data = data.where(self.memory.coming[self.words] == 0, -1)  # two NaN
        else:
            self.free_of(self.memory.coming, "what is still on its way is read")
        self.memory.loaded[self.words] = 1 + Program.now.group.number
        return Value(data, layout)

    def store(self, value):
        self.free_of(self.memory.coming, "what is still on its way is written over")
        self.free_of(self.memory.readers, "what is still being read is written over")
        self.free_of(self.memory.right, "what a product of other warps may still read is written over")
        assert value.dtype == self.dtype and value.shape == self.shape
        self.write(value.data)
        self.memory.stored[self.words] = 1 + Program.now.group.number

    def free_of(self, marks, what):
        if marks[self.words].any():
            raise Wrong(what)

    def given_away(self):
        """To a product, or to a copy, which see only what is there already and was not just stored."""
        self.free_of(self.memory.coming, "what is still on its way is read")
        self.free_of(self.memory.stored, "what was stored is read without a fence")

    def taken_by_copy(self):
        self.free_of(self.memory.coming, "two copies come to the same place")
        self.free_of(self.memory.readers, "a copy comes to what is still being read")
        for marks in (self.memory.loaded, self.memory.left, self.memory.right):
            self.free_of(marks, "a copy comes to what other warps may still read")
        self.memory.coming[self.words] += 1


def meet():
    """All warps of the group are here."""
    for memory in Program.now.memories:
        for marks in (memory.loaded, memory.left, memory.right):
            marks[marks == 1 + Program.now.group.number] = 0


def fence():
    for memory in Program.now.memories:
        memory.stored[memory.stored == 1 + Program.now.group.number] = 0


@functools.lru_cache
def places_of(shape, size, swizzle):
    """Bytes where entries of that size are. With a swizzle so many bytes of each row stand together."""
    *outer, height, width = shape if swizzle else (*shape[:-1], 1, shape[-1])
    rows, row = torch.arange(height)[:, None], torch.arange(width)[None, :] * size
    span = swizzle or width * size
    inner = (row // span * height + rows) * span + row % span
    starts = torch.arange(math.prod(outer)) * inner.numel() * size
    return (starts[:, None, None] + inner).view(shape)


def placed(start, shape, dtype, layout):
    swizzle = layout.swizzle_byte_width if isinstance(layout, gl.NVMMASharedLayout) else 0
    places = start + places_of(tuple(shape), TYPES[dtype].itemsize, swizzle)
    # of sixteen bytes each, by the place of their row
    return places ^ ((places >> 7 & (swizzle // 16 - 1)) << 4) if swizzle else places


def allocate(dtype, shape, layout):
    places = placed(0, shape, dtype, layout)
    size = int(places.max()) + TYPES[dtype].itemsize
    return Tile(Memory(-(-size // 1024) * 1024), places, dtype, layout)


def reinterpret(tile, dtype, shape, layout):
    places = placed(int(tile.places.flatten()[0]), shape, dtype, layout)
    if int(places.max()) >= len(tile.memory.bytes):
        raise Wrong("a view that goes beyond its memory")
    return Tile(tile.memory, places, dtype, layout, pairs=dtype == gl.int32)


class Matrix:
    """One of which tiles are copied."""

    def __init__(self, given):
        base = given.base.detach()
        self.shape, self.strides, self.block_shape, self.layout = (
            given.shape,
            given.strides,
            given.block_shape,
            given.layout,
        )
        self.dtype, self.itemsize = NAMES[base.dtype], base.itemsize
        assert base.data_ptr() % 16 == 0 and self.strides[0] * base.itemsize % 16 == 0 and self.strides[1] == 1
        length = base.untyped_storage().nbytes() // base.itemsize - base.storage_offset()
        self.memory = base.as_strided((length,), (1,))

    def box(self, corner, tile):
        """Places of the tile's entries, and which of them are inside; for others the first one there is."""
        assert tuple(self.block_shape) == tile.shape and self.dtype == tile.dtype
        assert self.layout.swizzle_byte_width == tile.layout.swizzle_byte_width
        rows, columns = (int(start) + torch.arange(n) for start, n in zip(corner, tile.shape, strict=True))
        rows, columns = rows[:, None], columns[None, :]
        inside = (rows >= 0) & (rows < self.shape[0]) & (columns >= 0) & (columns < self.shape[1])
        return torch.where(inside, rows * self.strides[0] + columns, 0), inside


def load_tile(matrix, corner, bar, tile):
    tile.free_of(tile.memory.stored, "a copy comes to what was stored without a fence")
    tile.taken_by_copy()
    barrier, (places, inside) = barrier_at(bar), matrix.box(corner, tile)

    def come():
        tile.write(torch.where(inside, matrix.memory[places], 0))
        tile.memory.coming[tile.words] -= 1
        barrier.change(0, -places.numel() * matrix.itemsize)

    Program.now.copy(come)


def store_tile(matrix, corner, tile):
    tile.given_away()
    places, inside = matrix.box(corner, tile)
    matrix.memory[places[inside]] = tile.read()[inside]
    OnItsWay([tile], Program.now.group.stores)


def wait_for_stores(count):
    wait_until(Program.now.group.stores, count)
    meet()  # the compiler adds that


def load_each(tile, pointer, mask=None):
    """A place for each entry; entries that are not taken become zeros."""
    tile.taken_by_copy()
    places, taken = pointer.taken(mask)
    assert tile.shape == places.shape
    Program.now.group.loads.append((tile, torch.where(taken, pointer.memory[places], 0)))


def commit_loads():
    group = Program.now.group
    group.committed.append(group.loads)
    group.loads = []


def wait_for_loads(count):
    group = Program.now.group
    meet()  # the compiler adds that
    while len(group.committed) > count:
        for tile, values in group.committed.pop(0):
            tile.memory.coming[tile.words] -= 1
            tile.store(Value(values))
