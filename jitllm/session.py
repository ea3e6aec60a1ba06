"""One conversation: its KV cache, the tokens in it, and the replies made from it.

Ids inside, text at the rim: `Session.prefill` and `Session.decode` speak ids, `Generation` turns
them into pieces of text as they come.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

import jax
import numpy as np

from jitllm.errors import JitllmError, SettingError, UsageError
from jitllm.executor import Feed
from jitllm.model.kvcache import KVCaches, copy_in, copy_out, resized
from jitllm.model.sampler import make_rng, sample
from jitllm.paging.budget import Charge, Ledger, peak_rss_bytes
from jitllm.reports import GenerationReport
from jitllm.sampling import SamplingParams
from jitllm.stores import taking
from jitllm.text import StopFilter, StreamDecoder

if TYPE_CHECKING:
    from jitllm.engine import Engine, EngineStats


@dataclass(frozen=True)
class Snapshot:
    """What a cache held after some tokens, on the host: a session can begin with it."""

    tokens: tuple[int, ...]
    blocks: tuple[tuple[np.ndarray, np.ndarray], ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(k.nbytes + v.nbytes for k, v in self.blocks)

    @property
    def n_positions(self) -> int:
        """Positions of each block's keys and values: those of the tokens, and some behind them."""
        return self.blocks[0][1].shape[1]


