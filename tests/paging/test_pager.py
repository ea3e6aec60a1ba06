"""The pager: exact page-ins, bytes within the budget at all times, and one clear error."""

import gc
import os
import random
import threading
import time

import numpy as np
import pytest

from jitllm.errors import BudgetError, FormatError, JitllmError
from jitllm.paging.budget import Ledger
from jitllm.paging.container import Container
from jitllm.paging.pager import Pager
from tests.paging.toys import kernel_read_bytes, write_toy

BLOCKS = (20000, 30000, 20000, 25000, 20000, 30000, 20000)


@pytest.fixture
def container(tmp_path) -> Container:
    """Seven blocks of unlike sizes and two head slabs, tied."""
    return Container.open(write_toy(tmp_path / "toy.jlm", block_bytes=BLOCKS)[0])


def run_pass(pager: Pager, pages=None, each=lambda page: None) -> None:
    """Visit the pages and see that each holds the file's bytes from hold to release."""
    path, entries = pager.container.path, pager.container.pages
    with pager.step(pages):
        for page in pager.cycle if pages is None else pages:
            with pager.hold(page) as frame:
                entry = entries[page]
                with path.open("rb") as file:
                    file.seek(entry.offset)
                    assert frame.data[: entry.n_bytes].tobytes() == file.read(entry.n_bytes)
                moves = pager.cycle.index(page) in pager.arrangement.moving
                assert frame.pinned == (not moves)
            each(page)


