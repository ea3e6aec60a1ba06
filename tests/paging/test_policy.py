"""The policy, exactly: literal sizes and times, literal arrangements."""

import random
from itertools import pairwise

import pytest

from jitllm.paging.policy import (
    Arrangement,
    arrange,
    choose,
    pass_seconds,
    relative_seconds,
    settle,
    smallest_bytes,
    spread,
)

# Misses per pass of N equal pages in C slots: pinned + 1 and pinned + 2, from the table of
# simulated policies that the design rests on.
MISSES = [(32, 8, 25, 26), (32, 16, 17, 18), (32, 24, 9, 10), (32, 31, 2, 3), (80, 40, 41, 42)]


@pytest.mark.parametrize(("n", "c", "one", "two"), MISSES)
def test_equal_pages_miss_as_often_as_the_table_says(n, c, one, two):
    for n_moving, misses in ((1, one), (2, two)):
        arranged = arrange([10] * n, c * 10, n_moving)
        assert (arranged.n_moving, arranged.moving_bytes, arranged.n_bytes) == (
            n_moving,
            10,
            c * 10,
        )
        assert (arranged.n_pinned, arranged.n_resident) == (c - n_moving, c)
        assert arranged.page_ins_per_pass == misses == n - c + n_moving


ARRANGED = {
    "nothing fits": ([4, 4], 3, 1, None),
    "the smallest": ([4, 7, 4], 7, 1, Arrangement(3, (0, 1, 2), 1, 7, 7)),
    "two frames of the smallest": ([4, 7, 4], 14, 2, Arrangement(3, (0, 1, 2), 2, 7, 14)),
    "two frames do not fit": ([4, 7, 4], 13, 2, None),
    "a page pinned": ([4, 7, 4], 11, 1, Arrangement(3, (0, 1), 1, 7, 11)),
    "the first page moves first": ([7, 3, 3], 13, 1, Arrangement(3, (), 0, 0, 13)),
    "a large page in its own frame": ([3, 7, 3, 3], 15, 1, Arrangement(4, (0, 2), 1, 3, 13)),
    "all": ([4, 7, 4], 15, 2, Arrangement(3, (), 0, 0, 15)),
    "one byte short of all": ([4, 7, 4], 14, 1, Arrangement(3, (0, 1), 1, 7, 11)),
    "no pages": ([], 0, 1, Arrangement(0, (), 0, 0, 0)),
}


@pytest.mark.parametrize("case", ARRANGED)
def test_the_arrangement_pins_the_most_pages_that_fit(case):
    page_bytes, budget, n_moving, expected = ARRANGED[case]
    assert arrange(page_bytes, budget, n_moving) == expected


def test_pages_that_move_are_spread_over_the_pass():
    assert spread(8) == (0, 4, 1, 6, 3, 5, 2, 7)
    for n in (1, 2, 5, 26, 97):
        assert sorted(spread(n)) == list(range(n))
        for count in range(1, n + 1):
            moving = sorted(spread(n)[:count])
            gaps = [two - one for one, two in pairwise([*moving, moving[0] + n])]
            assert max(gaps) <= 2.7 * n / count + 1


def test_no_arrangement_exceeds_its_budget_or_wastes_a_page():
    rng = random.Random(1)
    for _ in range(300):
        page_bytes = [rng.randint(1, 9) for _ in range(rng.randint(1, 12))]
        budget, n_moving = rng.randint(1, sum(page_bytes) + 2), rng.randint(1, 2)
        arranged = arrange(page_bytes, budget, n_moving)
        if arranged is None:
            assert budget < n_moving * max(page_bytes)
            continue
        assert arranged.n_bytes <= budget
        assert arranged.n_resident <= len(page_bytes)
        if arranged.n_moving:
            assert budget - arranged.n_bytes < max(page_bytes)


def test_a_larger_budget_keeps_every_pinned_page():
    rng = random.Random(2)
    for _ in range(100):
        page_bytes = [rng.randint(1, 9) for _ in range(rng.randint(1, 12))]
        for n_moving in (1, 2):
            budgets = range(n_moving * max(page_bytes), sum(page_bytes) + 1)
            moving = [set(arrange(page_bytes, budget, n_moving).moving) for budget in budgets]
            assert all(one >= two for one, two in pairwise(moving))


