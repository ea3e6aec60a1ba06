"""The compiled steps of one device: built once per signature, called many times.

Compiled ahead of time, so that the bytes XLA will allocate for a step are known, and in the
ledger, before it first runs. A signature is what a step specialises on: the kind of step, the rows
it takes, the static description of its blocks and the types and shapes of their weights.
"""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jitllm.kernels.ops import Ops
from jitllm.model.block import run_block, run_head
from jitllm.model.config import BlockSpec, ModelConfig

KVCache = tuple[jax.Array, jax.Array]


class Steps:
    """`block`, `head` and `token` steps for one model and one set of operations."""

    def __init__(self, config: ModelConfig, ops: Ops, on_compile: Callable[[int], None]):
        """`on_compile` is told the bytes of temporaries of the largest step so far."""
        self._config, self._ops, self._on_compile = config, ops, on_compile
        self._compiled: dict[Hashable, Any] = {}
        self._largest_bytes = 0

    @property
    def n_compiled(self) -> int:
        """How many different steps were built."""
        return len(self._compiled)

    def block(self, signature: Hashable, spec: BlockSpec, x, weights, kv: KVCache, rope, span):
        """x[T, D] through one block -> (x, kv); x and kv are donated."""
        args = (x, weights, kv, rope, span)
        key = ("block", signature, spec, x.shape, kv[0].shape)
        if key not in self._compiled:
            self._compile(key, jax.jit(self._block_step(spec), donate_argnums=(0, 2)), args)
        return self._compiled[key](*args)

    def head(self, signature: Hashable, x, weight, norm, span) -> jax.Array:
        """Logits f32[T, rows] of one slab of the output head."""
        args = (x, weight, norm, span)
        key = ("head", signature, x.shape)
        if key not in self._compiled:
            self._compile(key, jax.jit(self._head_step), args)
        return self._compiled[key](*args)

    def token(self, x, blocks: list, kvs: list[KVCache], ropes: list, span, head: list, norm):
        """x[1, D] through all blocks and the whole head in one step -> (logits f32[V], kvs).

        kvs are donated. Blocks of equal signature are traced and lowered once.
        """
        args = (x, blocks, kvs, ropes, span, head, norm)
        key = ("token", kvs[0][0].shape)
        if key not in self._compiled:
            self._compile(key, jax.jit(self._token_step, donate_argnums=(2,)), args)
        return self._compiled[key](*args)

    def _head_step(self, x, weight, norm, span):
        config = self._config
        return run_head(x, weight, norm, span, config.norm_eps, config.final_softcap, self._ops)

    def _token_step(self, x, blocks, kvs, ropes, span, head, norm):
        steps = {spec: jax.jit(self._block_step(spec)) for spec in set(self._config.blocks)}
        new_kvs = []
        for spec, weights, kv in zip(self._config.blocks, blocks, kvs, strict=True):
            x, kv = steps[spec](x, weights, kv, ropes[spec.rope], span)
            new_kvs.append(kv)
        logits = [self._head_step(x, slab, norm, span)[0] for slab in head]
        return jnp.concatenate(logits), new_kvs

    def _block_step(self, spec: BlockSpec) -> Callable:
        return lambda x, w, kv, rope, span: run_block(x, w, kv, rope, span, spec, self._ops)

    def _compile(self, key: Hashable, step: Any, args: tuple) -> None:
        compiled = step.lower(*args).compile()
        self._compiled[key] = compiled
        memory = compiled.memory_analysis()
        own = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        self._largest_bytes = max(self._largest_bytes, own)
        self._on_compile(self._largest_bytes)
