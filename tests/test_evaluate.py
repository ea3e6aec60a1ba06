"""Perplexity on a model whose every probability is known."""

import math

import numpy as np
import pytest

from jitllm import evaluate
from jitllm.errors import UsageError

V = 4


class CountingSession:
    """Gives the successor of each token (mod 4) probability 1/2 and the others 1/6.

    `seen` records what it was fed, window by window.
    """

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __enter__(self) -> "CountingSession":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def truncate(self, n_tokens: int) -> None:
        assert n_tokens == 0
        self.seen.append([])

    def logits(self, ids: list[int]) -> np.ndarray:
        self.seen[-1] += ids
        rows = np.full((len(ids), V), math.log(1 / 6), np.float32)
        rows[np.arange(len(ids)), (np.array(ids) + 1) % V] = math.log(1 / 2)
        return rows + 7  # logits are not normalised

    def prefill(self, ids: list[int]) -> np.ndarray:
        return self.logits(ids)[-1]


class CountingEngine:
    def __init__(self) -> None:
        self.made = CountingSession()

    def session(self) -> CountingSession:
        return self.made


def test_a_text_that_is_always_half_expected_has_perplexity_two():
    result = evaluate.perplexity(CountingEngine(), [0, 1, 2, 3] * 4, 8)
    assert math.isclose(result.perplexity, 2, rel_tol=1e-6)
    assert result.error == pytest.approx(0, abs=1e-6)


def test_the_second_half_of_each_window_is_scored_and_the_rest_left_out():
    engine = CountingEngine()
    result = evaluate.perplexity(engine, [0] * 19, 8)
    # windows of 8: tokens 5, 6, 7 are predicted from positions 4, 5, 6
    assert (result.n_windows, result.n_scored_tokens, result.n_left_out_tokens) == (2, 6, 3)
    assert math.isclose(result.perplexity, 6, rel_tol=1e-6)
    assert [len(window) for window in engine.made.seen] == [7, 7]


def test_every_window_begins_with_bos():
    engine = CountingEngine()
    evaluate.perplexity(engine, [1] * 16, 8, bos_id=3)
    assert engine.made.seen == [[3] + [1] * 6] * 2


def test_a_text_shorter_than_a_window_is_one_window():
    result = evaluate.perplexity(CountingEngine(), [0, 1, 2, 3, 0, 1], 512)
    assert (result.window_tokens, result.n_windows, result.n_scored_tokens) == (6, 1, 2)


def test_pieces_of_a_window_change_nothing(monkeypatch):
    ids = np.random.default_rng(0).integers(0, V, 200).tolist()
    whole = evaluate.perplexity(CountingEngine(), ids, 100)
    monkeypatch.setattr(evaluate, "_LOGITS_BYTES", 0)  # the smallest pieces, 16 tokens
    assert evaluate.perplexity(CountingEngine(), ids, 100) == whole


def test_the_error_is_the_standard_error_of_the_mean_times_the_value():
    result = evaluate.perplexity(CountingEngine(), [0, 0, 0, 1, 0, 0], 6)
    assert math.isclose(result.perplexity, 6, rel_tol=1e-6)
    mixed = evaluate.perplexity(CountingEngine(), [0, 0, 0, 0, 1, 0], 6)
    # scored: 1 after 0 (1/2), 0 after 1 (1/6): mean log(12)/2, deviation log(3)/sqrt(2)
    assert math.isclose(mixed.perplexity, math.sqrt(12), rel_tol=1e-6)
    assert math.isclose(mixed.error, math.sqrt(12) * math.log(3) / 2, rel_tol=1e-6)


def test_progress_counts_tokens_up_to_the_total():
    steps = []
    evaluate.perplexity(CountingEngine(), [0] * 24, 8, progress=lambda *step: steps.append(step))
    assert steps == [("perplexity", 8, 24), ("perplexity", 16, 24), ("perplexity", 24, 24)]


@pytest.mark.parametrize(("n_ids", "window"), [(3, 512), (100, 3), (0, 512)])
def test_too_little_to_score_is_refused(n_ids, window):
    with pytest.raises(UsageError, match="perplexity needs windows of 4 tokens or more"):
        evaluate.perplexity(CountingEngine(), [0] * n_ids, window)


def test_losses_are_exact_for_large_logits():
    logits = np.array([[1000.0, 1000.0, 0.0]], np.float32)
    assert evaluate.token_losses(logits, [1])[0] == pytest.approx(math.log(2))
