"""The way back through the shift on Hopper: the gradient of u from that of the shifted u, for `hopper_lift_back`.

Two numbers lie in a register. Tiles have 64 columns, the last of which holds the low rank.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from multilinear.kernels.hopper_names import reinterpret
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
