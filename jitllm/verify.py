"""Is a placement right? The same tokens on the host alone and on the devices, position by position.

Among devices of one kind the logits are bit-equal; between kinds they differ by rounding, and what
counts is how the difference compares with the margin of the likeliest token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitllm.engine import Engine

DEFAULT_TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, 3 astronauts flew to the Moon; "
    "def f(x): return x ** 2  # naïve\n"
)
TIE = 1e-2
"""Of two logits, the difference up to which rounding alone may turn one past the other."""


@dataclass(frozen=True)
class Position:
    """How the logits after one token compare."""

    position: int
    token: int
    largest_difference: float
    margin: float
    """Between the host's two likeliest tokens."""
    same_choice: bool
    """Both give the same likeliest token."""

    @property
    def is_wrong(self) -> bool:
        """The placement chooses another token than the host does, and not because of a tie."""
        return not self.same_choice and not self.margin <= TIE


@dataclass(frozen=True)
class Verification:
    """All positions, and where the blocks ran on the placement."""

    positions: tuple[Position, ...]
    executed: dict[str, int]
    """Blocks run by device id."""
    n_seams: int

    @property
    def differing(self) -> list[Position]:
        """The positions whose logits are not bit-equal."""
        return [p for p in self.positions if p.largest_difference != 0]  # NaN differs

    @property
    def wrong(self) -> list[Position]:
        """The positions at which the placement would choose another token, ties apart."""
        return [p for p in self.positions if p.is_wrong]


def verify(model: str, text: str | Sequence[int] = DEFAULT_TEXT, **options: Any) -> Verification:
    """Compare `model` on the host with the placement of `options`, which are `Engine.open`'s.

    The two are open one after the other, so that each has the memory to itself.
    """
    # The placement first: further CPU devices can only be made before JAX runs.
    with Engine.open(model, **options) as engine:
        ids = engine.tokenize(text) if isinstance(text, str) else list(text)
        ids = ids[: engine.max_seq]
        placed, stats, kv = engine.logits(ids), engine.stats(), engine.profile.kv_dtype
    alone = {k: v for k, v in options.items() if k not in ("profile", "vram", "grow")}
    with Engine.open(model, **alone | {"devices": "cpu", "kv": kv}) as engine:
        host = engine.logits(ids)
    return Verification(compare(ids, host, placed), stats.blocks_executed, stats.n_seams)


def compare(ids: Sequence[int], host: np.ndarray, placed: np.ndarray) -> tuple[Position, ...]:
    """`Position` for each row of two logits f32[T, V]."""
    top_two = np.sort(host, axis=1)[:, -2:]
    return tuple(
        Position(
            i,
            token,
            float(np.abs(host[i] - placed[i]).max()),
            float(top_two[i, 1] - top_two[i, 0]),
            bool(host[i].argmax() == placed[i].argmax()),
        )
        for i, token in enumerate(ids)
    )
