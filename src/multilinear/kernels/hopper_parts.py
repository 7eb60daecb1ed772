"""What the Hopper kernels are made of: layouts of tiles, rings of tiles that copies fill, and products on their way.

A tile has 64 tokens, a row for each, and belongs to one group of four warps. All of it is Triton's Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from multilinear.kernels.hopper_names import load_tile, meet


@gluon.constexpr_function
def accumulator(width):
    """How a product of that width lies in registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])


@gluon.constexpr_function
def rows_layout():
    return gl.SliceLayout(1, accumulator(64))


@gluon.constexpr_function
def operand():
    """How the left side of a product lies in registers: as the result of another one does."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator(64), k_width=2)


@gluon.constexpr_function
def piece_width(piece, whole, chunk, tail):
    """The low rank is held in `whole` pieces of `chunk` columns and one of `tail`."""
    return chunk if piece < whole else tail


@gluon.constexpr_function
def resident(channels, rank, chunk, pieces, both, slots, slots_c):
    """Whether both rings hold all that a tile reads: chunks of the hidden width, and of the second form or of both."""
    items = rank // chunk + pieces + (channels // chunk + pieces if both else 0)
    return items == slots and rank // chunk == slots_c


@gluon.jit
def zeros(WIDTH: gl.constexpr):
    return gl.full([64, WIDTH], 0.0, gl.float32, accumulator(WIDTH))


@gluon.jit
def row_zeros():
    return gl.full([64], 0.0, gl.float32, rows_layout())


@gluon.jit
def nothing(number):
    """0, which the compiler cannot know, from a number that is not negative and changes: else it would compute all
    places that depend on nothing else once, and keep them, too many for the registers."""
    return number >> 31


@gluon.jit
def across(ptr, first, WIDTH: gl.constexpr, LIMIT: gl.constexpr):
    """Entries of a vector from `first` on, one for each column; zero from LIMIT on."""
    j = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, accumulator(WIDTH)))
    return gl.load(ptr + j, mask=j < LIMIT, other=0.0)[None, :]


@gluon.jit
def keep_vectors(ptr, LENGTH: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr):
    """Vectors that lie one after the other, in shared memory, in pieces of WIDTH and with zeros behind them: loads from
    global memory would wait for those of tokens that are on their way."""
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    vectors = gl.allocate_shared_memory(gl.float32, [PIECES, WIDTH], one)
    for i in gl.static_range(PIECES):
        place = WIDTH * i + gl.arange(0, WIDTH, layout=gl.BlockedLayout([1], [32], [4], [0]))
        vectors.index(i).store(gl.load(ptr + place, mask=place < LENGTH, other=0.0))
    return vectors


@gluon.jit
def kept(vectors, i, WIDTH: gl.constexpr):
    """Piece i of such vectors, or its first part: a number for each column."""
    return vectors.index(i).slice(0, WIDTH).load(gl.SliceLayout(0, accumulator(WIDTH)))[None, :]


@gluon.jit
def along(x, WIDTH: gl.constexpr):
    """A number for each row, next to tiles of that width."""
    return gl.convert_layout(x, gl.SliceLayout(1, accumulator(WIDTH)))[:, None]


@gluon.jit
def sum_rows(x):
    return gl.convert_layout(gl.sum(x, 1), rows_layout())


@gluon.jit
def extras(scale, first: gl.constexpr, WIDTH: gl.constexpr, kind: gl.constexpr):
    """Columns [1, 1, r', r - r', r'] from `first` on, for r the inverse of each row's scale and r' that as stored.

    They meet a branch's bias and the shift of its norm in the matrices, which so need no vectors of their own.
    """
    column = (gl.arange(0, WIDTH, layout=gl.SliceLayout(0, accumulator(WIDTH))) - first)[None, :]
    inverse = along(1.0 / scale, WIDTH)
    stored = inverse.to(kind).to(gl.float32)
    out = gl.where((column == 2) | (column == 4), stored, 0.0)
    out = gl.where(column == 3, inverse - stored, out)
    return gl.where((column == 0) | (column == 1), 1.0, out)


@gluon.jit
def slot_of(count, SLOTS: gl.constexpr, RESIDENT: gl.constexpr):
    """Place of an item in a ring, and the phase of its barriers; a ring that holds everything is filled once."""
    if RESIDENT:
        return count % SLOTS, 0
    else:
        return count % SLOTS, (count // SLOTS) & 1


@gluon.jit
def start_ring(full, empty, SLOTS: gl.constexpr, GROUPS: gl.constexpr, RESIDENT: gl.constexpr):
    """Set up a ring's barriers, but none that is not used: memory of such a one goes to something else, and the
    processor, which has a cache of its own for barriers, would write it back there at any time."""
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        if not RESIDENT:
            mbarrier.init(empty.index(i), count=GROUPS)


@gluon.jit
def release(bars, slot, RESIDENT: gl.constexpr):
    """All four warps are done with a slot."""
    if not RESIDENT:
        meet()
        mbarrier.arrive(bars.index(slot), count=1)


@gluon.jit
def times(left, right, out, FIRST: gl.constexpr):
    """Start adding `left right'` to `out`, or putting it there."""
    return warpgroup_mma(left, right.permute((1, 0)), out, use_acc=not FIRST, is_async=True)


@gluon.jit
def times_columns(left, right, out, FIRST: gl.constexpr):
    """Start adding `left right` to `out`, or putting it there."""
    return warpgroup_mma(left, right, out, use_acc=not FIRST, is_async=True)


@gluon.jit
def halves(x, RUNS: gl.constexpr = 1):
    """Both halves of a tile's columns, or of each of so many runs of them: the same registers."""
    WIDTH: gl.constexpr = x.shape[1] // 2
    parts = x.reshape([64, RUNS, 2, WIDTH // RUNS]).permute((0, 1, 3, 2))
    left, right = parts.reshape([64, WIDTH, 2]).split()
    layout: gl.constexpr = accumulator(WIDTH)
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def side_by_side(left, right):
    """The other way round."""
    WIDTH: gl.constexpr = 2 * left.shape[1]
    both = gl.join(left, right).permute((0, 2, 1)).reshape([64, WIDTH])
    return gl.convert_layout(both, accumulator(WIDTH), assert_trivial=True)


@gluon.jit
def store_columns(
    ptr, row, rows, first, x, WIDTH: gl.constexpr, STRIDE: gl.constexpr, LIMIT: gl.constexpr
):  # fmt: skip
    """Columns from `first` on, up to LIMIT, of a matrix whose rows are STRIDE apart."""
    index = row + gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(WIDTH)))[:, None]
    j = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, accumulator(WIDTH)))[None, :]
    gl.store(ptr + index * STRIDE + j, x, mask=(index < rows) & (j < LIMIT))


