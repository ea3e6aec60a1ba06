"""The KV cache: a pair of arrays per block, donated to each step and updated in place.

Keys lie in tiles of 16 positions, [K, S/16, H, 16], so that 16 scores add up without a horizontal
sum; values lie as [K, S, H]. S is the capacity, a multiple of 16.

A step of several conversations takes their caches by address, in a table. As arguments they would
be 2 x blocks x rows arrays, whose handling costs 0.6 ms a step for eight rows of SmolLM2, and every
mix of capacities would be a step of its own to compile.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

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


class KVCaches(list[KVCache]):
    """The caches of one conversation, block by block, and where they lie in memory."""

    _addresses: np.ndarray | None = None

    def __setitem__(self, block, kv) -> None:
        self._addresses = None
        super().__setitem__(block, kv)

    @property
    def addresses(self) -> np.ndarray:
        """i64[blocks, 3]: keys, values and capacity of each; waits until they are written."""
        if self._addresses is None:
            jax.block_until_ready(list(self))
            rows = [[*(x.unsafe_buffer_pointer() for x in kv), kv[1].shape[1]] for kv in self]
            self._addresses = np.array(rows, np.int64)
        return self._addresses


@partial(jax.tree_util.register_dataclass, data_fields=["caches", "block", "positions"],
         meta_fields=["dtype"])  # fmt: skip
@dataclass(frozen=True)
class CacheTable:
    """Where a block finds the caches of B conversations, and where in them a token each goes."""

    caches: jax.Array | np.ndarray
    """i32[blocks, B, 6]: `KVCaches.addresses` of each row, as pairs of words."""
    block: jax.Array | np.ndarray
    """i32[]: the row of `caches` that is the block's."""
    positions: jax.Array | np.ndarray
    """i32[B]."""
    dtype: str

    @classmethod
    def of(
        cls, kvs: Sequence[KVCaches], positions: Sequence[int], n_rows: int, blocks: slice
    ) -> "CacheTable":
        """The table of some blocks, with empty rows up to `n_rows`; for the first of them."""
        addresses = np.zeros((blocks.stop - blocks.start, n_rows, 3), np.int64)
        for row, caches in enumerate(kvs):
            addresses[:, row] = caches.addresses[blocks]
        at = np.zeros(n_rows, np.int32)
        at[: len(positions)] = positions
        dtype = str(kvs[0][blocks.start][0].dtype)
        return cls(addresses.view(np.int32), np.int32(0), at, dtype)


SNAPSHOT_TOKENS = 128
"""Snapshots hold whole runs of so many positions: one compiled copy serves every length."""


def _memory(x: jax.Array) -> np.ndarray | None:
    """The bytes of `x` themselves, where the host has them. They may be written while no step runs
    and are gone with `x`; numpy's own view would be a reference, for which a donation copies."""
    if next(iter(x.devices())).platform != "cpu":
        return None
    address = jax.block_until_ready(x).unsafe_buffer_pointer()
    buffer = (ctypes.c_uint8 * x.nbytes).from_address(address)
    return np.frombuffer(buffer, x.dtype).reshape(x.shape)


def copy_out(kv: KVCache, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The first positions of a cache, at least `n_tokens`, on the host."""
    n = min(-(-n_tokens // SNAPSHOT_TOKENS) * SNAPSHOT_TOKENS, kv[1].shape[1])
    k, v = ((x if (m := _memory(x)) is None else m) for x in kv)
    return np.array(k[:, : n // TILE]), np.array(v[:, :n])


def copy_in(kv: KVCache, k: np.ndarray, v: np.ndarray) -> KVCache:
    """The cache with its first positions replaced by what `copy_out` gave; kv is used up."""
    memory = [_memory(x) for x in kv]
    if memory[0] is None:
        return _copy_in(kv, k, v)
    for target, source in zip(memory, (k, v), strict=True):
        target[:, : source.shape[1]] = source
    return kv


@partial(jax.jit, donate_argnums=0)
def _copy_in(kv: KVCache, k: jax.Array, v: jax.Array) -> KVCache:
    zero = (0, 0, 0)
    return (
        jax.lax.dynamic_update_slice(kv[0], k, (*zero, 0)),
        jax.lax.dynamic_update_slice(kv[1], v, zero),
    )


def resized(kv: KVCache, max_seq: int) -> tuple[np.ndarray, np.ndarray]:
    """A whole cache for `max_seq` tokens, on the host: `kv` with room behind it, or cut off."""
    k, v = (np.asarray(array) for array in kv)
    seq = capacity(max_seq)
    k, v = k[:, : seq // TILE], v[:, :seq]
    more = seq - v.shape[1]
    return (
        np.pad(k, ((0, 0), (0, more // TILE), (0, 0), (0, 0))),
        np.pad(v, ((0, 0), (0, more), (0, 0))),
    )
