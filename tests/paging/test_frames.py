"""Frames: who is where, who gives way to whom, and where the memory goes."""

import pytest

from jitllm.errors import BudgetError
from jitllm.paging.budget import Ledger
from jitllm.paging.frames import Frame, FrameTable

SIZES = [4096, 8192, 4096, 12288, 4096, 4096]


def table(own=(), n_moving=1, moving_bytes=12288, order=range(6)) -> tuple[FrameTable, Ledger]:
    ledger = Ledger()
    frames = FrameTable(SIZES, ledger)
    frames.rearrange(frozenset(own), n_moving, moving_bytes, order)
    return frames, ledger


def pages(frames: FrameTable) -> list[int | None]:
    return [frame.page for frame in frames.frames]


def test_memory_is_counted_until_the_last_array_over_it_is_gone():
    ledger = Ledger()
    frame = Frame(8192, ledger, pinned=True)
    assert frame.data.ctypes.data % 4096 == 0 and frame.data.size == 8192
    view = frame.data[100:200].view("int8")
    del frame
    assert ledger.used("weights") == 8192
    del view
    assert ledger.used("weights") == 0


def test_a_frame_shrinks_in_place_and_forgets_its_views():
    ledger = Ledger()
    frame = Frame(12288, ledger, pinned=False)
    frame.data[:] = 7
    address, frame.views["a"] = frame.data.ctypes.data, frame.data[:4]
    frame.shrink(4096)
    assert (frame.n_bytes, frame.data.size, frame.views) == (4096, 4096, {})
    assert frame.data.ctypes.data == address and (frame.data == 7).all()
    assert ledger.used("weights") == 4096


def test_frames_are_allocated_when_a_page_first_needs_one():
    frames, ledger = table(own={0, 1})
    assert ledger.used("weights") == 0
    frames.place(1, now=True)
    assert ledger.used("weights") == 8192
    frames.place(4, now=True)
    assert ledger.used("weights") == 8192 + 12288
    assert frames.can_place  # page 0 has no frame yet


def test_a_page_read_ahead_gives_way_only_to_one_needed_now():
    frames, _ = table()
    ahead = frames.place(2, now=False)
    ahead.fresh = True
    assert frames.place(3, now=False) is None
    assert frames.place(3, now=True) is ahead
    assert (frames.n_unused, frames.n_evicted) == (1, 0)


def test_a_held_page_gives_way_to_nothing():
    frames, _ = table()
    frames.place(2, now=True).n_holds = 1
    assert frames.place(3, now=True) is None
    assert pages(frames) == [2]


def test_narrowing_gives_up_the_pages_beyond_the_prefix_and_keeps_the_next_one_needed():
    frames, _ = table(own={0, 1, 2}, moving_bytes=12288)
    for page in (0, 1, 2, 3):
        frames.place(page, now=True)
    assert frames.rearrange(frozenset({0}), 1, 8192, range(6)) == 2
    assert pages(frames) == [0, 1]
    assert [frame.n_bytes for frame in frames.frames] == [4096, 8192]
    assert [frame.pinned for frame in frames.frames] == [True, False]


def test_widening_keeps_every_page_even_in_a_frame_that_was_too_large():
    frames, ledger = table(own={0}, n_moving=2, moving_bytes=12288)
    for page in (0, 1, 2):
        frames.place(page, now=True)
    assert frames.rearrange(frozenset({0, 1, 2}), 1, 12288, range(6)) == 0
    assert pages(frames) == [0, 1, 2]
    assert ledger.used("weights") == 4096 + 8192 + 4096


def test_frames_too_small_to_move_the_largest_page_are_let_go():
    frames, ledger = table(own={0, 1, 2, 3}, n_moving=1, moving_bytes=4096)
    for page in (0, 1, 2, 3, 4):
        frames.place(page, now=True)
    assert frames.rearrange(frozenset({0}), 1, 12288, range(6)) == 3
    assert pages(frames) == [0, 3]
    assert ledger.used("weights") == 4096 + 12288


def test_what_is_let_go_of_loses_its_views_and_its_memory():
    frames, ledger = table(own={0, 1})
    frame = frames.place(1, now=True)
    frame.views["array"] = frame.data[:10]
    frames.rearrange(frozenset({0}), 1, 12288, range(6))
    assert frame.views == {}
    del frame
    assert ledger.used("weights") == 0


def test_a_full_ledger_refuses_a_frame_and_changes_nothing():
    frames, ledger = table(own={0, 1})
    ledger.set_budget("weights", 8192)
    frames.place(1, now=True)
    with pytest.raises(BudgetError):
        frames.place(0, now=True)
    assert pages(frames) == [1]