class Session:
    """A KV cache of `max_seq` tokens and what is in it. Made by `Engine.session`."""

    def __init__(self, engine: Engine, kvs: KVCaches, charges: list[Charge], capacity: int):
        self._engine, self._kvs, self._charges = engine, kvs, charges
        # One that is forgotten rather than closed gives its bytes back too.
        weakref.finalize(self, _release, charges).atexit = False
        self.capacity = capacity
        """Tokens that the caches hold as they are; `Engine.max_seq` is where they end to grow."""
        self._messages: list[dict[str, str]] = []
        self._reply: Generation | None = None
        self.tokens: list[int] = []
        """Ids whose keys and values are in the cache, in order."""

    @property
    def room_tokens(self) -> int:
        """How many more tokens fit."""
        return self._engine.max_seq - len(self.tokens)

    def reset(self) -> None:
        """Forget everything; the memory stays allocated."""
        self.truncate(0)
        self._messages.clear()

    def truncate(self, n_tokens: int) -> None:
        """Forget the tokens from `n_tokens` on."""
        del self.tokens[n_tokens:]

    def close(self) -> None:
        """Give the KV cache back."""
        self._kvs.clear()
        _release(self._charges)
        self.capacity = 0
        self._engine.closed(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` and give the logits f32[V] that follow the last of them."""
        return self._forward(ids, "last")

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` and give the logits f32[T, V] that follow each of them."""
        return self._forward(ids, "all")

    def append(self, ids: Sequence[int]) -> None:
        """Append `ids`, whose logits nobody needs."""
        self._forward(ids, "none")

    def _forward(self, ids: Sequence[int], rows: str) -> np.ndarray | None:
        ids = [index(token) for token in ids]
        feed = self.feed(ids)
        logits = self._engine.forward(feed, rows)
        self.tokens.extend(ids)
        return logits

    def feed(self, ids: Sequence[int]) -> Feed:
        """`ids` as the next tokens of this conversation; UsageError where they do not fit."""
        if not self._kvs:
            raise JitllmError("this conversation was closed; nothing can be added to it")
        if not ids:
            raise UsageError("the prompt has no tokens; give it at least one")
        n_vocab = self._engine.config.n_vocab
        if min(ids) < 0 or max(ids) >= n_vocab:
            raise UsageError(f"token ids are 0 to {n_vocab - 1}; {min(ids)} to {max(ids)} are not")
        if len(ids) > self.room_tokens:
            taken = f", of which {len(self.tokens)} are taken" if self.tokens else ""
            raise SettingError(
                "max_seq",
                f"{len(ids)} tokens do not fit in a context of {self._engine.max_seq}{taken}; "
                "shorten the text, begin anew or raise max_seq",
            )
        self._engine.make_room(self, len(self.tokens) + len(ids))
        return Feed(ids, self._kvs, len(self.tokens))

    def extend(
        self, capacity: int, sizes: Sequence[int], homes: Sequence[tuple[jax.Device, Ledger]]
    ) -> None:
        """Make the caches hold `capacity` tokens, block by block and by way of the host, so that a
        device never holds a block's old and new cache at once. Where it fails, none has changed."""
        before = [charge.n_bytes for charge in self._charges]
        try:
            for block, n_bytes in enumerate(sizes):
                self._resize(block, capacity, n_bytes, *homes[block])
        except BaseException:
            for block, n_bytes in enumerate(before):
                self._resize(block, self.capacity, n_bytes, *homes[block])
            raise
        self.capacity = capacity

    def _resize(
        self, block: int, capacity: int, n_bytes: int, device: jax.Device, ledger: Ledger
    ) -> None:
        # Here the device's arrays are let go; until it has new ones the cache is on the host.
        self._kvs[block] = resized(self._kvs[block], capacity)
        self._charges[block].release()
        self._charges[block] = ledger.charge("kv", n_bytes)
        with taking(str(device)):
            self._kvs[block] = jax.block_until_ready(jax.device_put(self._kvs[block], device))

    def snapshot(self, n_tokens: int | None = None) -> Snapshot:
        """A copy of the first `n_tokens` (None: all) of the conversation; between two passes."""
        tokens = tuple(self.tokens[:n_tokens])
        return Snapshot(tokens, tuple(copy_out(kv, len(tokens)) for kv in self._kvs))

    def restore(self, snapshot: Snapshot) -> None:
        """Begin again with the tokens of a snapshot of the same model and context length."""
        self.truncate(0)
        self._engine.make_room(self, min(snapshot.n_positions, self._engine.max_seq))
        for block, (k, v) in enumerate(snapshot.blocks):
            self._kvs[block] = copy_in(self._kvs[block], k, v)
        self.tokens[:] = snapshot.tokens

    def move(self, first: int, last: int, to: str) -> None:
        """`Engine.move`: blocks are the engine's, and the KV of all its sessions goes along."""
        self._engine.move(first, last, to)

    def copy_kv(
        self, block: int, device: jax.Device, ledger: Ledger, undo: ExitStack
    ) -> Callable[[], None]:
        """Copy one block's cache to another device, where `ledger` counts it; between two passes.

        What is returned puts the copy in the cache's place; or else `undo` gives it back.
        """
        charge = ledger.charge("kv", self._charges[block].n_bytes)
        undo.callback(charge.release)
        copy = jax.block_until_ready(jax.device_put(self._kvs[block], device))
        undo.callback(lambda: [array.delete() for array in copy])

        def put() -> None:
            self._charges[block].release()
            self._kvs[block], self._charges[block] = copy, charge

        return put

    def generate(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        stop: str | Sequence[str] = (),
        new_turn: bool = False,
    ) -> Generation:
        """A reply to the conversation `ids`: what the cache already holds of it is not redone.

        With `new_turn` the reply is a text of its own, without the space that a continuation has.
        """
        if self._reply is not None:
            self._reply.close()
        ids = [index(token) for token in ids]
        keep = _common_prefix(self.tokens, ids)
        # The last token is always fed again: its logits are what the reply starts from.
        self.truncate(max(0, min(keep, len(ids) - 1)))
        self._reply = Generation(self._engine, self, ids, params, stop, new_turn)
        return self._reply

    def chat(
        self,
        text: str,
        params: SamplingParams,
        system: str | None = None,
        stop: str | Sequence[str] = (),
    ) -> Generation:
        """The reply to `text` as the next turn; the history stays in the KV cache."""
        messages = list(self._messages)
        if system and not messages:
            messages.append({"role": "system", "content": system})
        messages.append({"role": "user", "content": text})
        generation = self.generate(self._engine.render(messages), params, stop, new_turn=True)
        generation.on_end = lambda reply: self._remember(messages, reply)
        return generation

    def _remember(self, messages: list[dict[str, str]], reply: str) -> None:
        self._messages = [*messages, {"role": "assistant", "content": reply}]


def _release(charges: list[Charge]) -> None:
    for charge in charges:
        charge.release()


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class Generation:
    """A reply under way: iterate for its text, piece by piece; `report` is complete at the end.

    Closing it, or leaving the loop, ends the reply; the tokens so far stay in the session.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session,
        ids: Sequence[int],
        params: SamplingParams,
        stop: str | Sequence[str],
        new_turn: bool,
    ):
        self._engine, self._session, self._params = engine, session, params
        self._prompt = list(ids[len(session.tokens) :])
        self._history = list(ids)
        self._decoder = StreamDecoder(engine.tokenizer, at_start=new_turn or None)
        self._stops = StopFilter(stop)
        self._n_passes = 0
        self.report = GenerationReport(
            prompt_tokens=len(ids), cached_tokens=len(ids) - len(self._prompt)
        )
        self.on_end = lambda reply: None
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the reply now. JitllmError: another thread is in the middle of a step of it."""
        try:
            self._pieces.close()
        except ValueError:
            raise JitllmError(
                "another thread is at work on a reply of this conversation; take a session() of "
                "its own for each"
            ) from None

    def _run(self) -> Iterator[str]:
        report = self.report
        before = decode_start = self._engine.stats()
        start = time.perf_counter()
        try:
            logits = self._session.prefill(self._prompt)
            report.prefill_s = time.perf_counter() - start
            decode_start = self._engine.stats()
            yield from self._decode(logits)
        except GeneratorExit:
            report.finish_reason = "cancelled"
            raise
        finally:
            self._close_report(before, decode_start)
            if report.finish_reason:  # one that failed was no turn of the conversation
                self.on_end(report.text)

    def _decode(self, logits: np.ndarray) -> Iterator[str]:
        report, rng = self.report, make_rng(self._params.seed)
        while True:
            token = sample(logits, self._params, rng, self._history, report.prompt_tokens)
            if token in self._engine.tokenizer.stop_ids:
                report.finish_reason = "stop"
                break
            report.ids.append(token)
            self._history.append(token)
            yield from self._emit(self._stops.push(self._decoder.push(token)))
            if self._stops.stopped:
                report.finish_reason = "stop"
                return
            if len(report.ids) == self._params.n:
                report.finish_reason = "length"
                break
            if not self._session.room_tokens:
                report.finish_reason = "context"
                break
            start = time.perf_counter()
            logits = self._session.prefill([token])
            self._n_passes += 1
            report.decode_s += time.perf_counter() - start
        tail = self._stops.push(self._decoder.flush())
        yield from self._emit(tail + self._stops.flush())

    def _emit(self, piece: str) -> Iterator[str]:
        if piece:
            self.report.text += piece
            yield piece

    def _close_report(self, before: EngineStats, decode_start: EngineStats) -> None:
        report, stats = self.report, self._engine.stats()
        first, after = before.counters, stats.counters
        report.generated_tokens = len(report.ids)
        report.page_ins = after.page_ins - first.page_ins
        report.evictions = after.evictions - first.evictions
        report.bytes_read = after.bytes_read - first.bytes_read
        report.read_requests = after.read_requests - first.read_requests
        report.read_wait_s = after.blocked_s - first.blocked_s
        # The first token comes out of the prefill; each further one is a pass of its own.
        if passes := self._n_passes:
            n_bytes = after.bytes_read - decode_start.counters.bytes_read
            report.bytes_read_per_token = n_bytes // passes
            report.decode_tokens_per_second = passes / report.decode_s
            report.seams_per_token = (stats.n_seams - decode_start.n_seams) / passes
        if report.prefill_s:
            report.prefill_tokens_per_second = len(self._prompt) / report.prefill_s
        report.frames = stats.frames
        report.budget_bytes = stats.budget_bytes
        report.resident_bytes = stats.resident_bytes
        report.peak_rss_bytes = peak_rss_bytes()
        report.devices = self._engine.device_reports(before, stats)
        report.last_pass = stats.last_pass
