"""`jitllm run`: one text, streamed, with what it cost on stderr."""

import json as json_module
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes, UseAppendAction

from jitllm.cli import report
from jitllm.cli.options import EngineOptions, Words
from jitllm.cli.terminal import say, text_or_stdin
from jitllm.errors import UsageError
from jitllm.sampling import SamplingParams

if TYPE_CHECKING:
    from jitllm.engine import Engine
    from jitllm.session import Generation

_DEFAULT_SAMPLING = SamplingParams()
_DEFAULT_ENGINE = EngineOptions()


def run(
    model: str,
    prompt: Words = (),
    /,
    *,
    chat: bool = False,
    system: str | None = None,
    stop: UseAppendAction[tuple[str, ...]] = (),
    json: bool = False,
    sampling: OmitArgPrefixes[SamplingParams] = _DEFAULT_SAMPLING,
    engine: OmitArgPrefixes[EngineOptions] = _DEFAULT_ENGINE,
) -> None:
    """Go on from a text, or answer it with -chat; say what the memory budget cost.

    Text streams to stdout as it is made; what the run cost goes to stderr.

    Args:
        model: A container (.jlm), a GGUF (converted once into the cache) or a catalog name.
        prompt: The text; `-` or none reads stdin.
        chat: Send the text through the model's chat template as a question.
        system: System message, with -chat.
        stop: End the reply before this text; may be given several times.
        json: Print one JSON object with the text and every figure instead of the text.
    """
    if system is not None and not chat:
        raise UsageError("-system is part of a conversation; add -chat")
    text = text_or_stdin(prompt)
    with engine.open(model) as opened:
        memory = opened.memory_report()
        for line in report.lines_before(memory):
            say(line)
        shown = "" if chat else text
        with closing(_begin(opened, text, chat, system, stop, sampling)) as reply:
            if json:
                pieces = "".join(reply)
                facts = report.as_object(memory, reply.report, shown + pieces)
                print(json_module.dumps(facts, ensure_ascii=False))
            else:
                _stream(shown, reply)
            for line in report.lines_after(reply.report):
                say(line)


def _begin(
    engine: "Engine",
    text: str,
    chat: bool,
    system: str | None,
    stop: tuple[str, ...],
    sampling: SamplingParams,
) -> "Generation":
    options = vars(sampling) | {"stop": stop}
    if not chat:
        return engine.generate(text, **options)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return engine.chat([*messages, {"role": "user", "content": text}], **options)


def _stream(shown: str, reply: "Generation") -> None:
    """Prompt and reply to stdout, each piece at once; a line always ends complete.

    The prompt comes with the first piece: where there cannot be one, nothing is printed.
    """
    pieces = iter(reply)
    first = next(pieces, "")
    try:
        print(shown + first, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
