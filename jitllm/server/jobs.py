"""One request for text, from its prompts to its deltas.

The scheduler's thread makes the deltas and puts them into the job's outbox; the request's own
thread takes them out and sends them. Neither waits for the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from jitllm.errors import JitllmError
from jitllm.rows import ClosedError, Logprobs, QueueFullError, Row, RowFigures
from jitllm.server.errors import ApiError, bad_value
from jitllm.server.metrics import Metrics
from jitllm.server.models import Model
from jitllm.server.protocol import ChatRequest, CompletionRequest, Prompt
from jitllm.server.reply import Delta, ReplyText, TokenFacts, facts_of
from jitllm.server.sessions import OpenSession
from jitllm.server.shapes import Usage
from jitllm.server.views import cost_of
from jitllm.text import StreamDecoder

Request = CompletionRequest | ChatRequest
Gone = Callable[[], bool]


class Cancelled(JitllmError):
    """Nobody waits for the reply any more."""


class Job:
    """The replies to one request: `deltas` of all of them as they come; close it after use."""

    def __init__(self, model: Model, request: Request, gone: Gone, metrics: Metrics):
        """Reads the prompts and queues them. ApiError where they cannot be answered."""
        self.model, self.request, self.metrics = model, request, metrics
        self.outbox: SimpleQueue[Delta | Exception] = SimpleQueue()
        self.session = _session_of(model, request.session)
        self.begun_s = time.perf_counter()
        self._client_gone, self._closed = gone, False
        self._rows: list[Row] = []
        try:
            self._rows = list(self._make_rows())
            model.scheduler.submit(self._rows)
        except Exception as error:
            if self.session is not None and self._holds_session:
                self.session.abandon()
            raise _in_words(error) from error

    def deltas(self) -> Iterator[Delta]:
        """Every delta of every reply, in the order in which they come."""
        n_open = len(self._rows)
        while n_open:
            item = self.outbox.get()
            if isinstance(item, Exception):
                raise _in_words(item)
            if item.finish_reason == "cancelled":
                raise Cancelled("the client went away")
            n_open -= item.finish_reason is not None
            yield item

    def gone(self) -> bool:
        """Whether the replies are not wanted any more."""
        return self._closed or self._client_gone()

    def close(self) -> None:
        """What is not finished is not wanted any more."""
        self._closed = True

    @property
    def n_choices(self) -> int:
        """Replies, of all prompts."""
        return len(self._rows)

    @property
    def figures(self) -> list[RowFigures]:
        """What each reply took so far."""
        return [row.figures for row in self._rows]

    @property
    def usage(self) -> Usage:
        """Tokens so far; complete when the replies are."""
        figures, prompts = self.figures, self.figures[:: self.request.n_choices]
        return Usage(
            prompt_tokens=sum(f.prompt_tokens for f in prompts),
            completion_tokens=sum(f.generated_tokens for f in figures),
            cached_tokens=sum(f.cached_tokens for f in prompts),
        )

    @property
    def cost(self) -> dict[str, Any]:
        """The `jitllm` object."""
        return cost_of(self.model, self.figures, self.session)

    # Making rows

    _holds_session = False

    def _make_rows(self) -> Iterator[Row]:
        request = self.request
        for ids, text in self._prompts():
            _check_prompt(self.model, ids)
            for _ in range(request.n_choices):
                index = len(self._rows)
                self._rows.append(self._row(index, ids, text))
        yield from self._rows

    def _prompts(self) -> Iterator[tuple[list[int], str]]:
        """(ids, the text that an echo shows) of every prompt."""
        engine, request = self.model.engine, self.request
        if self.session is not None:
            ids = self.session.begin(request)
            self._holds_session = True
            yield ids, engine.tokenizer.decode(ids) if _echoes(request) else ""
        elif isinstance(request, ChatRequest):
            yield engine.render(request.messages), ""
        else:
            for prompt in request.prompts:
                yield _ids_and_text(self.model, prompt)

    def _row(self, index: int, ids: list[int], text: str) -> Row:
        request = self.request
        echoed = text if _echoes(request) else None
        params, choice = request.params, index % request.n_choices
        if params.seed is not None:
            params = replace(params, seed=(params.seed + choice) % 2**63)
        return Row(
            ids,
            params,
            _RowSink(self, index, ids, echoed),
            max_tokens=request.max_tokens,
            n_logprobs=request.n_logprobs,
            prompt_logprobs=echoed is not None and request.n_logprobs is not None,
            ignore_eos=request.ignore_eos,
            session=self.session.kv if self.session else None,
        )

    def end_turn(self, index: int, reply: ReplyText, text: str, well: bool) -> None:
        """The reply has ended: so has the session's turn, before the client hears of it."""
        if self.session is None:
            return
        if well:
            row = self._rows[index]
            self.session.commit(row.history[: len(row.ids) + reply.n_kept], text)
        else:
            self.session.abandon()


