"""Text -> ids and ids -> bytes, from what a container keeps of a vocabulary."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import tokenizers

from jitllm.errors import FormatError, UsageError
from jitllm.text.spec import TokenizerSpec
from jitllm.text.stream import StreamDecoder


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: a printable Latin-1 character is its own byte, the other bytes are U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """Gives the ids that llama.cpp gives. May be shared between threads.

    Raises FormatError when `spec` is not one that `build_tokenizer` makes.
    """

    def __init__(self, spec: TokenizerSpec):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(spec["tokenizer_json"])
            self.n_vocab: int = spec["n_vocab"]
            self.bos_id, self.eos_id, self.eot_id = spec["bos_id"], spec["eos_id"], spec["eot_id"]
            self.add_bos: bool = spec["add_bos"]
            self.add_space_prefix: bool = spec["add_space_prefix"]
            self.stop_ids = frozenset(spec["stop_ids"])
            """Ids that end a reply."""
            self.warning: str | None = spec["warning"]
            """A guess that conversion made, to be shown to the user."""
            self._byte_level = spec["pieces"] == "byte-level"
            self._control_ids = frozenset(spec["control_ids"])
            self._literal_ids = frozenset(spec["literal_ids"])
            self._byte_ids = frozenset(spec["byte_ids"])
            self._strip_after = frozenset(spec["strip_after_ids"])
        # `tokenizers` raises bare Exception for a text that is not a tokenizer.
        except Exception as error:
            raise FormatError(
                f"the stored tokenizer is damaged ({error}); convert the model again"
            ) from None

    def encode(
        self,
        text: str,
        add_bos: bool | None = None,
        parse_special: bool = False,
        unshield: Mapping[int, int] | None = None,
    ) -> list[int]:
        """The ids of `text`.

        `add_bos`: None begins as the model wants it, True with BOS (UsageError where there is
        none), False without. `parse_special`: whether the text of a control token is that token;
        without it, it is read as plain text. `unshield`: a table for `str.translate` that is
        applied to what is left after control tokens were found (see `chat`). A byte for which a
        byte-level vocabulary has no token is left out, as llama.cpp does.
        """
        ids = [self._bos()] if (self.add_bos if add_bos is None else add_bos) else []
        for part in self._parts(_valid(text), parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                part = part.translate(unshield) if unshield else part
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], at_start: bool | None = None) -> str:
        """The text of `ids`, exactly what a StreamDecoder gives for them one by one."""
        decoder = StreamDecoder(self, at_start)
        return "".join(map(decoder.push, ids)) + decoder.flush()

    def token_bytes(self, token_id: int, special: bool = False) -> bytes:
        """What `token_id` adds to a text; a control token adds nothing unless `special`."""
        piece = self.token_text(token_id)
        if token_id in self._control_ids:
            return piece.encode() if special else b""
        if token_id in self._literal_ids:
            return piece.encode()
        if token_id in self._byte_ids:
            return bytes([int(piece[3:5], 16)])
        if not self._byte_level:
            return piece.replace("▁", " ").encode()
        try:
            return bytes(map(_BYTES.__getitem__, piece))
        except KeyError:
            return b"".join(
                bytes([_BYTES[char]]) if char in _BYTES else char.encode() for char in piece
            )

    def token_text(self, token_id: int) -> str:
        """`token_id` as the vocabulary writes it: `Ġthe`, `▁the`, `<|im_end|>`."""
        text = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.n_vocab else None
        if text is None:
            raise UsageError(f"token {token_id} is not one of the {self.n_vocab} of this model")
        return text

    def piece(self, token_id: int) -> str:
        """`token_id` to show to a person: its text, of control tokens too. Of a token that is part
        of a character its bytes, as `<0xF0>`."""
        data = self.token_bytes(token_id, special=True)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)

    @cached_property
    def shield_chars(self) -> str:
        """Characters of which every control token has one: without them no text can be one."""
        texts, chosen = set(self._controls), ""
        while texts:
            # Among equals the last in code order, the bar and not a bracket: templates look for
            # `</think>` and its like in a message.
            best = max(
                {char for text in texts for char in text},
                key=lambda char: (
                    not (char.isalnum() or char.isspace()),
                    sum(char in text for text in texts),
                    char,
                ),
            )
            chosen += best
            texts = {text for text in texts if best not in text}
        return chosen

    def _bos(self) -> int:
        if self.bos_id is None:
            raise UsageError("this model has no BOS token; leave add_bos out")
        return self.bos_id

    @cached_property
    def _controls(self) -> dict[str, int]:
        return {self.token_text(i): i for i in sorted(self._control_ids)}

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """First character of a control token -> the lengths it may have, longest first."""
        lengths: dict[str, set[int]] = {}
        for text in self._controls:
            lengths.setdefault(text[0], set()).add(len(text))
        return {char: sorted(found, reverse=True) for char, found in lengths.items()}

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        return re.compile(f"[{''.join(map(re.escape, self._lengths))}]")

    def _parts(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Control tokens as ids, and the text between them; the longest at a place wins."""
        begin = at = 0
        while parse_special and self._controls and (start := self._starts.search(text, at)):
            at = start.start()
            token_id, end = self._control_at(text, at)
            if token_id is None:
                at += 1
                continue
            if at > begin:
                yield text[begin:at]
            yield token_id
            begin = at = _skip_space(text, end) if token_id in self._strip_after else end
        if begin < len(text):
            yield text[begin:]

    def _control_at(self, text: str, at: int) -> tuple[int | None, int]:
        for length in self._lengths[text[at]]:
            token_id = self._controls.get(text[at : at + length])
            if token_id is not None:
                return token_id, at + length
        return None, at


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\n\v\f\r":
        at += 1
    return at


def _valid(text: str) -> str:
    """`text` without lone surrogates (undecodable bytes of a file name or a pipe)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
