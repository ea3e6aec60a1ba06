"""What a block is made of: five operations, and the one table of who carries them out.

All activations are f32. `span` is i32[2], the position of the first row and how many of the T rows
are valid; the others are left unspecified. A row's result depends on nothing but that row and the
tokens before it: not on T, its index or its neighbours, bit for bit.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from jitllm.errors import UsageError


@dataclass(frozen=True)
class Ops:
    """One implementation of the operations.

    matmul(x[T, K], ws, span, *, norm=None, eps=0.0, biases=None, add=None) -> tuple of f32[T, N_i]
        rms_norm(x) @ w_i.T + bias_i (+ add, with one w only).
    gated(x[T, K], w_gate, w_up, span, *, norm, eps, activation) -> f32[T, F]
        activation(gate) * up, both of rms_norm(x); activation is `silu` or `gelu` (tanh form).
    attention(q[T, N*H], k[T, K*H], v[T, K*H], kv, rope[T, 2, R/2], span, spec, *, q_norm, k_norm)
        -> (f32[T, N*H], kv): head norms, rotation, append to the cache, causal attention.
    decode_attention(q[B, N*H], k, v, caches, block, rope, positions, span, spec, dtype, *, q_norm,
        k_norm) -> f32[B, N*H]: the same for a token each of B conversations, whose caches are
        given by address and updated in place.
    add_norm(x[T, D], y[T, D], span, *, norm, eps) -> x + rms_norm(y).
    """

    name: str
    matmul: Callable[..., Any]
    gated: Callable[..., Any]
    attention: Callable[..., Any]
    add_norm: Callable[..., Any]
    decode_attention: Callable[..., Any] | None
    """None where operations take one row: there is nothing to gain by a batch."""
    prepare: Callable[[Any], Any]
    """Applied to a block's weights inside the step, before its rows."""
    one_row: bool
    """The operations take T = 1; a step loops over its rows."""


def _xla() -> Ops:
    from jitllm.kernels import xla

    return Ops(
        "xla",
        xla.matmul,
        xla.gated,
        xla.attention,
        xla.add_norm,
        None,
        xla.dequantise,
        one_row=True,
    )


def _cpu() -> Ops:
    from jitllm.kernels.cpu import attention, ops

    return Ops(
        "cpu",
        ops.matmul,
        ops.gated,
        attention.attention,
        ops.add_norm,
        attention.decode_attention,
        prepare=lambda w: w,
        one_row=False,
    )


_TABLE = {"xla": _xla, "cpu": _cpu}


@cache
def ops(name: str) -> Ops:
    """The implementation called `name`: `xla` (portable) or `cpu` (generated for this CPU)."""
    return _TABLE[name]()


def choose(platform: str) -> tuple[Ops, str]:
    """The implementation for a JAX platform, and what it is: the tier it was generated for, or why
    it is the portable one.

    `JITLLM_KERNELS=xla` asks for the portable one; so does a machine the generator does not know.
    """
    asked = os.environ.get("JITLLM_KERNELS") or "auto"
    if asked not in ("auto", *_TABLE):
        raise UsageError(f"JITLLM_KERNELS is {asked!r}; it can be auto, {', '.join(_TABLE)}")
    if asked == "xla":
        return ops("xla"), "portable XLA (JITLLM_KERNELS=xla)"
    if platform != "cpu":
        return ops("xla"), f"portable XLA (no generated kernels for {platform})"
    try:
        from jitllm.kernels.cpu.compile import tier

        return ops("cpu"), f"generated for {tier().name}"
    except ImportError as error:
        return ops("xla"), f"portable XLA ({error})"


def set_threads(n: int | None) -> None:
    """How many threads the generated kernels share their work among; None: the physical cores."""
    if n is not None and n < 1:
        raise UsageError(f"threads is {n}; it has to be 1 or more")
    try:
        from jitllm.kernels.cpu.threads import set_threads as set_team
    except ImportError:  # without the generator XLA alone decides
        return
    set_team(n)
