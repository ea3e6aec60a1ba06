"""The second half of attention: a block of query rows against a chunk of keys, and their sum.

Both products have one form, `acc[row][column] += a[row][step] * b[step][column]`. For scores the
steps are the H values of a head and the columns 16 keys each (the cache holds keys in tiles
[H][16]); for the result the steps are keys and the columns the values of a head. A lane's additions
happen in the order of the steps, whoever shares the block. Scores are weighed in base 2: the factor
log2(e) is in the queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jitllm.kernels.cpu.attention_job import CHUNK, Blocking, Job, Shape
from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.ir import LANES, Function, Module, Value, f32, i16, i64, ptr, vec, void
from jitllm.kernels.cpu.steps import prefetch
from jitllm.kernels.cpu.vmath import exp2, half_to_f32

_SUMS, _VALUES = 4 * LANES, 8 * LANES  # offsets in a partial result, after its maxima


_SIDE_BY_SIDE = 4  # rows of a softmax

Seen = Callable[[Value | int], tuple[Value, Value]]
"""Position i of a block -> the keys of the chunk it sees, from the first to past the last."""


class Tiles:
    """Writes the functions of this half for one shape on one tier."""

    def __init__(self, m: Module, shape: Shape, t: Tier):
        self.m, self.shape, self.tier = m, shape, t
        self.blocking = Blocking.of(shape, t)
        heads, full = self.blocking.heads, self.blocking.heads * self.blocking.positions
        for n in {
            min(_SIDE_BY_SIDE, rows - r)
            for rows in (heads, full)
            for r in range(0, rows, _SIDE_BY_SIDE)
        }:
            self._write_softmax(n)
        for rows in sorted({heads, full}):
            self._write_scores(rows)
            self._write_weigh(rows)
            self._write_fold(rows)
            self._write_chunk(rows // heads)
        self._write_finish()

    def stride(self, rows: int) -> int:
        """Bytes between two rows' scores: the last tiles may be computed more than once."""
        return 4 * (CHUNK + LANES * (self.blocking.tiles(rows) - 1))

    def fn(self, name: str, n: int):
        """A function written here, for `n` rows or positions."""
        return self.m.ir.globals[f"{name}{n}"]

    def _product(
        self,
        f: Function,
        steps: tuple[Value, Value],
        a: Callable[[Value, int], Value],
        b: Callable[[Value], list[Value]],
        acc: list[list[Value]],
    ) -> list[list[Value]]:
        """acc[row][column] += a(step, row) * b(step)[column], in the order of the steps."""
        sums = [[f.var(x) for x in row] for row in acc]
        with f.loop(*steps) as step:
            columns = b(step)
            for r, row in enumerate(sums):
                x = a(step, r)
                for total, column in zip(row, columns, strict=True):
                    total.set(f.fma(column, x, total.get()))
        return [[total.get() for total in row] for row in sums]

    def _write_scores(self, rows: int) -> None:
        """scores(q, keys, first, last, to, ahead): q.k of tiles first..last; `to` is the place of
        tile 0, `ahead` of the memory that is read next.

        The tiles of the last product are repeats of the last tile where they do not fill it.
        """
        n, shape = self.blocking.tiles(rows), self.shape
        tile_bytes = shape.head_dim * LANES * shape.value_bytes
        with self.m.function(f"scores{rows}", void, [ptr, ptr, i64, i64, ptr, ptr]) as f:
            q, keys, first, last, to, ahead = f.args
            with f.loop(first, last + 1, n) as tile:
                tiles = [keys + f.minimum(tile + c, last) * tile_bytes for c in range(n)]

                def columns(h: Value, tile=tile, tiles=tiles) -> list[Value]:
                    at = h * (LANES * shape.value_bytes)
                    self._ask(f, rows, ahead + (tile * tile_bytes + at * n), n * LANES)
                    return [self._load(f, x, at, LANES) for x in tiles]

                sums = self._product(
                    f,
                    (0, shape.head_dim),
                    lambda h, r, q=q: f.load(q, f32, h * 4 + r * shape.head_bytes, align=4),
                    columns,
                    [[f.value(0.0, vec(f32))] * n for _ in range(rows)],
                )
                for r, row in enumerate(sums):
                    for c, x in enumerate(row):
                        at = tile * (4 * LANES) + (r * self.stride(rows) + c * 4 * LANES)
                        f.store(x, to, at, align=4)

    def _ask(self, f: Function, rows: int, address: Value, n: int) -> None:
        """Ask for n values of a cache, where rows are so few that they wait for memory.

        Hardware prefetching loses the streams at every switch between keys and values. While keys
        are read, the values of the same positions are asked for, and while values are, the keys
        that come next: nothing else. Asking for what lies 16 KiB behind in the same stream, which
        is right only where another chunk follows, took 100 instead of 90 us a call for 4000 tokens
        of SmolLM2, and eight rows of 170 tokens 8.6 instead of 7.5 ms a step.
        """
        if rows <= self.blocking.heads:
            prefetch(f, address, n * self.shape.value_bytes)

    def _load(self, f: Function, base: Value, n_bytes: Value, lanes: int) -> Value:
        if self.shape.stored == "f32":
            return f.load(base, vec(f32, lanes), n_bytes, align=4)
        return half_to_f32(f.load(base, vec(i16, lanes), n_bytes, align=2), self.tier)

    def _write_weigh(self, rows: int) -> None:
        """weigh(p, stride, values, begin, end, to, ahead): to[row] += sum of p[row][key] *
        values[key]; `ahead` as in `scores`, the place of key 0."""
        shape, n = self.shape, self.blocking.columns(rows)
        lanes, t = shape.lanes, vec(f32, shape.lanes)
        key_bytes = shape.head_dim * shape.value_bytes
        with self.m.function(f"weigh{rows}", void, [ptr, i64, ptr, i64, i64, ptr, ptr]) as f:
            p, stride, values, begin, end, to, ahead = f.args
            weights = [p + stride * r for r in range(rows)]
            with f.loop(0, shape.head_dim, n * lanes) as column:
                targets = [
                    [to + (column * 4 + (r * shape.head_bytes + c * lanes * 4)) for c in range(n)]
                    for r in range(rows)
                ]

                def columns(key: Value, column=column) -> list[Value]:
                    offset = key * key_bytes + column * shape.value_bytes
                    self._ask(f, rows, ahead + offset, n * lanes)
                    at = values + offset
                    size = lanes * shape.value_bytes
                    return [self._load(f, at, f.value(c * size, i64), lanes) for c in range(n)]

                sums = self._product(
                    f,
                    (begin, end),
                    lambda key, r: f.load(weights[r], f32, key * 4, align=4),
                    columns,
                    [[f.load(x, t, align=4) for x in row] for row in targets],
                )
                for places, row in zip(targets, sums, strict=True):
                    for place, x in zip(places, row, strict=True):
                        f.store(x, place, align=4)

    def _write_softmax(self, n: int) -> None:
        """softmax(scores, stride, lo, hi, cap, part): n rows' keys lo..hi become weights.

        `scores` is the place of key 0 of the first row, `part` its place in the partial result. The
        weights are relative to the row's maximum; other keys of the first and the last tile get
        none, whatever their slots hold. The rows are independent chains that run side by side.
        """
        with self.m.function(f"softmax{n}", void, [ptr, i64, i64, i64, f32, ptr]) as f:
            scores, stride, lo, hi, cap, part = f.args
            rows = [scores + stride * r for r in range(n)]
            first, last = lo // LANES, (hi - 1) // LANES
            with f.when(cap > 0.0):
                _cap(f, rows, first, last, cap)
            with f.when((lo | hi) % LANES > 0):
                for row in rows:
                    for tile in (first, last):
                        _mask(f, row, tile, lo, hi)
            tops = [f.var(f.value(-math.inf, vec(f32))) for _ in rows]
            with f.loop(first, last + 1) as tile:
                for row, top in zip(rows, tops, strict=True):
                    x = f.load(row, vec(f32), tile * (4 * LANES), align=4)
                    top.set(_larger(f, x, top.get()))
            tops = [f.reduce(top.get(), lambda a, b: _larger(f, a, b)) for top in tops]
            sums = [f.var(f.value(0.0, vec(f32))) for _ in rows]
            with f.loop(first, last + 1) as tile:
                for row, top, total in zip(rows, tops, sums, strict=True):
                    x = f.load(row, vec(f32), tile * (4 * LANES), align=4)
                    weight = exp2(f, x - top)
                    f.store(weight, row, tile * (4 * LANES), align=4)
                    total.set(total.get() + weight)
            for r, (top, total) in enumerate(zip(tops, sums, strict=True)):
                f.store(top, part, 4 * r, align=4)
                f.store(f.reduce(total.get(), lambda a, b: a + b), part, 4 * r + _SUMS, align=4)

    def _write_chunk(self, positions: int) -> None:
        """chunk(job, q, row, chunk, keys, values, part, scores): the partial result of one chunk.

        `q` holds the block's queries [position][head][H], `row` is its first row; `keys` and
        `values` are one head's caches. A row that sees nothing of the chunk gets the sum 0.
        """
        rows = self.blocking.heads * positions
        with self.m.function(f"chunk{positions}", void, [ptr, ptr, i64, i64, *[ptr] * 4]) as f:
            job, q, row, chunk, keys, values, part, scores = f.args
            job = Job(f, job)
            position, window, cap = job.pos + row, job.window, job.softcap
            begin = chunk * CHUNK

            def seen(i: Value | int) -> tuple[Value, Value]:
                end = position + i + 1
                return f.binary("smax", end - window, begin), f.minimum(end, begin + CHUNK)

            lowest, highest = seen(0)[0], seen(positions - 1)[1]
            scores = scores - begin * 4
            first, last = lowest // LANES, (highest - 1) // LANES
            f.call(self.fn("scores", rows), q, keys, first, last, scores, values)
            self.clear(f, part, rows)
            self._weigh_scores(f, positions, seen, scores, cap, part)
            ahead = self._next_keys(f, job, chunk, position, keys)
            self._weigh_block(f, positions, seen, scores, values, part, ahead)

    def _next_keys(
        self, f: Function, job: Job, chunk: Value, position: Value, keys: Value
    ) -> Value:
        """Where the keys lie that are read after a chunk, as if it began there: the next chunk of
        the head, or the first of the next head or of the next conversation."""
        chunk_bytes = CHUNK * self.shape.head_dim * self.shape.value_bytes
        slots = job.capacity * (self.shape.head_dim * self.shape.value_bytes)
        head = keys + slots
        head = f.select(head < job.k_cache + job.n_kv_heads * slots, head, job.next_keys)
        first = f.binary("smax", position + 1 - job.window, 0) // CHUNK
        is_last = position // CHUNK <= chunk
        return f.select(is_last, head + (first - chunk) * chunk_bytes, keys + chunk_bytes)

    def _weigh_scores(
        self,
        f: Function,
        positions: int,
        seen: Seen,
        scores: Value,
        cap: Value,
        part: Value,
    ) -> None:
        """Softmax of all rows at once where they see the same keys, else position by position."""
        heads = self.blocking.heads
        stride = f.value(self.stride(heads * positions), i64)

        def softmax(first: Value | int, n: int, lo: Value, hi: Value) -> None:
            for r in range(0, n, _SIDE_BY_SIDE):
                at = f.value(first, i64) + r
                function = self.fn("softmax", min(_SIDE_BY_SIDE, n - r))
                f.call(function, scores + at * stride, stride, lo, hi, cap, part + at * 4)

        (lo, hi), (last_lo, last_hi) = seen(0), seen(positions - 1)
        if positions == 1:
            softmax(0, heads, lo, hi)
            return
        with f.either(lo.eq(last_lo) & hi.eq(last_hi)) as (same, differ):
            with same:
                softmax(0, heads * positions, lo, hi)
            with differ, f.loop(0, positions) as i:
                lo, hi = seen(i)
                with f.when(lo < hi):
                    softmax(i * heads, heads, lo, hi)

    def _weigh_block(
        self,
        f: Function,
        positions: int,
        seen: Seen,
        scores: Value,
        values: Value,
        part: Value,
        ahead: Value,
    ) -> None:
        """Weigh the keys that all rows see together, each position's others before and after."""
        heads = self.blocking.heads
        stride = self.stride(heads * positions)
        target = part + _VALUES

        def weigh(rows: int, at: Value | int, lo: Value, hi: Value) -> None:
            with f.when(lo < hi):
                p, to = scores + at * stride, target + at * self.shape.head_bytes
                f.call(self.fn("weigh", rows), p, stride, values, lo, hi, to, ahead)

        if positions == 1:
            weigh(heads, 0, *seen(0))
            return
        lo, hi = seen(positions - 1)[0], seen(0)[1]
        common = lo < hi
        far = f.value(1 << 62, i64)
        lo, hi = f.select(common, lo, far), f.select(common, hi, far)
        with f.loop(0, positions) as i:
            weigh(heads, i * heads, seen(i)[0], f.minimum(seen(i)[1], lo))
        weigh(heads * positions, f.value(0, i64), lo, hi)
        with f.loop(0, positions) as i:
            weigh(heads, i * heads, f.binary("smax", seen(i)[0], hi), seen(i)[1])

    def _write_fold(self, rows: int) -> None:
        """fold(into, part): add a chunk's partial result to the sum of those before it."""
        shape = self.shape
        t = vec(f32, shape.lanes)
        with self.m.function(f"fold{rows}", void, [ptr, ptr]) as f:
            into, part = f.args
            scales = f.stack(vec(f32), 2, align=64)
            old, new = (f.load(x, vec(f32), align=4) for x in (into, part))
            old_sum, new_sum = (f.load(x, vec(f32), _SUMS, align=4) for x in (into, part))
            top = _larger(f, new, old)
            keep, add = exp2(f, old - top), exp2(f, new - top)
            f.store(keep, scales, 0, align=4)
            f.store(add, scales, 4 * LANES, align=4)
            skip = new_sum.eq(0.0)
            f.store(f.select(skip, old, top), into, align=4)
            total = f.fma(new_sum, add, old_sum * keep)
            f.store(f.select(skip, old_sum, total), into, _SUMS, align=4)
            with f.loop(0, rows) as r:
                empty = f.load(part + r * 4, f32, _SUMS, align=4).eq(0.0)
                # a row that saw nothing of this chunk keeps every bit; NaN is not nothing
                end = f.select(empty, 0, f.value(shape.head_dim, i64))
                keep, add = (f.load(scales + r * 4, f32, x, align=4) for x in (0, 4 * LANES))
                at = r * shape.head_bytes + _VALUES
                with f.loop(0, end, shape.lanes) as i:
                    a, b = (f.load(x + at, t, i * 4, align=4) for x in (into, part))
                    f.store(f.fma(b, add, a * keep), into + at, i * 4, align=4)

    def _write_finish(self) -> None:
        """finish0(part, row, skip, to): rows of one position divided by their sums.

        `row` is the first of them in the partial result; `skip` heads belong to another block.
        """
        shape = self.shape
        t = vec(f32, shape.lanes)
        with self.m.function("finish0", void, [ptr, i64, i64, ptr]) as f:
            part, row, skip, to = f.args
            with f.loop(skip, self.blocking.heads) as head:
                r = row + head
                scale = 1.0 / f.load(part + r * 4, f32, _SUMS, align=4)
                source = part + (r * shape.head_bytes + _VALUES)
                target = to + head * shape.head_bytes
                with f.loop(0, shape.head_dim, shape.lanes) as i:
                    f.store(f.load(source, t, i * 4, align=4) * scale, target, i * 4, align=4)

    def clear(self, f: Function, part: Value, rows: int) -> None:
        """Make `part` the sum of no chunks."""
        f.store(f.value(-math.inf, vec(f32)), part, align=4)
        f.store(f.value(0.0, vec(f32)), part, _SUMS, align=4)
        with f.loop(0, rows * self.shape.head_dim, self.shape.lanes) as i:
            f.store(f.value(0.0, vec(f32, self.shape.lanes)), part, i * 4 + _VALUES, align=4)


