"""Blocks move between two tokens with the KV of every conversation: nobody hears of it."""

import gc
import random
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jitllm.engine import Engine
from jitllm.errors import BudgetError, DeviceError, FormatError, JitllmError, UsageError
from jitllm.paging.container import Container
from jitllm.paging.pager import Pager
from jitllm.placement.changes import move
from jitllm.session import Session
from jitllm.stores import DeviceStore
from tests import placing
from tests.placing import MIB, N_REPLY, PROMPT, check_ledgers, conversation, rules, runs, says

AMPLE = "cpu:1=64M,cpu:2=64M"
LONG = [1] + [3 + (7 * i) % 480 for i in range(299)]
"""More tokens than a cache holds at first where it may grow."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return placing.container(folder, n_blocks=5, context_length=1024)


@pytest.fixture(scope="module")
def expected(model: Path) -> np.ndarray:
    with conversation(model) as (_, session):
        return says(session)


@pytest.fixture(scope="module")
def expected_long(model: Path) -> np.ndarray:
    with conversation(model, max_seq=1024) as (_, session):
        return says(session, LONG)


def state(engine: Engine) -> tuple:
    """Everything that a move which failed has to leave alone."""
    stats = engine.stats()
    sessions = [[kv[0].devices() for kv in s._kvs] for s in engine._sessions]
    ledgers = [engine._residence.ledgers[device.id] for device in engine.devices[1:]]
    used = [[line.used_bytes for line in ledger.report().lines] for ledger in ledgers]
    return engine.plan, used, sessions, engine._pager.cycle, stats.moves["moved"]


@pytest.mark.parametrize("seed", range(4))
def test_ids_and_logits_stay_while_blocks_move_at_random(
    seed: int, model: Path, expected: np.ndarray
) -> None:
    """Under budgets that hold most of the model, and a host that pages: some moves are refused."""
    chance = random.Random(seed)
    with Engine.open(model, max_seq=48, devices=AMPLE) as engine:
        whole = engine.plan.use("cpu:1")
        block = engine.plan.blocks[0]
    budget = whole.n_bytes - 2 * block.n_bytes
    options = {"maxmem": "500K", "profile": rules("1=cpu:1~,3=cpu:2~,*=host")}
    with conversation(model, devices=f"cpu:1={budget},cpu:2={budget}", **options) as (
        engine,
        session,
    ):
        rows, planned, refused = [], Counter(), 0
        for token in range(len(PROMPT) + N_REPLY):
            first = chance.randrange(5)
            last, to = chance.randrange(first, 5), chance.choice(["host", "cpu:1", "cpu:2"])
            before = state(engine)
            try:
                session.move(first, last, to)
                assert {b.device for b in engine.plan.blocks[first : last + 1]} == {to}
            except BudgetError:
                refused += 1
                assert state(engine) == before
            check_ledgers(engine)
            planned.update(runs(engine.plan))
            fed = PROMPT[token] if token < len(PROMPT) else int(rows[-1].argmax())
            rows.append(session.prefill([fed]))
        np.testing.assert_array_equal(rows, expected)
        assert engine.stats().blocks_executed == planned
        assert engine.stats().moves["moved"] > 10
        assert 0 < refused < 20


def test_blocks_move_from_device_to_device_and_streamed_ones_come_to_rest(
    model: Path, expected: np.ndarray
) -> None:
    profile = rules("0-1=cpu:1~,2=cpu:1,3-4=cpu:2~")
    with conversation(model, devices=AMPLE, profile=profile) as (engine, session):
        rows = [session.logits(PROMPT)]
        for first, last, to in ((0, 0, "cpu:1"), (1, 4, "cpu:2"), (2, 3, "cpu"), (0, 4, "cpu:1")):
            engine.move(first, last, to)
            check_ledgers(engine)
            rows.append(session.prefill([int(rows[-1][-1].argmax())])[None])
            assert engine.stats().last_pass == runs(engine.plan)
        np.testing.assert_array_equal(np.concatenate(rows), expected[: len(PROMPT) + 4])
        assert [(block.device, block.mode) for block in engine.plan.blocks] == [
            ("cpu:1", "resident")
        ] * 5


def test_memory_on_a_device_goes_with_the_blocks(model: Path) -> None:
    """Counted in JAX's arrays, not in the ledger."""
    before = placing.live_bytes("cpu:1")
    with conversation(model, devices="cpu:1=64M", profile=rules("*=host")) as (engine, session):
        session.prefill(PROMPT)
        assert placing.live_bytes("cpu:1") == before
        session.move(1, 3, "cpu:1")
        session.prefill([5])
        blocks = engine.plan.blocks[1:4]
        there = sum(block.n_bytes + block.kv_bytes for block in blocks)
        assert 0.9 * there < placing.live_bytes("cpu:1") - before <= there
        session.move(0, 4, "host")
        assert placing.live_bytes("cpu:1") == before


