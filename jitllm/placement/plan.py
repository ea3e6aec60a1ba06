"""A plan: where every part of a model is, what it takes there, and why. Made by `planner.plan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from jitllm.placement.devices import HOST
from jitllm.placement.rules import WITH_BLOCK
from jitllm.units import format_size

RESIDENT, STREAMED, PAGED, ROWS = "resident", "streamed", "paged", "by rows"
"""How weights are held: whole; on the host and through a device's slots; on the host as far as its
budget goes, the rest read when needed; read from the file a row at a time (an embedding)."""

AUTOMATIC, NO_RULE = "automatic", "no rule"
"""What placed a part that no rule names: the filling of devices, or nothing."""


@dataclass(frozen=True)
class Decline:
    """What a device could not take."""

    device: str
    missing_bytes: int
    """How much larger its budget would have to be, for this part and all declined before it."""
    asked: bool
    """Whether a rule or `-gpu-layers` asked for it, rather than the automatic fill."""

    def __str__(self) -> str:
        return f"{self.device} lacks {format_size(self.missing_bytes)}"


@dataclass(frozen=True)
class Assignment:
    """One part of the model and its place."""

    kind: str
    """`block`, `head` or `embed`."""
    index: int
    """The block's number; 0 for the others."""
    device: str
    """Id of the device that executes it."""
    mode: str
    """RESIDENT, STREAMED, PAGED or ROWS."""
    n_bytes: int
    """Its pages, wherever they are."""
    rule: str
    """What placed it: a rule with its source, `-gpu-layers N`, AUTOMATIC or NO_RULE."""
    kv_bytes: int = 0
    kv_device: str = HOST
    pinned: bool = False
    declines: tuple[Decline, ...] = ()
    home_from: tuple[str, str] | None = None
    """Device and mode to which it returns when there is room; see `changes.relocate`."""

    @property
    def name(self) -> str:
        """`block 3`, `head`, `embed`."""
        return f"block {self.index}" if self.kind == "block" else self.kind

    def at(self, device: str, mode: str, rule: str, kv_place: str) -> Assignment:
        """This part elsewhere; `kv_place` says whether its KV comes along or stays at home."""
        kv_device = device if kv_place == WITH_BLOCK else HOST
        return replace(self, device=device, mode=mode, rule=rule, kv_device=kv_device)


@dataclass(frozen=True)
class DeviceUse:
    """What a plan puts on one device. The host's budget is for its pages alone."""

    device: str
    budget_bytes: int | None
    """None: not limited."""
    weights_bytes: int = 0
    """Resident pages; on the host, all pages it visits in a pass."""
    kv_bytes: int = 0
    slot_bytes: int = 0
    """One slot: the largest page that is streamed through."""
    n_slots: int = 0
    workspace_bytes: int = 0
    """Activations of one step."""
    visiting_kv_bytes: int = 0
    """The largest cache that comes from elsewhere for its block's step, and goes home after it."""

    @property
    def n_bytes(self) -> int:
        """What is taken of the budget. What exceeds the host's is not in memory but paged."""
        if self.device == HOST:
            return self.weights_bytes - max(0, self.missing_bytes)
        return self._needed_bytes

    @property
    def missing_bytes(self) -> int:
        """How much larger the budget would have to be to hold everything; negative is room."""
        return -1 if self.budget_bytes is None else self._needed_bytes - self.budget_bytes

    @property
    def _needed_bytes(self) -> int:
        if self.device == HOST:
            return self.weights_bytes
        moving_bytes = self.slot_bytes * self.n_slots + self.visiting_kv_bytes
        return self.weights_bytes + self.kv_bytes + moving_bytes + self.workspace_bytes


