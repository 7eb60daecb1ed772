"""The way back through the shift on Hopper: the gradient of u from that of the shifted u.

For `hopper_lift_back` it comes from memory, in tiles of 64 columns, the last of which holds the low rank; where an
image is a tile, `hopper_mu1_back` has it in shared memory, as `hopper_image` has u on the way
forward. Two numbers lie in a register.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from multilinear.kernels.hopper_names import meet, reinterpret
from multilinear.kernels.hopper_parts import nothing


@gluon.constexpr_function
def vector(low):
    """How many pairs of channels of the low rank are loaded at once: so many lie in a quarter, and move together."""
    return 1 if low % 16 else 2


@gluon.constexpr_function
def shared_out(pairs, together):
    """How the pairs of a token are shared out, so many to a thread."""
    return gl.BlockedLayout([1, together], [32 * together // pairs, pairs // together], [4, 1], [1, 0])


@gluon.constexpr_function
def as_pairs(width):
    """A tile of that width as one of pairs."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * width, element_bitwidth=32, rank=2)


@gluon.jit
def load_back(
    E_ptr, row, rows, grid, first, R: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr, V: gl.constexpr
):  # fmt: skip
    """Pairs `first` on, of R that are shifted, of the gradient of 64 tokens' u: from where each of them had gone to,
    and from the token itself, where at the border it also stayed."""
    layout: gl.constexpr = shared_out(WIDTH, V)
    height, width, magic_height, magic_width = grid
    token = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    line = gl.umulhi(token, magic_width)  # a product by 2^32 / width instead of a division
    x = (token - line * width)[:, None]
    y = (line - gl.umulhi(line, magic_height) * height)[:, None]
    token = token[:, None]
    j = (first + nothing(row) + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)))[None, :]
    quarter = (j * 4) // R
    # the quarters had moved down, up, right and left
    upright = quarter < 2
    ahead = quarter % 2 == 0
    last = gl.where(upright, height, width) - 1
    step = gl.where(upright, width, 1)
    step = gl.where(ahead, step, -step)
    way = gl.where(upright, y, x)
    way = gl.where(ahead, way, last - way)  # from the border where it stayed to the one from where none comes
    inside = (token < rows) & (j < R)
    here = E_ptr + token * STRIDE + j
    there = gl.max_contiguous(gl.multiple_of(here + step * STRIDE, [1, 4 * V]), [1, V])
    here = gl.max_contiguous(gl.multiple_of(here, [1, 4 * V]), [1, V])
    came = gl.load(there, mask=gl.max_constancy(inside & (way < last), [1, V]), other=0)
    stayed = gl.load(here, mask=gl.max_constancy(inside & (way == 0), [1, V]), other=0)
    return came, stayed


