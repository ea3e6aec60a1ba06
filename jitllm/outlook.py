"""What a budget will cost on this machine: the prospect's pages, the page policy, and two rates.

The disk's rate is measured each time, by direct reads of the container's own pages for a fraction
of a second. The rate of computing is measured once per machine and model, by decoding a few tokens,
and kept in the cache.
"""

import hashlib
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path

from jitllm.cache import cache_dir
from jitllm.engine import Engine
from jitllm.kernels.ops import choose
from jitllm.paging import policy
from jitllm.paging.budget import Ledger, automatic_budget
from jitllm.paging.frames import aligned_memory
from jitllm.paging.reader import Read, Reader, page_segments
from jitllm.placement.forecast import Forecast, Workload, forecast
from jitllm.placement.plan import STREAMED
from jitllm.prospect import Prospect
from jitllm.session import Session

Say = Callable[[str], None]

_READ_S, _LEAST_READS = 0.3, 6
_N_TOKENS = 24
_DECODE_S = 3.0


@dataclass(frozen=True)
class Compute:
    """What computing with a model takes here; kept in the cache."""

    paged: float
    """Bytes a second of pages that come one by one, waits for reads left out."""
    resident: float
    """With all pages in memory; the same as `paged` where they have no room."""
    activation_bytes: int
    """The most that a step's activations took on the host."""


@dataclass(frozen=True)
class Rates:
    """What this machine does with a model, in bytes of its pages a second."""

    read: float
    """From disk."""
    paged: float
    """Computing with a page that was read, waits left out: a step of its own."""
    resident: float
    """Computing with pages that stay in memory, and share steps."""


_ANY_RATES = Rates(read=1.0, paged=policy.TYPICAL_COMPUTE_TO_READ, resident=1.0)


@dataclass(frozen=True)
class Outlook:
    """A prospect and what a token of it will cost."""

    prospect: Prospect
    rates: Rates | None
    forecast: Forecast | None
    """Of the pages that the host visits; both are None where it visits none."""
    activation_bytes: int

    @property
    def weights_bytes(self) -> int:
        """The whole model."""
        return sum(page.n_bytes for page in self.prospect.container.pages)

    @property
    def kv_bytes(self) -> int:
        """One conversation's cache."""
        return sum(self.prospect.kv_sizes(self.prospect.max_seq))

    @property
    def peak_bytes(self) -> int:
        """The most that the host will hold: pages, one conversation's cache, activations."""
        pages = self.forecast.now.budget_bytes if self.forecast else self.prospect.fixed_bytes
        if not self.over_bytes:
            pages += self.prospect.embedding_bytes
        return pages + self.prospect.host_kv_bytes + self.activation_bytes

    @property
    def over_bytes(self) -> int:
        """By how much the host's pages, all of them, exceed its budget."""
        pages = self.forecast.whole.budget_bytes if self.forecast else self.prospect.fixed_bytes
        return max(0, pages + self.prospect.embedding_bytes - self.prospect.budget_bytes)


def outlook(prospect: Prospect, say: Say = lambda _: None) -> Outlook:
    """The outlook for `prospect`; `say` hears of a measurement that takes a few seconds.

    BudgetError, with the smallest budget that works, before anything is measured.
    """
    if not prospect.cycle:
        return Outlook(prospect, None, None, 0)
    whole = predict(prospect).whole.budget_bytes
    read, compute = read_rate(prospect), measured(prospect, whole, say)
    rates = Rates(read, compute.paged, compute.resident)
    return Outlook(prospect, rates, predict(prospect, rates), compute.activation_bytes)


def predict(prospect: Prospect, rates: Rates | None = None) -> Forecast:
    """The forecast for the pages that the host visits; there have to be some.

    Which budgets work, and which hold all, does not depend on the rates.
    """
    rates = rates or _ANY_RATES
    pages = prospect.container.pages
    page_bytes = [pages[page].n_bytes for page in prospect.cycle]
    slower = rates.resident / rates.paged

    def pass_seconds(
        read_s: Sequence[float], compute_s: Sequence[float], moving: Collection[int], n_moving: int
    ) -> float:
        mixed_s = [s * slower if page in moving else s for page, s in enumerate(compute_s)]
        return policy.pass_seconds(read_s, mixed_s, moving, n_moving)

    load = Workload(
        page_bytes=page_bytes,
        compute_s=[n_bytes / rates.resident for n_bytes in page_bytes],
        read_bytes_per_s=rates.read,
        arrange=lambda n_bytes: policy.settle(page_bytes, n_bytes, rates.paged / rates.read),
        pass_seconds=pass_seconds,
        fixed_bytes=prospect.fixed_bytes,
    )
    return forecast(load, prospect.budget_bytes)


