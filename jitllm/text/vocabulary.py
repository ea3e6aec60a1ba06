"""A GGUF's vocabulary as it was written, checked: nothing behind this file doubts a length, a type
or an id again. What the keys mean: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from jitllm.errors import FormatError, UnsupportedError

MODELS = ("gemma4", "gpt2", "llama")
"""`tokenizer.ggml.model`: BPE on lines of plain text, byte-level BPE, SentencePiece."""

MAX_TOKEN_CHARS = 2048
"""Merging is quadratic in the longest token; real vocabularies stay below 512."""

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))

_PREFIX = "tokenizer.ggml."
_END_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
)
_END_OF_REPLY = (
    *_END_OF_TURN,
    "<|eom_id|>",
    "</s>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
)
# A model that writes code has left its reply when it begins another file.
_END_OF_FILE = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>")
_END_OF_FILE += ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, and the ids that mean something."""

    model: str
    """One of `MODELS`."""
    pre: str | None
    """`tokenizer.ggml.pre`; None where the file has none."""
    tokens: list[str]
    """Every text once, none empty."""
    ids: dict[str, int]
    types: np.ndarray
    """i32[n_vocab] of `TokenType`; a token that ends a reply is CONTROL whatever the file says."""
    scores: np.ndarray | None
    """f32[n_vocab], finite; only of a `llama` vocabulary."""
    merges: list[tuple[str, str]]
    """In order of rank; only of a BPE vocabulary. Both sides and their union are tokens."""
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    unknown_id: int | None
    stop_ids: tuple[int, ...]
    """Ids that end a reply, ascending."""
    add_bos: bool | None
    """None: the file does not say."""
    add_space_prefix: bool

    def of_type(self, *types: TokenType) -> list[int]:
        """Ids of these types, ascending."""
        return np.flatnonzero(np.isin(self.types, types)).tolist()


def read_vocabulary(metadata: dict[str, Any]) -> Vocabulary:
    """The vocabulary in a GGUF's `metadata`. FormatError where the file contradicts itself,
    UnsupportedError where it asks for another kind of tokenizer."""
    model = _get(metadata, "model", str)
    if model not in MODELS:
        raise UnsupportedError(
            f"the tokenizer is of type {model!r}, which jitllm cannot read "
            f"(supported: {', '.join(MODELS)})"
        )
    tokens, ids = _tokens(metadata)
    types = _numbers(metadata, "token_type", "iu", len(tokens))
    types = np.ones(len(tokens), np.int32) if types is None else types.astype(np.int32)
    _check_bytes(tokens, types)
    named = {name: _id(metadata, name, tokens) for name in ("bos", "eos", "eot", "eom", "unknown")}
    eot_id = named["eot"]
    if eot_id is None:
        eot_id = next((ids[text] for text in _END_OF_TURN if text in ids), None)
    stop_ids = _stop_ids(ids, types, (named["eos"], eot_id, named["eom"]))
    return Vocabulary(
        model=model,
        pre=_get(metadata, "pre", str, None) or None,
        tokens=tokens,
        ids=ids,
        types=types,
        scores=_scores(metadata, len(tokens)) if model == "llama" else None,
        merges=[] if model == "llama" else _merges(metadata, ids),
        bos_id=named["bos"],
        eos_id=named["eos"],
        eot_id=eot_id,
        unknown_id=named["unknown"],
        stop_ids=stop_ids,
        add_bos=_get(metadata, "add_bos_token", bool, None),
        add_space_prefix=model == "llama" and _get(metadata, "add_space_prefix", bool, True),
    )


def _get(metadata: dict[str, Any], name: str, kind: type, *default: Any) -> Any:
    key = _PREFIX + name
    if key not in metadata:
        if default:
            return default[0]
        raise FormatError(f"the file has no {key}; a model needs its vocabulary")
    value = metadata[key]
    # bool is an int to Python, and an id of True is no id.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(f"{key} is {type(value).__name__}, not {kind.__name__}")
    return value


