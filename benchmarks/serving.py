"""A server under 1, 4, 8 and 16 streams at once: time to the first token, between tokens, in total.

    python -m benchmarks.serving MODEL [--gguf FILE] [--tokens 64] [--rounds 3] [--streams 1,4,8,16]

MODEL is a container. jitllmd serves it on a free port; with --gguf, llama.cpp's server (of
llama-cpp-python[server], in the `bench` extra) serves that file on another, and the two take turns,
round by round. Prompts differ, replies are greedy and of equal length; the table has the medians of
the rounds, and the total as a multiple of one stream's.
"""

import argparse
import http.client
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_JITLLMD = "import sys; from jitllm.cli.jitllmd import main; sys.exit(main())"
_STARTUP_S = 300
_SETTLE_S = 8  # jitllmd builds its steps while nobody waits


@dataclass(frozen=True)
class Round:
    """One round of streams, in seconds; `total` is tokens a second of all of them."""

    first_s: float
    gaps_s: list[float]
    total: float


class Stream(threading.Thread):
    """One streamed completion: when it was asked for, and when each chunk of text came."""

    def __init__(self, port: int, number: int, n_tokens: int):
        super().__init__()
        self._port, self.times = port, []
        self.body = {
            "prompt": f"This is story number {number}. Once upon a time there was",
            "model": "m",
            "max_tokens": n_tokens,
            "temperature": 0,
            "stream": True,
        }

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        headers = {"Content-Type": "application/json"}
        self.asked_s = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(self.body), headers)
        for line in connection.getresponse():
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                self.times.append(time.perf_counter())
        connection.close()


def measure(port: int, n_streams: int, n_tokens: int, seed: int) -> Round:
    """All streams at once, to the end of the last."""
    streams = [Stream(port, seed + i, n_tokens) for i in range(n_streams)]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join()
    begun, ended = min(s.asked_s for s in streams), max(s.times[-1] for s in streams)
    gaps = [b - a for s in streams for a, b in zip(s.times, s.times[1:], strict=False)]
    first = statistics.median(s.times[0] - s.asked_s for s in streams)
    n_chunks = sum(len(s.times) for s in streams)
    return Round(first, gaps, n_chunks / (ended - begun))


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def running(command: list[str], port: int, path: str) -> Iterator[int]:
    """The server that `command` starts, once it answers at `path`; ended after use."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _STARTUP_S
        while not answers(port, path):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(command[:4])} ... does not answer")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def answers(port: int, path: str) -> bool:
    """Whether a server at `port` answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def jitllmd(container: Path, n_rows: int, port: int) -> list[str]:
    """The command that serves a container."""
    flags = ["-models", str(container.parent), "-load", container.name, "-id", "m"]
    flags += ["-devices", "cpu", "-max-seq", "1024", "-sessions", str(n_rows)]
    return [sys.executable, "-c", _JITLLMD, "serve", "-addr", f"127.0.0.1:{port}", *flags]


def llamacpp(gguf: Path, port: int) -> list[str]:
    """The command that serves a GGUF with llama.cpp."""
    n_threads = str(max(1, (os.cpu_count() or 1)))
    flags = ["--model", str(gguf), "--model_alias", "m", "--n_ctx", "1024"]
    flags += ["--n_threads", n_threads, "--port", str(port)]
    return [sys.executable, "-m", "llama_cpp.server", *flags]


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of all lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def row(name: str, n_streams: int, rounds: list[Round], one: float) -> str:
    """A line of the table."""
    gaps = [gap for each in rounds for gap in each.gaps_s]
    total = statistics.median(each.total for each in rounds)
    first_ms = 1e3 * statistics.median(each.first_s for each in rounds)
    p50, p95, p99 = (f"{1e3 * percentile(gaps, share):.1f}" for share in (0.5, 0.95, 0.99))
    return (
        f"| {name} | {n_streams} | {first_ms:.0f} ms | {p50} ms | {p95} ms | {p99} ms |"
        f" {total:.1f} | {total / one:.2f} x |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", default="1,4,8,16")
    args = parser.parse_args()
    widths = [int(width) for width in args.streams.split(",")]
    with ExitStack() as stack:
        port = free_port()
        command = jitllmd(args.model, max(widths), port)
        servers = {"jitllmd": stack.enter_context(running(command, port, "/healthz"))}
        if args.gguf and importlib.util.find_spec("starlette_context"):
            port = free_port()
            command = llamacpp(args.gguf, port)
            servers["llama.cpp"] = stack.enter_context(running(command, port, "/v1/models"))
        elif args.gguf:
            print("llama-cpp-python[server] is not installed", file=sys.stderr)
        time.sleep(_SETTLE_S)
        print("| server | streams | first token | between: p50 | p95 | p99 | tokens/s | of one |")
        print("|---|---|---|---|---|---|---|---|")
        one = dict.fromkeys(servers, 0.0)
        for width in widths:
            found: dict[str, list[Round]] = {name: [] for name in servers}
            for n in range(-1, args.rounds):  # the first one compiles
                for name, port in servers.items():
                    # no two prompts of a run begin with the same number
                    each = measure(port, width, args.tokens, seed=1000 * width + 100 * (n + 1))
                    found[name] += [each] if n >= 0 else []
            for name, rounds in found.items():
                one[name] = one[name] or statistics.median(r.total for r in rounds)
                print(row(name, width, rounds, one[name]), flush=True)


if __name__ == "__main__":
    main()
