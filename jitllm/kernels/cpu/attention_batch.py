"""One new token each of several conversations, as one call: a record for each, shared work.

The caches come by address, three i64 for each block and row: keys, values, capacity. A row is what
`attention` makes of it, bit for bit: the same functions, on a record of its own.
"""

from __future__ import annotations

from jitllm.kernels.cpu import ffi, threads
from jitllm.kernels.cpu.attention_job import SHARE_BYTES, Job
from jitllm.kernels.cpu.attention_tiles import Tiles
from jitllm.kernels.cpu.ir import Value, f32, i32, i64, ptr, void


def write_batch(tiles: Tiles) -> None:
    """Write the handler `batch`.

    Arguments: q, k, v, caches, block, rope, q_norm, k_norm, positions, span; results: out, records.
    """
    _write_append(tiles)
    _write_weigh(tiles)
    with ffi.handler(tiles.m, "batch") as frame:
        f = frame.fn
        q, _, _, _, _, _, _, _, _, span = (frame.arg(i) for i in range(10))
        records = frame.ret(1).data
        n = f.minimum(f.load(span.data, i32, 4, align=4).sext(i64), q.dim(0))
        seen = f.var(f.value(0, i64))
        with f.loop(0, n) as row:
            job = Job(f, records + row * Job.BYTES)
            _fill(frame, tiles, job, row)
            seen.set(seen.get() + f.minimum(job.pos + 1, job.window) * job.n_kv_heads)
        with f.when(n > 0):
            groups = Job(f, records).n_kv_heads * tiles.blocking.n_parts
            row_bytes = 2 * tiles.shape.head_dim * tiles.shape.value_bytes
            alone = seen.get() < SHARE_BYTES // row_bytes
            for body, items in (("append_each", n), ("weigh_each", n * groups)):
                function = Value(f, tiles.m.ir.globals[body])
                grain = f.select(alone, items, f.value(1, i64))
                threads.call_parallel(f, frame.address, function, records, items, grain)


def _fill(frame: ffi.Frame, tiles: Tiles, job: Job, row: Value) -> None:
    """The record of one row: a call of one token whose arrays begin there."""
    f, shape = frame.fn, tiles.shape
    q, k, v, caches, block, rope, q_norm, k_norm, positions, _ = (frame.arg(i) for i in range(10))
    heads, kv_heads = q.dim(1) // shape.head_dim, k.dim(1) // shape.head_dim
    entry = f.load(block.data, i32, 0, align=4).sext(i64) * q.dim(0) + row
    entry = caches.data + entry * 24
    capacity = f.load(entry, i64, 16, 8)
    at, kv_at = row * heads * shape.head_bytes, row * kv_heads * shape.head_bytes
    job.put(q=q.data + at, out=frame.ret(0).data + at, k=k.data + kv_at, v=v.data + kv_at)
    job.put(rope=rope.data + row * (4 * shape.rope_dim), capacity=capacity)
    k_cache = f.load(entry, ptr, 0, 8)
    after = f.select(row + 1 < q.dim(0), entry + 24, entry)
    job.put(k_cache=k_cache, v_cache=f.load(entry, ptr, 8, 8), next_keys=f.load(after, ptr, 0, 8))
    position = f.load(positions.data, i32, row * 4, align=4).sext(i64)
    n_tokens = f.select(position < capacity, f.value(1, i64), 0)
    job.put(pos=position, n_tokens=n_tokens, n_kv_heads=kv_heads, n_heads=heads)
    fill_shared(frame, job, q_norm, k_norm)


def fill_shared(frame: ffi.Frame, job: Job, q_norm: ffi.Buffer, k_norm: ffi.Buffer) -> None:
    """What is the same for all rows of a call: norms, and what is read at run time."""
    f = frame.fn
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        job.put(**{name: f.select(norm.dim(0) > 0, norm.data, f.value(None, ptr))})
    floats = (frame.param(i).trunc(i32).bitcast(f32) for i in (1, 2, 3))
    job.put(window=frame.param(0), **dict(zip(("q_scale", "softcap", "eps"), floats, strict=True)))


def _write_append(tiles: Tiles) -> None:
    """append_each(records, begin, end): what is new in the caches, one row per item."""
    with tiles.m.function("append_each", void, [ptr, i64, i64]) as f:
        records, begin, end = f.args
        with f.loop(begin, end) as row:
            zero, one = f.value(0, i64), f.value(1, i64)
            f.call(tiles.m.ir.globals["append"], records + row * Job.BYTES, zero, one)


def _write_weigh(tiles: Tiles) -> None:
    """weigh_each(records, begin, end): one row and group of query heads per item."""
    with tiles.m.function("weigh_each", void, [ptr, i64, i64]) as f:
        records, begin, end = f.args
        groups = Job(f, records).n_kv_heads * tiles.blocking.n_parts
        with f.loop(begin, end) as item:
            record = records + item // groups * Job.BYTES
            with f.when(Job(f, record).n_tokens > 0):
                f.call(tiles.fn("block", 1), record, item % groups, f.value(0, i64))
