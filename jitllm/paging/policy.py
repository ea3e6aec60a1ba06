"""Which pages stay and how the others pass through: pure functions of sizes and times.

A dense model visits its pages 0..n-1 and then again, so every page's next use is known, and on
such a cycle the page just used is the one needed last: keeping the most recently used pages is the
worst choice, keeping a fixed set within one page of the best. So k pages are *pinned*, each in
a frame of its own size, and the others pass through one or two *moving* frames, each as large as
the largest of them. With c = k + moving frames, a pass over n pages reads

    n - c + 1 pages through one moving frame: a read waits until the page before it was used,
    n - c + 2 pages through two: the next page is read while this one computes.

Any k pages would do for these counts, but not for the time: pages that move are spread evenly over
the pass, so that the disk reads one while the pinned pages before it compute. With the pinned pages
in front, as a prefix, the disk would have nothing to do as soon as the moving frames are full.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial

TYPICAL_COMPUTE_TO_READ = 4.0
"""Bytes computed in the time of one byte read, until both were measured: one token of a block is
bound by memory, which is some times faster than a disk."""
WORTH_CHANGING = 0.85
"""Another number of moving frames is taken where it brings a pass below this part of its time."""
_GOLDEN = (5**0.5 - 1) / 2
_PASSES = 8
_WARM_PASSES = 3


@dataclass(frozen=True)
class Arrangement:
    """The pages at the positions `moving` share the moving frames; all others have their own.

    `n_moving` is 0 exactly where nothing moves. `n_bytes` is what all the frames take.
    """

    n_pages: int
    moving: tuple[int, ...]
    """Positions in the cycle, ascending."""
    n_moving: int
    """Moving frames: 0, 1 or 2."""
    moving_bytes: int
    """Size of one moving frame: the largest page that moves."""
    n_bytes: int

    @property
    def n_pinned(self) -> int:
        """k: pages with frames of their own."""
        return self.n_pages - len(self.moving)

    @property
    def n_resident(self) -> int:
        """c: pages in memory at once."""
        return self.n_pinned + self.n_moving

    @property
    def page_ins_per_pass(self) -> int:
        """Pages read in every pass but the first."""
        return len(self.moving)

    def keeps(self, other: "Arrangement") -> bool:
        """Whatever page `other` has in a frame can stay in one here."""
        room = self.n_moving == 0 or self.n_moving >= other.n_moving
        return room and set(self.moving) <= set(other.moving)


@cache
def spread(n_pages: int) -> tuple[int, ...]:
    """The positions 0..n-1 in an order whose every beginning lies evenly over the cycle.

    Multiples of the golden ratio, modulo 1, are such a sequence (the three-gap theorem).
    """
    order: dict[int, None] = {}
    step = 0
    while len(order) < n_pages:
        order[int(n_pages * (step * _GOLDEN % 1))] = None
        step += 1
    return tuple(order)


def smallest_bytes(page_bytes: Sequence[int]) -> int:
    """What the frames take at least: one moving frame of the largest page."""
    return max(page_bytes, default=0)


def arrange(page_bytes: Sequence[int], budget_bytes: int, n_moving: int) -> Arrangement | None:
    """The most pinned pages beside `n_moving` moving frames; None where they do not fit.

    - The frames never take more than `budget_bytes`.
    - With more bytes no page that was pinned ceases to be.
    - A budget for all pages pins all pages, and nothing moves.
    """
    n, pinned_bytes = len(page_bytes), sum(page_bytes)
    if pinned_bytes <= budget_bytes:
        return Arrangement(n, (), 0, 0, pinned_bytes)
    moving_bytes = 0
    for count, position in enumerate(spread(n), 1):
        pinned_bytes -= page_bytes[position]
        moving_bytes = max(moving_bytes, page_bytes[position])
        n_bytes = pinned_bytes + n_moving * moving_bytes
        if n_bytes <= budget_bytes:
            moving = tuple(sorted(spread(n)[:count]))
            return Arrangement(n, moving, n_moving, moving_bytes, n_bytes)
    return None


def pass_seconds(
    read_s: Sequence[float], compute_s: Sequence[float], moving: Collection[int], n_moving: int
) -> float:
    """Seconds of one pass over the pages once passes repeat, given each page's own times.

    Reads follow one another in the order of use, each as soon as its frame was let go; a page
    computes when it is there and the page before it is done.
    """
    read_done, computed, ends = 0.0, 0.0, []
    released = [0.0] * n_moving
    for _ in range(_PASSES):
        for page, seconds in enumerate(compute_s):
            if page in moving:
                read_done = max(read_done, released[0]) + read_s[page]
                computed = max(computed, read_done) + seconds
                released = [*released[1:], computed]
            else:
                computed += seconds
        ends.append(computed)
    return (ends[-1] - ends[_WARM_PASSES - 1]) / (_PASSES - _WARM_PASSES)


def choose(
    page_bytes: Sequence[int],
    budget_bytes: int,
    compute_to_read: float = TYPICAL_COMPUTE_TO_READ,
    kept: Arrangement | None = None,
) -> Arrangement | None:
    """One or two moving frames: whichever passes faster; one where both do; None: neither fits.

    `compute_to_read` is the rate of computing over the rate of reading, both in page bytes a
    second. Only arrangements that keep what `kept` holds are considered.
    """
    arranged = (arrange(page_bytes, budget_bytes, n_moving) for n_moving in (1, 2))
    fitting = [a for a in arranged if a is not None and (kept is None or a.keeps(kept))]
    seconds = partial(relative_seconds, page_bytes, compute_to_read=compute_to_read)
    return min(fitting, key=seconds, default=None)


def settle(
    page_bytes: Sequence[int], budget_bytes: int, compute_to_read: float
) -> Arrangement | None:
    """What a pager ends with: it begins with the typical rates' choice and, once it has measured
    `compute_to_read`, takes that one's where it is worth changing."""
    first = choose(page_bytes, budget_bytes)
    best = choose(page_bytes, budget_bytes, compute_to_read)
    if first is None or best is None:
        return best
    seconds = partial(relative_seconds, page_bytes, compute_to_read=compute_to_read)
    return best if seconds(best) < WORTH_CHANGING * seconds(first) else first


def relative_seconds(
    page_bytes: Sequence[int], arrangement: Arrangement, compute_to_read: float
) -> float:
    """Time of one pass, in units of the time in which one byte is read."""
    if not arrangement.n_moving:
        return sum(page_bytes) / compute_to_read
    compute = [n_bytes / compute_to_read for n_bytes in page_bytes]
    return pass_seconds(page_bytes, compute, set(arrangement.moving), arrangement.n_moving)
