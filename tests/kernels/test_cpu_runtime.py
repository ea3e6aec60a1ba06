"""What the generated kernels rest on: threads, the object cache, vector functions."""

import ctypes
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jitllm.kernels.cpu import compile, ffi, threads, vmath
from jitllm.kernels.cpu.ir import Module, Value, f32, i16, i64, ptr, vec, void

N_ITEMS = 500


def build_workers(t: compile.Tier) -> Module:
    """A handler whose items note the thread that ran them, after some microseconds of work."""
    m = Module("workers")
    pthread_self = m.declare("pthread_self", i64, [])
    with m.function("body", void, [ptr, i64, i64]) as f:
        out, begin, end = f.args
        with f.loop(begin, end) as i:
            with f.loop(0, 2000):
                f.atomic_add(out, i * 16 + 8, 1)
            f.store(f.call(pthread_self), out, i * 16)
    with ffi.handler(m, "handler") as frame:
        f, n = frame.fn, frame.param(0)
        body = Value(f, m.ir.globals["body"])
        threads.call_parallel(f, frame.address, body, frame.ret(0).data, n, f.value(1, i64))
    return m


@pytest.fixture(scope="module")
def who_ran() -> object:
    """Calls the handler; int64[N_ITEMS, 2] of thread and count of work per item."""
    t = compile.tier()
    address = compile.load("workers", build_workers, t, ("handler",), threads.imports())
    ffi.register("test_workers", address["handler"])
    shape = jax.ShapeDtypeStruct((N_ITEMS * 16,), jnp.uint8)
    # the result starts as the zeros that are passed in
    call = jax.ffi.ffi_call("test_workers", shape, input_output_aliases={0: 0})

    def run(zero: jax.Array) -> jax.Array:
        return call(zero, params=np.array([N_ITEMS], np.int64))

    step = jax.jit(run)
    return lambda: (
        np.asarray(step(jnp.zeros(N_ITEMS * 16, jnp.uint8))).view(np.int64).reshape(-1, 2)
    )


def test_every_item_is_done_once_and_helpers_do_their_part(who_ran):
    usual = threads.get_threads()
    try:
        threads.set_threads(2)
        runs = [who_ran() for _ in range(20)]
    finally:
        threads.set_threads(usual)
    for run in runs:
        np.testing.assert_array_equal(run[:, 1], 2000)
    if threads.physical_cores() > 1:
        assert max(len(set(run[:, 0])) for run in runs) == 2


def test_one_thread_means_the_callers_alone(who_ran):
    usual = threads.get_threads()
    try:
        threads.set_threads(1)
        assert len(set(who_ran()[:, 0])) == 1
    finally:
        threads.set_threads(usual)


# --- object cache -----------------------------------------------------------------------------


def build_answer(t: compile.Tier) -> Module:
    m = Module("answer")
    with m.function("answer", i64, [], export=True) as f:
        f.ret(42)
    return m


def test_object_code_is_read_from_disk_the_second_time(tmp_path, monkeypatch):
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path))
    t = compile.tier()
    code = compile._object_code("answer", build_answer, t)
    (kept,) = (tmp_path / "kernels").iterdir()
    assert kept.name.startswith(f"answer-{t.name}-")
    assert compile._object_code("answer", lambda _: pytest.fail("built again"), t) == code


def test_object_code_is_kept_where_everything_else_is(tmp_path, monkeypatch):
    monkeypatch.delenv("JITLLM_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    kept = compile._object_path("answer", compile.tier())
    assert kept.parent == tmp_path / "Library" / "Caches" / "jitllm" / "kernels"


def test_another_tier_has_other_object_code(tmp_path, monkeypatch):
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path))
    for name in compile.host_tiers():
        compile._object_code("answer", build_answer, compile.tier(name))
    assert len(list((tmp_path / "kernels").iterdir())) == len(compile.host_tiers())


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path / "file"))
    assert compile._object_code("answer", build_answer, compile.tier())


def test_a_damaged_cache_file_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path))
    t = compile.tier()
    code = compile._object_code("answer", build_answer, t)
    (kept,) = (tmp_path / "kernels").iterdir()
    kept.write_bytes(code[: len(code) // 2])
    assert compile._object_code("answer", build_answer, t) == code


def test_a_unit_is_linked_once_and_can_be_called():
    t = compile.tier()
    address = compile.load("answer", build_answer, t, ("answer",))["answer"]
    assert compile.load("answer", build_answer, t, ("answer",))["answer"] == address
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(address)() == 42


# --- vector functions -------------------------------------------------------------------------


def apply(name: str, x: np.ndarray, tier: str) -> np.ndarray:
    """A function of `vmath` on f32 lanes (`half_to_f32`: on the bits of f16)."""

    def build(t: compile.Tier) -> Module:
        m = Module(name)
        with m.function("run", void, [ptr, ptr, i64], export=True) as f:
            source, to, n = f.args
            with f.loop(0, n, 16) as i:
                if name == "half_to_f32":
                    y = vmath.half_to_f32(f.load(source, vec(i16), i * 2), t)
                else:
                    y = getattr(vmath, name)(f, f.load(source, vec(f32), i * 4))
                f.store(y, to, i * 4)
        return m

    address = compile.load(f"test-{name}", build, compile.tier(tier), ("run",))["run"]
    y = np.empty(len(x), np.float32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, y)]
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)(
        *pointers, len(x)
    )
    return y


@pytest.mark.parametrize("tier", compile.host_tiers())
def test_every_f16_is_converted_exactly(tier):
    bits = np.arange(1 << 16, dtype=np.uint16)
    y = apply("half_to_f32", bits, tier)
    np.testing.assert_array_equal(y, bits.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("tier", compile.host_tiers())
def test_elementary_functions_are_close_over_the_whole_line(tier):
    x = np.linspace(-87, 87, 1 << 14).astype(np.float32)
    d = x.astype(np.float64)
    np.testing.assert_allclose(apply("exp", x, tier), np.exp(d), rtol=2e-7)
    np.testing.assert_allclose(apply("tanh", x, tier), np.tanh(d), atol=3e-7)
    np.testing.assert_allclose(apply("silu", x, tier), d / (1 + np.exp(-d)), rtol=1e-6, atol=2e-6)
    gelu = d / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (d + 0.044715 * d**3)))
    np.testing.assert_allclose(apply("gelu", x, tier), gelu, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tier", compile.host_tiers())
def test_infinities_and_nan_go_where_they_should(tier):
    x = np.resize(np.array([np.inf, -np.inf, np.nan, 200, -200], np.float32), 16)
    np.testing.assert_array_equal(apply("exp", x, tier)[:5], [np.inf, 0, np.nan, np.inf, 0])
    np.testing.assert_array_equal(apply("tanh", x, tier)[:5], [1, -1, np.nan, 1, -1])