def test_a_move_that_does_not_fit_is_refused_with_the_missing_bytes(
    model: Path, expected: np.ndarray
) -> None:
    with Engine.open(model, max_seq=48, devices="cpu:1=64M") as engine:
        use, block = engine.plan.use("cpu:1"), engine.plan.blocks[0]
    budget = use.workspace_bytes + 2 * (block.n_bytes + block.kv_bytes) + 1024
    profile = rules("0=cpu:1,*=host")
    with conversation(model, devices=f"cpu:1={budget}", profile=profile) as (engine, session):
        rows = [session.logits(PROMPT)]
        before = state(engine)
        missing = block.n_bytes + block.kv_bytes - 1024
        with pytest.raises(BudgetError) as refusal:
            session.move(1, 2, "cpu:1")
        assert refusal.value.smallest_bytes == budget + missing
        assert f"which lacks {missing / 1024:.1f} KiB; nothing was moved" in str(refusal.value)
        assert state(engine) == before
        session.move(1, 1, "cpu:1")
        rows.append(session.prefill([int(rows[-1][-1].argmax())])[None])
        np.testing.assert_array_equal(np.concatenate(rows), expected[: len(PROMPT) + 1])
        check_ledgers(engine)


def test_a_pinned_block_and_an_unknown_place_refuse(model: Path) -> None:
    profile = rules("2=cpu:1!,*=host")
    with conversation(model, devices="cpu:1=64M", profile=profile) as (engine, session):
        before = state(engine)
        for arguments, error, sentence in (
            ((1, 3, "cpu:1"), UsageError, "block 2 is pinned to cpu:1 by 2=cpu:1!"),
            ((2, 2, "host"), UsageError, "block 2 is pinned"),
            ((0, 9, "cpu:1"), UsageError, "blocks 0-9 are not there; the model has 0-4"),
            ((0, 1, "cuda:0"), DeviceError, "cuda:0 is not among the devices that are open"),
        ):
            with pytest.raises(error, match=sentence):
                session.move(*arguments)
        assert state(engine) == before


def fail(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at: int, error: Exception):
    """Let the call number `at` of a method fail."""
    real, calls = getattr(owner, name), []

    def call(*arguments: object, **options: object) -> object:
        calls.append(name)
        if len(calls) == at:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


FULL = RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 byte")


STREAMED = "*=cpu:1~,head=host"
FAILURES = [
    (Pager, "fetch", 1, FormatError("a damaged page"), "a damaged page"),
    (Pager, "fetch", 3, FormatError("a damaged page"), "a damaged page"),
    (DeviceStore, "put", 2, FULL, "cpu:1 did not take what was put on it: RESOURCE_EXHAUSTED"),
    (Session, "copy_kv", 1, FULL, "cpu:1 did not take"),
    (Session, "copy_kv", 5, FULL, "cpu:1 did not take"),
]
CASES = [
    (placement, *failure)
    for placement in ("*=host", "*=cpu:2", STREAMED)
    for failure in FAILURES
    # The caches of streamed blocks are there already.
    if (placement, failure[0]) != (STREAMED, Session)
]


