"""From GGUF metadata to `ModelConfig`, driven by one `Architecture` row per supported name.

The keys and their defaults are those of llama.cpp's loader (`llama-hparams`, `llama-model.cpp`).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jitllm.errors import FormatError, UnsupportedError
from jitllm.kernels.spec import AttentionSpec
from jitllm.model.config import BlockSpec, ModelConfig, RopeConfig

Getter = Callable[..., Any]
"""get(key, type, default) -> value; FormatError where it is absent (no default) or mistyped."""

_LIMITS = {  # key -> the largest value that is a model and not an attack
    "block_count": 1024,
    "embedding_length": 2**20,
    "feed_forward_length": 2**22,
    "context_length": 2**31,
    "attention.head_count": 2**12,
    "attention.head_count_kv": 2**12,
    "attention.key_length": 2**12,
    "attention.value_length": 2**12,
    "rope.dimension_count": 2**12,
    "rope.scaling.original_context_length": 2**31,
    "attention.sliding_window": 2**31,
}
_IGNORED = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal"}

BLOCK_TENSORS = {  # name in the file after `blk.N.` -> shape in letters, rows first
    "attn_norm.weight": "D",
    "attn_q.weight": "QD",
    "attn_k.weight": "KD",
    "attn_v.weight": "KD",
    "attn_output.weight": "DQ",
    "ffn_norm.weight": "D",
    "ffn_gate.weight": "FD",
    "ffn_up.weight": "FD",
    "ffn_down.weight": "DF",
}
QKV_BIAS = {"attn_q.bias": "Q", "attn_k.bias": "K", "attn_v.bias": "K"}
QK_NORM = {"attn_q_norm.weight": "H", "attn_k_norm.weight": "H"}
POST_NORMS = {"post_attention_norm.weight": "D", "post_ffw_norm.weight": "D"}


@dataclass(frozen=True)
class Architecture:
    """One supported `general.architecture`: what differs from a plain llama."""

    name: str
    rope_style: str
    extra_tensors: dict[str, str]
    """Required in every block beside `BLOCK_TENSORS`."""
    optional_tensors: dict[str, str]
    """Used where the file has them, in all blocks or in none."""
    activation: str = "silu"
    scale_embedding: bool = False
    """The embedding is multiplied by sqrt(D)."""
    rope_base: float = 10000.0
    window_period: int = 0
    """Of so many blocks all but the last look through a window; 0: the model has no windows."""
    window: int = 0
    """The window where the file does not say."""
    window_rope_base: float | None = None
    """Window blocks rotate with this base and without scaling; None: like all others."""
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    width_scaled_blocks: int = 0
    """The size with so many blocks (27B) scales queries by sqrt(D / N), not by sqrt(H)."""
    ignored_keys: frozenset[str] = frozenset()


class _Metadata:
    """Typed access to `<arch>.*` that remembers what was asked, so that nothing is dropped."""

    def __init__(self, arch: str, get: Getter):
        self._arch, self._get, self.asked = arch, get, set[str]()

    def integer(self, key: str, *default: int) -> int:
        self.asked.add(key)
        value = self._get(f"{self._arch}.{key}", int, *default)
        if (value,) != default and not 1 <= value <= _LIMITS[key]:
            raise FormatError(
                f"{self._arch}.{key} is {value}; a model has between 1 and {_LIMITS[key]}"
            )
        return value

    def number(self, key: str, *default: float) -> float:
        self.asked.add(key)
        value = float(self._get(f"{self._arch}.{key}", float, *default))
        if (value,) != default and not (math.isfinite(value) and value > 0):
            raise FormatError(f"{self._arch}.{key} is {value}; it must be finite and above zero")
        return value

    def text(self, key: str, default: str) -> str:
        self.asked.add(key)
        return self._get(f"{self._arch}.{key}", str, default)

    def refuse_others(self, keys: Iterable[str], ignored: frozenset[str]) -> None:
        prefix = self._arch + "."
        known = self.asked | ignored | _IGNORED
        for key in keys:
            if key.startswith(prefix) and key.removeprefix(prefix) not in known:
                raise UnsupportedError(
                    f"metadata key {key} is not one that jitllm understands for {self._arch}, and "
                    "ignoring it could change the answer"
                )


def _rope_configs(arch: Architecture, meta: _Metadata, head_dim: int) -> tuple[RopeConfig, ...]:
    dim = meta.integer("rope.dimension_count", head_dim)
    base = meta.number("rope.freq_base", arch.rope_base)
    window_base = meta.number("rope.freq_base_swa", arch.window_rope_base or base)
    if dim > head_dim or dim % 2:
        raise FormatError(
            f"{arch.name}.rope.dimension_count is {dim}; it must be even and at most the head "
            f"size {head_dim}"
        )
    scaling = meta.text("rope.scaling.type", "linear")
    linear = meta.number("rope.scale_linear", 1.0)
    factor = meta.number("rope.scaling.factor", linear)
    attention_factor = meta.number("rope.scaling.attn_factor", 1.0)
    context = meta.integer("rope.scaling.original_context_length", 0)
    betas = [meta.number(f"rope.scaling.yarn_beta_{b}", d) for b, d in (("fast", 32), ("slow", 1))]
    if scaling not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{arch.name}.rope.scaling.type is {scaling!r}; supported are none, linear, yarn"
        )
    if scaling == "none":
        factor = 1.0
    if scaling == "yarn":
        context = context or meta.integer("context_length")
    main = RopeConfig(
        dim,
        base,
        factor,
        context if scaling == "yarn" else 0,
        *betas,
        attention_factor=attention_factor,
    )
    if arch.window_rope_base is None:
        return (main,)
    return (main, RopeConfig(dim, window_base, uses_factors=False))


def _block_specs(arch: Architecture, meta: _Metadata, eps: float) -> tuple[list[BlockSpec], int]:
    n_blocks = meta.integer("block_count")
    width, n_heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    n_kv_heads = meta.integer("attention.head_count_kv", n_heads)
    if n_heads % n_kv_heads:
        raise FormatError(
            f"{arch.name}.attention.head_count is {n_heads}, not a multiple of head_count_kv, "
            f"{n_kv_heads}"
        )
    head_dim = meta.integer("attention.key_length", width // n_heads or 1)
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{arch.name}.attention.value_length differs from key_length")
    if head_dim % 2:
        raise FormatError(f"{arch.name} has heads of {head_dim} values; the size must be even")
    window = meta.integer("attention.sliding_window", arch.window) if arch.window_period else 0
    by_width = n_blocks == arch.width_scaled_blocks
    softcap = arch.attention_softcap
    if softcap:
        softcap = meta.number("attn_logit_softcapping", softcap)
    blocks = []
    for i in range(n_blocks):
        windowed = bool(window) and i % arch.window_period < arch.window_period - 1
        attention = AttentionSpec(
            n_heads,
            n_kv_heads,
            head_dim,
            rope_dim=meta.integer("rope.dimension_count", head_dim),
            rope_style=arch.rope_style,
            scale=(width / n_heads if by_width else head_dim) ** -0.5,
            window=window if windowed else 0,
            softcap=softcap,
            norm_eps=eps,
        )
        own_rope = int(windowed and arch.window_rope_base is not None)
        blocks.append(BlockSpec(attention, arch.activation, eps, own_rope))
    return blocks, head_dim


def build_config(
    arch: Architecture, get: Getter, keys: Iterable[str], n_vocab: int, tied: bool
) -> ModelConfig:
    """The model's config; FormatError or UnsupportedError where the metadata cannot be one."""
    meta = _Metadata(arch.name, get)
    eps = meta.number("attention.layer_norm_rms_epsilon")
    blocks, head_dim = _block_specs(arch, meta, eps)
    width = meta.integer("embedding_length")
    config = ModelConfig(
        arch=arch.name,
        width=width,
        ff_width=meta.integer("feed_forward_length"),
        n_vocab=n_vocab,
        context_length=meta.integer("context_length"),
        tied=tied,
        embedding_scale=math.sqrt(width) if arch.scale_embedding else 1.0,
        final_softcap=meta.number("final_logit_softcapping", arch.final_softcap),
        norm_eps=eps,
        ropes=_rope_configs(arch, meta, head_dim),
        blocks=tuple(blocks),
    )
    meta.refuse_others(keys, arch.ignored_keys)
    return config


def tensor_shapes(letters: str, config: ModelConfig) -> tuple[int, ...]:
    """The shape that `letters` spell for this model, rows first."""
    attention = config.blocks[0].attention
    sizes = {
        "D": config.width,
        "F": config.ff_width,
        "V": config.n_vocab,
        "H": attention.head_dim,
        "Q": attention.n_heads * attention.head_dim,
        "K": attention.n_kv_heads * attention.head_dim,
        "R": config.ropes[0].dim // 2,
    }
    return tuple(sizes[letter] for letter in letters)
