"""Qwen 2 and 2.5: biases on Q, K and V."""

from jitllm.model.arch.common import QKV_BIAS, Architecture

ARCH = Architecture(
    name="qwen2",
    rope_style="neox",
    extra_tensors=QKV_BIAS,
    optional_tensors={},
)
