"""An engine that can be worked out by hand, in place of the real one.

Tokens are the letters of `ALPHABET`, each its own id, before them BOS (0) and EOS (1); after a
letter the next one follows: with probability 1/2, the one after it with 1/4, and all others share
the rest. After the last letter comes EOS. So "abc" goes on "defgh...", and the logarithms are ln.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from jitllm.engine import EngineStats
from jitllm.errors import BudgetError, UsageError
from jitllm.paging.budget import Ledger
from jitllm.paging.counters import Applied, PagerCounters
from jitllm.placement.rules import Profile
from jitllm.reports import DeviceReport, MemoryReport

ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?\n"
_PIECES = [
    b"<s>",
    b"</s>",
    *(char.encode() for char in ALPHABET),
    *(bytes([b]) for b in "é😀".encode()),
]
N_VOCAB = len(_PIECES)
KIB = 1024


class FakeTokenizer:
    """One id a letter; `é` and the emoji are two and four ids, a byte each."""

    n_vocab, bos_id, add_space_prefix = N_VOCAB, 0, False
    stop_ids = frozenset({1})

    def encode(
        self, text: str, add_bos: bool | None = None, parse_special: bool = False
    ) -> list[int]:
        ids = []
        for char in text:
            data = char.encode("utf-8", "replace")
            found = [i for i, piece in enumerate(_PIECES) if piece == data]
            ids += found or [_PIECES.index(bytes([b])) for b in data if bytes([b]) in _PIECES]
        return ids

    def token_bytes(self, token_id: int, special: bool = False) -> bytes:
        if token_id < 2:
            return _PIECES[token_id] if special else b""
        return _PIECES[token_id]

    def decode(self, ids: Sequence[int], at_start: bool | None = None) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "ignore")


@dataclass(frozen=True)
class FakeSnapshot:
    tokens: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return 16 * (-(-len(self.tokens) // 16)) * KIB // 16


class FakeSession:
    """Remembers ids, as a KV cache would; `n_computed` counts those that had to be computed."""

    def __init__(self, engine: "FakeEngine"):
        self.engine, self.tokens, self.closed = engine, [], False

    @property
    def room_tokens(self) -> int:
        return self.engine.max_seq - len(self.tokens)

    def truncate(self, n_tokens: int) -> None:
        del self.tokens[n_tokens:]

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        return self.logits(ids)[-1]

    def append(self, ids: Sequence[int]) -> None:
        self.engine.pass_over([self], [ids])
        self.engine.n_appended += 1

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        self.engine.pass_over([self], [ids])
        return np.stack([next_logits(i) for i in ids])

    def snapshot(self, n_tokens: int) -> FakeSnapshot:
        return FakeSnapshot(tuple(self.tokens[:n_tokens]))

    def restore(self, snapshot: FakeSnapshot) -> None:
        self.tokens[:] = snapshot.tokens

    def close(self) -> None:
        self.closed = True
        self.engine.n_sessions -= 1


class FakeEngine:
    """64 tokens of context; three of five blocks fit its budget of 400 KiB."""

    def __init__(self, max_seq: int = 64, step_s: float = 0.0):
        self.max_seq, self.step_s = max_seq, step_s
        self.tokenizer, self.ledger = FakeTokenizer(), Ledger()
        self.kernels, self.n_threads, self.spare_bytes = "fake", 2, None
        self.profile = Profile()
        self.budget_bytes = 400 * KIB
        self.n_sessions = self.n_computed = self.n_appended = 0
        self.passes: list[list[list[int]]] = []
        self.warmed: list[tuple[FakeSession, int]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.broken_token: int | None = None
        self.moves: list[tuple[int, int, str]] = []
        self.closed = False
        block = {"device": "host", "mode": "paged", "n_bytes": 90 * KIB}
        blocks = [SimpleNamespace(index=i, **block) for i in range(5)]
        self.plan = SimpleNamespace(assignments=[], uses=[], blocks=blocks)

    def session(self) -> FakeSession:
        self.n_sessions += 1
        return FakeSession(self)

    def warm_ups(self, n_rows: int) -> list:
        return [lambda session: self.warmed.append((session, n_rows))] * 3

    def decode(self, sessions: Sequence[FakeSession], ids: Sequence[int]) -> np.ndarray:
        self.pass_over(sessions, [[i] for i in ids])
        return np.stack([next_logits(i) for i in ids])

    def pass_over(self, sessions: Sequence[FakeSession], ids: Sequence[Sequence[int]]) -> None:
        self.go_on.wait(20)
        time.sleep(self.step_s)
        if any(self.broken_token in row for row in ids):
            raise BudgetError("a page could not be held", 1)
        self.passes.append([list(row) for row in ids])
        for session, row in zip(sessions, ids, strict=True):
            session.tokens.extend(row)
            self.n_computed += len(row)

    def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if messages[-1]["role"] == "system":
            raise UsageError("the last message cannot be of the system")
        return self.tokenizer.encode("\n".join(m["content"] for m in messages))

    def set_budget(self, budget_bytes: int) -> Applied:
        if budget_bytes < 10 * KIB:
            raise BudgetError(
                "a budget of 1.0 KiB is too small: the smallest is 10.0 KiB", 10 * KIB
            )
        self.budget_bytes = budget_bytes
        return Applied(budget_bytes, 0, 0, 6, 4, 3, 3, 1, 3, 270 * KIB, evicted=2)

    def move(self, first: int, last: int, to: str) -> None:
        if to not in ("host", "cpu:1"):
            raise UsageError(f"{to} is not a device that is open (host, cpu:1)")
        self.moves.append((first, last, to))

    def residency(self) -> list[bool]:
        return [True, True, True, False, False]

    def device_reports(self, before: EngineStats, after: EngineStats) -> list[DeviceReport]:
        ran = after.blocks_executed["host"] - before.blocks_executed["host"]
        return [DeviceReport("host", 5, ran, 300 * KIB, 4 * KIB, 0)]

    def memory_report(self) -> MemoryReport:
        return MemoryReport(
            budget_bytes=self.budget_bytes,
            automatic=False,
            weights_bytes=500 * KIB,
            kv_bytes=self.max_seq * KIB // 16,
            pages_bytes=self.budget_bytes - 20 * KIB,
            over_bytes=max(0, 500 * KIB - self.budget_bytes),
            n_pages=6,
            n_blocks=5,
            n_resident_blocks=3,
            block_bytes=90 * KIB,
            page_ins_per_token=3,
            page_in_bytes_per_token=270 * KIB,
            max_seq=self.max_seq,
            kernels=self.kernels,
        )

    def stats(self) -> EngineStats:
        names, n = EngineStats.__dataclass_fields__, len(self.passes)
        counters = PagerCounters(
            page_ins=3 * n, evictions=2 * n, bytes_read=KIB * n, read_requests=n
        )
        facts = {
            "budget_bytes": self.budget_bytes,
            "resident_bytes": 300 * KIB,
            "ledger": self.ledger.report(),
            "counters": counters,
            "blocks_executed": {"host": 5 * n},
            "last_pass": {"host": 5},
            "moves": {},
        }
        return EngineStats(**{name: facts.get(name, 2) for name in names})

    def close(self) -> None:
        self.closed = True


def next_logits(token: int) -> np.ndarray:
    """Logarithms of probabilities: 1/2 for the next id, 1/4 for the one after it."""
    last = 1 + len(ALPHABET)
    likely = [token + 1 if token < last else 1, token + 2 if token + 1 < last else 1]
    if likely[0] == likely[1]:
        likely[1] = 2
    rest = 0.25 / (N_VOCAB - 2)
    scores = np.full(N_VOCAB, np.log(rest), np.float32)
    scores[likely] = np.log([0.5, 0.25])
    return scores
