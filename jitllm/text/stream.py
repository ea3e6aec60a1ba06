"""Ids -> text while they come: no character is shown before it is whole, no stop string ever."""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jitllm.errors import UsageError

if TYPE_CHECKING:
    from jitllm.text.tokenizer import Tokenizer


class StreamDecoder:
    """The text of ids that come one by one; the pieces together are `Tokenizer.decode` of them.

    Bytes that are not UTF-8 become U+FFFD, each at once when that is certain; a character whose
    bytes have not all come is held back, and dropped if they never do. `at_start` says whether the
    ids begin a text: there the space that encoding put in front (`add_space_prefix`) is taken away.
    None: they do when the first is BOS, so the continuation of a prompt keeps its space.
    """

    def __init__(self, tokenizer: "Tokenizer", at_start: bool | None = None):
        self._tokenizer = tokenizer
        self._at_start = at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, often none."""
        if self._at_start is None:
            self._at_start = token_id == self._tokenizer.bos_id
        data = self._tokenizer.token_bytes(token_id)
        if data and self._at_start:
            self._at_start = False
            if self._tokenizer.add_space_prefix:
                data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End of the text: what is held back is no character and is dropped."""
        self._decoder.reset()
        return ""


class StopFilter:
    """Passes text through until one of `stops` is complete, of which nothing is ever passed.

    It withholds the longest end of the text that may become a stop, and no more. What comes out
    does not depend on how the text was cut: the stop that is complete first wins, the longest of
    those that end together.
    """

    def __init__(self, stops: str | Sequence[str] = ()):
        stops = (stops,) if isinstance(stops, str) else stops
        if "" in stops:
            raise UsageError("a stop string is empty; it would end every reply at once")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop that was found."""

    @property
    def stopped(self) -> bool:
        """Whether a stop was found; from then on nothing passes."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """What may be shown now that `text` came."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [
            (text.index(stop) + len(stop), text.index(stop), stop)
            for stop in self._stops
            if stop in text
        ]
        if found:
            _, begin, self.matched = min(found)
            self._held = ""
            return text[:begin]
        keep = self._n_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """End of the text: what was withheld is no stop and may be shown."""
        held, self._held = self._held, ""
        return held

    def _n_held(self, text: str) -> int:
        longest = max(map(len, self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
