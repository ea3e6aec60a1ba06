"""What is static about a model: plain frozen data, made from GGUF metadata by `arch`."""

from dataclasses import asdict, dataclass
from typing import Any

from jitllm.kernels.spec import AttentionSpec


@dataclass(frozen=True)
class RopeConfig:
    """One set of rotary frequencies; a model has one, or two where window blocks have their own."""

    dim: int
    """R, values of a head that rotate; even."""
    base: float
    factor: float = 1.0
    """Positions are divided by it: all of them, or with YaRN the slow frequencies' only."""
    yarn_context: int = 0
    """Original context length where the scaling is YaRN, else 0."""
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin, beside YaRN's own 1 + 0.1 ln(factor)."""
    uses_factors: bool = True
    """Whether `rope_freqs`, where the model has it, divides these frequencies."""


@dataclass(frozen=True)
class BlockSpec:
    """All that is static about one transformer block; equal specs compile once."""

    attention: AttentionSpec
    activation: str
    """`silu` or `gelu` (tanh approximation), on the gate."""
    norm_eps: float
    rope: int = 0
    """Index into `ModelConfig.ropes`."""


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape. D width, V vocabulary, F feed-forward width."""

    arch: str
    width: int
    ff_width: int
    n_vocab: int
    context_length: int
    tied: bool
    """The output head is the embedding matrix."""
    embedding_scale: float
    final_softcap: float
    norm_eps: float
    ropes: tuple[RopeConfig, ...]
    blocks: tuple[BlockSpec, ...]

    @property
    def n_blocks(self) -> int:
        """How many transformer blocks."""
        return len(self.blocks)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """The inverse of `to_dict`; TypeError or KeyError where a field is missing or unknown."""
        ropes = tuple(RopeConfig(**rope) for rope in data["ropes"])
        blocks = tuple(
            BlockSpec(**{**block, "attention": AttentionSpec(**block["attention"])})
            for block in data["blocks"]
        )
        return cls(**{**data, "ropes": ropes, "blocks": blocks})