@dataclass(frozen=True)
class Tally:
    """The uses of all devices, and what it takes to add a part to them."""

    uses: dict[str, DeviceUse]
    """By device id, in the order of `-devices`, the host first."""
    dense_bytes: int
    """Norms and tables that are no block's; where the head is, its norm is too."""
    workspace_bytes: int

    def add(self, part: Assignment) -> Tally:
        """The tally with `part` where it says it is; it may be more than a device holds."""
        on = dict(self.uses)
        if part.kv_bytes:
            kv = on[part.kv_device]
            on[part.kv_device] = replace(kv, kv_bytes=kv.kv_bytes + part.kv_bytes)
        use = on[part.device]
        if part.device != HOST:
            away_bytes = part.kv_bytes if part.kv_device != part.device else 0
            use = replace(
                use,
                workspace_bytes=self.workspace_bytes,
                visiting_kv_bytes=max(use.visiting_kv_bytes, away_bytes),
            )
        if part.mode == STREAMED:
            slot_bytes, n_slots = max(use.slot_bytes, part.n_bytes), max(use.n_slots, 1)
            use = replace(use, slot_bytes=slot_bytes, n_slots=n_slots)
            on[HOST] = _heavier(on[HOST], part.n_bytes)
        elif part.mode != ROWS:
            copied = self.dense_bytes if part.kind == "head" and part.device != HOST else 0
            use = _heavier(use, part.n_bytes + copied)
        on[part.device] = use
        return replace(self, uses=on)

    def add_all(self, parts: Iterable[Assignment]) -> Tally:
        """The tally with all of `parts`."""
        tally = self
        for part in parts:
            tally = tally.add(part)
        return tally

    def empty(self) -> Tally:
        """The same devices and budgets with nothing on them but the host's dense page."""
        uses = {id: DeviceUse(id, use.budget_bytes) for id, use in self.uses.items()}
        uses[HOST] = _heavier(uses[HOST], self.dense_bytes)
        return replace(self, uses=uses)

    def with_second_slots(self) -> Tally:
        """A second slot, for the next upload, on each device that has one and room for another."""
        doubled = {
            id: replace(use, n_slots=2)
            for id, use in self.uses.items()
            if use.n_slots == 1 and use.missing_bytes + use.slot_bytes <= 0
        }
        return replace(self, uses=self.uses | doubled)


def _heavier(use: DeviceUse, n_bytes: int) -> DeviceUse:
    return replace(use, weights_bytes=use.weights_bytes + n_bytes)


@dataclass(frozen=True)
class Partition:
    """Blocks `first` to `last`, which `device` executes one after another in one mode."""

    first: int
    last: int
    device: str
    mode: str


@dataclass(frozen=True)
class Row:
    """One line of `Plan.explain`: parts of the model that have everything in common."""

    what: str
    device: str
    mode: str
    pinned: bool
    n_bytes: int
    kv_bytes: int
    kv_device: str
    rule: str
    declined: str
    """Why it is not where it was to be, with the missing bytes; empty where it is."""


