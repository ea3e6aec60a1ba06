"""Small containers of random bytes for the paging tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jitllm.paging.container import ContainerWriter, PageSpec, TensorSpec

METADATA = {"name": "toy", "tokens": ["a", "é", "\n"]}


def toy_plan(
    block_bytes: Sequence[int] = (5000, 9000, 5000),
    slab_rows: Sequence[int] = (32, 18),
    tied: bool = True,
    cols: int = 100,
) -> tuple[dict, list[TensorSpec], list[PageSpec]]:
    """Metadata, tensors and pages: a dense page, blocks of about the sizes given, F32 head slabs
    of `slab_rows` rows and, untied, as many embedding rows."""
    pages = [PageSpec("dense"), *(PageSpec("block", i) for i in range(len(block_bytes)))]
    tensors = [TensorSpec("output_norm.weight", "F32", (cols,), 0, 4 * cols)]
    for i, n_bytes in enumerate(block_bytes):
        first = n_bytes // 3 // 4 * 4
        rest = n_bytes // 4 * 4 - first
        name = f"blk.{i}"
        tensors += [
            TensorSpec(f"{name}.attn_q.weight", "F32", (1, first // 4), i + 1, first),
            TensorSpec(f"{name}.ffn_up.weight", "F32", (1, rest // 4), i + 1, rest),
        ]
    row, head = 0, "token_embd.weight" if tied else "output.weight"
    for slab, rows in enumerate(slab_rows):
        n_bytes = -(-rows // 16) * 16 * cols * 4
        tensors.append(TensorSpec(head, "F32", (rows, cols), len(pages), n_bytes, row))
        pages.append(PageSpec("head", slab))
        row += rows
    if not tied:
        n_bytes = row * cols * 4
        tensors.append(TensorSpec("token_embd.weight", "F32", (row, cols), len(pages), n_bytes))
        pages.append(PageSpec("embed"))
    return METADATA, tensors, pages


def toy_weights(
    tensors: Sequence[TensorSpec], pages: Sequence[PageSpec], seed: int
) -> dict[str, np.ndarray]:
    """Random bytes by tensor key: uint8[units, unit bytes], or [1, bytes] off the head."""
    rng, weights = np.random.default_rng(seed), {}
    for tensor in tensors:
        unit_rows = {"head": 16, "embed": 1}.get(pages[tensor.page].kind, tensor.shape[0])
        n_units = -(-tensor.shape[0] // unit_rows) if len(tensor.shape) == 2 else 1
        key = f"{tensor.name}@{tensor.first_row}" if tensor.first_row else tensor.name
        weights[key] = rng.integers(0, 256, (n_units, tensor.n_bytes // n_units), dtype=np.uint8)
    return weights


def write_toy(path: Path, force: bool = False, seed: int = 0, **plan) -> tuple[Path, dict]:
    """A container of random bytes at `path`, and the bytes by tensor key."""
    metadata, tensors, pages = toy_plan(**plan)
    weights = toy_weights(tensors, pages, seed)
    with ContainerWriter(path, metadata, tensors, pages, force) as writer:
        for page in range(len(pages)):
            placed = [t for t in writer.layout.tensors if t.page == page]
            writer.write_page(page, [(t.name, weights[t.key]) for t in placed])
        writer.finish()
    return path, weights


def kernel_read_bytes() -> int:
    """Bytes that the kernel says this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
