"""Elementary functions and f16 conversions on vectors, as short runs of IR.

They treat every lane alike, round the same on every tier that has a fused multiply-add, and meet no
denormal float (XLA's threads flush those to zero): the bits of a value never depend on its lane or
on the thread that computed it. NaN goes in as NaN and comes out as NaN.
"""

from __future__ import annotations

from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.ir import Function, Value, f16, f32, i16, i32, vec, with_element

# 2**x on [-1/2, 1/2]: Chebyshev interpolation of degree 6, relative error 1.3 * 2**-24 in f32
_EXP2 = (
    1.0,
    0.6931471824645996,
    0.24022650718688965,
    0.05550327152013779,
    0.009618056938052177,
    0.0013400427997112274,
    0.00015461444854736328,
)
_ROUND = 1.5 * 2**23  # adding it leaves the nearest integer in the low bits
LOG2_E = 1.4426950408889634


def exp2(f: Function, x: Value) -> Value:
    """2**x for x <= 127, within 1 ulp; 0 below -125, where nothing is left to add to."""
    shifted = x + _ROUND
    fraction = x - (shifted - _ROUND)
    y = f.value(_EXP2[-1], x.type)
    for coefficient in _EXP2[-2::-1]:
        y = f.fma(y, fraction, f.value(coefficient, x.type))
    power = (shifted.bitcast(with_element(x.type, i32)) << 23) + (127 << 23)
    return f.select(x < -125.0, 0.0, y * power.bitcast(x.type))


def load_f32(f: Function, t: Tier, stored: str, base: Value, n_bytes: Value, n: int) -> Value:
    """`n` values stored as "f16" or "f32", as f32."""
    if stored == "f32":
        return f.load(base, vec(f32, n), n_bytes, align=4)
    if t.has_f16:
        return f.load(base, vec(f16, n), n_bytes, align=2).to_f32()
    return f16_bits_to_f32(f, f.load(base, vec(i16, n), n_bytes, align=2))


def stored_bits(f: Function, t: Tier, stored: str, x: Value) -> Value:
    """f32 as the integers that are stored for it, i16 for "f16" (nearest even) or i32 for "f32"."""
    if stored == "f32":
        return x.bitcast(with_element(x.type, i32))
    if t.has_f16:
        return x.to_f16().bitcast(with_element(x.type, i16))
    return f32_to_f16_bits(f, x)


def f16_bits_to_f32(f: Function, h: Value) -> Value:
    """f16 bits (i16) to f32 by integer arithmetic, exactly, for machines without an instruction."""
    h = h.zext(i32)
    magnitude, sign = h & 0x7FFF, (h & 0x8000) << 16
    exponent = magnitude & 0x7C00
    normal = (magnitude << 13) + (112 << 23)
    denormal = (magnitude.to_f32() * 2.0**-24).bitcast(h.type)
    bits = f.select(exponent.eq(0), denormal, normal)
    bits = f.select(exponent.eq(0x7C00), (magnitude << 13) | 0x7F800000, bits)
    return (bits | sign).bitcast(with_element(h.type, f32))


def f32_to_f16_bits(f: Function, x: Value) -> Value:
    """f32 to f16 bits (i16), to nearest even, for machines without an instruction."""
    bits = x.bitcast(with_element(x.type, i32))
    magnitude, sign = bits & 0x7FFFFFFF, (bits & 0x80000000) >> 16
    normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112 << 10)
    # 0.5 has its last bit at 2**-24, the step of the f16 denormals: the addition rounds
    small = (magnitude.bitcast(x.type) + 0.5).bitcast(bits.type) - 0x3F000000
    large = f.select(magnitude > 0x7F800000, 0x7E00, f.value(0x7C00, bits.type))
    y = f.select(magnitude < 0x38800000, small, normal)
    y = f.select(magnitude >= 0x47800000, large, y)
    return (y | sign).trunc(i16)
