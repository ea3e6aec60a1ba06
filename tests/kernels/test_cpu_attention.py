"""The attention kernel against plain float64 numpy, and the ways in which its bits must not move.

The oracle shares no code with the kernel. It has two halves, so that tolerances stay tight with f16
caches: what a call appends to them (one rounding of the cache's type), and what a row gets from the
caches as they then are (2e-5: float32 products whose 256 terms sum to scores of up to 20).
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitllm.kernels.cpu import threads
from jitllm.kernels.cpu.attention import attention, decode_attention
from jitllm.kernels.spec import AttentionSpec

SMOLLM = AttentionSpec(n_heads=9, n_kv_heads=3, head_dim=64, rope_dim=64, scale=0.125)
GEMMA = AttentionSpec(
    n_heads=4, n_kv_heads=1, head_dim=256, rope_dim=256, rope_style="neox", scale=1 / 16, window=70
)
SPECS = {
    "smollm2": SMOLLM,
    "gemma3": GEMMA,
    "gemma2": AttentionSpec(4, 2, 128, 128, "neox", 0.09, window=33, softcap=50.0),
    "phi": AttentionSpec(4, 4, 80, 32, "neox", 0.11),
    "tiny": AttentionSpec(2, 2, 8, 8, "norm", 0.35),
    "qwen2": AttentionSpec(14, 2, 64, 64, "neox", 0.125),
    "many": AttentionSpec(26, 2, 16, 16, "norm", 0.25),
    "odd": AttentionSpec(3, 1, 20, 6, "norm", 0.3, window=5),
}


@dataclass
class Sequence:
    """Everything a run of attention calls over positions 0 .. T-1 is given."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    rope: np.ndarray
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None


