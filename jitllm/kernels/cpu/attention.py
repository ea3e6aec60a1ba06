"""Attention over the KV cache as one call: norms, rotation, append, softmax-weighted sum.

    append    every new row's queries (into `out`), keys and values (into the caches, in place)
    weigh     blocks of query rows against chunks of CHUNK keys, partial results folded in order

Chunks lie at multiples of CHUNK positions and each lane of a block adds in the order of its steps,
so a row's bits do not depend on what else the call holds, on T, or on which thread computes it.
One token against many chunks is shared out chunk by chunk (`weigh_split`), many tokens block by
block (`weigh_blocks`), and both fold the same partial results in the same order. Work is
proportional to the keys a row sees: not to the capacity, nor, with a window, to the context. There
is no S x T matrix.

A kernel serves one `Shape` on one tier; heads, window, scale and soft cap are read at run time.

Measured on two avx512 cores that read memory at 27-34 GB/s (`python -m benchmarks.attention`):

    SmolLM2-135M    100 tokens in the cache: 7 us a call, 5 of them the kernel's; 4,000 tokens: 90
                    us, 34 GB/s of keys and values, so there is nothing left to gain but bytes. All
                    blocks together read 92 MB a token at 4,000 tokens, as much as the weights are.
    512 tokens      158-175 GFLOP/s a core of about 200 that such products reach from registers:
                    78 % of the time is in the two products, 9 % in softmax, 6 % in appending.
"""

from __future__ import annotations

import math
import struct
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jitllm.kernels.cpu import ffi, threads
from jitllm.kernels.cpu.attention_batch import fill_shared, write_batch
from jitllm.kernels.cpu.attention_job import CHUNK, SHARE_BYTES, Blocking, Job, Shape
from jitllm.kernels.cpu.attention_rows import write_rows
from jitllm.kernels.cpu.attention_tiles import Tiles
from jitllm.kernels.cpu.compile import Tier, load, tier
from jitllm.kernels.cpu.ir import LANES, Function, Module, Value, f32, i32, i64, ptr, vec, void
from jitllm.kernels.spec import AttentionSpec

KV = tuple[jax.Array, jax.Array]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: KV,
    rope: jax.Array,
    span: jax.Array,
    spec: AttentionSpec,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
) -> tuple[jax.Array, KV]:
    """Causal attention of q[T, N*H] over the caches and the new k, v[T, K*H] -> (f32[T, N*H], kv).

    `kv` is (k_cache[K, S/16, H, 16], v_cache[K, S, H]), f16 or f32; donate it to the jit that calls
    this and it is updated in place. `rope` is f32[T, 2, R/2], cosines and sines; `span` is i32[2],
    the position of row 0 and the number of valid rows. Rows past the capacity S are not computed.
    """
    shape, t = Shape.of(spec, str(kv[0].dtype)), tier()
    blocking = Blocking.of(shape, t)
    n_chunks = -(-kv[1].shape[1] // CHUNK)
    parts = spec.n_kv_heads * blocking.n_parts * n_chunks * blocking.part_bytes(blocking.heads)
    none = jnp.zeros(0, jnp.float32)
    results = (
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kv),
        jax.ShapeDtypeStruct((parts,), jnp.uint8),
    )
    call = jax.ffi.ffi_call(_target(shape, t), results, input_output_aliases={3: 1, 4: 2})
    norms = (none if x is None else x for x in (q_norm, k_norm))
    out, k_cache, v_cache, _ = call(q, k, v, *kv, rope, *norms, span, params=_params(spec))
    return out, (k_cache, v_cache)


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    caches: jax.Array,
    block: jax.Array,
    rope: jax.Array,
    positions: jax.Array,
    span: jax.Array,
    spec: AttentionSpec,
    dtype: str,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
) -> jax.Array:
    """`attention` of one new token each of B conversations -> f32[B, N*H].

    Their caches, of `dtype`, are in memory at `caches` i32[blocks, B, 6]: of each block and row the
    addresses of keys and values and the capacity, as 64-bit words. Row `block` i32[] of them is
    read, and the new keys and values are written there, at `positions` i32[B]. Who calls keeps the
    caches alive and untouched until the result is there.
    """
    shape, t = Shape.of(spec, dtype), tier()
    none = jnp.zeros(0, jnp.float32)
    results = (
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        jax.ShapeDtypeStruct((q.shape[0] * Job.BYTES,), jnp.uint8),
    )
    call = jax.ffi.ffi_call(f"{_target(shape, t)}-batch", results)
    norms = (none if x is None else x for x in (q_norm, k_norm))
    args = (q, k, v, caches, block, rope, *norms, positions, span)
    return call(*args, params=_params(spec))[0]


