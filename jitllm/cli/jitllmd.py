"""The `jitllmd` command: a server for models, and verbs that ask one."""

import json as json_module
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import OmitArgPrefixes, UseAppendAction

from jitllm.cli import served
from jitllm.cli.app import Command, run_program
from jitllm.cli.options import Size, Words
from jitllm.cli.terminal import say, text_or_stdin
from jitllm.errors import UsageError
from jitllm.sampling import SamplingParams
from jitllm.server.settings import DEFAULT_ADDR, Settings

if TYPE_CHECKING:
    from jitllm.server.client import Client

ABOUT = "Serve language models held to a memory budget, and change what they take while they run."


@dataclass(frozen=True, kw_only=True)
class ServeFlags(Settings):
    """`Settings`, with sizes as they are typed."""

    load: UseAppendAction[tuple[str, ...]] = ()
    """File in that folder to load at the start; may be given several times."""
    id: UseAppendAction[tuple[str, ...]] = ()
    """Name of the model in requests, one for each -load; unset: the file's without its ending."""
    maxmem: Size | None = None
    """Memory for weights; unset: 80 % of what is free. The rest is read from disk as needed."""
    process_limit: Size | None = None
    """All that a model's ledger counts together, KV and prefix cache too; unset: no limit."""
    prefix_cache: Size | None = None
    """Memory for KV of earlier prompts, per model; 0: none; unset: one session's KV, or what the
    process limit leaves."""
    allow_host: UseAppendAction[tuple[str, ...]] = ()
    """Further name under which the server may be addressed; may be given several times."""
    cors_origin: UseAppendAction[tuple[str, ...]] = ()
    """Origin whose pages may send requests, as https://app.example; may be given several times."""


_SAME = """
    devices gpu_layers id kv max_seq maxmem min_p model placement presence_penalty process_limit
    frequency_penalty seed stop to top_k top_p
"""
_TYPED = {name: name for name in _SAME.split()} | {
    "file": "load",
    "jitllm_session": "session",
    "max_tokens": "n",
    "repetition_penalty": "repeat_penalty",
    "temperature": "temp",
}
"""Fields of requests, and the flags that they come from."""


@dataclass(frozen=True, kw_only=True)
class ClientFlags:
    """Which server to ask, and how to show what it says."""

    addr: str = DEFAULT_ADDR
    """HOST:PORT of the server."""
    api_key: str | None = None
    """Key for the server; unset: JITLLMD_ADMIN_KEY or JITLLMD_API_KEY, or none."""
    json: bool = False
    """Print the server's own JSON."""

    def client(self) -> "Client":
        """The server."""
        from jitllm.server.client import Client

        found = (os.environ.get(f"JITLLMD_{kind}_KEY") for kind in ("ADMIN", "API"))
        return Client(self.addr, self.api_key or next(filter(None, found), None), _TYPED)

    def show(self, content: dict[str, Any], lines: Sequence[str]) -> None:
        """`content` as JSON, or `lines` for a person."""
        print(json_module.dumps(content, ensure_ascii=False) if self.json else "\n".join(lines))


_SERVE, _CLIENT, _SAMPLING = ServeFlags(), ClientFlags(), SamplingParams()


def serve(*, settings: OmitArgPrefixes[ServeFlags] = _SERVE) -> None:
    """Answer OpenAI-style requests until SIGTERM, which lets replies under way finish."""
    from jitllm.server.serve import serve as run_server

    keys = {
        name: getattr(settings, name) or os.environ.get(f"JITLLMD_{name.upper()}")
        for name in ("api_key", "admin_key")
    }
    run_server(replace(settings, **keys), say)


def devices(*, server: OmitArgPrefixes[ClientFlags] = _CLIENT) -> None:
    """Show the memory that can be spent: the host's, and that of devices which have their own."""
    found = server.client().get("/jitllm/devices")
    server.show(found, served.device_lines(found["data"]))


