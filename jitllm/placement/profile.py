"""Profiles: placement as a YAML file. Every complaint has its file, line and column.

devices: {host: maxmem, cpu:1: 3M, cuda:0: auto}   # budgets; `auto` is all but a reserve
rules:                                             # the first that matches wins
  - {blocks: "0-9,12", place: "cpu:1", pin: true}
  - {blocks: "*", place: "cuda:0", stream: true}
  - {head: true, place: "cuda:0"}                  # also: embed, experts (of blocks)
kv: {dtype: f16, place: block}                     # block: where its block is
strict: false                                      # true: what does not fit is an error
relocate: false                                    # true: a growing KV cache sends blocks home
gpu_layers: 10                                     # the last 10 blocks, unless a rule says
"""

import difflib
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

import yaml

from jitllm.errors import UsageError
from jitllm.placement.devices import HOST, DeviceRequest, parse_devices
from jitllm.placement.rules import (
    HOST_NAMES,
    KV_DTYPES,
    KV_PLACES,
    RANGED,
    SELECTORS,
    Fail,
    Profile,
    Rule,
    Span,
    check_overlaps,
    checked,
    parse_place,
    parse_spans,
)

_UNITS = (("T", 2**40), ("G", 2**30), ("M", 2**20), ("K", 2**10))


