"""A program made of commands: parse, run, and end with one sentence and the right exit code.

Exit codes: 0 done, 1 a failed operation, 2 usage, 130 ctrl-C, 141 the reader of stdout went away,
143 SIGTERM.
"""

import codecs
import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tyro

from jitllm import __version__
from jitllm.cli.argv import normalise
from jitllm.cli.terminal import say
from jitllm.errors import JitllmError

INTERRUPTED, BROKEN_PIPE = 130, 141
_FLAGS_NOTE = (
    "Flags take one dash or two, `=` or a space, and stand before or after the arguments;\n"
    "`--` ends them. Sizes are numbers with K, M, G or T: 400K, 1.5G, 2GiB."
)
_CONFIG = (
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.PositionalMetavarFromFieldName,
    tyro.conf.DisallowNone,
)
_REGISTRY = tyro.constructors.ConstructorRegistry()
_UNSHOWABLE = "jitllm.unshowable"


def _show_all_the_same(error: UnicodeError) -> tuple[str | bytes, int]:
    """For what a terminal cannot show: bytes of a file's name as they are, of a text a `?`."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("replace")(error)


codecs.register_error(_UNSHOWABLE, _show_all_the_same)


@_REGISTRY.primitive_rule
def _show_none_as_unset(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Help says `(default: unset)`; nobody types None."""
    if info.type is not type(None):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="unset",
        instance_from_str=lambda _: None,
        is_instance=lambda value: value is None,
        str_from_instance=lambda _: ["unset"],
    )


class Command(NamedTuple):
    """A command: a typed function whose docstring is its help, and a line that shows its use."""

    function: Callable[..., None]
    example: str

    @property
    def name(self) -> str:
        """The function's name as it is typed."""
        return self.function.__name__.replace("_", "-")


def run_program(prog: str, about: str, commands: Sequence[Command], argv: Sequence[str]) -> int:
    """Run the command that `argv` names and return the exit code. Nothing is raised: a failure is
    one sentence on stderr, with `JITLLM_TRACEBACK=1` after its traceback."""
    _open_closed_streams()
    try:
        with contextlib.suppress(AttributeError, ValueError):
            sys.stdout.reconfigure(errors=_UNSHOWABLE)
        if list(argv) in (["-version"], ["--version"]):
            print(f"{prog} {__version__}")
            return 0
        code = _dispatch(prog, about, commands, argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _close_pipes()
        return BROKEN_PIPE
    except Exception as error:
        return _report(prog, error)


def _dispatch(prog: str, about: str, commands: Sequence[Command], argv: Sequence[str]) -> int:
    functions = {command.name: command.function for command in commands}
    words = normalise(prog, argv, functions)
    app = tyro.extras.SubcommandApp()
    for command in commands:
        # tyro shows one text in the list of commands and on the command's own page
        own_page = words[0] == command.name
        text = _page(command) if own_page else _summary(command.function)
        app.command(command.function, name=command.name, help=text)
    about = f"{about}\n\n{_examples(commands)}\n\n{_FLAGS_NOTE}"
    stream = contextlib.nullcontext() if argv else contextlib.redirect_stdout(sys.stderr)
    try:
        with stream:
            app.cli(prog=prog, description=about, args=words, config=_CONFIG, registry=_REGISTRY)
    except SystemExit as end:  # tyro ends so after help and completions
        return 2 if not argv else int(end.code or 0)
    return 0


def _report(prog: str, error: Exception) -> int:
    if os.environ.get("JITLLM_TRACEBACK"):
        traceback.print_exception(error)
    known = isinstance(error, JitllmError)
    with contextlib.suppress(BrokenPipeError):
        say(f"{prog}: {error.typed if known else _describe(error)}")
    return error.exit_code if known else 1


def _describe(error: Exception) -> str:
    """One line for an error that no part of jitllm has put into words."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return "the machine has no memory left; a smaller -maxmem or -max-seq needs less"
    text = " ".join(str(error).split())
    return f"internal error, {type(error).__name__}: {text} (JITLLM_TRACEBACK=1 shows where)"


def _open_closed_streams() -> None:
    """A standard stream that the caller closed is the null device from here on: Python has None in
    its place, and the next file to be opened would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _close_pipes() -> None:
    """Without this the interpreter complains at exit that it cannot flush."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.dup2(devnull, sys.stderr.fileno())


def _summary(function: Callable[..., None]) -> str:
    return _doc(function).partition("\n")[0]


def _page(command: Command) -> str:
    prose = _doc(command.function).partition("\nArgs:")[0].rstrip()
    lines = "\n".join(f"  {line}" for line in command.example.splitlines())
    return f"{prose}\n\nexample:\n{lines}"


def _doc(function: Callable[..., None]) -> str:
    return inspect.getdoc(function) or ""  # `python -OO` drops docstrings


def _examples(commands: Sequence[Command]) -> str:
    return "examples:\n" + "\n".join(f"  {c.example.splitlines()[0]}" for c in commands)
