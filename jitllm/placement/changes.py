"""Changes to a plan that is in force: a new plan from an old one, or an error and the old one.

Pure, as planning is. The old plan says what is on the devices now, KV of all conversations
included; the new one never exceeds a budget either.
"""

from collections.abc import Sequence
from dataclasses import replace

from jitllm.errors import BudgetError, DeviceError, UsageError
from jitllm.placement.devices import HOST
from jitllm.placement.plan import PAGED, RESIDENT, Assignment, Decline, DeviceUse, Plan
from jitllm.units import format_size


def move(plan: Plan, first: int, last: int, to: str) -> Plan:
    """`plan` with blocks `first` to `last` resident on device `to` (an id), KV included.

    UsageError for blocks that are not there or are pinned, DeviceError for a device that is not
    open, BudgetError with the missing bytes where they do not fit.
    """
    n_blocks = len(plan.blocks)
    if last < first:
        raise UsageError(f"blocks {first}-{last} end before they begin; write {last}-{first}")
    if not 0 <= first <= last < n_blocks:
        raise UsageError(f"blocks {first}-{last} are not there; the model has 0-{n_blocks - 1}")
    if to not in plan.tally.uses:
        raise DeviceError(f"{to} is not a device that is open ({', '.join(plan.tally.uses)})")
    for block in plan.blocks[first : last + 1]:
        if block.pinned:
            raise UsageError(f"{block.name} is pinned to {block.device} by {block.rule}")
    rule, mode = f"moved to {to}", PAGED if to == HOST else RESIDENT
    parts = [
        replace(part.at(to, mode, rule, plan.kv_place), declines=(), home_from=None)
        if part.kind == "block" and first <= part.index <= last
        else part
        for part in plan.assignments
    ]
    moved = _counted(plan, parts)
    use = moved.use(to)
    if to != HOST and use.missing_bytes > 0:
        raise BudgetError(
            f"blocks {first}-{last} do not fit on {to}, which lacks "
            f"{format_size(use.missing_bytes)}; nothing was moved",
            use.n_bytes,
        )
    return moved


def resize(plan: Plan, kv: Sequence[int]) -> Plan:
    """`plan` with the KV sizes `kv` of each block. BudgetError where a device cannot hold them."""
    resized = _counted(plan, [_with_kv(part, kv) for part in plan.assignments])
    over = _overfull(resized)
    if over:
        use = max(over, key=lambda use: use.missing_bytes)
        raise BudgetError(
            f"{use.device} lacks {format_size(use.missing_bytes)} for the KV of one more "
            "conversation; move blocks off it, end another conversation, or allow -relocate",
            use.n_bytes,
        )
    return resized


def relocate(plan: Plan, kv: Sequence[int]) -> Plan:
    """`plan` with the KV sizes `kv`: each device that cannot hold its own any more sends its last
    blocks home, as few as can be; what went home before returns where there is room again.

    BudgetError where pinned blocks leave a device too little.
    """
    parts = [_returned(_with_kv(part, kv), plan.kv_place) for part in plan.assignments]
    while True:
        relocated = _counted(plan, parts)
        over = _overfull(relocated)
        if not over:
            return relocated
        leaving = _last_to_leave(parts, over[0])
        parts[leaving] = _sent_home(parts[leaving], over[0].missing_bytes)


def halfway(old: Plan, new: Plan) -> Plan:
    """On the way to `new`: what leaves a device has left, what comes to one has not come yet.

    A device never has to hold both.
    """
    pairs = zip(old.assignments, new.assignments, strict=True)
    parts = [
        replace(before, kv_bytes=after.kv_bytes) if before.device == HOST else after
        for before, after in pairs
    ]
    return _counted(new, parts)


def rebudget(plan: Plan, host_bytes: int) -> Plan:
    """`plan` with another budget for the host's pages."""
    use = replace(plan.use(HOST), budget_bytes=host_bytes)
    tally = replace(plan.tally, uses=plan.tally.uses | {HOST: use})
    return Plan.of(plan.assignments, tally, plan.kv_place)


def _counted(plan: Plan, parts: Sequence[Assignment]) -> Plan:
    """A plan of `parts` on the devices of `plan`."""
    tally = plan.tally.empty().add_all(parts).with_second_slots()
    return Plan.of(parts, tally, plan.kv_place)


def _overfull(plan: Plan) -> list[DeviceUse]:
    return [use for use in plan.uses if use.device != HOST and use.missing_bytes > 0]


def _with_kv(part: Assignment, kv: Sequence[int]) -> Assignment:
    return replace(part, kv_bytes=kv[part.index]) if part.kind == "block" else part


def _returned(part: Assignment, kv_place: str) -> Assignment:
    if part.home_from is None:
        return part
    part = part.at(*part.home_from, part.rule, kv_place)
    return replace(part, home_from=None, declines=())


def _sent_home(part: Assignment, missing_bytes: int) -> Assignment:
    home_from, decline = (part.device, part.mode), Decline(part.device, missing_bytes, asked=False)
    part = replace(part, home_from=home_from, declines=(decline,))
    return replace(part, device=HOST, kv_device=HOST, mode=PAGED)


def _last_to_leave(parts: Sequence[Assignment], use: DeviceUse) -> int:
    movable = [
        i
        for i, part in enumerate(parts)
        if part.kind == "block" and part.device == use.device and not part.pinned
    ]
    if not movable:
        raise BudgetError(
            f"{use.device} lacks {format_size(use.missing_bytes)} for its KV, and everything on "
            "it is pinned",
            use.n_bytes,
        )
    return movable[-1]
