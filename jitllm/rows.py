"""Rows: the replies that a scheduler makes, and what each of them took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from jitllm.errors import JitllmError
from jitllm.model.sampler import Logprobs, make_rng
from jitllm.sampling import SamplingParams

if TYPE_CHECKING:
    from jitllm.engine import EngineStats
    from jitllm.session import Session


class QueueFullError(JitllmError):
    """As many requests wait as may; `retry_after_s` is when there may be room."""

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClosedError(JitllmError):
    """The model takes no more requests."""


class Sink(Protocol):
    """Where a reply goes. Called by the scheduler's thread: must not block."""

    def prompt_token(self, token: int, found: Logprobs | None) -> None:
        """A token of the prompt, where `Row.prompt_logprobs`; nothing precedes the first."""

    def token(self, token: int, found: Logprobs | None) -> bool:
        """The next token; True: the reply ends here."""

    def end(self, reason: str, error: Exception | None) -> None:
        """The end: `stop`, `length`, `cancelled`, or `error`."""

    def gone(self) -> bool:
        """Whether nobody wants the reply any more."""


@dataclass
class RowFigures:
    """One reply, measured."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    """In this prompt's own chunks."""
    decode_s: float = 0.0
    """In the steps it was part of."""
    n_steps: int = 0
    max_rows: int = 1
    """Replies in the fullest of these steps."""
    before: EngineStats | None = None
    """The engine's figures when its work began; None while it waits. What the rows beside it cost
    is in them as well."""
    after: EngineStats | None = None
    """The engine's figures when it had ended."""


@dataclass(eq=False)
class Row:
    """One reply to make: `ids` is the prompt, `session` a conversation to go on with."""

    ids: Sequence[int]
    params: SamplingParams
    sink: Sink
    max_tokens: int | None = None
    n_logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    session: Session | None = None
    figures: RowFigures = field(default_factory=RowFigures)

    def __post_init__(self) -> None:
        self.owns_session = self.session is not None
        self.submitted_s = time.perf_counter()
        self.history = list(self.ids)
        """Prompt and reply."""
        self.rng = make_rng(self.params.seed)
        self.figures.prompt_tokens = len(self.ids)

    @property
    def n_pending(self) -> int:
        """Tokens of the prompt that are not in the KV cache yet."""
        return len(self.ids) - len(self.session.tokens) if self.session else len(self.ids)
