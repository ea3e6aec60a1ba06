"""`jitllm chat`: a conversation in the terminal, its history kept in the KV cache."""

import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes, UseAppendAction

from jitllm.cli import report
from jitllm.cli.argv import suggest
from jitllm.cli.options import EngineOptions
from jitllm.cli.terminal import say
from jitllm.errors import JitllmError, UsageError
from jitllm.sampling import SamplingParams
from jitllm.units import parse_size

if TYPE_CHECKING:
    from jitllm.engine import Engine
    from jitllm.session import Generation

_DEFAULT_SAMPLING = SamplingParams()
_DEFAULT_ENGINE = EngineOptions()
_INVITATION = "/help lists the commands; ctrl-C stops a reply, ctrl-D leaves"


def chat(
    model: str,
    /,
    *,
    system: str | None = None,
    stop: UseAppendAction[tuple[str, ...]] = (),
    sampling: OmitArgPrefixes[SamplingParams] = _DEFAULT_SAMPLING,
    engine: OmitArgPrefixes[EngineOptions] = _DEFAULT_ENGINE,
) -> None:
    """Talk with a model in the terminal; earlier turns stay in the KV cache.

    A line is a message, except:
      /reset        forgets the conversation
      /budget SIZE  changes the memory budget at once
      /stats        shows memory and what the last reply cost
      /help         lists these

    ctrl-C stops a reply, ctrl-D leaves. Replies go to stdout, all else to stderr.

    Args:
        model: A container (.jlm), a GGUF (converted once into the cache) or a catalog name.
        system: System message.
        stop: End a reply before this text; may be given several times.
    """
    with engine.open(model) as opened:
        opened.render([{"role": "user", "content": "?"}])  # a model that cannot chat is refused now
        for line in report.lines_before(opened.memory_report()):
            say(line)
        say(_INVITATION)
        Conversation(opened, sampling, system, stop).run(_lines())


class Conversation:
    """Reads lines, answers them, obeys the commands that begin with a slash."""

    def __init__(
        self, engine: "Engine", params: SamplingParams, system: str | None, stop: tuple[str, ...]
    ) -> None:
        self.engine, self.session = engine, engine.session()
        self.params, self.system, self.stop = params, system, stop
        self.last_reply: list[str] = []
        self.commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/reset": (self._reset, "forget the conversation"),
            "/budget": (self._budget, "SIZE: change the memory budget, e.g. /budget 1.5G"),
            "/stats": (self._stats, "memory, and what the last reply cost"),
            "/help": (self._help, "this list"),
        }

    def run(self, lines: Iterator[str]) -> None:
        """Until `lines` ends. A failure is said, and the conversation goes on."""
        for line in lines:
            try:
                if line.startswith("/"):
                    self._obey(line)
                elif line.strip():
                    self._answer(line)
            except JitllmError as error:
                say(f"jitllm: {error.typed}")

    def _answer(self, text: str) -> None:
        turn = self.session.chat(text, self.params, system=self.system, stop=self.stop)
        with closing(turn) as reply:
            if _print_until_ctrl_c(reply):
                say("stopped")
        self.last_reply = report.lines_after(reply.report)

    def _obey(self, line: str) -> None:
        name, _, argument = line.strip().partition(" ")
        if name not in self.commands:
            hint = suggest(name, self.commands, "/help lists the commands")
            raise UsageError(f"there is no command {name}{hint}")
        self.commands[name][0](argument.strip())

    def _reset(self, _: str) -> None:
        self.session.reset()
        say("the conversation starts anew")

    def _budget(self, size: str) -> None:
        self.engine.set_budget(parse_size(size))
        self._say_memory()

    def _stats(self, _: str) -> None:
        self._say_memory()
        for line in [*report.lines_of_ledger(self.engine.stats()), *self.last_reply]:
            say(line)

    def _help(self, _: str) -> None:
        for name, (_, what) in self.commands.items():
            say(f"{name:8} {what}")

    def _say_memory(self) -> None:
        for line in report.lines_before(self.engine.memory_report()):
            say(line)


def _lines() -> Iterator[str]:
    """Lines of stdin without their ends. At a terminal: with line editing and a prompt, and ctrl-C
    drops the line."""
    if not sys.stdin.isatty():
        for raw in sys.stdin.buffer:
            yield raw.decode("utf-8", "replace").rstrip("\r\n")
        return
    import readline  # noqa: F401  (input() edits lines once it is imported)

    while True:
        try:
            yield input("> ")
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("")


def _print_until_ctrl_c(reply: "Generation") -> bool:
    """The reply to stdout, as it is made; whether ctrl-C ended it."""
    stopped = False
    with _noting_ctrl_c() as pressed:
        for piece in reply:
            print(piece, end="", flush=True)
            if pressed():
                stopped = True
                break
    print(flush=True)
    return stopped


@contextmanager
def _noting_ctrl_c() -> Iterator[Callable[[], bool]]:
    """ctrl-C only notes itself, for the step in flight to end whole; a second one interrupts."""
    count = 0

    def note(signum: int, frame: types.FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)
