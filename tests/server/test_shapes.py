"""Replies in OpenAI's shapes, for the fake engine, key by key."""

import math

from tests.server.asking import chunks_of
from tests.server.fake_engine import N_VOCAB

HALF, QUARTER = math.log(1 / 2), math.log(1 / 4)
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def rounded(value):
    """Floats to six digits: what the engine says is f32."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def body_of(response) -> dict:
    """The reply without what differs each time."""
    body = rounded(response.get_json())
    assert body.pop("id").startswith(("cmpl-", "chatcmpl-"))
    assert isinstance(body.pop("created"), int)
    assert isinstance(body.pop("jitllm"), dict)
    return body


def test_a_completion(served):
    assert body_of(served.complete(max_tokens=2)) == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "de", "logprobs": None, "finish_reason": "length"}],
        "usage": USAGE,
    }


def test_the_logprobs_of_a_completion_are_four_lists(served):
    (choice,) = body_of(served.complete(max_tokens=2, logprobs=2))["choices"]
    assert choice["logprobs"] == rounded(
        {
            "tokens": ["d", "e"],
            "token_logprobs": [HALF, HALF],
            "top_logprobs": [{"d": HALF, "e": QUARTER}, {"e": HALF, "f": QUARTER}],
            "text_offset": [0, 1],
        }
    )
    (choice,) = body_of(served.complete(max_tokens=1, logprobs=0))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"d": round(HALF, 6)}]


def test_an_echo_puts_the_prompt_and_its_logprobs_in_front(served):
    (choice,) = body_of(served.complete(max_tokens=1, echo=True))["choices"]
    assert choice["text"] == "abcd"
    (choice,) = body_of(served.complete("abz", max_tokens=1, echo=True, logprobs=1))["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "abz "
    assert logprobs["tokens"] == ["a", "b", "z", " "]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    rare = rounded(math.log(0.25 / (N_VOCAB - 2)))
    assert logprobs["token_logprobs"] == [None, round(HALF, 6), rare, round(HALF, 6)]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][2] == {"c": round(HALF, 6), "z": rare}


def test_an_echo_of_nothing_more_scores_a_text(served):
    body = body_of(served.complete(max_tokens=0, echo=True, logprobs=0))
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 3
    assert body["usage"]["completion_tokens"] == 0


def test_a_chat_reply(served):
    assert body_of(served.chat(max_tokens=2)) == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "de", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": USAGE,
    }


def test_the_logprobs_of_a_chat_reply_are_objects_with_bytes(served):
    asked = {"max_tokens": 1, "logprobs": True}
    (choice,) = body_of(served.chat(**asked, top_logprobs=2))["choices"]
    d = {"token": "d", "logprob": round(HALF, 6), "bytes": [100]}
    e = {"token": "e", "logprob": round(QUARTER, 6), "bytes": [101]}
    assert choice["logprobs"] == {"content": [d | {"top_logprobs": [d, e]}], "refusal": None}
    (choice,) = body_of(served.chat(**asked))["choices"]
    assert choice["logprobs"]["content"] == [d | {"top_logprobs": []}]


def test_the_chunks_of_a_completion(served):
    chunks = chunks_of(served.complete(max_tokens=2, stream=True))
    assert [c["choices"][0] for c in chunks] == [
        {"index": 0, "text": "d", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "e", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"},
    ]
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert len({c["id"] for c in chunks}) == 1
    assert not any("usage" in c for c in chunks)
    assert ["jitllm" in c for c in chunks] == [False, False, True]


def test_the_chunks_of_a_chat_reply(served):
    chunks = chunks_of(served.chat(max_tokens=1, stream=True))
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "d"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "length"]


def test_usage_is_one_last_chunk_without_choices_and_null_in_the_others(served):
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(served.complete(max_tokens=2, **asked))
    assert last["choices"] == []
    assert last["usage"] == USAGE
    assert [c["usage"] for c in chunks] == [None] * len(chunks)


def test_the_choices_of_a_request_have_numbers_and_the_prompt_counts_once(served):
    body = body_of(served.complete(["ab", "xy"], n=2, max_tokens=1))
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "c"),
        (1, "c"),
        (2, "z"),
        (3, "z"),
    ]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 4


def test_a_reply_ends_at_the_model_s_own_end_unless_that_is_ignored(served):
    (choice,) = body_of(served.complete("?", max_tokens=5))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("\n", "stop")
    (choice,) = body_of(served.complete("?", max_tokens=3, ignore_eos=True))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("\na", "length")


def test_a_reply_ends_where_the_context_does(served):
    body = body_of(served.chat("a" * 60))
    assert body["choices"][0]["message"]["content"] == "bcdef"
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_lone_surrogate_comes_back_as_the_escape_it_was(served):
    response = served.complete("ab", echo=True, max_tokens=0)
    assert response.status_code == 200
    data = b'{"prompt": "a\\ud800", "echo": true, "max_tokens": 0}'
    response = served.client.post("/v1/completions", data=data, content_type="application/json")
    assert response.get_json()["choices"][0]["text"] == "a\ud800"


def test_what_a_reply_cost_is_measured(served):
    cost = served.complete(max_tokens=3).get_json()["jitllm"]
    assert cost["file"] == "fake.jlm"
    (host,) = cost["devices"]
    assert (host["device"], host["n_blocks"], host["blocks_executed"]) == ("host", 5, 15)
    assert cost["page_ins"] == 9  # three passes: the prompt and two of the three tokens
    assert cost["bytes_read"] == 3 * 1024
    assert cost["rows_together"] == 1
    assert cost["decode_ms"] > 0
    assert (cost["host_blocks"], cost["device_blocks"], cost["device_ids"]) == (5, 0, [])
