"""Tiny models of every supported architecture and weight type, written with the gguf package.

Every tensor is random, norms and biases too. The randomness is PCG64's raw bits through integer
and IEEE operations alone, so a model is the same on every machine and under every numpy: the
figures in `golden/` belong to exactly these weights.
"""

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type


@dataclass(frozen=True)
class Tiny:
    """What distinguishes a model; the rest follows."""

    arch: str = "llama"
    width: int = 64
    ff_width: int = 96
    n_blocks: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    tied: bool = False
    qtype: str = "F32"
    """Of all matrices; vectors are F32."""
    context_length: int = 256
    n_unused_tokens: int = 0
    """Of the vocabulary, beside the `N_VOCAB` that a text can have."""
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    rope_freqs: bool = False
    norm_eps: float = 1e-5
    metadata: dict[str, int | float | str] = field(default_factory=dict)
    """Keys after `<arch>.`."""
    seed: int = 0
    """In `MODELS`: one whose greedy continuation has few near-ties."""

    @property
    def n_vocab(self) -> int:
        """All tokens."""
        return N_VOCAB + self.n_unused_tokens


_GEMMA = Tiny("gemma", tied=True, head_dim=32, norm_eps=1e-6, seed=7)
_GEMMA2 = replace(
    _GEMMA,
    arch="gemma2",
    post_norms=True,
    metadata={
        "attention.sliding_window": 8,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    seed=2,
)
_WIDE = Tiny(width=256, ff_width=512, n_blocks=2, head_dim=64)

ARCHITECTURES: dict[str, Tiny] = {
    "llama": Tiny(seed=2),
    "llama-tied-mha": Tiny(n_kv_heads=4, tied=True, seed=5),
    "llama-rope-freqs": Tiny(
        n_heads=2,
        n_kv_heads=1,
        head_dim=32,
        rope_freqs=True,
        metadata={"rope.freq_base": 500000.0},
        seed=1,
    ),
    "llama-linear": Tiny(
        metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, seed=6
    ),
    "llama-yarn": Tiny(
        metadata={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        seed=4,
    ),
    "qwen2": Tiny("qwen2", qkv_bias=True, metadata={"rope.freq_base": 1e6}),
    "qwen3": Tiny("qwen3", head_dim=32, qk_norm=True, metadata={"rope.freq_base": 1e6}, seed=4),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        arch="gemma3",
        n_blocks=7,
        qk_norm=True,
        metadata={"attention.sliding_window": 8, "rope.freq_base": 1e6},
        seed=7,
    ),
}
_SEEDS = {"F32": 2, "F16": 2, "BF16": 2, "Q8_0": 4, "Q4_0": 4, "Q4_1": 7, "Q5_0": 0, "Q5_1": 0}
_SEEDS |= {"Q4_K": 4, "Q5_K": 2, "Q6_K": 4}
QUANTISED: dict[str, Tiny] = {
    qtype: replace(_WIDE, qtype=qtype, seed=seed) for qtype, seed in _SEEDS.items()
}
"""One llama model per weight type."""
MODELS = ARCHITECTURES | QUANTISED

Tensors = dict[str, tuple[str, np.ndarray]]
"""name -> (type, f32 vector or rows of source bytes)."""


def write_tiny(path: Path, name: str = "llama", **overrides: object) -> Path:
    """A GGUF at `path`: the model `name` of `MODELS` with fields of `Tiny` overridden."""
    tiny = replace(MODELS[name], **overrides)  # type: ignore[arg-type]
    return write_gguf(path, tiny, dict(random_tensors(tiny)))


def write_gguf(
    path: Path,
    tiny: Tiny,
    tensors: Tensors,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """`tensors` with the metadata of `tiny`, after `edit` had its way with it."""
    writer = gguf.GGUFWriter(path, tiny.arch)
    writer.add_name("tiny")
    for key, value in _metadata(tiny).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{tiny.arch}.{key}", value)
    _add_vocabulary(writer, tiny.n_unused_tokens)
    edit(writer)
    for tensor, (qtype, data) in tensors.items():
        writer.add_tensor(tensor, data, raw_dtype=Type[qtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def digest(tensors: Tensors) -> str:
    """The weights' sha256: which model a golden belongs to."""
    sha256 = hashlib.sha256()
    for name, (qtype, data) in tensors.items():
        sha256.update(f"{name} {qtype} {data.shape}".encode() + data.tobytes())
    return sha256.hexdigest()


def exact_values(tensors: Tensors) -> Tensors:
    """The same weights as F32."""
    return {
        name: ("F32", data if data.ndim == 1 else dequantised(qtype, data))
        for name, (qtype, data) in tensors.items()
    }


def dequantised(qtype: str, rows: np.ndarray) -> np.ndarray:
    """f32[n, k] of source rows, by gguf-py."""
    if qtype in ("F32", "F16"):
        rows = rows.view({"F32": np.float32, "F16": np.float16}[qtype])
    return gguf.quants.dequantize(rows, Type[qtype])


def _metadata(tiny: Tiny) -> dict[str, int | float | str]:
    return {
        "context_length": tiny.context_length,
        "embedding_length": tiny.width,
        "block_count": tiny.n_blocks,
        "feed_forward_length": tiny.ff_width,
        "attention.head_count": tiny.n_heads,
        "attention.head_count_kv": tiny.n_kv_heads,
        "attention.key_length": tiny.head_dim,
        "attention.value_length": tiny.head_dim,
        "attention.layer_norm_rms_epsilon": tiny.norm_eps,
        "rope.dimension_count": tiny.head_dim,
        "vocab_size": tiny.n_vocab,
    } | tiny.metadata


# Weights


def random_tensors(tiny: Tiny) -> Iterator[tuple[str, tuple[str, np.ndarray]]]:
    """(name, (type, data)) of every tensor, in the order of llama.cpp's own files."""
    n_vocab, width = tiny.n_vocab, tiny.width
    yield "token_embd.weight", _matrix(tiny, "token_embd", n_vocab, width, _embed_std(tiny))
    yield "output_norm.weight", _norm(tiny, "output_norm", width)
    if not tiny.tied:
        yield "output.weight", _matrix(tiny, "output", n_vocab, width)
    if tiny.rope_freqs:
        factors = 1 + 7 * np.sort(_uniform(tiny, "rope_freqs", (tiny.head_dim // 2,)))
        yield "rope_freqs.weight", ("F32", factors.astype(np.float32))
    for i in range(tiny.n_blocks):
        for name, tensor in _block_tensors(tiny, f"blk.{i}."):
            yield f"blk.{i}.{name}", tensor


def _embed_std(tiny: Tiny) -> float:
    """So that the first block sees values of about 1, and a tied head gives sane logits."""
    return 0.05 if tiny.tied else 1.0


def _block_tensors(tiny: Tiny, prefix: str) -> Iterator[tuple[str, tuple[str, np.ndarray]]]:
    d, f = tiny.width, tiny.ff_width
    q, kv = tiny.n_heads * tiny.head_dim, tiny.n_kv_heads * tiny.head_dim
    matrices = {
        "attn_q": (q, d),
        "attn_k": (kv, d),
        "attn_v": (kv, d),
        "attn_output": (d, q),
        "ffn_gate": (f, d),
        "ffn_up": (f, d),
        "ffn_down": (d, f),
    }
    norms = {"attn_norm": d, "ffn_norm": d}
    if tiny.qk_norm:
        norms |= {"attn_q_norm": tiny.head_dim, "attn_k_norm": tiny.head_dim}
    if tiny.post_norms:
        norms |= {"post_attention_norm": d, "post_ffw_norm": d}
    for name, (n, k) in matrices.items():
        yield f"{name}.weight", _matrix(tiny, prefix + name, n, k)
    for name, n in norms.items():
        yield f"{name}.weight", _norm(tiny, prefix + name, n)
    if tiny.qkv_bias:
        for name, n in {"attn_q": q, "attn_k": kv, "attn_v": kv}.items():
            values = _centred(tiny, f"{prefix}{name}.bias", (n,), 0.3)
            yield f"{name}.bias", ("F32", values)


def _norm(tiny: Tiny, name: str, n: int) -> tuple[str, np.ndarray]:
    return "F32", np.float32(1) + _centred(tiny, name, (n,), 0.1)


def _matrix(
    tiny: Tiny, name: str, n: int, k: int, std: float | None = None
) -> tuple[str, np.ndarray]:
    std = 1 / math.sqrt(k) if std is None else std
    if tiny.qtype in _SCALES:
        return tiny.qtype, _random_blocks(tiny, name, n, k, std)
    values = _centred(tiny, name, (n, k), std)
    return tiny.qtype, _CASTS[tiny.qtype](values).view(np.uint8)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return gguf.quants.quantize(values, Type.BF16)


_CASTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda values: values,
    "F16": lambda values: values.astype(np.float16),
    "BF16": _bfloat16,
}
_SCALES: dict[str, dict[int, float]] = {
    # type -> offset of each f16 scale in a block -> its value for weights of standard deviation 1
    # and mean 0 over random codes: 1 / std(code), minus that times mean(code) for a minimum.
    "Q8_0": {0: 1 / 73.9},
    "Q4_0": {0: 1 / 4.61},
    "Q4_1": {0: 1 / 4.61, 2: -7.5 / 4.61},
    "Q5_0": {0: 1 / 9.23},
    "Q5_1": {0: 1 / 9.23, 2: -15.5 / 9.23},
    # Scales and minima of the subgroups are random too.
    "Q4_K": {0: 1 / 257, 2: 7.5 / 257},
    "Q5_K": {0: 1 / 525, 2: 15.5 / 525},
    "Q6_K": {208: 1 / 1367},
}


def _random_blocks(tiny: Tiny, name: str, n: int, k: int, std: float) -> np.ndarray:
    """Source rows uint8[n, bytes]: any bytes are legal codes, and the scales are sane."""
    group, block_bytes = gguf.GGML_QUANT_SIZES[Type[tiny.qtype]]
    blocks = _bits(tiny, name, n * (k // group) * block_bytes).reshape(-1, block_bytes)
    for at, scale in _SCALES[tiny.qtype].items():
        spread = 0.75 + 0.5 * _uniform(tiny, f"{name}@{at}", (len(blocks), 1))
        if len(_SCALES[tiny.qtype]) == 1:  # signed codes reach further down than up
            spread *= np.where(_bits(tiny, f"{name}±", len(blocks)) % 2, 1, -1)[:, None]
        blocks[:, at : at + 2] = (std * scale * spread).astype(np.float16).view(np.uint8)
    return blocks.reshape(n, -1)


def _bits(tiny: Tiny, name: str, n_bytes: int) -> np.ndarray:
    """Random uint8[n_bytes], a stream of its own for every name."""
    generator = np.random.PCG64([tiny.seed, zlib.crc32(name.encode())])
    return generator.random_raw(-(-n_bytes // 8)).view(np.uint8)[:n_bytes]


def _uniform(tiny: Tiny, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """f64 of `shape` in [0, 1)."""
    words = _bits(tiny, name, 4 * int(np.prod(shape))).view(np.uint32)
    return (words * 2.0**-32).reshape(shape)


def _centred(tiny: Tiny, name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    return ((_uniform(tiny, name, shape) - 0.5) * (math.sqrt(12) * std)).astype(np.float32)


# Vocabulary: that of stories260K (Andrej Karpathy, MIT), pieces in the order of their merges.

_PIECES = """\
▁t he ▁a ▁s ▁w nd ▁the ed ▁to ▁b ▁and ▁h in ▁f ▁wa ▁T it re ou ▁l ▁d ▁c ▁he ▁p ay ▁m er ▁was \
om im on il ▁The id is at ar ▁sa ▁n ▁g ing ▁ha ▁S en an or le ll ▁L ▁th ot ily ▁her ▁it ▁" \
am ir et ▁Lily ▁u ▁O ▁H ▁On ▁in ut ▁pl ri ▁Tim ow ▁day ▁be ver ce ith ig ▁o ▁with ▁said \
▁play ▁She pp ck ld ▁They my ▁e ▁his ▁He oo ▁y ▁st ▁up ▁that ▁r ▁on ke ked st ▁mom ▁she ▁I \
ve nt itt very ▁you ▁happ ▁they end ▁B ime ▁big ▁fri se ▁of ▁friend ittle ▁little ent ▁time \
un ad ▁had ▁we ▁there ▁so ▁One her ▁for all ould ▁nam ▁want ▁M ▁happy ▁saw ▁named ved ▁li \
▁but ▁very ▁do ▁lo ch ▁Once ▁ne ▁Timmy es ▁upon out ▁k ▁ e a t o h n i d s r l y m w u . p g \
c b f , k T v " S L ' H O I ! x B M A W j ? z Y F J D q C N E P R K G - “ ” : ’ Z V U 3 Q ; \
1 – 0 X 2 5 — ‘ 9 4 é … 8 ) ( 6 7 / ñ $ ` + * \u00a0 & \\ % â € < > | ™ [ ] ~ \u200a"""
_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *_PIECES.split(" ")]
N_VOCAB = len(_TOKENS)


def _add_vocabulary(writer: gguf.GGUFWriter, n_unused: int) -> None:
    n_pieces = N_VOCAB - 259
    writer.add_tokenizer_model("llama")
    writer.add_token_list(_TOKENS + [f"<unused{i}>" for i in range(n_unused)])
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(n_pieces)] + [0.0] * n_unused)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * n_pieces + [5] * n_unused)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
