"""Decoding with less memory than weights: python -m benchmarks.paging MODEL [--cgroup]

For each budget, a share of the smallest that holds everything: tokens a second, and bytes read per
token by our own counters and by the kernel's (/proc/self/io). What the disk gives is measured
beside it, by raw O_DIRECT reads of the same file before and after each measurement. Every token
has to read what is not resident, so no engine is faster than

    bound = disk bandwidth / (weights - resident),  resident: the pages with frames of their own,

and `of the bound` is the part of it that was reached. `wall` is a token's time over the longer of
its reads at the raw rate and its computing. A disk on a shared machine drifts, so budgets take
turns, and medians over the rounds are shown.

With --cgroup, as root where memory cgroups can be made: llama.cpp, with its defaults and without
repacking, and jitllm with its automatic budget, each in a fresh process whose whole memory has the
same limit. llama-cpp-python has to be there (the `bench` extra).
"""

import argparse
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from benchmarks import limited
from jitllm.catalog import resolve
from jitllm.engine import Engine
from jitllm.outlook import predict
from jitllm.paging.container import Container
from jitllm.placement.devices import parse_devices
from jitllm.placement.rules import Profile
from jitllm.prospect import devices_of, look_ahead
from jitllm.session import Session
from jitllm.units import format_size

BUDGETS = (25, 50, 75, 100, 110)
"""Per cent of the smallest budget that holds everything."""
LIMITS = (50, 75)
"""Of a whole process, in per cent of the GGUF."""
HOST_ALONE = Profile(devices=parse_devices("cpu"))
_WARM_TOKENS = 2
_RAW_BYTES, _REQUEST_BYTES, _N_IN_FLIGHT = 128 << 20, 1 << 20, 8


@dataclass(frozen=True)
class Round:
    """One budget measured once; everything per token."""

    seconds: float
    bytes_read: float
    """By the pager's counters."""
    kernel_bytes: float
    """By /proc/self/io; 0 where there is none."""
    page_ins: float
    blocked_s: float
    """Waiting for reads."""
    raw_bytes_per_s: float
    """The disk, around the measurement."""

    @property
    def share(self) -> float:
        """Of the bound: the rate at which weights came in over the disk's."""
        return self.bytes_read / self.seconds / self.raw_bytes_per_s

    @property
    def wall(self) -> float:
        """Seconds over the longer of reading alone and computing alone."""
        read_s = self.bytes_read / self.raw_bytes_per_s
        return self.seconds / max(read_s, self.seconds - self.blocked_s)


def raw_bandwidth(path: Path, n_bytes: int = _RAW_BYTES) -> float:
    """Bytes a second of O_DIRECT reads of 1 MiB, eight in flight, from the middle of the file.

    Into huge pages that are there already: small ones halve the rate.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    file_bytes = os.fstat(descriptor).st_size
    n_requests = min(n_bytes, file_bytes) // _REQUEST_BYTES
    first = (file_bytes // _REQUEST_BYTES - n_requests) // 2
    memory = mmap.mmap(-1, _N_IN_FLIGHT * _REQUEST_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(bytes(len(memory)))
    numbers = count()

    def work(buffer: memoryview) -> None:
        while (number := next(numbers)) < n_requests:
            os.preadv(descriptor, [buffer], (first + number) * _REQUEST_BYTES)

    starts = range(0, len(memory), _REQUEST_BYTES)
    buffers = [memoryview(memory)[at : at + _REQUEST_BYTES] for at in starts]
    threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    os.close(descriptor)
    return n_requests * _REQUEST_BYTES / seconds


def kernel_bytes_read() -> int:
    """Bytes that this process made disks read so far; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def decode(engine: Engine, session: Session, path: Path, n_tokens: int) -> Round:
    """`n_tokens` passes from the same context, once the frames are filled."""
    session.truncate(0)
    for token in range(1, 1 + _WARM_TOKENS):
        session.prefill([token])
    settle(engine)
    raw = raw_bandwidth(path)
    before, kernel_before, start = engine.pager_counters(), kernel_bytes_read(), time.perf_counter()
    for token in range(n_tokens):
        session.prefill([7 + token])
    seconds, after = time.perf_counter() - start, engine.pager_counters()
    settle(engine)
    kernel_bytes = kernel_bytes_read() - kernel_before
    return Round(
        seconds=seconds / n_tokens,
        bytes_read=(after.bytes_read - before.bytes_read) / n_tokens,
        kernel_bytes=kernel_bytes / n_tokens,
        page_ins=(after.page_ins - before.page_ins) / n_tokens,
        blocked_s=(after.blocked_s - before.blocked_s) / n_tokens,
        raw_bytes_per_s=(raw + raw_bandwidth(path)) / 2,
    )