@pytest.mark.parametrize(("placement", "owner", "name", "at", "error", "raised"), CASES)
def test_a_move_that_fails_in_the_middle_leaves_everything_as_it_was(
    placement: str,
    owner: type,
    name: str,
    at: int,
    error: Exception,
    raised: str,
    model: Path,
    expected: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"devices": AMPLE, "profile": rules(placement), "maxmem": "500K"}
    with conversation(model, **options) as (engine, session), engine.session() as other:
        rows = [session.logits(PROMPT)]
        other.prefill(PROMPT[:4])
        before, bytes_before = state(engine), placing.live_bytes("cpu:1")
        fail(monkeypatch, owner, name, at, error)
        with pytest.raises(JitllmError, match=raised):
            session.move(1, 3, "cpu:1")
        assert state(engine) == before
        # Pages that were on their way through slots are gone, and will be again.
        assert placing.live_bytes("cpu:1") <= bytes_before
        for _ in range(N_REPLY - 1):
            rows.append(session.prefill([int(rows[-1][-1].argmax())])[None])
        session.move(1, 3, "cpu:1")
        rows.append(session.prefill([int(rows[-1][-1].argmax())])[None])
        np.testing.assert_array_equal(np.concatenate(rows), expected)
        assert engine.stats().last_pass["cpu:1"] >= 3
        check_ledgers(engine)


def test_a_page_damaged_on_disk_does_not_move(tmp_path: Path, expected: np.ndarray) -> None:
    path = placing.container(tmp_path, n_blocks=5, context_length=1024)
    pages = Container.open(path)
    page = pages.pages[pages.pages_of("block")[3]]
    with conversation(path, devices="cpu:1=64M", profile=rules("*=host")) as (engine, session):
        rows = [session.logits(PROMPT)]
        with path.open("r+b") as file:
            file.seek(page.offset + 100)
            byte = file.read(1)[0]
            file.seek(page.offset + 100)
            file.write(bytes([byte ^ 1]))
        before = state(engine)
        with pytest.raises(FormatError, match="damaged block page 3"):
            session.move(2, 4, "cpu:1")
        assert state(engine) == before
        # The host has the page in memory, as it was.
        for _ in range(N_REPLY):
            rows.append(session.prefill([int(rows[-1][-1].argmax())])[None])
        np.testing.assert_array_equal(np.concatenate(rows), expected)


def test_another_thread_moves_blocks_while_tokens_come(model: Path, expected: np.ndarray) -> None:
    with conversation(model, devices=AMPLE, profile=rules("*=host")) as (engine, session):
        stop, errors = threading.Event(), []

        def move_about() -> None:
            chance = random.Random(5)
            while not stop.is_set():
                first = chance.randrange(5)
                to = chance.choice(["host", "cpu:1", "cpu:2"])
                try:
                    engine.move(first, chance.randrange(first, 5), to)
                except Exception as error:
                    errors.append(error)

        thread = threading.Thread(target=move_about)
        thread.start()
        try:
            for _ in range(3):
                session.reset()
                np.testing.assert_array_equal(says(session), expected)
        finally:
            stop.set()
            thread.join()
        assert not errors
        assert engine.stats().moves["moved"] > 10
        assert len(engine.stats().blocks_executed) > 1


# Several conversations


def budget_for(model: Path, n_blocks: int, n_tokens: int, max_seq: int = 48) -> int:
    """What a device needs for `n_blocks` resident blocks with caches of `n_tokens`."""
    with Engine.open(model, max_seq=max_seq, devices="cpu:1=64M") as engine:
        use, block = engine.plan.use("cpu:1"), engine.plan.blocks[0]
        kv_bytes = block.kv_bytes // max_seq * n_tokens
        return use.workspace_bytes + n_blocks * (block.n_bytes + kv_bytes)


