"""Elementary functions and float formats on vectors of any width, the same bits on every call.

`exp` is the Cephes single-precision scheme: x = n ln2 + r, a degree-5 polynomial in r, and 2^n put
together from bits; its relative error is below 2e-7. Nothing here converts a float to an integer by
an instruction, so NaN and infinity travel through instead of being undefined.
"""

from __future__ import annotations

import math

from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.ir import Function, Value, element, f16, f32, i16, i32, with_element

_ROUND = 1.5 * 2.0**23
"""Adding this leaves the nearest integer (ties to even) in the low bits, for |x| < 2^22."""

_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_EXP_MIN, _EXP_MAX = -87.33, 88.37
_EXP2 = (
    1.5461444854736328e-4, 1.3400427997112274e-3, 9.618056938052177e-3, 5.5503271520137787e-2,
    2.4022650718688965e-1, 6.9314718246459961e-1, 1.0,
)  # fmt: skip
_EXP2_MIN = -125.0


def round_bits(x: Value) -> Value:
    """i32 whose low 22 bits are x rounded to the nearest integer, for |x| < 2^21."""
    return (x + _ROUND).bitcast(with_element(x.type, i32))


def exp(f: Function, x: Value) -> Value:
    """e^x of f32 lanes: 0 below -87.33, infinity above 88.37, NaN for NaN."""
    low, high = x < _EXP_MIN, x > _EXP_MAX
    clamped = f.select(high, _EXP_MAX, f.select(low, _EXP_MIN, x))
    shifted = f.fma(clamped, f.value(math.log2(math.e), x.type), f.value(_ROUND, x.type))
    n = shifted - _ROUND
    r = f.fma(n, f.value(-_LN2_LOW, x.type), f.fma(n, f.value(-_LN2_HIGH, x.type), clamped))
    p = f.value(_EXP[0], x.type)
    for c in _EXP[1:]:
        p = f.fma(p, r, f.value(c, x.type))
    y = f.fma(p, r * r, r) + 1.0
    ints = with_element(x.type, i32)
    y = y * ((shifted.bitcast(ints) << 23) + (127 << 23)).bitcast(x.type)
    return f.select(high, math.inf, f.select(low, 0.0, y))


def exp2(f: Function, x: Value) -> Value:
    """2^x of f32 lanes for x <= 127, within 1 ulp: 0 below -125, NaN for NaN.

    A Chebyshev interpolation of degree 6 on [-1/2, 1/2]; cheaper than `exp`, nothing being reduced.
    """
    shifted = x + _ROUND
    fraction = x - (shifted - _ROUND)
    p = f.value(_EXP2[0], x.type)
    for c in _EXP2[1:]:
        p = f.fma(p, fraction, f.value(c, x.type))
    power = (shifted.bitcast(with_element(x.type, i32)) << 23) + (127 << 23)
    return f.select(x < _EXP2_MIN, 0.0, p * power.bitcast(x.type))


def tanh(f: Function, x: Value) -> Value:
    """tanh of f32 lanes, absolute error below 3e-7."""
    return 1.0 - 2.0 / (exp(f, x * 2.0) + 1.0)


def silu(f: Function, x: Value) -> Value:
    """x / (1 + e^-x)."""
    return x / (exp(f, -x) + 1.0)


def gelu(f: Function, x: Value) -> Value:
    """GELU in its tanh form: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    inner = (x * x * x * 0.044715 + x) * math.sqrt(2.0 / math.pi)
    return x * 0.5 * (tanh(f, inner) + 1.0)


def half_to_f32(x: Value, t: Tier) -> Value:
    """f16 bits (i16 lanes) as f32, exactly; by integer arithmetic where there is no instruction."""
    if t.has_f16:
        return x.bitcast(with_element(x.type, f16)).to_f32()
    ints, floats = with_element(x.type, i32), with_element(x.type, f32)
    bits = x.zext(ints)
    exponent, payload = bits & 0x7C00, (bits & 0x7FFF) << 13
    normal = payload + x.fn.select(exponent.eq(0x7C00), 224 << 23, x.fn.value(112 << 23, ints))
    # by conversion: XLA runs with denormals off, so none may be an operand
    denormal = ((bits & 0x3FF).to_f32() * 2.0**-24).bitcast(ints)
    magnitude = x.fn.select(exponent.eq(0), denormal, normal)
    return (magnitude | ((bits & 0x8000) << 16)).bitcast(floats)


def f32_to_half(x: Value, t: Tier) -> Value:
    """f32 as f16 bits (i16 lanes), to nearest even; by integer arithmetic like `half_to_f32`."""
    if t.has_f16:
        return x.to_f16().bitcast(with_element(x.type, i16))
    select = x.fn.select
    bits = x.bitcast(with_element(x.type, i32))
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112 << 10)
    # the last bit of 0.5 is 2^-24, the step of the f16 denormals: the addition rounds to it
    small = (magnitude.bitcast(x.type) + 0.5).bitcast(bits.type) - 0x3F000000
    large = select(magnitude > 0x7F800000, 0x7E00, x.fn.value(0x7C00, bits.type))
    y = select(magnitude < 0x38800000, small, normal)
    y = select(magnitude >= 0x47800000, large, y)
    return (y | ((bits >> 16) & 0x8000)).trunc(i16)


def bf16_to_f32(x: Value) -> Value:
    """bf16 bits (i16 lanes) as f32, exactly."""
    assert element(x.type) == i16
    return (x.zext(i32) << 16).bitcast(with_element(x.type, f32))
