"""The container (.jlm): the weights of one model as pages that a read brings in ready for use.

`layout` says what the bytes mean. A container is a cache of its source: one that is damaged, cut
off or of another version is refused, never repaired or migrated.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from jitllm.errors import FormatError, JitllmError, NoRoomError
from jitllm.paging.layout import (
    EMBEDDING,
    PAGE_ALIGNMENT,
    TILE_ROWS,
    Damage,
    EmbeddingTable,
    Foreign,
    PageEntry,
    PageSpec,
    TensorEntry,
    TensorSpec,
    decode_head,
    encode_head,
    plan_layout,
    unit_hashes,
)
from jitllm.units import told_apart

__all__ = [
    "EMBEDDING",
    "PAGE_ALIGNMENT",
    "TILE_ROWS",
    "Container",
    "ContainerWriter",
    "PageEntry",
    "PageSpec",
    "TensorEntry",
    "TensorSpec",
    "check_target",
    "plan_layout",
    "remake",
]


@dataclass(frozen=True)
class Container:
    """A container's head: checked, immutable, and without a file handle."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    """By `TensorEntry.key`, in file order."""
    pages: tuple[PageEntry, ...]
    embedding: EmbeddingTable | None
    row_hashes: np.ndarray
    """uint32[embedding units]"""
    file_bytes: int

    @staticmethod
    def open(path: str | os.PathLike[str]) -> "Container":
        """The checked head of `path`; no page is read. FormatError says what is wrong with it."""
        path = Path(path)
        try:
            with path.open("rb", buffering=0) as file:
                file_bytes = os.fstat(file.fileno()).st_size
                head = decode_head(file, file_bytes)
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error.strerror}") from None
        except Damage as damage:
            # Nobody should write over what was never a container.
            known = path.suffix == ".jlm" or not isinstance(damage, Foreign)
            raise FormatError(f"{path} {damage}" + (f"; {remake(path)}" if known else "")) from None
        tensors = {tensor.key: tensor for tensor in head.tensors}
        return Container(
            path, head.metadata, tensors, head.pages, head.embedding, head.row_hashes, file_bytes
        )

    def on_page(self, page: int) -> dict[str, TensorEntry]:
        """The tensors of one page by name, in offset order."""
        return {tensor.name: tensor for tensor in self.tensors.values() if tensor.page == page}

    def pages_of(self, kind: str) -> list[int]:
        """The numbers of the pages of one kind, in order."""
        return [number for number, page in enumerate(self.pages) if page.kind == kind]


def remake(path: str | os.PathLike[str]) -> str:
    """How to make a container again: the half sentence that ends a complaint about it."""
    return f"make it again with: jitllm convert --force SOURCE.gguf {path}"


