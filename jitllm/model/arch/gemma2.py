"""Gemma 2: every other block looks through a window; logits are soft-capped."""

from jitllm.model.arch.common import POST_NORMS, Architecture

ARCH = Architecture(
    name="gemma2",
    rope_style="neox",
    extra_tensors=POST_NORMS,
    optional_tensors={},
    activation="gelu",
    scale_embedding=True,
    window_period=2,
    window=4096,
    attention_softcap=50.0,
    final_softcap=30.0,
    width_scaled_blocks=46,
)
