"""What a request for text may say: two tables of fields, read into two frozen dataclasses. Pure.

`null` means absent, everywhere. A field that is known and cannot be had is refused by name, unless
its value asks for what happens anyway (`tools: []`); a field that nobody knows is refused too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jitllm.sampling import SamplingParams
from jitllm.server.errors import ApiError, bad_value, unsupported
from jitllm.server.fields import (
    Kind,
    boolean,
    fields_of,
    integer,
    items,
    number,
    read_object,
    shown,
    text,
)

MAX_BODY_BYTES = 4 << 20
MAX_DEPTH = 16
"""Of lists and objects in a body."""
MAX_CHOICES = 16
MAX_PROMPTS = 32
MAX_ROWS = 64
"""Replies to one request: prompts times choices."""
MAX_PROMPT_IDS = 1 << 20
MAX_STOPS = 16
MAX_MESSAGES = 2048
MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's own default for `/v1/completions`; a chat reply ends by itself or with the context."""

_STOP_TEXT = text(256, min_chars=1)
_MANY_TOKENS = 2**31 - 1
_ROLES = ("system", "developer", "user", "assistant")

Prompt = str | tuple[int, ...]


# Kinds of value that only these requests have


def only(*neutral: Any, why: str) -> Kind:
    """A field that cannot be had: it may only say one of `neutral`, which happens anyway."""
    same = {json.dumps(value, sort_keys=True) for value in neutral}

    def read(value: Any, name: str) -> Any:
        if json.dumps(value, sort_keys=True) not in same:
            raise unsupported(name, f"{name} is not supported: {why}")
        return value

    return Kind(read, {"enum": list(neutral)} if neutral else {"not": {}})


def _list(value: Any, name: str, what: str) -> list[Any]:
    """`value`, which is no text and so has to be a list."""
    if not isinstance(value, list):
        raise bad_value(name, f"{name} has to be {what}, but is {shown(value)}")
    return value


def _read_stop(value: Any, name: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_STOP_TEXT.read(value, name),)
    return _STOPS.read(_list(value, name, "a text or a list of texts"), name)


_STOPS = items(_STOP_TEXT, MAX_STOPS)
_PROMPT_TEXT = text(MAX_BODY_BYTES)
_PROMPT_IDS = items(integer(0, _MANY_TOKENS), MAX_PROMPT_IDS, min_items=1)
_PROMPT_LIST = items(_PROMPT_TEXT, MAX_PROMPTS, min_items=1)
_PROMPT_IDS_LIST = items(_PROMPT_IDS, MAX_PROMPTS, min_items=1)


def _read_prompts(value: Any, name: str) -> tuple[Prompt, ...]:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return (_PROMPT_TEXT.read(value, name),)
    first = next(iter(_list(value, name, "a text, token ids, or a list of either")), "")
    if isinstance(first, list):
        return _PROMPT_IDS_LIST.read(value, name)
    if isinstance(first, int):
        return (_PROMPT_IDS.read(value, name),)
    return _PROMPT_LIST.read(value, name)


