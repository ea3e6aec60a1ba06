"""Qwen 3, dense: Q and K are normalised per head before they rotate."""

from jitllm.model.arch.common import QK_NORM, Architecture

ARCH = Architecture(
    name="qwen3",
    rope_style="neox",
    extra_tensors=QK_NORM,
    optional_tensors={},
)
