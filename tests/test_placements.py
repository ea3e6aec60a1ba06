"""Where a block is executed changes what it costs and never what it says."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jitllm import prospect
from jitllm.engine import Engine
from jitllm.errors import BudgetError, UsageError
from jitllm.paging.pager import Pager
from jitllm.placement.devices import open_devices
from jitllm.placement.profile import parse_profile
from jitllm.reports import reply_cost
from jitllm.verify import verify
from tests import figures, placing
from tests.placing import MIB, N_REPLY, PROMPT, conversation, rules, runs, says

MODELS = {"llama": {"n_blocks": 5}, "gemma3": {}, "Q4_K": {"n_blocks": 5}}
AMPLE = "cpu:1=64M,cpu:2=64M"
PLACEMENTS = {
    "all on one device": ("cpu:1=64M", ""),
    "blocks alone on one device": ("cpu:1=64M", "*=cpu:1,head=host"),
    "in turn": (AMPLE, "0=cpu:1,1=cpu:2,2=host,3=cpu:1,*=cpu:2"),
    "holes": (AMPLE, "0=cpu:1,2=cpu:2,*=host"),
    "head elsewhere": (AMPLE, "head=cpu:2,*=cpu:1"),
    "head alone": ("cpu:1=64M", "head=cpu:1,*=host"),
    "streamed": ("cpu:1=64M", "*=cpu:1~"),
    "streamed in part": (AMPLE, "1-2=cpu:1~,0=cpu:2,*=cpu:1"),
}


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: placing.container(folder, name, **MODELS[name]) for name in MODELS}


@pytest.fixture(scope="module", params=[*((name, "cpu") for name in MODELS), ("llama", "xla")])
def model(request: pytest.FixtureRequest, containers: dict[str, Path]) -> Iterator[Path]:
    """Each with the generated operations, one with the portable ones too."""
    name, kernels = request.param
    with pytest.MonkeyPatch.context() as monkeypatch:
        figures.use_kernels(kernels, monkeypatch)
        yield containers[name]


@pytest.fixture(scope="module")
def expected(model: Path) -> np.ndarray:
    """What the host says alone."""
    with conversation(model) as (engine, session):
        rows = says(session)
        assert engine.stats().blocks_executed == runs(engine.plan, 1 + N_REPLY)
        assert engine.stats().n_seams == 0
        return rows


def check(path: Path, expected: np.ndarray, **options: object) -> Engine:
    """A placement gives the same bits, and its blocks run where the plan has them."""
    with conversation(path, **options) as (engine, session):
        np.testing.assert_array_equal(says(session), expected)
        stats = engine.stats()
        assert stats.blocks_executed == runs(engine.plan, 1 + N_REPLY)
        assert stats.last_pass == runs(engine.plan)
        assert stats.n_seams == engine.plan.n_seams * (1 + N_REPLY)
        placing.check_ledgers(engine)
        return engine


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_placement_does_not_change_a_bit_of_the_logits(
    name: str, model: Path, expected: np.ndarray
) -> None:
    devices, placement = PLACEMENTS[name]
    engine = check(model, expected, devices=devices, profile=rules(placement))
    assert engine.plan.n_seams > 0


@pytest.mark.parametrize("n_slots", [1, 2])
def test_blocks_pass_through_one_slot_or_two(
    n_slots: int, model: Path, expected: np.ndarray
) -> None:
    with Engine.open(model, max_seq=48, devices="cpu:1=64M", profile=rules("*=cpu:1~")) as engine:
        use = engine.plan.use("cpu:1")
    budget = use.n_bytes - (2 - n_slots) * use.slot_bytes
    engine = check(model, expected, devices=f"cpu:1={budget}", profile=rules("*=cpu:1~"))
    assert engine.plan.use("cpu:1").n_slots == n_slots
    streamed = engine.stats().bytes_streamed["cpu:1"]
    weights = sum(block.n_bytes for block in engine.plan.blocks)
    assert 0.9 * weights * (1 + N_REPLY) < streamed <= weights * (1 + N_REPLY)


def smallest_budget(path: Path) -> int:
    """Of the host alone."""
    with pytest.raises(BudgetError) as refusal:
        Engine.open(path, maxmem=1, devices="cpu")
    return refusal.value.smallest_bytes


@pytest.mark.parametrize("placement", ["0-1=cpu:1,*=host", "*=cpu:1~,head=host"])
def test_the_host_may_page_what_it_keeps_under_a_tight_budget(
    placement: str, model: Path, expected: np.ndarray
) -> None:
    tight = {"maxmem": smallest_budget(model), "devices": "cpu:1=64M"}
    engine = check(model, expected, profile=rules(placement), **tight)
    counters, n_pages = engine.stats().counters, len(engine._pager.cycle)
    assert counters.page_ins > n_pages


def test_the_embedding_may_be_on_a_device(containers: dict[str, Path]) -> None:
    profile = parse_profile(
        "rules:\n- {embed: true, place: 'cpu:2'}\n- {blocks: 0-1, place: 'cpu:1'}"
    )
    for name in ("llama", "Q4_K"):
        with conversation(containers[name]) as (_, session):
            expected = says(session)
        engine = check(containers[name], expected, devices=AMPLE, profile=profile)
        assert engine.plan.embed.device == "cpu:2"
        assert engine.stats().counters.embedding_bytes == 0
        assert engine.plan.use("cpu:2").weights_bytes == engine.plan.embed.n_bytes > 0


@pytest.mark.parametrize("placement", ["*=cpu:1", "1=cpu:1,*=host", "*=cpu:1~"])
def test_kv_may_stay_at_home(placement: str, model: Path, expected: np.ndarray) -> None:
    engine = check(model, expected, devices="cpu:1=64M", profile=rules(placement, kv_place="host"))
    ledger = engine._residence.ledgers["cpu:1"].report().lines
    line = next(line for line in ledger if line.name == "kv")
    on = [block.kv_bytes for block in engine.plan.blocks if block.device == "cpu:1"]
    # It visits, a block's at a time.
    assert (line.used_bytes, line.peak_bytes) == (0, max(on))


def test_kv_that_visits_has_its_room_in_the_plan(containers: dict[str, Path]) -> None:
    def plan(budget: int, kv_place: str) -> int:
        profile = rules("*=cpu:1,head=host", kv_place=kv_place)
        with Engine.open(containers["llama"], devices=f"cpu:1={budget}", profile=profile) as engine:
            return engine.plan

    use = plan(64 * MIB, "host").use("cpu:1")
    assert (use.kv_bytes, use.visiting_kv_bytes) == (0, plan(64 * MIB, "host").blocks[0].kv_bytes)
    assert plan(use.n_bytes, "host").n_device_blocks == 5
    assert plan(use.n_bytes - 1, "host").n_device_blocks == 4


def test_the_type_of_the_cache_is_the_profile_s_and_an_argument_wins(
    containers: dict[str, Path],
) -> None:
    profile = parse_profile("kv: {dtype: f32}\ndevices: {'cpu:1': 64M}")

    def kv_bytes(**options: object) -> int:
        with Engine.open(containers["llama"], profile=profile, **options) as engine:
            return engine.plan.use("cpu:1").kv_bytes

    assert kv_bytes() == 2 * kv_bytes(kv="f16") > 0
    with pytest.raises(UsageError, match="kv is 'f64'; it can be f16 or f32"):
        kv_bytes(kv="f64")


def test_many_conversations_share_a_step_on_a_device(containers: dict[str, Path]) -> None:
    """Each as if it were alone, with the head on the device and KV at home too."""
    path, prompts = containers["llama"], [PROMPT[:3], PROMPT[2:9], PROMPT]
    with conversation(path) as (_, session):
        alone = []
        for prompt in prompts:
            session.reset()
            alone.append([session.prefill(prompt), session.prefill([7])])
    for kv_place in ("block", "host"):
        profile = rules("0-2=cpu:1,*=cpu:2,head=cpu:2", kv_place=kv_place)
        with Engine.open(path, devices=AMPLE, max_seq=48, profile=profile) as engine:
            sessions = [engine.session() for _ in prompts]
            pairs = zip(sessions, prompts, strict=True)
            first = [session.prefill(prompt) for session, prompt in pairs]
            second = engine.decode(sessions, [7, 7, 7])
            assert engine.stats().last_pass == {"cpu:1": 3, "cpu:2": 2}
            placing.check_ledgers(engine)
        for i, rows in enumerate(alone):
            np.testing.assert_array_equal(first[i], rows[0])
            np.testing.assert_array_equal(second[i], rows[1])


def test_devices_with_other_operations_agree_with_the_host(
    containers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a GPU: `cpu:1` has the portable operations, the host the generated ones."""
    figures.use_kernels("cpu", monkeypatch)
    monkeypatch.delenv("JITLLM_KERNELS")

    def opened(*arguments: object) -> list:
        host, *others = open_devices(*arguments)
        return [host, *(replace(device, platform="other") for device in others)]

    monkeypatch.setattr(prospect, "open_devices", opened)
    for name in ("llama", "gemma3"):  # f32 weights: the two differ by rounding alone
        for placement in ("0-1=cpu:1,*=host", "0-1=cpu:1~,*=cpu:1,head=cpu:1"):
            options = {"devices": "cpu:1=64M", "profile": rules(placement), "kv": "f32"}
            result = verify(str(containers[name]), PROMPT, **options)
            assert result.executed["cpu:1"] > 0
            assert not result.wrong
            assert 0 < max(p.largest_difference for p in result.positions) < 2e-3
            with conversation(containers[name], **options) as (engine, session):
                says(session)
                notes = engine.kernels
                placing.check_ledgers(engine)
            assert "generated for" in notes
            assert "portable XLA (no generated kernels for other)" in notes


