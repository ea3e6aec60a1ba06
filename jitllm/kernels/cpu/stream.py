"""The streaming kernels: one token, bound by memory, or a few, against tiles in order.

  one(x, tiles, k, tile_bytes, n_tiles, out)      out f32[n_tiles, 16]
  few(x, tiles, k, tile_bytes, n_tiles, out, x_bytes, n_tokens)
                                                  out f32[n_tokens, n_tiles, 16]

Codes are decoded in registers and used as they are stored; see `formats` and `dot`. What limits a
core is how many cache lines it has under way, so four tiles are read side by side, and each line is
asked for four tiles ahead in memory order - the planes of a tile are read in parallel, which the
hardware does not see coming. Measured on one core of Sapphire Rapids, 17 GB/s for a plain read,
GB/s of weights for one tile at a time, then with requests ahead, then with four tiles:
  Q8_0 14.0, 14.0, 16.0   Q4_1 11.3, 13.4, 15.3   Q4_K 10.1, 13.4, 15.3   Q6_K 10.5, 11.5, 15.2
Huge pages change nothing. In cache a core reads 28-45 GB/s of weights.

For a few tokens each step of a tile is decoded once and meets them all; their sums lie in the
first-level cache. Eight products of a step and four operations on its scales are all there is, for
each token; two shorter chains of products measure the same as one. Panels of AMX tiles for 4 to 16
tokens, decoded tile by tile, measured 1.3 times as long a step of SmolLM2 for 4 and for 8 rows, and
1.1 times as long for 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.dot import bias, dot, zeros
from jitllm.kernels.cpu.formats import FLOATS, FORMATS, STEP, Format, Planes, plane_addresses
from jitllm.kernels.cpu.ir import Function, Module, Value, Var, f32, i64, ptr, void
from jitllm.kernels.cpu.steps import STEP_BYTES, SUMS, Activations, add_step, prefetch
from jitllm.kernels.layout import TILE_ROWS
from jitllm.kernels.qtypes import QTYPES

_ARGS = [ptr, ptr, i64, i64, i64, ptr]
_TILES = 4  # independent streams from memory, and chains of additions


def write_one(m: Module, t: Tier, qtype: str) -> None:
    """Write `one` for a weight type."""
    if qtype in FLOATS:
        _write_one_float(m, t, qtype)
    else:
        _write_one(m, t, FORMATS[qtype])


def _start(f: Function, t: Tier, fmt: Format, x: Activations) -> list[Value]:
    """What the integer sums of a step start with, so that codes may be used as they are stored."""
    if fmt.shape == "affine" or (fmt.is_signed and not bias(t)):
        return [zeros(f)]
    everything, first, last = x.minus_128
    # -zero * sum, for a zero that is a power of two
    shift = 0 if fmt.is_signed else 7 - (fmt.zero.bit_length() - 1)
    parts = (first, last) if fmt.shape == "halves" else (everything,)
    return [(part.sar(shift) if shift else part).splat() for part in parts]


def _step(f: Function, t: Tier, fmt: Format, codes: list[Value], x: Activations) -> list[Value]:
    sums = _start(f, t, fmt, x)
    for c, w in enumerate(codes):
        w = w ^ 128 if fmt.is_signed and bias(t) else w
        i = c // 4 if len(sums) == 2 else 0
        sums[i] = dot(f, t, sums[i], w, x.codes(c), fmt.is_signed)
    return sums


def _indices(f: Function, first: Value, n_tiles: Value) -> list[Value]:
    """The next tiles; past the end the last one is computed again."""
    return [f.minimum(first + j, n_tiles - 1) for j in range(_TILES)]


def _write_one(m: Module, t: Tier, fmt: Format) -> None:
    group_bytes = TILE_ROWS * QTYPES[fmt.qtype].block_bytes
    with m.function("one", void, _ARGS, export=True) as f:
        x, tiles, k, tile_bytes, n_tiles, out = f.args
        n_groups = k // (STEP * fmt.steps)
        with f.loop(0, n_tiles, _TILES) as first:
            index = _indices(f, first, n_tiles)
            tile = [tiles + i * tile_bytes for i in index]
            planes = [plane_addresses(fmt.qtype, address, n_groups) for address in tile]
            acc = [f.var(f.value(0.0, SUMS)) for _ in index]
            with f.loop(0, n_groups) as group:
                ahead = [at + (tile_bytes * _TILES + group * group_bytes) for at in tile]
                _add_group(f, t, fmt, x, group, planes, ahead, acc)
            for i, a in zip(index, acc, strict=True):
                f.store(a.get(), out, i * 64)


def _add_group(
    f: Function,
    t: Tier,
    fmt: Format,
    x: Value,
    group: Value,
    planes: list[Planes],
    ahead: list[Value],
    acc: list[Var],
) -> None:
    """A group of each of some tiles; its place in the tiles after them is at `ahead`."""
    group_bytes = TILE_ROWS * QTYPES[fmt.qtype].block_bytes
    scales = [fmt.scales(f, t, p, group) for p in planes]
    with f.loop(0, fmt.steps) as j:
        step = group * fmt.steps + j
        activations = Activations(f, x + step * STEP_BYTES, 1, 0)
        for p, s, here, a in zip(planes, scales, ahead, acc, strict=True):
            prefetch(f, here + j * (group_bytes // fmt.steps), group_bytes // fmt.steps)
            sums = _step(f, t, fmt, fmt.codes(f, p, step), activations)
            add_step(f, fmt.shape, sums, activations, s(j), a)


def _write_one_float(m: Module, t: Tier, qtype: str) -> None:
    with m.function("one", void, _ARGS, export=True) as f:
        x, tiles, k, tile_bytes, n_tiles, out = f.args
        with f.loop(0, n_tiles, _TILES) as first:
            index = _indices(f, first, n_tiles)
            tile = [tiles + i * tile_bytes for i in index]
            acc = [f.var(f.value(0.0, SUMS)) for _ in index]
            with f.loop(0, k) as column:
                value = f.load(x, f32, column * 4, 4).splat()
                for a, w in zip(acc, tile, strict=True):
                    a.set(f.fma(FLOATS[qtype](f, t, w, column), value, a.get()))
            for i, a in zip(index, acc, strict=True):
                f.store(a.get(), out, i * 64)


# --- a few tokens -----------------------------------------------------------------------------


def write_few(m: Module, t: Tier, qtype: str) -> None:
    """Write `few` for a weight type: each step of a tile is decoded once, and meets all tokens.

    `x_bytes` lie between one token's activations and the next's. Unlike `one`, which waits for
    memory, it computes no tile twice.
    """
    with m.function("few", void, [*_ARGS, i64, i64], export=True) as f:
        x, tiles, k, tile_bytes, n_tiles, out, x_bytes, n_tokens = f.args
        n_whole = n_tiles - n_tiles % _TILES
        for count, start, stop in ((_TILES, 0, n_whole), (1, n_whole, n_tiles)):
            with f.loop(start, stop, count) as first:
                tile = [tiles + (first + i) * tile_bytes for i in range(count)]
                tokens = _Tokens(f, x, x_bytes, n_tokens, out + first * 64, n_tiles * 64)
                if qtype in FLOATS:
                    _few_floats(t, qtype, tokens, tile, k)
                else:
                    _few_groups(t, FORMATS[qtype], tokens, tile, k, tile_bytes)


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a call of `few`, and their sums with some tiles."""

    f: Function
    x: Value
    x_bytes: Value
    n_tokens: Value
    out: Value
    out_bytes: Value

    def sum(self, tile: int, token: Value) -> _Sum:
        return _Sum(self.f, self.out + (token * self.out_bytes + 64 * tile))

    def each(self, tile: int, add: Callable[[Value, _Sum], None]) -> None:
        """add(activations of a token, its sum with a tile) for every token."""
        with self.f.loop(0, self.n_tokens) as token:
            add(self.x + token * self.x_bytes, self.sum(tile, token))


