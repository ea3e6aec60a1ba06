"""One spelling for every command line.

A user may write a flag with one dash or two, with `=` or a space, with `-` or `_` between its
words, before or after the arguments. `normalise` reads the flags of a command from the signature
of its function, checks each value, and returns the one spelling that tyro parses:
`command --flag=value ... -- argument ...`.
"""

import inspect
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from jitllm.errors import UsageError

# A dash, then a word: `-5` and `- a list` are arguments, `-temp` and `--top_k=5` are flags.
_FLAG = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_PLAIN = {int: "a whole number", float: "a number"}
# Flags of tyro's own, and what follows each.
_COMPLETION = {"--tyro-print-completion": "SHELL", "--tyro-write-completion": "SHELL FILE"}
_SHELLS = ("bash", "zsh", "fish")
HELP = "--help"


@dataclass(frozen=True)
class Flag:
    """One flag of a command: `kind` is bool, int, float, str or, for choices, a tuple of them."""

    name: str
    kind: Any
    required: bool = False

    def check(self, shown: str, value: str) -> str:
        """`value` itself; raises `UsageError` where the flag, `shown` as typed, cannot take it."""
        if isinstance(self.kind, tuple) and value not in self.kind:
            raise UsageError(f"{shown} has to be {' or '.join(self.kind)}, but is {value!r}")
        if self.kind in _PLAIN:
            try:
                self.kind(value)
            except ValueError:
                raise UsageError(
                    f"{shown} has to be {_PLAIN[self.kind]}, but is {value!r}"
                ) from None
        return value


@dataclass(frozen=True)
class Grammar:
    """What a command accepts: its flags by name, its arguments in order and how many of them.
    An argument is a flag without a dash: its name and kind are checked alike."""

    command: str
    see: str
    flags: Mapping[str, Flag]
    arguments: tuple[Flag, ...]
    n_required: int
    n_allowed: float