def test_a_reply_says_where_it_ran_and_what_that_cost(containers: dict[str, Path]) -> None:
    profile = rules("0-1=cpu:1,2=cpu:2~,*=host")
    options = {"devices": AMPLE, "maxmem": smallest_budget(containers["llama"]), "max_seq": 48}
    with Engine.open(containers["llama"], profile=profile, **options) as engine:
        list(engine.generate(PROMPT, n=4, temp=0))
        reply = engine.generate([*PROMPT, 5], n=4, temp=0)
        list(reply)
        report = reply.report
        assert [(d.device, d.n_blocks, d.blocks_executed) for d in report.devices] == [
            ("host", 2, 8), ("cpu:1", 2, 8), ("cpu:2", 1, 4),
        ]  # fmt: skip
        host, first, second = report.devices
        one = engine.plan.blocks[0].kv_bytes
        assert first.weights_bytes == sum(b.n_bytes for b in engine.plan.blocks[:2])
        assert (first.streamed_bytes, second.weights_bytes) == (0, 0)
        assert (first.kv_bytes, second.kv_bytes) == (2 * one, one)
        assert second.streamed_bytes > 0.9 * 4 * engine.plan.blocks[2].n_bytes
        assert report.seams_per_token == engine.plan.n_seams == 3
        took = sum(device.seconds for device in report.devices)
        assert all(device.seconds > 0 for device in (host, first, second))
        assert 0.5 * (report.prefill_s + report.decode_s) < took
        assert took < report.prefill_s + report.decode_s
        names = set(reply_cost.__annotations__) - {"return"}
        cost = reply_cost(**{name: getattr(report, name) for name in names})
    assert (cost["device_blocks"], cost["host_blocks"]) == (3, 2)
    assert cost["device_ids"] == ["cpu:1", "cpu:2"]
    assert cost["page_ins"] == report.page_ins > 0
    assert cost["bytes_read"] == report.bytes_read > 0
    assert cost["budget_bytes"] == options["maxmem"]
    assert cost["decode_ms"] > 0 and cost["prefill_ms"] > 0
    assert cost["read_wait_ms"] == round(1e3 * report.read_wait_s, 3)
    assert cost["decode_tokens_per_second"] > 0