def read_rate(prospect: Prospect, seconds: float = _READ_S) -> float:
    """Bytes a second of reading the pages of a pass, past the page cache where that can be.

    One page is under way while the next is asked for, as the pager does it. The median page's
    rate: a moment in which the machine does something else does not count.
    """
    pages = [prospect.container.pages[page] for page in prospect.cycle]
    largest = max(page.n_bytes for page in pages)
    buffers = [memoryview(aligned_memory(largest, Ledger(), "staging")[0]) for _ in range(2)]
    reader, reads, rates = Reader(prospect.container.path), deque[Read](), []
    start = end = time.perf_counter()
    try:
        for number, page in enumerate(cycle(pages)):
            view = buffers[number % 2][: page.n_bytes]
            reads.append(reader.read(page_segments(page.offset, view)))
            if len(reads) == len(buffers):
                read, before = reads.popleft(), end
                read.wait()
                end = time.perf_counter()
                rates.append(read.n_bytes / (end - before))
            if len(rates) >= _LEAST_READS and end - start >= seconds:
                break
    finally:
        reader.close()
    return statistics.median(rates[2:])  # the first two also took the buffers' memory


def measured(prospect: Prospect, whole_bytes: int, say: Say = lambda _: None) -> Compute:
    """From the cache; where nobody has yet, measured by decoding a few tokens under the smallest
    budget, and with all pages in memory, `whole_bytes`, if there is room for them."""
    fits = whole_bytes <= max(prospect.budget_bytes, automatic_budget())
    if (kept := _kept(prospect, fits)) is not None:
        return kept
    say("measuring, this once, how fast this machine computes with the model")
    compute = _measure(prospect, whole_bytes if fits else None)
    _keep(_file(prospect, fits), compute)
    return compute


def _measure(prospect: Prospect, whole_bytes: int | None) -> Compute:
    n_bytes = sum(prospect.container.pages[page].n_bytes for page in prospect.cycle)
    longest = min(prospect.config.context_length, _N_TOKENS)
    least = replace(prospect.under(prospect.smallest_bytes), max_seq=longest, process_limit=None)
    with Engine(least) as engine, engine.session() as session:
        session.prefill(list(range(longest // 2)))  # compiles the step of a prompt too
        paged = resident = n_bytes / _token_seconds(engine, session)
        if whole_bytes is not None:
            engine.set_budget(whole_bytes)
            resident = n_bytes / _token_seconds(engine, session)
        lines = {line.name: line.peak_bytes for line in engine.stats().ledger.lines}
    return Compute(paged, resident, lines["activations"])


def _token_seconds(engine: Engine, session: Session) -> float:
    """Of one token, waits for reads left out, and what else the machine did meanwhile."""
    seconds: list[float] = []
    session.reset()
    deadline = time.perf_counter() + _DECODE_S
    while len(seconds) < _N_TOKENS and (len(seconds) < 4 or time.perf_counter() < deadline):
        start, blocked_s = time.perf_counter(), engine.pager_counters().blocked_s
        session.prefill([len(seconds)])
        waited_s = engine.pager_counters().blocked_s - blocked_s
        seconds.append(max(time.perf_counter() - start - waited_s, 1e-9))
    return statistics.quantiles(seconds, n=4)[0]


def _kept(prospect: Prospect, fits: bool) -> Compute | None:
    try:
        return Compute(**json.loads(_file(prospect, fits).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _file(prospect: Prospect, fits: bool) -> Path:
    """A name for the model, for where its parts compute and with what."""
    key = (
        prospect.container.metadata["source"]["sha256"],
        [(part.device, part.mode == STREAMED) for part in prospect.plan.assignments],
        choose("cpu")[1],
        prospect.n_threads,
        prospect.kv_dtype,
        fits,
    )
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    return cache_dir() / "rates" / f"{digest}.json"


def _keep(path: Path, compute: Compute) -> None:
    """Write a cache file whole or not at all; one that cannot be written is measured again."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(compute)))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
