"""Synthetic models of real shapes: python -m benchmarks.models SHAPE QTYPE OUT.gguf

Speed needs no trained weights: random bytes are legal codes of every type, and with sane scales the
activations stay those of a model, so that no kernel meets infinities. Norms are near 1. The text
such a model writes means nothing.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from tests.tiny_models import N_VOCAB, Tiny, random_tensors, write_gguf


def _llama(width: int, n_blocks: int, heads: str, ff_width: int, n_vocab: int, tied: bool) -> Tiny:
    """`heads` are query heads / KV heads / head size."""
    n_heads, n_kv_heads, head_dim = map(int, heads.split("/"))
    return Tiny(
        width=width,
        n_blocks=n_blocks,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ff_width=ff_width,
        n_unused_tokens=n_vocab - N_VOCAB,
        tied=tied,
        context_length=8192,
        metadata={"rope.freq_base": 500000.0},
    )


SHAPES = {
    "llama-135m": _llama(576, 30, "9/3/64", 1536, 49152, tied=True),
    "llama-1b": _llama(2048, 16, "32/8/64", 8192, 49152, tied=True),
    "llama-3b": _llama(3072, 28, "24/8/128", 8192, 128256, tied=True),
    "llama-8b": _llama(4096, 32, "32/8/128", 14336, 128256, tied=False),
}


def write_model(path: str | Path, shape: str = "llama-1b", qtype: str = "Q4_K") -> Path:
    """A GGUF at `path` of a shape of `SHAPES`, all matrices of `qtype`; always the same."""
    model = replace(SHAPES[shape], qtype=qtype)
    return write_gguf(Path(path), model, dict(random_tensors(model)))


def main() -> None:
    """Write the model that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("qtype", help="Q4_K, Q8_0, F16, ...")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    print(write_model(args.out, args.shape, args.qtype))


if __name__ == "__main__":
    main()
