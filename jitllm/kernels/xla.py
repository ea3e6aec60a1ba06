"""The portable operations, in plain JAX: the reference on the CPU, the path of every other device.

They see one token at a time (`Ops.one_row`): XLA picks its loops by shape, so a row's bits would
otherwise depend on how many rows share the call. Weights are dequantised first, once a call, which
is why this path is for correctness: 0.3-0.7 GB/s of weights on a CPU.
Letters: T rows (1 here), S positions, D, N heads, K key-value heads, H head size, R rotated values.
"""

import jax
import jax.numpy as jnp

from jitllm.kernels.qtypes import QTYPES
from jitllm.kernels.spec import AttentionSpec
from jitllm.kernels.tensor import QuantizedTensor

KVCache = tuple[jax.Array, jax.Array]


def dequantise(w: QuantizedTensor | jax.Array) -> jax.Array:
    """W as f32[N, K]; vectors pass through."""
    if isinstance(w, QuantizedTensor):
        return QTYPES[w.qtype].dequantise(w.data, *w.shape, xp=jnp)
    return w


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def matmul(x, ws, span, *, norm=None, eps=0.0, biases=None, add=None):
    """f32[1, K] times each W[N_i, K] transposed -> tuple of f32[1, N_i]; see `Ops.matmul`."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    ys = [jnp.dot(x, w.T, precision=jax.lax.Precision.HIGHEST) for w in ws]
    if biases is not None:
        ys = [y if bias is None else y + bias for y, bias in zip(ys, biases, strict=True)]
    return tuple(ys) if add is None else (ys[0] + add,)


_ACTIVATIONS = {"silu": jax.nn.silu, "gelu": lambda x: jax.nn.gelu(x, approximate=True)}


def gated(x, w_gate, w_up, span, *, norm, eps, activation):
    """activation(x @ gate) * (x @ up) -> f32[1, F]; see `Ops.gated`."""
    gate, up = matmul(x, (w_gate, w_up), span, norm=norm, eps=eps)
    return _ACTIVATIONS[activation](gate) * up


def add_norm(x, y, span, *, norm, eps):
    """x + rms_norm(y); see `Ops.add_norm`."""
    return x + rms_norm(y, norm, eps)


def rotate(x: jax.Array, rope: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Rotary embedding of x[heads, H] by rope[2, R/2], cosines and sines (Su et al. 2021)."""
    half = spec.rope_dim // 2
    rest = x[:, spec.rope_dim :]
    cos, sin = rope[0], rope[1]
    if spec.rope_style == "neox":
        a, b = x[:, :half], x[:, half : spec.rope_dim]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=1)
    pairs = x[:, : spec.rope_dim].reshape(-1, half, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return jnp.concatenate([turned.reshape(len(x), -1), rest], axis=1)


def attention(q, k, v, kv: KVCache, rope, span, spec: AttentionSpec, *, q_norm=None, k_norm=None):
    """One token's attention over the cache it is appended to; see `Ops.attention`."""
    n, heads, size = spec.n_heads, spec.n_kv_heads, spec.head_dim
    position = span[0]
    q, k, v = q.reshape(n, size), k.reshape(heads, size), v.reshape(heads, size)
    q = q if q_norm is None else rms_norm(q, q_norm, spec.norm_eps)
    k = k if k_norm is None else rms_norm(k, k_norm, spec.norm_eps)
    q, k = rotate(q, rope[0], spec), rotate(k, rope[0], spec)
    k_cache, v_cache = kv
    k_cache = k_cache.at[:, position // 16, :, position % 16].set(k.astype(k_cache.dtype))
    v_cache = v_cache.at[:, position].set(v.astype(v_cache.dtype))
    at = jnp.arange(v_cache.shape[1])
    seen = at <= position
    if spec.window:
        seen &= at > position - spec.window
    keys = k_cache.transpose(0, 1, 3, 2).reshape(heads, -1, size).astype(jnp.float32)
    values = jnp.where(seen[:, None], v_cache.astype(jnp.float32), 0.0)
    q = q.reshape(heads, n // heads, size)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("kgh,ksh->kgs", q, keys, precision=highest) * spec.scale
    if spec.softcap:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("kgs,ksh->kgh", weights, values, precision=highest)
    return out.reshape(1, n * size), (k_cache, v_cache)
