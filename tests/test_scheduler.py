"""The scheduler on an engine that can be worked out by hand: who computes when, and who waits."""

import threading
import time
from itertools import pairwise

import pytest

from jitllm.errors import BudgetError, JitllmError
from jitllm.executor import CHUNK_TOKENS
from jitllm.rows import ClosedError, QueueFullError, Row
from jitllm.sampling import SamplingParams
from jitllm.scheduler import Scheduler
from tests.server.asking import wait_until
from tests.server.fake_engine import FakeEngine, FakeTokenizer

GREEDY = SamplingParams(temp=0)
ids = FakeTokenizer().encode


class Collected:
    """A sink that keeps everything; with `left` its client has gone away."""

    def __init__(self):
        self.tokens, self.prompt, self.ended = [], [], threading.Event()
        self.reason: str | None = None
        self.error: Exception | None = None
        self.left = False

    def gone(self) -> bool:
        return self.left

    def prompt_token(self, token, found) -> None:
        self.prompt.append((token, found))

    def token(self, token, found) -> bool:
        self.tokens.append(token)
        return False

    def end(self, reason, error) -> None:
        self.reason, self.error = reason, error
        self.ended.set()

    @property
    def text(self) -> str:
        return FakeTokenizer().decode(self.tokens)


@pytest.fixture
def make():
    made = []

    def make(engine: FakeEngine | None = None, n_rows=4, max_queue=8, cache=0) -> Scheduler:
        engine = engine or FakeEngine()
        options = {"n_rows": n_rows, "max_queue": max_queue, "prefix_cache_bytes": cache}
        made.append(Scheduler(engine, **options))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


def row(prompt: str | list[int] = "abc", n: int = 4, sink=None, **fields) -> Row:
    prompt = ids(prompt) if isinstance(prompt, str) else prompt
    return Row(prompt, GREEDY, sink or Collected(), max_tokens=n, **fields)


def run(scheduler: Scheduler, *rows: Row) -> list[Collected]:
    scheduler.submit(list(rows))
    for each in rows:
        assert each.sink.ended.wait(20)
    return [each.sink for each in rows]


def test_a_row_is_made_to_its_length(make):
    (sink,) = run(make(), row("abc", 4))
    assert (sink.text, sink.reason, sink.error) == ("defg", "length", None)


def test_rows_decode_together_and_join_and_leave_between_tokens(make):
    slow = FakeEngine(step_s=0.002)
    scheduler = make(slow)
    first = row("abc", 30)
    scheduler.submit([first])
    wait_until(lambda: len(first.sink.tokens) >= 3)
    (second,) = run(scheduler, row("ABC", 3))
    first.sink.ended.wait(20)
    assert second.text == "DEF"
    assert first.sink.text == "defghijklmnopqrstuvwxyz ABCDEFGHIJ"[:30]
    assert [len(rows) for rows in slow.passes].count(2) == 2  # the prompt gave its first token
    assert first.figures.max_rows == 2


def test_no_decode_waits_for_more_than_one_chunk_of_prompts(make):
    engine = FakeEngine(max_seq=8192, step_s=0.001)
    scheduler = make(engine)
    talk = row("abc", 40, ignore_eos=True)
    scheduler.submit([talk])
    wait_until(lambda: len(talk.sink.tokens) >= 3)
    run(scheduler, row(ids("a") * (4 * CHUNK_TOKENS), 1), row(ids("b") * (3 * CHUNK_TOKENS), 1))
    talk.sink.ended.wait(20)
    is_chunk = [len(rows[0]) > 1 for rows in engine.passes]
    assert sum(is_chunk) == 1 + 4 + 3
    assert not any(a and b for a, b in pairwise(is_chunk[1:]))
    assert scheduler.stats.n_chunks == 8
    assert engine.n_appended == 3 + 2  # nobody needs the logits of the other chunks