def test_what_was_asked_for_and_did_not_fit_is_counted(containers: dict[str, Path]) -> None:
    path = containers["llama"]
    with Engine.open(path, max_seq=48, devices="cpu:1=64M") as engine:
        use, block = engine.plan.use("cpu:1"), engine.plan.blocks[0]
    budget = use.workspace_bytes + 2 * (block.n_bytes + block.kv_bytes)
    few = {"devices": f"cpu:1={budget}", "max_seq": 48}
    with Engine.open(path, profile=rules("", gpu_layers=4), **few) as engine:
        memory = engine.memory_report()
        assert (memory.n_asked_blocks, memory.n_device_blocks) == (4, 2)
        declined = [part.what for part in memory.placement if part.declined]
        assert declined == ["blocks 1-2"]
        assert memory.n_blocks == 3  # those of the host
    with pytest.raises(BudgetError, match="has no room where -gpu-layers 4 wants it: cpu:1 lacks"):
        Engine.open(path, profile=rules("", gpu_layers=4, strict=True), **few)


def test_an_engine_that_cannot_be_opened_leaves_nothing_behind(
    containers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = placing.live_bytes("cpu:1")
    fetch, fetched = Pager.fetch, []

    def fail_at_last(pager: Pager, page: int) -> np.ndarray:
        fetched.append(page)
        if len(fetched) == 4:
            raise BudgetError("no more", 1)
        return fetch(pager, page)

    monkeypatch.setattr(Pager, "fetch", fail_at_last)
    with pytest.raises(BudgetError, match="no more"):
        Engine.open(containers["llama"], devices="cpu:1=64M")
    assert placing.live_bytes("cpu:1") == before
    monkeypatch.undo()
    with conversation(containers["llama"], devices="cpu:1=64M") as (engine, session):
        says(session)
        weights = engine.plan.use("cpu:1").weights_bytes
        assert placing.live_bytes("cpu:1") > before + 0.9 * weights
    del engine, session
    assert placing.live_bytes("cpu:1") == before
