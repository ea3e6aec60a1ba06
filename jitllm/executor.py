"""Drives a model over its weights: the one place where bytes, steps and KV meet.

A pass takes new tokens through the partitions of the plan in order. Blocks whose weights stay where
they are run as one compiled step; a paged or streamed block runs by itself, under a hold, while
the next one's bytes are on their way. The bits are the same: all arithmetic of the generated
kernels happens inside the operations, and the portable ones always go block by block.
Letters: T rows, B conversations, D width, V vocabulary, R rotated values.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import jax
import numpy as np

from jitllm.kernels.qtypes import QTYPES
from jitllm.kernels.tensor import QuantizedTensor
from jitllm.model.config import ModelConfig
from jitllm.model.kvcache import CacheTable, KVCaches
from jitllm.model.rope import frequencies, magnitude, rope_rows
from jitllm.paging.budget import Ledger
from jitllm.paging.container import Container
from jitllm.paging.embedding import EmbeddingUnits
from jitllm.paging.gate import StepGate
from jitllm.paging.pager import Pager
from jitllm.placement.devices import HOST
from jitllm.placement.plan import STREAMED, Partition, Plan
from jitllm.steps import SLABS, Rows, Run, Steps
from jitllm.stores import DeviceStore, HostStore, Weights

CHUNK_TOKENS = 512
"""Rows of a prefill step: each page is read once for so many tokens of a prompt."""
CHUNK_ROWS = (1, 16, 128, CHUNK_TOKENS)
"""Rows of the steps for fewer tokens: a prompt of 12 takes 10 ms instead of 17, of 100 40 instead
of 50 (SmolLM2, resident). The rows behind the last token cost no arithmetic, but memory."""
_FEW_ROWS = 16
"""Up to so many rows a step is so short that blocks are better run together than one by one."""
_HEAD_ROWS = 16
"""Rows of logits at once where all are wanted: 16 MiB for a vocabulary of 2^18."""


@dataclass
class Feed:
    """New tokens of one conversation, and the caches they are appended to at `position`."""

    ids: Sequence[int]
    kvs: KVCaches
    position: int


@dataclass(frozen=True)
class Place:
    """A device that executes blocks: its weights, and its compiled steps."""

    id: str
    store: HostStore | DeviceStore
    steps: Steps
    ledger: Ledger


class Executor:
    """One model on its devices. One pass at a time: `Pager.step` sees to it."""

    def __init__(
        self,
        config: ModelConfig,
        container: Container,
        pager: Pager,
        places: dict[str, Place],
        plan: Plan,
        dense: dict[str, np.ndarray],
        gate: StepGate,
    ):
        """`dense` are the vectors that belong to no block; `places` are by device id. A pass is a
        step of `gate`, for changes of the plan to wait for."""
        self._config, self._container, self._pager, self._gate = config, container, pager, gate
        self._places, self._norm = places, dense["output_norm"]
        self._norms: dict[str, jax.Array] = {}
        self._pages = container.pages_of("block")
        self._head_pages = container.pages_of("head")
        factors = dense.get("rope_freqs")
        self._ropes = [(frequencies(r, factors), magnitude(r)) for r in config.ropes]
        self._one_row = any(place.steps.ops.one_row for place in places.values())
        self.plan = plan
        """What the next pass follows; the stores hold what it needs."""
        self._at, self._since_s = HOST, 0.0
        self._writing: jax.Array | None = None
        self.executed: Counter[str] = Counter()
        """Blocks run so far, by device id."""
        self.last_pass: Counter[str] = Counter()
        """Those of the last pass."""
        self.seconds: Counter[str] = Counter()
        """Time of all passes so far, by the device that had the activations."""
        self.n_seams = 0
        """Times that activations went from one device to another."""

    def append(self, feed: Feed) -> None:
        """Append the tokens of `feed`."""
        for chunk in self._chunks(feed):
            with self._pass(with_head=False):
                jax.block_until_ready(self._blocks([chunk])[0])

    def prefill(self, feed: Feed) -> np.ndarray:
        """Append the tokens of `feed`; logits f32[V] after the last of them."""
        *chunks, last = self._chunks(feed)
        for chunk in chunks:
            self.append(chunk)
        return self.decode([last])[0]

    def decode(self, feeds: Sequence[Feed]) -> np.ndarray:
        """Append to several conversations, a token each, in one pass (or a chunk to one alone);
        logits f32[B, V] after the last token of each."""
        if self._one_row and len(feeds) > 1:
            return np.concatenate([self.decode([feed]) for feed in feeds])
        with self._pass():
            one = all(len(feed.ids) == 1 for feed in feeds)
            x, has_logits = self._blocks(feeds, with_head=one)
            if has_logits:
                self._cross(HOST, x)
                return np.asarray(x)[: len(feeds)]
            last = 0 if one else len(feeds[0].ids) - 1
            return self._logits(np.asarray(x)[last : last + len(feeds)])

    def logits(self, feed: Feed) -> np.ndarray:
        """Append the tokens of `feed`; logits f32[T, V] after each of them."""
        rows = []
        for chunk in self._chunks(feed):
            with self._pass():
                x, _ = self._blocks([chunk])
                rows.append(self._logits(np.asarray(x)[: len(chunk.ids)]))
        return np.concatenate(rows)

    @contextmanager
    def _pass(self, with_head: bool = True) -> Iterator[None]:
        with self._gate.step():
            cycle, head = self._pager.cycle, set(self._head_pages)
            pages = None if with_head else [page for page in cycle if page not in head]
            with self._pager.step(pages):
                self._at, self._since_s = HOST, time.perf_counter()
                before = self.executed.copy()
                try:
                    yield
                finally:
                    # Nothing else holds back who moves or frees caches that are given by address.
                    jax.block_until_ready(self._writing)
                    self._writing = None
                    self._clock()
                    self.last_pass = self.executed - before

    def _cross(self, device: str, x: jax.Array | np.ndarray) -> None:
        """Activations go to `device`. It cannot begin before they are there, so that waiting for
        them here costs nothing, and each device's time is its own."""
        if device != self._at:
            jax.block_until_ready(x)
            self._clock()
            self.n_seams += 1
            self._at = device

    def _clock(self) -> None:
        now_s = time.perf_counter()
        self.seconds[self._at] += now_s - self._since_s
        self._since_s = now_s

    def _chunks(self, feed: Feed) -> list[Feed]:
        return [
            Feed(feed.ids[at : at + CHUNK_TOKENS], feed.kvs, feed.position + at)
            for at in range(0, len(feed.ids), CHUNK_TOKENS)
        ]

    def _blocks(self, feeds: Sequence[Feed], with_head: bool = False) -> tuple[jax.Array, bool]:
        """(x[T, D] after all blocks, False), or (logits f32[T, V], True) where `with_head` and the
        head could be part of the last step. The valid rows come first."""
        x, rows = self._inputs(feeds, self._n_rows(feeds))
        has_logits = False
        for partition in self.plan.partitions:
            place = self._places[partition.device]
            self._cross(place.id, x)
            if isinstance(x, jax.Array):
                x = jax.device_put(x, place.store.device)
            # The logits of many rows have no room in what a plan reckons for a step elsewhere.
            fused = with_head and (place.id == HOST or len(feeds) == 1)
            run = self._run(partition, place, len(x), fused)
            if run is not None:
                x = self._step(run, place, partition.first, x, feeds, rows)
                has_logits = bool(run.head)
                continue
            is_away = self.plan.blocks[partition.first].kv_device != place.id
            block = partition.first
            while block <= partition.last:
                run = None if is_away else self._staying(place, block, partition.last, len(x))
                if run is not None:
                    x = self._step(run, place, block, x, feeds, rows)
                    block += len(run.specs)
                    continue
                with (
                    place.store.hold(self._pages[block]) as (weights, settle),
                    self._visit(block, place, feeds),
                ):
                    run = self._run_of(place, block, [weights])
                    x = self._step(run, place, block, x, feeds, rows)
                    settle(x)
                block += 1
        return x, has_logits

    def _n_rows(self, feeds: Sequence[Feed]) -> int:
        """Rows of the step that takes `feeds`."""
        if self._one_row:
            return CHUNK_TOKENS
        if len(feeds) > 1:
            return widths(len(feeds))[-1]
        return next(n for n in CHUNK_ROWS if n >= len(feeds[0].ids))

    def _staying(self, place: Place, first: int, last: int, n_rows: int) -> Run | None:
        """Blocks from `first` on whose weights stay where they are, as one step: a call of its own
        costs a block of 2 MiB more than its products. 1, 2, 4 or 8 of them, which is all that is
        ever compiled, however the budget moves."""
        most = min(8, last + 1 - first) if n_rows <= _FEW_ROWS else 1
        pages = self._pages[first : first + most]
        weights = list(takewhile(bool, map(place.store.staying, pages)))
        n = _power_of_two(len(weights))
        return self._run_of(place, first, weights[:n]) if n else None

    def _run_of(self, place: Place, first: int, weights: list[Weights]) -> Run:
        """The step of `len(weights)` blocks from `first` on."""
        blocks = slice(first, first + len(weights))
        specs = self._config.blocks[blocks]
        layouts = tuple(place.store.layouts[page] for page in self._pages[blocks])
        return Run(("blocks of", layouts, specs), specs, weights, [])

    def _run(self, partition: Partition, place: Place, n_rows: int, with_head: bool) -> Run | None:
        """The partition as one step, where its weights stay in place; None: block by block."""
        # On the host the first chunk of a prompt finds pages on their way, and later ones gain
        # nothing: a step of 512 rows takes too long for its dispatch to matter.
        if self._one_row or (n_rows == CHUNK_TOKENS and partition.device == HOST):
            return None
        if self.plan.blocks[partition.first].kv_device != place.id:
            return None
        weights = place.store.resident()
        if weights is None or partition.mode == STREAMED:
            return None
        first, last = partition.first, partition.last
        pages = self._pages[first : last + 1]
        head = self._head_pages if with_head and last == self._config.n_blocks - 1 else []
        if self.plan.head.device != place.id or any(page not in weights for page in head):
            head = []
        return Run(
            ("blocks", first, last, bool(head)),
            self._config.blocks[first : last + 1],
            [weights[page] for page in pages],
            [next(iter(weights[page].values())) for page in head],
            self._norm_on(place) if head else None,
        )

    def _step(
        self,
        run: Run,
        place: Place,
        first: int,
        x: jax.Array,
        feeds: Sequence[Feed],
        rows: Rows,
    ) -> jax.Array:
        """One compiled step from block `first` on: its result."""
        blocks = slice(first, first + len(run.specs))
        if len(feeds) == 1:
            (feed,) = feeds
            x, feed.kvs[blocks] = place.steps.run(run, x, feed.kvs[blocks], rows)
        else:
            kvs, positions = [feed.kvs for feed in feeds], [feed.position for feed in feeds]
            table = CacheTable.of(kvs, positions, len(x), blocks)
            x, _ = place.steps.run(run, x, table, rows)
            self._writing = x
        self.executed[place.id] += len(run.specs)
        return x

    @contextmanager
    def _visit(self, block: int, place: Place, feeds: Sequence[Feed]) -> Iterator[None]:
        """Caches of a block that lie elsewhere are with `place` inside, and then at home again;
        where the step fails, as they were."""
        home = self._places[self.plan.blocks[block].kv_device]
        if home is place:
            yield
            return
        kvs = [feed.kvs[block] for feed in feeds]
        charge = place.ledger.charge("kv", sum(array.nbytes for kv in kvs for array in kv))
        try:
            for feed, kv in zip(feeds, kvs, strict=True):
                feed.kvs[block] = jax.device_put(kv, place.store.device)
            yield
            jax.block_until_ready(self._writing)
            visitors = [feed.kvs[block] for feed in feeds]
            kvs = jax.block_until_ready(jax.device_put(visitors, home.store.device))
        finally:
            for feed, kv in zip(feeds, kvs, strict=True):
                feed.kvs[block] = kv
            charge.release()

    def _logits(self, x: np.ndarray) -> np.ndarray:
        """f32[T, V] of x[T, D], slab by slab; each slab is held once."""
        out = np.empty((len(x), self._config.n_vocab), np.float32)
        first, place = 0, self._places[self.plan.head.device]
        self._cross(place.id, x)
        pages = list(self._head_pages)
        while pages:
            if slabs := self._staying_slabs(place, pages[:SLABS]):
                first = self._head(x, out, first, slabs, place, pages)
                del pages[: len(slabs)]
                continue
            with place.store.hold(pages[0]) as (weights, settle):
                first = self._head(x, out, first, tuple(weights.values()), place, pages, settle)
            del pages[0]
        self._cross(HOST, out)
        return out

    def _staying_slabs(self, place: Place, pages: Sequence[int]) -> tuple[QuantizedTensor, ...]:
        """The slabs at the beginning of `pages` that stay where they are: 1, 2 or 4."""
        staying = takewhile(bool, map(place.store.staying, pages[: 1 if self._one_row else None]))
        slabs = [next(iter(weights.values())) for weights in staying]
        return tuple(slabs[: _power_of_two(len(slabs))])

    def _head(
        self,
        x: np.ndarray,
        out: np.ndarray,
        first: int,
        slabs: tuple[QuantizedTensor, ...],
        place: Place,
        pages: Sequence[int],
        settle: Callable[[jax.Array], None] = lambda logits: None,
    ) -> int:
        """Fill `out` from column `first` with the logits of `slabs`, the first of `pages`, for all
        rows of x, `_HEAD_ROWS` at a time; the column behind them."""
        # XLA's loops, and with them the last bits, depend on how many rows a step is made for.
        rows = _HEAD_ROWS if self._one_row else min(widths(len(x))[-1], _HEAD_ROWS)
        layouts = tuple(place.store.layouts[page] for page in pages[: len(slabs)])
        norm, end = self._norm_on(place), first + sum(w.shape[0] for w in slabs)
        for at in range(0, len(x), rows):
            part = x[at : at + rows]
            padded = np.zeros((rows, x.shape[1]), np.float32)
            padded[: len(part)] = part
            span = np.array([0, len(part)], np.int32)
            logits = place.steps.head(layouts, padded, slabs, norm, span)
            settle(logits[0])
            np.concatenate(
                [y[: len(part)] for y in map(np.asarray, logits)],
                axis=1,
                out=out[at : at + len(part), first:end],
            )
        return end

    def _norm_on(self, place: Place) -> jax.Array:
        if place.id not in self._norms:
            if place.id != HOST:  # where it is part of the dense page
                place.ledger.charge("weights", self._norm.nbytes)
            self._norms[place.id] = jax.device_put(self._norm, place.store.device)
        return self._norms[place.id]

    def _inputs(self, feeds: Sequence[Feed], n_rows: int) -> tuple[np.ndarray, Rows]:
        """(x[T, D], what else a pass needs): the embedding of the new tokens, where they stand."""
        ids = [token for feed in feeds for token in feed.ids]
        x = np.zeros((n_rows, self._config.width), np.float32)
        if self.plan.embed is None or self.plan.embed.device == HOST:
            for batch in self._pager.embedding(ids):
                x[batch.tokens] = self._embedding_rows(batch)
        else:
            x[: len(ids)] = self._look_up(ids, n_rows, self._places[self.plan.embed.device])
        x *= np.float32(self._config.embedding_scale)
        positions = feeds[0].position + np.arange(n_rows)
        if len(feeds) > 1:
            positions[: len(feeds)] = [feed.position for feed in feeds]
        ropes = [rope_rows(*rope, positions) for rope in self._ropes]
        return x, Rows(tuple(ropes), np.array([feeds[0].position, len(ids)], np.int32))

    def _look_up(self, ids: Sequence[int], n_rows: int, place: Place) -> np.ndarray:
        """f32[tokens, D] of an embedding that lies on `place`. Its rows come to the host as they
        are, and become numbers there, with the bits of any other placement."""
        (page,) = self._container.pages_of("embed")
        padded = np.zeros(n_rows, np.int32)
        padded[: len(ids)] = ids
        (table,) = place.store.resident()[page].values()
        rows = np.asarray(place.steps.look_up(table, padded))[: len(ids)]
        qtype = QTYPES[self._container.embedding.slabs[0].qtype]
        return qtype.dequantise_rows(rows, self._config.width)

    def _embedding_rows(self, batch: EmbeddingUnits) -> np.ndarray:
        """f32[tokens, D]: the rows that one batch of look-ups brought."""
        table, width = self._container.embedding, self._config.width
        qtype, units = QTYPES[table.slabs[0].qtype], batch.units
        if table.unit_rows == 1:
            return qtype.dequantise_rows(units, width)[batch.unit]
        rows = qtype.dequantise(units, len(units) * table.unit_rows, width)
        return rows[batch.unit * table.unit_rows + batch.row]


def widths(n_rows: int) -> list[int]:
    """Rows of the steps that run 1 to `n_rows`: powers of four, so that few are ever compiled."""
    return [4**i for i in range(1 + -(-(n_rows - 1).bit_length() // 2))]


def _power_of_two(n: int) -> int:
    """The largest that is not above n; 0 for 0."""
    return 1 << n.bit_length() >> 1
