"""The sampler, on logits whose probabilities can be worked out by hand."""

from collections import Counter

import numpy as np
import pytest

from jitllm.errors import JitllmError
from jitllm.model.sampler import (
    Candidates,
    apply_count_penalties,
    apply_min_p,
    apply_repeat_penalty,
    apply_top_k,
    apply_top_p,
    logprobs,
    make_rng,
    sample,
)
from jitllm.sampling import SamplingParams

# log(4), log(2), log(1), log(1): probabilities 1/2, 1/4, 1/8, 1/8 of ids 3, 1, 0, 2
EIGHTHS = np.log(np.array([1, 2, 1, 4], np.float32))


def everything(logits: np.ndarray) -> Candidates:
    return Candidates(np.arange(len(logits)), logits)


@pytest.mark.parametrize(("k", "ids"), [(1, [3]), (2, [3, 1]), (3, [3, 1, 0]), (9, [3, 1, 0, 2])])
def test_top_k_keeps_the_likeliest_and_the_lowest_id_of_equals(k, ids):
    assert apply_top_k(everything(EIGHTHS), k).ids.tolist() == ids


def test_top_k_of_zero_keeps_everything():
    assert apply_top_k(everything(EIGHTHS), 0).ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("k", [1, 40, 1000, 5000])
@pytest.mark.parametrize("n_vocab", [4999, 262_144])
def test_top_k_of_a_large_vocabulary_equals_a_full_sort(n_vocab, k):
    # values repeat, so the rule for equals is exercised too
    logits = np.random.default_rng(k).integers(0, n_vocab // 3, n_vocab).astype(np.float32)
    expected = np.lexsort((np.arange(n_vocab), -logits))[:k]
    top = apply_top_k(everything(logits), k)
    assert np.array_equal(top.ids, expected)
    assert np.array_equal(top.logits, logits[expected])


@pytest.mark.parametrize(
    ("p", "ids"),
    # sums of the sorted probabilities: 1/2, 3/4, 7/8, 1
    [(0.0, [3]), (0.4, [3]), (0.6, [3, 1]), (0.8, [3, 1, 0]), (0.9, [3, 1, 0, 2])],
)
def test_top_p_keeps_the_fewest_whose_probabilities_reach_p(p, ids):
    assert apply_top_p(everything(EIGHTHS), p).ids.tolist() == ids


def test_top_p_counts_probabilities_among_what_top_k_left():
    # of ids 3 and 1 the probabilities are 2/3 and 1/3: 0.6 is reached by the first alone
    assert apply_top_p(apply_top_k(everything(EIGHTHS), 2), 0.6).ids.tolist() == [3]


def test_top_p_finds_its_mass_far_down_a_flat_vocabulary():
    kept = apply_top_p(everything(np.zeros(10_000, np.float32)), 0.55)
    assert kept.ids.tolist() == list(range(5500))


@pytest.mark.parametrize(("p", "ids"), [(0.0, [0, 1, 2, 3]), (0.3, [1, 3]), (0.6, [3]), (1, [3])])
def test_min_p_compares_with_the_likeliest(p, ids):
    # relative to id 3 the others are at 1/2, 1/4, 1/4
    assert apply_min_p(everything(EIGHTHS), p).ids.tolist() == ids


def test_the_repeat_penalty_divides_positive_and_multiplies_negative_logits_once_per_id():
    logits = np.array([2.0, -2.0, 4.0, 0.0], np.float32)
    penalised = apply_repeat_penalty(logits, [0, 1, 0, 3], 2.0)
    assert penalised.tolist() == [1.0, -4.0, 4.0, 0.0]
    assert logits.tolist() == [2.0, -2.0, 4.0, 0.0]


def test_a_vast_repeat_penalty_rules_tokens_out():
    logits = np.array([2.0, -2.0, -4.0], np.float32)
    assert apply_repeat_penalty(logits, [0, 1], 1e300).tolist() == [0.0, -np.inf, -4.0]
    vast = SamplingParams(repeat_penalty=1000)
    assert sample(np.array([-1.0, -9.0], np.float32), vast, make_rng(0), [0]) == 1


def test_the_repeat_penalty_looks_back_no_further_than_repeat_last_n():
    logits = np.array([3.0, 2.5, 0.0], np.float32)
    greedy = {"temp": 0, "repeat_penalty": 2.0}
    rng = make_rng(0)
    assert sample(logits, SamplingParams(**greedy, repeat_last_n=2), rng, [0, 2, 2]) == 0
    assert sample(logits, SamplingParams(**greedy, repeat_last_n=3), rng, [0, 2, 2]) == 1
    assert sample(logits, SamplingParams(**greedy, repeat_last_n=0), rng, [0, 0, 0]) == 0


def test_presence_counts_once_and_frequency_every_time():
    logits = np.array([2.0, 1.0, 0.0], np.float32)
    # id 0 three times: 2 - 0.5 - 3 * 0.25; id 2 once: 0 - 0.5 - 0.25
    assert apply_count_penalties(logits, [0, 2, 0, 0], 0.5, 0.25).tolist() == [0.75, 1.0, -0.75]
    assert logits.tolist() == [2.0, 1.0, 0.0]


def test_presence_and_frequency_look_at_the_reply_and_not_at_the_prompt():
    logits = np.array([3.0, 2.5, 0.0], np.float32)
    greedy = SamplingParams(temp=0, presence_penalty=1.0)
    assert sample(logits, greedy, make_rng(0), [0, 0], n_prompt=2) == 0
    assert sample(logits, greedy, make_rng(0), [0, 0], n_prompt=1) == 1
    negative = SamplingParams(temp=0, frequency_penalty=-0.3)
    assert sample(logits, negative, make_rng(0), [1, 1], n_prompt=0) == 1


def test_logprobs_are_the_logarithms_of_the_model_s_probabilities():
    found = logprobs(EIGHTHS, 2, 2)
    assert np.isclose(found.chosen, np.log(1 / 8))
    assert [i for i, _ in found.top] == [3, 1]
    assert np.allclose([p for _, p in found.top], np.log([1 / 2, 1 / 4]))
    assert logprobs(EIGHTHS, 3, 0).top == ()
    assert np.isclose(sum(np.exp(p) for _, p in logprobs(EIGHTHS, 0, 4).top), 1)


def test_temperature_zero_takes_the_lowest_id_of_the_likeliest():
    logits = np.array([0.0, 5.0, 5.0, 1.0], np.float32)
    assert sample(logits, SamplingParams(temp=0), make_rng(0)) == 1


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temp": 1e-300}, {"temp": 5e-324}]
)
def test_a_filter_that_leaves_one_token_is_greedy(params):
    assert {sample(EIGHTHS, SamplingParams(**params), make_rng(s)) for s in range(50)} == {3}


