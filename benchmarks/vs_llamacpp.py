"""jitllm and llama.cpp on the same file and the same work, in turn, in one run.

    python -m benchmarks.vs_llamacpp MODEL.gguf [--rounds 7] [-p 512] [-n 128] [--json]

Each engine lives in a process of its own that is idle while the other works. A round is: prefill of
`-p` random tokens into an empty context by both, then `-n` single tokens from an empty context by
both, then a plain read of memory; which engine goes first alternates. Timings on shared machines
drift by a factor of two within an hour, so what counts is the ratio of each pair, its median and
its spread. Needs the `bench` extra. llama-cpp-python is built from source by pip, for this CPU;
where the kernel withholds AMX from processes although the CPU has it, build it with
CMAKE_ARGS='-DCMAKE_C_FLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" -DCMAKE_CXX_FLAGS=...'.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jitllm.kernels.cpu.threads import physical_cores

Work = Callable[[Sequence[int]], float]
"""Ids -> seconds."""


def jitllm_worker(model: str, n_ctx: int, n_threads: int) -> tuple[Work, Work, dict]:
    """(prefill, decode, facts) of jitllm, everything in memory."""
    from jitllm import Engine

    engine = Engine.open(model, max_seq=n_ctx, threads=n_threads, devices="cpu")
    session = engine.session()

    def prefill(ids: Sequence[int]) -> float:
        session.reset()
        start = time.perf_counter()
        session.prefill(ids)
        return time.perf_counter() - start

    def decode(ids: Sequence[int]) -> float:
        session.reset()
        start = time.perf_counter()
        for token in ids:
            session.prefill([token])
        return time.perf_counter() - start

    facts = {
        "n_vocab": engine.config.n_vocab,
        "weights_bytes": engine.memory_report().weights_bytes,
        "kernels": engine.kernels,
    }
    return prefill, decode, facts


def llamacpp_worker(model: str, n_ctx: int, n_threads: int) -> tuple[Work, Work, dict]:
    """(prefill, decode, facts) of llama.cpp with its defaults: mmap, repack, F16 KV."""
    import llama_cpp
    from llama_cpp import Llama

    llama = Llama(
        model,
        n_ctx=n_ctx,
        n_batch=512,
        n_ubatch=512,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        verbose=False,
    )

    def prefill(ids: Sequence[int]) -> float:
        llama.reset()
        start = time.perf_counter()
        llama.eval(ids)
        return time.perf_counter() - start

    def decode(ids: Sequence[int]) -> float:
        llama.reset()
        start = time.perf_counter()
        for token in ids:
            llama.eval([token])
        return time.perf_counter() - start

    return prefill, decode, {"version": llama_cpp.__version__}


def bandwidth_worker(model: str, n_ctx: int, n_threads: int) -> tuple[Work, Work, dict]:
    """Not an engine: seconds per gigabyte of a plain read of memory."""
    from jitllm.speed import memory_bandwidth

    def read(ids: Sequence[int]) -> float:
        return 1e9 / memory_bandwidth(n_threads)

    return read, read, {}


WORKERS = {"jitllm": jitllm_worker, "llama.cpp": llamacpp_worker, "memory": bandwidth_worker}


def serve(name: str, model: str, n_ctx: int, n_threads: int) -> None:
    """The worker process: a JSON line in, seconds out, until the pipe closes."""
    prefill, decode, facts = WORKERS[name](model, n_ctx, n_threads)
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        what, ids = json.loads(line)
        print(json.dumps((prefill if what == "prefill" else decode)(ids)), flush=True)


class Worker:
    """One engine in its process."""

    def __init__(self, name: str, model: str, n_ctx: int, n_threads: int):
        command = [sys.executable, "-m", "benchmarks.vs_llamacpp", model, "--worker", name]
        command += ["--ctx", str(n_ctx), "--threads", str(n_threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, text=True
        )
        self.facts = json.loads(self._answer())

    def seconds(self, what: str, ids: Sequence[int] = ()) -> float:
        """How long `what`, prefill or decode, of `ids` takes."""
        self._process.stdin.write(json.dumps([what, list(ids)]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a worker ended with code {self._process.wait()}")
        return line


def measure(model: str, args: argparse.Namespace) -> dict:
    """Rates of both engines in every round, and the memory's."""
    n_ctx = max(args.p, args.n) + 16
    workers = {name: Worker(name, model, n_ctx, args.threads) for name in WORKERS}
    ours, theirs, memory = workers.values()
    n_vocab, rng = ours.facts["n_vocab"], np.random.default_rng(0)
    rates: dict[str, dict[str, list[float]]] = {w: {n: [] for n in WORKERS} for w in ("p", "n")}
    gigabytes: list[float] = []
    for number in range(args.rounds + 1):
        order = [("jitllm", ours), ("llama.cpp", theirs)][:: 1 if number % 2 else -1]
        for key, what, count in (("p", "prefill", args.p), ("n", "decode", args.n)):
            ids = rng.integers(3, n_vocab, count).tolist()
            for name, worker in order:
                rates[key][name].append(count / worker.seconds(what, ids))
        gigabytes.append(1 / memory.seconds("decode"))
        print(f"round {number} of {args.rounds}", end="\r", file=sys.stderr, flush=True)
    for worker in workers.values():
        worker.close()
    # The first round compiles, and fills caches.
    rounds = {w: {n: r[1:] for n, r in of.items()} for w, of in rates.items()}
    return {"facts": ours.facts, "rates": rounds, "memory": gigabytes[1:], "p": args.p, "n": args.n}


