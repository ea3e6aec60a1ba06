"""Who computes next: the replies of one model share its passes, as rows of one step.

A turn is one chunk of one waiting prompt, and then one token of every reply under way: a reply
joins and leaves between two tokens, and none waits for more than one chunk. What a row computes
does not depend on the rows beside it; each has a sampler and a seed of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from jitllm.errors import JitllmError
from jitllm.executor import CHUNK_TOKENS
from jitllm.model.kvcache import SNAPSHOT_TOKENS, capacity
from jitllm.model.sampler import Logprobs, logprobs, sample
from jitllm.prefix_cache import PrefixCache, PrefixCacheStats
from jitllm.rows import ClosedError, QueueFullError, Row

if TYPE_CHECKING:
    from jitllm.engine import Engine
    from jitllm.session import Session

LOGPROB_CHUNK_TOKENS = 32
"""Of a prompt whose every token's logits are wanted: V floats each."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class SchedulerStats:
    """What a scheduler does now and did."""

    n_rows: int
    n_queued: int
    n_prefilling: int
    n_decoding: int
    n_steps: int
    n_step_rows: int
    """Rows of all steps together."""
    n_chunks: int
    prefix_cache: PrefixCacheStats


class _Task(Generic[T]):
    """Something to do on the scheduler's thread, and what came of it."""

    def __init__(self, change: Callable[[], T]):
        self._change, self._future = change, Future[T]()

    def run(self) -> None:
        try:
            self._future.set_result(self._change())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> T:
        return self._future.result()


