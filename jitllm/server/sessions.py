"""Sessions: conversations that the server remembers, each with a KV cache of its own.

A session is a growing text or a growing chat, whichever it began as. A turn sends what is new; the
prompt is the whole conversation, and its KV is there as far as the ids agree. What a stop string
cut off was never said. A turn that does not end well leaves the session as it was.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jitllm.server.errors import ApiError
from jitllm.server.protocol import ChatRequest, CompletionRequest, Prompt

if TYPE_CHECKING:
    from jitllm.engine import Engine
    from jitllm.scheduler import Scheduler
    from jitllm.session import Session


class OpenSession:
    """One conversation. One turn at a time: `begin`, then `commit` or `abandon`."""

    def __init__(self, id: str, model: str, engine: Engine, kv: Session):
        self.id, self.model, self.created = id, model, int(time.time())
        self._engine, self.kv = engine, kv
        self._turn = threading.Lock()
        self._forget()

    @property
    def is_busy(self) -> bool:
        """Whether a turn is under way."""
        return self._turn.locked()

    def begin(self, request: CompletionRequest | ChatRequest) -> list[int]:
        """The ids of the conversation with what `request` adds; the turn is this request's."""
        if not self._turn.acquire(blocking=False):
            raise ApiError(409, f"the session {self.id} has a turn under way", code="session_busy")
        try:
            self._check_kind(type(request))
            if isinstance(request, ChatRequest):
                self._next = [*self._messages, *request.messages]
                return self._engine.render(self._next)
            return self._continue(request.prompts[0])
        except BaseException:
            self._turn.release()
            raise

    def commit(self, ids: Sequence[int], reply: str) -> None:
        """End the turn: the conversation is now `ids`, which end with what `reply` says."""
        self._ids = list(ids)
        if self._kind is ChatRequest:
            self._messages = [*self._next, {"role": "assistant", "content": reply}]
        else:
            self._text = self._next + reply
        self._turn.release()

    def abandon(self) -> None:
        """End the turn as if it had not been."""
        if not self._ids:
            self._kind = None
        self._turn.release()

    def reset(self) -> None:
        """Forget the conversation; the memory stays allocated."""
        self._exclusively(self._forget)

    def close(self, free: Callable[[Callable[[], None]], None]) -> None:
        """Give the memory back, `free` being who does it."""
        self._exclusively(lambda: free(self.kv.close))

    def as_object(self) -> dict[str, Any]:
        """What there is to know about it."""
        kinds = {None: None, ChatRequest: "chat", CompletionRequest: "text"}
        return {
            "id": self.id,
            "object": "session",
            "model": self.model,
            "created": self.created,
            "kind": kinds[self._kind],
            "tokens": len(self.kv.tokens),
            "room_tokens": self.kv.room_tokens,
            "busy": self.is_busy,
        }

    def _exclusively(self, act: Callable[[], None]) -> None:
        if not self._turn.acquire(blocking=False):
            raise ApiError(409, f"the session {self.id} has a turn under way", code="session_busy")
        try:
            act()
        finally:
            self._turn.release()

    def _forget(self) -> None:
        self.kv.truncate(0)
        self._kind: type | None = None
        self._ids: list[int] = []
        self._text, self._messages, self._next = "", [], None

    def _check_kind(self, kind: type) -> None:
        if self._kind not in (None, kind):
            was = "a chat" if self._kind is ChatRequest else "a text"
            raise ApiError(
                400,
                f"the session {self.id} is {was}; reset it, or open another",
                code="invalid_value",
                param="jitllm_session",
            )
        self._kind = kind

    def _continue(self, prompt: Prompt) -> list[int]:
        """The conversation's ids with those of `prompt`: what one long prompt has, where that
        begins with the same ids; a reply need not be made of the tokens its text would have."""
        tokenizer = self._engine.tokenizer
        if not isinstance(prompt, str):
            ids = [*self._ids, *prompt]
            self._next = tokenizer.decode(ids)
            return ids
        self._next = self._text + prompt
        whole = tokenizer.encode(self._next)
        if whole[: len(self._ids)] == self._ids:
            return whole
        # encoding puts the space that it took away back in front
        more = prompt.removeprefix(" ") if tokenizer.add_space_prefix else prompt
        return [*self._ids, *tokenizer.encode(more, add_bos=False)]


class Sessions:
    """The sessions of one model, at most `limit`. Thread-safe."""

    def __init__(self, model: str, engine: Engine, scheduler: Scheduler, limit: int):
        self._model, self._engine, self._limit = model, engine, limit
        self._scheduler = scheduler
        self._open: dict[str, OpenSession] = {}
        self._lock = threading.Lock()

    def list(self) -> list[OpenSession]:
        """All of them, the oldest first."""
        with self._lock:
            return list(self._open.values())

    def new(self) -> OpenSession:
        """Another one. ApiError where there are as many as may be, or no memory for its KV."""
        with self._lock:
            if len(self._open) >= self._limit:
                raise ApiError(
                    409,
                    f"{self._model} has {self._limit} sessions open and may have no more; "
                    "close one, or start the server with more -sessions",
                    code="too_many_sessions",
                )
            # ids are the server's own and cannot be guessed: whoever knows one may use it
            kv = self._scheduler.call(self._engine.session)
            id = f"sess-{secrets.token_hex(12)}"
            session = OpenSession(id, self._model, self._engine, kv)
            self._open[session.id] = session
            return session

    def find(self, id: str) -> OpenSession | None:
        """The session `id`, None where this model has none of that name."""
        with self._lock:
            return self._open.get(id)

    def close(self, session: OpenSession) -> None:
        """Put one away. ApiError while it has a turn under way."""
        session.close(self._scheduler.call)
        with self._lock:
            self._open.pop(session.id, None)

    def close_all(self) -> None:
        """Put all away; no turn is under way any more."""
        for session in self.list():
            self.close(session)
