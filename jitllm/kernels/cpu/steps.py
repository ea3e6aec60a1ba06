"""What the product kernels have in common: steps, the activations they meet, how they add up.

A product runs along k in steps: 32 columns of an integer type, one of a float type. However many
tokens share a call, the sum of an output is formed by `add_step`, one step after the other - the
same float operations in the same order, so the results are equal bit for bit. The integer sums
inside a step are exact, whatever instruction makes them.

Activations are laid out in blocks of `tokens` tokens (1 for the streaming kernels). A step of a
block is [tokens][32] int8, then per token: d f32, d * sum f32, -128 * sum i32, and -128 * the sum
of the first 16 i32. Floats: [k][tokens] f32.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite.ir import Type

from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.formats import FLOATS, FORMATS, STEP
from jitllm.kernels.cpu.ir import Function, Value, Var, f32, i32, vec, void

STEP_BYTES = STEP + 16
"""Activation bytes of a step per token."""

SUMS = vec(f32)
"""The sums of a tile's rows for one token."""

FEW_TOKENS = 16
"""Up to so many tokens, decoding weights in registers beats unpacking them into panels.

Measured on Sapphire Rapids, 100 MB of Q4_1, 8 and 16 tokens: 4.8 and 8.4 ms where AMX panels take
7.6 and 9.7; without AMX 7.1 and 11.6 against 10.1 and 12.2.
"""

PANEL_TILES = 2
CODE_BYTES, SCALE_BYTES = 8 * 64, 64
PANEL_BYTES = 16 * (CODE_BYTES + 2 * SCALE_BYTES)
"""Room for one panel of any shape."""


_TOKENS = {"vnni512": (6, 12), "vnni256": (4, 4), "maddubs": (4, 4), "portable": (2, 2)}


@dataclass(frozen=True)
class Shape:
    """A shape of arithmetic: what `panel` is compiled for."""

    name: str
    n_scales: int
    columns: int
    """Columns of a step."""
    steps: int
    """Steps of a panel: two panels and a token block's activations fit the first-level cache."""

    @property
    def panel_step_bytes(self) -> int:
        """Bytes of one step of a panel."""
        if self.name == "float":
            return SCALE_BYTES
        return CODE_BYTES + self.n_scales * SCALE_BYTES

    @property
    def x_step_bytes(self) -> int:
        """Activation bytes of a step per token."""
        return 4 if self.name == "float" else STEP_BYTES

    def tokens(self, t: Tier) -> int:
        """Tokens of a block: as many as the registers of the tier hold sums for."""
        is_float = self.name == "float"
        if t.amx and not is_float:
            return 16
        return _TOKENS[t.dot][is_float]


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("scaled", 1, STEP, 16),
        Shape("affine", 2, STEP, 16),
        Shape("halves", 2, STEP, 16),
        Shape("float", 0, 1, 128),
    )
}


def shape_of(qtype: str) -> Shape:
    """The shape of a weight type's arithmetic."""
    return SHAPES["float" if qtype in FLOATS else FORMATS[qtype].shape]


@dataclass(frozen=True)
class Activations:
    """The fields of one token in one step of a block of `tokens`."""

    f: Function
    address: Value
    tokens: int
    token: int

    def codes(self, c: int) -> Value:
        """The four activations of column group c, as one i32."""
        return self.f.load(self.address, i32, self.token * STEP + 4 * c, 4)

    def _field(self, i: int, t: Type) -> Value:
        return self.f.load(self.address, t, self.tokens * (STEP + 4 * i) + 4 * self.token, 4)

    @property
    def d(self) -> Value:
        """The scale."""
        return self._field(0, f32)

    @property
    def d_sum(self) -> Value:
        """Scale times the sum of the 32 codes."""
        return self._field(1, f32)

    @property
    def minus_128(self) -> tuple[Value, Value, Value]:
        """-128 times the sum of the codes: all, the first 16, the last 16."""
        all_, first = self._field(2, i32), self._field(3, i32)
        return all_, first, all_ - first


def add_step(
    f: Function, shape: str, sums: list[Value], x: Activations, scales: tuple[Value, ...], acc: Var
) -> None:
    """acc += a step: `sums` i32[16] for each of its scales. The one place of float additions."""
    scaled = sums[0].to_f32() * scales[0]
    if shape == "halves":
        scaled = f.fma(sums[1].to_f32(), scales[1], scaled)
    total = f.fma(scaled, x.d, acc.get())
    acc.set(f.fma(scales[1], x.d_sum, total) if shape == "affine" else total)


def prefetch(f: Function, here: Value, n_bytes: Value | int) -> None:
    """Ask for the cache lines of n_bytes at `here`, into the second level."""
    hint = [f.value(x, i32) for x in (0, 2, 1)]  # read, second level, data
    if isinstance(n_bytes, int):
        for at in range(0, n_bytes, 64):
            f.intrinsic("prefetch.p0", void, here + at, *hint)
    else:
        with f.loop(0, n_bytes, 64) as at:
            f.intrinsic("prefetch.p0", void, here + at, *hint)
