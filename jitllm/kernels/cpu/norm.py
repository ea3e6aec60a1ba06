"""`add_norm`: a residual and the normalised output of a sublayer, in one pass over the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from llvmlite.ir import Type

from jitllm.kernels.cpu import ffi, threads
from jitllm.kernels.cpu.compile import Tier, load
from jitllm.kernels.cpu.ir import Function, Module, Value, f32, i32, i64, ptr, vec, void

VECTOR = vec(f32)
"""Sixteen floats of a row."""

_TOKEN_GRAIN = 16384  # activations worth a fork


def rms(f: Function, x: Value, k: Value, eps: Value) -> Value:
    """1 / sqrt(mean(x^2) + eps) of k floats at x."""
    whole = k & -16
    squares = f.var(f.value(0.0, VECTOR))
    with f.loop(0, whole, 16) as i:
        v = f.load(x, VECTOR, i * 4, 4)
        squares.set(f.fma(v, v, squares.get()))
    total = f.var(f.reduce(squares.get(), lambda a, b: a + b))
    with f.loop(whole, k) as i:
        v = f.load(x, f32, i * 4, 4)
        total.set(f.fma(v, v, total.get()))
    return 1.0 / f.unary("sqrt", total.get() / k.to_f32() + eps)


def each_row(f: Function, n: Value, body: Callable[[Type, Value], None]) -> None:
    """body(type, i) over 0..n: whole vectors, then one by one."""
    with f.loop(0, n & -16, 16) as i:
        body(VECTOR, i)
    with f.loop(n & -16, n) as i:
        body(f32, i)


def _write_rows(m: Module) -> None:
    """rows(job, begin, end) with job: x, y, norm, out, k, eps."""
    with m.function("rows", void, [ptr, i64, i64]) as f:
        job, begin, end = f.args
        x, y, weight, out = (f.load(job, ptr, 8 * i, 8) for i in range(4))
        k, eps = f.load(job, i64, 32, 8), f.load(job, i64, 40, 8).trunc(i32).bitcast(f32)
        with f.loop(begin, end) as token:
            at = token * k * 4
            scale = rms(f, y + at, k, eps)

            def add(t: Type, i: Value, at: Value = at, scale: Value = scale) -> None:
                v = f.load(y + at, t, i * 4, 4) * f.value(scale, t) * f.load(weight, t, i * 4, 4)
                f.store(f.load(x + at, t, i * 4, 4) + v, out + at, i * 4, 4)

            each_row(f, k, add)


def build(t: Tier) -> Module:
    """The unit of `add_norm`: `handler`; arguments x, y, span, norm; params: the bits of eps."""
    m = Module("add_norm")
    _write_rows(m)
    with ffi.handler(m, "handler") as frame:
        f = frame.fn
        job = f.stack(i64, 6, align=8)
        addresses = [frame.arg(i).data for i in (0, 1, 3)] + [frame.ret(0).data]
        k = frame.arg(0).dim(1)
        for i, field in enumerate((*addresses, k, frame.param(0))):
            f.store(field, job, 8 * i, 8)
        n = f.load(frame.arg(2).data, i32, 4, 4).sext(i64)
        grain = f.binary("smax", f.value(_TOKEN_GRAIN, i64) // k, 1)
        rows = Value(f, m.ir.globals["rows"])
        threads.call_parallel(f, frame.address, rows, job, n, grain)
    return m


@cache
def target(t: Tier) -> str:
    """Load the handler; the name of its FFI target."""
    name = f"jitllm_add_norm_{t.name}"
    ffi.register(name, load("add_norm", build, t, ("handler",), threads.imports())["handler"])
    return name