def _read_content(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(_PARTS.read(_list(value, name, "a text or a list of parts"), name))


def _read_part(value: Any, name: str) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise unsupported(name, f"{name} is of type {shown(kind)}; this model reads text alone")
    return _TEXT_PART.read(value, name)["text"]


_TEXT_PART = fields_of(
    {"type": only("text", why="a part is of type text"), "text": text(MAX_BODY_BYTES)},
    required=("type", "text"),
)
_PARTS = items(Kind(_read_part, _TEXT_PART.schema), 256, min_items=1)
_NO_TOOLS = "this server calls no tools"


def _read_role(value: Any, name: str) -> str:
    if value in ("tool", "function"):
        raise unsupported(name, f"{name} is {shown(value)}, but {_NO_TOOLS}")
    if not isinstance(value, str) or value not in _ROLES:
        raise bad_value(name, f"{name} has to be one of {', '.join(_ROLES)}, but is {shown(value)}")
    return value


_MESSAGE = fields_of(
    {
        "role": Kind(_read_role, {"enum": list(_ROLES)}),
        "content": Kind(_read_content, {"anyOf": [_PROMPT_TEXT.schema, _PARTS.schema]}),
        "name": text(64),
        "refusal": only(why="a message has content"),
        "annotations": only([], why="a message is text alone"),
        "audio": only(why="a message is text alone"),
        "tool_calls": only([], why=_NO_TOOLS),
        "function_call": only(why=_NO_TOOLS),
    },
    required=("role", "content"),
)

# The tables

_COMMON: dict[str, Kind] = {
    "model": text(256),
    "max_tokens": integer(0, _MANY_TOKENS),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": integer(0, _MANY_TOKENS),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.001, 10),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "seed": integer(-(2**63), 2**63 - 1),
    "n": integer(1, MAX_CHOICES),
    "stop": Kind(_read_stop, {"anyOf": [_STOP_TEXT.schema, _STOPS.schema]}),
    "stream": boolean(),
    "stream_options": fields_of(
        {"include_usage": boolean(), "include_obfuscation": only(False, why="nothing is padded")}
    ),
    "ignore_eos": boolean(),
    "jitllm_session": text(64, min_chars=1),
    "user": text(512),
    "logit_bias": only({}, why="no token can be biased"),
    "store": only(False, why="nothing is stored"),
    "metadata": only({}, why="nothing is stored"),
    "service_tier": only("auto", "default", why="there is one tier"),
}

COMPLETION: dict[str, Kind] = _COMMON | {
    "prompt": Kind(
        _read_prompts,
        {
            "anyOf": [
                _PROMPT_TEXT.schema,
                _PROMPT_LIST.schema,
                _PROMPT_IDS.schema,
                _PROMPT_IDS_LIST.schema,
            ]
        },
    ),
    "echo": boolean(),
    "logprobs": integer(0, MAX_TOP_LOGPROBS),
    "best_of": integer(1, MAX_CHOICES),
    "suffix": only("", why="text is only ever added at the end"),
}
"""Fields of `POST /v1/completions`."""

CHAT: dict[str, Kind] = _COMMON | {
    "messages": items(_MESSAGE, MAX_MESSAGES, min_items=1),
    "max_completion_tokens": integer(0, _MANY_TOKENS),
    "logprobs": boolean(),
    "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
    "response_format": only({"type": "text"}, why="replies are text, held to no grammar"),
    "modalities": only(["text"], why="replies are text"),
    "audio": only(why="replies are text"),
    "prediction": only(why="nothing is predicted for the model"),
    "reasoning_effort": only("none", why="the model reasons as its template has it"),
    "verbosity": only(why="the model is as verbose as it is"),
    "web_search_options": only(why=_NO_TOOLS),
    "tools": only([], why=_NO_TOOLS),
    "tool_choice": only("none", "auto", why=_NO_TOOLS),
    "parallel_tool_calls": only(False, why=_NO_TOOLS),
    "functions": only([], why=_NO_TOOLS),
    "function_call": only("none", "auto", why=_NO_TOOLS),
}
"""Fields of `POST /v1/chat/completions`."""


# What they are read into


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """What both kinds of request have."""

    model: str | None
    params: SamplingParams
    max_tokens: int | None
    """None: to the end of the reply or of the context."""
    n_choices: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    n_logprobs: int | None
    """Alternatives to report for each token; None: no logprobs at all."""
    ignore_eos: bool
    session: str | None


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(TextRequest):
    """`POST /v1/completions`."""

    prompts: tuple[Prompt, ...]
    echo: bool


@dataclass(frozen=True, kw_only=True)
class ChatRequest(TextRequest):
    """`POST /v1/chat/completions`; a `developer` speaks as `system`."""

    messages: tuple[dict[str, str], ...]


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """The request that `body` makes. ApiError names the field that is wrong."""
    given = read_object(body, COMPLETION, required=("prompt",))
    n_choices, prompts = given.get("n", 1), given["prompt"]
    if given.get("best_of", n_choices) != n_choices:
        raise unsupported("best_of", "best_of is not supported: every choice is returned")
    if n_choices * len(prompts) > MAX_ROWS:
        raise bad_value(
            "n",
            f"{len(prompts)} prompts with {n_choices} choices each are more than the "
            f"{MAX_ROWS} replies that one request may have",
        )
    common = _common(given, given.get("max_tokens", DEFAULT_COMPLETION_TOKENS))
    _check_session(common, n_replies=n_choices * len(prompts))
    return CompletionRequest(
        **common,
        n_logprobs=given.get("logprobs"),
        prompts=prompts,
        echo=given.get("echo", False),
    )


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """The request that `body` makes. ApiError names the field that is wrong."""
    given = read_object(body, CHAT, required=("messages",))
    limits = {given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(limits) > 1:
        raise bad_value("max_tokens", "max_tokens and max_completion_tokens differ; send one")
    if "top_logprobs" in given and not given.get("logprobs"):
        raise bad_value("top_logprobs", "top_logprobs needs logprobs to be true")
    common = _common(given, next(iter(limits), None))
    _check_session(common, n_replies=common["n_choices"])
    return ChatRequest(
        **common,
        n_logprobs=given.get("top_logprobs", 0) if given.get("logprobs") else None,
        messages=tuple(map(_message, given["messages"])),
    )


def _message(given: dict[str, Any]) -> dict[str, str]:
    role = "system" if given["role"] == "developer" else given["role"]
    return {key: given[key] for key in ("content", "name") if key in given} | {"role": role}


def _common(given: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    stream = given.get("stream", False)
    if "stream_options" in given and not stream:
        raise bad_value("stream_options", "stream_options needs stream to be true")
    return {
        "model": given.get("model"),
        "params": _params(given),
        "max_tokens": max_tokens,
        "n_choices": given.get("n", 1),
        "stop": given.get("stop", ()),
        "stream": stream,
        "include_usage": given.get("stream_options", {}).get("include_usage", False),
        "ignore_eos": given.get("ignore_eos", False),
        "session": given.get("jitllm_session"),
    }


def _params(given: dict[str, Any]) -> SamplingParams:
    """OpenAI's defaults, not the command line's: nothing is filtered unless asked for."""
    return SamplingParams(
        temp=given.get("temperature", 1.0),
        top_p=given.get("top_p", 1.0),
        top_k=given.get("top_k", 0),
        min_p=given.get("min_p", 0.0),
        repeat_penalty=given.get("repetition_penalty", 1.0),
        presence_penalty=given.get("presence_penalty", 0.0),
        frequency_penalty=given.get("frequency_penalty", 0.0),
        seed=given.get("seed"),
    )


def _check_session(common: dict[str, Any], n_replies: int) -> None:
    if common["session"] is not None and n_replies != 1:
        raise bad_value("jitllm_session", "a session takes one prompt with one choice at a time")


# Bodies


def read_body(data: bytes) -> dict[str, Any]:
    """The JSON object that a body holds; no body is an empty one. ApiError where it is none, or
    nests too deep."""
    try:
        body = json.loads(data or b"{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = "it nests too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {why}"[:200], code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(
            400, f"the body has to be an object, but is {shown(body)}", code="invalid_json"
        )
    _check_depth(body)
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(body: Any) -> None:
    level, depth = [body], 0
    while level:
        if depth > MAX_DEPTH:
            raise ApiError(400, f"the body nests more than {MAX_DEPTH} deep", code="invalid_json")
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
        depth += 1
