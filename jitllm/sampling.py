"""What a user can ask of the sampler. Plain data, no numpy and no jax: the command line reads the
defaults and the field docstrings from here, and the server checks its request fields here."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from jitllm.errors import UsageError


class Interval(NamedTuple):
    """The values one field may take; `text` is how an error shows them."""

    kind: type
    low: float
    high: float
    text: str
    open_low: bool = False

    def holds(self, value: Any) -> bool:
        """Whether `value` is of the kind and inside the interval (NaN never is)."""
        kinds = (int,) if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            return False
        return self.low <= value <= self.high and not (self.open_low and value == self.low)


_INTERVALS = {
    "n": Interval(int, 1, math.inf, "[1, inf)"),
    "temp": Interval(float, 0, math.inf, "[0, inf)"),
    "top_k": Interval(int, 0, math.inf, "[0, inf)"),
    "top_p": Interval(float, 0, 1, "[0, 1]"),
    "min_p": Interval(float, 0, 1, "[0, 1]"),
    "repeat_penalty": Interval(float, 0, math.inf, "(0, inf)", open_low=True),
    "repeat_last_n": Interval(int, 0, math.inf, "[0, inf)"),
    "presence_penalty": Interval(float, -2, 2, "[-2, 2]"),
    "frequency_penalty": Interval(float, -2, 2, "[-2, 2]"),
    "seed": Interval(int, -(2**63), 2**64 - 1, "[-2^63, 2^64)"),
}
_OPTIONAL = ("n", "seed")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and how many. The steps come in llama.cpp's order: penalties,
    top-k, top-p, min-p, temperature, draw."""

    n: int | None = None
    """New tokens at most; absent: to the end of the reply or of the context."""
    temp: float = 0.8
    """Temperature; 0 always takes the likeliest token."""
    top_k: int = 40
    """Draw from the K likeliest tokens only; 0 is off."""
    top_p: float = 0.95
    """Draw from the fewest likeliest tokens whose probabilities reach P; 1 is off."""
    min_p: float = 0.05
    """Drop tokens less likely than P times the likeliest; 0 is off."""
    repeat_penalty: float = 1.0
    """Make tokens of the recent text less likely by this factor; 1 is off."""
    repeat_last_n: int = 64
    """How many tokens back the repeat penalty looks; 0 is off."""
    presence_penalty: float = 0.0
    """Take this off the logit of every token that the reply already has; 0 is off."""
    frequency_penalty: float = 0.0
    """Take this off a token's logit for each time that the reply already has it; 0 is off."""
    seed: int | None = None
    """Seed of the draws; absent: another one each time."""

    def __post_init__(self) -> None:
        """Raises `UsageError`, naming the field and its interval, for a value outside it."""
        for name, interval in _INTERVALS.items():
            value = getattr(self, name)
            if not (value is None and name in _OPTIONAL) and not interval.holds(value):
                kind = "a whole number" if interval.kind is int else "a number"
                raise UsageError(f"{name} has to be {kind} in {interval.text}, but is {value!r}")
