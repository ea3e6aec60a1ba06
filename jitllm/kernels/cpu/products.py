"""The inner loops: one token against tiles in order, and many tokens against unpacked tiles.

Three functions per weight type make a product:
  one(x, tiles, k, tile_bytes, n_tiles, out)       a token's activations against whole tiles;
                                                   out f32[n_tiles, 16]. Bound by memory.
  unpack(tile, k, first, n, panel)                 `n` steps of a tile, decoded once for many
                                                   tokens: 8 x 64 codes and the f32 scales each.
  panel(x, panels, n, sums)                        a block of tokens against two panels, added to
                                                   sums f32[tokens, 2, 16]. Bound by arithmetic.
`panel` is shared by all types of one shape (see `formats`).

Both ways perform, for an output, the same float operations in the same order - one step after the
other along k - so their results are equal bit for bit. The integer sums inside a step are exact.

Activations are laid out in blocks of `tokens` tokens (1 for `one`). A step of a block is
[tokens][32] int8, then per token: d f32, d * sum f32, -128 * sum i32, and -128 * the sum of the
first 16 i32. Floats: [k][tokens] f32.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.dot import BYTES, bias, dot, zeros
from jitllm.kernels.cpu.formats import FLOATS, FORMATS, STEP, Format, plane_addresses
from jitllm.kernels.cpu.ir import Function, Module, Value, Var, f32, i32, i64, ptr, vec, void
from jitllm.kernels.layout import TILE_ROWS
from jitllm.kernels.qtypes import QTYPES

STEP_BYTES = STEP + 16
"""Activation bytes of a step per token."""

PANEL_TILES = 2
_SUMS = vec(f32)
_CODE_BYTES, _SCALE_BYTES = 8 * 64, 64
PANEL_BYTES = 16 * (_CODE_BYTES + 2 * _SCALE_BYTES)
"""Room for one panel of any shape."""

ONE_ARGS = [ptr, ptr, i64, i64, i64, ptr]
UNPACK_ARGS = [ptr, i64, i64, i64, ptr]
PANEL_ARGS = [ptr, ptr, i64, ptr]

_FLOAT_TILES = 4  # independent chains of additions that hide the latency of one


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
            return _SCALE_BYTES
        return _CODE_BYTES + self.n_scales * _SCALE_BYTES

    @property
    def x_step_bytes(self) -> int:
        """Activation bytes of a step per token."""
        return 4 if self.name == "float" else STEP_BYTES

    def tokens(self, t: Tier) -> int:
        """Tokens of a block: as many as the registers of the tier hold sums for."""
        wide = {"vnni512": (6, 12), "vnni256": (4, 4), "maddubs": (4, 4), "portable": (2, 2)}
        return wide[t.dot][self.name == "float"]


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

    def _field(self, i: int, t) -> Value:
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


# --- one token --------------------------------------------------------------------------------


def _signed(fmt: Format) -> bool:
    return fmt.zero < 0


def _start(f: Function, t: Tier, fmt: Format, x: Activations) -> list[Value]:
    """What the integer sums of a step start with, so that codes may be used as they are stored."""
    if fmt.shape == "affine" or (_signed(fmt) and not bias(t)):
        return [zeros(f)]
    everything, first, last = x.minus_128
    # -zero * sum, for a zero that is a power of two
    shift = 0 if _signed(fmt) else 7 - (fmt.zero.bit_length() - 1)
    parts = (first, last) if fmt.shape == "halves" else (everything,)
    return [(part.sar(shift) if shift else part).splat() for part in parts]


def _step(f: Function, t: Tier, fmt: Format, codes: list[Value], x: Activations) -> list[Value]:
    sums = _start(f, t, fmt, x)
    for c, w in enumerate(codes):
        w = w ^ 128 if _signed(fmt) and bias(t) else w
        i = c // 4 if len(sums) == 2 else 0
        sums[i] = dot(f, t, sums[i], w, x.codes(c), _signed(fmt))
    return sums


def _prefetch(f: Function, here: Value, part: range) -> None:
    """Ask for cache lines `part` after `here`, the same group in the next tile.

    A tile's planes are read side by side, which the hardware does not see coming; asked for in
    memory order, a tile ahead and evenly, its lines wait in the second-level cache. Measured on one
    core, GB/s: Q4_K 10.1 -> 13.4, Q4_1 11.3 -> 14.6, Q6_K 10.6 -> 11.6, of 14.5 for a plain read.
    """
    for line in part:
        hint = (f.value(x, i32) for x in (0, 2, 1))  # read, second level, data
        f.intrinsic("prefetch.p0", void, here + 64 * line, *hint)


def _write_one(m: Module, t: Tier, fmt: Format) -> None:
    with m.function("one", void, ONE_ARGS, export=True) as f:
        x, tiles, k, tile_bytes, n_tiles, out = f.args
        n_groups = k // (STEP * fmt.steps)
        group_bytes = TILE_ROWS * QTYPES[fmt.qtype].block_bytes
        lines = -(-group_bytes // 64)
        with f.loop(0, n_tiles) as tile:
            address = tiles + tile * tile_bytes
            planes = plane_addresses(fmt.qtype, address, n_groups)
            acc = f.var(f.value(0.0, _SUMS))
            with f.loop(0, n_groups) as group:
                scales = fmt.scales(f, t, planes, group)
                ahead = address + tile_bytes + group * group_bytes
                for j in range(fmt.steps):
                    step = group * fmt.steps + j
                    part = range(lines * j // fmt.steps, lines * (j + 1) // fmt.steps)
                    _prefetch(f, ahead, part)
                    activations = Activations(f, x + step * STEP_BYTES, 1, 0)
                    sums = _step(f, t, fmt, fmt.codes(f, planes, step), activations)
                    add_step(f, fmt.shape, sums, activations, scales[j], acc)
            f.store(acc.get(), out, tile * 64)


def _write_one_float(m: Module, t: Tier, qtype: str) -> None:
    with m.function("one", void, ONE_ARGS, export=True) as f:
        x, tiles, k, tile_bytes, n_tiles, out = f.args
        with f.loop(0, n_tiles, _FLOAT_TILES) as first:
            # past the end the last tile is computed again
            index = [f.minimum(first + j, n_tiles - 1) for j in range(_FLOAT_TILES)]
            tile = [tiles + i * tile_bytes for i in index]
            acc = [f.var(f.value(0.0, _SUMS)) for _ in index]
            with f.loop(0, k) as column:
                value = f.load(x, f32, column * 4, 4).splat()
                for a, w in zip(acc, tile, strict=True):
                    a.set(f.fma(FLOATS[qtype](f, t, w, column), value, a.get()))
            for i, a in zip(index, acc, strict=True):
                f.store(a.get(), out, i * 64)


# --- many tokens ------------------------------------------------------------------------------


def _presented(t: Tier, fmt: Format, code: Value) -> Value:
    """A code as a panel holds it: unsigned for affine types, else signed plus `bias`."""
    if fmt.shape == "affine":
        return code
    if _signed(fmt):
        return code ^ 128 if bias(t) else code
    return code + (bias(t) - fmt.zero)


def _write_unpack(m: Module, t: Tier, fmt: Format) -> None:
    size = SHAPES[fmt.shape].panel_step_bytes
    with m.function("unpack", void, UNPACK_ARGS, export=True) as f:
        tile, k, first, n, panel = f.args
        planes = plane_addresses(fmt.qtype, tile, k // (STEP * fmt.steps))
        with f.loop(0, n // fmt.steps) as i:
            group = first // fmt.steps + i
            scales = fmt.scales(f, t, planes, group)
            for j in range(fmt.steps):
                to = panel + (i * fmt.steps + j) * size
                for c, code in enumerate(fmt.codes(f, planes, group * fmt.steps + j)):
                    f.store(_presented(t, fmt, code), to, 64 * c, 64)
                for s, scale in enumerate(scales[j]):
                    f.store(scale, to, _CODE_BYTES + _SCALE_BYTES * s, 64)


def _write_unpack_float(m: Module, t: Tier, qtype: str) -> None:
    with m.function("unpack", void, UNPACK_ARGS, export=True) as f:
        tile, _, first, n, panel = f.args
        with f.loop(0, n) as i:
            f.store(FLOATS[qtype](f, t, tile, first + i), panel, i * 64, 64)


def _panel_sums(f: Function, t: Tier, shape: Shape, sums: Value) -> list[list[Var]]:
    """The running sums [tokens][tiles], taken into registers."""
    return [
        [f.var(f.load(sums, _SUMS, 64 * (i * PANEL_TILES + j), 64)) for j in range(PANEL_TILES)]
        for i in range(shape.tokens(t))
    ]


def _store_sums(f: Function, acc: list[list[Var]], sums: Value) -> None:
    for i, row in enumerate(acc):
        for j, a in enumerate(row):
            f.store(a.get(), sums, 64 * (i * PANEL_TILES + j), 64)


def _write_panel(m: Module, t: Tier, shape: Shape) -> None:
    tokens, size = shape.tokens(t), shape.panel_step_bytes
    with m.function("panel", void, PANEL_ARGS, export=True) as f:
        x, panels, n, out = f.args
        acc = _panel_sums(f, t, shape, out)
        with f.loop(0, n) as step:
            w = [panels + step * size + j * PANEL_BYTES for j in range(PANEL_TILES)]
            base = x + step * (tokens * STEP_BYTES)
            block = [Activations(f, base, tokens, i) for i in range(tokens)]
            sums = [_panel_start(f, t, shape, token) for token in block]
            for c in range(8):
                codes = [f.load(w_j, BYTES, 64 * c, 64) for w_j in w]
                for token, row in zip(block, sums, strict=True):
                    _panel_dot(f, t, shape, codes, token.codes(c), row, c)
            for j, w_j in enumerate(w):
                scales = tuple(
                    f.load(w_j, _SUMS, _CODE_BYTES + _SCALE_BYTES * s, 64)
                    for s in range(shape.n_scales)
                )
                for i, token in enumerate(block):
                    add_step(f, shape.name, sums[i][j], token, scales, acc[i][j])
        _store_sums(f, acc, out)


def _panel_start(f: Function, t: Tier, shape: Shape, x: Activations) -> list[list[Value]]:
    if shape.name == "affine" or not bias(t):
        return [[zeros(f)] * (2 if shape.name == "halves" else 1) for _ in range(PANEL_TILES)]
    everything, first, last = x.minus_128
    parts = (first, last) if shape.name == "halves" else (everything,)
    return [[part.splat() for part in parts] for _ in range(PANEL_TILES)]


def _panel_dot(
    f: Function,
    t: Tier,
    shape: Shape,
    codes: list[Value],
    x: Value,
    sums: list[list[Value]],
    c: int,
) -> None:
    for j, w in enumerate(codes):
        i = c // 4 if shape.name == "halves" else 0
        sums[j][i] = dot(f, t, sums[j][i], w, x, shape.name != "affine")


def _write_panel_float(m: Module, t: Tier, shape: Shape) -> None:
    tokens = shape.tokens(t)
    with m.function("panel", void, PANEL_ARGS, export=True) as f:
        x, panels, n, out = f.args
        acc = _panel_sums(f, t, shape, out)
        with f.loop(0, n) as k:
            w = [f.load(panels + k * 64, _SUMS, j * PANEL_BYTES, 64) for j in range(2)]
            for i in range(tokens):
                value = f.load(x + k * (4 * tokens), f32, 4 * i, 4).splat()
                for a, w_j in zip(acc[i], w, strict=True):
                    a.set(f.fma(w_j, value, a.get()))
        _store_sums(f, acc, out)


# --- units of compilation ---------------------------------------------------------------------


def build_type(qtype: str):
    """The unit of one weight type: `one` and `unpack`."""

    def build(t: Tier) -> Module:
        m = Module(qtype)
        if qtype in FLOATS:
            _write_one_float(m, t, qtype)
            _write_unpack_float(m, t, qtype)
        else:
            _write_one(m, t, FORMATS[qtype])
            _write_unpack(m, t, FORMATS[qtype])
        return m

    return build


def build_panel(shape: Shape):
    """The unit of one shape: `panel`."""

    def build(t: Tier) -> Module:
        m = Module(shape.name)
        (_write_panel_float if shape.name == "float" else _write_panel)(m, t, shape)
        return m

    return build
