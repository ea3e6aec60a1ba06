"""The operations of a block as calls of generated kernels; see `jitllm.kernels.ops.Ops`.

Everything that could go wrong in a kernel is checked here, in Python, while a step is traced.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jitllm.kernels.cpu import matmul as handlers
from jitllm.kernels.cpu import norm as norms
from jitllm.kernels.cpu.attention import attention
from jitllm.kernels.cpu.compile import Tier, tier
from jitllm.kernels.cpu.formats import FLOATS, FORMATS, STEP
from jitllm.kernels.cpu.rows import ACTIVATIONS
from jitllm.kernels.cpu.steps import FEW_TOKENS, SHAPES, STEP_BYTES
from jitllm.kernels.qtypes import QTYPES
from jitllm.kernels.tensor import QuantizedTensor

__all__ = ["add_norm", "attention", "gated", "matmul"]

_ALIGN = 64


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_weight(w: QuantizedTensor, k: int) -> None:
    n, w_k = w.shape
    _require(w.qtype in QTYPES, f"no kernel for weights of type {w.qtype}")
    _require(w_k == k, f"weights of {w_k} columns cannot meet activations of {k}")
    tiles = (-(-n // 16), QTYPES[w.qtype].tile_bytes(k))
    _require(
        w.data.shape == tiles and w.data.dtype == jnp.uint8,
        f"{w.qtype} weights [{n}, {k}] need uint8{list(tiles)}, got {w.data.dtype}"
        f"{list(w.data.shape)}",
    )


def _check_f32(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    _require(
        x.shape == shape and x.dtype == jnp.float32,
        f"{name} must be f32{list(shape)}, got {x.dtype}{list(x.shape)}",
    )


def _check_span(span: jax.Array) -> None:
    _require(
        span.shape == (2,) and span.dtype == jnp.int32,
        f"span must be i32[2], got {span.dtype}{list(span.shape)}",
    )


def _float_bits(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]


def _scratch(qtypes: Sequence[str], n: int, k: int, t: Tier) -> tuple[int, int, int]:
    """(bytes of scratch, offset of the quantised activations, of the float ones; -1: none)."""
    at, offsets = 0, []
    for wanted, shape, row_bytes in (
        (FORMATS, "scaled", k // STEP * STEP_BYTES),
        (FLOATS, "float", 4 * k),
    ):
        used = any(q in wanted for q in qtypes)
        offsets.append(at if used else -1)
        block = 1 if n <= FEW_TOKENS else SHAPES[shape].tokens(t)
        rows = -(-n // block) * block if used else 0
        at += -(-rows * row_bytes // _ALIGN) * _ALIGN
    return at, offsets[0], offsets[1]


@dataclass(frozen=True)
class _Extras:
    """What a product may have besides its weights."""

    norm: jax.Array | None = None
    eps: float = 0.0
    biases: Sequence[jax.Array | None] | None = None
    add: jax.Array | None = None
    activation: int = 0


def _check_call(x: jax.Array, ws: Sequence[QuantizedTensor], span: jax.Array) -> None:
    _check_f32("x", x, x.shape[:1] + x.shape[-1:])
    _check_span(span)
    _require(
        0 < len(ws) <= handlers.MAX_WEIGHTS,
        f"a product takes 1 to {handlers.MAX_WEIGHTS} weights, got {len(ws)}",
    )
    for w in ws:
        _check_weight(w, x.shape[1])


def _append(
    args: list[jax.Array], name: str, value: jax.Array | None, shape: tuple[int, ...]
) -> int:
    """The place of an optional argument, -1 without one."""
    if value is None:
        return -1
    _check_f32(name, value, shape)
    args.append(value)
    return len(args) - 1


def _call(
    op: str,
    x: jax.Array,
    ws: Sequence[QuantizedTensor],
    span: jax.Array,
    widths: Sequence[int],
    extras: _Extras,
) -> tuple[jax.Array, ...]:
    """One call of a product handler -> f32[T, width] for each of `widths`."""
    _check_call(x, ws, span)
    t, (n, k) = tier(), x.shape
    args = [x, span, *(w.data for w in ws)]
    at_norm = _append(args, "norm", extras.norm, (k,))
    biases = extras.biases or [None] * len(ws)
    at_bias = [_append(args, "bias", b, w.shape[:1]) for w, b in zip(ws, biases, strict=True)]
    at_add = _append(args, "add", extras.add, (n, ws[0].shape[0]))
    size, ints, floats = _scratch([w.qtype for w in ws], n, k, t)
    # the order of CALL_PARAMS, then of WEIGHT_PARAMS
    params = [len(ws), k, _float_bits(extras.eps), extras.activation, at_norm, at_add]
    params += [len(widths), ints, floats]
    for w, bias in zip(ws, at_bias, strict=True):
        code = handlers.enable(op, w.qtype, t)
        params += [code, int(w.qtype in FLOATS), w.shape[0], w.data.shape[1], bias]
    results = [jax.ShapeDtypeStruct((n, width), jnp.float32) for width in widths]
    scratch = jax.ShapeDtypeStruct((size,), jnp.uint8)
    call = jax.ffi.ffi_call(handlers.target(op, t), (*results, scratch))
    return tuple(call(*args, params=np.array(params, np.int64))[:-1])


def matmul(
    x: jax.Array,
    ws: tuple[QuantizedTensor, ...],
    span: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    biases: tuple[jax.Array | None, ...] | None = None,
    add: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """rms_norm(x[T, K]) @ w_i.T + bias_i (+ add, with one w) -> tuple of f32[T, N_i]."""
    _require(add is None or len(ws) == 1, "add needs exactly one weight")
    widths = [w.shape[0] for w in ws]
    return _call("matmul", x, ws, span, widths, _Extras(norm, eps, biases, add))


def gated(
    x: jax.Array,
    w_gate: QuantizedTensor,
    w_up: QuantizedTensor,
    span: jax.Array,
    *,
    norm: jax.Array | None,
    eps: float,
    activation: str,
) -> jax.Array:
    """activation(rms_norm(x) @ gate.T) * (rms_norm(x) @ up.T) -> f32[T, F]."""
    names = tuple(ACTIVATIONS)
    _require(activation in names, f"activation is {activation!r}; it can be {', '.join(names)}")
    n_rows = w_gate.shape[0]
    _require(
        w_up.shape[0] == n_rows,
        f"gate has {n_rows} rows and up has {w_up.shape[0]}; they must agree",
    )
    extras = _Extras(norm, eps, activation=names.index(activation))
    return _call("gated", x, (w_gate, w_up), span, [n_rows], extras)[0]


def add_norm(
    x: jax.Array, y: jax.Array, span: jax.Array, *, norm: jax.Array, eps: float
) -> jax.Array:
    """x + rms_norm(y, norm, eps) -> f32[T, D]."""
    _check_f32("x", x, x.shape)
    _check_f32("y", y, x.shape)
    _check_f32("norm", norm, x.shape[1:])
    _check_span(span)
    call = jax.ffi.ffi_call(norms.target(tier()), jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x, y, span, norm, params=np.array([_float_bits(eps)], np.int64))
