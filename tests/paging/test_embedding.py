"""Embedding rows: the right ones, each unit read once, in staging-sized batches, checked."""

import random
from pathlib import Path

import numpy as np
import pytest

from jitllm.errors import FormatError
from jitllm.paging.budget import Ledger
from jitllm.paging.container import Container
from jitllm.paging.embedding import lookup_bytes
from jitllm.paging.pager import Pager
from tests.paging.toys import write_toy

ROWS = (320, 320, 70)
KINDS = {"tied": True, "untied": False}


def toy(tmp_path: Path, tied: bool, cols: int = 100) -> tuple[Container, np.ndarray]:
    """A container, and its embedding's units uint8[U, unit_bytes]."""
    path, weights = write_toy(tmp_path / "t.jlm", slab_rows=ROWS, tied=tied, cols=cols)
    names = [f"token_embd.weight{at}" for at in (("", "@320", "@640") if tied else ("",))]
    return Container.open(path), np.concatenate([weights[name] for name in names])


def look_up(pager: Pager, ids: list[int]) -> list[bytes]:
    """The unit of each id, put together from the batches, and a check of the rows in them."""
    found, unit_rows = [b""] * len(ids), pager.container.embedding.unit_rows
    with pager.step():
        for batch in pager.embedding(ids):
            assert len(np.unique(batch.unit)) == len(batch.units)
            for token, unit, row in zip(batch.tokens, batch.unit, batch.row, strict=True):
                assert row == ids[token] % unit_rows
                found[token] = batch.units[unit].tobytes()
    return found


@pytest.mark.parametrize("tied", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("resident", [False, True])
def test_every_row_is_found_in_its_unit(tmp_path, tied, resident):
    container, units = toy(tmp_path, tied)
    unit_rows, rng = container.embedding.unit_rows, random.Random(7)
    with Pager(container, 1 << 30, Ledger()) as pager:
        if not resident:
            pager.set_budget(pager.smallest_bytes)
        for n_ids in (1, 2, 40, 500):
            ids = [rng.randrange(sum(ROWS)) for _ in range(n_ids)]
            assert look_up(pager, ids) == [units[i // unit_rows].tobytes() for i in ids]
        assert (pager.counters.embedding_bytes == 0) == resident


@pytest.mark.parametrize("tied", KINDS.values(), ids=KINDS)
def test_all_rows_in_order_and_backwards(tmp_path, tied):
    container, units = toy(tmp_path, tied)
    unit_rows, ids = container.embedding.unit_rows, [*range(sum(ROWS)), *range(sum(ROWS))[::-1]]
    with Pager(container, 1 << 30, Ledger()) as pager:
        pager.set_budget(pager.smallest_bytes)
        assert look_up(pager, ids) == [units[i // unit_rows].tobytes() for i in ids]


def test_one_row_costs_its_sectors(tmp_path):
    container, _ = toy(tmp_path, tied=False, cols=1000)
    with Pager(container, 1 << 30, Ledger()) as pager:
        pager.set_budget(pager.smallest_bytes)
        look_up(pager, [5, 5, 5])
        assert pager.counters.embedding_bytes == 8192  # row 5: bytes 20000 to 24000, two sectors


def test_neighbours_are_read_together_and_repeats_once(tmp_path):
    container, _ = toy(tmp_path, tied=False)
    with Pager(container, 1 << 30, Ledger()) as pager:
        pager.set_budget(pager.smallest_bytes)
        with pager.step():
            before = pager.counters
            for _ in pager.embedding([3, 4, 5, 3, 4]):
                pass
            after = pager.counters
        assert after.read_requests - before.read_requests == 1
        assert after.embedding_bytes == 4096


def test_look_ups_stay_within_what_the_budget_counts_for_them(tmp_path):
    container, _ = toy(tmp_path, tied=True)
    ledger = Ledger()
    with Pager(container, 1 << 30, ledger) as pager:
        pager.set_budget(pager.smallest_bytes)
        look_up(pager, list(range(sum(ROWS))))
        assert ledger.report().peak_bytes <= pager.smallest_bytes
        dense = container.pages[0].n_bytes
        assert pager.fixed_bytes == dense + lookup_bytes(container)


@pytest.mark.parametrize("tied", KINDS.values(), ids=KINDS)
def test_a_damaged_row_is_one_error_and_the_others_still_read(tmp_path, tied):
    container, _ = toy(tmp_path, tied)
    slab = container.embedding.slabs[0]
    with container.path.open("r+b") as file:
        file.seek(container.pages[slab.page].offset + slab.offset)
        file.write(bytes(8))
    with Pager(container, 1 << 30, Ledger()) as pager:
        pager.set_budget(pager.smallest_bytes)
        with pytest.raises(FormatError, match=r"damaged embedding \(near row 0, .* jitllm convert"):
            look_up(pager, [0])
        look_up(pager, [200])


def test_a_container_without_an_embedding_needs_no_room_for_one(tmp_path):
    path, _ = write_toy(tmp_path / "t.jlm", slab_rows=())
    container = Container.open(path)
    assert lookup_bytes(container) == 0
    with Pager(container, 1 << 30, Ledger()) as pager, pager.step():
        for page in pager.cycle:
            with pager.hold(page):
                pass
