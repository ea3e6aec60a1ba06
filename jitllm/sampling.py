"""What a user can ask of the sampler. Plain data, no numpy and no jax: the command line reads the
defaults and the field docstrings from here, and the server checks its request fields here."""

from dataclasses import dataclass

from jitllm.ranges import Range

_RANGES = {
    "n": Range(int, 1),
    "temp": Range(float),
    "top_k": Range(int),
    "top_p": Range(float, 0, 1),
    "min_p": Range(float, 0, 1),
    # logits are float32: there a factor of 1e-40 is 0, and what it divides is infinite
    "repeat_penalty": Range(float, 0.001, 1000),
    "repeat_last_n": Range(int),
    "presence_penalty": Range(float, -2, 2),
    "frequency_penalty": Range(float, -2, 2),
    "seed": Range(int, -(2**63), 2**64 - 1),
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
        """SettingError for a value outside its range."""
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if not (value is None and name in _OPTIONAL):
                allowed.check(name, value)