def make_sequence(
    spec: AttentionSpec, n_tokens: int, seed: int = 0, norms: bool = True
) -> Sequence:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    angle = np.arange(n_tokens)[:, None] / 100.0 ** np.linspace(0, 1, spec.rope_dim // 2)
    return Sequence(
        2 * draw(n_tokens, spec.n_heads * spec.head_dim),
        2 * draw(n_tokens, spec.n_kv_heads * spec.head_dim),
        draw(n_tokens, spec.n_kv_heads * spec.head_dim),
        np.stack([np.cos(angle), np.sin(angle)], 1).astype(np.float32),
        1 + 0.1 * draw(spec.head_dim) if norms else None,
        1 + 0.1 * draw(spec.head_dim) if norms else None,
    )


def empty_cache(spec: AttentionSpec, capacity: int, dtype: str, fill: float = np.nan) -> tuple:
    """Caches whose every slot holds `fill`: memory nobody has written yet."""
    heads, size = spec.n_kv_heads, spec.head_dim
    return (
        jnp.full((heads, capacity // 16, size, 16), fill, dtype),
        jnp.full((heads, capacity, size), fill, dtype),
    )


STEP = jax.jit(attention, static_argnames="spec", donate_argnums=3)


def run(
    sequence: Sequence,
    spec: AttentionSpec,
    chunks: list[int],
    *,
    cache: tuple,
    width: int | None = None,
) -> tuple[np.ndarray, tuple]:
    """Feeds the sequence in pieces of `chunks` tokens; `width` rows per call when it is given."""
    outputs, pos = [], 0
    for n_tokens in chunks:
        rows = width or n_tokens
        piece = [pad(x[pos : pos + n_tokens], rows) for x in (sequence.q, sequence.k, sequence.v)]
        rope = pad(sequence.rope[pos : pos + n_tokens], rows)
        span = np.array([pos, n_tokens], np.int32)
        out, cache = STEP(
            *piece, cache, rope, span, spec=spec, q_norm=sequence.q_norm, k_norm=sequence.k_norm
        )
        outputs.append(np.asarray(out)[:n_tokens])
        pos += n_tokens
    return np.concatenate(outputs), cache


def pad(x: np.ndarray, rows: int) -> np.ndarray:
    """Rows after the last valid one hold NaN: they may be read by nobody."""
    return np.concatenate([x, np.full((rows - len(x), *x.shape[1:]), np.nan, x.dtype)])


def prepare(x: np.ndarray, weight: np.ndarray | None, rope: np.ndarray, spec: AttentionSpec):
    """Head norm, then rotation, in float64: [T, heads * H] -> [T, heads, H]."""
    x = x.reshape(len(x), -1, spec.head_dim).astype(np.float64)
    if weight is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.norm_eps) * weight
    half = spec.rope_dim // 2
    pairs = np.arange(spec.rope_dim).reshape(half, 2)
    if spec.rope_style == "neox":
        pairs = np.stack([np.arange(half), np.arange(half) + half], 1)
    cos, sin = rope[:, None, 0].astype(np.float64), rope[:, None, 1].astype(np.float64)
    a, b = x[..., pairs[:, 0]], x[..., pairs[:, 1]]
    y = x.copy()
    y[..., pairs[:, 0]], y[..., pairs[:, 1]] = a * cos - b * sin, b * cos + a * sin
    return y


def weigh(q: np.ndarray, k: np.ndarray, v: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    """Plain attention of rows 0 .. T-1 over float64 q[T,N,H], k and v[T,K,H] -> [T, N*H]."""
    group = spec.n_heads // spec.n_kv_heads
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = spec.scale * np.einsum("tnh,snh->nts", q, k)
    if spec.softcap:
        s = spec.softcap * np.tanh(s / spec.softcap)
    i = np.arange(len(q))
    seen = (i[None] <= i[:, None]) & (not spec.window or i[None] > i[:, None] - spec.window)
    s = np.where(seen, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    out = np.einsum("nts,snh->tnh", p / p.sum(-1, keepdims=True), v)
    return out.reshape(len(q), -1)


def cached(cache: tuple, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values in the caches as float64[T, K, H]."""
    k, v = (np.asarray(x, np.float64) for x in cache)
    k = k.transpose(1, 3, 0, 2).reshape(-1, k.shape[0], k.shape[2])
    return k[:n_tokens], v.transpose(1, 0, 2)[:n_tokens]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", SPECS)
def test_a_prompt_and_its_continuation_match_float64(name: str, dtype: str) -> None:
    spec = SPECS[name]
    sequence = make_sequence(spec, 163)
    out, cache = run(sequence, spec, [150, *[1] * 13], cache=empty_cache(spec, 176, dtype))
    check(out, cache, sequence, spec, dtype)


def check(
    out: np.ndarray, cache: tuple, sequence: Sequence, spec: AttentionSpec, dtype: str
) -> None:
    k, v = cached(cache, len(out))
    q = prepare(sequence.q, sequence.q_norm, sequence.rope, spec)
    want_k = prepare(sequence.k, sequence.k_norm, sequence.rope, spec)
    step = np.finfo(dtype).eps
    np.testing.assert_allclose(k, want_k, rtol=2 * step, atol=4e-6)
    np.testing.assert_array_equal(v.reshape(len(v), -1), sequence.v.astype(dtype))
    np.testing.assert_allclose(out, weigh(q, k, v, spec), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "gemma2", "many"])
def test_long_contexts_match_float64(name: str) -> None:
    spec = replace(SPECS[name], window=300 if SPECS[name].window else 0)
    sequence = make_sequence(spec, 1100, norms=False)
    out, cache = run(sequence, spec, [512, 512, 75, 1], cache=empty_cache(spec, 1104, "float16"))
    check(out, cache, sequence, spec, "float16")


@st.composite
def splits(draw: st.DrawFn, n_tokens: int) -> list[int]:
    """A way of cutting n_tokens into calls, single tokens and larger pieces mixed."""
    chunks: list[int] = []
    while (left := n_tokens - sum(chunks)) > 0:
        chunks.append(draw(st.integers(1, min(left, 64)) | st.integers(1, min(left, 5))))
    return chunks


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_bits_of_a_row_do_not_depend_on_how_the_prompt_was_cut(data: st.DataObject) -> None:
    spec = SPECS[data.draw(st.sampled_from(["smollm2", "gemma3", "qwen2", "odd"]))]
    window = data.draw(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 100, 128, 129]))
    spec = replace(spec, window=window, softcap=data.draw(st.sampled_from([0.0, 30.0])))
    n_tokens = data.draw(st.integers(1, 300))
    sequence = make_sequence(spec, n_tokens, seed=data.draw(st.integers(0, 99)))
    whole, cache = run(
        sequence, spec, [n_tokens], cache=empty_cache(spec, 304, "float16"), width=304
    )
    chunks = data.draw(splits(n_tokens))
    cut, cut_cache = run(sequence, spec, chunks, cache=empty_cache(spec, 512, "float16"), width=64)
    np.testing.assert_array_equal(cut.view(np.int32), whole.view(np.int32))
    for ours, theirs in zip(cached(cut_cache, n_tokens), cached(cache, n_tokens), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_token_decoded_alone_has_the_bits_it_has_in_a_prompt() -> None:
    for spec in (SMOLLM, GEMMA):
        sequence = make_sequence(spec, 210)
        whole, _ = run(sequence, spec, [210], cache=empty_cache(spec, 224, "float16"))
        alone, _ = run(sequence, spec, [1] * 210, cache=empty_cache(spec, 224, "float16"))
        np.testing.assert_array_equal(alone.view(np.int32), whole.view(np.int32))


def test_a_row_that_holds_nan_spoils_only_the_rows_that_see_it() -> None:
    sequence = make_sequence(SMOLLM, 40)
    clean, _ = run(sequence, SMOLLM, [40], cache=empty_cache(SMOLLM, 48, "float16"))
    for x in (sequence.k, sequence.v):
        x[30] = np.nan
    dirty, _ = run(sequence, SMOLLM, [40], cache=empty_cache(SMOLLM, 48, "float16"))
    np.testing.assert_array_equal(dirty[:30].view(np.int32), clean[:30].view(np.int32))
    assert np.isnan(dirty[30:]).all()


def test_the_caches_are_updated_in_place() -> None:
    sequence = make_sequence(SMOLLM, 8)
    cache = empty_cache(SMOLLM, 4096, "float16", fill=0.0)
    before = [x.unsafe_buffer_pointer() for x in cache]
    _, after = run(sequence, SMOLLM, [3, 1, 4], cache=cache)
    assert [x.unsafe_buffer_pointer() for x in after] == before


def test_a_compiled_step_copies_no_cache() -> None:
    x, cache = make_sequence(SMOLLM, 1), empty_cache(SMOLLM, 4096, "float16")
    span = np.array([0, 1], np.int32)
    step = STEP.lower(x.q, x.k, x.v, cache, x.rope, span, spec=SMOLLM).compile()
    assert "copy" not in step.as_text()


def test_caches_that_are_not_donated_keep_their_values() -> None:
    x, cache = make_sequence(SMOLLM, 1), empty_cache(SMOLLM, 64, "float32", fill=7.0)
    span = np.array([5, 1], np.int32)
    step = jax.jit(attention, static_argnames="spec")
    _, new = step(x.q, x.k, x.v, cache, x.rope, span, spec=SMOLLM)
    assert all((np.asarray(kept) == 7.0).all() for kept in cache)
    assert (cached(new, 6)[1][5].reshape(-1) == x.v[0]).all()


@pytest.mark.parametrize("chunks", [[300], [150] + [1] * 10])
def test_the_number_of_threads_does_not_change_the_bits(chunks: list[int]) -> None:
    spec, sequence = replace(SPECS["gemma2"], window=0), make_sequence(SPECS["gemma2"], 300)
    results = []
    for n_threads in (1, 2, 5):
        threads.set_threads(n_threads)
        out, _ = run(sequence, spec, chunks, cache=empty_cache(spec, 304, "float16"))
        results.append(out.view(np.int32))
    threads.set_threads()
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


def test_conversations_in_parallel_threads_do_not_meet() -> None:
    sequences = [make_sequence(SMOLLM, 200, seed) for seed in range(4)]

    def converse(sequence: Sequence) -> np.ndarray:
        cache = empty_cache(SMOLLM, 208, "float16")
        return run(sequence, SMOLLM, [180, *[1] * 20], cache=cache)[0]

    one_by_one = [converse(sequence) for sequence in sequences]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(converse, sequences))
    np.testing.assert_array_equal(together, one_by_one)


def addresses(cache: tuple) -> list[int]:
    return [*(x.unsafe_buffer_pointer() for x in cache), cache[1].shape[1]]


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", SPECS)
def test_tokens_of_several_conversations_have_the_bits_of_each_alone(name, dtype, n_threads):
    spec, lengths = SPECS[name], [1, 150, 16, 129, 40]
    norms = make_sequence(spec, 1)
    sequences, caches, expected = [], [], []
    for seed, n in enumerate(lengths):
        x = make_sequence(spec, n, seed)
        x.q_norm, x.k_norm = norms.q_norm, norms.k_norm
        capacity = 160 + 16 * seed
        out, whole = run(x, spec, [n], cache=empty_cache(spec, capacity, dtype))
        begun = empty_cache(spec, capacity, dtype)
        if n > 1:
            _, begun = run(x, spec, [n - 1], cache=begun)
        sequences.append(x)
        caches.append(jax.block_until_ready(begun))
        expected.append((out[-1], cached(whole, n)))
    table = np.zeros((2, 8, 3), np.int64)  # the caches are those of the second block
    table[1, : len(caches)] = [addresses(cache) for cache in caches]
    last = [
        pad(np.stack([getattr(x, a)[-1] for x in sequences]), 8) for a in ("q", "k", "v", "rope")
    ]
    positions = np.array([n - 1 for n in lengths] + [0] * 3, np.int32)
    threads.set_threads(n_threads)
    out = jax.jit(decode_attention, static_argnames=("spec", "dtype"))(
        *last[:3],
        table.view(np.int32),
        np.int32(1),
        last[3],
        positions,
        np.array([0, len(lengths)], np.int32),
        spec=spec,
        dtype=dtype,
        q_norm=norms.q_norm,
        k_norm=norms.k_norm,
    )
    rows = np.asarray(out)
    threads.set_threads()
    for row, cache, n, (alone, kept) in zip(rows, caches, lengths, expected, strict=False):
        np.testing.assert_array_equal(row, alone)
        for new, old in zip(cached(cache, n), kept, strict=True):
            np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize(
    ("spec", "pos", "capacity"),
    [(SPECS["tiny"], 100, 1 << 17), (replace(SPECS["tiny"], window=100), 100_000, 1 << 17)],
    ids=["capacity", "window"],
)
def test_a_call_costs_what_it_sees(spec: AttentionSpec, pos: int, capacity: int) -> None:
    """Not what the caches could hold, nor what lies before the window: a thousand times as much."""
    seconds = {}
    for at, size in ((100, 128), (pos, capacity)):
        cache, times = empty_cache(spec, size, "float16", fill=0.0), []
        x, span = make_sequence(spec, 1), np.array([at, 1], np.int32)
        for _ in range(40):
            start = time.perf_counter()
            out, cache = STEP(x.q, x.k, x.v, cache, x.rope, span, spec=spec)
            out.block_until_ready()
            times.append(time.perf_counter() - start)
        seconds[size] = min(times)
    assert seconds[capacity] < 5 * seconds[128]


def test_slots_outside_the_span_are_left_alone() -> None:
    sequence = make_sequence(SMOLLM, 20)
    cache = empty_cache(SMOLLM, 64, "float32", fill=7.0)
    _, cache = run(sequence, SMOLLM, [20], cache=cache, width=32)
    k, v = cached(cache, 64)
    assert (k[20:] == 7.0).all() and (v[20:] == 7.0).all()


def test_a_span_past_the_capacity_writes_nothing_beyond_it() -> None:
    sequence = make_sequence(SMOLLM, 24)
    whole, _ = run(sequence, SMOLLM, [16], cache=empty_cache(SMOLLM, 64, "float16"))
    full, _ = run(sequence, SMOLLM, [24], cache=empty_cache(SMOLLM, 16, "float16"))
    np.testing.assert_array_equal(full[:16], whole)
