"""The Python API: replies that are left, failed or resumed, ids that are none, engines that are
closed."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jitllm.convert import convert
from jitllm.engine import Engine
from jitllm.errors import BudgetError, JitllmError, UsageError
from jitllm.sampling import SamplingParams
from tests.tiny_models import N_VOCAB, write_tiny

GREEDY = SamplingParams(n=4, temp=0)
TEMPLATE = "{% for m in messages %}{{ m.content }}|{% endfor %}"


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    source = write_tiny(folder / "m.gguf", "llama", n_blocks=3)
    return convert(source, folder / "m.jlm", chat_template=TEMPLATE).out


@pytest.fixture
def engine(container: Path) -> Iterator[Engine]:
    with Engine.open(container, devices="cpu", max_seq=64) as engine:
        yield engine


def reply(engine: Engine, prompt: list[int], n: int = 6) -> str:
    return "".join(engine.generate(prompt, n=n, temp=0))


def test_a_reply_that_is_left_does_not_change_the_next(engine):
    whole = reply(engine, [1, 40, 41])
    for _ in engine.generate([1, 40, 41], n=6, temp=0):
        break
    assert reply(engine, [1, 40, 41]) == whole


def test_a_second_reply_ends_the_first(engine):
    first = engine.generate([1, 40, 41], n=6, temp=0)
    next(first)
    assert reply(engine, [1, 40, 41])
    assert list(first) == []
    assert first.report.finish_reason == "cancelled"


@pytest.mark.parametrize("ids", [[1, -1], [N_VOCAB], [2**40]])
def test_ids_that_are_none_are_refused_with_those_that_are(engine, ids):
    for use in (engine.logits, lambda ids: reply(engine, ids)):
        with pytest.raises(UsageError, match=f"token ids are 0 to {N_VOCAB - 1}"):
            use(ids)


def test_ids_may_come_as_an_array_but_not_as_fractions(engine):
    ids = [1, 40, 41]
    assert np.array_equal(engine.logits(np.array(ids)), engine.logits(ids))
    assert reply(engine, np.array(ids)) == reply(engine, ids)
    with pytest.raises(TypeError):
        engine.logits([1.5])


def test_a_text_that_does_not_fit_is_refused_with_the_numbers(engine):
    with pytest.raises(UsageError, match="65 tokens do not fit in a context of 64; shorten"):
        engine.logits([1] * 65)
    with engine.session() as session:
        session.prefill([1] * 60)
        with pytest.raises(UsageError, match=r"5 tokens .* of 64, of which 60 are taken"):
            session.prefill([1] * 5)


def test_a_turn_that_failed_is_no_part_of_the_conversation(engine):
    with engine.session() as session:
        with pytest.raises(UsageError, match="do not fit"):
            list(session.chat("x" * 100, GREEDY))
        turn = session.chat("hi", GREEDY)
        assert turn.report.prompt_tokens < 20
        list(turn)
        assert turn.report.finish_reason == "length"


def test_a_turn_that_was_stopped_is_part_of_it(engine):
    with engine.session() as session:
        turn = session.chat("hi", GREEDY)
        next(turn)
        turn.close()
        alone = turn.report.prompt_tokens
        assert session.chat("hi", GREEDY).report.prompt_tokens > alone


def test_one_stop_may_be_a_plain_text(engine):
    whole = reply(engine, [1, 40, 41], n=12)
    stopped = engine.generate([1, 40, 41], n=12, temp=0, stop=whole[-2:])
    assert "".join(stopped) == whole[: whole.index(whole[-2:])]
    assert stopped.report.finish_reason == "stop"


def test_a_budget_may_be_text_and_changes_between_two_tokens(engine):
    whole = reply(engine, [1, 40, 41])
    pieces = engine.generate([1, 40, 41], n=6, temp=0)
    begin = next(pieces)
    with pytest.raises(BudgetError) as refusal:
        engine.set_budget("1K")
    smallest = refusal.value.smallest_bytes
    assert engine.set_budget(f"{smallest}B").budget_bytes == smallest
    assert begin + "".join(pieces) == whole


def test_a_closed_engine_says_so(container):
    engine = Engine.open(container, devices="cpu", max_seq=64)
    held = engine.generate([1, 40, 41], n=6, temp=0)
    next(held)
    engine.close()
    for use in (lambda: engine.logits([1]), lambda: list(held), lambda: reply(engine, [1])):
        with pytest.raises(JitllmError, match="was closed"):
            use()
    engine.close()


def test_a_reply_is_not_ended_in_the_middle_of_another_thread_s_step(engine, monkeypatch):
    whole = reply(engine, [1, 40, 41])
    inside, go_on, forward = threading.Event(), threading.Event(), engine.forward

    def slow(*args):
        inside.set()
        assert go_on.wait(60)
        return forward(*args)

    monkeypatch.setattr(engine, "forward", slow)
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(reply(engine, [1, 40, 41])))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(JitllmError, match="another thread is at work"):
        engine.generate([1, 40, 41], n=6, temp=0)
    go_on.set()
    thread.join(60)
    assert texts == [whole]


def test_closing_waits_for_the_pass_under_way(container):
    engine = Engine.open(container, devices="cpu", max_seq=64)
    ended: list[Exception] = []
    begun = threading.Event()

    def talk() -> None:
        try:
            while True:
                for _ in engine.generate([1, 40, 41], temp=0):
                    begun.set()
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=talk)
    thread.start()
    assert begun.wait(60)
    engine.close()
    thread.join(60)
    assert [type(error) for error in ended] == [JitllmError]