def grammar_of(prog: str, command: str, function: Callable[..., Any]) -> Grammar:
    """The grammar that the signature of `function` declares.

    Positional-only parameters are arguments (a tuple takes any number of them), keyword-only ones
    are flags, and a dataclass stands for its fields.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    flags = _flags({p.name: hints[p.name] for p in keyword})
    required = {p.name for p in keyword if p.default is p.empty}
    return Grammar(
        command=command,
        see=f"see {prog} {command} --help",
        flags={f.name: replace(f, required=f.name in required) for f in flags},
        arguments=tuple(Flag(p.name.upper(), _plain_type(hints[p.name])) for p in positional),
        n_required=sum(p.default is p.empty for p in positional),
        n_allowed=float("inf") if _takes_many(positional, hints) else len(positional),
    )


def normalise(
    prog: str, argv: Sequence[str], commands: Mapping[str, Callable[..., Any]]
) -> list[str]:
    """`argv` (without the program's name) in the spelling that tyro parses.

    Raises `UsageError` for an unknown command or flag, naming the nearest known one, for a value
    that is missing or of the wrong kind, and for too few or too many arguments.
    """
    if not argv or argv[0] in ("-h", "-help", HELP):
        return [HELP]
    command, *rest = argv
    if command in _COMPLETION:
        return _check_completion(command, rest)
    if command.startswith("-"):
        raise UsageError(f"the command comes first, then {command}; see {prog} --help")
    if command not in commands:
        known = f"the commands are {', '.join(commands)}"
        raise UsageError(f"unknown command {command!r}{suggest(command, commands, known)}")
    return _normalise_rest(rest, grammar_of(prog, command, commands[command]))


def _check_completion(flag: str, rest: list[str]) -> list[str]:
    if len(rest) != len(_COMPLETION[flag].split()) or rest[0] not in _SHELLS:
        raise UsageError(f"write {flag} {_COMPLETION[flag]}, SHELL being {', '.join(_SHELLS)}")
    return [flag, *rest]


def _normalise_rest(rest: list[str], grammar: Grammar) -> list[str]:
    options: list[str] = []
    arguments: list[str] = []
    words = deque(rest)
    while words:
        word = words.popleft()
        match = _FLAG.fullmatch(word)
        if word == "--":
            arguments += words
            break
        if match is None:
            arguments.append(word)
        elif match[1] in ("h", "help"):
            return [grammar.command, HELP]
        else:
            options.append(_option(word, match[1], match[2], words, grammar))
    _check_complete(options, arguments, grammar)
    return [grammar.command, *options, "--", *arguments]


def _option(word: str, name: str, value: str | None, words: deque[str], grammar: Grammar) -> str:
    """The flag `name`, typed as `word`, with its value, which may be the first of `words`."""
    shown = word.partition("=")[0]
    flag = grammar.flags.get(name.replace("_", "-"))
    if flag is None:
        hint = f"text that begins with a dash goes after --; {grammar.see}"
        nearest = suggest(name, grammar.flags, hint, dashes=shown[: -len(name)])
        raise UsageError(f"{grammar.command} has no flag {shown}{nearest}")
    if flag.kind is bool:
        if value is not None:
            raise UsageError(f"{shown} takes no value, but is given {value!r}")
        return f"--{flag.name}"
    if value is None:
        value = _next_value(shown, words, grammar)
    return f"--{flag.name}={flag.check(shown, value)}"


def _next_value(shown: str, words: deque[str], grammar: Grammar) -> str:
    if not words:
        raise UsageError(f"{shown} needs a value; {grammar.see}")
    match = _FLAG.fullmatch(words[0])
    if words[0] == "--" or (match and match[1].replace("_", "-") in grammar.flags):
        raise UsageError(
            f"{shown} needs a value, but {words[0]} follows; write {shown}={words[0]} if that is it"
        )
    return words.popleft()


def _check_complete(options: list[str], arguments: list[str], grammar: Grammar) -> None:
    names = [argument.name for argument in grammar.arguments]
    given = {option.partition("=")[0] for option in options}
    needed = [f.name for f in grammar.flags.values() if f.required]
    missing = [*names[len(arguments) : grammar.n_required]]
    missing += [f"-{name}" for name in needed if f"--{name}" not in given]
    if missing:
        raise UsageError(f"{grammar.command} needs {' and '.join(missing)}; {grammar.see}")
    if len(arguments) > grammar.n_allowed:
        takes = " and ".join(names) or "no arguments"
        raise UsageError(
            f"{grammar.command} takes {takes}, but {arguments[len(names)]!r} follows; {grammar.see}"
        )
    for argument, value in zip(grammar.arguments, arguments, strict=False):
        argument.check(argument.name, value)


def suggest(name: str, known: Iterable[str], otherwise: str, dashes: str = "") -> str:
    """The end of a sentence about an unknown `name`: the nearest known one, else `otherwise`."""
    import difflib

    near = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
    return f"; did you mean {dashes}{near[0]}?" if near else f"; {otherwise}"


def _flags(hints: Mapping[str, Any]) -> list[Flag]:
    flags: list[Flag] = []
    for name, hint in hints.items():
        plain = _plain_type(hint)
        if is_dataclass(plain):
            inner = get_type_hints(plain, include_extras=True)
            flags += _flags({field.name: inner[field.name] for field in fields(plain)})
        else:
            flags.append(Flag(name.replace("_", "-"), plain))
    return flags


def _plain_type(hint: Any) -> Any:
    """`int` of `int | None`, choices of a `Literal`, the first part of an `Annotated`, and `str`
    where a constructor of its own (a size) or a repeated flag takes the text."""
    if get_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        return str if any(hasattr(e, "instance_from_str") for e in extras) else _plain_type(inner)
    if get_origin(hint) in (Union, types.UnionType):
        return _plain_type(next(a for a in get_args(hint) if a is not type(None)))
    if get_origin(hint) is Literal:
        return get_args(hint)
    return str if get_origin(hint) is tuple else hint


def _takes_many(positional: list[inspect.Parameter], hints: Mapping[str, Any]) -> bool:
    return any("tuple[" in str(hints[p.name]) for p in positional)
