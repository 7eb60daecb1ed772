"""Kernels of a Poly-Block without norms, as `fold` leaves it: nothing is left in it but products, sums and the shift.

Only `u = [A1 | D1] x` is read from other tokens. So a block is one kernel, which ends with the u of the block behind
it, and a run of blocks is `enter` and one kernel for each of them. All between x and the next x stays in registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl

from multilinear.kernels.block_parts import (
    columns,
    gather,
    gather_rows,
    load_low,
    load_rows,
    low_rank,
    multiply,
    spread,
    store_rows,
)


@triton.jit
def lead(
    n0, n1, u_ptr, AD_ptr, bias_ptr, row, live, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    U: tl.constexpr, US: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Write u = [A1 | D1] n + bias."""
    for start in range(0, U, J):
        j = columns(start, J)
        inside = j < U
        out = multiply(n0, n1, AD_ptr, j, C, C0, C1, U, 1, C, U % J != 0)
        out += tl.load(bias_ptr + j, mask=inside, other=0.0)[None, :]
        place = u_ptr + row[:, None] * US + j[None, :]
        tl.store(place, out.to(u_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def enter(
    x_ptr, u_ptr, AD_ptr, bias_ptr, rows, C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, U: tl.constexpr,
    US: tl.constexpr, T: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """The u of the first block."""
    row = tl.program_id(0) * T + tl.arange(0, T)
    live = row < rows
    n0, n1 = load_rows(x_ptr, row, live, C, C0, C1)
    lead(n0, n1, u_ptr, AD_ptr, bias_ptr, row, live, C, C0, C1, U, US, J)


@triton.jit
def add_vector(y0, y1, ptr, C0: tl.constexpr, C1: tl.constexpr):
    y0 += tl.load(ptr + columns(0, C0))[None, :]
    if C1 > 0:
        y1 += tl.load(ptr + columns(C0, C1))[None, :]
    return y0, y1


@triton.jit(do_not_specialize=["rows", "height", "width"])  # so that what was tried is what runs
def block(
    x_ptr, u_ptr, out_ptr, next_ptr, B1_ptr, C1_ptr, A2_ptr, D2_ptr, B2_ptr, C2_ptr, vectors_ptr, next_AD_ptr,
    next_bias_ptr, rows, height, width,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    R1: tl.constexpr, L1: tl.constexpr, L10: tl.constexpr, L11: tl.constexpr, V1: tl.constexpr, VL1: tl.constexpr,
    R2: tl.constexpr, L2: tl.constexpr, L20: tl.constexpr, L21: tl.constexpr, U: tl.constexpr, US: tl.constexpr,
    KEEP: tl.constexpr, LOW1: tl.constexpr, SHIFT1: tl.constexpr, LOW2: tl.constexpr, LAST: tl.constexpr,
    T: tl.constexpr, J1: tl.constexpr, J2: tl.constexpr, JU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both Mu-Layers, from x and u; and the next block's u unless this is the last one.

    LOW1 and LOW2 say whether the second branches have a matrix D, or B reads what D would; SHIFT1, whether the first
    one's moves. `vectors` holds a, b and c of the first Mu-Layer, then a, d, b and c of the second.
    """
    kind = x_ptr.dtype.element_ty
    tile = tl.program_id(0) * T
    local = tl.arange(0, T)
    row = tile + local
    live = row < rows
    a1_ptr, b1_ptr, c1_ptr = vectors_ptr, vectors_ptr + R1, vectors_ptr + 2 * R1
    a2_ptr = c1_ptr + C
    d2_ptr, b2_ptr, c2_ptr = a2_ptr + R2, a2_ptr + R2 + L2, a2_ptr + 2 * R2 + L2

    n0, n1 = load_rows(x_ptr, row, live, C, C0, C1)
    y0, y1 = n0.to(tl.float32), tl.zeros((T, C1 if C1 > 0 else 16), tl.float32)
    if C1 > 0:
        y1 = n1.to(tl.float32)
    d0, d1 = n0, n1
    if LOW1 and SHIFT1:
        d0, d1 = gather_rows(u_ptr, tile, local, live, height, width, R1, L1, L10, L11, US, KEEP, VL1)
    elif LOW1:
        d0, d1 = load_low(u_ptr + R1, row, live, US, L1, L10, L11)
    y0, y1 = add_vector(y0, y1, c1_ptr, C0, C1)
    for start in range(0, R1, J1):
        j = columns(start, J1)
        p = gather(u_ptr, tile, local, live, height, width, 0, j, R1, US, KEEP, V1).to(tl.float32)
        p += tl.load(a1_ptr + j)[None, :]
        q = multiply(d0, d1, B1_ptr, j, L1, L10, L11, R1, 1, L1, False) + tl.load(b1_ptr + j)[None, :]
        y0, y1 = spread((p * q).to(kind), C1_ptr, j, y0, y1, R1, C, C0, C1, 1, R1)

    n0, n1 = y0.to(kind), y1.to(kind)
    d0, d1 = n0, n1
    if LOW2:
        d0, d1 = low_rank(n0, n1, D2_ptr, d2_ptr, C, C0, C1, L2, L20, L21)
    y0, y1 = add_vector(y0, y1, c2_ptr, C0, C1)
    for start in tl.range(0, R2, J2, num_stages=STAGES):
        j = columns(start, J2)
        p = multiply(n0, n1, A2_ptr, j, C, C0, C1, R2, 1, C, False) + tl.load(a2_ptr + j)[None, :]
        q = multiply(d0, d1, B2_ptr, j, L2, L20, L21, R2, 1, L2, False) + tl.load(b2_ptr + j)[None, :]
        y0, y1 = spread((p * q).to(kind), C2_ptr, j, y0, y1, R2, C, C0, C1, 1, R2)
    store_rows(out_ptr, row, live, y0, y1, C, C0, C1)
    if not LAST:
        lead(y0.to(kind), y1.to(kind), next_ptr, next_AD_ptr, next_bias_ptr, row, live, C, C0, C1, U, US, JU)
