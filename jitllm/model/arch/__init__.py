"""The architectures that jitllm runs: one file each, one table, everything else refused by name."""

from collections.abc import Iterable

from jitllm.errors import UnsupportedError
from jitllm.model.arch import gemma, gemma2, gemma3, llama, qwen2, qwen3
from jitllm.model.arch.common import (
    BLOCK_TENSORS,
    Architecture,
    Getter,
    build_config,
    tensor_shapes,
)
from jitllm.model.config import ModelConfig

ARCHITECTURES: dict[str, Architecture] = {
    module.ARCH.name: module.ARCH for module in (llama, qwen2, qwen3, gemma, gemma2, gemma3)
}


def architecture(name: str) -> Architecture:
    """The row of the table; UnsupportedError with the list where there is none."""
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"architecture {name!r} is not one that jitllm runs; it runs {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def model_config(get: Getter, keys: Iterable[str], n_vocab: int, tied: bool) -> ModelConfig:
    """The config of a GGUF.

    `get(key, type, default)` reads its metadata, `keys` are all of them: one under the
    architecture's name that nothing here understands is refused.
    """
    arch = architecture(get("general.architecture", str))
    return build_config(arch, get, keys, n_vocab, tied)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Every tensor a file of this config may hold: name -> (shape, required). Rows first."""
    arch = ARCHITECTURES[config.arch]
    letters = {"token_embd.weight": ("VD", True), "output_norm.weight": ("D", True)}
    if not config.tied:
        letters["output.weight"] = ("VD", True)
    letters["rope_freqs.weight"] = ("R", False)
    for i in range(config.n_blocks):
        required = BLOCK_TENSORS | arch.extra_tensors
        letters |= {f"blk.{i}.{name}": (shape, True) for name, shape in required.items()}
        letters |= {
            f"blk.{i}.{name}": (shape, False) for name, shape in arch.optional_tensors.items()
        }
    return {name: (tensor_shapes(s, config), required) for name, (s, required) in letters.items()}