@gluon.jit
def fetch(desc, row, bar, tiles, place, C: gl.constexpr):
    """Start copying 64 rows of C columns."""
    mbarrier.expect(bar, C * 128)
    for k in gl.static_range(C // 64):
        load_tile(desc, [row, 64 * k], bar, tiles.index(place + k))


@gluon.jit
def normed(tiles, place, mean, scale, vectors, k: gl.constexpr, C: gl.constexpr, kind: gl.constexpr):
    x = tiles.index(place + k).load(accumulator(64)).to(gl.float32)
    x = (x - mean[:, None]) * scale[:, None]
    return (x * kept(vectors, k, 64) + kept(vectors, C // 64 + k, 64)).to(kind)


@gluon.jit
def row_norm(tiles, place, eps, C: gl.constexpr):
    """The mean of each row of a tile's pieces, and what makes its variance 1."""
    total = row_zeros()
    for k in gl.static_range(C // 64):
        total += gl.sum(tiles.index(place + k).load(accumulator(64)).to(gl.float32), 1)
    mean = total / C
    total = row_zeros()
    for k in gl.static_range(C // 64):
        x = tiles.index(place + k).load(accumulator(64)).to(gl.float32) - mean[:, None]
        total += gl.sum(x * x, 1)
    return mean, gl.rsqrt(total / C + eps)
