"""The planner: page sizes, devices and rules in, a `Plan` out. Pure; nothing is allocated."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn, Protocol

from jitllm.errors import BudgetError, DeviceError, UsageError
from jitllm.placement.devices import HOST, Device, find_device
from jitllm.placement.plan import (
    AUTOMATIC,
    NO_RULE,
    PAGED,
    RESIDENT,
    ROWS,
    STREAMED,
    Assignment,
    Decline,
    DeviceUse,
    Plan,
    Tally,
)
from jitllm.placement.rules import Profile, Rule
from jitllm.units import exact_size


class PageSize(Protocol):
    """What the planner asks of a page of the container."""

    kind: str
    """`dense`, `block`, `head` or `embed`."""
    index: int
    n_bytes: int


def plan(
    pages: Sequence[PageSize],
    devices: Sequence[Device],
    profile: Profile,
    kv: Sequence[int],
    workspace_bytes: int = 0,
) -> Plan:
    """Where everything goes. `devices` begin with the host, whose budget is what its pages may
    take; `kv` is each block's cache in bytes; `workspace_bytes` is what a step's activations take
    on each device that executes something.

    - No device holds more than its budget: weights, KV of its blocks, slots and activations.
    - Every part has one device, the rule that put it there and, where that is not what was asked
      for, what the device lacked.
    - A rule takes effect in its turn: earlier rules and lower blocks have the room first. What
      does not fit stays with the host; so does what no rule names.
    - Where no rule names blocks, devices are filled in order with a run of blocks that ends with
      the last, as long as can be, and with the head where all blocks are on devices.
    - `gpu_layers` N is llama.cpp's `-ngl`: of the blocks that no rule names the last N are
      wanted on devices, and the head too where N is larger than the number of blocks.
    - A device that streams has a second slot where all else leaves room for one.
    - With `strict`, nothing that was asked for is declined: BudgetError names what is missing.

    UsageError for a rule that matches nothing, a block that is not there, DeviceError for a device
    that is not there, each with the rule's own place.
    """
    parts = _parts(pages, kv)
    rules = _match(profile.rules, parts)
    planner = _Planner(pages, devices, profile, workspace_bytes)
    for rule in profile.rules:
        planner.place(rule, [part for part in parts if rules.get(part.name) is rule])
    planner.place_rest([part for part in parts if part.name not in rules])
    return planner.finish(parts)


def _parts(pages: Sequence[PageSize], kv: Sequence[int]) -> list[Assignment]:
    """The parts of the model, all with the host as yet."""
    blocks = sorted((p for p in pages if p.kind == "block"), key=lambda page: page.index)
    parts = [
        Assignment("block", page.index, HOST, PAGED, page.n_bytes, NO_RULE, kv_bytes)
        for page, kv_bytes in zip(blocks, kv, strict=True)
    ]
    parts.append(Assignment("head", 0, HOST, PAGED, _sum(pages, "head"), NO_RULE))
    if embed_bytes := _sum(pages, "embed"):
        parts.append(Assignment("embed", 0, HOST, ROWS, embed_bytes, NO_RULE))
    return parts


def _sum(pages: Sequence[PageSize], kind: str) -> int:
    return sum(page.n_bytes for page in pages if page.kind == kind)


# Which rule is whose


def _match(rules: Sequence[Rule], parts: Sequence[Assignment]) -> dict[str, Rule]:
    """The first rule that matches each part, by the part's name; every rule matches something."""
    matched: dict[str, Rule] = {}
    n_blocks = sum(part.kind == "block" for part in parts)
    for rule in rules:
        for _, last in rule.spans or ():
            if rule.kind == "blocks" and last >= n_blocks:
                _fail(rule, f"names block {last}; the model has blocks 0-{n_blocks - 1}")
        found = [part.name for part in parts if _matches(rule, part) and part.name not in matched]
        if not found:
            _fail(rule, f"matches nothing: {_NOTHING[rule.kind]}")
        matched |= dict.fromkeys(found, rule)
    return matched


_NOTHING = {
    "blocks": "earlier rules have every block",
    "experts": "the model has no experts",
    "embed": "the embedding is the output head here; place the head",
    "head": "the model has no head",
}


def _matches(rule: Rule, part: Assignment) -> bool:
    if rule.kind == "blocks":
        return part.kind == "block" and rule.covers(part.index)
    return rule.kind == part.kind


def _fail(rule: Rule, message: str) -> NoReturn:
    raise UsageError(f"{rule.source}: {rule} {message}")


# Placing