def budgets(container: Container) -> list[int]:
    """The smallest, one more page, half, one byte short of all, all."""
    with Pager(container, 1 << 30, Ledger()) as pager:
        low, high = pager.smallest_bytes, pager.all_resident_bytes
    return [low, low + 32768, (low + high) // 2, high - 1, high]


@pytest.mark.parametrize("n_moving", [1, 2])
@pytest.mark.parametrize("which", range(5))
def test_page_ins_per_pass_follow_the_formula(container, n_moving, which):
    budget = budgets(container)[which]
    with Pager(container, budget, Ledger(), n_moving=n_moving) as pager:
        n, now = len(pager.cycle), pager.applied()
        run_pass(pager)
        assert pager.counters.page_ins == n
        for _ in range(3):
            before = pager.counters
            run_pass(pager)
            after = pager.counters
            expected = n - now.n_resident + now.n_moving if now.n_moving else 0
            assert after.page_ins - before.page_ins == expected == now.page_ins_per_pass
            assert after.bytes_read - before.bytes_read == now.page_in_bytes_per_pass
            assert after.evictions - before.evictions == expected
        assert pager.counters.frames == now.n_resident


def test_random_pages_and_budgets_follow_the_formula_within_their_bytes(tmp_path):
    rng = random.Random(4)
    for case in range(25):
        blocks = [rng.randint(1, 6) * 4000 for _ in range(rng.randint(1, 9))]
        path, _ = write_toy(tmp_path / f"{case}.jlm", block_bytes=blocks, tied=rng.random() < 0.5)
        container = Container.open(path)
        low, *_, high = budgets(container)
        ledger, budget = Ledger(), rng.randint(low, high + 4096)
        with Pager(container, budget, ledger, n_moving=rng.choice([1, 2, None])) as pager:
            run_pass(pager)
            before = pager.counters.page_ins
            run_pass(pager)
            assert pager.counters.page_ins - before == pager.arrangement.page_ins_per_pass
            assert ledger.report().peak_bytes <= budget
        gc.collect()
        assert ledger.used("weights") == 0


def test_a_budget_for_everything_reads_every_byte_once(tmp_path):
    path, _ = write_toy(tmp_path / "toy.jlm", tied=False)
    container = Container.open(path)
    with Pager(container, budgets(container)[-1], Ledger()) as pager:
        run_with_embedding(pager, [0, 49, 7])
        counters = pager.counters
        assert counters.bytes_read == sum(page.n_bytes for page in container.pages)
        assert counters.page_ins == len(pager.cycle)
        assert counters.evictions == counters.embedding_bytes == 0
        assert set(pager.resident_frames()) == set(pager.cycle)


def test_a_budget_below_the_smallest_is_refused_by_it_before_anything_is_allocated(container):
    low, ledger = budgets(container)[0], Ledger()
    sentence = rf"\({low - 1} bytes\) is too small for .* that works is .* \({low} bytes\)"
    with pytest.raises(BudgetError, match=sentence) as refusal:
        Pager(container, low - 1, ledger)
    assert refusal.value.smallest_bytes == low
    assert ledger.report().peak_bytes == 0
    with Pager(container, low, ledger) as pager:
        run_pass(pager)
        assert ledger.report().peak_bytes <= low
        with pytest.raises(BudgetError):
            pager.set_budget(low - 1)
        assert pager.budget_bytes == low


def test_random_new_budgets_between_passes_hold_at_once(container):
    rng, ledger = random.Random(5), Ledger()
    low, *_, high = budgets(container)
    with Pager(container, high, ledger) as pager:
        for _ in range(60):
            before, was = pager.counters, pager.applied()
            budget = rng.randint(low, high)
            applied = pager.set_budget(budget)
            assert ledger.used("weights") <= budget
            assert applied.fixed_bytes + applied.frame_bytes <= budget
            if budget >= was.budget_bytes:
                assert applied.evicted == 0
                assert pager.counters.prefetch_unused == before.prefetch_unused
                assert applied.n_pinned >= was.n_pinned
            for _ in range(rng.randint(0, 2)):
                run_pass(pager)
            assert ledger.used("weights") <= budget
        assert ledger.report().peak_bytes <= high


@pytest.mark.parametrize("n_moving", [1, 2])
def test_narrowing_evicts_exactly_the_excess(tmp_path, n_moving):
    plan = {"block_bytes": [16000] * 8, "slab_rows": (32, 32)}
    container = Container.open(write_toy(tmp_path / "t.jlm", **plan)[0])
    with Pager(container, 1 << 30, Ledger(), n_moving=n_moving) as pager:
        for n_left in (8, 5, 3):
            run_pass(pager)
            before = pager.counters
            applied = pager.set_budget(pager.fixed_bytes + n_left * 16384)
            assert applied.n_resident == pager.counters.frames == n_left
            assert applied.evicted == before.frames - n_left


def test_the_ledger_is_below_its_ceiling_whenever_that_moves(container, monkeypatch):
    low, *_, high = budgets(container)
    ledger, exceeded = Ledger(), []
    set_budget = ledger.set_budget

    def look(line: str, n_bytes: int) -> None:
        set_budget(line, n_bytes)
        exceeded.append(ledger.used(line) > n_bytes)

    with Pager(container, high, ledger) as pager:
        monkeypatch.setattr(ledger, "set_budget", look)
        for budget in (low, high):
            run_pass(pager)
            pager.set_budget(budget)
            assert ledger.report().lines[0].budget_bytes == budget
    assert exceeded and not any(exceeded)


def test_figures_are_of_one_piece_while_the_cycle_changes(container, monkeypatch):
    with Pager(container, budgets(container)[1], Ledger()) as pager:
        before, seen, choose = pager.applied(), [], pager._choose

        def look(*args):
            seen.append(pager.applied())
            return choose(*args)

        monkeypatch.setattr(pager, "_choose", look)
        pager.set_cycle(pager.cycle[:3])
        assert seen == [before]
        assert pager.applied().n_pages == 3 < before.n_pages


def test_a_new_budget_from_another_thread_waits_for_the_step_and_goes_before_the_next(container):
    low, *_, high = budgets(container)
    with Pager(container, high, Ledger()) as pager:
        run_pass(pager)
        applied, order = [], []

        def narrow() -> None:
            applied.append(pager.set_budget(low))
            order.append("budget")

        thread = threading.Thread(target=narrow)
        with pager.step():
            thread.start()
            time.sleep(0.05)
            assert pager.budget_bytes == high and not applied
            order.append("step")
        with pager.step():
            order.append("next step")
        thread.join()
        assert order[0] == "step" and applied[0].budget_bytes == low == pager.budget_bytes
        assert order.index("budget") <= 2
        run_pass(pager)


def test_budgets_jump_while_another_thread_steps(container):
    low, *_, high = budgets(container)
    ledger, stop = Ledger(), threading.Event()
    with Pager(container, high, ledger) as pager:

        def jump() -> None:
            rng = random.Random(6)
            while not stop.is_set():
                budget = rng.randint(low, high)
                assert pager.set_budget(budget).budget_bytes == budget

        thread = threading.Thread(target=jump)
        thread.start()
        for _ in range(60):
            run_pass(pager)
        stop.set()
        thread.join()
        assert ledger.report().peak_bytes <= high


def flip(container: Container, page: int) -> None:
    """Change one byte of a page in the file."""
    with container.path.open("r+b") as file:
        file.seek(container.pages[page].offset + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("which", [0, 2, 4])
@pytest.mark.parametrize("kind", ["block", "head"])
def test_a_damaged_page_is_one_error_and_the_next_pass_works(container, kind, which):
    page = container.pages_of(kind)[1]
    flip(container, page)
    with Pager(container, budgets(container)[which], Ledger()) as pager:
        for _ in range(2):
            damaged = rf"damaged {kind} page 1 \(its hash differs\); make it again with: jitllm"
            with pytest.raises(FormatError, match=damaged):
                run_pass(pager)
        flip(container, page)
        for _ in range(2):
            run_pass(pager)


def test_a_damaged_page_surfaces_before_its_hold_has_ended(container):
    flip(container, container.pages_of("block")[1])
    reached = []
    with Pager(container, budgets(container)[0], Ledger()) as pager, pytest.raises(FormatError):
        run_pass(pager, each=reached.append)
    assert reached == [pager.cycle[0]]


def test_hashes_can_be_left_unchecked(container):
    page = container.pages_of("block")[1]
    flip(container, page)
    with Pager(container, budgets(container)[0], Ledger(), check_hashes=False) as pager:
        run_pass(pager)


def test_a_file_cut_off_under_an_open_pager_is_one_error_and_frees_the_hold(container):
    whole = container.path.read_bytes()
    with Pager(container, budgets(container)[1], Ledger()) as pager:
        run_pass(pager)
        os.truncate(container.path, container.pages[3].offset + 4096)
        with pytest.raises(FormatError, match="was cut off while it was in use"):
            for _ in range(3):
                run_pass(pager)
        with container.path.open("r+b") as file:
            file.write(whole)
        for _ in range(2):
            run_pass(pager)


def test_a_failing_disk_is_one_error_and_the_next_pass_works(container, monkeypatch):
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with Pager(container, budgets(container)[1], Ledger()) as pager:
        run_pass(pager)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            with pytest.raises(JitllmError, match="cannot be read: Input/output error"):
                for _ in range(3):
                    run_pass(pager)
        run_pass(pager)


def test_an_exception_in_a_step_leaves_the_pager_usable(container):
    with Pager(container, budgets(container)[1], Ledger(), n_moving=2) as pager:
        for page in pager.cycle:
            with pytest.raises(KeyboardInterrupt), pager.step(), pager.hold(page):
                raise KeyboardInterrupt
        run_pass(pager)


def test_two_moving_frames_read_the_next_page_while_this_one_computes(container, monkeypatch):
    """Wall time of a paced disk: at most 1.15 times the longer of reading and computing."""
    real, seconds = os.preadv, 0.01

    def slow(*arguments):
        time.sleep(seconds)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    low = budgets(container)[0]
    with Pager(container, low + 32768, Ledger(), n_moving=2) as pager:
        assert pager.arrangement.n_moving == 2
        run_pass(pager)
        walls = []
        for _ in range(6):
            begun = time.perf_counter()
            with pager.step():
                for page in pager.cycle:
                    with pager.hold(page):
                        time.sleep(seconds)
            walls.append(time.perf_counter() - begun)
        # The quickest: other work on the machine only ever makes a pass longer.
        assert min(walls) <= 1.15 * seconds * len(pager.cycle)
        counters = pager.counters
        assert counters.prefetch_on_time + counters.prefetch_late >= counters.page_ins - 2


def test_the_page_being_read_is_never_in_the_frame_being_used(container):
    with Pager(container, budgets(container)[1], Ledger(), n_moving=2) as pager, pager.step():
        for page in pager.cycle:
            with pager.hold(page) as frame:
                others = [f for f in pager._frames.frames if f is not frame]
                reading = [f for f in others if f.read is not None]
                assert frame.page == page
                assert all(f.page != page for f in reading)


def test_steps_that_leave_out_the_head_do_not_read_it(container):
    with Pager(container, budgets(container)[1], Ledger()) as pager:
        blocks = container.pages_of("block")
        run_pass(pager, blocks)
        before = pager.counters
        for _ in range(3):
            run_pass(pager, blocks)
        after = pager.counters
        moving_blocks = [i for i in pager.arrangement.moving if pager.cycle[i] in blocks]
        assert after.page_ins - before.page_ins == 3 * len(moving_blocks) > 0
        assert after.prefetch_unused == before.prefetch_unused
        run_pass(pager)


def test_prefetch_never_takes_the_place_of_a_page_in_use(container):
    with Pager(container, budgets(container)[0], Ledger()) as pager, pager.step():
        first, second = pager.cycle[:2]
        with pager.hold(first) as frame:
            assert not pager.prefetch(second)
            assert frame.page == first
        assert pager.prefetch(second)


def test_rates_choose_the_number_of_moving_frames_while_running(tmp_path, monkeypatch):
    container = Container.open(write_toy(tmp_path / "t.jlm", block_bytes=[8000] * 4)[0])
    real, seconds = os.preadv, 0.004

    def slow(*arguments):
        time.sleep(seconds)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    with Pager(container, 1 << 30, Ledger()) as pager:
        applied = pager.set_budget(pager.all_resident_bytes - 4096)
        applied_moving = {applied.n_moving}
        for _ in range(20):
            run_pass(pager)
        assert pager.rates.compute_to_read > 1
        applied_moving.add(pager.arrangement.n_moving)
        assert pager.arrangement.n_moving == 1


def test_a_thousand_passes_leak_nothing(container):
    from jitllm.paging.budget import rss_bytes

    with Pager(container, budgets(container)[1], Ledger()) as pager:
        for round_ in range(2):
            for _ in range(500):
                with pager.step():
                    for page in pager.cycle[:3]:
                        with pager.hold(page):
                            pass
            gc.collect()
            if round_ == 0:
                before = rss_bytes()
        assert rss_bytes() - before < 500 * 1024


def test_counted_reads_are_the_kernels(container):
    if not os.access("/proc/self/io", os.R_OK):
        pytest.skip("no /proc/self/io here")

    budget, counted, expected = budgets(container)[1], [], 0
    for _ in range(5):
        before = kernel_read_bytes()
        with Pager(container, budget, Ledger(), n_moving=2) as pager:
            if not pager.direct:
                pytest.skip("no direct reads on this file system")
            run_with_embedding(pager, [1, 40])
            pager.set_budget(budget)  # waits for what is being read ahead
        counted.append(kernel_read_bytes() - before)
        expected = pager.counters.bytes_read
    if not any(counted):
        pytest.skip("no disk below this file system")
    # The kernel also counts what the interpreter itself reads now and then.
    assert expected in counted


def run_with_embedding(pager: Pager, ids: list[int]) -> None:
    for _ in range(3):
        with pager.step():
            for _ in pager.embedding(ids):
                pass
            for page in pager.cycle:
                with pager.hold(page):
                    pass


def test_memory_that_an_array_keeps_alive_stays_in_the_ledger(container):
    ledger = Ledger()
    with Pager(container, 1 << 30, ledger) as pager:
        run_pass(pager)
        frame = pager.resident_frames()[pager.cycle[3]]
        kept, frame.views["array"] = np.asarray(frame.data[:16]), frame.data[:32]
        applied = pager.set_budget(pager.smallest_bytes)
        assert frame.views == {}
        del frame
        over = ledger.used("weights") - applied.fixed_bytes - applied.frame_bytes
        assert over <= 28672
        del kept
        assert ledger.used("weights") <= pager.smallest_bytes


def test_closing_with_reads_under_way_is_safe_and_final(container):
    ledger = Ledger()
    pager = Pager(container, 1 << 30, ledger)
    with pager.step():
        pass
    pager.close()
    pager.close()
    assert ledger.used("weights") == 0
    with pytest.raises(JitllmError, match="was closed"), pager.step():
        pass
    with pytest.raises(JitllmError, match="was closed"):
        pager.set_budget(1 << 30)
    assert pager.counters.bytes_read > 0
