"""Gemma 1: GELU gate, embedding scaled by sqrt(D)."""

from jitllm.model.arch.common import Architecture

ARCH = Architecture(
    name="gemma",
    rope_style="neox",
    extra_tensors={},
    optional_tensors={},
    activation="gelu",
    scale_embedding=True,
)