def models(
    *,
    load: str | None = None,
    id: str | None = None,
    devices: str | None = None,
    placement: str | None = None,
    maxmem: Size | None = None,
    gpu_layers: int | None = None,
    max_seq: int | None = None,
    kv: Literal["f16", "f32"] | None = None,
    process_limit: Size | None = None,
    unload: str | None = None,
    server: OmitArgPrefixes[ClientFlags] = _CLIENT,
) -> None:
    """Show the models of a server, load another or put one away.

    Args:
        load: File to load, from the server's folder; the flags down to -process-limit are for it.
        id: Name of the model in requests; unset: the file's without its ending.
        devices: auto, all, cpu, gpu[:N] or PLATFORM[:N], comma separated.
        placement: SEL=WHERE,...: what goes where.
        maxmem: Memory for weights; unset: as the server was started.
        gpu_layers: How many of the last blocks go to devices unasked.
        max_seq: Room for N tokens, prompt and reply together.
        kv: Type of the cached keys and values; unset: as the server was started.
        process_limit: All that the model's ledger counts together.
        unload: Name of a model to put away.
    """
    client = server.client()
    options = {
        "id": id,
        "devices": devices,
        "placement": placement,
        "maxmem": maxmem,
        "gpu_layers": gpu_layers,
        "max_seq": max_seq,
        "kv": kv,
        "process_limit": process_limit,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if given and load is None:
        flag = next(iter(given)).replace("_", "-")
        raise UsageError(f"-{flag} is for a model to load; add -load FILE")
    if load is not None:
        client.post("/jitllm/models", {"file": load, **given})
    if unload is not None:
        client.delete(f"/jitllm/models/{_quoted(unload)}")
    found = client.get("/jitllm/models")
    server.show(found, served.model_lines(found["data"], found["files"]))


def place(
    *,
    model: str | None = None,
    session: str | None = None,
    maxmem: Size | None = None,
    move: str | None = None,
    to: str | None = None,
    placement: str | None = None,
    server: OmitArgPrefixes[ClientFlags] = _CLIENT,
) -> None:
    """Show where a model is and what its budget comes to, or change it, between two tokens.

    Args:
        model: Name of the model.
        session: A session, in place of its model: its blocks move with their KV.
        maxmem: Hold the model's weights to so many bytes from now on.
        move: FIRST:LAST, blocks to bring to where -to says.
        to: host, or a device.
        placement: SEL=WHERE,...: bring blocks to where this map has them.
    """
    if (model is None) == (session is None):
        raise UsageError("place needs either -model ID or -session ID")
    if (move is None) != (to is None):
        raise UsageError("-move FIRST:LAST and -to WHERE go together")
    if maxmem is not None and model is None:
        raise UsageError("-maxmem is a model's; write -model ID")
    if placement is not None and model is None:
        raise UsageError("-placement is a model's; write -model ID")
    client = server.client()
    what = f"models/{_quoted(model)}" if model is not None else f"sessions/{_quoted(session)}"
    applied: dict[str, Any] = {}
    if maxmem is not None:
        applied = client.put(f"/jitllm/{what}/budget", {"maxmem": maxmem})
    if placement is not None:
        client.put(f"/jitllm/{what}/placement", {"placement": placement})
    if move is not None:
        first, last = _range(move)
        client.post(f"/jitllm/{what}/placement/moves", {"first": first, "last": last, "to": to})
    found = client.get(f"/jitllm/{what}/placement")
    lines = [*served.budget_lines(found["pager"]), *served.placement_lines(found)]
    if applied:
        lines.append(served.applied_line(applied["applied"]))
        found["applied"] = applied["applied"]
    server.show(found, lines)


def sessions(
    *,
    new: bool = False,
    model: str | None = None,
    close: str | None = None,
    reset: str | None = None,
    server: OmitArgPrefixes[ClientFlags] = _CLIENT,
) -> None:
    """Show the conversations that a server remembers, open another, close or reset one.

    Args:
        new: Open a session; its id goes to stdout.
        model: Name of the model, with -new; unset: the only one.
        close: A session to put away.
        reset: A session that is to forget what was said.
    """
    if model is not None and not new:
        raise UsageError("-model is for a session to open; add -new")
    if sum((new, close is not None, reset is not None)) > 1:
        raise UsageError("-new, -close and -reset exclude each other")
    client = server.client()
    if new:
        opened = client.post("/jitllm/sessions", {} if model is None else {"model": model})
        server.show(opened, [opened["id"]])
        return
    if close is not None:
        client.delete(f"/jitllm/sessions/{_quoted(close)}")
    if reset is not None:
        client.post(f"/jitllm/sessions/{_quoted(reset)}/reset", {})
    found = client.get("/jitllm/sessions")
    server.show(found, served.session_lines(found["data"]))


def stats(*, watch: bool = False, server: OmitArgPrefixes[ClientFlags] = _CLIENT) -> None:
    """Show what a server counts: memory, pages, requests, rows.

    Args:
        watch: Show it again every second, until ctrl-C.
    """
    client = server.client()
    if not watch:
        found = client.get("/jitllm/stats")
        server.show(found, served.stats_lines(found))
        return
    for found in client.events("/jitllm/stats?watch=1"):
        server.show(found, [*served.stats_lines(found), time.strftime("at       %H:%M:%S"), ""])
        sys.stdout.flush()


def run(
    prompt: Words = (),
    /,
    *,
    model: str | None = None,
    chat: bool = False,
    system: str | None = None,
    session: str | None = None,
    stop: UseAppendAction[tuple[str, ...]] = (),
    sampling: OmitArgPrefixes[SamplingParams] = _SAMPLING,
    server: OmitArgPrefixes[ClientFlags] = _CLIENT,
) -> None:
    """Have a server go on from a text, or answer it with -chat.

    Text streams to stdout as it is made; what the reply cost goes to stderr.

    Args:
        prompt: The text; `-` or none reads stdin.
        model: Name of the model; unset: the only one.
        chat: Send the text through the model's chat template as a question.
        system: System message, with -chat.
        session: A session to go on with.
        stop: End the reply before this text; may be given several times.
    """
    if system is not None and not chat:
        raise UsageError("-system is part of a conversation; add -chat")
    text = text_or_stdin(prompt)
    path, body = _question(text, system) if chat else ("/v1/completions", {"prompt": text})
    asked = {"model": model, "jitllm_session": session, "stop": list(stop)} | _sampling(sampling)
    body |= {name: value for name, value in asked.items() if value not in (None, [])}
    if server.json:
        print(json_module.dumps(server.client().post(path, body), ensure_ascii=False))
        return
    _stream(server.client(), path, body, "" if chat else text)


def _question(text: str, system: str | None) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return "/v1/chat/completions", {"messages": [*messages, {"role": "user", "content": text}]}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """The fields of a request; without a limit a reply goes on to its end or the context's."""
    return {
        "max_tokens": params.n or 2**31 - 1,
        "temperature": params.temp,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repeat_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed,
    }


def _stream(client: "Client", path: str, body: dict[str, Any], shown: str) -> None:
    """Prompt and reply to stdout, each piece at once; of a reply that fails before the first piece
    nothing."""
    usage, cost, begun = {}, {}, False
    options = {"stream": True, "stream_options": {"include_usage": True}}
    try:
        for chunk in client.events(path, body | options):
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                print(piece if begun else shown + piece, end="", flush=True)
                begun = True
            usage, cost = chunk.get("usage") or usage, chunk.get("jitllm") or cost
    finally:
        if begun:
            print(flush=True)
    for line in served.cost_lines(usage, cost):
        say(line)


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if match is None:
        raise UsageError(f"-move {text!r} is not FIRST:LAST; write e.g. 0:3")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise UsageError(f"-move {text!r} ends before it begins; write {last}:{first}")
    return first, last


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


_HERE = f"-addr {DEFAULT_ADDR}"
COMMANDS = (
    Command(
        serve,
        f"jitllmd serve {_HERE} -models models -load stories260K.jlm -id stories -maxmem 1M",
    ),
    Command(devices, f"jitllmd devices {_HERE}"),
    Command(
        models,
        f"jitllmd models {_HERE} -load stories260K.jlm -id stories -maxmem 400K\n"
        "jitllmd models -unload stories",
    ),
    Command(
        place,
        f"jitllmd place {_HERE} -model stories -maxmem 400K\n"
        "jitllmd place -session sess-0123 -move 0:3 -to cpu:1",
    ),
    Command(sessions, f"jitllmd sessions {_HERE} -new -model stories\njitllmd sessions"),
    Command(stats, f"jitllmd stats {_HERE} -watch"),
    Command(run, f'jitllmd run {_HERE} -n 16 -temp 0 "Once upon a time"'),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jitllmd` with `argv` (by default the process's own) and return the exit code."""
    return run_program("jitllmd", ABOUT, COMMANDS, sys.argv[1:] if argv is None else argv)
