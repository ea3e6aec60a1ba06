"""The OpenAI client against a real socket: what it makes of the replies, streams and errors."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import openai
import pytest

from tests.server.conftest import Served, listening


@pytest.fixture
def connect(make: Callable[..., Served]) -> Iterator[Callable[..., openai.OpenAI]]:
    """Makes a client of a server with these settings."""
    with ExitStack() as stack:

        def connect(key: str = "none", **settings: object) -> openai.OpenAI:
            httpd = stack.enter_context(listening(make(**settings)))
            url = f"http://127.0.0.1:{httpd.effective_port}/v1"
            client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
            return stack.enter_context(client)

        yield connect


@pytest.fixture
def client(connect: Callable[..., openai.OpenAI]) -> openai.OpenAI:
    return connect()


USER = [{"role": "user", "content": "abc"}]


def chat(client: openai.OpenAI, **fields):
    return client.chat.completions.create(
        model="fake", messages=USER, **{"temperature": 0, "max_tokens": 4} | fields
    )


def complete(client: openai.OpenAI, **fields):
    return client.completions.create(
        model="fake", **{"prompt": "abc", "temperature": 0, "max_tokens": 4} | fields
    )


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "jitllm"


def test_a_chat_and_its_stream_say_the_same(client):
    whole = chat(client)
    assert whole.choices[0].message.content == "defg"
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 4)
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert whole.jitllm["devices"][0]["n_blocks"] == 5
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "defg"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_a_completion_and_its_stream_say_the_same(client):
    whole = complete(client, n=2, stop=["g"])
    assert [(c.index, c.text, c.finish_reason) for c in whole.choices] == [
        (0, "def", "stop"),
        (1, "def", "stop"),
    ]
    texts = ["", ""]
    for chunk in complete(client, n=2, stop=["g"], stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["def", "def"]


def test_logprobs_have_both_shapes(client):
    (token, *_) = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert (token.token, token.bytes) == ("d", [100])
    assert math.isclose(token.logprob, math.log(1 / 2), rel_tol=1e-6)
    assert [top.token for top in token.top_logprobs] == ["d", "e"]
    logprobs = complete(client, logprobs=1, echo=True).choices[0].logprobs
    assert logprobs.tokens == list("abcdefg")
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset == list(range(7))
    streamed = []
    for chunk in chat(client, logprobs=True, stream=True):
        streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert [t.token for t in streamed] == list("defg")


def test_a_stream_that_is_left_early_ends_well(client):
    with complete(client, max_tokens=50, stream=True) as stream:
        assert next(iter(stream)).choices[0].text == "d"
    assert complete(client).choices[0].text == "defg"


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"n": 99}, openai.BadRequestError, "invalid_value"),
        ({"model": "gpt-5"}, openai.NotFoundError, "model_not_found"),
        ({"prompt": "a" * 99}, openai.BadRequestError, "context_length_exceeded"),
        ({"suffix": "x"}, openai.BadRequestError, "unsupported_parameter"),
        ({"extra_body": {"mirostat": 1}}, openai.BadRequestError, "unknown_parameter"),
    ],
)
def test_errors_are_the_client_s_own(client, fields, kind, code):
    asked = {"model": "fake", "prompt": "abc"} | fields
    with pytest.raises(kind) as caught:
        client.completions.create(**asked)
    assert caught.value.code == code


def test_a_wrong_key_is_an_authentication_error(connect):
    with pytest.raises(openai.AuthenticationError):
        connect(key="wrong", api_key="right").models.list()
    assert connect(key="right", api_key="right").models.list().data[0].id == "fake"


def test_sessions_are_an_extra_field(client):
    id = client.post("/../jitllm/sessions", body={}, cast_to=dict)["id"]
    for text in ("defg", "bcde"):
        prompt = "abc" if text == "defg" else "a"
        reply = complete(client, prompt=prompt, extra_body={"jitllm_session": id})
        assert reply.choices[0].text == text
    assert reply.usage.prompt_tokens_details.cached_tokens == 6
