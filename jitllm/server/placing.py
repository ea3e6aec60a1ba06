"""A `-placement` map for a model that runs: which blocks have to move where. Pure."""

from collections.abc import Iterator
from itertools import groupby

from jitllm.placement.devices import HOST
from jitllm.placement.plan import Plan
from jitllm.placement.rules import parse_placement
from jitllm.server.errors import unsupported

Move = tuple[int, int, str]
"""First block, last block, device."""


def moves_for(plan: Plan, text: str) -> list[Move]:
    """The moves that bring the blocks of `plan` to where the map `text` has them.

    First match wins; a block that no rule names stays. What comes home goes first, for devices
    to have room for what goes there.
    """
    rules = parse_placement(text)
    for rule in rules:
        if rule.kind != "blocks" or rule.pin or rule.stream:
            raise unsupported(
                "placement",
                f"{rule} cannot be done while the model runs; load it again with this placement",
            )
    wanted = {}
    for block in plan.blocks:
        place = next((rule.place for rule in rules if rule.covers(block.index)), block.device)
        if place != block.device:
            wanted[block.index] = place
    return sorted(_runs(wanted), key=lambda move: move[2] != HOST)


def _runs(wanted: dict[int, str]) -> Iterator[Move]:
    """Neighbours with one destination, together."""
    numbered = enumerate(sorted(wanted.items()))
    for (to, _), run in groupby(numbered, key=lambda item: (item[1][1], item[1][0] - item[0])):
        blocks = [block for _, (block, _) in run]
        yield blocks[0], blocks[-1], to
