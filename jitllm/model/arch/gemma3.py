"""Gemma 3, text: five window blocks, then one that sees everything."""

from jitllm.model.arch.common import POST_NORMS, QK_NORM, Architecture

ARCH = Architecture(
    name="gemma3",
    rope_style="neox",
    extra_tensors=POST_NORMS | QK_NORM,
    optional_tensors={},
    activation="gelu",
    scale_embedding=True,
    rope_base=1000000.0,
    window_period=6,
    window=1024,
    window_rope_base=10000.0,
    width_scaled_blocks=62,
)
