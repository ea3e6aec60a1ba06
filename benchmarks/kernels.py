"""The product kernels by weight type, next to what memory gives in the same run.

    python -m benchmarks.kernels [--types Q4_K,Q8_0] [-k 2048] [-r 9] [--threads N] [--tier TIER]

One token: a chain of different matrices, larger together than the caches, read once each; GB/s of
weights, and the ratio to a plain read of memory by the same threads, taken in turn with it: the
median of the pairs. 512 tokens: billions of operations a second (a multiplication and an addition
count as two). Weights are random codes with small scales; no model is needed.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jitllm.kernels.cpu import ops, threads
from jitllm.kernels.cpu.compile import tier
from jitllm.kernels.cpu.memory import Bandwidth
from jitllm.kernels.qtypes import QTYPES
from jitllm.kernels.tensor import QuantizedTensor

_ROWS = 4096
_CHAIN_BYTES = 512 << 20
_PROMPT = 512


def random_weight(qtype: str, n: int, k: int, rng: np.random.Generator) -> QuantizedTensor:
    """Random codes; the f16 fields of a block lie between 0.001 and 0.01."""
    q = QTYPES[qtype]
    if q.is_float:
        rows = (0.05 * rng.standard_normal((n, k))).astype(np.float32).view(np.uint8)
        rows = (
            rows.reshape(n, k, 4)[..., 4 - q.block_bytes :]
            if qtype != "F16"
            else (rows.view(np.float32).astype(np.float16).view(np.uint8))
        )
    else:
        rows = rng.integers(0, 256, (n, k // q.group, q.block_bytes), dtype=np.uint8)
        at = 0
        for field in q.fields:
            if field.size == 2:
                scale = rng.uniform(0.001, 0.01, rows.shape[:2]).astype(np.float16)
                rows[..., at : at + 2] = scale[..., None].view(np.uint8)
            at += field.n_bytes
    tiles = q.pack(rows.reshape(n, q.row_bytes(k)), k)
    return QuantizedTensor(jnp.asarray(tiles), qtype, (n, k))


def seconds(call: Callable[[], jax.Array]) -> float:
    """Of one call, to the end."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def chain(ws: list[QuantizedTensor], x: jax.Array) -> jax.Array:
    """One token through all the matrices, each fed by the one before."""
    span = jnp.array([0, 1], jnp.int32)
    for w in ws:
        (y,) = ops.matmul(x, (w,), span)
        x = jnp.resize(y, x.shape) * 1e-2
    return x


def one_token(w: QuantizedTensor, memory: Bandwidth, rounds: int) -> tuple[float, float]:
    """(GB/s of weights, the ratio to a plain read): medians."""
    copies = max(2, _CHAIN_BYTES // w.data.nbytes)
    ws = [QuantizedTensor(jnp.array(w.data), w.qtype, w.shape) for _ in range(copies)]
    x, step = jnp.ones((1, w.shape[1])), jax.jit(chain)
    jax.block_until_ready(step(ws, x))
    pairs = [
        (copies * w.data.nbytes / seconds(lambda: step(ws, x)), memory.measure())
        for _ in range(rounds)
    ]
    rate = statistics.median(rate for rate, _ in pairs)
    return rate / 1e9, statistics.median(rate / plain for rate, plain in pairs)


def prompt(w: QuantizedTensor, rounds: int) -> float:
    """GOPS of 512 tokens, the median."""
    n, k = w.shape
    x = jnp.asarray(np.random.default_rng(2).standard_normal((_PROMPT, k), dtype=np.float32))
    span = jnp.array([0, _PROMPT], jnp.int32)
    step = jax.jit(lambda w, x: ops.matmul(x, (w,), span)[0])
    jax.block_until_ready(step(w, x))
    times = [seconds(lambda: step(w, x)) for _ in range(rounds)]
    return 2 * n * k * _PROMPT / statistics.median(times) / 1e9


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--types", default=",".join(QTYPES), help="weight types, comma-separated")
    parser.add_argument("-k", type=int, default=2048, help="columns, a multiple of 256")
    parser.add_argument("-r", "--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tier", default=None, help="a tier below the one of this CPU")
    options = parser.parse_args()
    if options.tier:
        os.environ["JITLLM_CPU_TIER"] = options.tier
    n_threads = threads.set_threads(options.threads)
    memory, rng = Bandwidth(), np.random.default_rng(0)
    print(f"{tier().name}, {n_threads} threads, plain read {memory.measure() / 1e9:.1f} GB/s")
    print(f"{'type':6} {'1 token':>12} {'of a read':>10} {f'{_PROMPT} tokens':>13}")
    for qtype in options.types.split(","):
        w = random_weight(qtype, _ROWS, options.k, rng)
        rate, share = one_token(w, memory, options.rounds)
        gops = prompt(w, options.rounds)
        print(f"{qtype:6} {rate:7.1f} GB/s {share:10.0%} {gops:8.0f} GOPS", flush=True)


if __name__ == "__main__":
    main()
