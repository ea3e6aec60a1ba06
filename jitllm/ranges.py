"""The numbers that a setting may be, and how a sentence says so."""

import math
from dataclasses import dataclass
from typing import Any

from jitllm.errors import SettingError


@dataclass(frozen=True)
class Range:
    """The numbers of a kind, int or float, from `low` to `high`."""

    kind: type
    low: float = 0
    high: float = math.inf

    def holds(self, value: Any) -> bool:
        """Whether `value` is one of them; NaN, the infinities and `True` never are."""
        kinds = (int,) if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or value == math.inf:
            return False
        return self.low <= value <= self.high

    def check(self, name: str, value: Any) -> None:
        """SettingError for a `value` that is not one of them."""
        if not self.holds(value):
            raise SettingError(name, f"{name} has to be {self}, but is {value!r}")

    def __str__(self) -> str:
        noun = "a whole number" if self.kind is int else "a number"
        if self.high == math.inf:
            return f"{noun} of {self.low} or more"
        return f"{noun} from {self.low} to {self.high}"


def check_counts(settings: Any, **least: int) -> None:
    """SettingError for a field of `settings` that is set and is no whole number of its `least` or
    more."""
    for name, low in least.items():
        if (value := getattr(settings, name)) is not None:
            Range(int, low).check(name, value)
