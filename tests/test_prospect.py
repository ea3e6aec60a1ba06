"""What an engine will be, and what it will cost, before anything is read."""

from itertools import pairwise
from pathlib import Path

import pytest

from jitllm import outlook, prospect
from jitllm.convert import convert
from jitllm.engine import Engine
from jitllm.errors import BudgetError, UsageError
from jitllm.outlook import Outlook, Rates, predict
from jitllm.paging import policy
from jitllm.paging.budget import MemoryLimits
from jitllm.paging.container import Container
from jitllm.placement.devices import Device
from jitllm.placement.rules import Profile
from jitllm.prospect import Prospect, devices_of, look_ahead
from tests.tiny_models import write_tiny

RATES = Rates(read=1e6, paged=4e6, resident=8e6)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Container:
    folder = tmp_path_factory.mktemp("models")
    convert(write_tiny(folder / "tiny.gguf"), folder / "tiny.jlm")
    return Container.open(folder / "tiny.jlm")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path / "cache"))


def ahead(container: Container, budget: int | None = None, **profile: object) -> Prospect:
    said = Profile(**profile)
    return look_ahead(container, devices_of(said), said, budget, 64, "f16")


def smallest(container: Container) -> int:
    return predict(ahead(container, 1 << 30), RATES).smallest.budget_bytes


def test_without_a_budget_it_is_four_fifths_of_what_devices_in_the_same_memory_leave(
    container, monkeypatch
):
    free = MemoryLimits(1000, 1000, None, None)
    monkeypatch.setattr(prospect, "memory_limits", lambda: free)
    host, profile = devices_of(Profile())[0], Profile()
    shared = Device("cpu:1", "cpu", 1, budget_bytes=600, shares_host_memory=True)
    own = Device("cuda:0", "cuda", 0, budget_bytes=600)
    for others, budget in (([], 800), ([own], 800), ([shared], 320), ([shared, shared], 0)):
        found = look_ahead(container, [host, *others], profile, None, None, "f16")
        assert (found.budget_bytes, found.automatic) == (budget, True)


def test_the_context_is_the_model_s_and_no_more_can_be_asked(container):
    devices, profile = devices_of(Profile()), Profile()
    assert look_ahead(container, devices, profile, 1, None, "f16").max_seq == 256
    with pytest.raises(UsageError, match="max_seq is 257; this model's context is 1 to 256"):
        look_ahead(container, devices, profile, 1, 257, "f16")


def test_the_cost_under_a_budget_is_what_an_engine_under_it_reports(container):
    least = smallest(container)
    for budget in (least, least + 70_000, 1 << 30):
        seen = ahead(container, budget)
        now = predict(seen, RATES).now
        with Engine(seen) as engine:
            memory = engine.memory_report()
            assert now.page_ins == memory.page_ins_per_token
            assert now.bytes_read == memory.page_in_bytes_per_token
            assert memory.over_bytes == Outlook(seen, RATES, predict(seen, RATES), 0).over_bytes


def test_the_predicted_peak_is_the_ledger_s(container):
    for budget in (smallest(container), 1 << 30):
        seen = ahead(container, budget)
        expected = outlook.outlook(seen).peak_bytes
        with Engine(seen) as engine:
            list(engine.generate("a b c", n=4, temp=0))
            assert engine.stats().ledger.peak_bytes == expected


def test_more_budget_never_costs_time_worth_speaking_of_until_nothing_is_read(container):
    seen, seconds = ahead(container, smallest(container)), []
    while (found := predict(seen, RATES)).up is not None:
        seconds.append(found.now.seconds)
        seen = seen.under(found.up.budget_bytes)
    assert len(seconds) > 2
    assert all(after < before / policy.WORTH_CHANGING for before, after in pairwise(seconds))
    assert found.now.bytes_read == 0
    assert seen.budget_bytes == found.whole.budget_bytes


def test_an_automatic_budget_gives_way_to_the_process_limit(container):
    said, devices = Profile(), devices_of(Profile())
    free = look_ahead(container, devices, said, None, 64, "f16")
    beside = free.host_kv_bytes + free.workspace_bytes
    limit = beside + free.smallest_bytes + 5000
    limited = look_ahead(container, devices, said, None, 64, "f16", process_limit=limit)
    assert limited.budget_bytes == free.smallest_bytes + 5000
    with Engine(limited) as engine:
        list(engine.generate("a b c", n=4, temp=0))
        ledger = engine.stats().ledger
        assert free.smallest_bytes < ledger.peak_bytes <= ledger.limit_bytes == limit
        with pytest.raises(BudgetError, match="weights would bring the process to"):
            engine.set_budget(limit)


