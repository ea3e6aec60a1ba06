"""The prefix cache: found by ids, bounded by its line of the ledger, the oldest goes first."""

import pytest

from jitllm.paging.budget import Ledger
from jitllm.prefix_cache import PrefixCache
from tests.server.fake_engine import FakeEngine, FakeSession

ENTRY = 1024
"""Bytes of up to 16 tokens."""


def size_of(n_tokens: int) -> int:
    return -(-n_tokens // 16) * ENTRY


def holding(*tokens: int) -> FakeSession:
    session = FakeSession(FakeEngine())
    session.tokens = list(tokens)
    return session


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def cache(ledger: Ledger, n_entries: float) -> PrefixCache:
    return PrefixCache(ledger, int(n_entries * ENTRY), size_of)


def restored(found: PrefixCache, *ids: int) -> list[int]:
    session = holding(99, 98)
    n_tokens = found.restore(session, ids)
    assert session.tokens == list(ids[:n_tokens])
    return session.tokens


def test_the_longest_common_beginning_is_restored_and_never_the_last_id(ledger):
    found = cache(ledger, 4)
    found.store(holding(1, 2, 3, 4, 5, 6))
    found.store(holding(1, 2, 3, 4, 9, 9, 9))
    assert restored(found, 1, 2, 3, 4, 5, 7, 8) == [1, 2, 3, 4, 5]
    assert restored(found, 1, 2, 3, 4, 9, 9, 9) == [1, 2, 3, 4, 9, 9]
    assert restored(found, 1, 2, 3, 4, 5, 6) == [1, 2, 3, 4, 5]
    assert restored(found, 7, 2, 3, 4, 5, 6) == []
    assert (found.stats.n_hits, found.stats.n_misses) == (3, 1)


def test_a_few_tokens_are_not_worth_a_copy(ledger):
    found = cache(ledger, 4)
    found.store(holding(1, 2, 3))
    assert found.stats.n_entries == 0
    found.store(holding(1, 2, 3, 4))
    assert restored(found, 1, 2, 3, 9, 9) == []
    assert restored(found, 1, 2, 3, 4, 9) == [1, 2, 3, 4]


def test_a_longer_one_takes_the_place_of_its_beginnings(ledger):
    found = cache(ledger, 4)
    found.store(holding(1, 2, 3, 4))
    found.store(holding(1, 2, 3, 4, 5))
    found.store(holding(1, 2, 3, 4))
    assert found.stats.n_entries == 1
    assert ledger.used("prefix_cache") == ENTRY
    found.store(holding(*range(20, 40)))
    found.store(holding(1, 2, 3, 4))
    assert found.stats.n_entries == 2
    assert restored(found, 1, 2, 3, 4, 5, 6) == [1, 2, 3, 4, 5]


def test_the_least_recently_used_goes_before_another_is_stored(ledger):
    found = cache(ledger, 2)
    found.store(holding(1, 1, 1, 1, 1))
    found.store(holding(2, 2, 2, 2, 2))
    assert restored(found, 1, 1, 1, 1, 1)
    found.store(holding(3, 3, 3, 3, 3))
    assert restored(found, 2, 2, 2, 2, 2) == []
    assert restored(found, 1, 1, 1, 1, 1) and restored(found, 3, 3, 3, 3, 3)
    (line,) = [each for each in ledger.report().lines if each.name == "prefix_cache"]
    assert (line.peak_bytes, line.budget_bytes) == (2 * ENTRY, 2 * ENTRY)
    assert found.stats.n_evicted == 1


def test_one_that_is_larger_than_all_of_it_is_not_stored_and_costs_nothing(ledger):
    found = cache(ledger, 1)
    found.store(holding(1, 2, 3, 4, 5))
    found.store(holding(*range(17)))
    assert restored(found, 1, 2, 3, 4, 5)
    none = cache(Ledger(), 0)
    none.store(holding(1, 2, 3, 4, 5))
    assert none.stats.n_entries == 0


def test_what_other_lines_took_is_not_there_for_the_cache():
    ledger = Ledger(limit_bytes=10 * ENTRY)
    found = PrefixCache(ledger, 4 * ENTRY, size_of)
    ledger.charge("kv", 6 * ENTRY)
    found.store(holding(1, 2, 3, 4, 5))
    assert found.stats.used_bytes == ENTRY


def test_clearing_gives_everything_back(ledger):
    found = cache(ledger, 4)
    found.store(holding(1, 2, 3, 4, 5))
    found.clear()
    assert ledger.used("prefix_cache") == 0
    assert restored(found, 1, 2, 3, 4, 5) == []