def _tokens(metadata: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
    tokens = _strings(metadata, "tokens")
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        i, text = next((i, text) for i, text in enumerate(tokens) if ids[text] != i)
        raise FormatError(f"tokens {i} and {ids[text]} of the vocabulary are both {text[:40]!r}")
    longest = max(range(len(tokens)), key=lambda i: len(tokens[i]), default=None)
    if longest is None:
        raise FormatError(f"{_PREFIX}tokens is empty; a model needs its vocabulary")
    if len(tokens[longest]) > MAX_TOKEN_CHARS:
        raise FormatError(
            f"token {longest} has {len(tokens[longest])} characters; at most {MAX_TOKEN_CHARS} "
            "are allowed"
        )
    return tokens, ids


def _strings(metadata: dict[str, Any], name: str) -> list[str]:
    texts = _get(metadata, name, list)
    try:
        "".join(texts).encode()
    except (TypeError, UnicodeEncodeError):
        raise FormatError(f"{_PREFIX}{name} is not an array of UTF-8 strings") from None
    return texts


def _numbers(metadata: dict[str, Any], name: str, kinds: str, length: int) -> np.ndarray | None:
    key = _PREFIX + name
    if key not in metadata:
        return None
    values = np.asarray(metadata[key])
    if values.ndim != 1 or values.dtype.kind not in kinds:
        raise FormatError(f"{key} is an array of {values.dtype}, which it cannot be")
    if len(values) != length:
        raise FormatError(f"{key} has {len(values)} entries for {length} tokens")
    return values


def _scores(metadata: dict[str, Any], length: int) -> np.ndarray:
    scores = _numbers(metadata, "scores", "f", length)
    if scores is None or not np.isfinite(scores).all():
        raise FormatError(f"{_PREFIX}scores is missing or not finite; merging goes by score")
    return scores


def _merges(metadata: dict[str, Any], ids: dict[str, int]) -> list[tuple[str, str]]:
    merges = {}
    for rank, text in enumerate(_strings(metadata, "merges")):
        # From 1: the left side is never empty, but may be a space.
        cut = text.find(" ", 1)
        pair = (text[:cut], text[cut + 1 :])
        if cut < 0 or pair[0] not in ids or pair[1] not in ids or pair[0] + pair[1] not in ids:
            raise FormatError(f"merge {rank} is {text[:40]!r}, which is not two tokens and a third")
        merges[pair] = None
    return list(merges)


def _id(metadata: dict[str, Any], name: str, tokens: list[str]) -> int | None:
    token_id = _get(metadata, f"{name}_token_id", int, None)
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise FormatError(
            f"{_PREFIX}{name}_token_id is {token_id}, outside the {len(tokens)} tokens"
        )
    return token_id


def _check_bytes(tokens: list[str], types: np.ndarray) -> None:
    for i in np.flatnonzero(types == TokenType.BYTE).tolist():
        if tokens[i].upper() not in _UPPER_BYTE_TOKENS:
            raise FormatError(f"token {i} is a byte to its type, but its text is {tokens[i]!r}")


_UPPER_BYTE_TOKENS = frozenset(text.upper() for text in BYTE_TOKENS)


def _stop_ids(
    ids: dict[str, int], types: np.ndarray, named: Iterable[int | None]
) -> tuple[int, ...]:
    """As llama.cpp finds end-of-generation tokens: those the file names, and those whose text is
    known; the latter become control tokens (marks `types`)."""
    known = {ids[text] for text in (*_END_OF_REPLY, *_END_OF_FILE) if text in ids}
    if "<|tool_response>" in ids:
        # Gemma 4 writes HTML: there `</s>` is the end of a struck-out text.
        known.discard(ids.get("</s>"))
    types[list(known)] = TokenType.CONTROL
    return tuple(sorted(known | {i for i in named if i is not None}))