def settle(engine: Engine) -> None:
    """Wait until the pager has read ahead as far as it can."""
    engine.set_budget(engine.stats().budget_bytes)


def rounds(path: Path, shares: list[int], n_tokens: int, n_rounds: int) -> Iterator[list[Round]]:
    """For each round its measurements, one for each of `shares`."""
    with (
        Engine.open(path, devices="cpu", maxmem=whole_bytes(path), max_seq=n_tokens + 8) as engine,
        engine.session() as session,
    ):
        whole = engine.stats().budget_bytes
        for number in range(n_rounds + 1):
            results = []
            for share in shares:
                engine.set_budget(whole * share // 100)
                results.append(decode(engine, session, path, n_tokens if number else 1))
            if number:  # the first round compiled
                yield results


def whole_bytes(path: Path) -> int:
    """The smallest budget that holds everything."""
    prospect = look_ahead(Container.open(path), devices_of(HOST_ALONE), HOST_ALONE, None, 1, "f16")
    return predict(prospect).whole.budget_bytes


def medians(results: list[Round]) -> dict[str, float]:
    """The median of each figure over the rounds, the derived ones too."""
    facts = [asdict(r) | {"share": r.share, "wall": r.wall} for r in results]
    return {key: statistics.median(f[key] for f in facts) for key in facts[0]}


def prefill(path: Path, share: int, n_tokens: int) -> str:
    """What a prompt of `n_tokens` costs under a budget, as a sentence."""
    with (
        Engine.open(
            path, devices="cpu", maxmem=whole_bytes(path) * share // 100, max_seq=n_tokens
        ) as engine,
        engine.session() as session,
    ):
        prompt = [3 + i % 200 for i in range(n_tokens)]
        session.prefill(prompt)
        session.reset()
        before, start = engine.pager_counters(), time.perf_counter()
        session.prefill(prompt)
        seconds, after = time.perf_counter() - start, engine.pager_counters()
    blocked_s, page_ins = after.blocked_s - before.blocked_s, after.page_ins - before.page_ins
    return (
        f"a prompt of {n_tokens} tokens under {share} %: {seconds:.2f} s, {blocked_s:.2f} of them"
        f" blocked on reads, {page_ins} page-ins"
    )


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paging")
    parser.add_argument("model", help="a container, a GGUF or a catalog name")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, metavar="PER_CENT")
    parser.add_argument("-n", type=int, default=8, help="tokens of a measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cgroup", action="store_true", help="beside llama.cpp; MODEL is a GGUF")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    path = resolve(args.model, say=lambda line: print(line, file=sys.stderr))
    found = {"budgets": decoding(path, args.budgets, args.n, args.rounds)}
    if args.cgroup:
        found["limits"] = limited.compare(Path(args.model), path, LIMITS, args.n, args.rounds)
    if args.json:
        print(json.dumps(found))
        return
    print(
        f"{path.name}, {format_size(path.stat().st_size)}, {args.rounds} rounds of {args.n} tokens"
    )
    for rows in found.values():
        print("\n" + table(rows))
    print("\n" + prefill(path, 50, 512))


def decoding(path: Path, shares: list[int], n_tokens: int, n_rounds: int) -> list[dict[str, str]]:
    """A row of text for each budget."""
    measured = zip(*rounds(path, shares, n_tokens, n_rounds), strict=True)
    return [_row(share, medians(list(each))) for share, each in zip(shares, measured, strict=True)]


def _row(share: int, m: dict[str, float]) -> dict[str, str]:
    pages = m["page_ins"] > 0
    return {
        "budget": f"{share} %",
        "tokens/s": f"{1 / m['seconds']:.2f}",
        "read a token": format_size(round(m["bytes_read"])),
        "by the kernel": format_size(round(m["kernel_bytes"])),
        "page-ins": f"{m['page_ins']:g}",
        "disk": f"{m['raw_bytes_per_s'] / 1e9:.2f} GB/s",
        "of the bound": f"{100 * m['share']:.0f} %" if pages else "",
        "wall": f"{m['wall']:.2f}" if pages else "",
    }


def table(rows: list[dict[str, str]]) -> str:
    """Rows as Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