class _Planner:
    """A plan in the making: what is placed so far, and the tally of it."""

    def __init__(
        self,
        pages: Sequence[PageSize],
        devices: Sequence[Device],
        profile: Profile,
        workspace_bytes: int,
    ):
        self._devices, self._profile = devices, profile
        self._targets = [device.id for device in devices if not device.is_host]
        uses = {device.id: DeviceUse(device.id, device.budget_bytes) for device in devices}
        self._tally = Tally(uses, _sum(pages, "dense"), workspace_bytes).empty()
        self._asked = self._tally
        self._placed: dict[str, Assignment] = {}

    def place(self, rule: Rule, parts: Sequence[Assignment]) -> None:
        """Put `parts` where `rule` says, as far as they fit."""
        device = self._find(rule).id
        text = f"{rule} ({rule.source})"
        for part in parts:
            if device == HOST:
                self._accept(replace(part, rule=text, pinned=rule.pin))
                continue
            mode = STREAMED if rule.stream else RESIDENT
            self._try(replace(self._on(part, device, text, mode), pinned=rule.pin), part)

    def place_rest(self, parts: Sequence[Assignment]) -> None:
        """Put what no rule names: on the devices as far as it goes, or on the host."""
        n_layers, asked = self._profile.gpu_layers, self._profile.gpu_layers is not None
        if n_layers:
            self._check_layers(n_layers, parts)
        named = any(rule.kind == "blocks" for rule in self._profile.rules)
        if self._targets and (asked or not named):
            text = f"-gpu-layers {n_layers}" if asked else AUTOMATIC
            self._fill([part for part in parts if part.kind == "block"], n_layers, text)
            if not asked or n_layers > sum(name.startswith("block") for name in self._placed):
                self._fill_head([part for part in parts if part.kind == "head"], text, asked)
        for part in parts:
            if part.name not in self._placed:
                self._accept(part)

    def _check_layers(self, n_layers: int, parts: Sequence[Assignment]) -> None:
        """UsageError where `-gpu-layers` could not do anything."""
        if not self._targets:
            raise UsageError(
                f"-gpu-layers {n_layers} needs a device besides the host; name it with -devices"
            )
        n_placed = sum(name.startswith("block") for name in self._placed)
        takes_head = n_layers > n_placed and any(part.kind == "head" for part in parts)
        if not (takes_head or any(part.kind == "block" for part in parts)):
            raise UsageError(
                f"-gpu-layers {n_layers} finds no block to place, the rules name them all; leave "
                "out one or the other"
            )

    def finish(self, parts: Sequence[Assignment]) -> Plan:
        """The plan, with `parts` in their order."""
        placed = [self._placed[part.name] for part in parts]
        if self._profile.strict:
            _refuse_declines(placed, self._tally)
        return Plan.of(placed, self._tally.with_second_slots(), self._profile.kv_place)

    def _find(self, rule: Rule) -> Device:
        try:
            return find_device(rule.place, self._devices)
        except DeviceError as error:
            raise DeviceError(f"{rule.source}: {error}") from None

    def _accept(self, part: Assignment, wanted: Assignment | None = None) -> None:
        """Let `part` be where it is; `wanted` is where it was to be."""
        self._tally = self._tally.add(part)
        self._asked = self._asked.add(wanted or part)
        self._placed[part.name] = part

    def _try(self, wanted: Assignment, home: Assignment, asked: bool = True) -> None:
        """`wanted`, or where it does not fit `home` with what the device lacks."""
        if self._tally.add(wanted).uses[wanted.device].missing_bytes <= 0:
            self._accept(wanted)
            return
        missing_bytes = self._asked.add(wanted).uses[wanted.device].missing_bytes
        decline = Decline(wanted.device, missing_bytes, asked)
        self._accept(replace(home, rule=wanted.rule, declines=(decline,)), wanted)

    def _on(self, part: Assignment, device: str, rule: str, mode: str = RESIDENT) -> Assignment:
        return part.at(device, mode, rule, self._profile.kv_place)

    def _fill(self, blocks: Sequence[Assignment], n_layers: int | None, rule: str) -> None:
        """Devices in order with the longest run of `blocks` that ends with the last of them."""
        asked = n_layers is not None
        n_left = max(0, len(blocks) - n_layers) if asked else 0
        for block in blocks[:n_left]:
            self._accept(replace(block, rule=rule))
        wanted = [self._on(block, self._targets[-1], rule) for block in blocks[n_left:]]
        left = []
        for i in range(len(wanted) + 1):
            run, missing_bytes = self._run(wanted[i:], rule)
            if not missing_bytes:
                break
            decline = Decline(self._targets[-1], missing_bytes, asked)
            left.append(replace(blocks[n_left + i], rule=rule, declines=(decline,)))
        for block in (*left, *run):
            self._accept(block)

    def _run(self, blocks: Sequence[Assignment], rule: str) -> tuple[list[Assignment], int]:
        """`blocks` on devices in order, and what the last device lacks for those that are left."""
        tally, run = self._tally, []
        for device in self._targets:
            for block in blocks[len(run) :]:
                block = self._on(block, device, rule)
                if tally.add(block).uses[device].missing_bytes > 0:
                    break
                tally = tally.add(block)
                run.append(block)
        if len(run) == len(blocks):
            return run, 0
        asked = self._asked.add_all([*run, *blocks[len(run) :]])
        return run, asked.uses[self._targets[-1]].missing_bytes

    def _fill_head(self, heads: Sequence[Assignment], rule: str, asked: bool) -> None:
        """The head to the last block's device, where all blocks are on devices."""
        blocks = [part for part in self._placed.values() if part.kind == "block"]
        device = max(blocks, key=lambda block: block.index).device
        if any(block.device == HOST for block in blocks):
            return
        for head in heads:
            self._try(self._on(head, device, rule), head, asked)


def _refuse_declines(parts: Sequence[Assignment], tally: Tally) -> None:
    """BudgetError for the largest shortage among what was asked for."""
    declines = [(d, part) for part in parts for d in part.declines if d.asked]
    if not declines:
        return
    worst, part = max(declines, key=lambda pair: pair[0].missing_bytes)
    smallest_bytes = (tally.uses[worst.device].budget_bytes or 0) + worst.missing_bytes
    raise BudgetError(
        f"{part.name} has no room where {part.rule} wants it: {worst}; give {worst.device} "
        f"{exact_size(smallest_bytes)}, or do without strict placement",
        smallest_bytes,
    )
