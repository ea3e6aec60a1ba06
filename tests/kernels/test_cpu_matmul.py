"""The generated products against gguf-py's values, and the ways in which their bits must not move.

The bound is that of the arithmetic: an activation of a group of 32 is off by at most half of
amax / 127, and float32 sums by a few roundings of their terms.
"""

import gc
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitllm.errors import UsageError
from jitllm.kernels.cpu import compile, ops, threads
from jitllm.kernels.qtypes import QTYPES
from jitllm.kernels.tensor import QuantizedTensor
from tests.kernels.weights import f16_fields, random_rows, random_weight, tensor_of

INTEGER_TYPES = [name for name, q in QTYPES.items() if not q.is_float]
TIERS = compile.host_tiers()


def activations(t: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((t, k), dtype=np.float32)


def span(n: int) -> jax.Array:
    return jnp.array([0, n], jnp.int32)


def product(x: np.ndarray, *ws: QuantizedTensor, n: int | None = None, **options) -> list:
    """matmul inside a jit, as numpy arrays cut to the valid rows."""
    n = len(x) if n is None else n
    call = jax.jit(lambda x, ws: ops.matmul(x, ws, span(n), **options))
    return [np.asarray(y)[:n] for y in call(jnp.asarray(x), ws)]


def bound(x: np.ndarray, values: np.ndarray, qtype: str) -> np.ndarray:
    """How far the product may be from the exact one, f64[t, n]."""
    size = 1 if QTYPES[qtype].is_float else 32
    shape = (-1, values.shape[1] // size, size)
    x_max = np.abs(x).reshape(shape).max(-1)
    w_max = np.abs(values).reshape(shape).max(-1)
    rounding = 2e-6 * np.sqrt(values.shape[1]) * size * x_max @ w_max.T
    if QTYPES[qtype].is_float:
        return rounding
    return x_max / 254 @ np.abs(values).reshape(shape).sum(-1).T * 1.001 + rounding


def check(qtype: str, n: int, k: int, t: int, seed: int = 0) -> None:
    w, values = random_weight(qtype, n, k, seed)
    x = activations(t, k, seed + 1)
    (y,) = product(x, w)
    assert y.shape == (t, n)
    error = np.abs(y - x.astype(np.float64) @ values.T)
    assert (error <= bound(x, values, qtype)).all()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("qtype", QTYPES)
def test_a_product_is_within_the_rounding_of_its_activations(qtype, tier, monkeypatch):
    monkeypatch.setenv("JITLLM_CPU_TIER", tier)
    check(qtype, 40, 512, 1)
    check(qtype, 40, 768, 20)


@pytest.mark.parametrize(
    ("qtype", "n", "k", "t"),
    [
        ("Q8_0", 1, 32, 1),
        ("Q4_0", 17, 64, 2),
        ("Q5_0", 15, 32, 33),
        ("Q4_1", 192, 576, 3),
        ("Q4_1", 576, 1536, 7),
        ("Q5_1", 31, 96, 16),
        ("Q6_K", 33, 256, 7),
        ("Q4_K", 100, 2048, 512),
        ("Q5_K", 1, 768, 33),
        ("F32", 64, 172, 5),
        ("F32", 3, 1, 1),
        ("F32", 20, 7, 13),
        ("F16", 50, 576, 16),
        ("BF16", 1, 64, 33),
        ("Q8_0", 262_144, 32, 1),
        ("Q8_0", 262_144, 32, 7),
    ],
)
def test_odd_shapes_are_products_like_any_other(qtype, n, k, t):
    check(qtype, n, k, t)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_random_shapes_and_values_are_within_the_bound(data):
    qtype = data.draw(st.sampled_from(list(QTYPES)))
    group = max(QTYPES[qtype].group, 1)
    k = group * data.draw(st.integers(1, 3 if group == 256 else 40))
    check(
        qtype,
        data.draw(st.integers(1, 70)),
        k,
        data.draw(st.integers(1, 40)),
        data.draw(st.integers(0, 99)),
    )


# --- bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("qtype", QTYPES)
def test_a_token_has_the_same_bits_alone_in_a_prompt_and_beside_others(qtype):
    w, _ = random_weight(qtype, 70, 768)
    x = activations(37, 768)
    (whole,) = product(x, w)
    for first, n in ((0, 1), (36, 1), (3, 2), (5, 4), (5, 5), (11, 16), (20, 17)):
        (part,) = product(x[first : first + n], w)
        np.testing.assert_array_equal(part, whole[first : first + n])


@pytest.mark.parametrize("qtype", ["Q4_K", "F16"])
def test_rows_past_the_valid_ones_change_nothing(qtype):
    w, _ = random_weight(qtype, 48, 512)
    x = activations(40, 512)
    for n in (1, 4, 5, 33):
        padded = x.copy()
        padded[n:] = np.nan
        np.testing.assert_array_equal(product(padded, w, n=n)[0], product(x[:n], w)[0])


@pytest.mark.parametrize("qtype", QTYPES)
def test_every_tier_that_fuses_multiply_and_add_gives_the_same_bits(qtype, monkeypatch):
    w, _ = random_weight(qtype, 40, 512)
    x = activations(9, 512)
    results = []
    for tier in (t for t in TIERS if t != "generic"):
        monkeypatch.setenv("JITLLM_CPU_TIER", tier)
        results.append(np.concatenate([product(x, w)[0], product(x[:1], w)[0]]))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_weights_of_different_types_share_a_call_and_keep_their_bits():
    ws = [random_weight(q, n, 512)[0] for q, n in (("Q4_K", 64), ("Q6_K", 33), ("F16", 16))]
    norm = jnp.asarray(1 + activations(1, 512)[0] / 10)
    for t in (1, 30):
        x = activations(t, 512)
        together = product(x, *ws, norm=norm, eps=1e-5)
        for y, w in zip(together, ws, strict=True):
            np.testing.assert_array_equal(y, product(x, w, norm=norm, eps=1e-5)[0])


# --- odd values -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("qtype", INTEGER_TYPES)
def test_a_bad_scale_spoils_its_row_alone(qtype, bad):
    rows = random_rows(qtype, 20, 512)
    spoiled = rows.copy().reshape(20, -1, QTYPES[qtype].block_bytes)
    for at in f16_fields(qtype):
        spoiled[7, 1, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
    for t in (1, 6):
        x = activations(t, 512)
        (good,) = product(x, tensor_of(rows, qtype, 512))
        (y,) = product(x, tensor_of(spoiled.reshape(20, -1), qtype, 512))
        assert not np.isfinite(y[:, 7]).any()
        np.testing.assert_array_equal(np.delete(y, 7, 1), np.delete(good, 7, 1))


@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_1", "Q6_K", "F32"])
def test_a_nan_activation_spoils_its_token_alone(qtype):
    w, _ = random_weight(qtype, 33, 512)
    x = activations(20, 512)
    (good,) = product(x, w)
    x[11, 300] = np.nan
    (y,) = product(x, w)
    assert np.isnan(y[11]).all()
    np.testing.assert_array_equal(np.delete(y, 11, 0), np.delete(good, 11, 0))


@pytest.mark.parametrize("qtype", QTYPES)
def test_nothing_in_is_nothing_out(qtype):
    w, _ = random_weight(qtype, 33, 256)
    for t in (1, 6):
        assert not product(np.zeros((t, 256), np.float32), w)[0].any()


@pytest.mark.parametrize("scale", [1e-32, 1e-20, 1e30])
@pytest.mark.parametrize("qtype", ["Q8_0", "Q5_1", "Q4_K", "F16"])
def test_huge_and_tiny_activations_scale_the_product(qtype, scale):
    w, values = random_weight(qtype, 33, 256)
    x = activations(6, 256) * np.float32(scale)
    error = np.abs(product(x, w)[0] - x.astype(np.float64) @ values.T)
    assert (error <= 1.01 * bound(x, values, qtype)).all()


# --- what is fused ----------------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("t", [1, 3, 21])
def test_norm_bias_and_residual_are_part_of_the_call(t):
    (w, values), x = random_weight("F32", 35, 172), activations(t, 172)
    norm, bias = 1 + activations(1, 172, 5)[0] / 8, activations(1, 35, 6)[0]
    add = activations(t, 35, 7)
    options = {"norm": jnp.asarray(norm), "eps": 1e-5, "biases": (jnp.asarray(bias),)}
    expected = rms_norm(x, norm, 1e-5) @ values.T + bias + add
    (y,) = product(x, w, add=jnp.asarray(add), **options)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("t", [1, 21])
def test_of_several_weights_each_has_its_own_bias_or_none(t):
    pairs = [random_weight(q, n, 64) for q, n in (("F32", 20), ("F16", 7), ("F32", 16))]
    biases = (activations(1, 20)[0], None, activations(1, 16)[0])
    x = activations(t, 64)
    given_biases = tuple(None if b is None else jnp.asarray(b) for b in biases)
    ys = product(x, *(w for w, _ in pairs), biases=given_biases)
    for y, (_, values), bias in zip(ys, pairs, biases, strict=True):
        expected = x @ values.T + (0 if bias is None else bias)
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


def act(x: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("t", "n"), [(1, 35), (3, 64), (100, 35)])
def test_a_gate_is_activated_and_multiplied(t, n, activation):
    (gate, g), (up, u) = random_weight("F32", n, 96, 1), random_weight("F32", n, 96, 2)
    x, norm = 20 * activations(t, 96), 1 + activations(1, 96, 5)[0]
    call = jax.jit(
        lambda x: ops.gated(
            x, gate, up, span(t), norm=jnp.asarray(norm), eps=1e-6, activation=activation
        )
    )
    normed = rms_norm(x, norm, 1e-6)
    expected = act(normed @ g.T, activation) * (normed @ u.T)
    np.testing.assert_allclose(np.asarray(call(x)), expected, rtol=1e-5, atol=1e-5)


def test_gate_and_up_may_differ_in_type_and_agree_however_many_tokens_share():
    (gate, _), (up, _) = random_weight("Q4_K", 40, 256, 1), random_weight("Q6_K", 40, 256, 2)
    x = activations(30, 256)
    call = jax.jit(lambda x, n: ops.gated(x, gate, up, n, norm=None, eps=0.0, activation="silu"))
    whole = np.asarray(call(x, span(30)))
    for i in (0, 17, 29):
        np.testing.assert_array_equal(np.asarray(call(x[i : i + 1], span(1)))[0], whole[i])


@pytest.mark.parametrize(("t", "d"), [(1, 576), (7, 33), (200, 640)])
def test_add_norm_adds_the_normalised_rows(t, d):
    x, y, norm = activations(t, d, 1), 3 * activations(t, d, 2), activations(1, d, 3)[0]
    call = jax.jit(lambda x, y: ops.add_norm(x, y, span(t), norm=jnp.asarray(norm), eps=1e-6))
    np.testing.assert_allclose(np.asarray(call(x, y)), x + rms_norm(y, norm, 1e-6), atol=2e-6)


# --- threads, devices, memory -----------------------------------------------------------------


def test_a_thousand_calls_leak_nothing():
    ws = tuple(random_weight(q, 256, 512)[0] for q in ("Q4_K", "F16"))
    x = jnp.asarray(activations(8, 512))
    call = jax.jit(lambda x: ops.matmul(x, ws, span(8)))

    def resident() -> int:
        gc.collect()
        return psutil.Process().memory_info().rss

    for _ in range(200):
        jax.block_until_ready(call(x))
    before = resident()
    for _ in range(1000):
        jax.block_until_ready(call(x))
    assert resident() - before < 4 << 20


def test_calls_from_many_threads_do_not_disturb_each_other():
    w, _ = random_weight("Q4_0", 512, 512)
    call = jax.jit(lambda x, n: ops.matmul(x, (w,), n)[0])
    xs = [jnp.asarray(activations(t, 512, t)) for t in (1, 2, 9, 40)]
    alone = [np.asarray(call(x, span(len(x)))) for x in xs]

    def work(i: int) -> bool:
        x = xs[i % len(xs)]
        return np.array_equal(np.asarray(call(x, span(len(x)))), alone[i % len(xs)])

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(400)))


@pytest.mark.parametrize("n_threads", [1, 2, 7])
def test_the_number_of_threads_does_not_change_the_bits(n_threads):
    w, _ = random_weight("Q6_K", 1024, 512)
    x = activations(40, 512)
    usual = threads.get_threads()
    expected = product(x, w)[0]
    try:
        assert threads.set_threads(n_threads) == n_threads
        np.testing.assert_array_equal(product(x, w)[0], expected)
        np.testing.assert_array_equal(product(x[:1], w)[0], expected[:1])
    finally:
        threads.set_threads(usual)


def run_alone(script: str, **env: str) -> str:
    """Run a script in a process of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **env, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pool_of_one_thread_and_several_devices_end_in_the_same_answer():
    script = """
        import os
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import jax
        jax.config.update("jax_num_cpu_devices", 3)
        import numpy as np
        from jitllm.kernels.cpu import ops, threads
        from tests.kernels.test_cpu_matmul import activations, random_weight, span
        threads.set_threads(4)
        w, _ = random_weight("Q5_K", 2048, 512)
        ys = []
        for device in jax.devices() * 20:
            args = jax.device_put((activations(9, 512), w, span(9)), device)
            ys.append(jax.jit(lambda x, w, n: ops.matmul(x, (w,), n)[0])(*args))
        assert len({y.device for y in ys}) == 3
        assert all(np.array_equal(y, ys[0]) for y in ys)
        print("done", float(np.asarray(ys[0])[3, 5]))
    """
    w, _ = random_weight("Q5_K", 2048, 512)
    y = product(activations(9, 512), w)[0]
    assert run_alone(script, PJRT_NPROC="1").split() == ["done", str(float(y[3, 5]))]


# --- refusals ---------------------------------------------------------------------------------


def test_a_wrong_shape_is_refused_in_words():
    w, _ = random_weight("Q8_0", 16, 64)
    x = jnp.zeros((1, 32))
    with pytest.raises(ValueError, match="weights of 64 columns cannot meet activations of 32"):
        ops.matmul(x, (w,), span(1))
    x = jnp.zeros((1, 64))
    with pytest.raises(ValueError, match=r"norm must be f32\[64\], got float32\[32\]"):
        ops.matmul(x, (w,), span(1), norm=jnp.zeros(32))
    with pytest.raises(ValueError, match="add needs exactly one weight"):
        ops.matmul(x, (w, w), span(1), add=jnp.zeros((1, 16)))
    with pytest.raises(ValueError, match=r"span must be i32\[2\], got int32\[3\]"):
        ops.matmul(x, (w,), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"Q8_0 weights \[16, 64\] need uint8\[1, 1088\]"):
        ops.matmul(x, (QuantizedTensor(w.data[:, 64:], "Q8_0", (16, 64)),), span(1))
    with pytest.raises(ValueError, match="activation is 'relu'; it can be silu, gelu"):
        ops.gated(x, w, w, span(1), norm=None, eps=0.0, activation="relu")


def test_a_tier_this_cpu_cannot_run_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("JITLLM_CPU_TIER", "sse9")
    with pytest.raises(UsageError, match=r"JITLLM_CPU_TIER is sse9; this CPU can run .*generic"):
        compile.tier()