def _params(spec: AttentionSpec) -> np.ndarray:
    """What a kernel reads at run time, as the int64s of one attribute; floats by their bits."""
    factor = 2 / spec.softcap if spec.softcap else 1.0
    floats = (spec.scale * factor * math.log2(math.e), spec.softcap, spec.norm_eps)
    bits = (struct.unpack("<i", struct.pack("<f", x))[0] for x in floats)
    return np.array([spec.window or 1 << 40, *bits], np.int64)


@cache
def _target(shape: Shape, t: Tier) -> str:
    """The FFI target of a shape's kernel, compiled and registered on first use."""
    name = f"jitllm-{shape.name}-{t.name}"

    def build(t: Tier) -> Module:
        return _build(shape, t)

    handlers = load(shape.name, build, t, ("handler", "batch"), threads.imports())
    ffi.register(name, handlers["handler"])
    ffi.register(f"{name}-batch", handlers["batch"])
    return name


def _build(shape: Shape, t: Tier) -> Module:
    m = Module(shape.name)
    write_rows(m, shape, t)
    tiles = Tiles(m, shape, t)
    for positions in {1, tiles.blocking.positions}:
        _write_block(tiles, positions)
    _write_blocks(tiles)
    _write_split(tiles)
    _write_gather(tiles)
    _write_handler(tiles)
    write_batch(tiles)
    return m


