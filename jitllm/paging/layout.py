"""What a container's bytes mean: its head written from a plan, and parsed without being believed.

Little-endian. The *head* is a fixed header, then four sections, padded with zeros to 4096 bytes:

    metadata     one JSON object
    tensors      fixed records: name, qtype, page, shape, first row, offset in the page, bytes
    pages        fixed records: kind, index, offset in the file, bytes, xxh3_64 of those bytes
    row hashes   u32 per embedding unit: the low half of the unit's xxh3_64

and the pages follow, back to back, each a multiple of 4096 bytes, up to the end of the file. The
header holds the file's length and an xxh3_128 of the rest of the head. The hash finds accidents;
the checks behind it are for malice: a head that passes cannot send a reader outside a page.

An embedding *unit* is what one row look-up reads: a row of the `embed` page or, where the output
head is the embedding too (tied), the tile of 16 rows of a `head` slab that holds the row.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import xxhash

VERSION = 1
PAGE_ALIGNMENT = 4096
"""Pages start and end on multiples of this: what O_DIRECT asks of offset, length and memory."""
TENSOR_ALIGNMENT = 64
TILE_ROWS = 16
EMBEDDING = "token_embd.weight"
PAGE_KINDS = ("dense", "block", "head", "embed")
"""In the order in which they lie in the file: at most one dense page, n blocks, the head's slabs,
at most one page of embedding rows."""

MAGIC = b"JITLLM\r\n"
_HEADER = struct.Struct("<8s2I2Q8Q16s")
_HASH_BYTES = 16
_MAX_HEAD_BYTES = 1 << 28
_SECTIONS = ("metadata", "tensors", "pages", "row hashes")
# name, qtype, page, dimensions, rows, cols, first row, offset, bytes
_TENSOR = np.dtype("S64,S8,<u4,<u4,<u8,<u8,<u8,<u8,<u8")
# kind, index, offset, bytes, hash
_PAGE = np.dtype("S8,<u8,<u8,<u8,<u8")


class Damage(Exception):
    """What is wrong with a file, as the rest of a sentence that begins with its path."""


class Foreign(Damage):
    """The file does not even begin as a container does."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor, or the rows of one that lie on one page, as `plan_layout` is told of it."""

    name: str
    qtype: str
    shape: tuple[int, ...]
    """(rows, cols) of what is on this page, without tile padding; (n,) for a vector."""
    page: int
    n_bytes: int
    first_row: int = 0
    """The number in the whole tensor of the first row on this page: above 0 in later slabs."""


@dataclass(frozen=True)
class TensorEntry(TensorSpec):
    """A tensor's place: bytes `offset` to `offset + n_bytes` of its page."""

    offset: int = 0

    @property
    def key(self) -> str:
        """The name; a later slab of the same tensor adds `@first_row`."""
        return f"{self.name}@{self.first_row}" if self.first_row else self.name


@dataclass(frozen=True)
class PageSpec:
    """A page's kind (one of `PAGE_KINDS`) and its number within the kind: block or slab number."""

    kind: str
    index: int = 0


@dataclass(frozen=True)
class PageEntry(PageSpec):
    """A page's place in the file, and the xxh3_64 of its `n_bytes` bytes."""

    offset: int = 0
    n_bytes: int = 0
    hash: int = 0


