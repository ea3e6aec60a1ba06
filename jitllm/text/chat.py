"""Messages -> ids, through the chat template that came with the model.

The template's own text is parsed with control tokens, what the messages say is not: a user who
writes `<|im_end|>` has written ten characters. To keep the two apart through whatever the template
does with a message (trim it, cut it, join it), each character that control tokens cannot do without
is exchanged, in the messages, for a private-use character that stands nowhere else; it is exchanged
back when the control tokens of the rendered text have been found.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2

from jitllm.errors import ChatTemplateError, UnsupportedError, UsageError
from jitllm.text.sandbox import Refusal, TemplateEnvironment, limits
from jitllm.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Who may speak. Templates build control tokens out of roles, so there are no others."""

MAX_TEMPLATE_CHARS = 1 << 18
MAX_DEPTH = 32
"""Of lists and objects inside a message."""

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class ChatTemplate:
    """A Jinja template, compiled. ChatTemplateError where it is none, or wants what it may not."""

    def __init__(self, text: str):
        self.text = text
        self._template = _compile(text)

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "ChatTemplate":
        """The usual template of the model whose container has this `metadata`."""
        text = metadata["chat_templates"].get("default")
        if text is None:
            raise UnsupportedError(
                f"{metadata['source']['name']} has no chat template; "
                "convert it again with --chat-template FILE"
            )
        return cls(text)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of `messages`, each {"role": ..., "content": ...}, up to where the reply begins.

        With one BOS in front where the model wants one, whether or not the template writes it;
        otherwise with what the template writes. Raises ChatTemplateError with the template's own
        words where it refuses the messages, UsageError where they are no messages.
        """
        messages = _checked(messages)
        shield = _shield(tokenizer.shield_chars, self.text, messages)
        text = self._render(tokenizer, _translated(messages, shield), add_generation_prompt)
        unshield = {stand_in: char for char, stand_in in shield.items()}
        ids = tokenizer.encode(text, add_bos=False, parse_special=True, unshield=unshield)
        if tokenizer.add_bos and ids[:1] != [tokenizer.bos_id]:
            return [tokenizer.bos_id, *ids]
        return ids

    def _render(self, tokenizer: Tokenizer, messages: Any, add_generation_prompt: bool) -> str:
        special = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        try:
            with limits(messages):
                return self._template.render(
                    {k: "" if i is None else tokenizer.token_text(i) for k, i in special.items()},
                    messages=messages,
                    add_generation_prompt=add_generation_prompt,
                )
        except Refusal as error:
            raise ChatTemplateError(_printable(str(error))) from None
        # A template can fail in as many ways as Python can.
        except Exception as error:
            raise ChatTemplateError(
                f"the chat template fails on these messages: {_printable(str(error))}"
            ) from None


@lru_cache(maxsize=8)
def _compile(text: str) -> jinja2.Template:
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(
            f"the chat template has {len(text)} characters; at most {MAX_TEMPLATE_CHARS} are read"
        )
    try:
        return TemplateEnvironment().from_string(text)
    # Python's compiler has its own ways to give up on a deeply nested text.
    except Exception as error:
        raise ChatTemplateError(
            f"the chat template cannot be used: {_printable(str(error))}; "
            "convert the model again with --chat-template FILE"
        ) from None


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str) or not messages:
        raise UsageError("there are no messages; give a list of {'role': ..., 'content': ...}")
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise UsageError(f"message {i} has the role {role!r} (allowed: {', '.join(ROLES)})")
    return [dict(message) for message in messages]


def _shield(chars: str, template: str, messages: list[dict[str, Any]]) -> dict[int, int]:
    """Each of `chars` -> a private-use character that is in none of the texts."""
    taken = set(template)
    _collect(messages, taken)
    free = (code for code in _PRIVATE_USE if chr(code) not in taken)
    try:
        return {ord(char): next(free) for char in chars}
    except StopIteration:
        raise UsageError("the messages use up Unicode's private characters") from None


def _collect(value: Any, found: set[str], depth: int = 0) -> None:
    """Adds the characters of all texts in `value` to `found`; checks that it is JSON."""
    if depth > MAX_DEPTH:
        raise UsageError(f"a message is nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        found.update(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(key, found, depth + 1)
            _collect(item, found, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found, depth + 1)
    elif not (value is None or isinstance(value, int | float)):
        raise UsageError(f"a message holds a {type(value).__name__}; JSON values are allowed")


def _translated(value: Any, table: dict[int, int]) -> Any:
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_translated(k, table): _translated(v, table) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_translated(item, table) for item in value]
    return value


def _printable(text: str) -> str:
    """A template's words may go to a terminal or a log: one short line, nothing but text."""
    text = " ".join(text.split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)[
        :500
    ]