def test_steps_are_built_while_nobody_waits_and_not_while_somebody_does(make):
    engine = FakeEngine()
    engine.go_on.clear()  # the first pass of a reply takes as long as it takes
    building, built = threading.Event(), threading.Event()

    def first(session) -> None:
        building.set()
        built.wait(20)

    warm = engine.warm_ups(4)
    engine.warm_ups = lambda n_rows: [first, *warm]
    scheduler = make(engine)
    assert building.wait(20)
    talk = row("abc", 3)
    scheduler.submit([talk])
    built.set()
    time.sleep(0.05)
    assert engine.warmed == []
    engine.go_on.set()
    talk.sink.ended.wait(20)
    wait_until(lambda: len(engine.warmed) == len(warm))
    assert {n_rows for _, n_rows in engine.warmed} == {4}


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one(make):
    engine = FakeEngine(max_seq=8192, step_s=0.002)
    scheduler = make(engine)
    long = row(ids("a") * (8 * CHUNK_TOKENS), 1)
    scheduler.submit([long])
    wait_until(lambda: len(engine.passes) >= 1)
    (short,) = run(scheduler, row("xy", 1))
    assert not long.sink.ended.is_set()
    assert short.text == "z"


def test_more_rows_than_places_wait_their_turn(make):
    scheduler = make(n_rows=2, max_queue=8)
    rows = [row("abc", 3) for _ in range(6)]
    scheduler.submit(rows[:3])
    scheduler.submit(rows[3:])
    for each in rows:
        assert each.sink.ended.wait(20)
    assert {each.sink.text for each in rows} == {"def"}
    assert scheduler.stats.n_step_rows == 12


def test_a_queue_has_an_end(make):
    engine = FakeEngine()
    engine.go_on.clear()
    scheduler = make(engine, n_rows=1, max_queue=2)
    rows = [row() for _ in range(3)]
    for n, each in enumerate(rows):
        scheduler.submit([each])
        wait_until(lambda: scheduler.stats.n_queued == max(0, n))  # noqa: B023
    with pytest.raises(QueueFullError) as full:
        scheduler.submit([row()])
    assert full.value.retry_after_s >= 1
    engine.go_on.set()
    assert all(each.sink.ended.wait(20) for each in rows)


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding"])
def test_a_client_that_leaves_frees_its_place_within_a_step_and_disturbs_nobody(make, state):
    engine = FakeEngine(max_seq=8192, step_s=0.002)
    scheduler = make(engine, n_rows=2)
    neighbour = row("abc", 40)
    if state == "queued":
        blocker = row(ids("x") * CHUNK_TOKENS * 6, 1)
        scheduler.submit([neighbour])
        scheduler.submit([blocker])
        leaving = row("ABC", 10)
        scheduler.submit([leaving])
        wait_until(lambda: scheduler.stats.n_queued == 1)
    elif state == "prefilling":
        leaving = row(ids("x") * CHUNK_TOKENS * 8, 1)
        scheduler.submit([neighbour])
        scheduler.submit([leaving])
        wait_until(lambda: leaving.session is not None and leaving.session.tokens)
    else:
        leaving = row("xyz", 8000, ignore_eos=True)
        scheduler.submit([neighbour])
        scheduler.submit([leaving])
        wait_until(lambda: len(leaving.sink.tokens) >= 2)
    n_before = len(engine.passes)
    leaving.sink.left = True
    assert leaving.sink.ended.wait(5)
    # the turn under way, and the drop at the beginning of the next: a chunk and a step at most
    assert len(engine.passes) - n_before <= 3
    assert leaving.sink.reason == "cancelled"
    assert neighbour.sink.ended.wait(20)
    assert neighbour.sink.text == "defghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQ"[:40]


def test_a_failure_ends_the_row_it_is_of_and_no_other(make):
    engine = FakeEngine(step_s=0.002)
    engine.broken_token = ids("f")[0]
    bad, good = run(make(engine), row("abc", 8), row("xyz", 8))
    assert isinstance(bad.error, BudgetError)
    assert (bad.text, bad.reason) == ("def", "error")
    assert (good.text, good.error) == (" ABCDEFG", None)


def test_an_unexpected_failure_reaches_every_row_and_the_thread_goes_on(make):
    engine = FakeEngine()
    scheduler = make(engine)
    engine.stats = None  # type: ignore[assignment]  # cannot be called
    (sink,) = run(scheduler, row())
    assert isinstance(sink.error, TypeError)
    del engine.stats
    (sink,) = run(scheduler, row())
    assert sink.text == "defg"