@dataclass(frozen=True)
class EmbeddingTable:
    """Where embedding units lie: unit u holds rows u * unit_rows and on, in `unit_bytes` bytes."""

    slabs: tuple[TensorEntry, ...]
    unit_rows: int
    unit_bytes: int

    @property
    def n_rows(self) -> int:
        """Rows of the whole embedding: the size of the vocabulary."""
        return self.slabs[-1].first_row + self.slabs[-1].shape[0]

    @property
    def n_units(self) -> int:
        """Units of the whole embedding."""
        return -(-self.n_rows // self.unit_rows)


@dataclass(frozen=True)
class Layout:
    """What a container will look like: known before a weight is read."""

    metadata: bytes = field(repr=False)
    tensors: tuple[TensorEntry, ...]
    pages: tuple[PageEntry, ...]
    embedding: EmbeddingTable | None
    head_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class Head:
    """What a container's head says, checked."""

    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    pages: tuple[PageEntry, ...]
    embedding: EmbeddingTable | None
    row_hashes: np.ndarray
    """uint32[embedding units]"""


def plan_layout(
    metadata: dict[str, Any], tensors: Sequence[TensorSpec], pages: Sequence[PageSpec]
) -> Layout:
    """Place the pages, and on each its tensors in the order given. Pure, deterministic.

    ValueError where `decode_head` would refuse the result.
    """
    ends, entries = [0] * len(pages), []
    for spec in sorted(tensors, key=lambda tensor: tensor.page):
        offset = _align(ends[spec.page], TENSOR_ALIGNMENT)
        entries.append(TensorEntry(**vars(spec), offset=offset))
        ends[spec.page] = offset + spec.n_bytes
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    try:
        embedding = _embedding_of(entries, pages)
        head_bytes = _head_bytes(len(text), len(entries), len(pages), embedding)
        placed, file_bytes = _place_pages(pages, ends, head_bytes)
        _check_pages(placed, head_bytes, file_bytes)
        _check_tensors(entries, placed)
    except Damage as damage:
        raise ValueError(f"the container planned {damage}") from None
    return Layout(text, tuple(entries), placed, embedding, head_bytes, file_bytes)


def encode_head(layout: Layout, page_hashes: Sequence[int], row_hashes: np.ndarray) -> bytes:
    """The head's `layout.head_bytes` bytes, given the xxh3_64 of each page and embedding unit."""
    tensors = [
        (t.name.encode(), t.qtype.encode(), t.page, len(t.shape), t.shape[0], t.shape[-1],
         t.first_row, t.offset, t.n_bytes)
        for t in layout.tensors
    ]  # fmt: skip
    pages = [
        (page.kind.encode(), page.index, page.offset, page.n_bytes, digest)
        for page, digest in zip(layout.pages, page_hashes, strict=True)
    ]
    tables = (np.array(tensors, _TENSOR), np.array(pages, _PAGE), row_hashes.astype("<u4"))
    body, spans = bytearray(), []
    for section in (layout.metadata, *(table.tobytes() for table in tables)):
        spans += [_HEADER.size + len(body), len(section)]
        body += section.ljust(_align(len(section), 8), b"\0")
    body = body.ljust(layout.head_bytes - _HEADER.size, b"\0")
    sizes = (VERSION, PAGE_ALIGNMENT, layout.file_bytes, layout.head_bytes)
    header = _HEADER.pack(MAGIC, *sizes, *spans, bytes(_HASH_BYTES))[:-_HASH_BYTES]
    return header + _head_hash(header, body) + bytes(body)


def decode_head(file: BinaryIO, file_bytes: int) -> Head:
    """The head of a container that is `file_bytes` long. Damage says what is wrong with it."""
    head, spans = _read_head(file, file_bytes)
    sections = [head[offset : offset + length] for offset, length in spans]
    for section, record in zip(sections[1:], (_TENSOR, _PAGE, np.dtype("<u4")), strict=True):
        check(len(section) % record.itemsize == 0, "has a table that ends inside a record")
    pages = tuple(map(_page_entry, np.frombuffer(sections[2], _PAGE).tolist()))
    _check_pages(pages, len(head), file_bytes)
    tensors = tuple(map(_tensor_entry, np.frombuffer(sections[1], _TENSOR).tolist()))
    _check_tensors(tensors, pages)
    embedding = _embedding_of(tensors, pages)
    row_hashes = np.frombuffer(sections[3], "<u4").astype(np.uint32)
    n_units = embedding.n_units if embedding else 0
    check(len(row_hashes) == n_units, f"has {len(row_hashes)} row hashes for {n_units} units")
    return Head(_metadata(sections[0]), tensors, pages, embedding, row_hashes)


def unit_hashes(units: np.ndarray) -> np.ndarray:
    """uint32[U]: the low half of each unit's xxh3_64; `units` is uint8[U, unit_bytes]."""
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(unit) & 0xFFFFFFFF for unit in units), np.uint32, len(units))


def check(condition: bool, message: str) -> None:
    """Damage(message) unless the condition holds."""
    if not condition:
        raise Damage(message)


