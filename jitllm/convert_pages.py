"""Which rows of a GGUF go to which page of its container, and the bytes they become there."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jitllm.errors import FormatError
from jitllm.gguf_file import GGUFFile, GGUFTensor
from jitllm.kernels.qtypes import QTYPES
from jitllm.model.arch import expected_tensors
from jitllm.model.config import ModelConfig
from jitllm.paging.container import EMBEDDING, TILE_ROWS, PageSpec, TensorSpec, plan_layout

HEAD = "output.weight"
BATCH_BYTES = 8 << 20
"""How much of a tensor is in memory at a time, twice: as it was and as it will be."""

# The exponent bits of the floats in a block: all set in NaN and infinity.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80)}
_HALF_EXPONENT = ("<u2", 0x7C00)


@dataclass(frozen=True)
class Part:
    """The rows of a source tensor that go to one page, and how they lie there."""

    tensor: GGUFTensor
    page: int
    first_row: int
    n_rows: int
    as_rows: bool = False
    """GGUF rows as they are, not tiles."""

    def spec(self) -> TensorSpec:
        """What the container's table says of it; a vector is F32 whatever it was."""
        name, qtype, columns = self.tensor.name, QTYPES[self.tensor.qtype], self.tensor.shape[-1]
        if len(self.tensor.shape) == 1:
            return TensorSpec(name, "F32", (columns,), self.page, 4 * columns)
        n_rows = self.n_rows if self.as_rows else -(-self.n_rows // TILE_ROWS) * TILE_ROWS
        n_bytes, shape = n_rows * qtype.row_bytes(columns), (self.n_rows, columns)
        return TensorSpec(name, qtype.name, shape, self.page, n_bytes, self.first_row)

    def chunks(self, gguf: GGUFFile) -> Iterator[np.ndarray]:
        """Its bytes as the page holds them, in order, some megabytes at a time."""
        qtype, columns = QTYPES[self.tensor.qtype], self.tensor.shape[-1]
        batch = max(TILE_ROWS, BATCH_BYTES // self.tensor.row_bytes // TILE_ROWS * TILE_ROWS)
        end = self.first_row + self.n_rows
        for first in range(self.first_row, end, batch):
            rows = gguf.read(self.tensor, first, min(batch, end - first))
            _check_finite(self.tensor, rows)
            if len(self.tensor.shape) == 1:
                yield qtype.dequantise_rows(rows, columns)
            else:
                yield rows if self.as_rows else qtype.pack(rows, columns)


def paginate(gguf: GGUFFile, config: ModelConfig) -> tuple[list[PageSpec], list[Part]]:
    """The pages in file order - dense, blocks, head slabs, embedding rows - and what is on them."""
    pages = [PageSpec("dense"), *(PageSpec("block", i) for i in range(config.n_blocks))]
    head = gguf.tensors[EMBEDDING if config.tied else HEAD]
    parts = []
    for name in expected_tensors(config):
        if name in gguf.tensors and name not in (head.name, EMBEDDING):
            page = 1 + int(name.split(".")[1]) if name.startswith("blk.") else 0
            parts.append(_whole(gguf.tensors[name], page))
    placed = plan_layout({}, [part.spec() for part in parts], pages).pages
    n_rows = slab_rows(head, max(page.n_bytes for page in placed if page.kind == "block"))
    for slab, first in enumerate(range(0, head.n_rows, n_rows)):
        parts.append(Part(head, len(pages), first, min(n_rows, head.n_rows - first)))
        pages.append(PageSpec("head", slab))
    if not config.tied:
        parts.append(replace(_whole(gguf.tensors[EMBEDDING], len(pages)), as_rows=True))
        pages.append(PageSpec("embed"))
    return pages, parts


def _whole(tensor: GGUFTensor, page: int) -> Part:
    return Part(tensor, page, 0, tensor.n_rows)


def slab_rows(head: GGUFTensor, limit_bytes: int) -> int:
    """Rows of a head slab: whole tiles within `limit_bytes` (one at least), slabs about equal."""
    n_tiles = -(-head.n_rows // TILE_ROWS)
    most = max(1, limit_bytes // (TILE_ROWS * head.row_bytes))
    n_slabs = -(-n_tiles // most)
    return -(-n_tiles // n_slabs) * TILE_ROWS


def _check_finite(tensor: GGUFTensor, rows: np.ndarray) -> None:
    """Refuse NaN and infinity, in float weights and in the scales of quantised ones."""
    dtype, exponent = _EXPONENTS.get(tensor.qtype, _HALF_EXPONENT)
    qtype, at = QTYPES[tensor.qtype], 0
    blocks = rows.reshape(-1, qtype.block_bytes)
    for part in qtype.fields:
        if part.size > 1:  # codes are single bytes, scales and floats are not
            bits = np.ascontiguousarray(blocks[:, at : at + part.n_bytes]).view(dtype)
            if (bits & exponent == exponent).any():
                raise FormatError(
                    f"{tensor.path}: tensor {tensor.name} holds values that are not finite"
                )
        at += part.n_bytes
