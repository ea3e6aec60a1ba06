"""The engine: a model, a budget in bytes and the devices, behind a small Python API.

    with Engine.open("model.jlm", maxmem="400K", devices="cpu", max_seq=512) as engine:
        for piece in engine.generate("Once upon a time", n=16, temp=0):
            print(piece, end="")

Here model, paging, placement and text meet; none of them knows the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from jitllm.catalog import resolve
from jitllm.compiled import keep_compiled_steps
from jitllm.errors import JitllmError, UsageError
from jitllm.executor import CHUNK_ROWS, Executor, Feed, widths
from jitllm.kernels.ops import set_threads
from jitllm.model.kvcache import DTYPES, KVCaches, empty_cache
from jitllm.model.weights import vectors
from jitllm.mover import Mover
from jitllm.paging.budget import Charge, Ledger, LedgerReport, peak_rss_bytes, rss_bytes
from jitllm.paging.container import Container
from jitllm.paging.gate import StepGate
from jitllm.paging.pager import Applied, Pager, PagerCounters
from jitllm.placement.devices import HOST, find_device
from jitllm.placement.plan import RESIDENT, Plan
from jitllm.placement.profile import profile_hash
from jitllm.placement.rules import Profile, override
from jitllm.prospect import Prospect, devices_of, look_ahead
from jitllm.reports import DeviceReport, MemoryReport, PartReport
from jitllm.residence import Residence, page_layout
from jitllm.sampling import SamplingParams
from jitllm.session import Generation, Session
from jitllm.text import ChatTemplate, Tokenizer
from jitllm.units import parse_size

Say = Callable[[str], None]


@dataclass(frozen=True)
class EngineStats:
    """The ledger and the pager's counters, read now."""

    budget_bytes: int
    resident_bytes: int
    """Weights in memory: frames and whatever else of the model stays there."""
    frames: int
    n_resident_pages: int
    n_pages: int
    ledger: LedgerReport
    rss_bytes: int
    """Of the whole process: the interpreter and its libraries too, which the ledger leaves out."""
    peak_rss_bytes: int
    counters: PagerCounters
    blocks_executed: dict[str, int]
    """By device id."""
    n_seams: int
    """Times that activations went from one device to another."""
    bytes_streamed: dict[str, int]
    """Uploaded through slots so far, by device id."""
    moves: dict[str, int]
    """Blocks that were `moved`, `sent_home`, `returned` or `grown` so far."""
    steps_compiled: int
    device_seconds: dict[str, float]
    """Time of all passes, by the id of the device that had the activations."""
    last_pass: dict[str, int]
    """Blocks run in the last pass, by device id."""


