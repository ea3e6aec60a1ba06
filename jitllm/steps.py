"""The compiled steps of one device: built once per signature, called many times.

Compiled ahead of time, so that the bytes XLA will allocate for a step are known, and in the
ledger, before it first runs. A signature is what a step specialises on: its blocks' static
descriptions, the types and places of their weights, and the shapes of the activations and caches.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jitllm.kernels.ops import Ops
from jitllm.model.block import run_block, run_head
from jitllm.model.config import BlockSpec, ModelConfig
from jitllm.model.kvcache import CacheTable, KVCache

SLABS = 4
"""Slabs of the head in one product: they share the norm and the quantised activations."""


@dataclass(frozen=True)
class Rows:
    """What the rows of a step share. On the host: a step takes small arrays to its own device in a
    tenth of the time of `device_put`."""

    ropes: tuple[np.ndarray, ...]
    """f32[T, 2, R/2] for each of the model's sets of frequencies."""
    span: np.ndarray
    """i32[2]: position of the first row, valid rows."""


@dataclass(frozen=True)
class Run:
    """Consecutive blocks that one step executes, and the slabs of the head if they end it."""

    signature: Hashable
    specs: tuple[BlockSpec, ...]
    weights: list[dict[str, Any]]
    head: list[Any]
    norm: jax.Array | None = None
    """The norm before the head, where there is one."""


class Steps:
    """The steps of one model on one device, by one set of operations."""

    def __init__(self, config: ModelConfig, ops: Ops, on_compile: Callable[[int], None]):
        """`on_compile` is told the bytes of activations of the largest step so far; a step that
        it raises for does not run."""
        self._config, self.ops, self._on_compile = config, ops, on_compile
        self._compiled: dict[Hashable, Any] = {}
        self._largest_bytes = 0

    @property
    def n_compiled(self) -> int:
        """How many different steps were built."""
        return len(self._compiled)

    def run(self, run: Run, x: jax.Array | np.ndarray, kvs: list[KVCache] | CacheTable, rows: Rows):
        """x[T, D] through the blocks of `run` -> (x, or logits f32[T, V] behind a head; caches).

        `kvs` holds the cache of each block, which are donated; or it is a table of those of several
        conversations, which are updated in place. x is not donated: who gave its weights a slot
        waits for it. Blocks of equal description are traced and lowered once.
        """
        args = (x, run.weights, kvs, rows.ropes, rows.span, run.head, run.norm)
        batch = isinstance(kvs, CacheTable)
        key = ("run", run.signature, x.shape, batch or kvs[0][0].shape)
        if key not in self._compiled:
            step = jax.jit(self._run_step(run.specs), donate_argnums=() if batch else 2)
            self._compile(key, step, args, (x, rows.ropes))
        return self._compiled[key](*args)

    def head(self, signature: Hashable, x, slabs: tuple, norm, span) -> tuple[jax.Array, ...]:
        """Logits f32[T, rows] of each of a few slabs of the output head."""
        args = (x, slabs, norm, span)
        key = ("head", signature, x.shape)
        if key not in self._compiled:
            self._compile(key, jax.jit(self._head_step), args, x)
        return self._compiled[key](*args)

    def look_up(self, table: jax.Array, ids: np.ndarray) -> jax.Array:
        """uint8[T, row bytes]: rows i32[T] of a table uint8[V, row bytes]."""
        key = ("look up", ids.shape)
        if key not in self._compiled:
            rows = jax.jit(lambda table, ids: jnp.take(table, ids, axis=0))
            self._compile(key, rows, (table, ids), ids)
        return self._compiled[key](table, ids)

    def _head_step(self, x, slabs, norm, span):
        config = self._config
        return run_head(x, slabs, norm, span, config.norm_eps, config.final_softcap, self.ops)

    def _run_step(self, specs: tuple[BlockSpec, ...]) -> Callable:
        def block_step(spec: BlockSpec) -> Callable:
            def step(x, weights, kv, rope, span):
                return run_block(x, weights, kv, rope, span, spec, self.ops)

            return jax.jit(step) if len(specs) > 1 else step

        steps = {spec: block_step(spec) for spec in set(specs)}

        def run(x, weights, kvs, ropes, span, head, norm):
            batch = isinstance(kvs, CacheTable)
            if batch:
                kvs = [replace(kvs, block=np.int32(i)) for i in range(len(specs))]
            after = []
            for spec, w, kv in zip(specs, weights, kvs, strict=True):
                x, kv = steps[spec](x, w, kv, ropes[spec.rope], span)
                after.append(kv)
            if head:
                groups = [head[at : at + SLABS] for at in range(0, len(head), SLABS)]
                logits = [self._head_step(x, tuple(slabs), norm, span) for slabs in groups]
                x = jnp.concatenate([y for ys in logits for y in ys], axis=1)
            return x, None if batch else after

        return run

    def _compile(self, key: Hashable, step: Any, args: tuple, given: Any) -> None:
        """`given` are the arguments that are made for each call and have no place of their own."""
        compiled = step.lower(*args).compile()
        memory = compiled.memory_analysis()
        own = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        largest = max(self._largest_bytes, own + sum(x.nbytes for x in jax.tree.leaves(given)))
        self._on_compile(largest)
        self._compiled[key], self._largest_bytes = compiled, largest
