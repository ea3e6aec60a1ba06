"""The panel kernel: a block of tokens against unpacked tiles, bound by arithmetic.

  unpack(tile, k, first, n, panel)    `n` steps of a tile, decoded once for many tokens: 8 vectors
                                      of 64 codes and the f32[16] scales each (floats: f32[16])
  panel(x, panels, n, sums)           a block against two panels, added to sums f32[tokens, 2, 16]

`panel` is the same for all types of one shape (see `formats`). Two panels and the activations they
meet stay in the first-level cache; the sums of a block live in registers, so that each broadcast of
activations serves two tiles and each vector of codes serves the block's tokens.

With AMX a block is 16 tokens: their 16 x 32 activations, as they lie, are one tile register, the 8
vectors of codes are another, and one instruction makes the 16 x 16 integer sums of a step. What is
left, and takes most of the time, is the arithmetic of scales.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.dot import BYTES, bias, dot, zeros
from jitllm.kernels.cpu.formats import FLOATS, FORMATS, STEP, Format, Planes, plane_addresses
from jitllm.kernels.cpu.ir import (
    Function,
    Module,
    Value,
    Var,
    f32,
    i8,
    i16,
    i32,
    i64,
    ptr,
    vec,
    void,
)
from jitllm.kernels.cpu.steps import (
    CODE_BYTES,
    PANEL_BYTES,
    PANEL_TILES,
    SCALE_BYTES,
    SHAPES,
    STEP_BYTES,
    SUMS,
    Activations,
    Shape,
    add_step,
)

_UNPACK_ARGS = [ptr, i64, i64, i64, ptr]
_PANEL_ARGS = [ptr, ptr, i64, ptr]


def _panel_bias(t: Tier) -> int:
    return 0 if t.amx else bias(t)


def _presented(t: Tier, fmt: Format, code: Value) -> Value:
    """A code as a panel holds it: unsigned for affine types, else signed plus the tier's bias."""
    if fmt.shape == "affine":
        return code
    if fmt.is_signed:
        return code ^ 128 if _panel_bias(t) else code
    return code + (_panel_bias(t) - fmt.zero)


