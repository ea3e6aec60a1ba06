"""Speed, on a session whose clock is turned by hand."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jitllm import speed
from tests.cli.fake_engine import FakeEngine


class TimedSession:
    """A pass takes 1 s, and 0.25 s more for each token behind the first; the warm-up 100 s."""

    def __init__(self, clock: SimpleNamespace):
        self.clock, self.passes = clock, []

    def __enter__(self) -> "TimedSession":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def truncate(self, n_tokens: int) -> None:
        assert n_tokens == 0

    def prefill(self, ids: list[int]) -> np.ndarray:
        self.clock.now += (0.75 + 0.25 * len(ids)) * (100 if len(self.passes) < 6 else 1)
        self.passes.append(ids)
        return np.zeros(32, np.float32)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(speed, "memory_bandwidth", lambda n_threads: 2.048e6 * n_threads)
    fake = FakeEngine()
    fake.kernels = "fake"
    fake.session_made = TimedSession(clock)
    fake.session = lambda: fake.session_made
    return fake


def test_rates_are_tokens_over_time_and_the_warm_up_is_not_counted(engine):
    result = speed.speed(engine, prefill_tokens=8, decode_tokens=4, n_rounds=3)
    assert result.prefill_tokens_per_second == pytest.approx(8 / 2.75)
    assert result.decode_tokens_per_second == pytest.approx(1.0)
    assert result.decode_spread == pytest.approx((1.0, 1.0))


def test_bandwidth_is_the_weights_of_each_token_and_its_share_of_plain_reading(engine):
    result = speed.speed(engine, prefill_tokens=8, decode_tokens=4, n_rounds=1, n_threads=2)
    assert result.weights_bytes == 512_000
    assert result.decode_gb_per_second == pytest.approx(512_000 / 1e9)
    assert result.memory_gb_per_second == pytest.approx(4.096e6 / 1e9)
    assert result.share_of_memory == pytest.approx(0.125)


def test_every_round_feeds_the_prompt_whole_and_the_reply_token_by_token(engine):
    speed.speed(engine, prefill_tokens=8, decode_tokens=4, n_rounds=2)
    lengths = [len(ids) for ids in engine.session_made.passes]
    assert lengths == [1, *[8, 1, 1, 1, 1] * 3]
    assert all(0 <= id_ < 32 for ids in engine.session_made.passes for id_ in ids)


def test_plain_reading_is_measured_in_bytes_a_second_with_generated_code_and_without(monkeypatch):
    assert 1e8 < speed.memory_bandwidth(2, n_bytes=32 << 20) < 1e13
    monkeypatch.setitem(sys.modules, "jitllm.kernels.cpu.memory", None)
    assert 1e8 < speed.memory_bandwidth(2, n_bytes=32 << 20) < 1e13
