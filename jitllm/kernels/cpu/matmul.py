"""The handlers of `matmul` and `gated`: from a call frame to a job, from a job to its threads.

A call reads f32 activations once (`activations`), then the rows of all its weights are shared
among the threads as one range of items (`rows`). Its weights may differ in type: their functions
are found in a table that `enable` fills before the call is traced. What is static comes as integers
in the FFI attribute `params`: those of `CALL_PARAMS`, then those of `WEIGHT_PARAMS` per weight.
Arguments: x, span, weights..., then norm, biases and residual, as far as there are any.
Results: y per weight (one for `gated`), then scratch, so that XLA owns all memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from jitllm.kernels.cpu import ffi, threads
from jitllm.kernels.cpu.activations import (
    JOB,
    JOB_BYTES,
    WEIGHT_BYTES,
    Fields,
    job_at,
    weight_of,
    write_prepare,
)
from jitllm.kernels.cpu.compile import Tier, assembly, load
from jitllm.kernels.cpu.formats import CODES
from jitllm.kernels.cpu.ir import Function, Module, Value, i8, i32, i64, ptr
from jitllm.kernels.cpu.panel import write_panel, write_unpack
from jitllm.kernels.cpu.rows import write_rows
from jitllm.kernels.cpu.steps import FEW_TOKENS, PANEL_TILES, SHAPES, Shape, shape_of
from jitllm.kernels.cpu.stream import write_few, write_one

MAX_WEIGHTS = 4

CALL_PARAMS = ("n_weights", "k", "eps", "activation", "norm", "add", "scratch", "ints", "floats")
"""norm, add: arguments, or -1. scratch: a result. ints, floats: offsets in it, or -1."""

WEIGHT_PARAMS = ("code", "is_float", "n_rows", "tile_bytes", "bias")

_TABLE = ("one", "few", "unpack", "panel")  # functions of a type: a row of the table
_GRAIN_BYTES = 16 << 10  # weights worth a fork
_TOKEN_GRAIN = 8192  # activations worth a fork


def _optional(f: Function, index: Value, address: Callable[[Value], Value]) -> Value:
    """address(index), or null for an index of -1."""
    found = f.var(f.value(None, ptr))
    with f.when(index >= 0):
        found.set(address(index))
    return found.get()


def _read_call(f: Function, t: Tier, frame: ffi.Frame, job: Fields) -> None:
    param = {name: frame.param(i) for i, name in enumerate(CALL_PARAMS)}
    for name in JOB.keys() & {"n_weights", "k", "eps", "activation"}:
        job[name] = param[name]
    n = f.load(frame.arg(1).data, i32, 4, 4).sext(i64)
    job["n_tokens"], job["x"] = n, frame.arg(0).data
    scratch = frame.ret(param["scratch"]).data
    for name in ("norm", "add"):
        job[name] = _optional(f, param[name], lambda i: frame.arg(i).data)
    for name, shape in (("ints", "scaled"), ("floats", "float")):
        job[name] = _optional(f, param[name], lambda i: scratch + i)
        job[f"{name}_block"] = f.select(n <= FEW_TOKENS, 1, f.value(SHAPES[shape].tokens(t), i64))


def _read_weight(f: Function, frame: ffi.Frame, job: Fields, i: Value) -> Fields:
    w = weight_of(job, i)
    at = i * len(WEIGHT_PARAMS) + len(CALL_PARAMS)
    param = {name: frame.param(at + j) for j, name in enumerate(WEIGHT_PARAMS)}
    w["tiles"], w["y"] = frame.arg(i + 2).data, frame.ret(i).data
    w["bias"] = _optional(f, param["bias"], lambda i: frame.arg(i).data)
    w["n_rows"], w["tile_bytes"] = param["n_rows"], param["tile_bytes"]
    w["n_tiles"] = (param["n_rows"] + 15) // 16
    table = Value(f, f.module.ir.globals["table"]) + param["code"] * (8 * len(_TABLE))
    for j, name in enumerate(_TABLE):
        w[name] = f.load(table, ptr, 8 * j, 8)
    _describe_steps(f, job, w, param["is_float"].ne(0))
    return w


def _describe_steps(f: Function, job: Fields, w: Fields, is_float: Value) -> None:
    """How a weight's rows divide into steps, and where the activations of each lie."""

    def of_shape(field: str) -> Value:
        floats, ints = (getattr(SHAPES[name], field) for name in ("float", "scaled"))
        return f.select(is_float, floats, f.value(ints, i64))

    w["x"] = f.select(is_float, job["floats"], job["ints"])
    w["block_tokens"] = f.select(is_float, job["floats_block"], job["ints_block"])
    w["steps"], w["panel_steps"] = job["k"] // of_shape("columns"), of_shape("steps")
    w["x_step_bytes"] = w["block_tokens"] * of_shape("x_step_bytes")
    w["x_block_bytes"] = w["x_step_bytes"] * w["steps"]


