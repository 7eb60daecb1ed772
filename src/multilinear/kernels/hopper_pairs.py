"""Arithmetic with pairs of numbers of 16 bits on Hopper, which takes as long as with one number of 32 and needs half
the registers. Each result is rounded once."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from multilinear.kernels.hopper_parts import accumulator, along, halves, in_full, sum_rows, zeros


@gluon.constexpr_function
def instruction(name, kind, inputs):
    """For a pair of such numbers."""
    operands = ", ".join(f"${i}" for i in range(inputs + 1))
    return f"{name}.rn.{'bf16x2' if kind == gl.bfloat16 else 'f16x2'} {operands};"


@gluon.jit
def multiplied(x, y):
    return gl.inline_asm_elementwise(instruction("mul", x.dtype, 2), "=r,r,r", [x, y], x.dtype, True, 2)


@gluon.jit
def multiplied_onto(x, y, z):
    """Products, and something more."""
    return gl.inline_asm_elementwise(instruction("fma", x.dtype, 3), "=r,r,r,r", [x, y, z], x.dtype, True, 2)


@gluon.jit
def in_two(x, kind: gl.constexpr):
    """Numbers for rows of a tile as two of 16 bits, next to which the second is what the first leaves."""
    high = x.to(kind)
    return along(high, 64), along((x - high.to(gl.float32)).to(kind), 64)


@gluon.jit
def rows_multiplied(x, parts):
    """A tile of 64 columns, each row times such a number, rounded about once."""
    return multiplied_onto(x, parts[0], multiplied(x, parts[1]))


@gluon.jit
def added(x, y):
    return gl.inline_asm_elementwise(instruction("add", x.dtype, 2), "=r,r,r", [x, y], x.dtype, True, 2)


@gluon.jit
def pairs_added(x, y, kind: gl.constexpr):
    """The same where pairs are held as numbers of 32 bits."""
    return gl.inline_asm_elementwise(instruction("add", kind, 2), "=r,r,r", [x, y], gl.int32, True, 1)


@gluon.jit
def eights(x):
    """Eight columns each of a tile of 32 or 64: the same registers."""
    left, right = halves(x)
    if x.shape[1] > 32:
        l0, l1 = halves(left)
        r0, r1 = halves(right)
        return halves(l0) + halves(l1) + halves(r0) + halves(r1)
    else:
        return halves(left) + halves(right)


@gluon.jit
def kept_eights(vectors, i):
    """The same of 32 columns of a row, piece i of such as are kept."""
    layout: gl.constexpr = gl.SliceLayout(0, accumulator(8))
    out = ()
    for k in gl.static_range(4):
        out = out + (vectors.index(i).slice(8 * k, 8).load(layout)[None, :],)
    return out


@gluon.jit
def four_products(x, y, k: gl.constexpr):
    """Of four such parts, added up."""
    out = multiplied(x[k], y[k])
    for i in gl.static_range(k + 1, k + 4):
        out = multiplied_onto(x[i], y[i], out)
    return in_full(out)


@gluon.jit
def row_products(x, y):
    """Products of such parts, added up for each row and each of eight columns, in one thread."""
    if len(x) == 8:
        return four_products(x, y, 0) + four_products(x, y, 4)
    else:
        return four_products(x, y, 0)


@gluon.jit
def row_squares(x):
    """The same of squares, with numbers of 32 bits where 16 might not be enough."""
    if x[0].dtype == gl.bfloat16:
        return row_products(x, x)
    else:
        out = in_full(x[0]) * in_full(x[0])
        for i in gl.static_range(1, 8):
            out += in_full(x[i]) * in_full(x[i])
        return out


@gluon.jit
def four_parts(x, k: gl.constexpr):
    if x[k].dtype == gl.bfloat16:
        return in_full(added(added(x[k], x[k + 1]), added(x[k + 2], x[k + 3])))
    else:  # which four together might not fit
        return in_full(x[k]) + in_full(x[k + 1]) + in_full(x[k + 2]) + in_full(x[k + 3])


@gluon.jit
def row_sums(x):
    """The same of the parts themselves."""
    if len(x) == 8:
        return four_parts(x, 0) + four_parts(x, 4)
    else:
        return four_parts(x, 0)


@gluon.jit
def row_norm(tiles, place, eps, C: gl.constexpr, ROWS: gl.constexpr):
    """The mean of each row of a tile's pieces, and what makes its variance 1; the pieces less about that mean; and what
    makes these normed, for `normed_pairs`. What is summed up in 16 bits of the pieces as they are only says what about
    the mean is: it is off by so much of a row's size, not of its deviation."""
    kind: gl.constexpr = tiles.dtype
    xs = ()
    total = zeros(8, ROWS)
    for k in gl.static_range(C // 64):
        xs = xs + (tiles.index(place + k).load(accumulator(64, ROWS)),)
        total += row_sums(eights(xs[k]))
    about = (sum_rows(total) / C).to(kind)
    ds = ()
    rests = zeros(8, ROWS)
    squares = zeros(8, ROWS)
    for k in gl.static_range(C // 64):
        ds = ds + (added(xs[k], along(-about, 64)),)
        parts = eights(ds[k])
        rests += row_sums(parts)
        squares += row_squares(parts)
    rest = sum_rows(rests) / C
    scale = gl.rsqrt(gl.maximum(sum_rows(squares) / C - rest * rest, 0.0) + eps)
    mean = about.to(gl.float32) + rest
    return mean, scale, ds, in_two(scale, kind) + (along((-rest * scale).to(kind), 64),)


@gluon.jit
def normed_pairs(d, parts):
    """A piece of a tile as `row_norm` leaves it, normed."""
    return multiplied_onto(d, parts[0], multiplied_onto(d, parts[1], parts[2]))


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
def row_pairs(x, J: gl.constexpr):
    """Rows of a tile that are eight apart, which the same thread has."""
    return x.reshape([4, 2, 8, J]).permute((0, 2, 3, 1)).split()


@gluon.jit
def half_the_rows(x, kind: gl.constexpr):
    """Pairs of one half of each warp's rows added to those of the other."""
    ROWS: gl.constexpr = x.shape[1] // 2
    first, second = x.reshape([4, 2, ROWS, x.shape[2]]).permute((0, 2, 3, 1)).split()
    return pairs_added(first, second, kind)


@gluon.jit
def as_words(x):
    """Pairs of neighbouring columns as numbers of 32 bits, which are the same registers."""
    twice = gl.inline_asm_elementwise("mov.b32 $0, $2; mov.b32 $1, $2;", "=r,=r,r", [x], gl.int32, True, 2)
    return twice.reshape([4, 8, x.shape[2] // 2, 2]).split()[0]


@gluon.jit
def column_products(x, y, J: gl.constexpr):
    """Sums over the rows of each warp of products, and of x, for even columns and for odd ones: products of the first
    of them, what is summed up of it, products of the next. To exchange ahead of them takes far less than an exchange
    for each, and two columns go at once in 16 bits: what is lost by that is nothing among so many."""
    x0, x1 = row_pairs(x, J)
    y0, y1 = row_pairs(y, J)
    products = as_words(multiplied_onto(x1, y1, multiplied(x0, y0)))
    both = gl.join(products, as_words(added(x0, x1))).reshape([4, 8, J])
    both = gl.convert_layout(both, summing(J))
    both = half_the_rows(half_the_rows(half_the_rows(both, x.dtype), x.dtype), x.dtype)
    if x.dtype == gl.bfloat16:
        even = (both << 16).to(gl.float32, bitcast=True)
        odd = (both & -65536).to(gl.float32, bitcast=True)
    else:
        even = both.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        odd = (both >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    layout: gl.constexpr = gl.SliceLayout(1, summing(J))
    even, odd = even.reshape([4, J]), odd.reshape([4, J])
    return (
        gl.convert_layout(even, layout, assert_trivial=True), gl.convert_layout(odd, layout, assert_trivial=True)
    )  # fmt: skip


@gluon.jit
def store_column_sums(ptr, sums, J: gl.constexpr, STRIDE: gl.constexpr):
    """Such sums of a program, added up over its warps: first the products, and STRIDE further what x adds up to."""
    for k in gl.static_range(2):
        total = gl.sum(sums[k], 0)
        place = gl.arange(0, J, layout=total.type.layout)
        gl.store(ptr + place % 2 * STRIDE + place // 2 * 2 + k, total)
