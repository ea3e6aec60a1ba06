"""The limit of a token: how fast the kernels' own threads read memory that they only add up."""

from __future__ import annotations

import time
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jitllm.kernels.cpu import ffi, threads
from jitllm.kernels.cpu.compile import Tier, load, tier
from jitllm.kernels.cpu.ir import Function, Module, Value, i32, i64, ptr, vec, void

_PAGE = 4096
_STREAMS = 4  # of a thread: one alone reads a tenth less
_GRAIN = 64


def _write_read(m: Module) -> None:
    """read(data, begin, end): add up pages begin..end, in streams side by side."""
    with m.function("read", void, [ptr, i64, i64]) as f:
        job, begin, end = f.args
        data, out = f.load(job, ptr, 0, 8), f.load(job, ptr, 8, 8)
        part = (end - begin) // _STREAMS * _PAGE
        streams = [data + begin * _PAGE + part * s for s in range(_STREAMS)]
        sums = [f.var(f.value(0, vec(i32))) for _ in range(2 * _STREAMS)]
        with f.loop(0, part, 128) as i:
            for j, total in enumerate(sums):
                line = f.load(streams[j // 2] + i, vec(i32), 64 * (j % 2), 64)
                total.set(total.get() + line)
        total = sums[0].get()
        for other in sums[1:]:
            total = total + other.get()
        f.atomic_add(out, 0, f.reduce(total, lambda a, b: a + b).zext(i64))


def _build(t: Tier) -> Module:
    m = Module("memory")
    _write_read(m)
    with ffi.handler(m, "handler") as frame:
        f: Function = frame.fn
        out, job = frame.ret(0).data, f.stack(ptr, 2, align=8)
        f.store(f.value(0, i64), out)
        f.store(frame.arg(0).data, job, 0)
        f.store(out, job, 8)
        n, body = frame.arg(0).dim(0) // _PAGE, Value(f, m.ir.globals["read"])
        threads.call_parallel(f, frame.address, body, job, n, f.value(_GRAIN, i64))
    return m


@cache
def _target(t: Tier) -> str:
    name = f"jitllm_memory_{t.name}"
    ffi.register(name, load("memory", _build, t, ("handler",), threads.imports())["handler"])
    return name


def read(data: jax.Array) -> jax.Array:
    """Read uint8[n], n a multiple of 4096; what is returned is ready when all of it was read."""
    call = jax.ffi.ffi_call(_target(tier()), jax.ShapeDtypeStruct((2,), jnp.int32))
    return call(data, params=np.zeros(1, np.int64))


class Bandwidth:
    """A stretch of memory larger than the caches, and the time it takes to read it."""

    def __init__(self, n_bytes: int = 512 << 20):
        self._data = jnp.ones(n_bytes // _PAGE * _PAGE, jnp.uint8)
        self._read = jax.jit(read)
        self.measure()

    def measure(self) -> float:
        """Bytes per second of one pass, with the threads that the kernels have now."""
        start = time.perf_counter()
        self._read(self._data).block_until_ready()
        return self._data.nbytes / (time.perf_counter() - start)
