"""A `-placement` map for a model that runs: which blocks have to move where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING

from jitllm.errors import JitllmError, UsageError
from jitllm.placement.devices import HOST
from jitllm.placement.plan import Plan
from jitllm.placement.rules import parse_placement
from jitllm.server.errors import unsupported

if TYPE_CHECKING:
    from jitllm.engine import Engine

Move = tuple[int, int, str]
"""First block, last block, device."""


def follow(engine: Engine, text: str) -> None:
    """Bring the blocks to where the map `text` has them, all or none of them."""
    before = {block.index: block.device for block in engine.plan.blocks}
    try:
        for move in moves_for(engine.plan, text):
            engine.move(*move)
    except JitllmError:
        with suppress(JitllmError):
            for move in moves_to(engine.plan, before):
                engine.move(*move)
        raise


def moves_for(plan: Plan, text: str) -> list[Move]:
    """The moves that bring the blocks of `plan` to where the map `text` has them.

    First match wins; a block that no rule names stays. ApiError or UsageError for a rule that
    cannot be followed.
    """
    rules, n_blocks = parse_placement(text), len(plan.blocks)
    for rule in rules:
        for _, last in rule.spans or ():
            if last >= n_blocks:
                raise UsageError(
                    f"placement: {rule} names block {last}; the model has blocks 0-{n_blocks - 1}"
                )
        if rule.kind != "blocks" or rule.pin or rule.stream:
            raise unsupported(
                "placement",
                f"{rule} cannot be done while the model runs; load it again with this placement",
            )
    places = {
        block.index: next((r.place for r in rules if r.covers(block.index)), block.device)
        for block in plan.blocks
    }
    return moves_to(plan, places)


def moves_to(plan: Plan, places: Mapping[int, str]) -> list[Move]:
    """The moves that bring each block to its place. What comes home goes first, for devices to have
    room for what goes there."""
    wanted = {
        block.index: places[block.index]
        for block in plan.blocks
        if places[block.index] != block.device
    }
    return sorted(_runs(wanted), key=lambda move: move[2] != HOST)


def _runs(wanted: dict[int, str]) -> Iterator[Move]:
    """Neighbours with one destination, together."""
    numbered = enumerate(sorted(wanted.items()))
    for (to, _), run in groupby(numbered, key=lambda item: (item[1][1], item[1][0] - item[0])):
        blocks = [block for _, (block, _) in run]
        yield blocks[0], blocks[-1], to
