"""What the threads of a product call do: rows of weights, and what ends a product.

Items are tiles (one token or a few, through the streaming kernels) or pairs of tiles (more, in
blocks through the panel kernel). Bias, residual, SiLU or GELU gate are applied while the sums are
in cache.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite.ir import Type

from jitllm.kernels.cpu import panel, vmath
from jitllm.kernels.cpu.activations import WEIGHT, Fields, job_at, weight_of
from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.ir import Function, Module, Value, i8, i64, ptr, void
from jitllm.kernels.cpu.norm import VECTOR, each_row
from jitllm.kernels.cpu.steps import FEW_TOKENS, PANEL_BYTES, PANEL_TILES, prefetch

ACTIVATIONS: dict[str, Callable[[Function, Value], Value]] = {
    "silu": vmath.silu,
    "gelu": vmath.gelu,
}

_MACRO_TOKENS = 240  # tokens that meet an unpacked panel: whole blocks of any size
_RUN_TILES = 4  # tiles per call of `one`


def write_rows(m: Module, t: Tier, gated: bool) -> None:
    """Write rows_few(job, begin, end) over tiles and rows_many(job, begin, end) over pairs."""
    (_write_finish_gated if gated else _write_finish)(m)
    _write_many(m)
    _write_rows_few(m, gated)
    _write_rows_many(m, t, gated)


# --- endings ----------------------------------------------------------------------------------


_FINISH_ARGS = [ptr, ptr, i64, i64, i64, i64, ptr]


def _each_token(f: Function, body: Callable[[Value, Value], None]) -> None:
    """body(token, i) for the tokens of a `finish` call."""
    first, count = f.args[2:4]
    with f.loop(0, count) as i:
        body(first + i, i)


def _write_finish(m: Module) -> None:
    """finish(job, weight, token, count, tile, n, sums): bias and residual, into y.

    `count` tokens from `token` on, `n` tiles from `tile` on; sums f32[count, n, 16].
    """
    with m.function("finish", void, _FINISH_ARGS) as f:
        job, w = job_at(f, f.args[0]), Fields(f, f.args[1], WEIGHT)
        tile, n, sums = f.args[4:]
        n_rows, y, bias, add = w["n_rows"], w["y"], w["bias"], job["add"]
        row = tile * 16
        rows = f.minimum(n * 16, n_rows - row)

        def write(token: Value, i: Value) -> None:
            start = (token * n_rows + row) * 4

            def end(t: Type, r: Value) -> None:
                total = f.var(f.load(sums + i * n * 64, t, r * 4, 4))
                for addend, at in ((bias, row * 4), (add, start)):
                    with f.when(addend.ne(None)):
                        total.set(total.get() + f.load(addend + at, t, r * 4, 4))
                f.store(total.get(), y + start, r * 4, 4)

            each_row(f, rows, end)

        _each_token(f, write)


def _write_finish_gated(m: Module) -> None:
    """finish_gated(job, weight, token, count, tile, n, gate, up): activation(gate) * up, into y."""
    with m.function("finish_gated", void, [*_FINISH_ARGS, ptr]) as f:
        job, w = job_at(f, f.args[0]), Fields(f, f.args[1], WEIGHT)
        count, tile, n, gate, up = f.args[3:]
        for code, activation in enumerate(ACTIVATIONS.values()):
            # in place and over whole vectors: rows past the end cost nothing and harm nobody
            with f.when(job["activation"].eq(code)), f.loop(0, count * n * 16, 16) as i:
                g = activation(f, f.load(gate, VECTOR, i * 4, 4))
                f.store(g * f.load(up, VECTOR, i * 4, 4), gate, i * 4, 4)
        n_rows, y = w["n_rows"], w["y"]
        rows = f.minimum(n * 16, n_rows - tile * 16)

        def write(token: Value, i: Value) -> None:
            to, sums = y + (token * n_rows + tile * 16) * 4, gate + i * n * 64
            each_row(f, rows, lambda t, r: f.store(f.load(sums, t, r * 4, 4), to, r * 4, 4))

        _each_token(f, write)


def _finish(
    job: Fields, w: Fields, part: tuple[Value, ...], sums: list[Value], gated: bool
) -> None:
    """End the products of `part`: (token, count, tile, n)."""
    name, used = ("finish_gated", sums) if gated else ("finish", sums[:1])
    job.f.call(job.f.module.ir.globals[name], job.base, w.base, *part, *used)


# --- rows -------------------------------------------------------------------------------------


def _each_item(
    job: Fields, begin: Value, end: Value, body: Callable[[Fields, Value, Value], None], gated: bool
) -> None:
    """body(weight, first, last) for the part of begin..end that belongs to each weight.

    The two weights of a gate share their items: the body sees the first.
    """
    if gated:
        body(weight_of(job, 0), begin, end)
        return
    f = job.f
    with f.loop(0, job["n_weights"]) as i:
        w = weight_of(job, i)
        first = f.binary("smax", begin - w["first_item"], 0)
        last = f.minimum(end - w["first_item"], w["n_items"])
        with f.when(first < last):
            body(w, first, last)


def _run(job: Fields, w: Fields, tile: Value, n: Value, out: Value) -> None:
    """The products of all tokens with `n` tiles from `tile` on, into f32[tokens, n, 16]."""
    f, tokens, x = job.f, job["n_tokens"], w["x"]
    tiles = w["tiles"] + tile * w["tile_bytes"]
    args = (x, tiles, job["k"], w["tile_bytes"], n, out)
    with f.either(tokens.eq(1)) as (one, few):
        with one:
            f.call(w["one"], *args)
        with few:
            f.call(w["few"], *args, w["x_block_bytes"], tokens)


def _write_rows_few(m: Module, gated: bool) -> None:
    with m.function("rows_few", void, [ptr, i64, i64]) as f:
        address, begin, end = f.args
        job = job_at(f, address)
        outs = [f.stack(VECTOR, FEW_TOKENS * _RUN_TILES, align=64) for _ in range(2)]

        def tiles(w: Fields, first: Value, last: Value) -> None:
            with f.loop(first, last, _RUN_TILES) as tile:
                n = f.minimum(last - tile, _RUN_TILES)
                for i, out in enumerate(outs if gated else outs[:1]):
                    _run(job, weight_of(job, i) if gated else w, tile, n, out)
                part = (f.value(0, i64), job["n_tokens"], tile, n)
                _finish(job, w, part, outs, gated)

        _each_item(job, begin, end, tiles, gated)


def _write_many(m: Module) -> None:
    """many(job, weight, pair, block, n, sums, panels): `n` token blocks against two tiles.

    sums f32[n * block_tokens, 2, 16]; `panels` is room for two. While panels are computed, the
    bytes of the next pair are asked for in memory order: no later `unpack` waits for memory.
    """
    with m.function("many", void, [ptr, ptr, i64, i64, i64, ptr, ptr]) as f:
        job, w = job_at(f, f.args[0]), Fields(f, f.args[1], WEIGHT)
        pair, block, n, sums, panels = f.args[2:]
        sums_bytes = w["block_tokens"] * (64 * PANEL_TILES)
        with f.loop(0, n * sums_bytes, 64) as i:
            f.store(f.value(0.0, VECTOR), sums, i, 64)
        # past the end the last tile is computed again
        tiles = [f.minimum(pair * PANEL_TILES + j, w["n_tiles"] - 1) for j in range(PANEL_TILES)]
        with f.loop(0, w["steps"], w["panel_steps"]) as step:
            count = f.minimum(w["steps"] - step, w["panel_steps"])
            for j, tile in enumerate(tiles):
                address = w["tiles"] + tile * w["tile_bytes"]
                f.call(w["unpack"], address, job["k"], step, count, panels + j * PANEL_BYTES)
            x = w["x"] + (block * w["x_block_bytes"] + step * w["x_step_bytes"])
            pair_bytes = w["tile_bytes"] * PANEL_TILES
            ahead = w["tiles"] + ((pair + 1) * pair_bytes + step * pair_bytes // w["steps"])
            share = count * pair_bytes // (w["steps"] * n)
            with f.loop(0, n) as b:
                prefetch(f, ahead + b * share, share)
                x_block = x + b * w["x_block_bytes"]
                f.call(w["panel"], x_block, panels, count, sums + b * sums_bytes)


def _write_rows_many(m: Module, t: Tier, gated: bool) -> None:
    many = m.ir.globals["many"]
    with m.function("rows_many", void, [ptr, i64, i64]) as f:
        address, begin, end = f.args
        job = job_at(f, address)
        panels = f.stack(i8, PANEL_TILES * PANEL_BYTES, align=64)
        rooms = [f.stack(VECTOR, _MACRO_TOKENS * PANEL_TILES, align=64) for _ in range(2)]

        def pairs(w: Fields, first: Value, last: Value) -> None:
            n_tokens = job["n_tokens"]
            with f.loop(0, n_tokens, _MACRO_TOKENS) as token, f.loop(first, last) as pair:
                count = f.minimum(n_tokens - token, _MACRO_TOKENS)
                for i, room in enumerate(rooms if gated else rooms[:1]):
                    w_i = weight_of(job, i) if gated else w
                    size = w_i["block_tokens"]
                    blocks = (count + size - 1) // size
                    f.call(many, address, w_i.base, pair, token // size, blocks, room, panels)
                part = (token, count, pair * PANEL_TILES, f.value(PANEL_TILES, i64))
                _finish(job, w, part, rooms, gated)

        panel.enter(f, t)
        _each_item(job, begin, end, pairs, gated)
        panel.leave(f, t)