def test_tokens_are_drawn_in_proportion_to_their_probabilities():
    plain = SamplingParams(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)
    rng = make_rng(7)
    counts = Counter(sample(EIGHTHS, plain, rng) for _ in range(4000))
    shares = [counts[i] / 4000 for i in range(4)]
    assert np.allclose(shares, [1 / 8, 1 / 4, 1 / 8, 1 / 2], atol=0.025)


def test_temperature_one_half_squares_the_probabilities():
    squared = SamplingParams(temp=0.5, top_k=0, top_p=1.0, min_p=0.0)
    rng = make_rng(7)
    counts = Counter(sample(EIGHTHS, squared, rng) for _ in range(4000))
    shares = [counts[i] / 4000 for i in range(4)]
    assert np.allclose(shares, [1 / 22, 4 / 22, 1 / 22, 16 / 22], atol=0.025)


def test_a_seed_reproduces_the_draws_and_another_seed_does_not():
    logits = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    draws = [
        [sample(logits, SamplingParams(temp=1.5), rng) for _ in range(20)]
        for rng in (make_rng(42), make_rng(42), make_rng(43), make_rng(-1))
    ]
    assert draws[0] == draws[1]
    assert len({tuple(ids) for ids in draws}) == 3


def test_the_draws_of_a_seed_are_the_same_on_every_machine():
    params = SamplingParams(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)
    rng = make_rng(2024)
    assert [sample(EIGHTHS, params, rng) for _ in range(8)] == [3, 1, 1, 3, 3, 1, 0, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error_not_a_token(bad):
    logits = np.array([0.0, bad, 1.0], np.float32)
    with pytest.raises(JitllmError, match="as a logit; its weights are damaged or overflow"):
        sample(logits, SamplingParams(), make_rng(0))


def test_a_masked_token_is_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0], np.float32)
    params = SamplingParams(temp=5.0, top_k=0, top_p=1.0, min_p=0.0)
    assert {sample(logits, params, make_rng(s)) for s in range(100)} == {1, 3}