def _align(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _head_hash(header: bytes, body: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_128(header)
    digest.update(body)
    return digest.digest()


def _head_bytes(
    metadata_bytes: int, n_tensors: int, n_pages: int, embedding: EmbeddingTable | None
) -> int:
    n_units = embedding.n_units if embedding else 0
    sections = (metadata_bytes, n_tensors * _TENSOR.itemsize, n_pages * _PAGE.itemsize, 4 * n_units)
    return _align(_HEADER.size + sum(_align(n, 8) for n in sections), PAGE_ALIGNMENT)


def _place_pages(
    pages: Sequence[PageSpec], used: Sequence[int], first: int
) -> tuple[tuple[PageEntry, ...], int]:
    """The pages back to back from offset `first`, and where the last one ends."""
    placed, position = [], first
    for spec, n_bytes in zip(pages, used, strict=True):
        placed.append(PageEntry(spec.kind, spec.index, position, _align(n_bytes, PAGE_ALIGNMENT)))
        position += placed[-1].n_bytes
    return tuple(placed), position


def _read_head(file: BinaryIO, file_bytes: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The head's bytes, and the (offset, length) of each section in it."""
    header = file.read(_HEADER.size)
    if header[: len(MAGIC)] != MAGIC:
        raise Foreign("is not a jitllm container")
    check(len(header) == _HEADER.size, "is cut off inside its header")
    _, version, alignment, length, head_bytes, *spans, digest = _HEADER.unpack(header)
    check(version == VERSION, f"has container version {version}, and this jitllm reads {VERSION}")
    check(length == file_bytes, f"is {file_bytes} bytes long and should be {length}")
    bounded = _HEADER.size <= head_bytes <= min(file_bytes, _MAX_HEAD_BYTES)
    aligned = head_bytes % PAGE_ALIGNMENT == 0 and alignment == PAGE_ALIGNMENT
    check(bounded and aligned, "has a damaged header")
    head = header + file.read(head_bytes - _HEADER.size)
    same = digest == _head_hash(header[:-_HASH_BYTES], head[_HEADER.size :])
    check(same, "has a damaged head (its hash differs)")
    sections, position = list(zip(spans[::2], spans[1::2], strict=True)), _HEADER.size
    for name, (offset, n_bytes) in zip(_SECTIONS, sections, strict=True):
        check(offset == position and n_bytes <= head_bytes - offset, f"has misplaced {name}")
        position = offset + _align(n_bytes, 8)
    return head, sections


def _metadata(section: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(section)
    except (ValueError, RecursionError):
        raise Damage("has metadata that is not JSON") from None
    check(isinstance(metadata, dict), "has metadata that is not an object")
    return metadata


def _text(raw: bytes, what: str) -> str:
    text = raw.decode("ascii", errors="replace")
    check(text.isascii() and text.isprintable() and text != "", f"has the {what} {raw!r}")
    return text


def _tensor_entry(record: tuple[Any, ...]) -> TensorEntry:
    name, qtype, page, n_dims, rows, cols, first_row, offset, n_bytes = record
    name, qtype = _text(name, "tensor name"), _text(qtype, "quantisation type")
    check(n_dims in (1, 2), f"gives tensor {name} {n_dims} dimensions")
    return TensorEntry(name, qtype, (rows, cols)[:n_dims], page, n_bytes, first_row, offset)


def _page_entry(record: tuple[Any, ...]) -> PageEntry:
    kind, *place = record
    return PageEntry(_text(kind, "page kind"), *place)


def _check_pages(pages: Sequence[PageEntry], first: int, end: int) -> None:
    """Kinds in order and numbered from 0, pages back to back from `first` to `end`."""
    position, counts, rank = first, dict.fromkeys(PAGE_KINDS, 0), 0
    for page in pages:
        name = f"{page.kind} page {page.index}"
        check(page.kind in PAGE_KINDS[rank:], f"has a {name} where none can be")
        check(page.index == counts[page.kind], f"has {page.kind} pages out of order")
        check(page.offset == position, f"has its {name} at the wrong place")
        sized = 0 < page.n_bytes <= end - position and page.n_bytes % PAGE_ALIGNMENT == 0
        check(sized, f"gives its {name} {page.n_bytes} bytes")
        rank, position = PAGE_KINDS.index(page.kind), position + page.n_bytes
        counts[page.kind] += 1
    check(position == end, f"has {end - position} bytes behind its last page")
    check(max(counts["dense"], counts["embed"]) <= 1, "has two dense or two embed pages")


def _check_tensors(tensors: Sequence[TensorEntry], pages: Sequence[PageEntry]) -> None:
    """Each inside its page, aligned, not empty, named once, in order, on top of no other."""
    for tensor in tensors:
        what = f"tensor {tensor.key}"
        check(tensor.page < len(pages), f"has {what} on page {tensor.page} of {len(pages)}")
        room = pages[tensor.page].n_bytes - tensor.offset
        check(0 < tensor.n_bytes <= room, f"has {what} outside its page")
        check(tensor.offset % TENSOR_ALIGNMENT == 0, f"has {what} at an unaligned offset")
        check(all(0 < n < 2**31 for n in tensor.shape), f"gives {what} the shape {tensor.shape}")
        check(tensor.first_row < 2**31, f"has {what} at an impossible row")
        check(len(tensor.name) <= 64 and len(tensor.qtype) <= 8, f"has too long a name in {what}")
    for one, two in pairwise(tensors):
        behind = (one.page, one.offset + one.n_bytes) <= (two.page, two.offset)
        check(behind, f"has tensor {two.key} on top of {one.key}")
    once = {(t.name, t.first_row) for t in tensors}, {(t.name, t.page) for t in tensors}
    check(all(len(names) == len(tensors) for names in once), "has one tensor twice")


def _embedding_of(
    tensors: Sequence[TensorEntry], pages: Sequence[PageSpec]
) -> EmbeddingTable | None:
    """The embedding's units; the slabs must hold every row once, in order, whole units each."""
    slabs = tuple(t for t in tensors if t.name == EMBEDDING)
    if not slabs:
        return None
    kinds = {pages[t.page].kind for t in slabs}
    check(kinds in ({"head"}, {"embed"}), f"has {EMBEDDING} on a wrong page")
    unit_rows = TILE_ROWS if kinds == {"head"} else 1
    unit_bytes, row = slabs[0].n_bytes // -(-slabs[0].shape[0] // unit_rows), 0
    for slab in slabs:
        check(slab.first_row == row and row % unit_rows == 0, f"has {EMBEDDING} rows out of order")
        whole = slab.n_bytes == -(-slab.shape[0] // unit_rows) * unit_bytes
        check(whole and len(slab.shape) == 2, f"has {EMBEDDING} rows that are not whole")
        row += slab.shape[0]
    return EmbeddingTable(slabs, unit_rows, unit_bytes)
