"""A vocabulary that contradicts itself is refused in one sentence."""

import re
from typing import Any

import numpy as np
import pytest

from jitllm.errors import FormatError, UnsupportedError
from jitllm.text.build import build_tokenizer
from jitllm.text.vocabulary import TokenType, read_vocabulary
from tests.text.vocabularies import byte_level, sentencepiece, stories

_TOKENS = byte_level()["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "the file has no tokenizer.ggml.model; a model needs its vocabulary"),
        (byte_level(model=3), "tokenizer.ggml.model is int, not str"),
        (byte_level(tokens=[]), "tokenizer.ggml.tokens is empty"),
        (byte_level(tokens=np.zeros(3)), "tokenizer.ggml.tokens is ndarray, not list"),
        (byte_level(tokens=["a", 1]), "tokenizer.ggml.tokens is not an array of UTF-8 strings"),
        (byte_level(tokens=["a\udc80"]), "tokenizer.ggml.tokens is not an array of UTF-8"),
        (byte_level(tokens=[*_TOKENS[:-1], "!"]), "tokens 4 and 265 of the vocabulary are both"),
        (byte_level(tokens=[*_TOKENS[:-1], "x" * 5000]), "token 265 has 5000 characters; at most"),
        (byte_level(token_type=np.ones(5, np.int32)), "token_type has 5 entries for 266 tokens"),
        (byte_level(token_type=np.ones(266, np.float32)), "token_type is an array of float32"),
        (byte_level(token_type=np.full(266, 6, np.int32)), "token 0 is a byte to its type, but"),
        (byte_level(eos_token_id=266), "eos_token_id is 266, outside the 266 tokens"),
        (byte_level(eos_token_id=-1), "eos_token_id is -1, outside the 266 tokens"),
        (byte_level(eos_token_id=True), "eos_token_id is bool, not int"),
        (byte_level(add_bos_token=1), "add_bos_token is int, not bool"),
        (byte_level(merges=None), "the file has no tokenizer.ggml.merges"),
        (byte_level(merges=["h e", "he x"]), "merge 1 is 'he x', which is not two tokens and a"),
        (byte_level(merges=["he"]), "merge 0 is 'he', which is not two tokens"),
        (sentencepiece({"a": np.nan}), "scores is missing or not finite"),
        (sentencepiece({"a": 0.0}, scores=None), "scores is missing or not finite"),
        (sentencepiece({"a": 0.0}, scores=np.zeros(260, np.uint8)), "scores is an array of uint8"),
        (sentencepiece({"a": 0.0}, scores=np.zeros(9, np.float32)), "scores has 9 entries for 260"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(
    metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=re.escape(message)) as caught:
        build_tokenizer(metadata)
    assert "\n" not in str(caught.value)


def test_another_kind_of_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'bert'.*gemma4, gpt2, llama"):
        build_tokenizer(byte_level(model="bert"))


def test_a_sentencepiece_vocabulary_needs_an_id_for_every_byte() -> None:
    metadata = sentencepiece({"a": -1.0}, unknown_token_id=None)
    metadata["tokenizer.ggml.tokens"][3] = "[no byte]"
    metadata["tokenizer.ggml.token_type"][3] = TokenType.NORMAL
    with pytest.raises(FormatError, match=r"neither the byte token <0x00> nor an unknown token"):
        build_tokenizer(metadata)


def test_an_absent_bos_is_no_bos_and_never_a_default() -> None:
    spec = build_tokenizer(sentencepiece({"a": -1.0}, bos_token_id=None))
    assert spec["bos_id"] is None and not spec["add_bos"]
    spec = build_tokenizer(byte_level(add_bos_token=True))
    assert spec["bos_id"] is None and not spec["add_bos"]


def test_sentencepiece_and_llama_3_begin_with_bos_where_the_file_does_not_say() -> None:
    assert build_tokenizer(stories())["add_bos"]
    assert build_tokenizer(byte_level("llama-bpe", bos_token_id=0))["add_bos"]
    assert not build_tokenizer(byte_level("qwen2", bos_token_id=0))["add_bos"]
    assert not build_tokenizer(sentencepiece({}, add_bos_token=False))["add_bos"]


def test_known_end_tokens_stop_a_reply_and_are_control_tokens_whatever_their_type() -> None:
    metadata = byte_level(token_type=np.ones(266, np.int32), eos_token_id=None)
    vocabulary = read_vocabulary(metadata)
    assert vocabulary.stop_ids == (0, 2)  # <|endoftext|> and <|im_end|>
    assert vocabulary.of_type(TokenType.CONTROL) == [0, 2]
    assert vocabulary.eot_id == 2


def test_the_ids_that_the_file_names_stop_a_reply() -> None:
    vocabulary = read_vocabulary(byte_level(eos_token_id=7, eot_token_id=8, eom_token_id=9))
    assert vocabulary.stop_ids == (0, 2, 7, 8, 9)
    assert (vocabulary.eos_id, vocabulary.eot_id) == (7, 8)


def test_the_end_of_struck_out_text_does_not_stop_gemma_4() -> None:
    scores = {"<|tool_response>": 0.0}
    assert read_vocabulary(sentencepiece({}, eos_token_id=0)).stop_ids == (0, 2)
    assert read_vocabulary(sentencepiece(scores, eos_token_id=0)).stop_ids == (0, 259)