def test_the_smallest_budget_is_the_largest_page_and_one_byte_less_is_none():
    assert smallest_bytes([3, 8, 2]) == 8
    assert arrange([3, 8, 2], 8, 1) is not None
    assert arrange([3, 8, 2], 7, 1) is None


def test_one_moving_frame_reads_and_computes_in_turns():
    # Page 0 is pinned; its compute hides the first read of a pass up to its own length.
    assert pass_seconds([5, 5, 5], [1, 1, 1], {1, 2}, 1) == pytest.approx(5 + 1 + 5 + 1)
    assert pass_seconds([5, 5, 5], [9, 1, 1], {1, 2}, 1) == pytest.approx(9 + 1 + 5 + 1)


def test_two_moving_frames_take_the_longer_of_reading_and_computing():
    assert pass_seconds([5] * 4, [1] * 4, {1, 2, 3}, 2) == pytest.approx(3 * 5)
    assert pass_seconds([1] * 4, [5] * 4, {1, 2, 3}, 2) == pytest.approx(4 * 5)
    assert pass_seconds([5] * 4, [5] * 4, {0, 1, 2, 3}, 2) == pytest.approx(4 * 5)


def test_spread_pages_are_read_while_pinned_ones_compute_and_a_suffix_is_not():
    read, compute = [3] * 8, [1] * 8
    assert pass_seconds(read, compute, {6, 7}, 1) == pytest.approx(3 + 1 + 3 + 1 + 3)
    assert pass_seconds(read, compute, {0, 4}, 1) == pytest.approx(8)  # never waits


def test_slow_reads_take_one_moving_frame_and_balanced_ones_two():
    slow_disk, balanced = choose([10] * 8, 40, 100.0), choose([10] * 8, 40, 1.0)
    assert (slow_disk.n_moving, slow_disk.n_pinned) == (1, 3)
    assert (balanced.n_moving, balanced.n_pinned) == (2, 2)


def test_one_moving_frame_is_taken_where_two_do_not_fit():
    assert choose([10] * 8, 19, 1.0) == Arrangement(8, tuple(range(8)), 1, 10, 10)
    assert choose([10] * 8, 9, 1.0) is None


def test_a_choice_keeps_what_it_was_told_to_keep():
    one, two = arrange([10] * 8, 40, 1), arrange([10] * 8, 40, 2)
    assert (one.n_pinned, two.n_pinned) == (3, 2)
    assert choose([10] * 8, 40, 1.0) == two
    assert choose([10] * 8, 40, 1.0, kept=one) == one
    assert choose([10] * 8, 40, 100.0) == one
    assert choose([10] * 8, 40, 100.0, kept=two) == two
    assert choose([10] * 8, 80, 1.0, kept=two).n_pinned == 8


def test_the_choice_is_never_the_slower_of_the_two():
    rng = random.Random(3)
    for _ in range(100):
        page_bytes = [rng.randint(1, 9) for _ in range(rng.randint(2, 10))]
        budget, ratio = rng.randint(max(page_bytes), sum(page_bytes)), rng.uniform(0.3, 30)
        both = [arrange(page_bytes, budget, n) for n in (1, 2)]
        best = min(relative_seconds(page_bytes, a, ratio) for a in both if a)
        chosen = choose(page_bytes, budget, ratio)
        assert relative_seconds(page_bytes, chosen, ratio) == best


@pytest.mark.parametrize(
    ("budget", "ratio", "first", "best", "settled"),
    # moving frames by typical rates, by the measured ones, and in the end
    [(60, 0.1, 1, 2, 1), (60, 2, 1, 2, 2), (40, 100, 2, 1, 1), (60, 4, 1, 1, 1)],
)
def test_a_pager_settles_on_the_faster_choice_where_it_is_worth_changing(
    budget, ratio, first, best, settled
):
    pages = [10] * 8
    assert choose(pages, budget).n_moving == first
    assert choose(pages, budget, ratio).n_moving == best
    assert settle(pages, budget, ratio).n_moving == settled
    assert settle(pages, 9, ratio) is None
