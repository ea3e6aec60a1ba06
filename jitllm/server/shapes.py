"""Replies in OpenAI's shapes, whole and as server-sent events. Pure.

`jitllm`, what the reply cost, stands in a whole reply and in the chunk that ends the last choice.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jitllm.server.reply import Choice, Delta, TokenFacts

DONE = b"data: [DONE]\n\n"


def dump(value: Any) -> bytes:
    """`value` as JSON in UTF-8; a lone surrogate, which UTF-8 has not, stays an escape."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dump(value) + b"\n\n"


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_object(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Shape:
    """What the replies of one request have in common."""

    id: str
    created: int
    model: str
    logprobs: bool

    object_name = chunk_name = "text_completion"

    def head(self, name: str) -> dict[str, Any]:
        """The fields that every reply and chunk begins with."""
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def whole(
        self, choices: Iterable[Choice], usage: Usage, cost: dict[str, Any]
    ) -> dict[str, Any]:
        """The reply that is not streamed."""
        shown = [self.choice(choice) for choice in choices]
        return self.head(self.object_name) | {
            "choices": shown,
            "usage": usage.as_object(),
            "jitllm": cost,
        }

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk of one choice."""
        return self.head(self.chunk_name) | {"choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk that ends a stream where usage was asked for."""
        return self.head(self.chunk_name) | {"choices": [], "usage": usage.as_object()}

    def choice(self, choice: Choice) -> dict[str, Any]:
        """One choice of a whole reply."""
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": completion_logprobs(choice.tokens) if self.logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def opening(self, index: int) -> Iterator[dict[str, Any]]:
        """Choices of chunks that go before the first text."""
        yield from ()

    def deltas(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that say what one delta added."""
        if delta.text or delta.tokens or delta.finish_reason:
            choice = Choice(delta.index, delta.text, list(delta.tokens), delta.finish_reason)
            yield Shape.choice(self, choice)


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def choice(self, choice: Choice) -> dict[str, Any]:
        """One choice of a whole reply."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.tokens) if self.logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def opening(self, index: int) -> Iterator[dict[str, Any]]:
        """Choices of chunks that go before the first text."""
        yield self._delta(index, {"role": "assistant", "content": ""}, (), None)

    def deltas(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that say what one delta added."""
        if delta.text or delta.tokens:
            yield self._delta(delta.index, {"content": delta.text}, delta.tokens, None)
        if delta.finish_reason:
            yield self._delta(delta.index, {}, (), delta.finish_reason)

    def _delta(
        self, index: int, delta: dict[str, Any], tokens: Sequence[TokenFacts], reason: str | None
    ) -> dict[str, Any]:
        wanted = self.logprobs and tokens
        return {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(tokens) if wanted else None,
            "finish_reason": reason,
        }


def events(
    shape: Shape,
    deltas: Iterable[Delta],
    n_choices: int,
    *,
    cost: Callable[[], dict[str, Any]],
    usage: Callable[[], Usage] | None,
) -> Iterator[bytes]:
    """The stream of a request: chunks, the usage where it was asked for, `[DONE]`."""
    unused = {"usage": None} if usage else {}
    for index in range(n_choices):
        for choice in shape.opening(index):
            yield event(shape.chunk(choice) | unused)
    n_open = n_choices
    for delta in deltas:
        n_open -= delta.finish_reason is not None
        for choice in shape.deltas(delta):
            is_last = not n_open and choice["finish_reason"]
            yield event(shape.chunk(choice) | unused | ({"jitllm": cost()} if is_last else {}))
    if usage:
        yield event(shape.usage_chunk(usage()))
    yield DONE


def completion_logprobs(tokens: Sequence[TokenFacts]) -> dict[str, Any]:
    """`logprobs` of a completion: four lists; the chosen token is always among the likely ones."""
    return {
        "tokens": [t.text for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [_likely(t) for t in tokens],
        "text_offset": [t.offset for t in tokens],
    }


def _likely(token: TokenFacts) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    likely: dict[str, float] = {}
    for other in token.top:  # likeliest first: of tokens with one text, that one counts
        likely.setdefault(other.text, other.logprob)
    likely.setdefault(token.text, token.logprob)
    return likely


def chat_logprobs(tokens: Sequence[TokenFacts]) -> dict[str, Any]:
    """`logprobs` of a chat reply: one object a token, with its bytes."""
    content = [
        _entry(t.text, t.bytes, t.logprob) | {"top_logprobs": [_entry(*likely) for likely in t.top]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(text: str, data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(data)}
