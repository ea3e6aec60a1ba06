"""Sharing a kernel's work among threads: XLA's own pool, kept hot between the calls of a step.

`parallel(fn, arg, n, grain)` calls fn(arg, begin, end) over disjoint ranges that cover 0..n and
returns when all are done. The caller works too and never waits for a helper that has not started:
ranges are claimed from a word in memory, and only claimed ranges are waited for. A pool of one
thread, a pool that is busy or a refused task therefore cost speed, never an answer.

A helper is a task on the pool. When a job is used up it polls for the next one for a bounded time
(about 50 us) before it gives its thread back: within a step a fork then costs the time of a cache
line moving between cores, not of a futex.

A job lives in one of a few static entries. Its state word holds a generation and the next unclaimed
item; claiming is a compare-and-swap of that word, so a late helper that looks at an entry which has
moved on to another job changes nothing: either its swap fails, or it claims from the new job.
Ranges shrink as the job runs out (a share of what is left), so streams are long and ends even.
"""

from __future__ import annotations

import ctypes
import os
import platform

import psutil
from llvmlite import ir

from jitllm.kernels.cpu import ffi
from jitllm.kernels.cpu.compile import Tier, load, tier
from jitllm.kernels.cpu.ir import Function, Module, Value, i32, i64, ptr, void

_ENTRIES, _ENTRY_BYTES = 16, 128
# The team: threads wanted, ticket of the newest job, helpers alive; then the entries.
_THREADS, _TICKET, _HELPERS, _FIRST = 0, 64, 128, 192
# An entry: state word; 1 while a caller owns it; what to call; and, a line away, items finished.
_STATE, _BUSY, _FN, _ARG, _ITEMS, _GRAIN, _DONE = 0, 8, 16, 24, 32, 40, 64

_CLOSED = 0xFFFFFFFF  # a next item beyond any job's end
_POLLS = 1200
_YIELD_AFTER = 512  # polls of a caller (25 us) before it lets the scheduler run a helper

# XLA_FFI_Api; sizes of XLA_FFI_ThreadPool_Schedule_Args and XLA_FFI_Error_Destroy_Args
_API_ERROR_DESTROY, _API_SCHEDULE = 64, 136
_SCHEDULE_BYTES, _DESTROY_BYTES = 40, 24

_EXPORTS = ("jitllm_team", "jitllm_parallel")
_PARALLEL = ("jitllm_parallel", void, [ptr, ptr, ptr, i64, i64])


def call_parallel(
    f: Function, frame: Value, body: Value, arg: Value, n: Value, grain: Value
) -> None:
    """Write the call: body(arg, begin, end) over 0..n, at least `grain` items at a time.

    `frame` is the handler's call frame; `body` the address of void(ptr, i64, i64).
    """
    name, returns, args = _PARALLEL
    f.call(f.module.declare(name, returns, args), frame, body, arg, n, grain)


def imports() -> dict[str, int]:
    """The symbol a unit that uses `call_parallel` must be linked with."""
    get_threads()
    return {"jitllm_parallel": _runtime()["jitllm_parallel"]}


def _runtime() -> dict[str, int]:
    """One team per process, whatever the tiers in use: it holds no vector code."""
    return load("threads", build, tier("generic"), _EXPORTS)


def build(t: Tier) -> Module:
    """The IR of the runtime: the team's memory and `jitllm_parallel`."""
    m = Module("threads")
    m.zeros("jitllm_team", _FIRST + _ENTRIES * _ENTRY_BYTES)
    _pause(m)
    _write_work(m)
    _write_helper(m)
    _write_recruit(m)
    _write_parallel(m)
    return m


def _team(f: Function) -> Value:
    return Value(f, f.module.ir.globals["jitllm_team"])


def _pause(m: Module) -> None:
    """A hint that this is a polling loop; nothing on machines without one."""
    with m.function("pause", void, []) as f:
        if platform.machine() in ("x86_64", "AMD64"):
            f.intrinsic("x86.sse2.pause", void)


def _write_work(m: Module) -> None:
    """work(entry): claim ranges and call the job's function until nothing is left."""
    with m.function("work", void, [ptr]) as f:
        (entry,) = f.args
        threads = f.atomic_load(_team(f), _THREADS)
        with f.repeat() as leave_if:
            state = f.atomic_load(entry, _STATE)
            start, n = state & _CLOSED, f.atomic_load(entry, _ITEMS)
            leave_if(start >= n)
            fn, arg = f.load(entry, ptr, _FN, 8), f.load(entry, ptr, _ARG, 8)
            share = (n - start) // (threads * 2)
            size = f.binary("smax", share, f.load(entry, i64, _GRAIN, 8))
            size = f.minimum(size, n - start)
            with f.when(f.exchange_if(entry, _STATE, state, state + size)):
                f.call(fn, arg, start, start + size)
                f.atomic_add(entry, _DONE, size)


def _write_helper(m: Module) -> None:
    """helper(entry), a pool task: work, then poll for new tickets for a while."""
    with m.function("helper", void, [ptr]) as f:
        team, work = _team(f), m.ir.globals["work"]
        seen, polls = f.var(f.value(0, i64)), f.var(f.value(0, i64))
        f.call(work, f.args[0])
        with f.repeat() as leave_if:
            ticket = f.atomic_load(team, _TICKET)
            with f.either(ticket.eq(seen.get())) as (same, new):
                with same:
                    f.call(m.ir.globals["pause"])
                    polls.set(polls.get() + 1)
                with new:
                    seen.set(ticket)
                    polls.set(f.value(0, i64))
                    f.call(work, _entry(f, ticket % _ENTRIES))
            leave_if(polls.get() > _POLLS)
        f.atomic_add(team, _HELPERS, -1)


