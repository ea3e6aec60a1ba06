"""The product handlers: what happens around the inner loops of `products`.

A call reads f32 activations once: root-mean-square norm (if any) and quantisation are done token by
token into scratch, then the rows of all its weights are shared among the threads as one range of
items, and what ends a product - bias, residual, SiLU or GELU gate - is applied while the sums are
in cache. Up to `FEW` tokens go one by one through the streaming kernel, tile by tile; more go in
blocks through the panel kernel.

A call's weights may differ in type; their functions are found in a table that `enable` fills before
the call is traced. What is static comes as integers in the FFI attribute `params`, see `Params`.

The job is a block of 8-byte fields on the handler's stack: `_JOB` fields, then `_WEIGHT` per weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from jitllm.kernels.cpu import ffi, threads, vmath
from jitllm.kernels.cpu.compile import Tier, load
from jitllm.kernels.cpu.formats import CODES, STEP
from jitllm.kernels.cpu.ir import Function, Module, Value, f32, i8, i32, i64, ptr, vec, void
from jitllm.kernels.cpu.products import (
    PANEL_BYTES,
    PANEL_TILES,
    SHAPES,
    STEP_BYTES,
    build_panel,
    build_type,
    shape_of,
)

FEW = 4
"""Up to so many tokens, streaming the weights beats unpacking them (measured)."""

MAX_WEIGHTS = 4
_MACRO_TOKENS = 96  # tokens that meet an unpacked panel: their sums are 12 KiB
_RUN_TILES = 4  # tiles per call of `one`
_GRAIN_BYTES = 16 << 10  # weights worth a fork
_TOKEN_GRAIN = 8192  # activations worth a fork

ACTIVATIONS: dict[str, Callable[[Function, Value], Value]] = {
    "silu": vmath.silu,
    "gelu": vmath.gelu,
}

_JOB = [
    "n_tokens",
    "k",
    "x",
    "norm",
    "eps",
    "ints",
    "floats",
    "ints_block",
    "floats_block",
    "n_weights",
    "add",
    "activation",
]
_WEIGHT = [
    "tiles",
    "tile_bytes",
    "n_rows",
    "first_item",
    "n_items",
    "n_tiles",
    "one",
    "unpack",
    "panel",
    "x",
    "x_block_bytes",
    "x_step_bytes",
    "steps",
    "panel_steps",
    "block_tokens",
    "y",
    "bias",
]
_JOB_BYTES, _WEIGHT_BYTES = 8 * len(_JOB), 8 * len(_WEIGHT)
_ADDRESSES = {"x", "norm", "ints", "floats", "add", "tiles", "one", "unpack", "panel", "y", "bias"}

# `params`: per call, then per weight
_CALL_PARAMS = ["n_weights", "k", "eps", "norm", "add", "activation", "scratch", "ints", "floats"]
_WEIGHT_PARAMS = ["code", "is_float", "n_rows", "tile_bytes", "bias"]
_TABLE = ("one", "unpack", "panel")  # functions of a type, in a row of the table
_VECTOR = vec(f32)


@dataclass(frozen=True)
class Fields:
    """Named 8-byte fields in memory."""

    f: Function
    base: Value
    names: tuple[str, ...] | list[str]

    def __getitem__(self, name: str) -> Value:
        t = ptr if name in _ADDRESSES else i64
        return self.f.load(self.base, t, 8 * self.names.index(name), 8)

    def __setitem__(self, name: str, x: Value | int | None) -> None:
        x = self.f.value(x, ptr if name in _ADDRESSES else i64)
        self.f.store(x, self.base, 8 * self.names.index(name), 8)


def _job(f: Function, base: Value) -> Fields:
    return Fields(f, base, _JOB)


def _weight(f: Function, job: Value, index: Value | int) -> Fields:
    return Fields(f, job + (f.value(index, i64) * _WEIGHT_BYTES + _JOB_BYTES), _WEIGHT)


# --- activations ------------------------------------------------------------------------------


def _write_rms(m: Module) -> None:
    """rms(x, k, eps) -> 1 / sqrt(mean(x^2) + eps)."""
    with m.function("rms", f32, [ptr, i64, f32]) as f:
        x, k, eps = f.args
        whole = k & -16
        squares = f.var(f.value(0.0, _VECTOR))
        with f.loop(0, whole, 16) as i:
            v = f.load(x, _VECTOR, i * 4, 4)
            squares.set(f.fma(v, v, squares.get()))
        total = f.var(f.reduce(squares.get(), lambda a, b: a + b))
        with f.loop(whole, k) as i:
            v = f.load(x, f32, i * 4, 4)
            total.set(f.fma(v, v, total.get()))
        mean = total.get() / Value(f, f.b.sitofp(k.v, f32))
        f.ret(1.0 / f.unary("sqrt", mean + eps))


def _write_quantise(m: Module) -> None:
    """quantise(a, b, to, i, tokens): a step of token i, two f32[16], into its block of `tokens`.

    As ggml's Q8: d = amax / 127, codes round(x / d) to nearest even. The maximum is taken over the
    bits of |x|, whose order as integers is that of the floats with NaN above infinity: a NaN
    among the activations makes d, and so every output, NaN.
    """
    with m.function("quantise", void, [_VECTOR, _VECTOR, ptr, i64, i64], inline=True) as f:
        a, b, to, i, tokens = f.args
        bits = [v.bitcast(vec(i32)) & 0x7FFFFFFF for v in (a, b)]
        largest = f.reduce(f.binary("umax", *bits), lambda p, q: f.binary("umax", p, q))
        amax = largest.bitcast(f32)
        inverse = f.select(amax > 2.0**-100, 127.0 / amax, 0.0)
        codes = [vmath.round_bits(v * inverse.splat()).trunc(i8) for v in (a, b)]
        for h, v in enumerate(codes):
            f.store(v, to, i * STEP + 16 * h)
        first, last = (f.reduce(v.sext(i32), lambda p, q: p + q) for v in codes)
        d, field = amax / 127.0, to + (tokens * STEP + i * 4)
        total = first + last
        for n, value in enumerate((d, d * total.to_f32(), total * -128, first * -128)):
            f.store(value, field, tokens * (4 * n), 4)


def _scaled_load(f: Function, t, job: Fields, x: Value, scale: Value, k: Value) -> Value:
    """x[k...] * scale * norm[k...]."""
    v = f.load(x, t, k * 4, 4) * f.value(scale, t)
    return v * f.load(job["norm"], t, k * 4, 4)


def _write_prepare(m: Module) -> None:
    """prepare(job, begin, end): tokens normalised and quantised into scratch."""
    with m.function("prepare", void, [ptr, i64, i64]) as f:
        address, begin, end = f.args
        job = _job(f, address)
        k = job["k"]
        with f.loop(begin, end) as token:
            x = job["x"] + token * k * 4
            with f.either(job["norm"].ne(None)) as (normed, plain):
                with normed:
                    eps = job["eps"].trunc(i32).bitcast(f32)
                    scale = f.call(m.ir.globals["rms"], x, k, eps)
                    _put(f, job, token, lambda t, i, x=x, s=scale: _scaled_load(f, t, job, x, s, i))
                with plain:
                    _put(f, job, token, lambda t, i, x=x: f.load(x, t, i * 4, 4))


def _put(f: Function, job: Fields, token: Value, read) -> None:
    """Write one token's activations, `read(type, k)`, in the forms the call's weights want."""
    k, quantise = job["k"], f.module.ir.globals["quantise"]
    with f.when(job["ints"].ne(None)):
        tokens = job["ints_block"]
        block = job["ints"] + (token // tokens) * tokens * (k // STEP) * STEP_BYTES
        with f.loop(0, k // STEP) as step:
            to = block + step * tokens * STEP_BYTES
            parts = [read(_VECTOR, step * STEP + 16 * h) for h in range(2)]
            f.call(quantise, *parts, to, token % tokens, tokens)
    with f.when(job["floats"].ne(None)):
        tokens = job["floats_block"]
        block = job["floats"] + ((token // tokens) * tokens * k + token % tokens) * 4
        with f.loop(0, k) as i:
            f.store(read(f32, i), block, i * tokens * 4, 4)


# --- endings ----------------------------------------------------------------------------------


def _write_finish(m: Module) -> None:
    """finish(job, weight, token, tile, n, sums): bias and residual, into y; sums f32[n, 16]."""
    with m.function("finish", void, [ptr, ptr, i64, i64, i64, ptr]) as f:
        job, w = _job(f, f.args[0]), Fields(f, f.args[1], _WEIGHT)
        token, tile, n, sums = f.args[2:]
        row = tile * 16
        start = (token * w["n_rows"] + row) * 4

        def end(t, i: Value) -> None:
            total = f.var(f.load(sums, t, i * 4, 4))
            with f.when(w["bias"].ne(None)):
                total.set(total.get() + f.load(w["bias"] + row * 4, t, i * 4, 4))
            with f.when(job["add"].ne(None)):
                total.set(total.get() + f.load(job["add"] + start, t, i * 4, 4))
            f.store(total.get(), w["y"] + start, i * 4, 4)

        _rows(f, f.minimum(n * 16, w["n_rows"] - row), end)


def _rows(f: Function, n: Value, body) -> None:
    """body(type, row) for rows 0..n: whole vectors, then one by one."""
    with f.loop(0, n & -16, 16) as i:
        body(_VECTOR, i)
    with f.loop(n & -16, n) as i:
        body(f32, i)


def _write_finish_gated(m: Module) -> None:
    """finish_gated(job, weight, token, tile, n, gate, up): activation(gate) * up, into y."""
    with m.function("finish_gated", void, [ptr, ptr, i64, i64, i64, ptr, ptr]) as f:
        job, w = _job(f, f.args[0]), Fields(f, f.args[1], _WEIGHT)
        token, tile, n, gate, up = f.args[2:]
        y = w["y"] + (token * w["n_rows"] + tile * 16) * 4
        for code, activation in enumerate(ACTIVATIONS.values()):
            with f.when(job["activation"].eq(code)):
                # all vectors first, in place: a row past the end costs nothing and harms nobody
                with f.loop(0, n * 16, 16) as i:
                    g = activation(f, f.load(gate, _VECTOR, i * 4, 4))
                    f.store(g * f.load(up, _VECTOR, i * 4, 4), gate, i * 4, 4)
        _rows(
            f,
            f.minimum(n * 16, w["n_rows"] - tile * 16),
            lambda t, i: f.store(f.load(gate, t, i * 4, 4), y, i * 4, 4),
        )


# --- rows -------------------------------------------------------------------------------------


def _run_one(f: Function, job: Fields, w: Fields, token: Value, tile: Value, n: Value, out: Value):
    """The streaming kernel: n tiles of one weight for one token."""
    x = w["x"] + token * w["x_block_bytes"]
    tiles = w["tiles"] + tile * w["tile_bytes"]
    f.call(w["one"], x, tiles, job["k"], w["tile_bytes"], n, out)


def _write_many(m: Module) -> None:
    """many(job, weight, pair, block, n, sums, panels): `n` token blocks against two tiles.

    sums f32[n * block_tokens, 2, 16]; `panels` is room for two.
    """
    with m.function("many", void, [ptr, ptr, i64, i64, i64, ptr, ptr]) as f:
        job, w = _job(f, f.args[0]), Fields(f, f.args[1], _WEIGHT)
        pair, block, n, sums, panels = f.args[2:]
        sums_bytes = w["block_tokens"] * (64 * PANEL_TILES)
        with f.loop(0, n * sums_bytes, 64) as i:
            f.store(f.value(0.0, _VECTOR), sums, i, 64)
        tiles = [f.minimum(pair * PANEL_TILES + j, w["n_tiles"] - 1) for j in range(PANEL_TILES)]
        with f.loop(0, w["steps"], w["panel_steps"]) as step:
            count = f.minimum(w["steps"] - step, w["panel_steps"])
            for j, tile in enumerate(tiles):
                address = w["tiles"] + tile * w["tile_bytes"]
                f.call(w["unpack"], address, job["k"], step, count, panels + j * PANEL_BYTES)
            x = w["x"] + (block * w["x_block_bytes"] + step * w["x_step_bytes"])
            with f.loop(0, n) as b:
                f.call(w["panel"], x + b * w["x_block_bytes"], panels, count, sums + b * sums_bytes)


def _each_weight(f: Function, job: Fields, begin: Value, end: Value, body) -> None:
    """body(weight, first, last) for the part of begin..end that belongs to each weight."""
    with f.loop(0, job["n_weights"]) as i:
        w = _weight(f, job.base, i)
        first = f.binary("smax", begin - w["first_item"], 0)
        last = f.minimum(end - w["first_item"], w["n_items"])
        with f.when(first < last):
            body(w, first, last)


def _write_rows_one(m: Module, gated: bool) -> None:
    """rows_one(job, begin, end): tiles begin..end for each of a few tokens."""
    with m.function("rows_one", void, [ptr, i64, i64]) as f:
        address, begin, end = f.args
        job = _job(f, address)
        outs = [f.stack(_VECTOR, _RUN_TILES, align=64) for _ in range(2)]

        def tiles(w: Fields, first: Value, last: Value) -> None:
            with f.loop(first, last, _RUN_TILES) as tile, f.loop(0, job["n_tokens"]) as token:
                n = f.minimum(last - tile, _RUN_TILES)
                _run_one(f, job, w, token, tile, n, outs[0])
                if gated:
                    _run_one(f, job, _weight(f, address, 1), token, tile, n, outs[1])
                _finish(f, address, w, token, tile, n, outs, gated)

        _each_item(f, job, begin, end, tiles, gated)


def _each_item(f: Function, job: Fields, begin: Value, end: Value, body, gated: bool) -> None:
    if gated:
        body(_weight(f, job.base, 0), begin, end)
    else:
        _each_weight(f, job, begin, end, body)


def _finish(
    f: Function, job: Value, w: Fields, token: Value, tile: Value, n: Value, sums, gated: bool
) -> None:
    name, used = ("finish_gated", sums) if gated else ("finish", sums[:1])
    f.call(f.module.ir.globals[name], job, w.base, token, tile, n, *used)


def _write_rows_many(m: Module, gated: bool) -> None:
    """rows_many(job, begin, end): pairs of tiles for all tokens, a macro block at a time."""
    many = m.ir.globals["many"]
    with m.function("rows_many", void, [ptr, i64, i64]) as f:
        address, begin, end = f.args
        job = _job(f, address)
        n_tokens = job["n_tokens"]
        panels = f.stack(i8, PANEL_TILES * PANEL_BYTES, align=64)
        rooms = [f.stack(_VECTOR, _MACRO_TOKENS * PANEL_TILES, align=64) for _ in range(2)]

        def pairs(w: Fields, first: Value, last: Value) -> None:
            with f.loop(0, n_tokens, _MACRO_TOKENS) as token, f.loop(first, last) as pair:
                count = f.minimum(n_tokens - token, _MACRO_TOKENS)
                for i in range(2 if gated else 1):
                    w_i = _weight(f, address, i) if gated else w
                    size = w_i["block_tokens"]
                    blocks = (count + size - 1) // size
                    f.call(many, address, w_i.base, pair, token // size, blocks, rooms[i], panels)
                tile = pair * PANEL_TILES
                n = f.minimum(w["n_tiles"] - tile, PANEL_TILES)
                with f.loop(0, count) as i:
                    sums = [room + i * (64 * PANEL_TILES) for room in rooms]
                    _finish(f, address, w, token + i, tile, n, sums, gated)

        _each_item(f, job, begin, end, pairs, gated)


# --- handlers ---------------------------------------------------------------------------------


def _optional(f: Function, index: Value, address) -> Value:
    """address(index), or null for an index of -1."""
    found = f.var(f.value(None, ptr))
    with f.when(index >= 0):
        found.set(address(index))
    return found.get()


def _read_call(f: Function, t: Tier, frame: ffi.Frame, job: Fields) -> None:
    """Fill the job from the frame; arguments x, span, weights..., then what `params` points at."""
    for i, name in enumerate(_CALL_PARAMS):
        if name in ("n_weights", "k", "eps", "activation"):
            job[name] = frame.param(i)
    param = {name: frame.param(i) for i, name in enumerate(_CALL_PARAMS)}
    n = f.load(frame.arg(1).data, i32, 4, 4).sext(i64)
    job["n_tokens"], job["x"] = n, frame.arg(0).data
    scratch = frame.ret(param["scratch"]).data
    for name in ("norm", "add"):
        job[name] = _optional(f, param[name], lambda i: frame.arg(i).data)
    for name, shape in (("ints", "scaled"), ("floats", "float")):
        job[name] = _optional(f, param[name], lambda i: scratch + i)
        job[f"{name}_block"] = f.select(n <= FEW, 1, f.value(SHAPES[shape].tokens(t), i64))


def _read_weight(f: Function, t: Tier, frame: ffi.Frame, job: Fields, i: Value, w: Fields) -> None:
    at = i * len(_WEIGHT_PARAMS) + len(_CALL_PARAMS)
    param = {name: frame.param(at + j) for j, name in enumerate(_WEIGHT_PARAMS)}
    is_float = param["is_float"].ne(0)

    def by_kind(floats: Value | int, ints: Value | int) -> Value:
        return f.select(is_float, f.value(floats, i64), f.value(ints, i64))

    w["tiles"], w["y"] = frame.arg(i + 2).data, frame.ret(i).data
    w["bias"] = _optional(f, param["bias"], lambda i: frame.arg(i).data)
    for name in ("n_rows", "tile_bytes"):
        w[name] = param[name]
    w["n_tiles"] = (param["n_rows"] + 15) // 16
    table = Value(f, f.module.ir.globals["table"]) + param["code"] * (8 * len(_TABLE))
    for j, name in enumerate(_TABLE):
        w[name] = f.load(table, ptr, 8 * j, 8)
    floats, ints = SHAPES["float"], SHAPES["scaled"]
    w["x"] = f.select(is_float, job["floats"], job["ints"])
    w["block_tokens"] = by_kind(job["floats_block"], job["ints_block"])
    w["steps"] = job["k"] // by_kind(floats.columns, ints.columns)
    w["panel_steps"] = by_kind(floats.steps, ints.steps)
    w["x_step_bytes"] = w["block_tokens"] * by_kind(floats.x_step_bytes, ints.x_step_bytes)
    w["x_block_bytes"] = w["x_step_bytes"] * w["steps"]


def _share(f: Function, frame: ffi.Frame, job: Fields, body: str, n: Value, grain: Value) -> None:
    function = Value(f, f.module.ir.globals[body])
    threads.call_parallel(f, frame.address, function, job.base, n, f.binary("smax", grain, 1))


def _write_handler(m: Module, t: Tier, gated: bool) -> None:
    with ffi.handler(m, "handler") as frame:
        f = frame.fn
        job = _job(f, f.stack(i8, _JOB_BYTES + MAX_WEIGHTS * _WEIGHT_BYTES, align=8))
        _read_call(f, t, frame, job)
        few = job["n_tokens"] <= FEW
        items = f.var(f.value(0, i64))
        with f.loop(0, job["n_weights"]) as i:
            w = _weight(f, job.base, i)
            _read_weight(f, t, frame, job, i, w)
            n = f.select(few, w["n_tiles"], (w["n_tiles"] + PANEL_TILES - 1) // PANEL_TILES)
            w["first_item"], w["n_items"] = items.get(), n
            items.set(n if gated else items.get() + n)
        n_tokens = job["n_tokens"]
        _share(f, frame, job, "prepare", n_tokens, f.value(_TOKEN_GRAIN, i64) // job["k"])
        with f.either(few) as (one, many):
            with one:
                tile_bytes = _weight(f, job.base, 0)["tile_bytes"]
                grain = f.value(_GRAIN_BYTES, i64) // tile_bytes
                _share(f, frame, job, "rows_one", items.get(), grain)
            with many:
                _share(f, frame, job, "rows_many", items.get(), f.value(1, i64))


def build(gated: bool) -> Callable[[Tier], Module]:
    """The unit of one handler, `handler`; its table of kernels is the symbol `_table_name`."""

    def build(t: Tier) -> Module:
        m = Module("gated" if gated else "matmul")
        m.zeros("table", 8 * len(CODES) * len(_TABLE))
        _write_rms(m)
        _write_quantise(m)
        _write_prepare(m)
        (_write_finish_gated if gated else _write_finish)(m)
        _write_many(m)
        _write_rows_one(m, gated)
        _write_rows_many(m, gated)
        _write_handler(m, t, gated)
        return m

    return build


# --- loading ----------------------------------------------------------------------------------


@cache
def target(op: str, t: Tier) -> str:
    """Load the handler of `matmul` or `gated`; the name of its FFI target."""
    address = _handler(op, t)["handler"]
    name = f"jitllm_{op}_{t.name}"
    ffi.register(name, address)
    return name


def _handler(op: str, t: Tier) -> dict[str, int]:
    exports = ("handler", "table")
    return load(op, build(op == "gated"), t, exports, threads.imports())


@cache
def enable(op: str, qtype: str, t: Tier) -> int:
    """Load the kernels of a weight type into the table of an op; the type's number in it."""
    shape = shape_of(qtype)
    kernels = load(qtype, build_type(qtype), t, ("one", "unpack"))
    kernels |= load(f"panel-{shape.name}", build_panel(shape), t, ("panel",))
    at = _handler(op, t)["table"] + 8 * len(_TABLE) * CODES[qtype]
    for i, name in enumerate(_TABLE):
        ctypes.c_uint64.from_address(at + 8 * i).value = kernels[name]
    return CODES[qtype]
