"""A weight matrix as the kernels read it: the bytes of its tiles, and what they mean."""

from dataclasses import dataclass
from functools import partial

import jax


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["qtype", "shape"])
@dataclass(frozen=True)
class QuantizedTensor:
    """W[N, K] in the tile layout of `qtypes`; floats are types like any other.

    `data` is uint8[ceil(N/16), tile_bytes]; `qtype` names a row of `QTYPES`; `shape` is (N, K).
    """

    data: jax.Array
    qtype: str
    shape: tuple[int, int]