def write_unpack(m: Module, t: Tier, qtype: str) -> None:
    """Write `unpack` for a weight type."""
    with m.function("unpack", void, _UNPACK_ARGS, export=True) as f:
        tile, k, first, n, panel = f.args
        if qtype in FLOATS:
            with f.loop(0, n) as i:
                f.store(FLOATS[qtype](f, t, tile, first + i), panel, i * 64, 64)
            return
        fmt = FORMATS[qtype]
        planes = plane_addresses(qtype, tile, k // (STEP * fmt.steps))
        with f.loop(0, n // fmt.steps) as i:
            to = panel + i * (fmt.steps * SHAPES[fmt.shape].panel_step_bytes)
            _unpack_group(f, t, fmt, planes, first // fmt.steps + i, to)


def _unpack_group(
    f: Function, t: Tier, fmt: Format, planes: Planes, group: Value, to: Value
) -> None:
    scales = fmt.scales(f, t, planes, group)
    with f.loop(0, fmt.steps) as step:
        at = to + step * SHAPES[fmt.shape].panel_step_bytes
        for c, code in enumerate(fmt.codes(f, planes, group * fmt.steps + step)):
            f.store(_presented(t, fmt, code), at, 64 * c, 64)
        for s, scale in enumerate(scales(step)):
            f.store(scale, at, CODE_BYTES + SCALE_BYTES * s, 64)


def write_panel(m: Module, t: Tier, shape: Shape) -> None:
    """Write `panel` for a shape."""
    with m.function("panel", void, _PANEL_ARGS, export=True) as f:
        x, panels, n, sums = f.args
        if t.amx and shape.name != "float":
            for j in range(PANEL_TILES):
                _amx_tile(f, t, shape, x, panels + j * PANEL_BYTES, n, sums + j * 64)
            return
        step_of = _float_step if shape.name == "float" else _int_step
        acc = [[_take(f, sums, i, j) for j in range(PANEL_TILES)] for i in range(shape.tokens(t))]
        with f.loop(0, n) as step:
            w = [
                panels + (step * shape.panel_step_bytes + j * PANEL_BYTES)
                for j in range(PANEL_TILES)
            ]
            step_of(f, t, shape, x + step * (shape.tokens(t) * shape.x_step_bytes), w, acc)
        for i, row in enumerate(acc):
            for j, a in enumerate(row):
                f.store(a.get(), sums, _at(i, j), 64)


def _at(token: int, tile: int) -> int:
    return 64 * (token * PANEL_TILES + tile)


def _take(f: Function, sums: Value, token: int, tile: int) -> Var:
    """A running sum, from memory into a register."""
    return f.var(f.load(sums, SUMS, _at(token, tile), 64))


def _float_step(
    f: Function, t: Tier, shape: Shape, x: Value, w: list[Value], acc: list[list[Var]]
) -> None:
    columns = [f.load(w_j, SUMS, 0, 64) for w_j in w]
    for i, row in enumerate(acc):
        value = f.load(x, f32, 4 * i, 4).splat()
        for a, column in zip(row, columns, strict=True):
            a.set(f.fma(column, value, a.get()))


def _scales(f: Function, shape: Shape, w: Value) -> tuple[Value, ...]:
    at = (CODE_BYTES + SCALE_BYTES * s for s in range(shape.n_scales))
    return tuple(f.load(w, SUMS, offset, 64) for offset in at)


def _int_step(
    f: Function, t: Tier, shape: Shape, x: Value, w: list[Value], acc: list[list[Var]]
) -> None:
    tokens = shape.tokens(t)
    block = [Activations(f, x, tokens, i) for i in range(tokens)]
    sums = [[_start(f, t, shape, token) for _ in w] for token in block]
    for c in range(8):
        part = c // 4 if shape.name == "halves" else 0
        codes = [f.load(w_j, BYTES, 64 * c, 64) for w_j in w]
        for token, row in zip(block, sums, strict=True):
            four = token.codes(c)
            for s, code in zip(row, codes, strict=True):
                s[part] = dot(f, t, s[part], code, four, shape.name != "affine")
    for j, w_j in enumerate(w):
        scales = _scales(f, shape, w_j)
        for token, row, a in zip(block, sums, acc, strict=True):
            add_step(f, shape.name, row[j], token, scales, a[j])


def _start(f: Function, t: Tier, shape: Shape, x: Activations) -> list[Value]:
    """What the integer sums of a step start with, to take the bias of the codes back."""
    if shape.name == "affine" or not _panel_bias(t):
        return [zeros(f)] * (2 if shape.name == "halves" else 1)
    everything, first, last = x.minus_128
    parts = (first, last) if shape.name == "halves" else (everything,)
    return [part.splat() for part in parts]


# --- AMX --------------------------------------------------------------------------------------

_ROWS = 16
# Tile registers, as (rows, bytes per row): four of sums, then activations and codes of 32 columns
# and of 16.
_SUMS_TILES, _X, _W, _X_HALF, _W_HALF = 4, 4, 5, 6, 7
_TILES = (*[(_ROWS, 64)] * _SUMS_TILES, (_ROWS, 32), (8, 64), (_ROWS, 16), (4, 64))


def enter(f: Function, t: Tier) -> None:
    """Before a thread's first `panel`: shape the tile registers."""
    if not t.amx:
        return
    config = f.stack(i8, 64, align=64)
    f.store(f.value(0, vec(i32)), config, 0, 64)
    f.store(f.value(1, i8), config)  # palette 1
    for tile, (rows, row_bytes) in enumerate(_TILES):
        f.store(f.value(row_bytes, i16), config, 16 + 2 * tile)
        f.store(f.value(rows, i8), config, 48 + tile)
    f.intrinsic("x86.ldtilecfg", void, config)


def leave(f: Function, t: Tier) -> None:
    """After a thread's last `panel`: its next switch need not save the tiles."""
    if t.amx:
        f.intrinsic("x86.tilerelease", void)


@dataclass(frozen=True)
class _AmxTile:
    """One tile of rows against a block: its 16 running sums stay in registers over the steps.

    A step's integer sums are multiplied into one pair of tile registers while those of the step
    before leave the other, so that no instruction waits in the reorder buffer for the whole way
    from load to scale. In cache, GOPS of a core without and with this: 740, 890 for affine types,
    540, 640 for halves.
    """

    f: Function
    t: Tier
    shape: Shape
    x: Value
    w: Value
    acc: list[Var]
    room: Value

    @property
    def parts(self) -> int:
        """Integer sums of a step: one, or one per half."""
        return 2 if self.shape.name == "halves" else 1

    def at(self, step: Value) -> tuple[Value, Value]:
        """The activations and the codes of a step."""
        x_bytes = self.shape.tokens(self.t) * STEP_BYTES
        return self.x + step * x_bytes, self.w + step * self.shape.panel_step_bytes

    def multiply(self, step: Value, half: int) -> None:
        """The i32[16 tokens, 16 rows] sums of a step, into tile registers."""
        f, (x, w) = self.f, self.at(step)
        at_x, at_w = (_X_HALF, _W_HALF) if self.parts == 2 else (_X, _W)
        product = "tdpbsud" if self.shape.name == "affine" else "tdpbssd"
        x_tile, w_tile = f.value(at_x, i8), f.value(at_w, i8)
        for part in range(self.parts):
            sums = f.value(2 * half + part, i8)
            f.intrinsic("x86.tileloadd64", void, x_tile, x + 16 * part, f.value(STEP, i64))
            f.intrinsic("x86.tileloadd64", void, w_tile, w + 256 * part, f.value(64, i64))
            f.intrinsic("x86.tilezero", void, sums)
            f.intrinsic(f"x86.{product}", void, sums, x_tile, w_tile)

    def add(self, step: Value, half: int) -> None:
        """The sums of a step, out of their registers, scaled and added to the running ones."""
        f, (x, w) = self.f, self.at(step)
        size = 64 * _ROWS
        rooms = [self.room + (2 * half + part) * size for part in range(self.parts)]
        for part, room in enumerate(rooms):
            sums = f.value(2 * half + part, i8)
            f.intrinsic("x86.tilestored64", void, sums, room, f.value(64, i64))
        scales = _scales(f, self.shape, w)
        for i, a in enumerate(self.acc):
            ints = [f.load(room, vec(i32), 64 * i, 64) for room in rooms]
            token = Activations(f, x, self.shape.tokens(self.t), i)
            add_step(f, self.shape.name, ints, token, scales, a)


def _amx_tile(
    f: Function, t: Tier, shape: Shape, x: Value, w: Value, n: Value, sums: Value
) -> None:
    acc = [f.var(f.load(sums, SUMS, _at(i, 0), 64)) for i in range(shape.tokens(t))]
    tile = _AmxTile(f, t, shape, x, w, acc, f.stack(SUMS, _SUMS_TILES * _ROWS, align=64))
    tile.multiply(f.value(0, i64), 0)
    with f.loop(0, n, 2) as step:
        tile.multiply(f.minimum(step + 1, n - 1), 1)
        tile.add(step, 0)
        tile.multiply(f.minimum(step + 2, n - 1), 0)
        with f.when(step + 1 < n):
            tile.add(step + 1, 1)
    for i, a in enumerate(acc):
        f.store(a.get(), sums, _at(i, 0), 64)
