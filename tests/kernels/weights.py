"""Random weights of every type, their values by gguf-py, and the tensors the kernels read."""

import gguf
import jax.numpy as jnp
import numpy as np

from jitllm.kernels.qtypes import QTYPES
from jitllm.kernels.tensor import QuantizedTensor


def random_rows(qtype: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """uint8[n, row_bytes]: random codes and scales, the f16 scales small and of both signs."""
    q, rng = QTYPES[qtype], np.random.default_rng(seed)
    if q.is_float:
        values = 0.05 * rng.standard_normal((n, k), dtype=np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[qtype]).view(np.uint8)
    rows = rng.integers(0, 256, (n, k // q.group, q.block_bytes), dtype=np.uint8)
    for at in f16_fields(qtype):
        scale = rng.uniform(0.001, 0.01, rows.shape[:2]) * rng.choice([-1, 1], rows.shape[:2])
        rows[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return rows.reshape(n, -1)


def f16_fields(qtype: str) -> list[int]:
    """Where the f16 fields of a block begin."""
    starts, at = [], 0
    for field in QTYPES[qtype].fields:
        if field.size == 2:
            starts.append(at)
        at += field.n_bytes
    return starts


def values_of(rows: np.ndarray, qtype: str) -> np.ndarray:
    """f32[n, k] by gguf-py."""
    kind = gguf.GGMLQuantizationType[qtype]
    if qtype in ("F32", "F16"):
        return rows.view(np.float32 if qtype == "F32" else np.float16).astype(np.float32)
    return gguf.quants.dequantize(rows, kind)


def tensor_of(rows: np.ndarray, qtype: str, k: int) -> QuantizedTensor:
    """The tiles of GGUF rows."""
    tiles = QTYPES[qtype].pack(rows, k)
    return QuantizedTensor(jnp.asarray(tiles), qtype, (len(rows), k))


def random_weight(qtype: str, n: int, k: int, seed: int = 0) -> tuple[QuantizedTensor, np.ndarray]:
    """(tensor, f64[n, k] values)."""
    rows = random_rows(qtype, n, k, seed)
    return tensor_of(rows, qtype, k), values_of(rows, qtype).astype(np.float64)
