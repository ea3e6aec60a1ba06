"""Models and machines as bare numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from jitllm.placement.devices import Device

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Page:
    """What the planner asks of a container's page."""

    kind: str
    index: int
    n_bytes: int


def pages(
    blocks: Sequence[int], head: Sequence[int] = (), embed: int = 0, dense: int = 0
) -> list[Page]:
    """A model's pages with these sizes; the last two kinds only where they have bytes."""
    kinds = {"dense": [dense], "block": blocks, "head": head, "embed": [embed]}
    return [
        Page(kind, index, n_bytes)
        for kind, sizes in kinds.items()
        for index, n_bytes in enumerate(sizes)
        if n_bytes
    ]


def machine(host: int | None = None, **budgets: int | None) -> list[Device]:
    """The host and devices: `cpu_1=3 * MIB` is cpu:1 with 3 MiB."""
    others = [Device(id.replace("_", ":"), budget_bytes=b) for id, b in budgets.items()]
    return [Device("host", budget_bytes=host), *others]


STORIES_PAGES = pages([180 * KIB] * 5, [128 * KIB], embed=128 * KIB, dense=4 * KIB)
"""The pages of stories260K's container: five blocks, a head and an embedding of its own."""
STORIES_KV = [64 * KIB] * 5
"""Its cache for all of its 512 tokens, f16."""
STORIES_WORKSPACE = 1280 * KIB
"""Activations of a prefill step of 512 tokens."""