def check_target(path: Path, force: bool) -> None:
    """JitllmError where `path` cannot become a container: a folder, a device, or a file that is
    there and not `force`."""
    if path.is_dir():
        raise JitllmError(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise JitllmError(f"{path} is not a file that a container could replace")
    if path.exists() and not force:
        raise JitllmError(f"{path} exists; add --force to replace it")


class ContainerWriter:
    """Writes OUT.part page by page, and makes it OUT only when it is whole and on the disk.

        with ContainerWriter(out, metadata, tensors, pages) as writer:
            for page in range(len(pages)):
                writer.write_page(page, chunks_of(page))
            writer.finish()

    Leaving the `with` before `finish` removes OUT.part; a kill leaves OUT.part, which the next
    writer takes over. The same input gives the same bytes. JitllmError: OUT exists and not
    `force`, no room on the disk, or another writer is at work on OUT.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: dict[str, Any],
        tensors: Sequence[TensorSpec],
        pages: Sequence[PageSpec],
        force: bool = False,
    ):
        self.path, self.force = Path(path), force
        self.layout = plan_layout(metadata, tensors, pages)
        self._hashes: list[int | None] = [None] * len(pages)
        self._row_hashes: list[list[np.ndarray]] = [[] for _ in pages]
        check_target(self.path, force)
        self._part = self.path.with_name(self.path.name + ".part")
        self._fd = self._open_part()

    def write_page(self, page: int, chunks: Iterable[tuple[str, Any]]) -> None:
        """Write one page from (tensor name, bytes-like) chunks, in the tensors' order.

        A tensor may come in any number of chunks; those of the embedding hold whole units.
        """
        assert self._hashes[page] is None, f"page {page} is written twice"
        position, digest = self.layout.pages[page].offset, xxhash.xxh3_64()
        for piece in self._pieces(page, chunks):
            digest.update(piece)
            self._write(piece, position)
            position += piece.nbytes
        self._hashes[page] = digest.intdigest()

    def finish(self) -> None:
        """Write the head, flush it all to the disk and give the file its name."""
        assert None not in self._hashes, "not every page was written"
        row_hashes = np.concatenate([np.empty(0, np.uint32), *chain(*self._row_hashes)])
        self._write(memoryview(encode_head(self.layout, self._hashes, row_hashes)), 0)
        os.fsync(self._fd)
        check_target(self.path, self.force)
        self._part.rename(self.path)
        self._close()
        _fsync_directory(self.path.parent)

    def __enter__(self) -> "ContainerWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fd >= 0:
            self._part.unlink(missing_ok=True)
            self._close()

    def _open_part(self) -> int:
        """OUT.part, locked, emptied, with room for the whole file behind it."""
        try:
            # Not O_TRUNC: the file may be another writer's until the lock says otherwise.
            fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise JitllmError(f"{self._part} cannot be written: {error.strerror}") from None
        try:
            self._lock(fd)
            os.ftruncate(fd, 0)
            self._check_room()
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _lock(self, fd: int) -> None:
        busy = JitllmError(f"{self._part} is being written by another process; wait for it")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise busy from None
        # Between open and lock the file may have become the other writer's finished OUT.
        if not self._part.exists() or not os.path.samestat(os.fstat(fd), self._part.stat()):
            raise busy

    def _check_room(self) -> None:
        free = shutil.disk_usage(self._part.parent).free
        if free < self.layout.file_bytes:
            self._part.unlink()
            need, there = told_apart(self.layout.file_bytes, free)
            raise NoRoomError(f"{self.path} needs {need} and its disk has {there} free")

    def _write(self, piece: memoryview, position: int) -> None:
        try:
            while piece.nbytes:
                written = os.pwrite(self._fd, piece, position)
                piece, position = piece[written:], position + written
        except OSError as error:
            if error.errno in NoRoomError.ERRNOS:
                raise NoRoomError(f"{self._part} cannot be written: its disk has no room") from None
            raise JitllmError(f"{self._part} cannot be written: {error.strerror}") from None

    def _pieces(self, page: int, chunks: Iterable[tuple[str, Any]]) -> Iterator[memoryview]:
        """The page's bytes in order: the tensors' chunks, and zeros between them and behind."""
        chunks, position = iter(chunks), 0
        for tensor in (t for t in self.layout.tensors if t.page == page):
            yield memoryview(bytes(tensor.offset - position))
            position, end = tensor.offset, tensor.offset + tensor.n_bytes
            while position < end:
                name, chunk = next(chunks, ("nothing", b""))
                piece = memoryview(chunk).cast("B")
                fits = name == tensor.name and 0 < piece.nbytes <= end - position
                assert fits, f"page {page}: {piece.nbytes} bytes of {name} inside {tensor.name}"
                if name == EMBEDDING:
                    units = np.frombuffer(piece, np.uint8)
                    units = units.reshape(-1, self.layout.embedding.unit_bytes)
                    self._row_hashes[page].append(unit_hashes(units))
                yield piece
                position += piece.nbytes
        assert next(chunks, None) is None, f"page {page} got more than its tensors"
        yield memoryview(bytes(self.layout.pages[page].n_bytes - position))

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def _fsync_directory(path: Path) -> None:
    """Make a rename in `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
