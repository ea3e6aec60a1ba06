"""Which pages stay and how the others pass through: pure functions of sizes and times.

A dense model visits its pages 0..n-1 and then again, so every page's next use is known, and on
such a cycle the page just used is the one needed last: keeping the least recently used pages is the
worst choice, keeping a fixed *prefix* within one page of the best. So k pages are pinned, each in a
frame of its own size, and the others pass through one or two *moving* frames, each as large as
the largest of them. With c = k + moving frames, a pass over n pages reads

    n - c + 1 pages through one moving frame: a read waits until the page before it was used,
    n - c + 2 pages through two: the next page is read while this one computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

TYPICAL_COMPUTE_TO_READ = 4.0
"""Bytes computed in the time of one byte read, until both were measured: one token of a block is
bound by memory, which is some times faster than a disk."""
_PASSES = 6


@dataclass(frozen=True)
class Arrangement:
    """Pages 0..n_pinned-1 of the cycle have frames of their own; the rest share the moving ones.

    `n_moving` is 0 exactly where everything is pinned. `n_bytes` is what all the frames take.
    """

    n_pages: int
    n_pinned: int
    n_moving: int
    moving_bytes: int
    """Size of one moving frame: the largest page that is not pinned."""
    n_bytes: int

    @property
    def n_resident(self) -> int:
        """c: pages in memory at once."""
        return self.n_pinned + self.n_moving

    @property
    def page_ins_per_pass(self) -> int:
        """Pages read in every pass but the first."""
        return self.n_pages - self.n_pinned


def smallest_bytes(page_bytes: Sequence[int]) -> int:
    """What the frames take at least: one moving frame of the largest page."""
    return max(page_bytes, default=0)


def arrange(page_bytes: Sequence[int], budget_bytes: int, n_moving: int) -> Arrangement | None:
    """The longest pinned prefix beside `n_moving` moving frames; None where they do not fit.

    - The frames never take more than `budget_bytes`.
    - With more bytes no page that was pinned ceases to be.
    - A budget for all pages pins all pages, and nothing moves.
    """
    n, total = len(page_bytes), sum(page_bytes)
    if total <= budget_bytes:
        return Arrangement(n, n, 0, 0, total)
    best, pinned_bytes = None, 0
    for n_pinned in range(n):
        moving_bytes = max(page_bytes[n_pinned:])
        n_bytes = pinned_bytes + n_moving * moving_bytes
        if n_bytes <= budget_bytes:
            best = Arrangement(n, n_pinned, n_moving, moving_bytes, n_bytes)
        pinned_bytes += page_bytes[n_pinned]
    return best


def pass_seconds(
    read_s: Sequence[float], compute_s: Sequence[float], n_pinned: int, n_moving: int
) -> float:
    """Seconds of one pass over the pages once passes repeat, given each page's own times.

    Reads follow one another in the order of use, each as soon as its frame was let go; a page
    computes when it is there and the page before it is done.
    """
    read_done, computed, ends = 0.0, 0.0, []
    released = [0.0] * n_moving
    for _ in range(_PASSES):
        for page, seconds in enumerate(compute_s):
            if page >= n_pinned:
                read_done = max(read_done, released[0]) + read_s[page]
                computed = max(computed, read_done)
            computed += seconds
            if page >= n_pinned:
                released = [*released[1:], computed]
        ends.append(computed)
    return (ends[-1] - ends[1]) / (_PASSES - 2)


def choose(
    page_bytes: Sequence[int],
    budget_bytes: int,
    compute_to_read: float = TYPICAL_COMPUTE_TO_READ,
    n_pinned_kept: int = 0,
) -> Arrangement | None:
    """One or two moving frames: whichever passes faster; one where both do; None: neither fits.

    `compute_to_read` is the rate of computing over the rate of reading, both in page bytes a
    second. Only arrangements that keep the first `n_pinned_kept` pages pinned are considered.
    """
    arranged = (arrange(page_bytes, budget_bytes, n_moving) for n_moving in (1, 2))
    fitting = [a for a in arranged if a is not None and a.n_pinned >= n_pinned_kept]
    seconds = partial(relative_seconds, page_bytes, compute_to_read=compute_to_read)
    return min(fitting, key=seconds, default=None)


def relative_seconds(
    page_bytes: Sequence[int], arrangement: Arrangement, compute_to_read: float
) -> float:
    """Time of one pass, in units of the time in which one byte is read."""
    if not arrangement.n_moving:
        return sum(page_bytes) / compute_to_read
    compute = [n_bytes / compute_to_read for n_bytes in page_bytes]
    return pass_seconds(page_bytes, compute, arrangement.n_pinned, arrangement.n_moving)