def _larger(f: Function, x: Value, y: Value) -> Value:
    """The larger, or y where x is NaN: one instruction. A NaN shows in the weights anyway."""
    return f.select(x > y, x, y)


def _mask(f: Function, scores: Value, tile: Value, lo: Value, hi: Value) -> None:
    """Scores of a tile's keys outside lo..hi become minus infinity."""
    x = f.load(scores, vec(f32), tile * (4 * LANES), align=4)
    key = (tile * LANES).splat() + f.value(list(range(LANES)), vec(i64))
    x = f.select(key >= lo.splat(), x, -math.inf)
    x = f.select(key < hi.splat(), x, -math.inf)
    f.store(x, scores, tile * (4 * LANES), align=4)


def _cap(f: Function, rows: list[Value], first: Value, last: Value, cap: Value) -> None:
    """s = cap * log2(e) * tanh(x), the queries' factor having made of a score 2 * log2(e) * x."""
    with f.loop(first, last + 1) as tile:
        for row in rows:
            x = f.load(row, vec(f32), tile * (4 * LANES), align=4)
            # tanh is 1 to the last bit beyond this
            x = f.select(x > 60.0, 60.0, x)
            tanh = 1.0 - 2.0 / (exp2(f, x) + 1.0)
            f.store(tanh * (cap * math.log2(math.e)), row, tile * (4 * LANES), align=4)
