"""Vocabularies for the tests: GGUF metadata as `read_gguf` gives it."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jitllm.text import Tokenizer
from jitllm.text.build import build_tokenizer
from jitllm.text.vocabulary import BYTE_TOKENS

GOLDEN = Path(__file__).parents[1] / "golden"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
ALPHABET = {byte: chr(byte) for byte in _PLAIN} | {b: chr(256 + i) for i, b in enumerate(_OTHERS)}
"""GPT-2's: byte -> the character that stands for it."""


def golden(name: str) -> Any:
    """The figures in tests/golden/`name`.json."""
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def gguf_metadata(**keys: Any) -> dict[str, Any]:
    """`tokenizer.ggml.<key>` of each; None leaves a key out."""
    return {f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None}


def stories() -> dict[str, Any]:
    """The SentencePiece vocabulary of stories260K, 512 tokens."""
    metadata = golden("stories260k_vocabulary")
    del metadata["source"]
    for key, dtype in (("scores", np.float32), ("token_type", np.int32)):
        metadata[f"tokenizer.ggml.{key}"] = np.array(metadata[f"tokenizer.ggml.{key}"], dtype)
    return metadata


CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "i n", "Ġ a", "e r")


def byte_level(pre: str | None = "gpt-2", **keys: Any) -> dict[str, Any]:
    """A byte-level vocabulary: three control tokens, `<think>`, 256 bytes and six merges."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*CONTROLS, "<think>", *ALPHABET.values(), *merged]
    types = np.full(len(tokens), NORMAL, np.int32)
    types[:3], types[3] = CONTROL, USER_DEFINED
    given = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types}
    given |= {"merges": list(MERGES), "eos_token_id": 2}
    return gguf_metadata(**(given | keys))


def sentencepiece(words: dict[str, float], /, **keys: Any) -> dict[str, Any]:
    """`<unk>`, `<s>`, `</s>`, 256 byte tokens, and `words` with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *words]
    types = np.full(len(tokens), NORMAL, np.int32)
    types[0], types[1:3], types[3:259] = UNKNOWN, CONTROL, BYTE
    values = np.array([0.0] * 259 + list(words.values()), np.float32)
    given = {"model": "llama", "tokens": tokens, "token_type": types, "scores": values}
    given |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return gguf_metadata(**(given | keys))


def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Built and read back as a container would."""
    return Tokenizer(json.loads(json.dumps(build_tokenizer(metadata))))
