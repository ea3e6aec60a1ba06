"""A GGUF's vocabulary -> what a container keeps of it. Runs once, at conversion."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jitllm.errors import FormatError, UnsupportedError
from jitllm.text.pretokenizers import LINES, PRE_TOKENIZERS, PreTokenizer
from jitllm.text.spec import TokenizerSpec
from jitllm.text.vocabulary import BYTE_TOKENS, TokenType, Vocabulary, read_vocabulary

_NO_PRE = (
    "the file names no pre-tokenizer (tokenizer.ggml.pre), so the default one is used and the "
    "model may see text cut otherwise than in its training"
)


def build_tokenizer(metadata: dict[str, Any], force_pre: bool = False) -> TokenizerSpec:
    """The tokenizer of a GGUF with this `metadata`, ready to be stored.

    Gives the ids that llama.cpp gives. `force_pre` takes the default pre-tokenizer where the file
    names an unknown one. Raises FormatError for a vocabulary that contradicts itself,
    UnsupportedError for a kind of tokenizer or a pre-tokenizer that is not in the tables.
    """
    vocabulary = read_vocabulary(metadata)
    pre, warning = _pre_tokenizer(vocabulary, force_pre)
    add_bos = vocabulary.add_bos if vocabulary.add_bos is not None else pre.add_bos
    return TokenizerSpec(
        tokenizer_json=_tokenizer_json(vocabulary, pre),
        pieces="byte-level" if vocabulary.model == "gpt2" else "spm",
        n_vocab=len(vocabulary.tokens),
        add_bos=add_bos and vocabulary.bos_id is not None,
        add_space_prefix=vocabulary.add_space_prefix,
        bos_id=vocabulary.bos_id,
        eos_id=vocabulary.eos_id,
        eot_id=vocabulary.eot_id,
        stop_ids=list(vocabulary.stop_ids),
        control_ids=vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN),
        literal_ids=vocabulary.of_type(TokenType.USER_DEFINED),
        byte_ids=vocabulary.of_type(TokenType.BYTE),
        strip_after_ids=_strip_after(vocabulary, metadata.get("general.name", "")),
        warning=warning,
    )


def _pre_tokenizer(vocabulary: Vocabulary, force_pre: bool) -> tuple[PreTokenizer, str | None]:
    if vocabulary.model == "llama":
        return PreTokenizer((), add_bos=True), None
    if vocabulary.model == "gemma4":
        return LINES, None
    if vocabulary.pre is None:
        return PRE_TOKENIZERS["default"], _NO_PRE
    known = PRE_TOKENIZERS.get(vocabulary.pre)
    if known is not None:
        return known, None
    if force_pre:
        return PRE_TOKENIZERS["default"], (
            f"the pre-tokenizer {vocabulary.pre!r} is unknown, so the default one is used and the "
            "model may see text cut otherwise than in its training"
        )
    raise UnsupportedError(
        f"the vocabulary wants the pre-tokenizer {vocabulary.pre!r}, which jitllm does not know "
        f"(known: {', '.join(PRE_TOKENIZERS)})"
    )


def _tokenizer_json(vocabulary: Vocabulary, pre: PreTokenizer) -> str:
    byte_level = vocabulary.model == "gpt2"
    if vocabulary.model == "llama":
        _check_byte_fallback(vocabulary)
        merges = merges_by_score(vocabulary.tokens, vocabulary.ids, vocabulary.scores)
    else:
        merges = vocabulary.merges
    unknown = None if byte_level else vocabulary.unknown_id
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(i, vocabulary.tokens[i])
            for i in vocabulary.of_type(TokenType.USER_DEFINED)
        ],
        "normalizer": None if byte_level else _normalizer(vocabulary.add_space_prefix),
        "pre_tokenizer": _splits(pre, byte_level),
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": not byte_level,
            "ignore_merges": pre.whole_words,
            "vocab": vocabulary.ids,
            "merges": _json_merges(merges),
        },
    }
    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))


def _check_byte_fallback(vocabulary: Vocabulary) -> None:
    missing = [text for text in BYTE_TOKENS if text not in vocabulary.ids]
    if missing and vocabulary.unknown_id is None:
        raise FormatError(
            f"the vocabulary has neither the byte token {missing[0]} nor an unknown token; some "
            "text would have no ids"
        )


def _added_token(token_id: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token_id, "content": text, **flags}


def _normalizer(add_space_prefix: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    if add_space_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": " "})
    return {"type": "Sequence", "normalizers": steps}


def _splits(pre: PreTokenizer, byte_level: bool) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in pre.patterns
    ]
    if byte_level:
        flags = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        steps.append({"type": "ByteLevel", **flags})
    return {"type": "Sequence", "pretokenizers": steps} if steps else None


def _json_merges(merges: Sequence[tuple[str, str]]) -> list[Any]:
    # One string a merge loads a third faster than a pair, but a space inside a token would cut it
    # wrongly and a leading "#version" would make it a comment.
    if any(" " in a or " " in b or a.startswith("#version") for a, b in merges):
        return [list(pair) for pair in merges]
    return [f"{a} {b}" for a, b in merges]


def merges_by_score(
    tokens: Sequence[str], ids: dict[str, int], scores: np.ndarray
) -> list[tuple[str, str]]:
    """SentencePiece's merging by score, as a list of merges by rank.

    Of all neighbours whose union is a token, the union with the highest score is made first, the
    leftmost of equals. Inside the text that a token comes from, the order of merges is the same
    whatever stands around it, so a token has one last merge: that of its own text. One merge a
    token is therefore exact, and makes the order among several ways to one token no question.
    Tokens of one score (LLaMA's runs of spaces) are made longest first: a run grows from its left
    end, which is what leftmost-first does to it.
    """
    by_text = dict(zip(tokens, scores.tolist(), strict=True))
    made = ((_last_merge(text, by_text), text) for text in tokens if len(text) > 1)
    ranked = sorted(
        (-by_text[text], -len(text), ids[text], pair)
        for pair, text in made
        if pair is not None and pair[0] in ids and pair[1] in ids
    )
    return [pair for *_, pair in ranked]


def _last_merge(text: str, scores: dict[str, float]) -> tuple[str, str] | None:
    parts = list(text)
    while len(parts) > 2:
        unions = [scores.get(a + b, -math.inf) for a, b in pairwise(parts)]
        best = max(unions)
        if best == -math.inf:
            return None
        at = unions.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _strip_after(vocabulary: Vocabulary, model_name: Any) -> list[int]:
    # llama.cpp's rule: GGUF has no key for it, and Phi-3 was trained on prompts without the line
    # breaks that its template writes behind its tokens.
    if not any(name in str(model_name).lower() for name in ("phi-3", "phi3")):
        return []
    kept = {vocabulary.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
    return [i for i in vocabulary.of_type(TokenType.CONTROL) if i not in kept]