def load_profile(path: str | Path) -> Profile:
    """The profile in a file. UsageError in one sentence, with file, line and column."""
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise UsageError(f"profile {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"profile {path} is not UTF-8 text") from None
    return parse_profile(text, str(path))


def parse_profile(text: str, name: str = "profile") -> Profile:
    """The profile in `text`; errors begin with `name`:line:column."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        where = _position(name, error.problem_mark or error.context_mark)
        hint = '; write "*" with quotes' if "alias" in str(error) else ""
        raise UsageError(f"{where}: this is not YAML: {error.problem}{hint}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{name}: this is not YAML: {str(error).splitlines()[0]}") from None
    return Profile(source=name) if node is None else _Reader(name).profile(node)


def _position(name: str, mark: yaml.Mark) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


class _Reader:
    """Nodes of one file to values; every complaint has the node's place."""

    def __init__(self, name: str):
        self._name = name

    def profile(self, node: yaml.Node) -> Profile:
        """The profile whose top is `node`."""
        readers = {
            "devices": self._devices,
            "rules": self._rules,
            "kv": lambda node: self._read(node, {"dtype": self._dtype, "place": self._kv_place}),
            "strict": self._boolean,
            "relocate": self._boolean,
            "gpu_layers": self._count,
        }
        fields = self._read(node, readers)
        fields |= {f"kv_{key}": value for key, value in fields.pop("kv", {}).items()}
        return Profile(source=self._name, **fields)

    def _fail_at(self, node: yaml.Node) -> Fail:
        def fail(message: str) -> NoReturn:
            raise UsageError(f"{_position(self._name, node.start_mark)}: {message}")

        return fail

    def _read(self, node: yaml.Node, readers: dict[str, Callable[[yaml.Node], Any]]) -> dict:
        """A mapping whose keys are all in `readers`, each value read by its own."""
        pairs = self._pairs(node)
        for key, (key_node, _) in pairs.items():
            if key not in readers:
                near = difflib.get_close_matches(key, readers, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                known = ", ".join(readers)
                self._fail_at(key_node)(f"unknown key {key!r}{hint}; the keys here are {known}")
        return {key: readers[key](value) for key, (_, value) in pairs.items()}

    def _pairs(self, node: yaml.Node) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """key -> its node and the node of its value, each key once."""
        if not isinstance(node, yaml.MappingNode):
            self._fail_at(node)(f"expected KEY: VALUE lines, but this is {_kind(node)}")
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value in node.value:
            key = self._text(key_node)
            if key in pairs:
                self._fail_at(key_node)(f"the key {key!r} is here twice; keep one")
            pairs[key] = key_node, value
        return pairs

    def _text(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag.endswith(":null"):
            self._fail_at(node)(f"expected one word, but this is {_kind(node)}")
        return node.value

    def _boolean(self, node: yaml.Node) -> bool:
        text = self._text(node).lower()
        if text not in ("true", "false"):
            self._fail_at(node)(f"{node.value!r} is not true or false")
        return text == "true"

    def _count(self, node: yaml.Node) -> int:
        text = self._text(node)
        if not re.fullmatch(r"[0-9]{1,6}", text):
            self._fail_at(node)(f"{text!r} is not a number of blocks")
        return int(text)

    def _choice(self, node: yaml.Node, allowed: Sequence[str]) -> str:
        if self._text(node) not in allowed:
            self._fail_at(node)(f"{node.value!r} is not {' or '.join(allowed)}")
        return node.value

    def _dtype(self, node: yaml.Node) -> str:
        return self._choice(node, KV_DTYPES)

    def _place(self, node: yaml.Node) -> str:
        return parse_place(self._text(node), self._fail_at(node))

    def _kv_place(self, node: yaml.Node) -> str:
        return self._choice(node, KV_PLACES)

    def _devices(self, node: yaml.Node) -> tuple[DeviceRequest, ...]:
        requests: list[DeviceRequest] = []
        for key_node, value in self._pairs(node).values():
            request = self._device(key_node, value)
            if any(str(request) == str(other) for other in requests):
                self._fail_at(key_node)(f"{key_node.value} is named twice; name each device once")
            requests.append(request)
        return tuple(requests)

    def _device(self, key_node: yaml.Node, node: yaml.Node) -> DeviceRequest:
        name, budget = key_node.value.lower(), self._text(node)
        if name in HOST_NAMES:
            self._choice(node, ("maxmem",))
            return DeviceRequest("cpu", 0)
        if budget == "maxmem":
            self._fail_at(node)("maxmem is the host's budget; write a size, or auto")
        if "," in name:
            self._fail_at(key_node)(f"{name!r} is more than one device; write a line for each")
        try:
            return parse_devices(name if budget == "auto" else f"{name}={budget}")[0]
        except UsageError as error:
            self._fail_at(key_node)(str(error).removeprefix("-devices "))

    def _rules(self, node: yaml.Node) -> tuple[Rule, ...]:
        if not isinstance(node, yaml.SequenceNode):
            self._fail_at(node)(f"expected a list of rules (- ...), but this is {_kind(node)}")
        rules = tuple(self._rule(each) for each in node.value)
        check_overlaps(rules)
        return rules

    def _rule(self, node: yaml.Node) -> Rule:
        fail = self._fail_at(node)
        readers = {"place": self._place, "pin": self._boolean, "stream": self._boolean}
        for key in SELECTORS:
            readers[key] = self._spans if key in RANGED else self._boolean
        settings = self._read(node, readers)
        selectors = [key for key in SELECTORS if key in settings]
        if len(selectors) != 1:
            fail(f"a rule has one of {', '.join(SELECTORS)}, but this one has {len(selectors)}")
        if "place" not in settings:
            fail("this rule has no place; write place: host, or a device")
        kind = selectors[0]
        spans = settings.pop(kind)
        if spans is False:
            fail(f"{kind}: false matches nothing; write {kind}: true, or leave the rule out")
        settings["source"] = _position(self._name, node.start_mark)
        return checked(Rule(kind, spans if kind in RANGED else None, **settings), fail)

    def _spans(self, node: yaml.Node) -> tuple[Span, ...] | None:
        return parse_spans(self._text(node), self._fail_at(node))


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return (
            "nothing"
            if node.tag.endswith(":null")
            else repr(shorten(node.value, 60, placeholder="..."))
        )
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def to_yaml(profile: Profile) -> str:
    """`profile` as YAML that reads back as the same profile."""
    content: dict[str, Any] = {
        "devices": {
            HOST if str(r) in HOST_NAMES else str(r): _budget_text(r) for r in profile.devices
        },
        "rules": [_rule_content(rule) for rule in profile.rules],
        "kv": {"dtype": profile.kv_dtype, "place": profile.kv_place},
        "strict": profile.strict,
        "relocate": profile.relocate,
        "gpu_layers": profile.gpu_layers,
    }
    kept = {key: value for key, value in content.items() if value not in (None, {}, [])}
    return yaml.safe_dump(kept, sort_keys=False)


def profile_hash(profile: Profile) -> str:
    """Equal where two profiles say the same, whatever they look like in their files."""
    return hashlib.sha256(to_yaml(profile).encode()).hexdigest()[:16]


def _rule_content(rule: Rule) -> dict[str, Any]:
    selection: Any = rule.selection if rule.kind in RANGED else True
    marks = {"pin": rule.pin, "stream": rule.stream}
    return {rule.kind: selection, "place": rule.place} | {k: True for k, on in marks.items() if on}


def _budget_text(request: DeviceRequest) -> str:
    if str(request) in HOST_NAMES:
        return "maxmem"
    n_bytes = request.budget_bytes
    if n_bytes is None:
        return "auto"
    fitting = ((name, size) for name, size in _UNITS if n_bytes and n_bytes % size == 0)
    name, size = next(fitting, ("", 1))
    return f"{n_bytes // size}{name}"