@dataclass(frozen=True)
class _Sum:
    """A sum in memory that is used as a variable."""

    f: Function
    address: Value

    def get(self) -> Value:
        return self.f.load(self.address, SUMS, 0, 64)

    def set(self, new: Value) -> None:
        self.f.store(new, self.address, 0, 64)


def _few_groups(
    t: Tier, fmt: Format, tokens: _Tokens, tile: list[Value], k: Value, tile_bytes: Value
) -> None:
    f, n_groups = tokens.f, k // (STEP * fmt.steps)
    group_bytes = TILE_ROWS * QTYPES[fmt.qtype].block_bytes
    planes = [plane_addresses(fmt.qtype, address, n_groups) for address in tile]
    for i in range(len(tile)):
        tokens.each(i, lambda x, acc: acc.set(f.value(0.0, SUMS)))
    with f.loop(0, n_groups) as group:
        ahead = [at + (tile_bytes * _TILES + group * group_bytes) for at in tile]
        scales = [fmt.scales(f, t, p, group) for p in planes]
        with f.loop(0, fmt.steps) as j:
            step = group * fmt.steps + j
            for i, (p, of_step, here) in enumerate(zip(planes, scales, ahead, strict=True)):
                share = group_bytes // fmt.steps
                prefetch(f, here + j * share, share)
                codes, s = fmt.codes(f, p, step), of_step(j)

                def add(x: Value, acc: _Sum, codes=codes, s=s) -> None:
                    activations = Activations(f, x + step * STEP_BYTES, 1, 0)
                    sums = _step(f, t, fmt, codes, activations)
                    add_step(f, fmt.shape, sums, activations, s, acc)

                tokens.each(i, add)


def _few_floats(t: Tier, qtype: str, tokens: _Tokens, tile: list[Value], k: Value) -> None:
    """Four tokens at a time, the last ones more than once: their sums stay in registers."""
    f = tokens.f
    with f.loop(0, tokens.n_tokens, 4) as first:
        index = [f.minimum(first + i, tokens.n_tokens - 1) for i in range(4)]
        acc = [[f.var(f.value(0.0, SUMS)) for _ in tile] for _ in index]
        with f.loop(0, k) as column:
            columns = [FLOATS[qtype](f, t, w, column) for w in tile]
            for token, row in zip(index, acc, strict=True):
                value = f.load(tokens.x + token * tokens.x_bytes, f32, column * 4, 4).splat()
                for a, w in zip(row, columns, strict=True):
                    a.set(f.fma(w, value, a.get()))
        for token, row in zip(index, acc, strict=True):
            for j, a in enumerate(row):
                tokens.sum(j, token).set(a.get())
