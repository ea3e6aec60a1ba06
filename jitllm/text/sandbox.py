"""Jinja for templates that came with a model: they may format messages and do nothing else.

Jinja's immutable sandbox keeps a template away from Python's internals. What it lacks is a bound
on what a template may use up, so here every value has a size that is checked where values are made,
every loop and call is counted, and whatever could make much out of little (`format`, `center`, ...)
is not on the lists of what there is. A template is small and quick; these bounds are far away.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

MAX_SIZE = 1 << 22
"""Of one value: characters, plus one for each thing in it."""
MAX_STEPS = 1_000_000
"""Turns of loops and calls."""
MAX_SECONDS = 1.0
"""Of this thread's processor time."""
MAX_COUNT = 10_000
"""Of the numbers that `batch` and `slice` make things from."""
MAX_INT_BITS = 4096

_FILTERS = """
    abs batch capitalize count d default dictsort e escape first float groupby int items join last
    length list lower map max min reject rejectattr replace reverse round safe select selectattr
    slice sort string sum title trim truncate unique upper wordcount
"""
_STR_METHODS = """
    capitalize count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace
    isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition
    rsplit rstrip split splitlines startswith strip swapcase title upper
"""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(),
    float: frozenset(),
}


_TOO_LARGE = "it makes a value that is too large"


class LimitError(jinja2.TemplateError):
    """The template wants more than templates need."""


class Refusal(jinja2.TemplateError):
    """The template called `raise_exception`: it does not take these messages."""


class _Allowance:
    """What one rendering may still use up."""

    def __init__(self, size: int):
        self.size, self.total, self.steps = size, 16 * size, MAX_STEPS
        self.deadline = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        """Counts a loop's turn or a call."""
        self.steps -= 1
        if self.steps < 0 or time.thread_time() > self.deadline:
            raise LimitError("it does not come to an end")

    def check(self, size: float) -> None:
        """Before a value of this size is made."""
        if size > self.size:
            raise LimitError(_TOO_LARGE)

    def made(self, value: Any) -> Any:
        """Measures and counts `value`, new or not."""
        _size(value, self.size)
        self.total -= len(value) if isinstance(value, Sized) else 1
        self.check(0 if self.total > 0 else math.inf)
        return value


_allowance: ContextVar[_Allowance] = ContextVar("allowance")


@contextmanager
def limits(inputs: Any) -> Iterator[None]:
    """Inside, templates are held to the limits; a value may be four times `inputs` large."""
    token = _allowance.set(_Allowance(MAX_SIZE + 4 * _size(inputs)))
    try:
        yield
    finally:
        _allowance.reset(token)


def _size(value: Any, most: float = math.inf) -> int:
    """Of `value` as a tree, where shared parts count each time; LimitError above `most`."""
    total, todo = 0, [value]
    while todo:
        item = todo.pop()
        total += 1
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            todo += item
        elif isinstance(item, int):
            total += item.bit_length() // 8
        if total + len(todo) > most:
            raise LimitError(_TOO_LARGE)
    return total


def _sized(value: Any) -> Any:
    return _allowance.get().made(value)


def _concat(parts: Iterable[Any]) -> str:
    allowance, texts, size = _allowance.get(), [], 0
    for part in parts:
        text = _text(part)
        size += len(text)
        allowance.check(size)
        texts.append(text)
    return allowance.made("".join(texts))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _sized(str(_sized(value)))


# Asking for the context keeps Jinja from calling this on constants, before there are limits.
@jinja2.pass_context
def _finalize(_context: Any, value: Any) -> str:
    return _text(value)


class _Namespace(Namespace):
    """`namespace()`: may hold itself, so its contents are never printed."""

    def __repr__(self) -> str:
        return "<namespace>"


class _CheckedCode(CodeGenerator):
    """Sends what is built by syntax alone through the checks."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _checked(self, node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.sized(")
        getattr(super(), f"visit_{type(node).__name__}")(node, frame)
        self.write(")")

    visit_List = visit_Dict = _checked

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._checked(node, frame)
        else:
            super().visit_Tuple(node, frame)


class _Generation(Extension):
    """`{% generation %}` marks for training what an assistant says; here it is just its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates as transformers does (`trim_blocks`, `lstrip_blocks`, loop controls,
    `raise_exception`, `strftime_now`, its `tojson`); render inside `limits`."""

    code_generator_class = _CheckedCode
    concat = staticmethod(_concat)
    sized = staticmethod(_sized)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Folding constants would run filters before there are limits.
            optimized=False,
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.filters = {
            name: _checked_filter(name, self.filters[name]) for name in _FILTERS.split()
        }
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]
        self.globals |= {
            "namespace": _Namespace,
            "raise_exception": _refuse,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        imports = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
        if tree.find(imports):
            raise SecurityError("it wants to load another template")
        for loop in tree.find_all(nodes.For):
            step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(step))
        tree.set_environment(self)
        return tree

    def step(self) -> None:
        """Called at every turn of a loop, because calls are counted."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of plain values, the methods on the list; of Jinja's own, what the sandbox allows."""
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Formats make much out of little: they are methods like others, and not on the list."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Not undefined, as in Jinja: an error at once."""
        raise SecurityError(f"it may not use {attribute!r} of a {type(obj).__name__}")

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in the template: counted, its result measured."""
        _allowance.get().step()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and function.__name__ == "join":
            args = (_joinable(owner, *args),)
        elif isinstance(owner, str) and function.__name__ == "replace":
            _check_replace(owner, *args)
        return _sized(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator that can make much out of little."""
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise SecurityError(f"it may not use {operator} here")
        if operator == "*":
            _allowance.get().check(_product_size(left, right))
        return _sized(super().call_binop(context, operator, left, right))


def _product_size(left: Any, right: Any) -> float:
    if isinstance(left, int) and isinstance(right, int):
        return math.inf if left.bit_length() + right.bit_length() > MAX_INT_BITS else 0
    if isinstance(left, int):
        left, right = right, left
    return _size(left) * right if isinstance(right, int) else 0


def _check_replace(text: Any, old: Any, new: Any, *_: Any) -> None:
    text, old, new = _text(text), _text(old), _text(new)
    _allowance.get().check(len(text) + len(new) * text.count(old))


def _joinable(separator: Any, values: Any) -> list[Any]:
    values = _sized(list(values))
    _allowance.get().check(len(_text(separator)) * len(values))
    return values


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _allowance.get().step()
        if name == "join":
            context, values, *others = args
            args = (context, _joinable((*others, kwargs.get("d", ""))[0], values), *others)
        elif name == "replace":
            _check_replace(*args[1:], **kwargs)
        elif name in ("batch", "slice"):
            counts = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
            if max(counts, default=0) > MAX_COUNT:
                raise LimitError(_TOO_LARGE)
        return _sized(function(*args, **kwargs))

    return checked


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: nothing is escaped for HTML."""
    allowance = _allowance.get()
    allowance.step()
    if indent is not None and not 0 <= indent <= 16:
        raise LimitError(_TOO_LARGE)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _concat(encoder.iterencode(_sized(value)))


def _refuse(message: Any) -> NoReturn:
    raise Refusal(_text(message))


def _strftime_now(template: str) -> str:
    if len(template) > 100:
        raise LimitError(_TOO_LARGE)
    return datetime.now().strftime(template)
