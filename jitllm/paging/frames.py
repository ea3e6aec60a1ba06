"""Frames: page-aligned buffers, counted in the ledger, that hold one page each.

The memory of a frame is anonymous and private, and goes back to the system as soon as the frame
and every array over it are gone. Arrays over a frame alias it and copy nothing, hence three rules:

- The engine keeps its arrays over a frame in `frame.views` and nowhere else beyond a step. The
  pager empties `views` when it lets go of the memory; what is still referenced stays allocated,
  and stays in the ledger.
- A step that reads a *moving* frame (`pinned` is False) has finished, as in `block_until_ready`,
  before its hold ends: the next page is read into the same bytes at once.
- The address of `data` does not change while the pager's `generation` does not. Views of a moving
  frame are over whatever page lies there, and mean it only while it is held.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from jitllm.paging.budget import Charge, Ledger
from jitllm.paging.reader import Read

_HUGE_BYTES = 2 << 20
"""A huge page. Frames from this size on begin at one and ask for as many as they fill: one core
read 94 MiB of weights at 17.1 GB/s, and at 11.6 GB/s from small pages (a frame that only asks,
and begins anywhere: 12.3)."""


class Frame:
    """A buffer and the page in it. `data` is uint8[n_bytes], 4096-aligned; a page fills the first
    of its bytes, and they are to be trusted while the page is held."""

    def __init__(self, n_bytes: int, ledger: Ledger, pinned: bool):
        self.pinned = pinned
        self.page: int | None = None
        self.views: dict[Any, Any] = {}
        """The engine's arrays over this frame, under keys of its choice."""
        self.read: Read | None = None
        """The read that fills the frame, until its bytes were found right."""
        self.n_holds = 0
        self.fresh = False
        """The page was not held since it was read."""
        self.wanted = False
        """The page was held, and will be again before one that is not here."""
        self.data, self._charge = aligned_memory(n_bytes, ledger)

    @property
    def n_bytes(self) -> int:
        """Bytes that the frame takes, whatever page it holds."""
        return self._charge.n_bytes

    @property
    def free(self) -> bool:
        """Another page may be read into the frame at once, and without loss."""
        idle = self.read is None or self.read.checked
        return idle and not (self.n_holds or self.fresh or self.wanted)

    def settle(self) -> None:
        """Wait until nothing reads into the frame; a page that came wrong is forgotten."""
        try:
            if self.read is not None:
                self.read.check()
        except Exception:
            # Whatever it was: nobody waits for the page now, and whoever wants it reads it again
            # and is told.
            self.forget()

    def forget(self) -> None:
        """The frame holds no page any more."""
        self.page, self.read, self.fresh, self.wanted = None, None, False, False

    def shrink(self, n_bytes: int) -> None:
        """Keep the first `n_bytes` (a multiple of 4096), give the rest back to the system."""
        if n_bytes < self.n_bytes:
            self.views.clear()
            memory: mmap.mmap = self.data.base.obj
            start = _address(self.data) - _address(memory)
            self.data = np.frombuffer(memory, np.uint8, n_bytes, start)
            memory.madvise(mmap.MADV_DONTNEED, start + n_bytes, self.n_bytes - n_bytes)
            self._charge.shrink(n_bytes)