def test_the_kv_of_every_conversation_moves_along_and_counts(
    model: Path, expected: np.ndarray
) -> None:
    budget = budget_for(model, 3, n_tokens=2 * 48)
    profile = rules("*=host")
    with conversation(model, devices=f"cpu:1={budget}", profile=profile) as (engine, session):
        first = [session.logits(PROMPT)]
        with engine.session() as other:
            second = [other.logits(PROMPT)]
            with pytest.raises(BudgetError, match="blocks 1-4 do not fit on cpu:1"):
                engine.move(1, 4, "cpu:1")
            engine.move(1, 3, "cpu:1")
            check_ledgers(engine)
            with pytest.raises(BudgetError, match="for the KV of one more conversation"):
                engine.session()
            check_ledgers(engine)
            for rows, one in ((first, session), (second, other)):
                rows.append(one.prefill([int(rows[-1][-1].argmax())])[None])
                np.testing.assert_array_equal(np.concatenate(rows), expected[: len(PROMPT) + 1])
        # Room for another conversation, or for more blocks.
        check_ledgers(engine)
        engine.session().close()
        check_ledgers(engine)


def test_a_conversation_that_is_forgotten_gives_its_bytes_back(model: Path) -> None:
    budget = budget_for(model, 5, n_tokens=2 * 48)
    profile = rules("*=cpu:1,head=host")
    with conversation(model, devices=f"cpu:1={budget}", profile=profile) as (engine, _):
        for _ in range(3):
            forgotten = engine.session()
            forgotten.prefill(PROMPT)
            del forgotten
            gc.collect()
        engine.session().close()
        check_ledgers(engine)


def test_a_new_budget_is_in_the_plan(model: Path) -> None:
    with conversation(model, devices="cpu:1=64M", profile=rules("0=cpu:1,*=host")) as (engine, _):
        assert {part.mode for part in engine.plan.blocks} == {"resident"}
        engine.set_budget(500 * 1024)
        assert engine.plan.blocks[1].mode == "paged"
        assert engine.plan.use("host").budget_bytes == 500 * 1024
        engine.move(0, 4, "cpu:1")
        engine.set_budget(64 * MIB)
        assert engine.plan.head.mode == "resident"


# Growth


def test_growing_kv_sends_the_last_blocks_home_and_they_return(
    model: Path, expected_long: np.ndarray
) -> None:
    budget = budget_for(model, 5, n_tokens=256, max_seq=1024) + 1024
    profile = rules("0=cpu:1!,*=cpu:1,head=host", relocate=True)
    options = {"devices": f"cpu:1={budget}", "profile": profile, "max_seq": 1024}
    with Engine.open(model, **options) as engine:
        assert engine.plan.n_device_blocks == 5
        with engine.session() as session:
            assert session.capacity == 256
            np.testing.assert_array_equal(says(session, LONG), expected_long)
            check_ledgers(engine)
            gone = engine.stats().moves["sent_home"]
            assert 0 < gone < 4
            devices = [block.device for block in engine.plan.blocks]
            assert devices == ["cpu:1"] * (5 - gone) + ["host"] * gone
            assert engine.stats().last_pass == runs(engine.plan)
            with engine.session() as other:  # one more cache: more blocks give way
                assert engine.stats().moves["sent_home"] > gone
                np.testing.assert_array_equal(other.logits(PROMPT), expected_long_prefix(model))
                check_ledgers(engine)
        assert engine.plan.n_device_blocks == 5
        moves = engine.stats().moves
        assert moves["returned"] == moves["sent_home"]
        check_ledgers(engine)


def test_blocks_do_not_come_back_to_an_engine_that_closes(model: Path) -> None:
    budget = budget_for(model, 5, n_tokens=256, max_seq=1024) + 1024
    options = {"profile": rules("*=cpu:1,head=host", relocate=True), "max_seq": 1024}
    with Engine.open(model, devices=f"cpu:1={budget}", **options) as engine:
        engine.generate(LONG, n=1, temp=0)
        list(engine.generate(LONG, n=2, temp=0))
        session = engine.session()
        assert engine.stats().moves["sent_home"] > 0
    session.close()
    assert engine.stats().moves["returned"] == 0


def expected_long_prefix(model: Path) -> np.ndarray:
    with conversation(model) as (_, session):
        return session.logits(PROMPT)


