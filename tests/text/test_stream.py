"""Streamed text is whole text, whatever the ids and wherever it is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitllm.errors import UsageError
from jitllm.text import StopFilter, StreamDecoder
from tests.text.vocabularies import byte_level, stories, tokenizer

_TOKENIZERS = [tokenizer(stories()), tokenizer(byte_level())]


@pytest.mark.parametrize("subject", _TOKENIZERS, ids=["stories", "byte-level"])
@given(data=st.data(), at_start=st.sampled_from([None, True, False]))
def test_the_pieces_of_any_ids_are_the_whole_text(subject, data, at_start) -> None:
    ids = data.draw(st.lists(st.integers(0, subject.n_vocab - 1)))
    decoder = StreamDecoder(subject, at_start)
    streamed = "".join(map(decoder.push, ids)) + decoder.flush()
    assert streamed == subject.decode(ids, at_start)
    replaced = b"".join(map(subject.token_bytes, ids)).decode("utf-8", "replace")
    # A broken character at the end is dropped, others are replaced.
    assert replaced.startswith((streamed, f" {streamed}"))


@pytest.mark.parametrize("subject", _TOKENIZERS, ids=["stories", "byte-level"])
def test_a_character_that_is_split_over_tokens_is_held_back_until_it_is_whole(subject) -> None:
    ids = subject.encode("😀", add_bos=False)[-4:]
    decoder = StreamDecoder(subject)
    assert [decoder.push(i) for i in ids] == ["", "", "", "😀"]


def test_bytes_that_cannot_become_a_character_are_shown_as_replaced_at_once() -> None:
    subject = _TOKENIZERS[0]
    byte = {b: 3 + b for b in range(256)}
    decoder = StreamDecoder(subject)
    assert decoder.push(byte[0xFF]) == "\ufffd"
    assert decoder.push(byte[0xE2]) == ""
    assert decoder.push(byte[ord("a")]) == "\ufffda"


def test_a_character_cut_off_by_the_end_is_dropped_streamed_and_whole() -> None:
    subject = _TOKENIZERS[1]
    ids = subject.encode("ok😀")[:-1]
    decoder = StreamDecoder(subject)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == "ok" == subject.decode(ids)


def test_a_continuation_keeps_its_first_space() -> None:
    subject = _TOKENIZERS[0]
    ids = subject.encode("Once upon a time there was", add_bos=False)
    decoder = StreamDecoder(subject)
    assert "".join(map(decoder.push, ids[-1:])) == " was"


def test_text_passes_as_soon_as_it_cannot_become_a_stop() -> None:
    stops = StopFilter(["<|end|>", "\n\n"])
    assert stops.push("Hello <") == "Hello "
    assert stops.push("b>\n") == "<b>"
    assert stops.push("x") == "\nx"
    assert not stops.stopped


def test_no_part_of_a_stop_that_comes_in_pieces_is_shown() -> None:
    stops = StopFilter(["STOP"])
    assert [stops.push(piece) for piece in ("a S", "T", "OP", "more")] == ["a ", "", "", ""]
    assert stops.stopped and stops.matched == "STOP"
    assert stops.flush() == ""


def test_what_was_withheld_comes_out_at_the_end() -> None:
    stops = StopFilter(["STOP"])
    assert stops.push("never STO") == "never "
    assert stops.flush() == "STO"
    assert not stops.stopped and stops.matched is None


def test_without_stops_everything_passes_at_once() -> None:
    assert StopFilter().push("abc") == "abc"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(UsageError, match="a stop string is empty"):
        StopFilter(["a", ""])


def _until_first_stop(text: str, stops: list[str]) -> str:
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 30)),
)
def test_stops_do_not_depend_on_how_the_text_is_cut(text, stops, cuts) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    subject = StopFilter(stops)
    shown = ""
    for begin, end in pairwise(edges):
        shown += subject.push(text[begin:end])
        # Nothing is withheld that no stop begins with.
        rest = text[len(shown) : end]
        assert subject.stopped or not rest or any(stop.startswith(rest) for stop in stops)
    assert shown + subject.flush() == _until_first_stop(text, stops)
