"""Merges by score are exactly SentencePiece's, and pre-tokenizers cut as llama.cpp does."""

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jitllm.errors import UnsupportedError
from jitllm.text.build import build_tokenizer
from jitllm.text.pretokenizers import PRE_TOKENIZERS
from tests.text.vocabularies import ALPHABET, byte_level, golden, sentencepiece, stories, tokenizer

_WORDS = golden("pretokenizers")


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_a_text_is_cut_into_the_words_that_llama_cpp_makes(pre: str) -> None:
    spec = build_tokenizer(byte_level(pre))
    cut = tokenizers.Tokenizer.from_str(spec["tokenizer_json"]).pre_tokenizer
    byte_of = {char: byte for byte, char in ALPHABET.items()}
    for text, words in zip(_WORDS["texts"], _WORDS["words"][pre], strict=True):
        found = [bytes(map(byte_of.get, word)) for word, _ in cut.pre_tokenize_str(text)]
        assert [word.decode() for word in found] == words


def test_an_unknown_pre_tokenizer_is_refused_with_the_list() -> None:
    with pytest.raises(UnsupportedError, match=r"'jina-v9'.*\(known: default, .*smollm.*\)"):
        build_tokenizer(byte_level("jina-v9"))


def test_an_unknown_pre_tokenizer_can_be_forced_and_says_so() -> None:
    spec = build_tokenizer(byte_level("jina-v9"), force_pre=True)
    assert "'jina-v9' is unknown, so the default one is used" in spec["warning"]
    default = build_tokenizer(byte_level("default"))
    assert spec["tokenizer_json"] == default["tokenizer_json"] and default["warning"] is None


def test_a_missing_pre_tokenizer_is_the_default_one_and_says_so() -> None:
    for pre in (None, ""):
        spec = build_tokenizer(byte_level(pre))
        assert "names no pre-tokenizer" in spec["warning"]
    assert build_tokenizer(stories())["warning"] is None  # SentencePiece has none


def _by_score(text: str, scores: dict[str, float]) -> list[str]:
    """What llama.cpp does: the best union first, the leftmost of equals."""
    parts = list(text)
    while True:
        unions = [
            (-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores
        ]
        if not unions:
            return parts
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(
    st.lists(st.text("abc", min_size=2, max_size=5), unique=True, max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=40), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_any_sentencepiece_vocabulary_merges_by_score(words, texts, random) -> None:
    ranks = list(range(len(words)))
    random.shuffle(ranks)
    scores = {"a": -100.0, "b": -101.0, "c": -102.0} | dict(
        zip(words, map(lambda rank: -float(rank), ranks), strict=True)
    )
    subject = tokenizer(sentencepiece(scores, add_space_prefix=False))
    for text in texts:
        ids = subject.encode(text, add_bos=False)
        assert [subject.token_text(i) for i in ids] == _by_score(text, scores)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=5))
def test_runs_of_equal_score_grow_from_the_left(runs: list[int]) -> None:
    # LLaMA's: runs of up to 16 spaces, all with one score.
    scores = {"▁": -1.0, "x": -2.0} | {"▁" * n: -1e9 for n in range(2, 17)}
    subject = tokenizer(sentencepiece(scores, add_space_prefix=False))
    text = "x".join(" " * n for n in runs)
    ids = subject.encode(text, add_bos=False)
    assert [subject.token_text(i) for i in ids] == _by_score(text.replace(" ", "▁"), scores)


def test_a_merge_that_looks_like_a_version_comment_is_a_merge() -> None:
    parts = ["#version!"[:end] for end in range(2, 10)]
    spec = build_tokenizer(
        byte_level(
            tokens=[*ALPHABET.values(), *parts],
            merges=[f"{part[:-1]} {part[-1]}" for part in parts],
            token_type=None,
        )
    )
    model = tokenizers.Tokenizer.from_str(spec["tokenizer_json"]).model
    assert [token.value for token in model.tokenize("#version!")] == ["#version!"]


def test_building_twice_gives_the_same_bytes() -> None:
    for metadata in (stories(), byte_level()):
        assert build_tokenizer(metadata) == build_tokenizer(metadata)
