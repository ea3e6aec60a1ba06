"""The first half of attention: head norms, rotation, and what is new in the caches."""

from __future__ import annotations

from math import gcd

from jitllm.kernels.cpu.attention_job import Job, Shape
from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.ir import LANES, Function, Module, Value, f32, i64, ptr, vec, void
from jitllm.kernels.cpu.vmath import f32_to_half


def write_rows(m: Module, shape: Shape, t: Tier) -> None:
    """append(job, begin, end): the rows in tiles begin..end of 16 positions, tile 0 holding row 0.

    Queries go to `out`, normed, rotated and scaled; keys and values into the caches. A tile is one
    thread's: the positions of a tile share the cache lines of the transposed keys.
    """
    _write_prepare(m, shape)
    with m.function("append", void, [ptr, i64, i64]) as f:
        job = Job(f, f.args[0])
        first = job.pos // LANES
        begin = f.binary("smax", (first + f.args[1]) * LANES - job.pos, 0)
        end = f.minimum((first + f.args[2]) * LANES - job.pos, job.n_tokens)
        with f.loop(begin, end) as row:
            _prepare_queries(f, job, shape, row)
            with f.loop(0, job.n_kv_heads) as head:
                _append_key(f, job, shape, t, row, head)
                _append_value(f, job, shape, t, row, head)


def _prepare_queries(f: Function, job: Job, shape: Shape, row: Value) -> None:
    offset = row * job.n_heads * shape.head_bytes
    rope = job.rope + row * (4 * shape.rope_dim)
    with f.loop(0, job.n_heads) as head:
        at = offset + head * shape.head_bytes
        f.call(
            f.module.ir.globals["prepare"],
            job.q + at, job.q_norm, rope, job.q_scale, job.eps, job.out + at,
        )  # fmt: skip


def _append_key(f: Function, job: Job, shape: Shape, t: Tier, row: Value, head: Value) -> None:
    """Rotate a key and write it down its column of the tile [H][16]."""
    key = f.stack(vec(f32, LANES), -(-shape.head_dim // LANES), align=64)
    at = (row * job.n_kv_heads + head) * shape.head_bytes
    rope = job.rope + row * (4 * shape.rope_dim)
    one = f.value(1.0, f32)
    f.call(f.module.ir.globals["prepare"], job.k + at, job.k_norm, rope, one, job.eps, key)
    position = job.pos + row
    tile = (head * job.capacity + (position // LANES) * LANES) * shape.head_dim
    column = job.k_cache + (tile + position % LANES) * shape.value_bytes
    for i in range(0, shape.head_dim, shape.lanes):
        x = f.load(key, vec(f32, shape.lanes), 4 * i, align=4)
        bits = x if shape.stored == "f32" else f32_to_half(x, t)
        for lane in range(shape.lanes):
            offset = (i + lane) * LANES * shape.value_bytes
            f.store(bits.lane(lane), column, offset, align=shape.value_bytes)


def _append_value(f: Function, job: Job, shape: Shape, t: Tier, row: Value, head: Value) -> None:
    source = job.v + (row * job.n_kv_heads + head) * shape.head_bytes
    slot = (head * job.capacity + job.pos + row) * shape.head_dim
    target = job.v_cache + slot * shape.value_bytes
    with f.loop(0, shape.head_dim, shape.lanes) as i:
        x = f.load(source, vec(f32, shape.lanes), i * 4, align=4)
        bits = x if shape.stored == "f32" else f32_to_half(x, t)
        f.store(bits, target, i * shape.value_bytes, align=shape.value_bytes)


def _write_prepare(m: Module, shape: Shape) -> None:
    """prepare(x, norm, rope, scale, eps, y): one head, f32[H] -> f32[H]; norm may be null."""
    with m.function("prepare", void, [ptr, ptr, ptr, f32, f32, ptr]) as f:
        x, norm, rope, scale, eps, y = f.args
        source = f.var(x)
        with f.when(norm.ne(None)):
            _norm(f, shape, x, norm, eps, y)
            source.set(y)
        source = source.get()
        rotate = {"norm": _rotate_pairs, "neox": _rotate_halves}[shape.rope_style]
        rotated = rotate(f, shape, source, rope, scale)
        passed = _plain(f, shape, source, scale)
        # every load comes before the first store: source and y may be the same memory
        for offset, value in [*rotated, *passed]:
            f.store(value, y, offset, align=4)


def _norm(f: Function, shape: Shape, x: Value, norm: Value, eps: Value, y: Value) -> None:
    """y = x / sqrt(mean(x**2) + eps) * norm."""
    t = vec(f32, shape.lanes)
    offsets = range(0, shape.head_bytes, 4 * shape.lanes)
    xs = [f.load(x, t, offset, align=4) for offset in offsets]
    total = f.value(0.0, t)
    for value in xs:
        total = f.fma(value, value, total)
    mean = f.reduce(total, lambda a, b: a + b) * (1.0 / shape.head_dim)
    factor = 1.0 / f.unary("sqrt", mean + eps)
    for value, offset in zip(xs, offsets, strict=True):
        f.store(value * factor * f.load(norm, t, offset, align=4), y, offset, align=4)


Rows = list[tuple[int, Value]]


def _rotate_halves(f: Function, shape: Shape, x: Value, rope: Value, scale: Value) -> Rows:
    """Pairs (i, i + R/2)."""
    half = shape.rope_dim // 2
    lanes = gcd(half, LANES)
    t, out = vec(f32, lanes), []
    for i in range(0, half, lanes):
        a, b = (f.load(x, t, 4 * j, align=4) for j in (i, i + half))
        cos, sin = (f.load(rope, t, 4 * j, align=4) * scale for j in (i, i + half))
        out += [(4 * i, a * cos - b * sin), (4 * (i + half), b * cos + a * sin)]
    return out


def _rotate_pairs(f: Function, shape: Shape, x: Value, rope: Value, scale: Value) -> Rows:
    """Pairs (2i, 2i + 1)."""
    half = shape.rope_dim // 2
    pairs = gcd(half, LANES // 2)
    t, out = vec(f32, pairs), []
    twice = [lane // 2 for lane in range(2 * pairs)]
    swap = [lane ^ 1 for lane in range(2 * pairs)]
    signs = [-1.0, 1.0] * pairs
    for i in range(0, half, pairs):
        value = f.load(x, vec(f32, 2 * pairs), 8 * i, align=4)
        cos = (f.load(rope, t, 4 * i, align=4) * scale).shuffle(twice)
        sin = (f.load(rope, t, 4 * (i + half), align=4) * scale).shuffle(twice)
        out.append((8 * i, value * cos + value.shuffle(swap) * (sin * signs)))
    return out


def _plain(f: Function, shape: Shape, x: Value, scale: Value) -> Rows:
    """The values past R, which are not rotated."""
    lanes = gcd(shape.head_dim - shape.rope_dim, LANES)
    return [
        (4 * i, f.load(x, vec(f32, lanes), 4 * i, align=4) * scale)
        for i in range(shape.rope_dim, shape.head_dim, lanes)
    ]
