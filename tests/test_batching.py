"""Rows of one step on a real engine: what a row says does not depend on the rows beside it, on how
its prompt was cut, on what was cached, or on what the budget was meanwhile."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitllm import Engine
from jitllm.convert import convert
from jitllm.executor import CHUNK_TOKENS
from jitllm.placement.rules import Profile
from jitllm.rows import Row
from jitllm.sampling import SamplingParams
from jitllm.scheduler import Scheduler
from tests.test_scheduler import Collected, wait_until
from tests.tiny_models import N_VOCAB, write_tiny

GREEDY = SamplingParams(temp=0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("batching")
    source = write_tiny(folder / "m.gguf", "Q4_K", context_length=1024, n_blocks=3)
    with Engine.open(convert(source, folder / "m.jlm").out, devices="cpu", maxmem="64M") as engine:
        yield engine


@pytest.fixture
def make(engine: Engine):
    made = []

    def make(n_rows: int = 8, cache: int = 0) -> Scheduler:
        made.append(Scheduler(engine, n_rows=n_rows, max_queue=64, prefix_cache_bytes=cache))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


def prompt(seed: int, n_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [1, *(rng.randrange(3, N_VOCAB) for _ in range(n_tokens - 1))]


def row(ids: list[int], n: int = 12, params: SamplingParams = GREEDY, **fields) -> Row:
    return Row(ids, params, Collected(), max_tokens=n, ignore_eos=True, **fields)


def finish(scheduler: Scheduler, rows: list[Row], together: bool = True) -> list[list[int]]:
    if together:
        for each in rows:
            scheduler.submit([each])
    for each in rows:
        if not together:
            scheduler.submit([each])
        assert each.sink.ended.wait(60)
        assert each.sink.error is None
    return [each.sink.tokens for each in rows]


def test_a_row_alone_and_a_row_among_seven_say_the_same(make):
    kinds = [GREEDY, SamplingParams(temp=1.5, seed=7, repeat_penalty=1.2)]
    asked = [(prompt(i, 3 + 9 * i), 8 + 2 * i, kinds[i % 2]) for i in range(8)]
    scheduler = make()
    alone = finish(scheduler, [row(*each) for each in asked], together=False)
    rows = [row(*each) for each in asked]
    assert finish(scheduler, rows) == alone
    assert max(each.figures.max_rows for each in rows) > 2
    assert len({tuple(tokens) for tokens in alone}) == 8


def test_rows_say_what_the_engine_says_by_itself(make, engine):
    ids = prompt(3, 20)
    (tokens,) = finish(make(), [row(ids, 10)])
    generation = engine.generate(ids, n=10, temp=0)
    text = "".join(generation)
    assert generation.report.ids[: len(tokens)] == tokens[: len(generation.report.ids)]
    assert text


def test_a_long_prompt_beside_running_rows_changes_no_token(make):
    scheduler = make()
    asked = [(prompt(1, 5), 40), (prompt(2, CHUNK_TOKENS + 70), 4), (prompt(3, 600), 4)]
    alone = finish(scheduler, [row(*each) for each in asked], together=False)
    assert finish(scheduler, [row(*each) for each in asked]) == alone


def test_the_prefix_cache_changes_no_token_whatever_it_finds(make):
    rng = random.Random(4242)
    stems = [prompt(i, 60) for i in range(3)]
    asked = []
    for _ in range(24):
        stem = rng.choice(stems)
        asked.append(stem[: rng.randrange(1, 60)] + prompt(rng.randrange(4), rng.randrange(2, 9)))
    without = finish(make(cache=0), [row(ids, 6) for ids in asked])
    scheduler = make(cache=600_000)
    rows = [row(ids, 6) for ids in asked]
    assert finish(scheduler, rows, together=False) == without
    stats = scheduler.stats.prefix_cache
    assert stats.n_hits > 5 and stats.n_evicted > 0
    assert stats.used_bytes <= stats.budget_bytes
    assert sum(each.figures.cached_tokens for each in rows) > 100
    assert finish(scheduler, [row(ids, 6) for ids in asked]) == without


def test_a_conversation_that_goes_on_equals_one_long_prompt(make, engine):
    scheduler = make(cache=0)
    first, more = prompt(5, 30), prompt(6, 10)
    with engine.session() as session:
        (reply,) = finish(scheduler, [row(first, 6, session=session)])
        again = row([*first, *reply, *more], 6, session=session)
        (second,) = finish(scheduler, [again])
        assert again.figures.cached_tokens == 30 + 5
        (whole,) = finish(scheduler, [row([*first, *reply, *more], 6)])
        assert second == whole


def test_one_compiled_step_serves_two_to_four_rows_whatever_their_caches_hold(tmp_path: Path):
    source = write_tiny(tmp_path / "m.gguf", "Q4_K", context_length=1000, n_blocks=3)
    path = convert(source, tmp_path / "m.jlm").out
    lengths, ids = (40, 700, 30, 400), [5, 6, 7, 8]
    with Engine.open(path, devices="cpu", maxmem="64M", profile=Profile(relocate=True)) as engine:
        sessions, alone = [engine.session() for _ in lengths], []
        for i, (session, n) in enumerate(zip(sessions, lengths, strict=True)):
            session.prefill(prompt(i, n))
            alone.append(session.prefill([ids[i]]))
            session.truncate(n)
        assert len({session.capacity for session in sessions}) > 1
        engine.decode(sessions[:2], ids[:2])
        n_compiled = engine.stats().steps_compiled
        for chosen in ([2, 0, 3], [3, 1, 0, 2]):
            for i in chosen:
                sessions[i].truncate(lengths[i])
            rows = engine.decode([sessions[i] for i in chosen], [ids[i] for i in chosen])
            for row, i in zip(rows, chosen, strict=True):
                assert (row == alone[i]).all()
        assert engine.stats().steps_compiled == n_compiled


def test_after_a_warm_up_no_row_waits_for_a_step_to_be_built(tmp_path: Path):
    source = write_tiny(tmp_path / "m.gguf", "Q4_K", context_length=1000, n_blocks=3)
    path = convert(source, tmp_path / "m.jlm").out
    for budget in ("64M", "400K"):
        with Engine.open(path, devices="cpu", maxmem=budget) as engine:
            sessions = [engine.session() for _ in range(6)]
            for build in engine.warm_ups(6):
                build(sessions[0])
                assert not sessions[0].tokens
            n_compiled = engine.stats().steps_compiled
            assert n_compiled > 3
            for i, session in enumerate(sessions):
                session.prefill(prompt(i, (600, 3, 16, 17, 40, 200)[i]))
                engine.decode(sessions[: i + 1], range(3, 4 + i))
            assert engine.stats().steps_compiled == n_compiled


def test_tokens_appended_without_logits_are_as_good_as_any(engine):
    ids = prompt(5, 900)
    with engine.session() as whole, engine.session() as parts:
        expected = whole.prefill(ids)
        assert parts.append(ids[:550]) is None
        assert parts.tokens == ids[:550]
        assert (parts.prefill(ids[550:]) == expected).all()


def test_budgets_that_change_under_running_rows_change_no_token(make, engine):
    scheduler = make()
    asked = [(prompt(i, 20), 60) for i in range(4)]
    alone = finish(scheduler, [row(*each) for each in asked])
    before = engine.pager_counters().page_ins
    rows = [row(*each) for each in asked]
    for each in rows:
        scheduler.submit([each])
    smallest = engine._pager.smallest_bytes
    for n_bytes in (smallest, 2 * smallest, smallest, 64 << 20, smallest + 10_000):
        wait_until(lambda: scheduler.stats.n_decoding > 0)
        scheduler.call(lambda: engine.set_budget(n_bytes))  # noqa: B023
    for each in rows:
        assert each.sink.ended.wait(60)
    engine.set_budget(64 << 20)
    assert [each.sink.tokens for each in rows] == alone
    assert engine.pager_counters().page_ins > before


def test_rows_that_leave_change_no_token_of_the_others(make):
    scheduler = make()
    asked = [(prompt(i, 10), 40) for i in range(3)]
    alone = finish(scheduler, [row(*each) for each in asked])
    stay = [row(*each) for each in asked]
    leave = [row(prompt(10 + i, 300), 40) for i in range(4)]
    for each in (*stay, *leave):
        scheduler.submit([each])
    rng = random.Random(1)
    for each in leave:
        wait_until(lambda: len(each.sink.tokens) >= rng.randrange(3))  # noqa: B023
        each.sink.left = True
    for each in stay:
        assert each.sink.ended.wait(60)
    assert [each.sink.tokens for each in stay] == alone
    assert all(each.sink.ended.wait(60) for each in leave)


def test_a_prompt_s_logprobs_are_those_of_the_engine(make, engine):
    from jitllm.model.sampler import logprobs

    ids = prompt(8, 70)
    asked = row(ids, 1, prompt_logprobs=True, n_logprobs=2)
    finish(make(cache=10**6), [asked])
    scores = engine.logits(ids)
    expected = [(ids[0], None)]
    expected += [(b, logprobs(scores[i], b, 2)) for i, b in enumerate(ids[1:])]
    assert asked.sink.prompt == expected


def test_a_snapshot_counts_as_what_it_is_and_fits_a_cache_that_has_yet_to_grow(tmp_path: Path):
    source = write_tiny(tmp_path / "m.gguf", "Q4_K", context_length=1000, n_blocks=2)
    path = convert(source, tmp_path / "m.jlm").out
    with Engine.open(path, devices="cpu", maxmem="64M", profile=Profile(relocate=True)) as engine:
        scheduler = Scheduler(engine, n_rows=2, max_queue=9, prefix_cache_bytes=10**7)
        ids = prompt(1, 700)
        (alone,) = finish(scheduler, [row(ids, 6)])
        with engine.session() as session:
            session.prefill(ids[:500])
            # runs of 128 positions: six for the reply before, four for this
            assert engine.ledger.used("prefix_cache") == session.snapshot().n_bytes * 6 // 4
            small = engine.session()
            assert small.capacity < 300
            small.restore(session.snapshot(300))
            assert small.tokens == ids[:300]
            small.close()
        rows = [row(ids, 6), row(ids[:650] + prompt(2, 5), 6), row(ids, 6)]
        assert finish(scheduler, rows)[::2] == [alone, alone]
        assert [each.figures.cached_tokens for each in rows] == [699, 650, 699]
        scheduler.close()


def test_the_ledger_holds_every_cache_and_gives_it_back(engine, tmp_path: Path):
    before = engine.ledger.used("kv")
    scheduler = Scheduler(engine, n_rows=3, max_queue=9, prefix_cache_bytes=10**6)
    finish(scheduler, [row(prompt(i, 9), 3) for i in range(6)])
    per_session = engine.memory_report().kv_bytes
    assert before < engine.ledger.used("kv") <= before + 3 * per_session
    assert engine.ledger.used("prefix_cache") > 0
    scheduler.close()
    assert engine.ledger.used("kv") == before
    assert engine.ledger.used("prefix_cache") == 0
