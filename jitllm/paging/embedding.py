"""Rows of the embedding: from the pages that are resident, else read from the file one by one.

The embedding is not a page of the cycle: a token needs one row of it. A row that is not resident
costs one small direct read, rounded to whole sectors, into a staging buffer that is counted in
the budget; rows that share sectors are read together, and each is checked by its own hash.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from jitllm.errors import FormatError
from jitllm.paging.budget import Ledger
from jitllm.paging.container import Container, remake
from jitllm.paging.frames import Frame, aligned_memory
from jitllm.paging.layout import unit_hashes
from jitllm.paging.reader import SECTOR_BYTES, Reader

_MAX_AREA_BYTES = 512 << 10
_AREA_SHARE = 128
"""The staging areas take no more than this part of a small model's pages."""

Holder = Callable[[int], AbstractContextManager[Frame] | None]
"""A hold of a page that has a frame of its own; None for other pages."""


@dataclass(frozen=True)
class EmbeddingUnits:
    """Some of the units asked for: token `tokens[i]` of the ids is row `row[i]` of unit `unit[i]`.

    The arrays are overwritten when the next batch is asked for.
    """

    units: np.ndarray
    """uint8[U, unit_bytes], distinct"""
    tokens: np.ndarray
    unit: np.ndarray
    row: np.ndarray


@dataclass
class _Run:
    """Sectors from `start` to `end` of the file, and the (place, offset) of the units in them."""

    start: int
    end: int
    units: list[tuple[int, int]]


class EmbeddingReader:
    """Looks up rows of a container's embedding, a staging buffer at a time."""

    def __init__(self, container: Container, reader: Reader, ledger: Ledger):
        self._container, self._reader = container, reader
        self._table = container.embedding
        self.n_bytes, self.blocked_s = 0, 0.0
        """Read for look-ups so far, in whole sectors, and waited for."""
        if self._table is None:
            return
        self._hashes = ledger.charge("weights", container.row_hashes.nbytes)
        area = _area_bytes(container)
        memory, _ = aligned_memory(2 * area, ledger)
        self._read_area = memoryview(memory)[:area]
        n_units = area // self._table.unit_bytes
        gathered = np.frombuffer(memory, np.uint8, n_units * self._table.unit_bytes, area)
        self._gathered = gathered.reshape(n_units, self._table.unit_bytes)
        self._first_units = [slab.first_row // self._table.unit_rows for slab in self._table.slabs]

    def batches(self, ids: Sequence[int], holder: Holder) -> Iterator[EmbeddingUnits]:
        """The units that hold the rows `ids`, each read at most once.

        JitllmError: they could not be read, or are not what was written.
        """
        ids = np.asarray(ids, np.int64)
        units, unit_of = np.unique(ids // self._table.unit_rows, return_inverse=True)
        for first in range(0, len(units), len(self._gathered)):
            batch = units[first : first + len(self._gathered)]
            self._fill(batch, holder)
            tokens = np.flatnonzero((unit_of >= first) & (unit_of < first + len(batch)))
            yield EmbeddingUnits(
                self._gathered[: len(batch)],
                tokens,
                unit_of[tokens] - first,
                ids[tokens] % self._table.unit_rows,
            )

    def close(self) -> None:
        """Let go of the staging buffer."""
        if self._table is not None:
            self._hashes.release()
            self._read_area = self._gathered = None

    def _fill(self, units: np.ndarray, holder: Holder) -> None:
        """Gather the units, ascending, slab by slab: resident ones are copied, others read."""
        slab_of = np.searchsorted(self._first_units, units, side="right") - 1
        absent = []
        for number in np.unique(slab_of).tolist():
            slab, places = self._table.slabs[number], np.flatnonzero(slab_of == number)
            rows = units[places] - self._first_units[number]
            hold = holder(slab.page)
            if hold is None:
                start = self._container.pages[slab.page].offset + slab.offset
                absent += zip(
                    places.tolist(), (start + rows * self._table.unit_bytes).tolist(), strict=True
                )
                continue
            with hold as frame:
                stored = frame.data[slab.offset : slab.offset + slab.n_bytes]
                self._gathered[places] = stored.reshape(-1, self._table.unit_bytes)[rows]
        if absent:
            self._read(absent)
            self._check(units, np.array([place for place, _ in absent]))

    def _read(self, absent: list[tuple[int, int]]) -> None:
        """Read units into the places of `_gathered` given, from ascending offsets in the file."""
        runs: list[_Run] = []
        for place, offset in absent:
            start, end = _floor(offset), _ceil(offset + self._table.unit_bytes)
            if not runs or start > runs[-1].end:
                runs.append(_Run(start, start, []))
            if sum(run.end - run.start for run in runs) + end - runs[-1].end > len(self._read_area):
                self._read_runs(runs)
                runs = [_Run(start, start, [])]
            runs[-1].end = end
            runs[-1].units.append((place, offset))
        self._read_runs(runs)

    def _read_runs(self, runs: list["_Run"]) -> None:
        """Read runs of sectors side by side, and put their units where they belong."""
        at, segments, found = 0, [], []
        for run in (run for run in runs if run.units):
            segments.append((run.start, self._read_area[at : at + run.end - run.start]))
            found += [(place, at + offset - run.start) for place, offset in run.units]
            at += run.end - run.start
        begun, read = time.perf_counter(), self._reader.read(segments, urgent=True)
        self.n_bytes += read.n_bytes
        try:
            read.wait()
        finally:
            self.blocked_s += time.perf_counter() - begun
        for place, at in found:
            unit = np.frombuffer(self._read_area, np.uint8, self._table.unit_bytes, at)
            self._gathered[place] = unit

    def _check(self, units: np.ndarray, places: np.ndarray) -> None:
        wrong = unit_hashes(self._gathered[places]) != self._container.row_hashes[units[places]]
        if wrong.any():
            row = int(units[places][wrong][0]) * self._table.unit_rows
            path = self._container.path
            raise FormatError(
                f"{path} has a damaged embedding (near row {row}, its hash differs); {remake(path)}"
            )


def lookup_bytes(container: Container) -> int:
    """What look-ups keep in memory: the staging buffer and the hashes of the units."""
    if container.embedding is None:
        return 0
    return 2 * _area_bytes(container) + container.row_hashes.nbytes


def _area_bytes(container: Container) -> int:
    """Bytes of each of the two staging areas: what is read, and what is gathered from it."""
    wanted = min(sum(page.n_bytes for page in container.pages) // _AREA_SHARE, _MAX_AREA_BYTES)
    return max(_unit_span(container), _ceil(wanted))


def _unit_span(container: Container) -> int:
    """The most bytes of whole sectors that one unit can touch."""
    return _ceil(container.embedding.unit_bytes - 1) + SECTOR_BYTES


def _floor(offset: int) -> int:
    return offset // SECTOR_BYTES * SECTOR_BYTES


def _ceil(offset: int) -> int:
    return -(-offset // SECTOR_BYTES) * SECTOR_BYTES
