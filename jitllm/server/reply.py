"""From token ids, as they come, to what a client may see of them. Pure.

A streamed reply and a whole one are the same deltas, sent or joined: they cannot differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jitllm.text import StopFilter, StreamDecoder, Tokenizer


class Likely(NamedTuple):
    """A token that could have come, and the logarithm of its probability."""

    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True)
class TokenFacts:
    """One token of a reply, for `logprobs`."""

    text: str
    bytes: bytes
    offset: int
    """Where its text begins in the reply's."""
    logprob: float | None
    """None for the first token of a prompt, which follows nothing."""
    top: tuple[Likely, ...]


@dataclass(frozen=True)
class Delta:
    """What one step added to the reply number `index`; the last has a `finish_reason`."""

    index: int
    text: str = ""
    tokens: tuple[TokenFacts, ...] = ()
    finish_reason: str | None = None


@dataclass
class Choice:
    """All deltas of one reply, joined."""

    index: int
    text: str = ""
    tokens: list[TokenFacts] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Append the next delta."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason


Logprob = tuple[float | None, Sequence[tuple[int, float]]]
"""Of a chosen token, and (id, logprob) of the likeliest; see `model.sampler.Logprobs`."""


def facts_of(tokenizer: Tokenizer, token: int, logprob: Logprob, offset: int) -> TokenFacts:
    """What `logprobs` says about a token that stands at `offset`."""
    chosen, top = logprob
    likely = tuple(Likely(*_text_and_bytes(tokenizer, i), value) for i, value in top)
    return TokenFacts(*_text_and_bytes(tokenizer, token), offset, chosen, likely)


def _text_and_bytes(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    data = tokenizer.token_bytes(token, special=True)
    return data.decode("utf-8", "replace"), data


class ReplyText:
    """One reply: `push` each token for its delta, and `finish` for the last.

    Text is held back while it may be part of a character or of a stop string; a token's facts
    come out with its text. A stop string cuts the text, and the tokens that begin behind the cut.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        index: int = 0,
        offset: int = 0,
        at_start: bool = False,
    ):
        """`offset`: characters that stand before the reply in the text (an echoed prompt);
        `at_start`: whether the reply is a text of its own, and no continuation."""
        self._tokenizer, self._index, self._offset = tokenizer, index, offset
        self._decoder = StreamDecoder(tokenizer, at_start)
        self._stops = StopFilter(stops)
        self._n_decoded = self._n_shown = 0
        self._held: list[tuple[int, TokenFacts]] = []
        self._ends: list[int] = []

    @property
    def n_kept(self) -> int:
        """Tokens that no stop string has cut off, wholly or in part."""
        if not self.stopped:
            return len(self._ends)
        return sum(end <= self._n_shown for end in self._ends)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: the reply has ended."""
        return self._stops.stopped

    def push(self, token: int, logprob: Logprob | None = None) -> Delta:
        """What `token` adds that may be shown now; `logprob` where facts are wanted."""
        text = self._decoder.push(token)
        begin = self._offset + self._n_decoded
        self._n_decoded += len(text)
        self._ends.append(self._n_decoded)
        if logprob is not None:
            facts = facts_of(self._tokenizer, token, logprob, begin)
            self._held.append((self._n_decoded, facts))
        return self._show(self._stops.push(text))

    def finish(self, reason: str) -> Delta:
        """The end of the reply: what was held back and is no stop string, and why it ended."""
        shown = self._show(self._stops.push(self._decoder.flush()) + self._stops.flush())
        limit = self._offset + self._n_shown
        rest = [facts for _, facts in self._held if not self.stopped or facts.offset < limit]
        return replace(shown, tokens=(*shown.tokens, *rest), finish_reason=reason)

    def _show(self, text: str) -> Delta:
        self._n_shown += len(text)
        n = sum(end <= self._n_shown for end, _ in self._held)
        tokens, self._held = tuple(facts for _, facts in self._held[:n]), self._held[n:]
        return Delta(self._index, text, tokens)
