"""Requests as they are read: every field, its limits, and what is said about a wrong one."""

import json

import pytest

from jitllm.sampling import SamplingParams
from jitllm.server.errors import ApiError
from jitllm.server.protocol import (
    CHAT,
    COMPLETION,
    MAX_DEPTH,
    read_body,
    read_chat,
    read_completion,
)

ASK = {"prompt": "abc"}
TALK = {"messages": [{"role": "user", "content": "abc"}]}


def user(content: object) -> dict:
    return {"messages": [{"role": "user", "content": content}]}


def refused(read, body: dict) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(body)
    return caught.value


def test_a_completion_says_everything_or_nothing():
    plain = read_completion(ASK)
    assert (plain.prompts, plain.max_tokens, plain.n_choices) == (("abc",), 16, 1)
    assert plain.params == SamplingParams(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert not (plain.stream or plain.echo or plain.ignore_eos or plain.include_usage)
    assert (plain.n_logprobs, plain.session, plain.model) == (None, None, None)
    full = read_completion(
        ASK
        | {"model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7}
        | {"min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5, "seed": -3}
        | {"frequency_penalty": -0.5, "n": 2, "stop": "x", "stream": True, "echo": True}
        | {"stream_options": {"include_usage": True}, "logprobs": 3, "ignore_eos": True}
        | {"best_of": 2, "user": "me"}
    )
    assert full.params == SamplingParams(
        temp=0.5, top_p=0.9, top_k=7, min_p=0.1, repeat_penalty=1.1,
        presence_penalty=0.5, frequency_penalty=-0.5, seed=-3,
    )  # fmt: skip
    assert (full.n_choices, full.stop, full.n_logprobs, full.max_tokens) == (2, ("x",), 3, 5)
    assert full.stream and full.include_usage and full.echo and full.ignore_eos


def test_a_chat_reply_has_no_limit_of_its_own_and_a_developer_speaks_as_system():
    asked = read_chat({"messages": [{"role": "developer", "content": "x"}, *TALK["messages"]]})
    assert asked.max_tokens is None
    assert [m["role"] for m in asked.messages] == ["system", "user"]
    assert read_chat(TALK | {"max_completion_tokens": 3}).max_tokens == 3
    assert read_chat(TALK | {"max_tokens": 3, "max_completion_tokens": 3}).max_tokens == 3


@pytest.mark.parametrize("name", sorted(COMPLETION.keys() - {"prompt"}))
def test_null_is_absent_for_every_field_of_a_completion(name):
    assert read_completion(ASK | {name: None}) == read_completion(ASK)


@pytest.mark.parametrize("name", sorted(CHAT.keys() - {"messages"}))
def test_null_is_absent_for_every_field_of_a_chat(name):
    assert read_chat(TALK | {name: None}) == read_chat(TALK)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_a_prompt_is_a_text_ids_or_a_list_of_either(prompt, prompts):
    assert read_completion({"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ("", ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_content_is_a_text_or_parts_of_text(content, text):
    assert read_chat(user(content)).messages[0]["content"] == text


@pytest.mark.parametrize(
    "neutral",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"logit_bias": {}},
        {"response_format": {"type": "text"}},
        {"store": False},
        {"service_tier": "auto"},
        {"modalities": ["text"]},
    ],
)
def test_a_field_that_asks_for_what_happens_anyway_is_taken(neutral):
    assert read_chat(TALK | neutral) == read_chat(TALK)


VALUE, MISSING = "invalid_value", "missing_required_parameter"
NOT_HAD, UNKNOWN = "unsupported_parameter", "unknown_parameter"

BAD_COMPLETIONS = [
    ({}, MISSING, "prompt", "@ is missing"),
    ({"prompt": None}, MISSING, "prompt", "@ is missing"),
    (
        {"prompt": 5},
        VALUE,
        "prompt",
        "@ has to be a text, token ids, or a list of either, but is 5",
    ),
    ({"stop": 5}, VALUE, "stop", "@ has to be a text or a list of texts, but is 5"),
    ({"prompt": []}, VALUE, "prompt", "@ has to be a list of 1 to 32, not 0"),
    ({"prompt": [[]]}, VALUE, "prompt[0]", "@ has to be a list of 1 to 1048576, not 0"),
    (
        {"prompt": [1, "a"]},
        VALUE,
        "prompt[1]",
        "@ has to be a whole number from 0 to 2147483647, but is 'a'",
    ),
    (
        {"prompt": [-1]},
        VALUE,
        "prompt[0]",
        "@ has to be a whole number from 0 to 2147483647, but is -1",
    ),
    ({"prompt": ["a"] * 33}, VALUE, "prompt", "@ has to be a list of 1 to 32, not 33"),
    (
        {"prompt": ["a"] * 20, "n": 4},
        VALUE,
        "n",
        "20 prompts with 4 choices each are more than the 64 replies that one request may have",
    ),
    (
        {"max_tokens": -1},
        VALUE,
        "max_tokens",
        "@ has to be a whole number from 0 to 2147483647, but is -1",
    ),
    (
        {"max_tokens": True},
        VALUE,
        "max_tokens",
        "@ has to be a whole number from 0 to 2147483647, but is True",
    ),
    (
        {"max_tokens": 1.5},
        VALUE,
        "max_tokens",
        "@ has to be a whole number from 0 to 2147483647, but is 1.5",
    ),
    (
        {"max_tokens": 2**63},
        VALUE,
        "max_tokens",
        f"@ has to be a whole number from 0 to 2147483647, but is {2**63}",
    ),
    ({"temperature": 2.1}, VALUE, "temperature", "@ has to be a number from 0 to 2, but is 2.1"),
    (
        {"temperature": "hot"},
        VALUE,
        "temperature",
        "@ has to be a number from 0 to 2, but is 'hot'",
    ),
    (
        {"temperature": float("nan")},
        VALUE,
        "temperature",
        "@ has to be a number from 0 to 2, but is nan",
    ),
    ({"top_p": float("inf")}, VALUE, "top_p", "@ has to be a number from 0 to 1, but is inf"),
    (
        {"repetition_penalty": 0},
        VALUE,
        "repetition_penalty",
        "@ has to be a number from 0.001 to 10, but is 0",
    ),
    (
        {"presence_penalty": 3},
        VALUE,
        "presence_penalty",
        "@ has to be a number from -2 to 2, but is 3",
    ),
    (
        {"seed": 2**63},
        VALUE,
        "seed",
        f"@ has to be a whole number from {-(2**63)} to {2**63 - 1}, but is {2**63}",
    ),
    ({"n": 0}, VALUE, "n", "@ has to be a whole number from 1 to 16, but is 0"),
    ({"n": 10**6}, VALUE, "n", "@ has to be a whole number from 1 to 16, but is 1000000"),
    ({"best_of": 3}, NOT_HAD, "best_of", "@ is not supported: every choice is returned"),
    ({"stop": ""}, VALUE, "stop", "@ has to be of 1 to 256 characters, but is of 0"),
    ({"stop": ["a", ""]}, VALUE, "stop[1]", "@ has to be of 1 to 256 characters, but is of 0"),
    ({"stop": ["a"] * 17}, VALUE, "stop", "@ has to be a list of 0 to 16, not 17"),
    ({"stream": "yes"}, VALUE, "stream", "@ has to be true or false, but is 'yes'"),
    (
        {"stream_options": {"include_usage": True}},
        VALUE,
        "stream_options",
        "@ needs stream to be true",
    ),
    (
        {"stream": True, "stream_options": {"x": 1}},
        UNKNOWN,
        "stream_options.x",
        "'@' is not a field that this server knows",
    ),
    ({"logprobs": 21}, VALUE, "logprobs", "@ has to be a whole number from 0 to 20, but is 21"),
    (
        {"suffix": "end"},
        NOT_HAD,
        "suffix",
        "@ is not supported: text is only ever added at the end",
    ),
    ({"logit_bias": {"5": 1}}, NOT_HAD, "logit_bias", "@ is not supported: no token can be biased"),
    ({"grammar": "x"}, UNKNOWN, "grammar", "'@' is not a field that this server knows"),
    (
        {"jitllm_session": "s", "n": 2},
        VALUE,
        "jitllm_session",
        "a session takes one prompt with one choice at a time",
    ),
]


@pytest.mark.parametrize(("fields", "code", "param", "message"), BAD_COMPLETIONS)
def test_a_completion_that_is_wrong_is_a_400_that_names_the_field(fields, code, param, message):
    error = refused(read_completion, ASK | fields if fields else fields)
    assert (error.status, error.code, error.param) == (400, code, param)
    assert str(error) == message.replace("@", param)


BAD_CHATS = [
    ({}, MISSING, "messages", "@ is missing"),
    ({"messages": []}, VALUE, "messages", "@ has to be a list of 1 to 2048, not 0"),
    ({"messages": "hi"}, VALUE, "messages", "@ has to be a list, but is 'hi'"),
    ({"messages": ["hi"]}, VALUE, "messages[0]", "@ has to be an object, but is 'hi'"),
    ({"messages": [{"content": "x"}]}, MISSING, "messages[0].role", "@ is missing"),
    ({"messages": [{"role": "user"}]}, MISSING, "messages[0].content", "@ is missing"),
    (
        {"messages": [{"role": "god", "content": "x"}]},
        VALUE,
        "messages[0].role",
        "@ has to be one of system, developer, user, assistant, but is 'god'",
    ),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        NOT_HAD,
        "messages[0].role",
        "@ is 'tool', but this server calls no tools",
    ),
    (
        {"messages": [{"role": ["user"], "content": "x"}]},
        VALUE,
        "messages[0].role",
        "@ has to be one of system, developer, user, assistant, but is ['user']",
    ),
    (user(7), VALUE, "messages[0].content", "@ has to be a text or a list of parts, but is 7"),
    (
        user([{"type": "image_url"}]),
        NOT_HAD,
        "messages[0].content[0]",
        "@ is of type 'image_url'; this model reads text alone",
    ),
    (user([{"type": "text"}]), MISSING, "messages[0].content[0].text", "@ is missing"),
    (TALK | {"top_logprobs": 2}, VALUE, "top_logprobs", "@ needs logprobs to be true"),
    (TALK | {"logprobs": 2}, VALUE, "logprobs", "@ has to be true or false, but is 2"),
    (
        TALK | {"max_tokens": 1, "max_completion_tokens": 2},
        VALUE,
        "max_tokens",
        "@ and max_completion_tokens differ; send one",
    ),
    (
        TALK | {"tools": [{"type": "function"}]},
        NOT_HAD,
        "tools",
        "@ is not supported: this server calls no tools",
    ),
    (
        TALK | {"response_format": {"type": "json_object"}},
        NOT_HAD,
        "response_format",
        "@ is not supported: replies are text, held to no grammar",
    ),
    (TALK | {"store": 0}, NOT_HAD, "store", "@ is not supported: nothing is stored"),
    (TALK | {"prompt": "x"}, UNKNOWN, "prompt", "'@' is not a field that this server knows"),
]


@pytest.mark.parametrize(("body", "code", "param", "message"), BAD_CHATS)
def test_a_chat_that_is_wrong_is_a_400_that_names_the_field(body, code, param, message):
    error = refused(read_chat, body)
    assert (error.status, error.code, error.param) == (400, code, param)
    assert str(error) == message.replace("@", param)


def test_a_value_is_shown_short_however_long_it_is():
    message = str(refused(read_completion, ASK | {"temperature": "x" * 10_000}))
    assert len(message) < 150
    message = str(refused(read_completion, ASK | {"y" * 10_000: 1}))
    assert len(message) < 150


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[1]",
        b"5",
        b'"x"',
        b"null",
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b"\xff\xfe{}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}",
    ],
)
def test_a_body_that_is_no_plain_json_object_is_a_400(data):
    error = refused(read_body, data)
    assert (error.status, error.code) == (400, "invalid_json")
    assert len(str(error)) <= 200


def test_a_body_may_nest_as_deep_as_a_body_needs():
    body = {"a": 1}
    for _ in range(MAX_DEPTH - 1):
        body = {"a": body}
    assert read_body(json.dumps(body).encode()) == body
    assert read_body(b"") == {}


def test_a_number_too_large_for_a_float_is_refused_where_it_is_used():
    body = read_body(b'{"prompt": "a", "temperature": 1e999}')
    assert refused(read_completion, body).param == "temperature"
