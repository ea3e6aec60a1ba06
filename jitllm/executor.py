"""Drives a model over its pages: the one place where bytes, steps and KV meet.

A pass visits the pages in their order, blocks and then slabs of the output head, under
`pager.hold`, while the pager reads ahead. Where every page is resident, one token goes
through one compiled step instead. The bits are the same: all arithmetic of the generated kernels
happens inside the operations, and the portable ones always go block by block.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jitllm.kernels.ops import Ops
from jitllm.kernels.qtypes import QTYPES
from jitllm.kernels.tensor import QuantizedTensor
from jitllm.model.config import ModelConfig
from jitllm.model.rope import frequencies, magnitude, rope_rows
from jitllm.model.weights import TensorView, field_name, weight_views
from jitllm.paging.container import Container
from jitllm.paging.embedding import EmbeddingUnits
from jitllm.paging.frames import Frame
from jitllm.paging.pager import Pager
from jitllm.steps import KVCache, Steps

CHUNK_TOKENS = 512
"""Rows of a prefill step: each page is read once for so many tokens of a prompt."""
_HEAD_ROWS = 32
"""Rows of logits at once where all are wanted: 32 MiB for a vocabulary of 2^18."""
_Layout = tuple[TensorView, ...]


class Executor:
    """One model on the host device. One pass at a time: `Pager.step` sees to it."""

    def __init__(
        self,
        config: ModelConfig,
        container: Container,
        pager: Pager,
        ops: Ops,
        steps: Steps,
        device: jax.Device,
    ):
        self._config, self._container, self._pager = config, container, pager
        self._ops, self._steps, self._device = ops, steps, device
        self._layouts = [_layout(container, page) for page in range(len(container.pages))]
        self._block_pages = container.pages_of("block")
        self._head_pages = container.pages_of("head")
        dense = self._weights(pager.dense_frame, container.pages_of("dense")[0])
        self._norm = dense["output_norm"]
        factors = np.asarray(dense["rope_freqs"]) if "rope_freqs" in dense else None
        self._ropes = [(frequencies(r, factors), magnitude(r)) for r in config.ropes]
        self._resident: tuple[int, list, list] | None = None
        self.blocks_executed = 0
        """Blocks run so far, on this device."""

    def close(self) -> None:
        """Let go of every page."""
        self._resident = None
        self._norm = None

    def prefill(self, ids: Sequence[int], kvs: list[KVCache], position: int) -> np.ndarray:
        """Append `ids` at `position` of the caches; logits f32[V] after the last of them."""
        chunks = list(range(0, len(ids), CHUNK_TOKENS))
        for at in chunks[:-1]:
            with self._pager.step(self._block_pages):
                self._blocks(ids[at : at + CHUNK_TOKENS], kvs, position + at)
        at, chunk = chunks[-1], ids[chunks[-1] :]
        with self._pager.step():
            if len(chunk) == 1 and (resident := self._all_resident()):
                return self._token(chunk, kvs, position + at, *resident)
            x = self._blocks(chunk, kvs, position + at)
            return self._logits(np.asarray(x)[len(chunk) - 1 :][:1], position + len(ids) - 1)[0]

    def logits(self, ids: Sequence[int], kvs: list[KVCache], position: int) -> np.ndarray:
        """Append `ids` at `position` of the caches; logits f32[T, V] after each of them."""
        rows = []
        for at in range(0, len(ids), CHUNK_TOKENS):
            chunk = ids[at : at + CHUNK_TOKENS]
            with self._pager.step():
                x = np.asarray(self._blocks(chunk, kvs, position + at))[: len(chunk)]
                rows.append(self._logits(x, position + at))
        return np.concatenate(rows)

    def _blocks(self, ids: Sequence[int], kvs: list[KVCache], position: int) -> jax.Array:
        """x[T, D] of `ids` after all blocks; T is 1 or a whole chunk, the first rows count."""
        one = len(ids) == 1 and not self._ops.one_row
        x, ropes, span = self._inputs(ids, position, 1 if one else CHUNK_TOKENS)
        for i, (spec, page) in enumerate(zip(self._config.blocks, self._block_pages, strict=True)):
            with self._pager.hold(page) as frame:
                weights, layout = self._weights(frame, page), self._layouts[page]
                x, kvs[i] = self._steps.block(
                    layout, spec, x, weights, kvs[i], ropes[spec.rope], span
                )
                # A moving frame is refilled once it is let go: not before the step has read it.
                if not frame.pinned:
                    x.block_until_ready()
            self.blocks_executed += 1
        return x

    def _logits(self, x: np.ndarray, position: int) -> np.ndarray:
        """f32[T, V] of x[T, D], slab by slab; each slab is held once."""
        out = np.empty((len(x), self._config.n_vocab), np.float32)
        first = 0
        for page in self._head_pages:
            with self._pager.hold(page) as frame:
                ((weight),) = self._weights(frame, page).values()
                end = first + weight.shape[0]
                for at, logits in self._head_rows(x, position, weight, self._layouts[page]):
                    out[at : at + len(logits), first:end] = logits
                first = end
        return out

    def _head_rows(
        self, x: np.ndarray, position: int, weight: QuantizedTensor, layout: _Layout
    ) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, logits of some rows) of x through one slab, `_HEAD_ROWS` at a time."""
        rows = 1 if len(x) == 1 else _HEAD_ROWS
        for at in range(0, len(x), rows):
            part = x[at : at + rows]
            padded = np.zeros((rows, x.shape[1]), np.float32)
            padded[: len(part)] = part
            span = jnp.array([position + at, len(part)], jnp.int32)
            logits = self._steps.head(layout, self._put(padded), weight, self._norm, span)
            yield at, np.asarray(logits)[: len(part)]

    def _token(
        self, ids: Sequence[int], kvs: list[KVCache], position: int, blocks: list, head: list
    ) -> np.ndarray:
        """Logits f32[V] of one token through one step over everything."""
        x, ropes, span = self._inputs(ids, position, 1)
        logits, kvs[:] = self._steps.token(x, blocks, kvs, ropes, span, head, self._norm)
        self.blocks_executed += len(blocks)
        return np.asarray(logits)

    def _all_resident(self) -> tuple[list, list] | None:
        """The weights of all blocks and slabs, where every page is in its own frame."""
        if self._ops.one_row:
            return None
        generation = self._pager.generation
        if self._resident is None or self._resident[0] != generation:
            self._resident = None
            frames = self._pager.resident_frames()
            if frames is None:
                return None
            blocks = [self._weights(frames[page], page) for page in self._block_pages]
            head = [next(iter(self._weights(frames[p], p).values())) for p in self._head_pages]
            self._resident = (generation, blocks, head)
        return self._resident[1:]

    def _inputs(self, ids: Sequence[int], position: int, rows: int):
        """(x[rows, D], rope rows, span) of a step: the embedding of `ids` and where they stand."""
        x = np.zeros((rows, self._config.width), np.float32)
        for batch in self._pager.embedding(ids):
            x[batch.tokens] = self._embedding_rows(batch)
        x *= np.float32(self._config.embedding_scale)
        ropes = [self._put(rope_rows(*rope, position, rows)) for rope in self._ropes]
        return self._put(x), ropes, jnp.array([position, len(ids)], jnp.int32)

    def _embedding_rows(self, batch: EmbeddingUnits) -> np.ndarray:
        """f32[tokens, D]: the rows that one batch of look-ups brought."""
        table, width = self._container.embedding, self._config.width
        qtype, units = QTYPES[table.slabs[0].qtype], batch.units
        if table.unit_rows == 1:
            return qtype.dequantise_rows(units, width)[batch.unit]
        rows = qtype.dequantise(units, len(units) * table.unit_rows, width)
        return rows[batch.unit * table.unit_rows + batch.row]

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self._device, may_alias=False)

    def _weights(self, frame: Frame, page: int) -> dict:
        layout = self._layouts[page]
        if layout not in frame.views:
            frame.views[layout] = weight_views(frame.data, layout, self._device)
        return frame.views[layout]


def _layout(container: Container, page: int) -> _Layout:
    return tuple(
        TensorView(field_name(t.name), t.qtype, t.shape, t.offset, t.n_bytes)
        for t in container.on_page(page).values()
    )
