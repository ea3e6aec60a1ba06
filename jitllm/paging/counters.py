"""What a pager reports: what it did, what a budget came to, and how fast reads and steps went."""

from collections import deque
from dataclasses import dataclass
from statistics import median

from jitllm.paging.policy import TYPICAL_COMPUTE_TO_READ
from jitllm.paging.reader import Read

_SAMPLES = 8


@dataclass
class PagerCounters:
    """What the pager did so far."""

    page_ins: int = 0
    """Holds of a page that had to be read since its last hold, ahead or on demand."""
    evictions: int = 0
    """Pages that had been held and gave up their place."""
    frames: int = 0
    """Frames that hold pages of the cycle now."""
    bytes_read: int = 0
    """Asked of the file, everything together: pages read ahead and embedding rows as well."""
    embedding_bytes: int = 0
    """The part of `bytes_read` that was for embedding rows."""
    read_requests: int = 0
    blocked_s: float = 0.0
    """Time in which the stepping thread waited for reads or their hashes."""
    prefetch_on_time: int = 0
    """Page-ins read ahead and complete when the hold came."""
    prefetch_late: int = 0
    """Page-ins read ahead and not complete when the hold came."""
    prefetch_unused: int = 0
    """Pages read ahead that gave up their place before a hold came."""


@dataclass(frozen=True)
class Applied:
    """What a budget came to."""

    budget_bytes: int
    fixed_bytes: int
    """Taken by what is not a page of the cycle: the dense page, the embedding's look-ups."""
    frame_bytes: int
    """Taken by the frames of the cycle's pages, once they are filled."""
    n_pages: int
    n_resident: int
    """Pages of the cycle in memory at once."""
    n_resident_blocks: int
    n_pinned: int
    n_moving: int
    """Frames through which the other pages pass: none, one or two."""
    page_ins_per_pass: int
    page_in_bytes_per_pass: int
    evicted: int
    """Pages that gave up their place for this change."""


class Rates:
    """Bytes a second of reading and of computing, over the last few reads and passes."""

    def __init__(self) -> None:
        self.n_passes = 0
        self._passes = deque[float](maxlen=_SAMPLES)
        self._reads = deque[tuple[int, float]](maxlen=_SAMPLES)
        self._last_read_s = 0.0

    def saw_read(self, read: Read) -> None:
        """A page came in. Reads that overlap share the time in which they did."""
        begun = max(read.started_s, self._last_read_s)
        self._reads.append((read.n_bytes, max(read.finished_s - begun, 0.0)))
        self._last_read_s = max(read.finished_s, self._last_read_s)

    def saw_pass(self, n_bytes: int, compute_s: float) -> None:
        """All pages, `n_bytes` together, were computed with in `compute_s`, waits left out."""
        self.n_passes += 1
        self._passes.append(n_bytes / max(compute_s, 1e-9))

    @property
    def read_bytes_per_s(self) -> float | None:
        """None before the first read."""
        busy_s = sum(seconds for _, seconds in self._reads)
        return sum(n_bytes for n_bytes, _ in self._reads) / busy_s if busy_s else None

    @property
    def compute_bytes_per_s(self) -> float | None:
        """The median pass's; None before the first."""
        return median(self._passes) if self._passes else None

    @property
    def compute_to_read(self) -> float:
        """The rate of computing over that of reading; a typical one before both are known."""
        compute, read = self.compute_bytes_per_s, self.read_bytes_per_s
        return compute / read if compute and read else TYPICAL_COMPUTE_TO_READ
