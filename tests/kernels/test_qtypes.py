"""Pages hold exactly the source's values; gguf-py's `dequantize` is the oracle."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitllm.errors import FormatError
from jitllm.kernels.qtypes import QTYPES


def random_rows(name: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Random source bytes with finite scales: any byte pattern is a legal block."""
    qtype, rng = QTYPES[name], np.random.default_rng(seed)
    rows = rng.integers(0, 256, (n, qtype.row_bytes(k)), dtype=np.uint8)
    blocks = rows.reshape(n, -1, qtype.block_bytes)
    at = 0
    for field in qtype.fields:
        if field.name in ("d", "m", "dmin"):
            scale = rng.uniform(-0.1, 0.1, blocks.shape[:2]).astype(np.float16)
            blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
        at += field.n_bytes
    if qtype.is_float:
        values = rng.standard_normal((n, k)).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    return rows


def reference(name: str, rows: np.ndarray) -> np.ndarray:
    raw = rows
    if name in ("F32", "F16"):
        raw = rows.view(np.float32 if name == "F32" else np.float16)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("name", QTYPES)
def test_block_sizes_are_those_of_gguf(name: str) -> None:
    group, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (QTYPES[name].group, QTYPES[name].block_bytes) == (group, block_bytes)


@pytest.mark.parametrize("name", QTYPES)
@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 40), groups=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_a_page_dequantises_to_the_bits_of_gguf_py(name: str, n: int, groups: int, seed: int):
    qtype = QTYPES[name]
    k = groups * max(qtype.group, 4)
    rows = random_rows(name, n, k, seed)
    tiles = qtype.pack(rows, k)
    assert tiles.shape == (-(-n // 16), qtype.tile_bytes(k))
    expected = reference(name, rows)
    assert same_bits(qtype.dequantise(tiles, n, k), expected)
    assert same_bits(qtype.dequantise_rows(rows, k), expected)


@pytest.mark.parametrize("name", QTYPES)
def test_page_bytes_are_the_source_bytes_for_whole_tiles(name: str) -> None:
    rows = random_rows(name, 32, 512)
    assert QTYPES[name].pack(rows, 512).nbytes == rows.nbytes


@pytest.mark.parametrize("name", QTYPES)
def test_packing_loses_no_bit_of_any_block(name: str) -> None:
    """Two sources that differ in one bit have different pages."""
    rng = np.random.default_rng(1)
    rows = random_rows(name, 16, 256)
    packed = QTYPES[name].pack(rows, 256)
    for bit in rng.choice(rows.size * 8, 60, replace=False):
        other = rows.copy()
        other.reshape(-1)[bit // 8] ^= np.uint8(1 << (bit % 8))
        changed = QTYPES[name].pack(other, 256) ^ packed
        assert np.bitwise_count(changed).sum() == 1


@pytest.mark.parametrize("name", QTYPES)
def test_the_portable_path_dequantises_the_same_values(name: str) -> None:
    rows = random_rows(name, 21, 512)
    tiles = QTYPES[name].pack(rows, 512)
    ours = np.asarray(QTYPES[name].dequantise(jnp.asarray(tiles), 21, 512, xp=jnp))
    np.testing.assert_allclose(ours, reference(name, rows), rtol=2e-6, atol=2e-6)


def test_a_row_that_is_not_whole_blocks_is_refused() -> None:
    with pytest.raises(FormatError, match="100 values cannot be Q4_K, whose blocks hold 256"):
        QTYPES["Q4_K"].row_bytes(100)
