"""What a budget will cost: figures worked out by hand, thresholds found by trying every byte."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitllm.errors import BudgetError
from jitllm.paging import policy
from jitllm.placement.forecast import Workload, cost, forecast


def _workload(page_bytes, compute_to_read=4.0, read_bytes_per_s=1000.0, **settings):
    """Composed as the engine does it."""
    compute_bytes_per_s = compute_to_read * read_bytes_per_s
    return Workload(
        page_bytes=page_bytes,
        compute_s=[n_bytes / compute_bytes_per_s for n_bytes in page_bytes],
        read_bytes_per_s=read_bytes_per_s,
        arrange=lambda n_bytes: policy.choose(page_bytes, n_bytes, compute_to_read),
        pass_seconds=policy.pass_seconds,
        **settings,
    )


def test_ten_equal_pages_and_room_for_four_read_seven_of_them():
    # One page computes in 1/1000 of the time it takes to read: a second frame has nothing to hide.
    now = forecast(_workload([100] * 10, compute_to_read=1000.0), 400).now
    assert (now.n_resident, now.n_moving, now.page_ins, now.bytes_read) == (4, 1, 7, 700)
    assert now.tokens_per_second == pytest.approx(1000 / 700, rel=0.01)


def test_a_second_moving_frame_is_taken_where_reads_can_hide_behind_computing():
    now = forecast(_workload([100] * 10, compute_to_read=1.0), 400).now
    assert (now.n_resident, now.n_moving, now.page_ins, now.bytes_read) == (4, 2, 8, 800)
    assert now.seconds == pytest.approx(1.0, rel=0.05)


def test_the_thresholds_around_a_budget_are_named():
    shown = forecast(_workload([100] * 10, compute_to_read=1000.0), 455)
    assert (shown.now.budget_bytes, shown.up.budget_bytes, shown.down.budget_bytes) == (
        400, 500, 300,
    )  # fmt: skip
    assert (shown.up.page_ins, shown.now.page_ins, shown.down.page_ins) == (6, 7, 8)
    assert (shown.smallest.budget_bytes, shown.smallest.page_ins) == (100, 10)
    assert (shown.whole.budget_bytes, shown.whole.page_ins, shown.whole.bytes_read) == (1000, 0, 0)


def test_nothing_is_above_the_whole_and_nothing_below_the_smallest():
    workload = _workload([100, 200, 300])
    assert forecast(workload, 10_000).up is None
    assert forecast(workload, 10_000).now.budget_bytes == 600
    assert forecast(workload, 300).down is None


def test_a_budget_below_the_smallest_is_refused_and_names_it():
    with pytest.raises(BudgetError) as refusal:
        forecast(_workload([100, 5000, 200], fixed_bytes=120), 5000)
    assert refusal.value.smallest_bytes == 5120
    assert str(refusal.value) == (
        "a budget of 4.9 KiB is too small for this model: the smallest that works is 5.0 KiB "
        "(5120 bytes)"
    )


def test_what_is_not_frames_and_time_elsewhere_are_added():
    bare = forecast(_workload([100] * 4), 250)
    more = forecast(_workload([100] * 4, fixed_bytes=70, elsewhere_s=2.0), 320)
    assert more.now.page_ins == bare.now.page_ins
    assert more.now.seconds == pytest.approx(bare.now.seconds + 2.0)
    assert more.whole.budget_bytes == bare.whole.budget_bytes + 70


def test_no_pages_cost_nothing_but_the_time_elsewhere():
    shown = forecast(_workload([], fixed_bytes=10, elsewhere_s=0.5), 10)
    assert (shown.now.page_ins, shown.now.tokens_per_second, shown.up) == (0, 2.0, None)


@settings(deadline=None, max_examples=60)
@given(
    pages=st.lists(st.integers(1, 25), min_size=1, max_size=7),
    ratio=st.sampled_from([0.5, 1.0, 4.0, 50.0]),
    data=st.data(),
)
def test_every_threshold_is_the_one_found_by_trying_every_budget(pages, ratio, data):
    workload, top = _workload(pages, ratio, fixed_bytes=3), sum(pages) + 3
    tried = {b: workload.arrange(b - 3) for b in range(top + 20)}
    works = [b for b, arranged in tried.items() if arranged is not None]
    budget = data.draw(st.sampled_from(works))
    shown = forecast(workload, budget)
    same = [b for b in works if tried[b] == tried[budget]]
    assert shown.smallest.budget_bytes == works[0]
    assert shown.whole.budget_bytes == next(b for b in works if not tried[b].n_moving)
    assert shown.now.budget_bytes == same[0]
    later = [b for b in works if b > budget and tried[b] != tried[budget]]
    assert (shown.up.budget_bytes if shown.up else None) == (later[0] if later else None)
    assert (shown.down is None) == (same[0] == works[0])
    if shown.down:
        assert tried[shown.down.budget_bytes] == tried[same[0] - 1]


@settings(deadline=None, max_examples=40)
@given(
    pages=st.lists(st.integers(50, 400), min_size=2, max_size=30),
    ratio=st.floats(0.3, 50),
    part=st.floats(0, 1),
)
def test_more_bytes_are_never_slower(pages, ratio, part):
    workload = _workload(pages, ratio)
    budget = max(pages) + int(part * (sum(pages) - max(pages)))
    less, more = cost(workload, budget), cost(workload, budget + max(pages))
    assert more.seconds <= less.seconds * 1.02
