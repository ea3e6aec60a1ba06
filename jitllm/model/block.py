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
from jitllm.model.kvcache import CacheTable, KVCache

BlockWeights = dict[str, Any]
Caches = KVCache | CacheTable
"""The cache of one conversation, or where those of several are."""


def _residual(x, y, w, post_norm, span, spec: BlockSpec, ops: Ops) -> jax.Array:
    """x + y @ w, the product normalised first where the model has such a norm."""
    if post_norm is None:
        return ops.matmul(y, (w,), span, add=x)[0]
    return ops.add_norm(x, ops.matmul(y, (w,), span)[0], span, norm=post_norm, eps=spec.norm_eps)


def _attend(qkv, w, kv: Caches, rope, span, spec: BlockSpec, ops: Ops):
    """Attention of each row over its conversation's cache -> (f32[T, N*H], kv)."""
    norms = {"q_norm": w.get("attn_q_norm"), "k_norm": w.get("attn_k_norm")}
    if not isinstance(kv, CacheTable):
        return ops.attention(*qkv, kv, rope, span, spec.attention, **norms)
    where = (kv.caches, kv.block, rope, kv.positions, span)
    return ops.decode_attention(*qkv, *where, spec.attention, kv.dtype, **norms), kv


def block(x, w: BlockWeights, kv: Caches, rope, span, spec: BlockSpec, ops: Ops):
    """x[T, D] through one block: attention, then the gated feed-forward, each added to x.

    The rows are consecutive tokens of one conversation, or a token each of several; `span` says
    how many are valid. -> (x, kv)
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
        y, kv = _attend(projected, w, kv, rope, span, spec, ops)
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
        return _residual(x, y, w["ffn_down"], w.get("post_ffw_norm"), span, spec, ops), kv


def _row(x: jax.Array, t: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, t, 1)


def run_block(x, w: BlockWeights, kv: Caches, rope, span, spec: BlockSpec, ops: Ops):
    """x[T, D] through one block for any `ops`: those that take one row are looped over the rows,
    which belong to one conversation then."""
    w = {name: ops.prepare(tensor) for name, tensor in w.items()}
    if not ops.one_row:
        return block(x, w, kv, rope, span, spec, ops)

    def step(t, carry):
        x, kv = carry
        at = jnp.stack([span[0] + t, jnp.int32(1)])
        y, kv = block(_row(x, t), w, kv, _row(rope, t), at, spec, ops)
        return jax.lax.dynamic_update_slice_in_dim(x, y, t, 0), kv

    # The bound is dynamic: XLA then neither unrolls nor respecialises, so that every row of every
    # chunk goes through the same instructions.
    return jax.lax.fori_loop(0, span[1], step, (x, kv))


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
