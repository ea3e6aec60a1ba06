"""Time of the attention kernel: python -m benchmarks.attention [-r ROUNDS] [-threads N]

Decode is measured as a model does it: one step calls the kernel once per block, each block with its
own caches, filled to the context. GB/s are the bytes of keys and values a token reads. Prefill is
512 tokens of a prompt; GFLOP/s count the two products over the keys each row sees.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jitllm.kernels.cpu import threads
from jitllm.kernels.cpu.attention import attention
from jitllm.kernels.spec import AttentionSpec

# name -> (spec, blocks of the model)
MODELS = {
    "SmolLM2-135M 9/3/64": (AttentionSpec(9, 3, 64, 64, scale=0.125), 30),
    "gemma-3-270m 4/1/256 window 512": (
        AttentionSpec(4, 1, 256, 256, "neox", scale=1 / 16, window=512),
        18,
    ),
    "llama 1B 32/8/64": (AttentionSpec(32, 8, 64, 64, scale=0.125), 16),
    "multi-head 32/32/128": (AttentionSpec(32, 32, 128, 128, scale=0.09), 4),
}
CONTEXTS = (100, 1000, 4000)


def caches(spec: AttentionSpec, n_blocks: int, capacity: int, dtype: str) -> list:
    """One pair of filled caches per block."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((spec.n_kv_heads, capacity // 16, spec.head_dim, 16), np.float32)
    v = rng.standard_normal((spec.n_kv_heads, capacity, spec.head_dim), np.float32)
    return [(jnp.array(k, dtype), jnp.array(v, dtype)) for _ in range(n_blocks)]


def make_step(spec: AttentionSpec) -> Callable:
    """A jitted step: every block attends, and hands its result on as the next one's queries."""

    def step(x, kvs, rope, span):
        width = spec.n_kv_heads * spec.head_dim
        new = []
        for kv in kvs:
            x, kv = attention(x, x[:, :width], x[:, -width:], kv, rope, span, spec)
            new.append(kv)
        return x, new

    return jax.jit(step, donate_argnums=1)


def seconds(step: Callable, kvs: list, spec: AttentionSpec, pos: int, n: int, rounds: int) -> tuple:
    """(median seconds of one step over `n` rows at `pos`, the caches)."""
    rng = np.random.default_rng(1)
    x = jnp.array(rng.standard_normal((n, spec.n_heads * spec.head_dim), np.float32))
    rope = jnp.array(rng.standard_normal((n, 2, spec.rope_dim // 2), np.float32))
    span, times = jnp.array([pos, n], jnp.int32), []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        out, kvs = step(x, kvs, rope, span)
        out.block_until_ready()
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:])), kvs


def keys_seen(spec: AttentionSpec, pos: int, n: int) -> int:
    """Keys that the rows at pos .. pos + n - 1 see together."""
    window = spec.window or pos + n
    return sum(min(p + 1, window) for p in range(pos, pos + n))


def report(name: str, dtype: str, rounds: int) -> None:
    """Print one model's lines."""
    spec, n_blocks = MODELS[name]
    step, kvs = make_step(spec), caches(spec, n_blocks, 4096, dtype)
    for context in CONTEXTS:
        s, kvs = seconds(step, kvs, spec, context, 1, rounds)
        size = keys_seen(spec, context, 1) * spec.n_kv_heads * spec.head_dim * 2
        rate = size * jnp.dtype(dtype).itemsize * n_blocks / s / 1e9
        print(
            f"{name:32} {dtype:8} 1 token at {context:4}: {s / n_blocks * 1e6:8.1f} us a call"
            f" {s * 1e3:7.2f} ms a token {rate:6.1f} GB/s"
        )
    for pos in (0, 3500):
        s, kvs = seconds(step, kvs, spec, pos, 512, max(3, rounds // 20))
        flops = keys_seen(spec, pos, 512) * spec.n_heads * spec.head_dim * 4 * n_blocks
        print(
            f"{name:32} {dtype:8} 512 tokens at {pos:4}: {s / n_blocks * 1e3:6.2f} ms a call"
            f" {flops / s / 1e9:6.0f} GFLOP/s"
        )


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("-r", "--rounds", type=int, default=100)
    parser.add_argument("-threads", type=int, default=None)
    parser.add_argument("-models", default="", help="part of the names to run")
    parser.add_argument("-kv", nargs="+", default=["float16"], choices=["float16", "float32"])
    options = parser.parse_args()
    print(f"{threads.set_threads(options.threads)} threads")
    for name in MODELS:
        for dtype in options.kv:
            if options.models in name:
                report(name, dtype, options.rounds)


if __name__ == "__main__":
    main()