@dataclass(frozen=True)
class Plan:
    """Where everything is. Immutable: the functions of `changes` make new ones."""

    assignments: tuple[Assignment, ...]
    """The blocks in order, then the head, then the embedding where it has pages of its own."""
    tally: Tally
    """What that takes on each device."""
    kv_place: str
    """`block`: KV goes where its block goes; `host`: all of it is there."""

    @staticmethod
    def of(parts: Sequence[Assignment], tally: Tally, kv_place: str) -> Plan:
        """A plan of `parts`, where it is known whether the host's budget holds all its pages."""
        mode = PAGED if tally.uses[HOST].missing_bytes > 0 else RESIDENT
        settled = [
            replace(part, mode=mode) if part.device == HOST and part.mode != ROWS else part
            for part in parts
        ]
        return Plan(tuple(settled), tally, kv_place)

    @property
    def blocks(self) -> tuple[Assignment, ...]:
        """The blocks in order."""
        return tuple(part for part in self.assignments if part.kind == "block")

    @property
    def head(self) -> Assignment:
        """The output head."""
        return next(part for part in self.assignments if part.kind == "head")

    @property
    def embed(self) -> Assignment | None:
        """The embedding; None where the head is the embedding too."""
        return next((part for part in self.assignments if part.kind == "embed"), None)

    @property
    def n_asked_blocks(self) -> int:
        """Blocks that rules or `-gpu-layers` wanted on devices; `n_device_blocks` are there."""
        declined = (any(d.asked for d in block.declines) for block in self.blocks)
        return sum(declined) + sum(
            block.device != HOST and block.rule != AUTOMATIC for block in self.blocks
        )

    @property
    def n_device_blocks(self) -> int:
        """Blocks that are executed away from the host."""
        return sum(block.device != HOST for block in self.blocks)

    @property
    def host_visits(self) -> tuple[Assignment, ...]:
        """Parts whose pages the host reads in each pass, in order: its own and the streamed."""
        return tuple(
            part
            for part in self.assignments
            if part.mode != ROWS and (part.device == HOST or part.mode == STREAMED)
        )

    @property
    def uses(self) -> tuple[DeviceUse, ...]:
        """What is on each device, in the order of `-devices`, the host first."""
        return tuple(self.tally.uses.values())

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The blocks as runs that one device executes in one mode, in order."""
        runs = groupby(self.blocks, key=lambda block: (block.device, block.mode))
        ends = [(key, [block.index for block in run]) for key, run in runs]
        return tuple(Partition(run[0], run[-1], *key) for key, run in ends)

    @property
    def n_seams(self) -> int:
        """How often activations cross from device to device in one pass, the host's ends too."""
        stops = [HOST, *(block.device for block in self.blocks), self.head.device, HOST]
        return sum(a != b for a, b in pairwise(stops))

    def use(self, device: str) -> DeviceUse:
        """What is on one device, by id."""
        return self.tally.uses[device]

    def explain(self) -> list[Row]:
        """The whole plan, one row for each run of parts that have everything in common."""
        runs = groupby(self.assignments, key=_common)
        return [_row(list(run)) for _, run in runs]

    def render(self) -> str:
        """`explain` and the use of each device as text: what `jitllm plan` prints."""
        rows = [("part", "device", "mode", "bytes", "KV", "rule", "declined")]
        rows += [_cells(row) for row in self.explain()]
        uses = [("device", "weights", "KV", "slots", "activations", "in memory", "budget")]
        uses += [_use_cells(use) for use in self.uses]
        return _table(rows) + "\n\n" + _table(uses)


def _common(part: Assignment) -> tuple:
    where = part.device, part.mode, part.pinned, part.kv_device
    return part.kind, *where, part.rule, tuple(decline.device for decline in part.declines)


def _row(run: Sequence[Assignment]) -> Row:
    first, last = run[0], run[-1]
    # Shortages add up over a run: the largest is what all of it lacks.
    worst = max(run, key=lambda part: sum(d.missing_bytes for d in part.declines))
    return Row(
        what=f"blocks {first.index}-{last.index}" if len(run) > 1 else first.name,
        device=first.device,
        mode=first.mode,
        pinned=first.pinned,
        n_bytes=sum(part.n_bytes for part in run),
        kv_bytes=sum(part.kv_bytes for part in run),
        kv_device=first.kv_device,
        rule=first.rule,
        declined=", ".join(map(str, worst.declines)),
    )


def _cells(row: Row) -> tuple[str, ...]:
    pinned = ", pinned" if row.pinned else ""
    kv = _size(row.kv_bytes)
    kv += f" on {row.kv_device}" if kv and row.kv_device != row.device else ""
    return row.what, row.device, row.mode + pinned, _size(row.n_bytes), kv, row.rule, row.declined


def _use_cells(use: DeviceUse) -> tuple[str, ...]:
    slots = f"{use.n_slots} x {format_size(use.slot_bytes)}" if use.n_slots else ""
    kv = _size(use.kv_bytes + use.visiting_kv_bytes)
    kinds = _size(use.weights_bytes), kv, slots, _size(use.workspace_bytes)
    budget = "" if use.budget_bytes is None else format_size(use.budget_bytes)
    return use.device, *kinds, format_size(use.n_bytes), budget


def _size(n_bytes: int) -> str:
    return format_size(n_bytes) if n_bytes else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; one that is empty but for its title is left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
