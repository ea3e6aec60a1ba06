"""Llama and its many descendants: Mistral, SmolLM2, TinyLlama, Yi, ..."""

from jitllm.model.arch.common import QKV_BIAS, Architecture

ARCH = Architecture(
    name="llama",
    rope_style="norm",
    extra_tensors={},
    optional_tensors=QKV_BIAS,
    # Mistral files carry the window of the model card; llama.cpp runs this architecture without.
    ignored_keys=frozenset({"attention.sliding_window"}),
)