def _entry(f: Function, index: Value) -> Value:
    return _team(f) + (index * _ENTRY_BYTES + _FIRST)


def _write_recruit(m: Module) -> None:
    """recruit(frame, entry, wanted): schedule helpers until `wanted` are alive or on their way."""
    with m.function("recruit", void, [ptr, ptr, i64]) as f:
        frame, entry, wanted = f.args
        team = _team(f)
        api, ctx = ffi.api_and_context(f, frame)
        request = f.stack(i64, _SCHEDULE_BYTES // 8, align=8)
        helper = Value(f, m.ir.globals["helper"])
        size, null = f.value(_SCHEDULE_BYTES, i64), f.value(None, ptr)
        for i, field in enumerate((size, null, ctx, helper, entry)):
            f.store(field, request, 8 * i)
        with f.repeat() as leave_if:
            leave_if(f.atomic_load(team, _HELPERS) >= wanted)
            f.atomic_add(team, _HELPERS, 1)
            error = f.call(f.load(api, ptr, _API_SCHEDULE), request, returns=ptr)
            with f.when(error.ne(None), likely=False):
                f.atomic_add(team, _HELPERS, -1)
                _destroy(f, api, error)
                f.ret()


def _destroy(f: Function, api: Value, error: Value) -> None:
    request = f.stack(i64, _DESTROY_BYTES // 8, align=8)
    for i, field in enumerate((f.value(_DESTROY_BYTES, i64), f.value(None, ptr), error)):
        f.store(field, request, 8 * i)
    f.call(f.load(api, ptr, _API_ERROR_DESTROY), request)


def _write_parallel(m: Module) -> None:
    name, returns, args = _PARALLEL
    with m.function(name, returns, args, export=True) as f:
        frame, fn, arg, n, grain = f.args
        alone = f.atomic_load(_team(f), _THREADS) <= 1
        index = f.var(f.value(-1, i64))
        with f.when(f.select(alone, f.value(0, i64), n - grain) > 0):
            index.set(f.call(_write_acquire(m)))
        with f.either(index.get() < 0) as (by_itself, shared):
            with by_itself:
                f.call(fn, arg, f.value(0, i64), n)
            with shared:
                _run_shared(f, frame, _entry(f, index.get()), index.get())


def _write_acquire(m: Module) -> ir.Function:
    """acquire() -> the index of an entry that is now the caller's, or -1."""
    with m.function("acquire", i64, []) as f:
        with f.loop(0, _ENTRIES) as i, f.when(f.exchange_if(_entry(f, i), _BUSY, 0, 1)):
            f.ret(i)
        f.ret(-1)
    return m.ir.globals["acquire"]


def _run_shared(f: Function, frame: Value, entry: Value, index: Value) -> None:
    m, team = f.module, _team(f)
    _, fn, arg, n, grain = f.args
    f.store(fn, entry, _FN, 8)
    f.store(arg, entry, _ARG, 8)
    f.store(grain, entry, _GRAIN, 8)
    f.atomic_store(n, entry, _ITEMS)
    f.atomic_store(f.value(0, i64), entry, _DONE)
    generation = (f.atomic_load(entry, _STATE) >> 32) + 1
    f.atomic_store(generation << 32, entry, _STATE)
    # the ticket differs from the last one because the generation or the index does
    f.atomic_store(generation * _ENTRIES + index, team, _TICKET)
    wanted = f.minimum(f.atomic_load(team, _THREADS), (n + grain - 1) // grain) - 1
    with f.when(f.atomic_load(team, _HELPERS) < wanted):
        f.call(m.ir.globals["recruit"], frame, entry, wanted)
    f.call(m.ir.globals["work"], entry)
    _await(f, entry, n)
    f.atomic_store((generation << 32) | _CLOSED, entry, _STATE)
    f.atomic_store(f.value(0, i64), entry, _BUSY)


def _await(f: Function, entry: Value, n: Value) -> None:
    polls = f.var(f.value(0, i64))
    with f.repeat() as leave_if:
        leave_if(f.atomic_load(entry, _DONE) >= n)
        f.call(f.module.ir.globals["pause"])
        polls.set(polls.get() + 1)
        with f.when(polls.get() > _YIELD_AFTER, likely=False):
            f.call(f.module.declare("sched_yield", i32, []))


def physical_cores() -> int:
    """Physical cores among the CPUs this process may run on."""
    cpus = psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cpus
    siblings = max(1, cpus // (psutil.cpu_count(logical=False) or 1))
    return max(1, allowed // siblings)


def _team_threads() -> ctypes.c_int64:
    return ctypes.c_int64.from_address(_runtime()["jitllm_team"] + _THREADS)


def set_threads(n: int | None = None) -> int:
    """Use `n` threads in every kernel from now on (None: the physical cores); what was set."""
    n = physical_cores() if n is None else max(1, n)
    _team_threads().value = n
    return n


def get_threads() -> int:
    """Threads the kernels share their work among."""
    return _team_threads().value or set_threads()
