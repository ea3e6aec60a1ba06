"""The transformer block and the output head: pure functions of activations, weights and KV.

Weights are dicts under the names of GGUF (`attn_q`, `ffn_down`, bias `attn_q_bias`); a tensor that
the model does not have is absent. `ops` says who carries the operations out.
Letters: T rows, D width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jitllm.kernels.ops import Ops
from jitllm.model.config import BlockSpec
from jitllm.model.kvcache import KVCache

BlockWeights = dict[str, Any]
Caches = tuple[KVCache, ...]


def _residual(x, y, w, post_norm, span, spec: BlockSpec, ops: Ops) -> jax.Array:
    """x + y @ w, the product normalised first where the model has such a norm."""
    if post_norm is None:
        return ops.matmul(y, (w,), span, add=x)[0]
    return ops.add_norm(x, ops.matmul(y, (w,), span)[0], span, norm=post_norm, eps=spec.norm_eps)


def _attend(qkv, w, kvs: Caches, rope, spans, spec: BlockSpec, ops: Ops):
    """Attention of each group of rows over its own cache -> (f32[T, N*H], caches)."""
    norms = {"q_norm": w.get("attn_q_norm"), "k_norm": w.get("attn_k_norm")}
    rows = rope.shape[0] // len(kvs)
    outs, caches = [], []
    for g, (kv, span) in enumerate(zip(kvs, spans, strict=True)):
        own = slice(g * rows, (g + 1) * rows)
        q, k, v = (x[own] for x in qkv)
        y, kv = ops.attention(q, k, v, kv, rope[own], span, spec.attention, **norms)
        outs.append(y)
        caches.append(kv)
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs), tuple(caches)


def block(x, w: BlockWeights, kvs: Caches, rope, span, spans, spec: BlockSpec, ops: Ops):
    """x[T, D] through one block: attention, then the gated feed-forward, each added to x.

    The rows are len(kvs) groups of equal size, each with a cache and a span of its own; `span`
    says how many of all the rows are valid.
    """
    qkv = ("attn_q", "attn_k", "attn_v")
    biases = tuple(w.get(f"{name}_bias") for name in qkv)
    with jax.named_scope("attention"):
        projected = ops.matmul(
            x,
            tuple(w[name] for name in qkv),
            span,
            norm=w["attn_norm"],
            eps=spec.norm_eps,
            biases=biases if any(b is not None for b in biases) else None,
        )
        y, kvs = _attend(projected, w, kvs, rope, spans, spec, ops)
        x = _residual(x, y, w["attn_output"], w.get("post_attention_norm"), span, spec, ops)
    with jax.named_scope("ffn"):
        y = ops.gated(
            x,
            w["ffn_gate"],
            w["ffn_up"],
            span,
            norm=w["ffn_norm"],
            eps=spec.norm_eps,
            activation=spec.activation,
        )
        return _residual(x, y, w["ffn_down"], w.get("post_ffw_norm"), span, spec, ops), kvs


def _row(x: jax.Array, t: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, t, 1)


def run_block(x, w: BlockWeights, kvs: Caches, rope, span, spans, spec: BlockSpec, ops: Ops):
    """x[T, D] through one block for any `ops`: those that take one row are looped over the rows.

    Those take one group of rows at a time as well.
    """
    w = {name: ops.prepare(tensor) for name, tensor in w.items()}
    if not ops.one_row:
        return block(x, w, kvs, rope, span, spans, spec, ops)

    def step(t, carry):
        x, kvs = carry
        at = jnp.stack([span[0] + t, jnp.int32(1)])
        y, kvs = block(_row(x, t), w, kvs, _row(rope, t), at, (at,), spec, ops)
        return jax.lax.dynamic_update_slice_in_dim(x, y, t, 0), kvs

    # The bound is dynamic: XLA then neither unrolls nor respecialises, so that every row of every
    # chunk goes through the same instructions.
    return jax.lax.fori_loop(0, span[1], step, (x, kvs))


def run_head(
    x, slabs: tuple[Any, ...], norm, span, eps: float, softcap: float, ops: Ops
) -> tuple[jax.Array, ...]:
    """Logits f32[T, rows of w] of x[T, D] for each slab w of the output head."""
    slabs = tuple(ops.prepare(w) for w in slabs)

    def logits(x, span):
        ys = ops.matmul(x, slabs, span, norm=norm, eps=eps)
        return tuple(softcap * jnp.tanh(y / softcap) if softcap else y for y in ys)

    if not ops.one_row:
        return logits(x, span)

    def step(t, outs):
        ys = logits(_row(x, t), jnp.stack([span[0] + t, jnp.int32(1)]))
        pairs = zip(outs, ys, strict=True)
        return tuple(jax.lax.dynamic_update_slice_in_dim(out, y, t, 0) for out, y in pairs)

    empty = tuple(jnp.zeros((x.shape[0], w.shape[0]), jnp.float32) for w in slabs)
    return jax.lax.fori_loop(0, span[1], step, empty)