def _write_handler(tiles: Tiles) -> None:
    m, blocking = tiles.m, tiles.blocking
    with ffi.handler(m, "handler") as frame:
        f = frame.fn
        job = Job(f)
        _fill(frame, job)
        pos, n_tokens = job.pos, job.n_tokens
        n_tiles = (pos + n_tokens + LANES - 1) // LANES - pos // LANES
        with f.when(n_tokens > 0):
            _share(f, frame, "append", job, n_tiles, f.value(1, i64))
            groups = job.n_kv_heads * blocking.n_parts
            first = f.binary("smax", pos + 1 - job.window, 0) // CHUNK
            n_chunks = pos // CHUNK + 1 - first
            seen = f.minimum(pos + 1, job.window) * job.n_kv_heads
            small = seen < SHARE_BYTES // (2 * tiles.shape.head_dim * tiles.shape.value_bytes)
            alone = f.select(small, 0, n_tokens).eq(1)
            job.put(first_chunk=first, n_chunks=n_chunks)
            with f.either(alone) as (split, blocks):
                with split:
                    _share(f, frame, "weigh_split", job, groups * n_chunks, f.value(1, i64))
                    _share(f, frame, "gather", job, groups, 1 + (groups * 16) // n_chunks)
                with blocks:
                    singles = n_tokens % blocking.positions
                    n_blocks = n_tokens // blocking.positions
                    job.put(n_blocks=n_blocks, n_singles=singles)
                    n = groups * (n_blocks + singles)
                    _share(f, frame, "weigh_blocks", job, n, f.select(n_tokens.eq(1), n, 1))


def _share(f: Function, frame: ffi.Frame, body: str, job: Job, n: Value, grain: Value) -> None:
    function = Value(f, f.module.ir.globals[body])
    threads.call_parallel(f, frame.address, function, job.address, n, grain)


def _fill(frame: ffi.Frame, job: Job) -> None:
    f = frame.fn
    q, k, v, k_cache, v_cache, rope, q_norm, k_norm, span = (frame.arg(i) for i in range(9))
    job.put(q=q.data, k=k.data, v=v.data, rope=rope.data, out=frame.ret(0).data)
    job.put(k_cache=frame.ret(1).data, v_cache=frame.ret(2).data, scratch=frame.ret(3).data)
    job.put(next_keys=frame.ret(1).data)
    heads, capacity = v_cache.dim(0), v_cache.dim(1)
    pos, rows = (f.load(span.data, i32, 4 * i, align=4).sext(i64) for i in (0, 1))
    rows = f.minimum(f.minimum(rows, q.dim(0)), capacity - pos)
    n_heads = q.dim(1) // k_cache.dim(2)
    job.put(pos=pos, n_tokens=rows, capacity=capacity, n_kv_heads=heads, n_heads=n_heads)
    fill_shared(frame, job, q_norm, k_norm)


def _group(f: Function, tiles: Tiles, job: Job, group: Value) -> tuple[Value, Value, Value, Value]:
    """Of one group of query heads: its first head, heads of another's, and the caches it reads."""
    blocking, shape = tiles.blocking, tiles.shape
    kv_head, part = group // blocking.n_parts, group % blocking.n_parts
    wanted = part * blocking.heads
    start = f.minimum(wanted, shape.group - blocking.heads)
    slots = kv_head * job.capacity * (shape.head_dim * shape.value_bytes)
    first = kv_head * shape.group + start
    return first, wanted - start, job.k_cache + slots, job.v_cache + slots


def _rows_of(job: Job, shape: Shape, row: Value, head: Value) -> Value:
    """The address in `out` of one head of one row: its query first, its result at the end."""
    return job.out + (row * job.n_heads + head) * shape.head_bytes


def _write_block(tiles: Tiles, positions: int) -> None:
    """block(job, group, row): the results of `positions` rows from `row` on, chunk by chunk."""
    blocking, shape = tiles.blocking, tiles.shape
    rows = blocking.heads * positions
    with tiles.m.function(f"block{positions}", void, [ptr, i64, i64]) as f:
        job, row = Job(f, f.args[0]), f.args[2]
        head, skip, keys, values = _group(f, tiles, job, f.args[1])
        words = blocking.part_bytes(rows) // 64
        total, part = (f.stack(vec(f32), words, align=64) for _ in range(2))
        scores = f.stack(vec(f32), tiles.stride(rows) * rows // 64, align=64)
        q = _rows_of(job, shape, row, head)
        if positions > 1:
            q = _pack(f, tiles, job, q, positions)
        tiles.clear(f, total, rows)
        position = job.pos + row
        first = f.binary("smax", position + 1 - job.window, 0) // CHUNK
        with f.loop(first, (position + positions - 1) // CHUNK + 1) as chunk:
            f.call(
                tiles.fn("chunk", positions),
                job.address, q, row, chunk, keys, values, part, scores,
            )  # fmt: skip
            f.call(tiles.fn("fold", rows), total, part)
        with f.loop(0, positions) as i:
            to = _rows_of(job, shape, row + i, head)
            f.call(tiles.fn("finish", 0), total, i * blocking.heads, skip, to)


def _pack(f: Function, tiles: Tiles, job: Job, q: Value, positions: int) -> Value:
    """A copy of a block's queries without the other heads between its positions."""
    shape, heads = tiles.shape, tiles.blocking.heads
    t, n = vec(f32, shape.lanes), heads * shape.head_dim
    packed = f.stack(t, positions * n // shape.lanes, align=64)
    for i in range(positions):
        source = q + job.n_heads * (i * shape.head_bytes)
        with f.loop(0, n, shape.lanes) as at:
            x = f.load(source, t, at * 4, align=4)
            f.store(x, packed, at * 4 + i * n * 4, align=4)
    return packed


def _write_blocks(tiles: Tiles) -> None:
    """weigh_blocks(job, begin, end): blocks counted from the last, which sees the most keys."""
    positions = tiles.blocking.positions
    with tiles.m.function("weigh_blocks", void, [ptr, i64, i64]) as f:
        address, begin, end = f.args
        job = Job(f, address)
        n_blocks, n_singles = job.n_blocks, job.n_singles
        with f.loop(begin, end) as item:
            n = n_blocks + n_singles
            group, index = item // n, n - 1 - item % n
            with f.either(index < n_blocks) as (full, single):
                with full:
                    f.call(tiles.fn("block", positions), address, group, index * positions)
                with single:
                    row = n_blocks * (positions - 1) + index
                    f.call(tiles.fn("block", 1), address, group, row)


def _write_split(tiles: Tiles) -> None:
    """weigh_split(job, begin, end): partial results of row 0, one group and chunk per item."""
    blocking = tiles.blocking
    with tiles.m.function("weigh_split", void, [ptr, i64, i64]) as f:
        job = Job(f, f.args[0])
        scores = f.stack(vec(f32), tiles.stride(blocking.heads) * blocking.heads // 64, align=64)
        zero = f.value(0, i64)
        with f.loop(f.args[1], f.args[2]) as item:
            n_chunks = job.n_chunks
            head, _, keys, values = _group(f, tiles, job, item // n_chunks)
            chunk = job.first_chunk + item % n_chunks
            part = job.scratch + item * blocking.part_bytes(blocking.heads)
            q = _rows_of(job, tiles.shape, zero, head)
            f.call(tiles.fn("chunk", 1), job.address, q, zero, chunk, keys, values, part, scores)


def _write_gather(tiles: Tiles) -> None:
    """gather(job, begin, end): fold the chunks of row 0, one group per item."""
    blocking = tiles.blocking
    size = blocking.part_bytes(blocking.heads)
    with tiles.m.function("gather", void, [ptr, i64, i64]) as f:
        job = Job(f, f.args[0])
        total = f.stack(vec(f32), size // 64, align=64)
        zero = f.value(0, i64)
        with f.loop(f.args[1], f.args[2]) as group:
            head, skip, _, _ = _group(f, tiles, job, group)
            tiles.clear(f, total, blocking.heads)
            n_chunks = job.n_chunks
            with f.loop(0, n_chunks) as i:
                part = job.scratch + (group * n_chunks + i) * size
                f.call(tiles.fn("fold", blocking.heads), total, part)
            to = _rows_of(job, tiles.shape, zero, head)
            f.call(tiles.fn("finish", 0), total, zero, skip, to)