class _RowSink:
    """One reply of a job, on the scheduler's side."""

    def __init__(self, job: Job, index: int, ids: Sequence[int], echoed: str | None):
        self._job, self._index, self._echoed = job, index, echoed
        tokenizer = job.model.engine.tokenizer
        self._tokenizer, self._prompt_decoder = tokenizer, StreamDecoder(tokenizer)
        self._prompt_facts: list[TokenFacts] = []
        self._n_prompt_chars = 0
        self._reply = ReplyText(
            tokenizer,
            job.request.stop,
            index,
            offset=len(echoed or ""),
            at_start=isinstance(job.request, ChatRequest),
        )
        self._text = ""
        self._last_s: float | None = None

    def gone(self) -> bool:
        return self._job.gone()

    def prompt_token(self, token: int, found: Logprobs | None) -> None:
        logprob = (found.chosen, found.top) if found else (None, ())
        self._prompt_facts.append(facts_of(self._tokenizer, token, logprob, self._n_prompt_chars))
        self._n_prompt_chars += len(self._prompt_decoder.push(token))

    def token(self, token: int, found: Logprobs | None) -> bool:
        self._observe()
        self._send(self._reply.push(token, (found.chosen, found.top) if found else None))
        return self._reply.stopped

    def end(self, reason: str, error: Exception | None) -> None:
        well = error is None and reason != "cancelled"
        last = self._reply.finish(reason)
        self._job.end_turn(self._index, self._reply, self._text + last.text, well)
        if error is not None:
            self._job.outbox.put(error)
        else:
            self._send(last)

    def _send(self, delta: Delta) -> None:
        if self._echoed is not None:
            self._job.outbox.put(Delta(self._index, self._echoed, tuple(self._prompt_facts)))
            self._echoed = None
        self._text += delta.text
        self._job.outbox.put(delta)

    def _observe(self) -> None:
        now = time.perf_counter()
        if self._last_s is None:
            self._job.metrics.first_token_s.observe(now - self._job.begun_s)
        else:
            self._job.metrics.between_tokens_s.observe(now - self._last_s)
        self._last_s = now


def _session_of(model: Model, id: str | None) -> OpenSession | None:
    if id is None:
        return None
    session = model.sessions.find(id)
    if session is None:
        raise ApiError(
            404,
            f"{model.id} has no session {id!r}; POST /jitllm/sessions opens one",
            code="session_not_found",
            param="jitllm_session",
        )
    return session


def _echoes(request: Request) -> bool:
    return isinstance(request, CompletionRequest) and request.echo


def _ids_and_text(model: Model, prompt: Prompt) -> tuple[list[int], str]:
    tokenizer = model.engine.tokenizer
    if isinstance(prompt, str):
        return tokenizer.encode(prompt), prompt
    for token in prompt:
        if token >= tokenizer.n_vocab:
            raise bad_value(
                "prompt", f"{token} is not one of the {tokenizer.n_vocab} token ids of {model.id}"
            )
    return list(prompt), tokenizer.decode(prompt)


def _check_prompt(model: Model, ids: Sequence[int]) -> None:
    n_ctx = model.engine.max_seq
    if not ids:
        raise bad_value("prompt", "the prompt has no tokens; give it at least one")
    if len(ids) > n_ctx:
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens, but the context of {model.id} is {n_ctx} tokens",
            code="context_length_exceeded",
            param="prompt",
            figures={"n_prompt_tokens": len(ids), "n_ctx": n_ctx},
        )


def _in_words(error: Exception) -> Exception:
    """What the scheduler refuses, as what the client is told."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), code="unavailable", retry_after_s=10)
    return error
