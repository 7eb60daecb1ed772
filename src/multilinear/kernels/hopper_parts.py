"""What the Hopper kernels are made of: layouts of tiles, rings of tiles that copies fill, and products on their way.

A tile has 64 tokens, a row for each, and belongs to one group of four warps; in `hopper_image` it has 128 and eight
warps, in products over all tokens often fewer. All of it is Triton's Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from multilinear.kernels.hopper_names import load_tile, meet, reinterpret


@gluon.constexpr_function
def accumulator(width, rows=64):
    """How a product of that width lies in registers; each warp has 16 of the rows."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[rows // 16, 1], instr_shape=[16, width, 16])


@gluon.constexpr_function
def rows_layout(rows=64):
    return gl.SliceLayout(1, accumulator(64, rows))


@gluon.constexpr_function
def operand(rows=64):
    """How the left side of a product lies in registers: as the result of another one does."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator(64, rows), k_width=2)


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
def zeros(WIDTH: gl.constexpr, ROWS: gl.constexpr = 64):
    return gl.full([ROWS, WIDTH], 0.0, gl.float32, accumulator(WIDTH, ROWS))


@gluon.jit
def row_zeros(ROWS: gl.constexpr = 64):
    return gl.full([ROWS], 0.0, gl.float32, rows_layout(ROWS))


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


@gluon.constexpr_function
def run_start(pieces, i):
    """Where the i-th of the powers of two begins that add up to `pieces`, the largest one first."""
    return sum(1 << bit for bit in range(pieces.bit_length()) if pieces >> bit & 1 and 1 << bit > run(pieces, i))


@gluon.constexpr_function
def run(pieces, i):
    """The i-th of them."""
    return [1 << bit for bit in reversed(range(pieces.bit_length())) if pieces >> bit & 1][i]


@gluon.constexpr_function
def runs(pieces):
    """How many there are."""
    return pieces.bit_count()


@gluon.jit
def keep_vectors(ptr, LENGTH: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr):
    """Vectors that lie one after the other, in shared memory, in pieces of WIDTH and with zeros behind them: loads from
    global memory would wait for those of tokens that are on their way. They come in few large parts, all at once."""
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    vectors = gl.allocate_shared_memory(gl.float32, [PIECES, WIDTH], one)
    loaded = ()
    for i in gl.static_range(runs(PIECES)):
        place = gl.arange(0, WIDTH * run(PIECES, i), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        place += WIDTH * run_start(PIECES, i)
        loaded = loaded + (gl.load(ptr + place, mask=place < LENGTH, other=0.0),)
    for i in gl.static_range(runs(PIECES)):
        # all in runs of that length, of which this is one, since the larger ones come first
        parts = reinterpret(vectors, gl.float32, [PIECES // run(PIECES, i), WIDTH * run(PIECES, i)], one)
        parts.index(run_start(PIECES, i) // run(PIECES, i)).store(loaded[i])
    return vectors


@gluon.jit
def kept(vectors, i, WIDTH: gl.constexpr, ROWS: gl.constexpr = 64):
    """Piece i of such vectors, or its first part: a number for each column."""
    return vectors.index(i).slice(0, WIDTH).load(gl.SliceLayout(0, accumulator(WIDTH, ROWS)))[None, :]


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
    """All warps of a group are done with a slot."""
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


@gluon.constexpr_function
def own_columns(width):
    """How a product lies in registers if of each 32 columns those that a thread has stand side by side, eight at a
    time, which so are copied at once."""
    blocks = [[0, 32 << i] for i in range((width // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *blocks], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, width],
    )  # fmt: skip


@gluon.jit
def own_place(column):
    """Where one of 64 columns stands in that order, or which one stands there."""
    return column & 33 | (column & 6) << 2 | (column & 24) >> 2


@gluon.jit
def in_own_order(x):
    """Columns in that order, or back in the usual one: the same numbers in the same threads."""
    return x.reshape([64, x.shape[1] // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape(x.shape)


@gluon.jit
def store_own(ptr, row, rows, first, x, STRIDE: gl.constexpr):
    """Columns from `first` on of a matrix whose rows are STRIDE apart, in that order."""
    layout: gl.constexpr = own_columns(x.shape[1])
    x = gl.convert_layout(in_own_order(x), layout)
    index = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    j = first + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(ptr + index * STRIDE + j, x, mask=index < rows)


@gluon.jit
def load_own(tile):
    """A tile that was stored like that, in the usual order."""
    x = tile.load(own_columns(tile.shape[1]))
    return gl.convert_layout(in_own_order(x), accumulator(tile.shape[1]))


@gluon.jit
def store_columns(
    ptr, row, rows, first, x, WIDTH: gl.constexpr, STRIDE: gl.constexpr, LIMIT: gl.constexpr
):  # fmt: skip
    """Columns from `first` on, up to LIMIT, of a matrix whose rows are STRIDE apart."""
    index = row + gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(WIDTH)))[:, None]
    j = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, accumulator(WIDTH)))[None, :]
    gl.store(ptr + index * STRIDE + j, x, mask=(index < rows) & (j < LIMIT))


@gluon.jit
def fetch(desc, row, bar, tiles, place, C: gl.constexpr, ROWS: gl.constexpr = 64):
    """Start copying rows of C columns."""
    mbarrier.expect(bar, C * ROWS * 2)
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


@gluon.jit
def load_rows(tiles, place, eps, C: gl.constexpr, ROWS: gl.constexpr = 64):
    """A tile's pieces, the mean of each row and what makes its variance 1."""
    xs = ()
    total = row_zeros(ROWS)
    for k in gl.static_range(C // 64):
        xs = xs + (tiles.index(place + k).load(accumulator(64, ROWS)),)
        total += gl.sum(xs[k].to(gl.float32), 1)
    mean = total / C
    total = row_zeros(ROWS)
    for k in gl.static_range(C // 64):
        x = xs[k].to(gl.float32) - mean[:, None]
        total += gl.sum(x * x, 1)
    return xs, mean, gl.rsqrt(total / C + eps)


@gluon.constexpr_function
def summing(width):
    """How a warp holds eight rows to add them up: all in one thread, which has one column, or two of 64."""
    if width == 64:
        return gl.DistributedLinearLayout(
            [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 0, 1]],
            [[0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
            [[1, 0, 0], [2, 0, 0]], [], [4, 8, 64],
        )  # fmt: skip
    else:
        return gl.DistributedLinearLayout(
            [[0, 1, 0], [0, 2, 0], [0, 4, 0]],
            [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
            [[1, 0, 0], [2, 0, 0]], [], [4, 8, 32],
        )  # fmt: skip


@gluon.jit
def column_sums(x, y, J: gl.constexpr):
    """Sums over the rows of each warp. To exchange ahead of them takes far less than an exchange for each, and two
    numbers of 16 bits go at once: what is lost by that is nothing among so many."""
    x = gl.sum(x.reshape([4, 2, 8, J]), 1)
    y = gl.sum(y.reshape([4, 2, 8, J]), 1)
    both = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [x, y], gl.int32, True, 1)
    both = gl.convert_layout(both, summing(J))
    x = (both & -65536).to(gl.float32, bitcast=True)
    y = (both << 16).to(gl.float32, bitcast=True)
    return gl.sum(x, 1), gl.sum(y, 1)


@gluon.jit
def thread_sums(x):
    """Sums of each row over the columns that a thread has, of which four have the same row."""
    return gl.sum(gl.sum(x.reshape([64, x.shape[1] // 8, 4, 2]), 3), 1)