def test_kv_that_cannot_grow_beside_pinned_blocks_is_an_error_and_the_rest_stays(
    model: Path,
) -> None:
    budget = budget_for(model, 5, n_tokens=256, max_seq=1024) + 1024
    profile = rules("*=cpu:1!,head=host", relocate=True)
    options = {"devices": f"cpu:1={budget}", "profile": profile, "max_seq": 1024}
    with Engine.open(model, **options) as engine, engine.session() as session:
        session.prefill(LONG[:200])
        before = state(engine)
        with pytest.raises(BudgetError, match="everything on it is pinned"):
            session.prefill(LONG[200:])
        assert state(engine) == before
        assert (session.capacity, len(session.tokens)) == (256, 200)
        session.prefill(LONG[200:250])


def test_a_cache_that_cannot_be_made_longer_stays_as_it_was(
    model: Path, expected_long: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = rules("0-2=cpu:1,*=host", relocate=True)
    options = {"devices": "cpu:1=64M", "profile": profile, "max_seq": 1024}
    with Engine.open(model, **options) as engine, engine.session() as session:
        session.prefill(LONG[:200])
        before = [ledger.used("kv") for ledger in engine._residence.ledgers.values()]
        fail(monkeypatch, Session, "_resize", 3, BudgetError("no memory", 1))
        with pytest.raises(BudgetError, match="no memory"):
            session.prefill(LONG[200:])
        assert before == [ledger.used("kv") for ledger in engine._residence.ledgers.values()]
        rows = [session.logits(LONG[200:])]
        for _ in range(N_REPLY):
            rows.append(session.prefill([int(rows[-1][-1].argmax())])[None])
        np.testing.assert_array_equal(np.concatenate(rows), expected_long[200:])
        check_ledgers(engine)


def test_a_snapshot_begins_a_conversation_whose_cache_is_shorter(
    model: Path, expected_long: np.ndarray
) -> None:
    profile = rules("*=cpu:1", relocate=True)
    options = {"devices": "cpu:1=64M", "profile": profile, "max_seq": 1024}
    with Engine.open(model, **options) as engine:
        with engine.session() as session:
            session.prefill(LONG)
            snapshot = session.snapshot()
        engine.move(1, 3, "host")
        with engine.session() as session:
            session.restore(snapshot)
            token = int(expected_long[len(LONG) - 1].argmax())
            np.testing.assert_array_equal(session.prefill([token]), expected_long[len(LONG)])


def test_a_device_with_room_takes_the_host_s_blocks_token_by_token(
    model: Path, expected: np.ndarray
) -> None:
    budget = budget_for(model, 3, n_tokens=48)
    options = {"devices": f"cpu:1={budget}", "profile": rules("", gpu_layers=1), "grow": True}
    with conversation(model, **options) as (engine, session):
        planned: Counter[str] = Counter()
        rows: list[np.ndarray] = []
        for token in range(len(PROMPT) + N_REPLY):
            fed = PROMPT[token] if token < len(PROMPT) else int(rows[-1].argmax())
            rows.append(session.prefill([fed]))
            planned.update(runs(engine.plan))
            check_ledgers(engine)
        np.testing.assert_array_equal(rows, expected)
        assert engine.stats().moves["grown"] == 2
        assert engine.stats().blocks_executed == planned
        assert [block.device for block in engine.plan.blocks] == ["host"] * 2 + ["cpu:1"] * 3
        with engine.session() as other:  # what has grown gives way again
            other.prefill(PROMPT)
            assert engine.stats().moves["sent_home"] > 0
            check_ledgers(engine)


def test_a_move_of_a_plan_costs_nothing_but_the_plan(model: Path) -> None:
    """Planning a move is pure: nothing is moved until the engine is asked."""
    with conversation(model, devices="cpu:1=64M", profile=rules("*=host")) as (engine, _):
        before = state(engine)
        assert move(engine.plan, 0, 4, "cpu:1").n_device_blocks == 5
        assert state(engine) == before
