"""KV of earlier prompts and replies, to start a new prompt that begins like one of them.

Entries are found by token ids alone, so what is restored is what would be computed. All of them
together stay within the ledger's `prefix_cache` line: room is made before an entry is stored, the
least recently used goes first, and one that is larger than the line is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jitllm.errors import BudgetError
from jitllm.paging.budget import Charge, Ledger

if TYPE_CHECKING:
    from jitllm.session import Session, Snapshot

MIN_TOKENS = 4
"""Fewer are not worth a copy."""


@dataclass(frozen=True, eq=False)
class _Entry:
    tokens: np.ndarray
    snapshot: Snapshot
    charge: Charge


@dataclass(frozen=True)
class PrefixCacheStats:
    """What a prefix cache holds and did."""

    budget_bytes: int
    used_bytes: int
    n_entries: int
    n_hits: int
    n_misses: int
    n_evicted: int


class PrefixCache:
    """At most `budget_bytes` of KV, 0 being none. One thread at a time."""

    def __init__(self, ledger: Ledger, budget_bytes: int, size_of: Callable[[int], int]):
        """`size_of(n_tokens)`: bytes of a snapshot of so many tokens, at most."""
        ledger.set_budget("prefix_cache", budget_bytes)
        self._ledger, self._size_of = ledger, size_of
        self._budget_bytes = budget_bytes
        self._entries: list[_Entry] = []  # the most recently used last
        self._n_hits = self._n_misses = self._n_evicted = 0

    @property
    def stats(self) -> PrefixCacheStats:
        """As it stands."""
        used = sum(entry.charge.n_bytes for entry in self._entries)
        counts = len(self._entries), self._n_hits, self._n_misses, self._n_evicted
        return PrefixCacheStats(self._budget_bytes, used, *counts)

    def restore(self, session: Session, ids: Sequence[int]) -> int:
        """Bring the KV of the longest known beginning of `ids` into `session`, which holds nothing
        afterwards but these tokens; how many they are.

        The last of `ids` is always left to compute: its logits begin the reply.
        """
        wanted = np.asarray(ids[:-1], np.int64)
        session.truncate(0)
        lengths = [_n_common(entry.tokens, wanted) for entry in self._entries]
        n_tokens = max(lengths, default=0)
        if n_tokens < MIN_TOKENS:
            self._n_misses += 1
            return 0
        self._n_hits += 1
        entry = self._entries.pop(lengths.index(n_tokens))
        self._entries.append(entry)
        session.restore(entry.snapshot)
        session.truncate(n_tokens)
        return n_tokens

    def store(self, session: Session) -> None:
        """Keep a copy of what `session` holds, in place of the entries that are its beginnings."""
        tokens = np.asarray(session.tokens, np.int64)
        if len(tokens) < MIN_TOKENS or self._size_of(len(tokens)) > self._budget_bytes:
            return
        if self._touch_longer(tokens):
            return
        for entry in [e for e in self._entries if _n_common(e.tokens, tokens) == len(e.tokens)]:
            self._drop(entry)
        while self._entries and not self._fits(len(tokens)):
            self._drop(self._entries[0])
            self._n_evicted += 1
        self._insert(tokens, session)

    def clear(self) -> None:
        """Give everything back."""
        for entry in list(self._entries):
            self._drop(entry)

    def _touch_longer(self, tokens: np.ndarray) -> bool:
        """Whether an entry begins with `tokens`; it counts as used now."""
        for entry in self._entries:
            if _n_common(entry.tokens, tokens) == len(tokens):
                self._entries.remove(entry)
                self._entries.append(entry)
                return True
        return False

    def _fits(self, n_tokens: int) -> bool:
        used = self._ledger.used("prefix_cache")
        return used + self._size_of(n_tokens) <= self._budget_bytes

    def _insert(self, tokens: np.ndarray, session: Session) -> None:
        try:
            charge = self._ledger.charge("prefix_cache", self._size_of(len(tokens)))
        except BudgetError:  # the limit of the whole process: other lines have taken the room
            return
        snapshot = session.snapshot(len(tokens))
        assert snapshot.n_bytes <= charge.n_bytes, "a snapshot is larger than was thought"
        charge.shrink(snapshot.n_bytes)
        self._entries.append(_Entry(tokens, snapshot, charge))

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        entry.charge.release()


def _n_common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