class Scheduler:
    """Runs the rows of one engine on a thread of its own, `n_rows` at once; close it after use.

    Requests beyond that wait, at most `max_queue` of them. All methods may be called from any
    thread.
    """

    def __init__(self, engine: Engine, *, n_rows: int, max_queue: int, prefix_cache_bytes: int):
        self._engine, self._n_rows, self._max_queue = engine, n_rows, max_queue
        self._cache = PrefixCache(engine.ledger, prefix_cache_bytes, _snapshot_size(engine))
        self._free: list[Session] = []
        self._tasks: deque[_Task[Any]] = deque()
        self._waiting: deque[list[Row]] = deque()
        self._prefilling: deque[Row] = deque()
        self._decoding: list[Row] = []
        self._changed = threading.Condition()
        self._accepting, self._closing = True, False
        self._n_steps = self._n_step_rows = self._n_chunks = 0
        self._seconds_per_row = 1.0
        self._thread = threading.Thread(target=self._run, name="jitllm-scheduler", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> SchedulerStats:
        """As it stands."""
        with self._changed:
            return SchedulerStats(
                n_rows=self._n_rows,
                n_queued=len(self._waiting),
                n_prefilling=len(self._prefilling),
                n_decoding=len(self._decoding),
                n_steps=self._n_steps,
                n_step_rows=self._n_step_rows,
                n_chunks=self._n_chunks,
                prefix_cache=self._cache.stats,
            )

    def submit(self, rows: list[Row]) -> None:
        """Queue the rows of one request, all or none. QueueFullError, ClosedError."""
        with self._changed:
            if not self._accepting:
                raise ClosedError("the model is being put away and takes no more requests")
            n_free = max(0, self._n_rows - self._n_active)
            if len(self._waiting) >= self._max_queue + n_free:
                raise QueueFullError(
                    f"{len(self._waiting)} requests are waiting already, and no more may; "
                    "try again later",
                    self._retry_after_s(),
                )
            self._waiting.append(list(rows))
            self._changed.notify_all()

    def call(self, change: Callable[[], T]) -> T:
        """Do something to the engine or its sessions between two turns, on the thread that steps
        them; what it gives or raises."""
        task = _Task(change)
        with self._changed:
            closing = self._closing
            if not closing:
                self._tasks.append(task)
                self._changed.notify_all()
        if closing:  # no turn comes any more
            self._thread.join()
            task.run()
        return task.result()

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for those there are; whether all have ended in time."""
        with self._changed:
            self._accepting = False
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self) -> None:
        """End what still runs, and give the memory back."""
        with self._changed:
            self._accepting, self._closing = False, True
            self._changed.notify_all()
        self._thread.join()

    # The thread

    @property
    def _n_active(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def _is_idle(self) -> bool:
        return not (self._waiting or self._n_active)

    def _is_resting(self) -> bool:
        return self._is_idle() and not (self._closing or self._tasks)

    def _retry_after_s(self) -> int:
        """When a row may be free for one more request, at the pace of the last ones."""
        turns = (len(self._waiting) + 1) / self._n_rows
        return int(min(60, max(1, turns * self._seconds_per_row)))

    def _run(self) -> None:
        warming = self._warm_up()
        while self._wait(warming):
            try:
                self._run_tasks()
                self._drop_gone()
                self._admit()
                self._prefill()
                self._decode()
            except Exception as error:  # nothing known: no request may wait for ever all the same
                self._fail(self._rows(), error)
        self._fail(self._rows(), ClosedError("the model was put away before the reply ended"))
        self._run_tasks()
        self._cache.clear()
        for session in self._free:
            session.close()

    def _wait(self, warming: Iterator[None]) -> bool:
        """Until there is something to do; False: nothing ever again."""
        while self._is_resting() and next(warming, self) is None:
            pass
        with self._changed:
            self._changed.wait_for(lambda: not self._is_resting())
            return not self._closing

    def _warm_up(self) -> Iterator[None]:
        """Build, one by one while nobody waits, the steps that replies under way would wait for."""
        with suppress(JitllmError):  # without memory for a cache the first request will say so
            for build in self._engine.warm_ups(self._n_rows):
                session = self._free.pop() if self._free else self._engine.session()
                self._free.append(session)
                session.truncate(0)
                build(session)
                yield

    def _run_tasks(self) -> None:
        while self._tasks:
            self._tasks.popleft().run()

    def _rows(self) -> list[Row]:
        waiting = [row for rows in self._waiting for row in rows]
        return [*self._decoding, *self._prefilling, *waiting]

    def _drop_gone(self) -> None:
        for row in self._rows():
            if row.sink.gone():
                self._end(row, "cancelled")

    def _admit(self) -> None:
        """Give waiting rows, in their order, the places that are free.

        Another choice for a prompt waits until that has been computed, and begins with a copy.
        """
        while self._waiting and self._n_active < self._n_rows:
            row = self._waiting[0][0]
            if any(other.ids is row.ids for other in self._prefilling):
                return
            try:
                self._begin(row)
            except Exception as error:
                # without memory for one more cache the row waits for one that others have
                if not (isinstance(error, JitllmError) and self._n_active):
                    self._end(row, "error", error)
                    continue
                return
            with self._changed:
                self._remove(row)
                self._prefilling.append(row)

    def _begin(self, row: Row) -> None:
        """Find the row a KV cache that holds as much of its prompt as is known."""
        if row.session is None:
            session = self._free.pop() if self._free else self._engine.session()
            try:
                # where every token's logits are wanted, every token is computed
                session.truncate(0)
                if not row.prompt_logprobs:
                    self._cache.restore(session, row.ids)
            except BaseException:
                self._free.append(session)
                raise
            row.session = session
        else:
            n_kept = _n_common(row.session.tokens, row.ids[:-1])
            row.session.truncate(0 if row.prompt_logprobs else n_kept)
        row.figures.cached_tokens = len(row.session.tokens)
        row.figures.queue_s = time.perf_counter() - row.submitted_s
        row.figures.before = self._engine.stats()

    def _prefill(self) -> None:
        """One chunk of the prompt whose turn it is."""
        if not self._prefilling:
            return
        row = self._prefilling[0]
        begun = time.perf_counter()
        try:
            logits = self._chunk(row)
            row.figures.prefill_s += time.perf_counter() - begun
            self._n_chunks += 1
            with self._changed:
                self._prefilling.rotate(-1)
                if not row.n_pending:
                    self._prefilling.remove(row)
                    self._decoding.append(row)
            if not row.n_pending:
                self._cache.store(row.session)
                self._first(row, logits)
        except Exception as error:
            self._fail([row], error)

    def _chunk(self, row: Row) -> np.ndarray | None:
        """The next tokens of a prompt; behind the last of all, logits f32[V]."""
        at, session = len(row.session.tokens), row.session
        if not row.prompt_logprobs:
            chunk, is_last = row.ids[at : at + CHUNK_TOKENS], row.n_pending <= CHUNK_TOKENS
            return session.prefill(chunk) if is_last else session.append(chunk)
        chunk = row.ids[at : at + LOGPROB_CHUNK_TOKENS]
        if at == 0:
            row.sink.prompt_token(chunk[0], None)
        logits = session.logits(chunk)
        for scores, token in zip(logits, row.ids[at + 1 : at + 1 + len(chunk)], strict=False):
            row.sink.prompt_token(token, logprobs(scores, token, row.n_logprobs or 0))
        return logits[-1]

    def _first(self, row: Row, logits: np.ndarray) -> None:
        if row.max_tokens == 0:
            self._end(row, "length")
        else:
            self._draw([row], [logits])

    def _decode(self) -> None:
        """One token of every reply under way."""
        rows = list(self._decoding)
        if rows:
            try:
                self._step(rows)
            except Exception as error:
                self._step_alone(rows, error)

    def _step_alone(self, rows: list[Row], error: Exception) -> None:
        """After a step that failed as a whole: whose row cannot go on, and whose can."""
        if len(rows) == 1:
            self._fail(rows, error)
            return
        for row in rows:
            try:
                self._step([row])
            except Exception as error:
                self._fail([row], error)

    def _step(self, rows: list[Row]) -> None:
        begun = time.perf_counter()
        sessions, last = [row.session for row in rows], [row.history[-1] for row in rows]
        logits = self._engine.decode(sessions, last)
        seconds = time.perf_counter() - begun
        self._n_steps, self._n_step_rows = self._n_steps + 1, self._n_step_rows + len(rows)
        for row in rows:
            figures = row.figures
            figures.decode_s, figures.n_steps = figures.decode_s + seconds, figures.n_steps + 1
            figures.max_rows = max(figures.max_rows, len(rows))
        self._draw(rows, logits)

    def _draw(self, rows: Sequence[Row], logits: Sequence[np.ndarray]) -> None:
        """Choose each row's next token, and see whether it is its last.

        First all are chosen, then all are told: who is told wakes a thread, which runs beside the
        next step, and would here take turns with what numpy does.
        """
        drawn = []
        for row, scores in zip(rows, logits, strict=True):
            try:
                drawn.append((row, *_choose(row, scores)))
            except Exception as error:
                self._fail([row], error)
        for row, token, found in drawn:
            try:
                self._tell(row, token, found)
            except Exception as error:
                self._fail([row], error)

    def _tell(self, row: Row, token: int, found: Logprobs | None) -> None:
        if token in self._engine.tokenizer.stop_ids and not row.ignore_eos:
            self._end(row, "stop")
            return
        row.history.append(token)
        row.figures.generated_tokens += 1
        if row.sink.token(token, found):
            self._end(row, "stop")
        elif row.figures.generated_tokens == row.max_tokens or not row.session.room_tokens:
            self._end(row, "length")

    def _fail(self, rows: list[Row], error: Exception) -> None:
        if not isinstance(error, JitllmError):
            _log.exception("a step failed", exc_info=error)
        for row in rows:
            self._end(row, "error", error)

    def _end(self, row: Row, reason: str, error: Exception | None = None) -> None:
        """Free the row's place, keep its KV for others, and say why it ended."""
        self._close_figures(row)
        session, row.session = row.session, row.session if row.owns_session else None
        if session is not None and not row.owns_session:
            if error is None:
                self._cache.store(session)
            self._free.append(session)
        with self._changed:
            self._remove(row)
            self._changed.notify_all()
        row.sink.end(reason, error)

    def _remove(self, row: Row) -> None:
        """Take the row out of wherever it is."""
        if row in self._decoding:
            self._decoding.remove(row)
        elif row in self._prefilling:
            self._prefilling.remove(row)
        else:
            rows = next(rows for rows in self._waiting if row in rows)
            rows.remove(row)
            if not rows:
                self._waiting.remove(rows)

    def _close_figures(self, row: Row) -> None:
        if row.figures.before is None:
            return
        row.figures.after = self._engine.stats()
        seconds = time.perf_counter() - row.submitted_s - row.figures.queue_s
        self._seconds_per_row += 0.2 * (seconds - self._seconds_per_row)


def _choose(row: Row, logits: np.ndarray) -> tuple[int, Logprobs | None]:
    """The row's next token, and how likely it was, where that is wanted."""
    token = sample(logits, row.params, row.rng, row.history, len(row.ids))
    wanted = row.n_logprobs is not None
    return token, logprobs(logits, token, row.n_logprobs) if wanted else None


def _snapshot_size(engine: Engine) -> Callable[[int], int]:
    """Bytes of a copy of the KV of so many tokens, at most: whole runs of positions."""
    n_all = capacity(engine.max_seq)
    position_bytes = engine.memory_report().kv_bytes // n_all

    def size_of(n_tokens: int) -> int:
        n_runs = -(-n_tokens // SNAPSHOT_TOKENS)
        return min(n_runs * SNAPSHOT_TOKENS, n_all) * position_bytes

    return size_of


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