def summary(result: dict) -> dict:
    """Medians, ratios pair by pair, and effective bandwidth."""
    out: dict = {"kernels": result["facts"]["kernels"]}
    for key, name in (("p", "prefill"), ("n", "decode")):
        ours, theirs = result["rates"][key]["jitllm"], result["rates"][key]["llama.cpp"]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        out[name] = {
            "tokens": result[key],
            "jitllm_tokens_per_second": statistics.median(ours),
            "llamacpp_tokens_per_second": statistics.median(theirs),
            "ratio": statistics.median(ratios),
            "ratio_spread": [min(ratios), max(ratios)],
        }
    n_bytes = result["facts"]["weights_bytes"]
    decode = result["rates"]["n"]["jitllm"]
    shares = [d * n_bytes / 1e9 / m for d, m in zip(decode, result["memory"], strict=True)]
    out["weights_bytes"] = n_bytes
    out["jitllm_gb_per_second"] = statistics.median(decode) * n_bytes / 1e9
    out["llamacpp_gb_per_second"] = out["decode"]["llamacpp_tokens_per_second"] * n_bytes / 1e9
    out["memory_gb_per_second"] = statistics.median(result["memory"])
    out["share_of_memory"] = statistics.median(shares)
    return out


def table(model: str, s: dict) -> str:
    """The summary for people, as Markdown."""
    lines = [f"{Path(model).name}, kernels {s['kernels']}", ""]
    lines += ["| work | jitllm | llama.cpp | ratio | spread |", "|---|---|---|---|---|"]
    for name in ("prefill", "decode"):
        r = s[name]
        low, high = r["ratio_spread"]
        lines.append(
            f"| {name} of {r['tokens']} | {r['jitllm_tokens_per_second']:.1f} tokens/s | "
            f"{r['llamacpp_tokens_per_second']:.1f} tokens/s | {r['ratio']:.2f} | "
            f"{low:.2f}-{high:.2f} |"
        )
    lines += ["", f"decode reads {s['jitllm_gb_per_second']:.1f} GB/s of weights (llama.cpp "]
    lines[-1] += f"{s['llamacpp_gb_per_second']:.1f}), {100 * s['share_of_memory']:.0f} % of the "
    lines[-1] += f"{s['memory_gb_per_second']:.1f} GB/s that a plain read of memory reached"
    return "\n".join(lines)


def main() -> None:
    """Run the comparison, or be one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-p", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("-n", type=int, default=128, help="tokens decoded")
    # Both get the same number: llama-cpp-python by itself would decode on half the cores.
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--ctx", type=int, default=1024, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker, args.model, args.ctx, args.threads)
        return
    result = summary(measure(args.model, args))
    print(json.dumps(result) if args.json else table(args.model, result))


if __name__ == "__main__":
    main()