def test_without_memory_for_another_cache_a_row_waits_for_one_that_is_there(make):
    engine = FakeEngine(step_s=0.001)
    session = engine.session

    def scarce():
        if engine.n_sessions == 1:
            raise BudgetError("kv would take too much", 1)
        return session()

    engine.session = scarce  # type: ignore[method-assign]
    sinks = run(make(engine), row("abc", 5), row("xyz", 5))
    assert [s.text for s in sinks] == ["defgh", " ABCD"]
    assert engine.n_sessions == 1


def test_a_model_with_no_memory_for_any_cache_says_so(make):
    engine = FakeEngine()

    def none():
        raise BudgetError("kv would take too much", 1)

    engine.session = none  # type: ignore[method-assign]
    (sink,) = run(make(engine), row())
    assert str(sink.error) == "kv would take too much"


def test_a_prompt_s_own_logprobs_are_those_of_each_token_after_the_first(make):
    sink = Collected()
    run(make(), row("abz", 1, sink, prompt_logprobs=True, n_logprobs=0))
    assert [token for token, _ in sink.prompt] == ids("abz")
    first, second, third = (found for _, found in sink.prompt)
    assert first is None
    assert second.chosen > -0.7
    assert third.chosen < -5


def test_a_draining_scheduler_finishes_what_it_has_and_takes_no_more(make):
    scheduler = make(FakeEngine(step_s=0.002))
    sink = Collected()
    scheduler.submit([row("abc", 20, sink)])
    assert scheduler.drain(20)
    assert (sink.reason, len(sink.tokens)) == ("length", 20)
    with pytest.raises(ClosedError):
        scheduler.submit([row()])


def test_a_closed_scheduler_ends_what_it_has_and_gives_its_caches_back(make):
    engine = FakeEngine(max_seq=100_000, step_s=0.001)
    scheduler = make(engine, cache=10**6)
    sinks = [Collected(), Collected()]
    scheduler.submit([row("abc", 90_000, sink, ignore_eos=True) for sink in sinks])
    wait_until(lambda: all(sink.tokens for sink in sinks))
    scheduler.close()
    assert [type(sink.error) for sink in sinks] == [ClosedError, ClosedError]
    assert engine.n_sessions == 0
    assert engine.ledger.used("prefix_cache") == 0


def test_a_change_happens_between_two_turns_on_the_scheduler_s_own_thread(make):
    engine = FakeEngine(step_s=0.001)
    scheduler = make(engine)
    sink = Collected()
    scheduler.submit([row("abc", 30, sink)])
    names = [scheduler.call(lambda: threading.current_thread().name) for _ in range(5)]
    assert set(names) == {"jitllm-scheduler"}
    with pytest.raises(JitllmError, match="no"):
        scheduler.call(lambda: (_ for _ in ()).throw(JitllmError("no")))
    assert sink.ended.wait(20)
    scheduler.close()
    assert scheduler.call(lambda: 5) == 5


def test_the_next_choice_for_a_prompt_begins_with_a_copy_of_its_kv(make):
    engine = FakeEngine()
    prompt = ids("abcdefgh")
    rows = [Row(prompt, GREEDY, Collected(), max_tokens=2) for _ in range(3)]
    run(make(engine, cache=10**6), *rows)
    assert {r.sink.text for r in rows} == {"ij"}
    assert [r.figures.cached_tokens for r in rows] == [0, 7, 7]


def test_what_a_row_took_is_measured(make):
    engine = FakeEngine(step_s=0.005)
    each = row("abc", 4)
    begun = time.perf_counter()
    run(make(engine), each)
    took = time.perf_counter() - begun
    figures = each.figures
    assert (figures.prompt_tokens, figures.generated_tokens, figures.n_steps) == (3, 4, 3)
    assert 0.005 <= figures.prefill_s <= took
    assert 0.015 <= figures.decode_s <= took
    assert figures.after.counters.page_ins - figures.before.counters.page_ins == 12
