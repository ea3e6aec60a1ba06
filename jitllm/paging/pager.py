"""Residency under a budget: the pages of a container, in frames whose bytes never exceed it.

The budget covers everything weight-shaped: the dense page, the frames, the embedding's look-up
buffers and hashes. A model's pages are visited in a cycle, its blocks and then the slabs of its
head; `policy` says which of them are pinned and how the others move.

    with pager.step():                       # one pass; nobody changes the budget inside it
        for batch in pager.embedding(ids):   # rows of the embedding
            ...
        for page in pager.cycle:
            with pager.hold(page) as frame:  # waits for the bytes, and keeps them in place
                ...                          # start the work that reads frame.data
                if not frame.pinned:
                    ...                      # wait until that work is done

The pager reads ahead by itself: whenever a frame is free, the page that comes next in the step
(behind its end: in the next step) is read into it. The page being used and the one being read are
different frames by construction. A hold begins when the bytes are there and ends when they
are known to be right, so that hashing does not delay the work; where the read failed or the hash
differs, the hold raises one JitllmError, the frame is given up and the pager goes on.

One thread steps. Any thread may call `set_budget`, `counters` and `close`: the first and the last
wait for the end of the step under way, and the next step waits for them.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from types import TracebackType

import numpy as np
import xxhash

from jitllm.errors import BudgetError, FormatError, JitllmError
from jitllm.paging import policy
from jitllm.paging.budget import Ledger
from jitllm.paging.container import Container, remake
from jitllm.paging.counters import Applied, PagerCounters, Rates
from jitllm.paging.embedding import EmbeddingReader, EmbeddingUnits, lookup_bytes
from jitllm.paging.frames import Frame, FrameTable, aligned_memory
from jitllm.paging.gate import StepGate
from jitllm.paging.policy import Arrangement
from jitllm.paging.reader import N_IN_FLIGHT, Reader, page_segments
from jitllm.units import format_size, told_apart

__all__ = ["Applied", "Pager", "PagerCounters", "fixed_bytes", "whole_cycle"]

_READ_AHEAD_REQUESTS = 2 * N_IN_FLIGHT
"""Requests under way from which on pages that are read only once are not read further ahead."""
_PASSES_BETWEEN_CHOICES = 8


class Pager:
    """Holds a container's pages to `budget_bytes`. A context manager; leaving it closes.

    BudgetError, before anything is allocated: the budget is below `smallest_bytes`. `n_moving`
    fixes the moving frames at 1 or 2 (where 2 fit); None chooses by the rates measured.
    """

    def __init__(
        self,
        container: Container,
        budget_bytes: int,
        ledger: Ledger,
        check_hashes: bool = True,
        n_moving: int | None = None,
        cycle: Sequence[int] | None = None,
    ):
        self.container = container
        self.fixed_bytes = fixed_bytes(container)
        self._set_cycle(whole_cycle(container) if cycle is None else cycle)
        self._check_budget(budget_bytes)
        self._ledger, self._check_hashes, self._wish = ledger, check_hashes, n_moving
        ledger.set_budget("weights", budget_bytes)
        self.rates, self.generation = Rates(), 0
        self._counters, self._gate, self._closed = PagerCounters(), StepGate(), False
        self._order, self._position, self._index = self.cycle, -1, {}
        self._frames = FrameTable([page.n_bytes for page in container.pages], ledger)
        self._reader = Reader(container.path)
        try:
            self._embedding = EmbeddingReader(container, self._reader, ledger)
            self._arrange(budget_bytes, self._choose(budget_bytes))
            self.dense_frame = self._load_dense()
            """The frame of the dense page, which stays; None in a container without one."""
        except BaseException:
            self._reader.close()
            raise

    @property
    def all_resident_bytes(self) -> int:
        """The smallest budget with which no page is ever read twice."""
        embed = sum(self.container.pages[page].n_bytes for page in self.container.pages_of("embed"))
        return self.fixed_bytes + sum(self._cycle_bytes) + embed

    @property
    def counters(self) -> PagerCounters:
        """A copy of the counters as they stand."""
        return replace(
            self._counters,
            evictions=self._frames.n_evicted,
            prefetch_unused=self._frames.n_unused,
            frames=sum(frame.page in self._in_cycle for frame in self._frames.frames),
            bytes_read=self._reader.n_bytes,
            read_requests=self._reader.n_requests,
            embedding_bytes=self._embedding.n_bytes,
            blocked_s=self._blocked_s,
        )

    @property
    def n_resident(self) -> int:
        """Pages of the cycle in memory at once, when the frames are filled."""
        return self.arrangement.n_resident

    @property
    def resident_bytes(self) -> int:
        """Allocated now under the budget."""
        return self._ledger.used("weights")

    @property
    def direct(self) -> bool:
        """Reads go past the page cache."""
        return self._reader.direct

    @contextmanager
    def step(self, pages: Sequence[int] | None = None) -> Iterator[None]:
        """One pass over `pages` (some of the cycle's, in order; None: all)."""
        with self._gate.step():
            if self._closed:
                raise JitllmError(f"{self.container.path} was closed")
            self._order = self.cycle if pages is None else tuple(pages)
            self._index = {page: position for position, page in enumerate(self._order)}
            self._position = -1
            self._frames.forget_failed()
            self._advance()
            begun, blocked_s = time.perf_counter(), self._blocked_s
            yield
            self._measure(time.perf_counter() - begun - (self._blocked_s - blocked_s))

    @contextmanager
    def hold(self, page: int) -> Iterator[Frame]:
        """The page's frame, in place until the `with` ends; inside a step."""
        assert self._gate.is_mine, "hold needs a step around it"
        self._position = self._index.get(page, self._position)
        with self._held(page) as frame:
            yield frame

    def prefetch(self, page: int) -> bool:
        """Start to read the page where that can be done at once; False: not now. Never blocks."""
        if self._frames.find(page) is not None:
            return True
        if self._frames.owns(page) and self._n_requests_under_way >= _READ_AHEAD_REQUESTS:
            return False
        try:
            return self._start(page, now=False) is not None
        except BudgetError:  # of the ledger: the hold will say so, if it comes to that
            return False

    def embedding(self, ids: Sequence[int]) -> Iterator[EmbeddingUnits]:
        """The embedding's rows for `ids`, in batches that fit the staging buffer; inside a step.

        Rows on pages that have their own frames come from there, and bring the page in if need be.
        """
        assert self._gate.is_mine, "embedding needs a step around it"
        return self._embedding.batches(ids, self._held_if_own)

    def is_in_memory(self, page: int) -> bool:
        """Whether the page is in a frame now, whole."""
        frame = self._frames.find(page)
        return frame is not None and frame.read is None

    def resident_frames(self) -> dict[int, Frame] | None:
        """Every page of the cycle in its frame, loaded and checked; None where that is not so.

        They stay as they are while `generation` does.
        """
        if self.arrangement.n_moving:
            return None
        frames = {page: self.staying_frame(page) for page in self.cycle}
        return frames if all(frames.values()) else None

    def staying_frame(self, page: int) -> Frame | None:
        """The page's own frame, loaded and checked: as good as a hold for the rest of the step."""
        frame = self._frames.find(page)
        stays = frame is not None and frame.pinned and frame.read is None and not frame.fresh
        return frame if stays else None

    def set_budget(self, budget_bytes: int) -> Applied:
        """Change the budget between two steps, keeping every page that can stay in its place.

        Fewer bytes evict exactly the excess, more bytes evict nothing. BudgetError: below
        `smallest_bytes`, or the ledger's limit does not allow it; then nothing has changed.
        """
        self._check_budget(budget_bytes)
        with self._gate.change():
            if self._closed:
                raise JitllmError(f"{self.container.path} was closed")
            # the ceiling comes down when what has to go has gone: nobody sees it exceeded
            self._ledger.set_budget("weights", max(budget_bytes, self.budget_bytes))
            wider = budget_bytes >= self.budget_bytes
            chosen = self._choose(budget_bytes, self.arrangement if wider else None)
            evicted = self._arrange(budget_bytes, chosen)
            self._ledger.set_budget("weights", budget_bytes)
            return replace(self._in_force, evicted=evicted)

    def set_cycle(self, cycle: Sequence[int]) -> None:
        """Change which pages a pass visits here, between two steps; the others may be elsewhere.

        BudgetError: the budget cannot hold a frame for the largest of them; nothing has changed.
        """
        with self._gate.change():
            before = self.cycle
            self._set_cycle(cycle)
            try:
                self._check_budget(self.budget_bytes)
            except BudgetError:
                self._set_cycle(before)
                raise
            self._arrange(self.budget_bytes, self._choose(self.budget_bytes))

    def fetch(self, page: int) -> np.ndarray:
        """A page's bytes, checked, in memory of their own on the ledger's `staging` line."""
        entry = self.container.pages[page]
        memory, _ = aligned_memory(entry.n_bytes, self._ledger, "staging")
        read = self._reader.read(
            page_segments(entry.offset, memoryview(memory)),
            partial(self._verify, page, memoryview(memory)) if self._check_hashes else None,
        )
        read.wait()
        read.check()
        return memory

    def applied(self) -> Applied:
        """What the present budget came to; of one piece, whatever is changed meanwhile."""
        return self._in_force

    def close(self) -> None:
        """End the reads under way and let go of all memory. A second call does nothing."""
        with self._gate.change():
            self._closed = True
            self._reader.close()
            self._frames.clear()
            self._embedding.close()
            self.dense_frame = None
            self._reclaim(0)

    def __enter__(self) -> "Pager":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _blocked_s(self) -> float:
        return self._counters.blocked_s + self._embedding.blocked_s

    @property
    def _n_requests_under_way(self) -> int:
        reads = (frame.read for frame in self._frames.frames if frame.read is not None)
        return sum(read.n_requests for read in reads if not read.arrived)

    def _set_cycle(self, cycle: Sequence[int]) -> None:
        self.cycle = tuple(cycle)
        """The page numbers of one pass, in order."""
        self._in_cycle = frozenset(self.cycle)
        self._n_blocks = sum(self.container.pages[page].kind == "block" for page in self.cycle)
        self._cycle_bytes = [self.container.pages[page].n_bytes for page in self.cycle]
        self.smallest_bytes = self.fixed_bytes + policy.smallest_bytes(self._cycle_bytes)

    def _check_budget(self, budget_bytes: int) -> None:
        if budget_bytes < self.smallest_bytes:
            name, smallest = self.container.path.name, self.smallest_bytes
            asked, _ = told_apart(budget_bytes, smallest)
            raise BudgetError(
                f"a budget of {asked} is too small for {name}: the smallest "
                f"that works is {format_size(smallest)} ({smallest} bytes)",
                smallest,
            )

    def _choose(self, budget_bytes: int, kept: Arrangement | None = None) -> Arrangement:
        """How the cycle's pages share the budget, keeping what `kept` holds."""
        room = budget_bytes - self.fixed_bytes
        if self._wish is None:
            return policy.choose(self._cycle_bytes, room, self.rates.compute_to_read, kept)
        wishes = (policy.arrange(self._cycle_bytes, room, n) for n in (self._wish, 1))
        return next(a for a in wishes if a and (kept is None or a.keeps(kept)))

    def _arrange(self, budget_bytes: int, arrangement: Arrangement) -> int:
        """Put an arrangement in force; returns the number of pages evicted."""
        moving = {self.cycle[position] for position in arrangement.moving}
        own = {*self.container.pages_of("dense"), *self.cycle} - moving
        if budget_bytes >= self.all_resident_bytes:
            own.update(self.container.pages_of("embed"))
        evicted = self._frames.rearrange(
            frozenset(own), arrangement.n_moving, arrangement.moving_bytes, self.cycle
        )
        self.budget_bytes, self.arrangement = budget_bytes, arrangement
        self._in_force = self._applied()
        self.generation += 1
        in_frames = sum(frame.n_bytes for frame in self._frames.frames)
        self._reclaim(in_frames + lookup_bytes(self.container))
        return evicted

    def _reclaim(self, budget_bytes: int) -> None:
        """Have memory that was let go of given back now: JAX puts off dropping what it aliased."""
        if self._ledger.used("weights") > budget_bytes:
            gc.collect()

    def _applied(self) -> Applied:
        now = self.arrangement
        return Applied(
            budget_bytes=self.budget_bytes,
            fixed_bytes=self.fixed_bytes,
            frame_bytes=now.n_bytes,
            n_pages=now.n_pages,
            n_resident=now.n_resident,
            n_resident_blocks=min(now.n_resident, self._n_blocks),
            n_pinned=now.n_pinned,
            n_moving=now.n_moving,
            page_ins_per_pass=now.page_ins_per_pass,
            page_in_bytes_per_pass=sum(self._cycle_bytes[p] for p in now.moving),
            evicted=0,
        )

    def _measure(self, compute_s: float) -> None:
        """Note a step that ended well; now and then see whether more or fewer should move."""
        if self._order != self.cycle or not self.arrangement.n_moving:
            return
        self.rates.saw_pass(sum(self._cycle_bytes), compute_s)
        if self._wish is not None or self.rates.n_passes % _PASSES_BETWEEN_CHOICES:
            return
        seconds = partial(policy.relative_seconds, self._cycle_bytes)
        ratio, best = self.rates.compute_to_read, self._choose(self.budget_bytes)
        if seconds(best, ratio) < policy.WORTH_CHANGING * seconds(self.arrangement, ratio):
            self._arrange(self.budget_bytes, best)

    def _load_dense(self) -> Frame | None:
        for page in self.container.pages_of("dense"):
            with self._held(page) as frame:
                return frame
        return None

    def _held_if_own(self, page: int) -> AbstractContextManager[Frame] | None:
        return self._held(page) if self._frames.owns(page) else None

    @contextmanager
    def _held(self, page: int) -> Iterator[Frame]:
        frame = self._acquire(page)
        try:
            yield frame
        finally:
            self._release(frame)

    def _acquire(self, page: int) -> Frame:
        """The page's frame with its bytes in it, held."""
        frame = self._frames.find(page)
        ahead = frame is not None
        frame = frame or self._start(page, now=True)
        assert frame is not None, "more pages are held than there are frames"
        frame.n_holds += 1
        frame.wanted = False
        try:
            self._advance()
            late = frame.read is not None and not frame.read.arrived
            if frame.read is not None:
                self._wait(frame, frame.read.wait)
        except BaseException:
            frame.n_holds -= 1
            raise
        if frame.fresh:
            frame.fresh = False
            self._counters.page_ins += page in self._in_cycle
            self._counters.prefetch_on_time += ahead and not late
            self._counters.prefetch_late += ahead and late
        return frame

    def _release(self, frame: Frame) -> None:
        """End a hold, once the bytes are known to be right."""
        frame.n_holds -= 1
        if frame.read is not None:
            self._wait(frame, frame.read.check)
            self.rates.saw_read(frame.read)
            frame.read = None
        self._advance()

    def _wait(self, frame: Frame, event: Callable[[], None]) -> None:
        """Wait for a read's event, on the clock; a page that came wrong gives up its frame."""
        begun = time.perf_counter()
        try:
            event()
        except Exception:
            # Whatever became of the read, what lies in the frame is no page; not so for a ctrl-C in
            # the wait, behind which the read goes on.
            self.generation += 1
            frame.forget()
            raise
        finally:
            self._counters.blocked_s += time.perf_counter() - begun

    def _advance(self) -> None:
        """Read ahead: the pages that come next, in order, as far as there are frames for them."""
        if not (self._gate.is_mine and self._frames.can_place):
            return
        for page in chain(self._order[self._position + 1 :], self.cycle):
            frame = self._frames.find(page)
            if frame is None:
                if not self.prefetch(page):
                    return
            elif not (frame.pinned or frame.n_holds or frame.fresh):
                frame.wanted = True

    def _start(self, page: int, now: bool) -> Frame | None:
        """Begin to read a page that is nowhere yet; None where no frame is free for it."""
        frame = self._frames.place(page, now)
        if frame is not None:
            entry = self.container.pages[page]
            view = memoryview(frame.data)[: entry.n_bytes]
            verify = partial(self._verify, page, view) if self._check_hashes else None
            frame.read = self._reader.read(page_segments(entry.offset, view), verify)
            frame.fresh = True
        return frame

    def _verify(self, page: int, view: memoryview) -> None:
        entry, path = self.container.pages[page], self.container.path
        if xxhash.xxh3_64_intdigest(view) != entry.hash:
            raise FormatError(
                f"{path} has a damaged {entry.kind} page {entry.index} (its hash differs); "
                f"{remake(path)}"
            )


def whole_cycle(container: Container) -> tuple[int, ...]:
    """Every block and then every slab of the head: a pass where nothing is on another device."""
    return (*container.pages_of("block"), *container.pages_of("head"))


def fixed_bytes(container: Container) -> int:
    """What a budget holds beside the pages of the cycle: the dense page and the look-ups."""
    dense = sum(container.pages[page].n_bytes for page in container.pages_of("dense"))
    return dense + lookup_bytes(container)
