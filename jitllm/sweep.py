"""Tokens a second over budgets, predicted and measured side by side."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jitllm.engine import Engine
from jitllm.errors import UsageError
from jitllm.outlook import Outlook, outlook, predict
from jitllm.prospect import Prospect

if TYPE_CHECKING:
    from jitllm.session import Session

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""progress(what, done_points, total_points)."""

_WARM_TOKENS, _MIN_TOKENS, _MAX_TOKENS = 3, 4, 64
_POINT_S = 1.5


@dataclass(frozen=True)
class Point:
    """One budget of a sweep."""

    budget_bytes: int
    page_ins: int
    """A token, as predicted."""
    bytes_read_per_token: int
    predicted_tokens_per_second: float
    measured_tokens_per_second: float


def sweep(
    prospect: Prospect,
    n_points: int = 8,
    say: Say = lambda _: None,
    progress: Progress = lambda *_: None,
) -> list[Point]:
    """`n_points` budgets from the smallest that works to the one that holds the whole model, or to
    the prospect's own where that is less.

    One engine goes through them, as a live change of its budget. UsageError for less than two
    points, or where the host has nothing to visit; BudgetError where the prospect's own is too
    little.
    """
    if n_points < 2:
        raise UsageError(f"a sweep has to have 2 points or more, but is asked for {n_points}")
    if not prospect.cycle:
        raise UsageError("a sweep is over the host's budget, but all of the model is elsewhere")
    budgets = _budgets(prospect, n_points)
    looks = _looks(prospect, budgets, say)
    points = []
    with Engine(_with_budget(prospect, budgets[0])) as engine, engine.session() as session:
        session.prefill([0])
        for number, (budget, look) in enumerate(zip(budgets, looks, strict=True), 1):
            engine.set_budget(budget)
            now = look.forecast.now
            points.append(
                Point(budget, now.page_ins, now.bytes_read, now.tokens_per_second, _rate(session))
            )
            progress("sweeping", number, n_points)
    return points


def _budgets(prospect: Prospect, n_points: int) -> list[int]:
    found = predict(prospect)
    low = found.smallest.budget_bytes
    high = min(found.whole.budget_bytes + prospect.embedding_bytes, prospect.budget_bytes)
    return [low + (high - low) * number // (n_points - 1) for number in range(n_points)]


def _looks(prospect: Prospect, budgets: list[int], say: Say) -> list[Outlook]:
    """The outlook of each budget, with the machine measured once."""
    first = outlook(_with_budget(prospect, budgets[0]), say)
    seen = (_with_budget(prospect, budget) for budget in budgets)
    return [replace(first, prospect=s, forecast=predict(s, first.rates)) for s in seen]


def _rate(session: "Session") -> float:
    """Tokens a second: of as many tokens as fit in a moment, after a few that settle the frames."""
    for token in range(_WARM_TOKENS):
        session.prefill([token])
    n_tokens, start, spent = 0, time.perf_counter(), 0.0
    while n_tokens < _MIN_TOKENS or (spent < _POINT_S and n_tokens < _MAX_TOKENS):
        session.prefill([n_tokens])
        n_tokens, spent = n_tokens + 1, time.perf_counter() - start
    session.truncate(1)
    return n_tokens / spent


def _with_budget(prospect: Prospect, budget_bytes: int) -> Prospect:
    longest = _WARM_TOKENS + _MAX_TOKENS + 1
    return replace(prospect.under(budget_bytes), max_seq=min(prospect.max_seq, longest))
