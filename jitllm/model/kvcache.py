"""The KV cache: a pair of arrays per block, donated to each step and updated in place.

Keys lie in tiles of 16 positions, [K, S/16, H, 16], so that 16 scores add up without a horizontal
sum; values lie as [K, S, H]. S is the capacity, a multiple of 16.
"""

import jax
import jax.numpy as jnp

from jitllm.kernels.spec import AttentionSpec

KVCache = tuple[jax.Array, jax.Array]
"""A block's keys and values."""
DTYPES = {"f16": jnp.float16, "f32": jnp.float32}
TILE = 16


def capacity(max_seq: int) -> int:
    """Positions a cache for `max_seq` tokens holds."""
    return -(-max_seq // TILE) * TILE


def kv_bytes(spec: AttentionSpec, max_seq: int, dtype: str) -> int:
    """Bytes of one block's cache."""
    per_token = 2 * spec.n_kv_heads * spec.head_dim
    return per_token * capacity(max_seq) * jnp.dtype(DTYPES[dtype]).itemsize


def empty_cache(spec: AttentionSpec, max_seq: int, dtype: str, device: jax.Device) -> KVCache:
    """One block's cache on `device`, zeroed."""
    heads, size, seq = spec.n_kv_heads, spec.head_dim, capacity(max_seq)
    with jax.default_device(device):
        return (
            jnp.zeros((heads, seq // TILE, size, TILE), DTYPES[dtype]),
            jnp.zeros((heads, seq, size), DTYPES[dtype]),
        )
