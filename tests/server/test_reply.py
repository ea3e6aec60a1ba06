"""Tokens to deltas: what is streamed and what is whole are the same text and the same tokens."""

import math

from hypothesis import given
from hypothesis import strategies as st

from jitllm.server.reply import Choice, ReplyText
from tests.server.fake_engine import N_VOCAB, FakeTokenizer

TOKENIZER = FakeTokenizer()
LIKELY = (-0.5, ((2, -0.5), (3, -1.5)))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def run(tokens, stops=(), logprob=None, reason="length") -> tuple[list, Choice]:
    """The deltas of a reply as the scheduler makes them, and all of them joined."""
    reply = ReplyText(TOKENIZER, stops)
    deltas = []
    for token in tokens:
        deltas.append(reply.push(token, logprob))
        if reply.stopped:
            reason = "stop"
            break
    deltas.append(reply.finish(reason))
    choice = Choice(0)
    for delta in deltas:
        choice.add(delta)
    return deltas, choice


def test_each_letter_is_a_delta_of_its_own():
    deltas, choice = run(ids("abc"))
    assert [d.text for d in deltas] == ["a", "b", "c", ""]
    assert (choice.text, choice.finish_reason) == ("abc", "length")


def test_a_character_comes_whole_and_a_cut_one_not_at_all():
    deltas, _ = run(ids("aé"))
    assert [d.text for d in deltas] == ["a", "", "é", ""]
    assert run(ids("aé")[:-1])[1].text == "a"


def test_a_stop_string_is_held_back_found_and_never_shown():
    deltas, choice = run(ids("abcdef"), ["cde"])
    assert [d.text for d in deltas] == ["a", "b", "", "", "", ""]
    assert (choice.text, choice.finish_reason) == ("ab", "stop")


def test_what_only_begins_like_a_stop_string_comes_at_the_end():
    deltas, choice = run(ids("abcd"), ["cdx"])
    assert [d.text for d in deltas] == ["a", "b", "", "", "cd"]
    assert choice.text == "abcd"


def test_the_facts_of_a_token_come_with_its_text():
    deltas, choice = run(ids("abcd"), ["cdx"], LIKELY)
    assert [[t.text for t in d.tokens] for d in deltas] == [["a"], ["b"], [], [], ["c", "d"]]
    assert [t.offset for t in choice.tokens] == [0, 1, 2, 3]
    assert choice.tokens[0].logprob == -0.5
    assert [(t.text, t.bytes, t.logprob) for t in choice.tokens[0].top] == [
        ("a", b"a", -0.5),
        ("b", b"b", -1.5),
    ]


def test_tokens_behind_the_cut_have_no_facts():
    _, choice = run(ids("abcdef"), ["cd"], LIKELY)
    assert [t.text for t in choice.tokens] == ["a", "b"]


def test_the_bytes_of_half_a_character_are_said_and_its_text_is_a_replacement():
    _, choice = run(ids("é"), (), LIKELY)
    assert [t.bytes for t in choice.tokens] == [b"\xc3", b"\xa9"]
    assert [t.text for t in choice.tokens] == ["\N{REPLACEMENT CHARACTER}"] * 2


@given(
    st.lists(st.integers(0, N_VOCAB - 1), max_size=40),
    st.lists(st.text("abcd é", min_size=1, max_size=4), max_size=4),
)
def test_no_text_is_lost_and_no_stop_string_is_shown(tokens, stops):
    _, choice = run(tokens, stops, LIKELY)
    whole = ReplyText(TOKENIZER, ())
    text = "".join(whole.push(token).text for token in tokens) + whole.finish("length").text
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (choice.text, choice.finish_reason) == (text, "length")
        assert len(choice.tokens) == len(tokens)
        return
    begins = [text.index(s) for s in stops if s in text and text.index(s) + len(s) == min(ends)]
    assert choice.text == text[: min(begins)]
    assert choice.finish_reason == "stop"
    assert all(t.offset <= len(choice.text) for t in choice.tokens)
    assert not any(stop in choice.text for stop in stops)


def test_probabilities_of_the_fake_engine_are_what_its_docstring_says():
    from tests.server.fake_engine import next_logits

    scores = next_logits(ids("a")[0])
    assert math.isclose(float(scores[ids("b")[0]]), math.log(1 / 2), rel_tol=1e-6)
    assert math.isclose(sum(math.exp(s) for s in scores), 1, rel_tol=1e-5)
