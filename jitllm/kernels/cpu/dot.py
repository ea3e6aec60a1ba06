"""The int8 dot product of a tile: 16 rows x 4 columns of weights against 4 activations.

`dot` adds into 16 row sums, exactly, with the best instruction of the tier. Where that multiplies
unsigned by signed bytes (VNNI), signed weights come with 128 added (`bias`), and the sums start at
-128 times the sum of the activations; elsewhere they come as they are.

No intermediate can overflow: activations lie in -127..127, so a pair of products is at most
2 * 128 * 127 = 32512 for signed weights and 2 * 63 * 127 for unsigned codes of 6 bits or fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.ir import Function, Value, i1, i8, i16, i32, vec

BYTES = vec(i8, 64)
_VNNI = ("vnni512", "vnni256")
_Part = Callable[[Value, Value, Value], Value]
_Dot = Callable[[Function, Value, Value, Value, bool], Value]


def bias(t: Tier) -> int:
    """What is added to signed weights before `dot` sees them."""
    return 128 if t.dot in _VNNI else 0


def dot(f: Function, t: Tier, sums: Value, w: Value, x: Value, signed: bool) -> Value:
    """sums[r] + sum over c of w[r, c] * x[c].

    `sums` i32[16]; `w` 64 bytes, [row][column], signed (plus `bias`) or unsigned codes up to 63;
    `x` one i32, the activations of four columns.
    """
    return _DOTS[t.dot](f, sums, w, x.splat(), signed)


@cache
def _vpdpbusd_takes_bytes() -> bool:
    """LLVM 22 types the operands of vpdpbusd as bytes, earlier ones as i32."""
    return llvm.llvm_version_info[0] >= 22


def _vnni(width: int) -> _Dot:
    rows = width // 32

    def dot(f: Function, sums: Value, w: Value, x: Value, signed: bool) -> Value:
        operand = vec(i8, 4 * rows) if _vpdpbusd_takes_bytes() else vec(i32, rows)

        def part(s: Value, w: Value, x: Value) -> Value:
            name = f"x86.avx512.vpdpbusd.{width}"
            return f.intrinsic(name, s.type, s, w.bitcast(operand), x.bitcast(operand))

        return _by_parts(part, rows, sums, w.bitcast(vec(i32)), x)

    return dot


def _by_parts(part: _Part, rows: int, sums: Value, w: Value, x: Value) -> Value:
    """Apply `part` to slices of `rows` i32 lanes and put the results together."""
    if rows == 16:
        return part(sums, w, x)
    lanes = [range(i, i + rows) for i in range(0, 16, rows)]
    halves = [part(*(v.shuffle(part_lanes) for v in (sums, w, x))) for part_lanes in lanes]
    return halves[0].shuffle(range(16), halves[1])


def _maddubs(f: Function, sums: Value, w: Value, x: Value, signed: bool) -> Value:
    half = vec(i8, 32)
    ones = f.value(1, vec(i16))

    def part(s: Value, w: Value, x: Value) -> Value:
        w, x = w.bitcast(half), x.bitcast(half)
        if signed:
            x = f.intrinsic("x86.avx2.psign.b", half, x, w)
            w = f.intrinsic("abs.v32i8", half, w, f.value(0, i1))
        pairs = f.intrinsic("x86.avx2.pmadd.ub.sw", vec(i16), w, x)
        return s + f.intrinsic("x86.avx2.pmadd.wd", vec(i32, 8), pairs, ones)

    return _by_parts(part, 8, sums, w.bitcast(vec(i32)), x)


def _portable(f: Function, sums: Value, w: Value, x: Value, signed: bool) -> Value:
    pairs = vec(i16, 32)
    w, x = w.bitcast(pairs), x.bitcast(pairs)
    even, odd = ((w << 8).sar(8), w.sar(8)) if signed else (w & 255, w >> 8)
    products = (even * (x << 8).sar(8) + odd * x.sar(8)).bitcast(vec(i32))
    return sums + (products << 16).sar(16) + products.sar(16)


_DOTS = {
    "vnni512": _vnni(512),
    "vnni256": _vnni(256),
    "maddubs": _maddubs,
    "portable": _portable,
}


def zeros(f: Function) -> Value:
    """Sixteen empty sums."""
    return Value(f, ir.Constant(vec(i32), [0] * 16))
