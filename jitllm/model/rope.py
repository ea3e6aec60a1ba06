"""Rotary frequencies and their cosines and sines, computed on the host in double precision.

Linear scaling divides positions by a factor; YaRN (Peng et al. 2023, as in ggml's `rope_yarn`)
divides only the slow frequencies and raises the magnitude by 1 + 0.1 ln(factor).
"""

import math

import numpy as np

from jitllm.model.config import RopeConfig


def _yarn_ramp(rope: RopeConfig) -> np.ndarray:
    """f64[R/2]: 1 where a frequency keeps its speed, 0 where it is divided by the factor."""

    def correction(rotations: float) -> float:
        turns = rope.yarn_context / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.base))

    low = max(0.0, math.floor(correction(rope.yarn_beta_fast)))
    high = min(rope.dim - 1.0, math.ceil(correction(rope.yarn_beta_slow)))
    position = (np.arange(rope.dim // 2) - low) / max(0.001, high - low)
    return 1 - np.clip(position, 0, 1)


def frequencies(rope: RopeConfig, factors: np.ndarray | None = None) -> np.ndarray:
    """Radians per position f64[R/2]. `factors` f32[R/2] is the model's `rope_freqs`, if any."""
    freqs = rope.base ** (-2.0 * np.arange(rope.dim // 2) / rope.dim)
    if factors is not None and rope.uses_factors:
        freqs = freqs / factors
    if not rope.yarn_context:
        return freqs / rope.factor
    ramp = _yarn_ramp(rope)
    return freqs / rope.factor * (1 - ramp) + freqs * ramp


def magnitude(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by."""
    yarn = 1 + 0.1 * math.log(rope.factor) if rope.yarn_context else 1.0
    return rope.attention_factor * yarn


def rope_rows(freqs: np.ndarray, scale: float, positions: np.ndarray) -> np.ndarray:
    """f32[T, 2, R/2]: cosines and sines at each of `positions` int[T]."""
    angles = positions[:, None] * freqs
    return (np.stack([np.cos(angles), np.sin(angles)], axis=1) * scale).astype(np.float32)