def _share(frame: ffi.Frame, job: Fields, body: str, n: Value, grain: Value) -> None:
    f = frame.fn
    function = Value(f, f.module.ir.globals[body])
    threads.call_parallel(f, frame.address, function, job.base, n, f.binary("smax", grain, 1))


def _write_handler(m: Module, t: Tier, gated: bool) -> None:
    with ffi.handler(m, "handler") as frame:
        f = frame.fn
        job = job_at(f, f.stack(i8, JOB_BYTES + MAX_WEIGHTS * WEIGHT_BYTES, align=8))
        _read_call(f, t, frame, job)
        by_tiles = job["n_tokens"] <= FEW_TOKENS
        items = f.var(f.value(0, i64))
        with f.loop(0, job["n_weights"]) as i:
            w = _read_weight(f, frame, job, i)
            n = f.select(by_tiles, w["n_tiles"], (w["n_tiles"] + PANEL_TILES - 1) // PANEL_TILES)
            w["first_item"], w["n_items"] = items.get(), n
            items.set(n if gated else items.get() + n)
        token_grain = f.value(_TOKEN_GRAIN, i64) // job["k"]
        _share(frame, job, "prepare", job["n_tokens"], token_grain)
        with f.either(by_tiles) as (few, many):
            with few:
                grain = f.value(_GRAIN_BYTES, i64) // weight_of(job, 0)["tile_bytes"]
                _share(frame, job, "rows_few", items.get(), grain)
            with many:
                _share(frame, job, "rows_many", items.get(), f.value(1, i64))


# --- units of compilation ---------------------------------------------------------------------


def _build_handler(gated: bool) -> Callable[[Tier], Module]:
    def build(t: Tier) -> Module:
        m = Module("gated" if gated else "matmul")
        m.zeros("table", 8 * len(CODES) * len(_TABLE))
        write_prepare(m)
        write_rows(m, t, gated)
        _write_handler(m, t, gated)
        return m

    return build


def build_type(qtype: str) -> Callable[[Tier], Module]:
    """The unit of one weight type: `one`, `few` and `unpack`."""

    def build(t: Tier) -> Module:
        m = Module(qtype)
        write_one(m, t, qtype)
        write_few(m, t, qtype)
        write_unpack(m, t, qtype)
        return m

    return build


def build_panel(shape: Shape) -> Callable[[Tier], Module]:
    """The unit of one shape of arithmetic: `panel`."""

    def build(t: Tier) -> Module:
        m = Module(shape.name)
        write_panel(m, t, shape)
        return m

    return build


# --- loading ----------------------------------------------------------------------------------


def _handler(op: str, t: Tier) -> dict[str, int]:
    return load(op, _build_handler(op == "gated"), t, ("handler", "table"), threads.imports())


@cache
def target(op: str, t: Tier) -> str:
    """Load the handler of `matmul` or `gated`; the name of its FFI target."""
    name = f"jitllm_{op}_{t.name}"
    ffi.register(name, _handler(op, t)["handler"])
    return name


@cache
def enable(op: str, qtype: str, t: Tier) -> int:
    """Load the kernels of a weight type into the table of an op; the type's number in it."""
    shape = shape_of(qtype)
    kernels = load(qtype, build_type(qtype), t, ("one", "few", "unpack"))
    kernels |= load(f"panel-{shape.name}", build_panel(shape), t, ("panel",))
    at = _handler(op, t)["table"] + 8 * len(_TABLE) * CODES[qtype]
    for i, name in enumerate(_TABLE):
        ctypes.c_uint64.from_address(at + 8 * i).value = kernels[name]
    return CODES[qtype]


def type_assembly(qtype: str, t: Tier) -> str:
    """What `enable` loads for a weight type, as text: `one`, `few` and `unpack`, then `panel`."""
    return assembly(build_type(qtype), t) + assembly(build_panel(shape_of(qtype)), t)
