"""Text to ids and back, with and without control tokens."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitllm.errors import FormatError, UsageError
from jitllm.text import Tokenizer
from jitllm.text.build import build_tokenizer
from tests.text.vocabularies import (
    ALPHABET,
    CONTROL,
    NORMAL,
    byte_level,
    golden,
    sentencepiece,
    stories,
    tokenizer,
)

_STORIES = tokenizer(stories())
_BYTES = tokenizer(byte_level())


@pytest.mark.parametrize("row", golden("tokenize")["stories260K"], ids=lambda row: row["text"][:20])
def test_stories260k_gives_the_ids_of_llama_cpp(row: dict) -> None:
    assert _STORIES.encode(row["text"], add_bos=False) == row["ids"]
    assert _STORIES.encode(row["text"]) == [1, *row["ids"]]
    special = _STORIES.encode(row["text"], add_bos=False, parse_special=True)
    assert special == row["ids_special"]


def test_a_spec_survives_json() -> None:
    spec = build_tokenizer(stories())
    assert json.loads(json.dumps(spec)) == spec


@pytest.mark.parametrize("key", ["tokenizer_json", "stop_ids", "pieces", "byte_ids"])
def test_a_damaged_spec_is_refused(key: str) -> None:
    spec = dict(build_tokenizer(stories()))
    for damaged in ({k: v for k, v in spec.items() if k != key}, spec | {key: 7}):
        if key == "pieces" and key in damaged:
            continue
        with pytest.raises(FormatError, match="the stored tokenizer is damaged"):
            Tokenizer(damaged)


@given(st.text())
def test_byte_level_text_comes_back_as_it_was(text: str) -> None:
    assert _BYTES.decode(_BYTES.encode(text)) == text
    assert _BYTES.decode(_BYTES.encode(text, parse_special=True)) == text


@given(st.text().filter(lambda text: "▁" not in text))
def test_sentencepiece_text_comes_back_as_it_was(text: str) -> None:
    assert _STORIES.decode(_STORIES.encode(text)) == text


def test_nul_and_other_bytes_without_a_token_of_their_own_come_back() -> None:
    text = "\x00\x01\x7f\ufeff\U0010ffff"
    assert _STORIES.decode(_STORIES.encode(text)) == text
    assert _STORIES.encode("\x00", add_bos=False)[-1] == 3  # <0x00>


def test_a_lone_surrogate_is_read_as_a_replacement_character() -> None:
    assert _BYTES.encode("a\udc80b") == _BYTES.encode("a\ufffdb")
    assert _BYTES.encode("\ud83d\ude00") == _BYTES.encode("\U0001f600")


def test_control_tokens_are_text_unless_they_are_parsed() -> None:
    text = "<|im_start|>the<|im_end|>"
    plain = _BYTES.encode(text)
    assert not {0, 1, 2} & set(plain) and _BYTES.decode(plain) == text
    assert _BYTES.encode(text, parse_special=True) == [1, *_BYTES.encode("the"), 2]


def test_user_defined_tokens_are_cut_out_of_any_text() -> None:
    assert _BYTES.encode("a<think>a") == [ord("a") - 29, 3, ord("a") - 29]
    assert _BYTES.decode([3]) == "<think>"


def test_the_longest_control_token_at_a_place_wins() -> None:
    tokens = [*ALPHABET.values(), "<a", "<a>", "<a><b>"]
    types = [NORMAL] * 256 + [CONTROL] * 3
    subject = tokenizer(byte_level(tokens=tokens, token_type=types, merges=[]))
    ids = subject.encode("<a><b><a><a<", parse_special=True)
    assert [subject.token_text(i) for i in ids] == ["<a><b>", "<a>", "<a", "<"]


def test_a_space_is_put_in_front_of_each_text_that_follows_a_control_token() -> None:
    subject = tokenizer(sentencepiece({"▁": -1.0, "a": -2.0, "▁a": -0.5}))
    texts = [subject.token_text(i) for i in subject.encode("a<s>a a</s>", parse_special=True)]
    assert texts == ["<s>", "▁a", "<s>", "▁a", "▁a", "</s>"]


def test_no_space_is_put_in_front_where_the_file_forbids_it() -> None:
    subject = tokenizer(sentencepiece({"▁": -1.0, "a": -2.0}, add_space_prefix=False))
    assert [subject.token_text(i) for i in subject.encode("a a")] == ["<s>", "a", "▁", "a"]
    assert subject.decode(subject.encode(" a")) == " a"


def test_bos_comes_as_the_model_wants_it_or_as_it_was_asked_for() -> None:
    assert _STORIES.encode("a")[0] == 1
    assert _STORIES.encode("a", add_bos=True) == _STORIES.encode("a")
    assert 1 not in _STORIES.encode("a", add_bos=False)
    assert _BYTES.encode("a") == _BYTES.encode("a", add_bos=False)
    with pytest.raises(UsageError, match="no BOS token"):
        _BYTES.encode("a", add_bos=True)


def test_an_empty_text_is_bos_or_nothing() -> None:
    assert _STORIES.encode("") == [1]
    assert _STORIES.encode("", add_bos=False) == []


def test_the_text_of_phi_3_loses_the_white_space_behind_its_control_tokens() -> None:
    subject = tokenizer(byte_level() | {"general.name": "Phi-3 mini"})
    ids = subject.encode("<|im_start|> \n a<|endoftext|> a", parse_special=True)
    assert ids == [1, *subject.encode("a"), 0, *subject.encode(" a")]
    assert _BYTES.encode("<|im_end|> a", parse_special=True) == [2, *_BYTES.encode(" a")]


def test_the_space_in_front_goes_where_a_text_begins_and_stays_where_it_goes_on() -> None:
    ids = _STORIES.encode("Once upon a time, there was")
    assert _STORIES.decode(ids) == "Once upon a time, there was"
    assert _STORIES.decode(ids[-1:]) == " was"
    assert _STORIES.decode(ids[-1:], at_start=True) == "was"
    assert _STORIES.decode(ids, at_start=False) == " Once upon a time, there was"


def test_control_tokens_are_silent_in_text_and_shown_as_pieces() -> None:
    assert _BYTES.decode([1, *_BYTES.encode("the"), 2]) == "the"
    assert _BYTES.token_bytes(2) == b"" and _BYTES.token_bytes(2, special=True) == b"<|im_end|>"
    assert _BYTES.piece(2) == "<|im_end|>"


def test_every_token_has_its_bytes() -> None:
    byte_ids = _BYTES.encode("".join(map(chr, range(128))))
    assert b"".join(map(_BYTES.token_bytes, byte_ids)) == bytes(range(128))
    assert {_BYTES.token_bytes(i) for i in range(4, 260)} == {bytes([b]) for b in range(256)}
    assert {_STORIES.token_bytes(3 + b) for b in range(256)} == {bytes([b]) for b in range(256)}
    assert _BYTES.piece(_BYTES.encode(" the")[0]) == " the"


def test_a_part_of_a_character_is_shown_as_its_bytes() -> None:
    llama = _STORIES.encode("\N{LLAMA}", add_bos=False)
    shown = "".join(map(_STORIES.piece, llama))
    assert shown.endswith("<0xF0><0x9F><0xA6><0x99>")


@pytest.mark.parametrize("token_id", [-1, 512, 1 << 40])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(UsageError, match=f"token {token_id} is not one of the 512"):
        _STORIES.decode([token_id])


def test_every_control_token_has_a_character_of_the_shield() -> None:
    assert _STORIES.shield_chars in ("<", ">")
    # The bar: templates look for `</think>` in messages.
    assert _BYTES.shield_chars == "|"
    nothing = tokenizer(byte_level(token_type=None, tokens=[*ALPHABET.values()], merges=[]))
    assert nothing.shield_chars == ""
    assert nothing.encode("<s>", parse_special=True) == nothing.encode("<s>")