class FrameTable:
    """Which page is in which frame.

    Pages in `own` have a frame each, of just their size; all others take turns in the moving
    frames. Memory is taken when a page is first placed. Nothing here reads, and nothing that is
    held is ever taken away.
    """

    def __init__(self, page_bytes: Sequence[int], ledger: Ledger):
        self._page_bytes, self._ledger = page_bytes, ledger
        self._own: frozenset[int] = frozenset()
        self._n_moving = self._moving_bytes = 0
        self._pinned: dict[int, Frame] = {}
        self._moving: list[Frame] = []
        self.n_evicted = 0
        """Pages that had been used and gave up their place."""
        self.n_unused = 0
        """Pages that were read ahead and gave up their place without being used."""

    @property
    def frames(self) -> list[Frame]:
        """Every frame there is."""
        return [*self._pinned.values(), *self._moving]

    @property
    def can_place(self) -> bool:
        """Some page that is not here could be."""
        n_own = sum(frame.page is not None for frame in self._pinned.values())
        unmade = n_own < len(self._own) or len(self._moving) < self._n_moving
        return unmade or any(frame.free for frame in self._moving)

    def owns(self, page: int) -> bool:
        """The page has, or will have, a frame of its own."""
        return page in self._own

    def find(self, page: int) -> Frame | None:
        """The frame that holds the page, or is being filled with it."""
        own = self._pinned.get(page)
        candidates = self._moving if own is None else (own,)
        return next((frame for frame in candidates if frame.page == page), None)

    def place(self, page: int, now: bool) -> Frame | None:
        """A frame for `page`, which is nowhere yet; None: all are in use.

        `now`: in place of a page that was read ahead, if need be.
        """
        if page in self._own:
            frame = self._pinned.get(page) or Frame(self._page_bytes[page], self._ledger, True)
            self._pinned[page] = frame
        elif len(self._moving) < self._n_moving:
            frame = Frame(self._moving_bytes, self._ledger, pinned=False)
            self._moving.append(frame)
        else:
            frame = next((f for f in self._moving if f.free), None)
            if frame is None and now:
                frame = next((f for f in self._moving if not f.n_holds), None)
            if frame is None:
                return None
            self._evict(frame)
        frame.page = page
        return frame

    def rearrange(
        self, own: frozenset[int], n_moving: int, moving_bytes: int, order: Sequence[int]
    ) -> int:
        """Change who owns a frame and what moves; returns how many pages gave up their place.

        A page stays where it can: owners first, then in the moving frames those that come first
        in `order`. No frame may be held. Nothing is allocated here.
        """
        frames, rank = self.frames, {page: i for i, page in enumerate(order)}
        for frame in frames:
            frame.settle()
        n_before = self.n_evicted + self.n_unused
        self._own, self._n_moving, self._moving_bytes = own, n_moving, moving_bytes
        self._pinned = {f.page: f for f in frames if f.page in own}
        others = [f for f in frames if f.page not in own]
        others.sort(key=lambda frame: rank.get(frame.page, len(rank)))
        self._moving = [f for f in others if f.n_bytes >= moving_bytes][:n_moving]
        for frame in others:
            if frame not in self._moving:
                self._evict(frame)
                frame.views.clear()
        for frame in self.frames:
            frame.pinned = frame.page in own
            frame.shrink(self._page_bytes[frame.page] if frame.pinned else moving_bytes)
        return self.n_evicted + self.n_unused - n_before

    def forget_failed(self) -> None:
        """Pages that were read ahead in vain are not here: they may be tried again."""
        for frame in self.frames:
            if frame.read is not None and frame.read.checked:
                frame.settle()

    def clear(self) -> None:
        """Let go of every frame, when nothing reads any more."""
        for frame in self.frames:
            frame.views.clear()
        self._own, self._n_moving = frozenset(), 0
        self._pinned, self._moving = {}, []

    def _evict(self, frame: Frame) -> None:
        assert not frame.n_holds, "a page in use keeps its place"
        frame.settle()
        self.n_unused += frame.fresh
        self.n_evicted += frame.page is not None and not frame.fresh
        frame.forget()


def aligned_memory(
    n_bytes: int, ledger: Ledger, line: str = "weights"
) -> tuple[np.ndarray, Charge]:
    """uint8[n_bytes] of page-aligned memory, on a line of the ledger until nothing refers to it.

    BudgetError: the line is full. The system gives the memory as it is written; what is mapped
    beyond it, for the sake of alignment, is never written and takes none.
    """
    slack = _HUGE_BYTES if n_bytes >= _HUGE_BYTES else 0
    memory = mmap.mmap(-1, n_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -_address(memory) % _HUGE_BYTES if slack else 0
    if slack and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, start, n_bytes // _HUGE_BYTES * _HUGE_BYTES)
    charge = ledger.charge(line, n_bytes, memory)
    return np.frombuffer(memory, np.uint8, n_bytes, start), charge


def _address(buffer: mmap.mmap | np.ndarray) -> int:
    return np.frombuffer(buffer, np.uint8, 1).ctypes.data
