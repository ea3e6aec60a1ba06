"""How the kernels read each weight type from a tile, in registers.

A tile holds 16 rows. A *step* is 32 columns of it: 8 vectors of 64 codes ([row][4 columns] each,
column groups in order) and the scales of the 16 rows. A group of 256 is 8 steps, which share the
unpacking of their scales. The planes of a tile are described in `qtypes`.

Three shapes of arithmetic cover all integer types, with s the exact sum of codes times activations:
  scaled   scale * s            codes minus `zero`
  affine   scale * s + low * sum(x)
  halves   scale_0 * s_0 + scale_1 * s_1        16 columns each, codes minus `zero`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.dot import BYTES
from jitllm.kernels.cpu.ir import Function, Value, f32, i8, i16, vec
from jitllm.kernels.cpu.vmath import bf16_to_f32, half_to_f32
from jitllm.kernels.qtypes import QTYPES

STEP = 32
"""Columns of a step."""

Planes = dict[str, Value]

Scales = Callable[[Value], tuple[Value, ...]]
"""Step within its group -> the f32[16] vectors of its shape."""


@dataclass(frozen=True)
class Format:
    """One integer weight type as the kernels see it."""

    qtype: str
    shape: str
    """`scaled`, `affine` or `halves`."""
    zero: int
    """What code stands for 0; -1: codes are signed bytes."""
    codes: Callable[[Function, Planes, Value], list[Value]]
    """(f, planes, step) -> 8 vectors of 64 codes."""
    scales: Callable[[Function, Tier, Planes, Value], Scales]
    """(f, tier, planes, group) -> the scales of the steps of a group."""

    @property
    def is_signed(self) -> bool:
        """Codes are signed bytes; all others are unsigned and below 64."""
        return self.zero < 0

    @property
    def steps(self) -> int:
        """Steps of a group."""
        return QTYPES[self.qtype].group // STEP


def plane_addresses(qtype: str, tile: Value, n_groups: Value) -> Planes:
    """Where the planes of a tile of `n_groups` groups start."""
    q = QTYPES[qtype]
    return {name: tile + n_groups * at for name, at in q.plane_offsets(q.group).items()}


# --- codes ------------------------------------------------------------------------------------


def _bytes(f: Function, planes: Planes, step: Value) -> list[Value]:
    base = planes["byte"] + step * 512
    return [f.load(base, BYTES, 64 * c) for c in range(8)]


def _nib(f: Function, planes: Planes, step: Value) -> list[Value]:
    base = planes["nib"] + step * 256
    loads = [f.load(base, BYTES, 64 * i) for i in range(4)]
    return [part for v in loads for part in (v & 15, v >> 4)]


def _moved(v: Value, left: int) -> Value:
    """Shift by `left` bits, to the right when negative."""
    return v << left if left > 0 else v >> -left if left < 0 else v


def _nib_bit(f: Function, planes: Planes, step: Value) -> list[Value]:
    high = f.load(planes["bit"], BYTES, step * 64)
    low = _nib(f, planes, step)
    return [code | (_moved(high, 4 - c) & 16) for c, code in enumerate(low)]


def _nib_two(f: Function, planes: Planes, step: Value) -> list[Value]:
    base = planes["two"] + step * 128
    high = [f.load(base, BYTES, 64 * h) for h in range(2)]
    low = _nib(f, planes, step)
    return [code | (_moved(high[c // 4], 4 - 2 * (c % 4)) & 48) for c, code in enumerate(low)]


# --- scales -----------------------------------------------------------------------------------


def _half(f: Function, t: Tier, plane: Value, index: Value) -> Value:
    return half_to_f32(f.load(plane, vec(i16), index * 32, 2), t)


def _d(f: Function, t: Tier, planes: Planes, group: Value) -> Scales:
    d = _half(f, t, planes["d"], group)
    return lambda step: (d,)


def _d_m(f: Function, t: Tier, planes: Planes, group: Value) -> Scales:
    d, m = (_half(f, t, planes[name], group) for name in ("d", "m"))
    return lambda step: (d, m)


def _k_scales(f: Function, t: Tier, planes: Planes, group: Value) -> Scales:
    """ggml's get_scale_min_k4 on 16 rows at once: 8 scales and mins of 6 bits in 12 bytes."""
    base = planes["scales"] + group * 192
    low, mid, high = (f.load(base, BYTES, 64 * i) for i in range(3))
    scale = (low & 63, (high & 15) | ((low >> 6) << 4))
    mins = (mid & 63, (high >> 4) | ((mid >> 6) << 4))
    d, dmin = _half(f, t, planes["d"], group), -_half(f, t, planes["dmin"], group)
    room = f.stack(BYTES, 4, align=64)
    for i, v in enumerate((*scale, *mins)):
        f.store(v, room, 64 * i, 64)

    def of_step(step: Value) -> tuple[Value, ...]:
        scale, low = (f.load(room + 128 * i, vec(i8), step * 16) for i in range(2))
        return scale.zext(i16).to_f32() * d, low.zext(i16).to_f32() * dmin

    return of_step


def _q6_scales(f: Function, t: Tier, planes: Planes, group: Value) -> Scales:
    base, d = planes["scales"] + group * 256, _half(f, t, planes["d"], group)

    def of_step(step: Value) -> tuple[Value, ...]:
        first, last = (f.load(base + 16 * i, vec(i8), step * 32) for i in range(2))
        return first.to_f32() * d, last.to_f32() * d

    return of_step


FORMATS: dict[str, Format] = {
    fmt.qtype: fmt
    for fmt in (
        Format("Q8_0", "scaled", -1, _bytes, _d),
        Format("Q4_0", "scaled", 8, _nib, _d),
        Format("Q4_1", "affine", 0, _nib, _d_m),
        Format("Q5_0", "scaled", 16, _nib_bit, _d),
        Format("Q5_1", "affine", 0, _nib_bit, _d_m),
        Format("Q4_K", "affine", 0, _nib, _k_scales),
        Format("Q5_K", "affine", 0, _nib_bit, _k_scales),
        Format("Q6_K", "halves", 32, _nib_two, _q6_scales),
    )
}


# --- floats -----------------------------------------------------------------------------------


def _f32(f: Function, t: Tier, tile: Value, k: Value) -> Value:
    return f.load(tile, vec(f32), k * 64, 4)


def _f16(f: Function, t: Tier, tile: Value, k: Value) -> Value:
    return half_to_f32(f.load(tile, vec(i16), k * 32, 2), t)


def _bf16(f: Function, t: Tier, tile: Value, k: Value) -> Value:
    return bf16_to_f32(f.load(tile, vec(i16), k * 32, 2))


FLOATS: dict[str, Callable[[Function, Tier, Value, Value], Value]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
}
"""(f, tier, tile, column) -> f32[16], a column of the tile."""

CODES = {name: i for i, name in enumerate((*FORMATS, *FLOATS))}
"""The number of a type in the table of kernels."""
