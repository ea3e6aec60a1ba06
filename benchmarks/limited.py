"""jitllm and llama.cpp with the same limit on the whole process's memory, as `benchmarks.paging
--cgroup` runs them: python -m benchmarks.limited ENGINE MODEL N, inside the cgroup.

The process prints tokens a second of decoding N tokens, or of as many as a minute gives.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jitllm.units import format_size
from tests.cgroups import inside, memory_group

_WARM_TOKENS, _MOST_S = 2, 60.0
_N_CTX = 64


def jitllm(model: str) -> Callable[[int], object]:
    """A step of jitllm with its automatic budget."""
    from jitllm import Engine

    engine = Engine.open(model, devices="cpu", max_seq=_N_CTX)
    session = engine.session()
    return lambda token: session.prefill([token])


def llamacpp(model: str, repack: bool) -> Callable[[int], object]:
    """A step of llama.cpp with mmap; `repack` is its default."""
    from llama_cpp import Llama, llama_cpp

    defaults = llama_cpp.llama_model_default_params

    def params() -> object:
        chosen = defaults()
        chosen.use_extra_bufts = repack
        return chosen

    llama_cpp.llama_model_default_params = params
    llama = Llama(model, n_ctx=_N_CTX, verbose=False)
    return lambda token: llama.eval([token])


ENGINES: dict[str, Callable[[str], Callable[[int], object]]] = {
    "jitllm": jitllm,
    "llama.cpp": lambda model: llamacpp(model, True),
    "llama.cpp --no-repack": lambda model: llamacpp(model, False),
}


def decode_rate(step: Callable[[int], object], n_tokens: int) -> float:
    """Tokens a second."""
    for token in range(1, 1 + _WARM_TOKENS):
        step(token)
    start = time.perf_counter()
    for done in range(1, n_tokens + 1):
        step(7 + done)
        seconds = time.perf_counter() - start
        if seconds > _MOST_S:
            break
    return done / seconds


def tokens_per_second(
    engine: str, python: str, model: Path, limit_bytes: int, n_tokens: int
) -> float | None:
    """Of one engine in a cgroup of its own, the model out of the page cache; None: it was killed
    or failed. NoCgroups where there can be none."""
    _drop_from_cache(model)
    with memory_group(limit_bytes) as group:
        command = [python, "-m", "benchmarks.limited", engine, str(model), str(n_tokens)]
        done = subprocess.run(inside(group, command), stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def compare(
    gguf: Path, container: Path, limits: Sequence[int], n_tokens: int, n_rounds: int
) -> list[dict[str, str]]:
    """A row of text for each limit, in per cent of the GGUF: medians of rounds that take turns."""
    rows = []
    for share in limits:
        limit_bytes = gguf.stat().st_size * share // 100
        rates: dict[str, list[float]] = {name: [] for name in ENGINES}
        for _ in range(n_rounds):
            for name, measured in rates.items():
                model = container if name == "jitllm" else gguf
                rate = tokens_per_second(name, sys.executable, model, limit_bytes, n_tokens)
                measured.append(rate or 0.0)
        medians = {name: statistics.median(measured) for name, measured in rates.items()}
        best = max(rate for name, rate in medians.items() if name != "jitllm")
        cells = {
            name: f"{rate:.2f} tokens/s" if rate else "fails" for name, rate in medians.items()
        }
        ratio = f"{medians['jitllm'] / best:.1f}" if best else ""
        rows.append({"limit": f"{share} %, {format_size(limit_bytes)}"} | cells | {"ratio": ratio})
    return rows


def _drop_from_cache(path: Path) -> None:
    """Cached pages are charged to whoever read them first: without this they would be free."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    name, model_path, count = sys.argv[1:]
    print(decode_rate(ENGINES[name](model_path), int(count)))