class Engine:
    """One model held to a budget. Make it with `open`; close it, or use it as a context manager.

    Passes over the model exclude each other and changes of the budget, whatever thread they come
    from: `set_budget` takes effect between two tokens of whoever is generating.
    """

    def __init__(self, prospect: Prospect, *, check_hashes: bool = True, grow: bool = False):
        """What `prospect` shows, read and allocated. `Engine.open` is the way in."""
        self.config, self.max_seq = prospect.config, prospect.max_seq
        self.profile, self.devices = prospect.profile, prospect.devices
        self._prospect, self._automatic = prospect, prospect.automatic
        container, whole = prospect.container, prospect.plan
        keep_compiled_steps()
        set_threads(prospect.n_threads)
        self.ledger = Ledger(prospect.process_limit)
        self._gate, self._sessions = StepGate(), WeakSet[Session]()
        self._pager = Pager(
            container,
            prospect.budget_bytes,
            self.ledger,
            check_hashes=check_hashes,
            cycle=prospect.cycle,
        )
        self._residence = Residence(container, self._pager, self.devices, self.config, self.ledger)
        try:
            with ExitStack() as undo:
                self._residence.prepare(whole, undo)
                undo.pop_all()
        except BaseException:
            self._pager.close()
            raise
        self._residence.settle(whole)
        dense = self._pager.dense_frame
        self._executor = Executor(
            self.config,
            container,
            self._pager,
            self._residence.places,
            whole,
            vectors(dense.data, page_layout(container, container.pages_of("dense")[0])),
            self._gate,
        )
        self._mover = Mover(
            self._executor,
            self._residence,
            self._gate,
            self._sessions,
            prospect.kv_sizes,
            prospect.first_capacity,
            gives_way=self.profile.relocate or grow,
        )
        self._grow = grow
        self.tokenizer = Tokenizer(container.metadata["tokenizer"])
        self._scratch: Session | None = None

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        maxmem: int | str | None = None,
        devices: str | None = None,
        profile: Profile | None = None,
        vram: int | None = None,
        grow: bool = False,
        max_seq: int | None = None,
        kv: str | None = None,
        threads: int | None = None,
        process_limit: int | str | None = None,
        check_hashes: bool = True,
        say: Say | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Engine:
        """Open a container, a GGUF (converted once into the cache) or a catalog name.

        `maxmem` is the host budget for weights, bytes or text ("400K"); None takes 80 % of the
        memory that is free. `devices` is as in `-devices` (None: the profile's, or auto),
        `profile` says what goes on them, `vram` is the budget of those without one of their own;
        with `grow` they take more of the host's blocks while they have room.
        `max_seq` is the context in tokens (None: the model's, at most 4096), `kv` the type of the
        cache, `f16` or `f32` (None: the profile's), `threads` the CPU's (None: its physical
        cores). `process_limit` is what weights, KV and all else in the ledger may take together.
        `say` hears what takes time, `progress` how far it is. JitllmError says in one sentence
        why it cannot be.
        """
        profile = override(profile or Profile(), devices=devices, kv_dtype=kv)
        kv = profile.kv_dtype
        if kv not in DTYPES:
            raise UsageError(f"kv is {kv!r}; it can be {' or '.join(DTYPES)}")
        budget_bytes, limit_bytes = (
            parse_size(size) if isinstance(size, str) else size for size in (maxmem, process_limit)
        )
        opened = devices_of(profile, vram)
        quiet: Callable[..., None] = lambda *_: None  # noqa: E731
        path = resolve(str(model), say=say or quiet, progress=progress or quiet)
        prospect = look_ahead(
            Container.open(path), opened, profile, budget_bytes, max_seq, kv, threads, limit_bytes
        )
        return cls(prospect, check_hashes=check_hashes, grow=grow)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back; the engine cannot be used afterwards."""
        with self._gate.change():
            self._sessions.clear()  # for their end no block has to come back
            if self._scratch is not None:
                self._scratch.close()
                self._scratch = None
            self._residence.close()
            self._pager.close()

    # Text in, text out

    def tokenize(
        self, text: str, add_bos: bool | None = None, parse_special: bool = False
    ) -> list[int]:
        """Ids of `text`; `add_bos` None: as the model says. Special tokens are plain text unless
        `parse_special`."""
        return self.tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stop: str | Sequence[str] = (),
        add_bos: bool | None = None,
        parse_special: bool = False,
        **sampling: Any,
    ) -> Generation:
        """What follows `prompt`, text or ids: an iterator of pieces of text.

        `sampling` are the fields of `SamplingParams`: n, temp, top_k, top_p, min_p, ... The
        engine keeps one conversation for this call: a prompt that begins like the last one is not
        computed again, and a reply under way ends where another begins. For several at once take
        `session()`.
        """
        params = SamplingParams(**sampling)
        ids = self.tokenize(prompt, add_bos, parse_special) if isinstance(prompt, str) else prompt
        return self._own_session().generate(list(ids), params, stop)

    def chat(
        self, messages: Sequence[dict[str, str]], *, stop: str | Sequence[str] = (), **sampling: Any
    ) -> Generation:
        """The reply to a conversation of {"role": ..., "content": ...} messages."""
        params = SamplingParams(**sampling)
        return self._own_session().generate(self.render(messages), params, stop, new_turn=True)

    def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation in the model's chat template, up to where the reply begins."""
        return ChatTemplate.of(self._prospect.container.metadata).encode(self.tokenizer, messages)

    # Ids in, logits out

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """f32[T, V]: the logits after each of `ids`, from an empty context."""
        session = self._own_session()
        session.reset()
        return session.logits(ids)

    def session(self) -> Session:
        """A conversation of its own, with its KV cache allocated; close it after use."""
        capacity = self._prospect.first_capacity
        with self._gate.change():
            self._mover.fit(capacity)
            try:
                session = Session(self, *self._empty_kv(capacity), capacity)
            except BaseException:
                self._mover.fit()
                raise
            self._sessions.add(session)
            return session

    def closed(self, session: Session) -> None:
        """A session gave back its caches: what left a device for them may return."""
        with self._gate.change(), suppress(JitllmError):
            # What cannot return stays where it is, and where that fails the next pass says so.
            if session in self._sessions:
                self._sessions.discard(session)
                self._mover.fit()

    def forward(self, feed: Feed, rows: str) -> np.ndarray | None:
        """Append the tokens of `feed`; the logits of its `last` row f32[V], of `all` f32[T, V], or
        of `none`.

        Where it fails, the caches before the feed's position are untouched, and it can be done
        again.
        """
        e = self._executor
        return {"last": e.prefill, "all": e.logits, "none": e.append}[rows](feed)

    def decode(self, sessions: Sequence[Session], ids: Sequence[int]) -> np.ndarray:
        """One pass for several conversations: append `ids[b]` to `sessions[b]`; logits f32[B, V].

        Each row is what the conversation alone would get, bit for bit.
        """
        feeds = [session.feed([token]) for session, token in zip(sessions, ids, strict=True)]
        logits = self._executor.decode(feeds)
        for session, token in zip(sessions, ids, strict=True):
            session.tokens.append(token)
        return logits

    def warm_ups(self, n_rows: int) -> list[Callable[[Session], object]]:
        """Passes over an empty session, each of which builds a step: after all of them no prompt
        and no decoding of 1 to `n_rows` rows waits for one, under this budget and placement."""

        def prompt(session: Session, n_tokens: int) -> None:
            session.prefill([0] * n_tokens)
            session.truncate(0)

        def rows(session: Session, width: int) -> None:
            self._executor.decode([session.feed([0])] * width)

        prompts = [n + 1 for n in CHUNK_ROWS[:-1] if n < self.max_seq]
        return [
            partial(rows, width=1),  # brings the pages that stay; only then blocks run together
            *(partial(rows, width=width) for width in widths(n_rows)),
            *(partial(prompt, n_tokens=n) for n in prompts),
        ]

    # Placement

    @property
    def plan(self) -> Plan:
        """Where every part of the model is, and why."""
        return self._executor.plan

    def move(self, first: int, last: int, to: str) -> None:
        """Bring blocks `first` to `last`, with the KV of every session, to the device `to`.

        Between two passes; the ids do not change. BudgetError with the missing bytes,
        DeviceError, or UsageError for a pinned block: nothing has moved then.
        """
        self._mover.move(first, last, find_device(to.lower(), self.devices).id)

    def make_room(self, session: Session, n_tokens: int) -> None:
        """Let `session` hold `n_tokens`: its caches double until they do, and blocks give way."""
        if n_tokens > session.capacity:
            wanted = min(self.max_seq, max(n_tokens, 2 * session.capacity))
            with self._gate.change():
                self._mover.fit(wanted, session)
                homes = [self._residence.kv_home(part) for part in self.plan.blocks]
                session.extend(wanted, self._prospect.kv_sizes(wanted), homes)
        if self._grow:
            self._mover.grow()

    # Memory

    def set_budget(self, budget: int | str) -> Applied:
        """Hold the weights to `budget`, bytes or text, from the next token on; what was applied.

        Narrowing evicts exactly the excess, widening evicts nothing. BudgetError names the
        smallest budget and changes nothing.
        """
        budget_bytes = parse_size(budget) if isinstance(budget, str) else budget
        with self._gate.change():
            self._residence.forget_views()
            applied = self._pager.set_budget(budget_bytes)
            self._mover.rebudget(budget_bytes)
            self._automatic = False
            return applied

    @property
    def n_threads(self) -> int:
        """Of the CPU, to compute with."""
        return self._prospect.n_threads

    @property
    def spare_bytes(self) -> int | None:
        """What the process limit left at the start beside weights and one conversation; None: there
        is no limit."""
        return self._prospect.spare_bytes

    def memory_report(self) -> MemoryReport:
        """What the budget costs, before the first token."""
        pages, applied = self._prospect.container.pages, self._pager.applied()
        all_blocks = self._prospect.container.pages_of("block")
        blocks = [page for page in all_blocks if page in self._pager.cycle]
        return MemoryReport(
            budget_bytes=applied.budget_bytes,
            automatic=self._automatic,
            weights_bytes=sum(page.n_bytes for page in pages),
            kv_bytes=sum(self._prospect.kv_sizes(self.max_seq)),
            pages_bytes=applied.budget_bytes - applied.fixed_bytes,
            over_bytes=max(0, self._pager.all_resident_bytes - applied.budget_bytes),
            n_pages=applied.n_pages,
            n_blocks=len(blocks),
            n_resident_blocks=min(len(blocks), applied.n_resident),
            block_bytes=max(pages[page].n_bytes for page in all_blocks),
            page_ins_per_token=applied.page_ins_per_pass,
            page_in_bytes_per_token=applied.page_in_bytes_per_pass,
            max_seq=self.max_seq,
            kernels=self.kernels,
            placement=self._placement(),
            n_asked_blocks=self.plan.n_asked_blocks,
            n_device_blocks=self.plan.n_device_blocks,
            profile=self.profile.source,
            profile_hash=profile_hash(self.profile),
        )

    def _placement(self) -> tuple[PartReport, ...]:
        rows = self.plan.explain() if len(self.devices) > 1 else ()
        return tuple(PartReport(r.what, r.device, r.mode, r.declined) for r in rows)

    def stats(self) -> EngineStats:
        """Ledger and counters, now."""
        applied, counters = self._pager.applied(), self._pager.counters
        return EngineStats(
            budget_bytes=applied.budget_bytes,
            resident_bytes=self.ledger.used("weights"),
            frames=counters.frames,
            n_resident_pages=applied.n_resident,
            n_pages=applied.n_pages,
            ledger=self.ledger.report(),
            rss_bytes=rss_bytes(),
            peak_rss_bytes=peak_rss_bytes(),
            counters=counters,
            blocks_executed=dict(self._executor.executed),
            n_seams=self._executor.n_seams,
            bytes_streamed=self._residence.bytes_streamed,
            moves=dict(self._mover.counts),
            steps_compiled=sum(p.steps.n_compiled for p in self._residence.places.values()),
            device_seconds=dict(self._executor.seconds),
            last_pass=dict(self._executor.last_pass),
        )

    def device_reports(self, before: EngineStats, after: EngineStats) -> list[DeviceReport]:
        """What each device has now, and did between the two; the host first."""
        ran, streamed, seconds = (
            {d: n - getattr(before, name).get(d, 0) for d, n in getattr(after, name).items()}
            for name in ("blocks_executed", "bytes_streamed", "device_seconds")
        )
        placed = [block.device for block in self.plan.blocks]
        return [
            DeviceReport(
                device=device,
                n_blocks=placed.count(device),
                blocks_executed=ran.get(device, 0),
                weights_bytes=ledger.used("weights"),
                kv_bytes=ledger.used("kv"),
                streamed_bytes=streamed.get(device, 0),
                peak_bytes=ledger.report().peak_bytes,
                seconds=seconds.get(device, 0.0),
            )
            for device, ledger in self._residence.ledgers.items()
        ]

    def residency(self) -> list[bool]:
        """Of each block, whether its weights are in memory now, on the device or on the host."""
        pages = self._prospect.container.pages_of("block")
        return [
            (block.device != HOST and block.mode == RESIDENT) or self._pager.is_in_memory(page)
            for block, page in zip(self.plan.blocks, pages, strict=True)
        ]

    def pager_counters(self) -> PagerCounters:
        """A snapshot of the pager's counters."""
        return self._pager.counters

    @property
    def kernels(self) -> str:
        """Who computes: the generated kernels and their tier, or the portable ones and why."""
        notes = dict.fromkeys(self._residence.notes.values())
        return ", ".join(notes)

    def _empty_kv(self, n_tokens: int) -> tuple[KVCaches, list[Charge]]:
        """Empty caches where the plan has them, and what they are charged to."""
        kvs = KVCaches()
        charges: list[Charge] = []
        sizes = self._prospect.kv_sizes(n_tokens)
        try:
            for part, spec in zip(self.plan.blocks, self.config.blocks, strict=True):
                device, ledger = self._residence.kv_home(part)
                charges.append(ledger.charge("kv", sizes[part.index]))
                kvs.append(empty_cache(spec.attention, n_tokens, self._prospect.kv_dtype, device))
        except BaseException:
            for charge in charges:
                charge.release()
            raise
        return kvs, charges

    def _own_session(self) -> Session:
        if self._scratch is None:
            self._scratch = self.session()
        return self._scratch