def test_an_automatic_budget_leaves_what_it_has_no_use_for_to_further_conversations(container):
    said, devices = Profile(), devices_of(Profile())
    limited = look_ahead(container, devices, said, None, 64, "f16", process_limit=64 << 20)
    with Engine(limited) as engine:
        assert engine.memory_report().over_bytes == 0
        sessions = [engine.session() for _ in range(4)]
        used = engine.stats().ledger.used_bytes
        assert engine.spare_bytes == (64 << 20) - (
            limited.most_bytes + limited.host_kv_bytes + limited.workspace_bytes
        )
        assert used < 64 << 20 and all(session.room_tokens for session in sessions)


def test_a_process_limit_that_is_too_small_says_what_takes_how_much(container):
    said, devices = Profile(), devices_of(Profile())
    for budget in (None, 300_000):
        seen = look_ahead(container, devices, said, budget, 64, "f16")
        needed = (budget or seen.smallest_bytes) + seen.host_kv_bytes + seen.workspace_bytes
        with pytest.raises(BudgetError) as refusal:
            look_ahead(container, devices, said, budget, 64, "f16", process_limit=needed - 1024)
        assert refusal.value.smallest_bytes == needed
        for part in (" is 1.0 KiB too small: weights take ", "the KV cache of 64 tokens ", "acti"):
            assert part in str(refusal.value)
        assert look_ahead(container, devices, said, budget, 64, "f16", process_limit=needed)


def test_a_resident_token_takes_its_bytes_over_the_resident_rate(container):
    seen = ahead(container, 1 << 30)
    n_bytes = sum(container.pages[page].n_bytes for page in seen.cycle)
    assert predict(seen, RATES).whole.seconds == pytest.approx(n_bytes / 8e6)


def test_pages_that_stay_compute_at_the_resident_rate_and_others_at_the_paged_one(container):
    found = predict(ahead(container, smallest(container)), Rates(1e15, 4e6, 8e6))
    while found.now.page_ins:
        cost, whole = found.now, sum(container.pages[p].n_bytes for p in ahead(container).cycle)
        expected = cost.bytes_read / 4e6 + (whole - cost.bytes_read) / 8e6
        assert cost.seconds == pytest.approx(expected, rel=1e-3)
        found = predict(ahead(container, found.up.budget_bytes), Rates(1e15, 4e6, 8e6))


def test_a_paged_token_takes_at_least_the_time_of_its_reads(container):
    found = predict(ahead(container, smallest(container)), RATES).now
    assert found.seconds >= found.bytes_read / 1e6


def test_a_budget_that_cannot_work_is_refused_before_anything_is_measured(container, monkeypatch):
    monkeypatch.setattr(outlook, "read_rate", lambda *_: pytest.fail("measured"))
    with pytest.raises(BudgetError) as refusal:
        outlook.outlook(ahead(container, 1))
    assert refusal.value.smallest_bytes == smallest(container)


def test_computing_is_measured_once_and_said_so(container, monkeypatch):
    said: list[str] = []
    first = outlook.outlook(ahead(container, 1 << 30), said.append)
    again = outlook.outlook(ahead(container, 1 << 30), said.append)
    assert said == ["measuring, this once, how fast this machine computes with the model"]
    assert again.rates.resident == first.rates.resident > 0
    assert again.activation_bytes == first.activation_bytes > 0


def test_a_damaged_measurement_in_the_cache_is_made_again(container, tmp_path):
    first = outlook.outlook(ahead(container, 1 << 30))
    (kept,) = (tmp_path / "cache" / "rates").iterdir()
    kept.write_text("{")
    assert outlook.outlook(ahead(container, 1 << 30)).activation_bytes == first.activation_bytes


def test_reading_is_measured_in_bytes_a_second(container):
    assert 1e5 < outlook.read_rate(ahead(container, 1 << 30), seconds=0.05) < 1e12
