"""What a budget will cost, before a weight is read: page-ins, bytes and time per token. Pure.

Which pages a budget keeps is the page policy's to say, and placement does not know it: the engine
composes the two. It gives the policy as functions, with the page sizes it measured the machine for:

    ratio = compute_bytes_per_s / read_bytes_per_s
    workload = Workload(
        page_bytes,
        arrange=lambda n_bytes: policy.choose(page_bytes, n_bytes, ratio),
        pass_seconds=policy.pass_seconds,
        ...,
    )
    forecast(workload, maxmem_bytes)

Since the faster arrangement is always chosen, an arrangement that a larger budget replaced does
not come back with a still larger one; so every threshold here is found by bisection.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from jitllm.errors import BudgetError
from jitllm.units import format_size, told_apart


class Arrangement(Protocol):
    """What the page policy makes of a budget; equal where it makes the same."""

    moving: Sequence[int]
    """Positions of the pages that are read in every pass; all others stay in memory."""
    n_moving: int
    """Frames they pass through; 0 exactly where nothing moves."""


@dataclass(frozen=True)
class Workload:
    """The pages the host visits for one token, and the machine that does it."""

    page_bytes: Sequence[int]
    """In the order of the visits."""
    compute_s: Sequence[float]
    """What computing with each page takes for one token."""
    read_bytes_per_s: float
    """The disk's rate at the size of a page."""
    arrange: Callable[[int], Arrangement | None]
    """The arrangement for so many bytes of frames; None where there is none."""
    pass_seconds: Callable[[Sequence[float], Sequence[float], Collection[int], int], float]
    """(read_s, compute_s, moving, n_moving) -> seconds of one pass over all pages."""
    fixed_bytes: int = 0
    """Of the budget, what is not frames: the dense page, staging."""
    elsewhere_s: float = 0.0
    """Time per token that is not the host's pages: other devices, the sampler."""


@dataclass(frozen=True)
class Cost:
    """What one token costs under a budget."""

    budget_bytes: int
    """The smallest budget that costs this."""
    n_resident: int
    """Pages in memory at once."""
    n_moving: int
    """Of those, in moving frames."""
    page_ins: int
    bytes_read: int
    """Of those pages; embedding rows, a sector or two, are apart."""
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens a second."""
        return 1 / self.seconds


@dataclass(frozen=True)
class Forecast:
    """What a budget costs, and what other budgets would."""

    budget_bytes: int
    now: Cost
    up: Cost | None
    """The next budget that changes something; None where all pages are in memory."""
    down: Cost | None
    """The next smaller budget that does as much as it can; None below the smallest."""
    smallest: Cost
    """The smallest budget that works."""
    whole: Cost
    """The smallest budget with which no page is read twice."""


def forecast(workload: Workload, budget_bytes: int) -> Forecast:
    """What `budget_bytes` will cost. BudgetError where it does not work, with the smallest."""
    now = cost(workload, budget_bytes)
    smallest_bytes, whole_bytes = _smallest(workload), _whole(workload)
    below = now.budget_bytes - 1
    return Forecast(
        budget_bytes=budget_bytes,
        now=now,
        up=cost(workload, _next(workload, budget_bytes)) if budget_bytes < whole_bytes else None,
        down=cost(workload, below) if below >= smallest_bytes else None,
        smallest=cost(workload, smallest_bytes),
        whole=cost(workload, whole_bytes),
    )


def cost(workload: Workload, budget_bytes: int) -> Cost:
    """What one token costs under `budget_bytes`: one point of a sweep. BudgetError as above."""
    arranged = _arranged(workload, budget_bytes)
    if arranged is None:
        smallest_bytes = _smallest(workload)
        asked, _ = told_apart(budget_bytes, smallest_bytes)
        raise BudgetError(
            f"a budget of {asked} is too small for this model: the smallest "
            f"that works is {format_size(smallest_bytes)} ({smallest_bytes} bytes)",
            smallest_bytes,
        )
    read_s = [n_bytes / workload.read_bytes_per_s for n_bytes in workload.page_bytes]
    moving = frozenset(arranged.moving)
    pages_s = workload.pass_seconds(read_s, workload.compute_s, moving, arranged.n_moving)
    return Cost(
        budget_bytes=_first(
            _smallest(workload), budget_bytes, lambda b: _arranged(workload, b) == arranged
        ),
        n_resident=len(read_s) - len(moving) + arranged.n_moving,
        n_moving=arranged.n_moving,
        page_ins=len(moving),
        bytes_read=sum(workload.page_bytes[page] for page in moving),
        seconds=pages_s + workload.elsewhere_s,
    )


def _arranged(workload: Workload, budget_bytes: int) -> Arrangement | None:
    return workload.arrange(budget_bytes - workload.fixed_bytes)


def _all_bytes(workload: Workload) -> int:
    return sum(workload.page_bytes) + workload.fixed_bytes


def _smallest(workload: Workload) -> int:
    everything = _all_bytes(workload)
    return _first(0, everything, lambda b: _arranged(workload, b) is not None)


def _whole(workload: Workload) -> int:
    def holds_all(budget_bytes: int) -> bool:
        arranged = _arranged(workload, budget_bytes)
        return arranged is not None and not arranged.n_moving

    return _first(0, _all_bytes(workload), holds_all)


def _next(workload: Workload, budget_bytes: int) -> int:
    arranged = _arranged(workload, budget_bytes)
    everything = _all_bytes(workload)
    return _first(budget_bytes, everything, lambda b: _arranged(workload, b) != arranged)


def _first(low: int, high: int, is_so: Callable[[int], bool]) -> int:
    """The smallest number of [low, high] for which `is_so`, which is true from there on."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_so(middle) else (middle + 1, high)
    return low
