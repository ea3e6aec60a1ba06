"""Rules: what the user wants where, as frozen objects that a profile (YAML, see `profile`) and
`-placement` both become.

`-placement` writes a rule as SEL=WHERE: `0-9=cpu:1!`, `*=cuda:0~`, `head=cuda:0`. What can be
checked without a model is checked here, the rest in `planner.plan`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product
from typing import Any, NoReturn

from jitllm.errors import UsageError
from jitllm.placement.devices import HOST, DeviceRequest, parse_devices

KV_DTYPES = ("f16", "f32")
WITH_BLOCK = "block"
KV_PLACES = (WITH_BLOCK, HOST)
"""Each block's KV cache is where the block is, or all of them are with the host."""

SELECTORS = ("blocks", "head", "embed", "experts")
RANGED = ("blocks", "experts")
HOST_NAMES = (HOST, "cpu", "cpu:0")
_PLACE = re.compile(r"[A-Za-z][\w.-]*(:\d{1,4})?")

Span = tuple[int, int]
"""First and last block."""


@dataclass(frozen=True)
class Rule:
    """Parts of the model, and where they go."""

    # What it matches
    kind: str
    """`blocks`, `head`, `embed`, or `experts` (those of the blocks)."""
    spans: tuple[Span, ...] | None = None
    """The blocks, as they were written; None is all of them (`*`)."""
    # What it does
    place: str = HOST
    """`host` or a device."""
    pin: bool = False
    """It stays there: moves, growth and relocation leave it alone."""
    stream: bool = False
    """Its pages stay with the host and pass through the device's slots."""
    # Where it is written
    source: str = field(default="", compare=False)

    def covers(self, block: int) -> bool:
        """Whether this rule's blocks include number `block`."""
        return self.spans is None or any(first <= block <= last for first, last in self.spans)

    @property
    def selection(self) -> str:
        """What it matches, as it is written: `0-9,12`, `*`, `head`."""
        if self.kind not in RANGED:
            return self.kind
        spans = [f"{a}-{b}" if a != b else str(a) for a, b in self.spans or ()]
        return ",".join(spans) or "*"

    def __str__(self) -> str:
        experts = "experts of " if self.kind == "experts" else ""
        return f"{experts}{self.selection}={self.place}{'!' * self.pin}{'~' * self.stream}"


@dataclass(frozen=True)
class Profile:
    """Everything a user can say about placement; the default says nothing."""

    devices: tuple[DeviceRequest, ...] = ()
    """What to open, with which budgets; none leaves it to `-devices`."""
    rules: tuple[Rule, ...] = ()
    kv_dtype: str = "f16"
    kv_place: str = WITH_BLOCK
    """One of `KV_PLACES`."""
    strict: bool = False
    """Whether what a rule asks for and cannot have is an error."""
    relocate: bool = False
    """Whether a device whose KV grows sends its last blocks home."""
    gpu_layers: int | None = None
    """How many of the last blocks go to devices unasked; more than there are takes the head too."""
    source: str = field(default="", compare=False)
    """The file it was read from."""


# The command line


def parse_placement(text: str) -> tuple[Rule, ...]:
    """The rules of `-placement SEL=WHERE,...`; SEL is N, A-B, head or *; WHERE is host or a device
    with `!` (pinned) and `~` (streamed)."""
    rules = tuple(_parse_entry(entry.strip()) for entry in text.split(","))
    check_overlaps(rules)
    return rules


def override(
    profile: Profile, devices: str | None = None, placement: str | None = None, **settings: Any
) -> Profile:
    """`profile` with what flags say instead. `devices` and `placement` replace the whole section;
    `settings` are other fields of `Profile`; None keeps what is there."""
    if devices is not None:
        settings["devices"] = parse_devices(devices)
    if placement is not None:
        settings["rules"] = parse_placement(placement)
    return replace(profile, **{key: v for key, v in settings.items() if v is not None})


def _parse_entry(entry: str) -> Rule:
    def fail(message: str) -> NoReturn:
        raise UsageError(f"-placement {entry!r}: {message}")

    selection, equals, where = entry.partition("=")
    if not equals:
        fail("is not SEL=WHERE; write e.g. 0-9=cpu:1, head=host or *=cuda:0~")
    place = where.rstrip("!~")
    marks = where[len(place) :]
    if len(set(marks)) != len(marks):
        fail(f"repeats a mark in {marks!r}; write ! and ~ once each")
    if selection in ("embed", "experts"):
        fail(f"only a profile places {selection}; SEL is N, A-B, head or *")
    kind = selection if selection == "head" else "blocks"
    spans = None if kind == "head" else parse_spans(selection, fail)
    rule = Rule(kind, spans, parse_place(place, fail), "!" in marks, "~" in marks, "-placement")
    return checked(rule, fail)


# What both forms share

Fail = Callable[[str], NoReturn]
"""Raises UsageError with a message, and puts the place of the mistake in front."""


def parse_spans(text: str, fail: Fail) -> tuple[Span, ...] | None:
    """The blocks of `0-9,12`; None for `*`."""
    if text == "*":
        return None
    return tuple(_parse_span(part.strip(), fail) for part in text.split(","))


def _parse_span(text: str, fail: Fail) -> Span:
    match = re.fullmatch(r"([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?", text)
    if match is None:
        fail(f"{text!r} is not a range of blocks; write N, A-B or *")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        fail(f"the range {text!r} ends before it begins; write {last}-{first}")
    return first, last


def parse_place(text: str, fail: Fail) -> str:
    """`host` under each of its names, or the name of a device in lower case."""
    name = text.lower()
    if name in HOST_NAMES:
        return HOST
    if not _PLACE.fullmatch(name):
        fail(f"{text!r} is not a place; write host, or a device such as cpu:1 or cuda:0")
    return name


def checked(rule: Rule, fail: Fail) -> Rule:
    """`rule`, if it can mean something for any model."""
    if rule.stream and rule.place == HOST:
        fail("host~ means nothing, the host reads its pages itself; write host, or DEVICE~")
    if rule.stream and rule.kind in ("head", "embed"):
        fail(f"only blocks are streamed; place {rule.kind} on the device or on the host")
    for (_, last), (first, _) in pairwise(sorted(rule.spans or ())):
        if first <= last:
            fail(f"names block {first} twice; name each block once")
    return rule


def check_overlaps(rules: Sequence[Rule]) -> None:
    """`*` takes what is left, so it may stand beside anything; a number may be named once."""
    for rule, later in combinations(rules, 2):
        if rule.kind != later.kind:
            continue
        if rule.kind not in RANGED:
            raise UsageError(f"{later.source}: places the {rule.kind} twice; place it once")
        for a, b in product(rule.spans or (), later.spans or ()):
            if (first := max(a[0], b[0])) <= min(a[1], b[1]):
                raise UsageError(
                    f"{later.source}: {later} names block {first}, which {rule} names already; "
                    "name each block once"
                )
