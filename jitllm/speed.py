"""How fast an engine is on this machine, beside the limit the machine sets.

Decoding reads every weight once a token, so its rate is bound by how fast memory can be read; that
is measured in the same rounds, because timings on shared machines drift within the hour.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jitllm.engine import Engine
    from jitllm.session import Session

Progress = Callable[[str, int, int], None]
"""progress(what, done_rounds, total_rounds)."""

_READ_BYTES = 256 << 20
_READ_PASSES = 3


@dataclass(frozen=True)
class Speed:
    """Medians over the rounds; rates in tokens a second, bandwidths in 10^9 bytes a second."""

    prefill_tokens: int
    decode_tokens: int
    n_rounds: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    prefill_spread: tuple[float, float]
    """Slowest and fastest round."""
    decode_spread: tuple[float, float]
    weights_bytes: int
    """What a token reads of the model."""
    decode_gb_per_second: float
    """Of weights, while decoding."""
    memory_gb_per_second: float
    """What plain reading reached."""
    share_of_memory: float
    """Median over the rounds of the one over the other."""
    kernels: str


def speed(
    engine: "Engine",
    prefill_tokens: int = 512,
    decode_tokens: int = 128,
    n_rounds: int = 3,
    n_threads: int = 2,
    progress: Progress | None = None,
) -> Speed:
    """Prefill and decode rates of `engine`, and the memory's, in `n_rounds` rounds after a warm-up.

    A round reads a prompt of `prefill_tokens` into an empty context and then, again from an empty
    one, decodes `decode_tokens`, as llama-bench does. The engine needs room for the larger of them.
    """
    weights_bytes = engine.memory_report().weights_bytes
    rounds: list[tuple[float, float, float]] = []
    with engine.session() as session:
        n_vocab = len(session.prefill([0]))
        prompt, reply = _ids(prefill_tokens, n_vocab), _ids(decode_tokens, n_vocab)
        for number in range(n_rounds + 1):
            prefill, decode = _prefill_rate(session, prompt), _decode_rate(session, reply)
            rounds.append((prefill, decode, memory_bandwidth(n_threads)))
            if progress:
                progress("measuring", number + 1, n_rounds + 1)
    prefills, decodes, memories = zip(*rounds[1:], strict=True)  # the first round compiles
    shares = [d * weights_bytes / m for d, m in zip(decodes, memories, strict=True)]
    decode = statistics.median(decodes)
    return Speed(
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        n_rounds=n_rounds,
        prefill_tokens_per_second=statistics.median(prefills),
        decode_tokens_per_second=decode,
        prefill_spread=(min(prefills), max(prefills)),
        decode_spread=(min(decodes), max(decodes)),
        weights_bytes=weights_bytes,
        decode_gb_per_second=decode * weights_bytes / 1e9,
        memory_gb_per_second=statistics.median(memories) / 1e9,
        share_of_memory=statistics.median(shares),
        kernels=engine.kernels,
    )


def memory_bandwidth(n_threads: int, n_bytes: int = _READ_BYTES) -> float:
    """Bytes a second that plain reading reaches: the best of a few passes over `n_bytes`, which
    should be larger than the caches. By the kernels' own threads where kernels are generated, else
    by `n_threads` of numpy's sums."""
    try:
        from jitllm.kernels.cpu.memory import Bandwidth

        measure = Bandwidth(n_bytes).measure
    except ImportError:
        parts = np.array_split(np.ones(n_bytes // 4, np.float32), n_threads)
        measure = partial(_sum_rate, parts)
    return max(measure() for _ in range(_READ_PASSES))


def _sum_rate(parts: Sequence[np.ndarray]) -> float:
    with ThreadPoolExecutor(len(parts)) as pool:
        start = time.perf_counter()
        list(pool.map(np.sum, parts))
        return sum(part.nbytes for part in parts) / (time.perf_counter() - start)


def _ids(count: int, n_vocab: int) -> list[int]:
    """Ids all over the vocabulary: a stride that is prime to any size of one in use."""
    return [(1 + 7919 * i) % n_vocab for i in range(count)]


def _prefill_rate(session: "Session", prompt: Sequence[int]) -> float:
    session.truncate(0)
    start = time.perf_counter()
    session.prefill(prompt)
    return len(prompt) / (time.perf_counter() - start)


def _decode_rate(session: "Session", reply: Sequence[int]) -> float:
    session.truncate(0)
    start = time.perf_counter()
    for token in reply:
        session.prefill([token])
    return len(reply) / (time.perf_counter() - start)