@gluon.jit
def load_low(E_ptr, row, rows, grid, C: gl.constexpr, L1: gl.constexpr, STRIDE: gl.constexpr):
    """The same for the low rank, 16 columns at a time; past its last column zeros."""
    loaded = ()
    for j in gl.static_range((L1 + 15) // 16):
        loaded = loaded + (load_back(E_ptr + C // 2, row, rows, grid, 8 * j, L1 // 2, 8, STRIDE // 2, vector(L1)),)
    return loaded


@gluon.jit
def add_pairs(x, y, kind: gl.constexpr):
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.int32, True, 1)


# Both numbers of a pair as float32, times another, and back.
BF16_TIMES = gl.constexpr("""{
    .reg .b32 low, high;
    .reg .f32 x, y;
    shl.b32 low, $1, 16;
    and.b32 high, $1, 0xffff0000;
    mov.b32 x, low;
    mov.b32 y, high;
    mul.f32 x, x, $2;
    mul.f32 y, y, $2;
    cvt.rn.bf16x2.f32 $0, y, x;
}""")
F16_TIMES = gl.constexpr("""{
    .reg .b16 low, high;
    .reg .f32 x, y;
    mov.b32 {low, high}, $1;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    mul.f32 x, x, $2;
    mul.f32 y, y, $2;
    cvt.rn.f16x2.f32 $0, y, x;
}""")


@gluon.jit
def scaled(x, scale, kind: gl.constexpr):
    """Both numbers of each pair, times one for each row."""
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise(BF16_TIMES, "=r,r,f", [x, scale[:, None]], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise(F16_TIMES, "=r,r,f", [x, scale[:, None]], gl.int32, True, 1)


@gluon.jit
def load_scale(norms_ptr, row, rows, pairs: gl.constexpr, together: gl.constexpr):
    """What makes the variance of each row 1, where pairs are shared out like that."""
    index = row + gl.arange(0, 64, layout=gl.SliceLayout(1, shared_out(pairs, together)))
    return gl.load(norms_ptr + rows + index, mask=index < rows, other=1.0)


@gluon.jit
def load_all(
    E_ptr, norms_ptr, row, rows, grid, C: gl.constexpr, L1: gl.constexpr, STRIDE: gl.constexpr, kind: gl.constexpr
):  # fmt: skip
    """The gradient of u in pieces of 64 columns, and of 16 of the low rank, each row divided by the deviation of x."""
    loaded = ()
    for k in gl.static_range(C // 64):
        loaded = loaded + (load_back(E_ptr, row, rows, grid, 32 * k, C // 2, 32, STRIDE // 2, 4),)
    loaded = loaded + load_low(E_ptr, row, rows, grid, C, L1, STRIDE)
    scale = load_scale(norms_ptr, row, rows, 32, 4)
    low_scale = load_scale(norms_ptr, row, rows, 8, vector(L1))
    du = ()
    for i in gl.static_range(len(loaded)):
        total = add_pairs(loaded[i][0], loaded[i][1], kind)
        if i < C // 64:
            du = du + (scaled(total, scale, kind),)
        else:
            du = du + (scaled(total, low_scale, kind),)
    return du


@gluon.jit
def stage(spare, tiles_g, free, place, i: gl.constexpr, STAGES: gl.constexpr):
    """Where piece i of du is: in one of the spare tiles, from `free` on, or, if these are too few, where the gradient
    will come."""
    if i < STAGES:
        return spare.index(free + i)
    else:
        return tiles_g.index(place + i - STAGES)


@gluon.jit
def put_down(
    buffers, free, place, du, FROM: gl.constexpr, TO: gl.constexpr, C: gl.constexpr, L1: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Pieces of du, the last of which is the low rank, to where they are multiplied."""
    P: gl.constexpr = C // 64
    for i in gl.static_range(FROM, TO):
        tile = reinterpret(stage(buffers[2], buffers[1], free, place, i, STAGES), gl.int32, [64, 32], as_pairs(64))
        if i < P:
            tile.store(du[i])
        else:
            for j in gl.static_range((L1 + 15) // 16):
                tile.slice(8 * j, 8, 1).store(du[P + j])
    fence_async_shared()


@gluon.constexpr_function
def held(pairs, rows):
    """How pairs of columns lie in registers: as two columns of a product do. A warp has two lines of an image of 8x8
    tokens, each thread the same place in both, and threads of neighbouring tokens are four apart."""
    registers = [[8, 0]] + [[0, 4 << k] for k in range((pairs // 4).bit_length() - 1)]
    warps = [[16 << k, 0] for k in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [rows, pairs]
    )  # fmt: skip


@gluon.jit
def pairs_at(lines, first, PAIRS: gl.constexpr, ROWS: gl.constexpr):
    """Tokens from a line of 8 on, in pairs of columns."""
    return reinterpret(lines.index(first), gl.int32, [ROWS, PAIRS], as_pairs(2 * PAIRS))


@gluon.constexpr_function
def has(quarter, first, width, pairs):
    """Whether any of so many pairs from `first` on, of those that are shifted, is of that quarter."""
    return first * 4 // pairs <= quarter <= min(first + width - 1, pairs - 1) * 4 // pairs


@gluon.jit
def of_quarter(q: gl.constexpr, first: gl.constexpr, x, y, R: gl.constexpr):
    """x for pairs of that quarter, of R from `first` on, and y for others."""
    WIDTH: gl.constexpr = x.shape[1]
    if not has(q - 1, first, WIDTH, R) and not has(q + 1, first, WIDTH, R):
        return x
    else:
        j = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, x.type.layout))[None, :]
        return gl.where((j >= q * (R // 4)) & (j < (q + 1) * (R // 4)), x, y)


@gluon.jit
def from_left(x):
    """What the token to the left has; the first one of a line its own."""
    return gl.inline_asm_elementwise("shfl.sync.up.b32 $0, $1, 4, 0, -1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def from_right(x):
    return gl.inline_asm_elementwise("shfl.sync.down.b32 $0, $1, 4, 31, -1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def moved_back(
    lines, place, scale, first: gl.constexpr, R: gl.constexpr, WIDTH: gl.constexpr, kind: gl.constexpr
):  # fmt: skip
    """What `load_all` gives, for an image of 8x8 tokens that is a tile in shared memory, from a line on."""
    layout: gl.constexpr = held(WIDTH, 64)
    token = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    x = token % 8
    here = pairs_at(lines, place, WIDTH, 64).load(layout)
    came = here
    stayed = here
    if has(0, first, WIDTH, R):
        below = gl.where(token < 56, pairs_at(lines, place + 1, WIDTH, 64).load(layout), 0)
        came = of_quarter(0, first, below, came, R)
        stayed = of_quarter(0, first, gl.where(token < 8, here, 0), stayed, R)
    if has(1, first, WIDTH, R):
        above = gl.where(token >= 8, pairs_at(lines, place - 1, WIDTH, 64).load(layout), 0)
        came = of_quarter(1, first, above, came, R)
        stayed = of_quarter(1, first, gl.where(token >= 56, here, 0), stayed, R)
    if has(2, first, WIDTH, R):
        came = of_quarter(2, first, gl.where(x < 7, from_right(here), 0), came, R)
        stayed = of_quarter(2, first, gl.where(x == 0, here, 0), stayed, R)
    if has(3, first, WIDTH, R):
        came = of_quarter(3, first, gl.where(x > 0, from_left(here), 0), came, R)
        stayed = of_quarter(3, first, gl.where(x == 7, here, 0), stayed, R)
    return scaled(add_pairs(came, stayed, kind), scale, kind)


@gluon.jit
def unshift(
    lines, low_lines, norms_ptr, row, rows, place, low, C: gl.constexpr, L1: gl.constexpr, J: gl.constexpr,
    kind: gl.constexpr,
):  # fmt: skip
    """The gradient of u where that of the shifted u is, in tiles of J columns and of 16 of the low rank, each row
    divided by the deviation of x."""
    index = row + gl.arange(0, 64, layout=gl.SliceLayout(1, held(J // 2, 64)))
    low_index = row + gl.arange(0, 64, layout=gl.SliceLayout(1, held(8, 64)))
    scale = gl.load(norms_ptr + rows + index, mask=index < rows, other=1.0)
    low_scale = gl.load(norms_ptr + rows + low_index, mask=low_index < rows, other=1.0)
    new = ()
    for i in gl.static_range(C // J):
        new = new + (moved_back(lines, 8 * (place + i) + 1, scale, J // 2 * i, C // 2, J // 2, kind),)
    for j in gl.static_range(L1 // 16):
        new = new + (moved_back(low_lines, 8 * (low + j) + 1, low_scale, 8 * j, L1 // 2, 8, kind),)
    meet()  # all have read it
    for i in gl.static_range(C // J):
        pairs_at(lines, 8 * (place + i) + 1, J // 2, 64).store(new[i])
    for j in gl.static_range(L1 // 16):
        pairs_at(low_lines, 8 * (low + j) + 1, 8, 64).store(new[C // J + j])
    fence_async_shared()
    meet()
