"""GGUF files, read strictly: the header is not trusted, and no weight is touched before `read`.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and length is held
against the bytes that are left before anything is allocated for it, so a crafted file costs a small
multiple of its own size and ends in one sentence.
"""

import math
import os
import re
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jitllm.errors import FormatError, JitllmError, UnsupportedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEY_BYTES, MAX_NAME_BYTES, MAX_DIMS, MAX_ALIGNMENT = 65535, 64, 4, 1 << 20
# The least an entry can take: a one-byte key and value; a one-byte name with one dimension.
MIN_KEY_BYTES, MIN_TENSOR_BYTES = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8
READ_BYTES = 1 << 20

QTYPE_NAMES = {int(qtype): qtype.name for qtype in GGMLQuantizationType}
REMOVED_QTYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
QTYPE_SIZES = {qtype.name: size for qtype, size in GGML_QUANT_SIZES.items()}
"""ggml name -> (values in a block, bytes of a block), for every type ggml knows."""

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "|u1"}
_NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_REQUIRED: Any = object()


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. Its rows are the last axis; leading axes are flattened when reading."""

    name: str
    qtype: str
    """The ggml name of the type, of any type ggml knows: `Q4_K`, `IQ3_S`, ..."""
    shape: tuple[int, ...]
    """numpy order, (rows, columns): GGUF's `ne` reversed."""
    path: Path
    """The shard that holds it."""
    offset: int
    """From the start of the file."""
    n_bytes: int

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.n_bytes // self.n_rows


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF, or a set of shards as one: its metadata, and where its tensors lie."""

    path: Path
    """As it was named by the caller: of a split set, any shard."""
    shards: tuple[Path, ...]
    version: int
    metadata: dict[str, Any]
    """Scalars as int, float, bool, str; arrays of strings as lists, arrays of numbers as numpy."""
    tensors: dict[str, GGUFTensor]
    n_bytes: int
    """Size on disk, all shards together."""

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of `key`, or `default` where the file lacks it (FormatError without a default).

        `kind` is int, float, bool or str for a scalar, list for strings, and a numpy scalar type,
        abstract or not (`np.floating`, `np.int32`, `np.number`), for an array of numbers.
        """
        value = self.metadata.get(key, _REQUIRED)
        if value is _REQUIRED:
            if default is _REQUIRED:
                raise FormatError(f"{self.path}: metadata key {key} is missing")
            return default
        if isinstance(value, np.ndarray):
            found = f"{value.dtype} array"
            matches = issubclass(kind, np.generic) and np.issubdtype(value.dtype, kind)
        else:
            found, matches = type(value).__name__, type(value) is kind
        if not matches:
            raise FormatError(
                f"{self.path}: metadata key {key} has type {found}, expected {kind.__name__}"
            )
        return value

    def read(self, tensor: GGUFTensor, first_row: int = 0, n_rows: int | None = None) -> np.ndarray:
        """Rows of `tensor` as they are stored: uint8[n_rows, row_bytes], by one positioned read."""
        n_rows = tensor.n_rows - first_row if n_rows is None else n_rows
        assert 0 <= first_row <= first_row + n_rows <= tensor.n_rows
        rows = np.empty((n_rows, tensor.row_bytes), np.uint8)
        left = memoryview(rows).cast("B") if rows.size else memoryview(b"")
        try:
            with open(tensor.path, "rb", buffering=0) as file:
                file.seek(tensor.offset + first_row * tensor.row_bytes)
                while left and (n_read := file.readinto(left)):
                    left = left[n_read:]
        except OSError as error:
            raise JitllmError(f"{tensor.path} cannot be read: {error.strerror}") from error
        if left:
            raise FormatError(f"{tensor.path} became shorter while tensor {tensor.name} was read")
        return rows


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """The header of the GGUF at `path`; of a split set, any shard stands for all of them.

    Raises FormatError for a damaged file, UnsupportedError for what is well formed and unknown.
    """
    path = Path(path)
    named = _read_shard(path)
    names = shard_names(path.name)
    count = named.get("split.count", int, 1)
    if count == len(names) == 1:
        return named
    if len(names) == 1:
        raise FormatError(
            f"{path} is one of {count} shards, but its name does not end in "
            f"-00001-of-{count:05}.gguf, so the others cannot be found; restore its name"
        )
    return _read_split_set(path, named, [path.with_name(name) for name in names])


def shard_names(name: str) -> list[str]:
    """The file names of the set that `name` is a shard of, in order; `[name]` where it is none."""
    match = _SHARD_NAME.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    n_shards = int(match["count"])
    return [f"{match['stem']}-{i + 1:05}-of-{n_shards:05}.gguf" for i in range(n_shards)]


def _read_split_set(path: Path, named: GGUFFile, paths: list[Path]) -> GGUFFile:
    """The shards at `paths`, checked to be one set, as one file."""
    n_shards = len(paths)
    if named.metadata.get("split.count") != n_shards:
        raise FormatError(
            f"{path} is named as one of {n_shards} shards, but its split.count is "
            f"{named.metadata.get('split.count', 'missing')}"
        )
    for shard_path in paths:
        if not shard_path.exists():
            raise JitllmError(
                f"{path} is one of {n_shards} shards and {shard_path.name} is missing beside it"
            )
    shards = [named if shard_path == path else _read_shard(shard_path) for shard_path in paths]
    first, tensors = shards[0], {}
    for number, shard in enumerate(shards):
        _check_shard(shard, first, number, n_shards)
        for name, tensor in shard.tensors.items():
            if name in tensors:
                raise FormatError(f"{shard.path}: tensor {name} is in an earlier shard too")
            tensors[name] = tensor
    expected = first.get("split.tensors.count", int, None)
    if expected != len(tensors):
        raise FormatError(
            f"{path}: the {n_shards} shards hold {len(tensors)} tensors, but split.tensors.count "
            f"is {'missing' if expected is None else expected}"
        )
    n_bytes = sum(shard.n_bytes for shard in shards)
    return GGUFFile(path, tuple(paths), first.version, first.metadata, tensors, n_bytes)


def _check_shard(shard: GGUFFile, first: GGUFFile, number: int, n_shards: int) -> None:
    """`shard` says itself that it is number `number` of `n_shards` of the model that `first` is."""
    for key, expected in (("split.no", number), ("split.count", n_shards)):
        found = shard.get(key, int, "missing")
        if found != expected:
            raise FormatError(f"{shard.path}: {key} is {found}, but its name says {expected}")
    # Only the first shard has to carry the model's own keys.
    for key, kind in (("general.architecture", str), ("split.tensors.count", int)):
        expected = first.get(key, kind, "missing")
        found = shard.get(key, kind, expected)
        if found != expected:
            raise FormatError(
                f"{shard.path}: {key} is {found!r}, but {first.path.name} says {expected!r}; "
                f"these are shards of different models"
            )


def _read_shard(path: Path) -> GGUFFile:
    """One file, without a look at what other shards it may need."""
    try:
        with open(path, "rb") as file:
            header = _Header(path, file, os.fstat(file.fileno()).st_size)
            return header.read()
    except OSError as error:
        raise JitllmError(f"{path} cannot be read: {error.strerror or error}") from error


class _Header:
    """A cursor over the header. It holds a window of the file and refills it as it goes."""

    def __init__(self, path: Path, file: Any, n_bytes: int) -> None:
        self.path, self.file, self.n_bytes = path, file, n_bytes
        self.window, self.base, self.at = b"", 0, 0

    def read(self) -> GGUFFile:
        version = self._version()
        n_tensors, n_keys = self._number("<Q", "the tensor count"), self._number("<Q", "key count")
        self._check_count("metadata keys", n_keys, MIN_KEY_BYTES)
        metadata = self._metadata(n_keys)
        self._check_count("tensors", n_tensors, MIN_TENSOR_BYTES)
        entries = [self._tensor_entry() for _ in range(n_tensors)]
        tensors = self._place(entries, self._alignment(metadata))
        return GGUFFile(self.path, (self.path,), version, metadata, tensors, self.n_bytes)

    # Fields

    def _fail(self, text: str) -> FormatError:
        return FormatError(f"{self.path}: {text}")

    @property
    def left(self) -> int:
        """Bytes from the cursor to the end of the file."""
        return self.n_bytes - self.base - self.at

    def _take(self, n: int, what: str) -> bytes:
        start, self.at = self.at, self.at + n
        if self.at > len(self.window):
            self.at = start
            if n > self.left:
                raise self._fail(f"the file is truncated: {what} needs {n} bytes, {self.left} left")
            more = self.file.read(max(n, READ_BYTES))
            self.base, self.window = self.base + start, self.window[start:] + more
            start, self.at = 0, n
            if n > len(self.window):
                raise self._fail("the file became shorter while its header was read")
        return self.window[start : self.at]

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code), what))[0]

    def _string(self, what: str, max_bytes: int | None = None) -> str:
        (n,) = struct.unpack("<Q", self._take(8, what))
        if max_bytes is not None and not 0 < n <= max_bytes:
            raise self._fail(f"{what} is {n} bytes long, allowed are 1 to {max_bytes}")
        try:
            return self._take(n, what).decode()
        except UnicodeDecodeError:
            raise self._fail(f"{what} is not UTF-8 text") from None

    def _name(self, what: str, max_bytes: int) -> str:
        name = self._string(what, max_bytes)
        if not name.isprintable():
            raise self._fail(f"{what} {name!r} has characters that cannot be printed")
        return name

    def _check_count(self, what: str, n: int, min_bytes: int) -> None:
        if n > self.left // min_bytes:
            raise self._fail(
                f"the header says {n} {what}, more than the {self.left} bytes after it can hold"
            )

    # Sections

    def _version(self) -> int:
        magic = self._take(min(4, self.n_bytes), "the magic")
        if magic != MAGIC:
            start = f"it starts with {magic!r}, not {MAGIC!r}" if magic else "it is empty"
            raise self._fail(f"this is not a GGUF file: {start}")
        version = self._number("<I", "the version")
        if version & 0xFFFF == 0 and version:
            raise UnsupportedError(
                f"{self.path}: this GGUF is big-endian; convert it to little-endian first"
            )
        if version not in VERSIONS:
            raise UnsupportedError(
                f"{self.path}: GGUF version {version} is not supported (supported: 2, 3)"
            )
        return version

    def _metadata(self, n_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._name("a metadata key", MAX_KEY_BYTES)
            if not key.isascii():
                raise self._fail(f"metadata key {key!r} is not ASCII")
            if key in metadata:
                raise self._fail(f"metadata key {key} is there twice")
            what = f"metadata key {key}"
            kind = self._number("<I", what)
            if key == "general.alignment" and kind != 4:
                raise self._fail("metadata key general.alignment is not of type uint32")
            metadata[key] = self._value(kind, what)
        return metadata

    def _value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(what)
        return self._numbers(kind, 1, what)[0].item()

    def _array(self, what: str) -> list[str] | np.ndarray:
        kind, n = struct.unpack("<IQ", self._take(12, what))
        if kind == _ARRAY:
            raise UnsupportedError(f"{self.path}: {what} is an array of arrays")
        if kind != _STRING:
            return self._numbers(kind, n, what)
        self._check_count(f"strings in {what}", n, 8)
        return [self._string(what) for _ in range(n)]

    def _numbers(self, kind: int, n: int, what: str) -> np.ndarray:
        if kind not in _NUMBERS:
            raise self._fail(f"{what} has the unknown value type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        values = np.frombuffer(self._take(n * dtype.itemsize, what), dtype)
        if kind != _BOOL:
            return values
        if (values > 1).any():
            raise self._fail(f"{what} is a bool with the value {values.max()}, allowed are 0 and 1")
        return values.astype(bool)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if alignment & (alignment - 1) or not 8 <= alignment <= MAX_ALIGNMENT:
            raise self._fail(
                f"general.alignment is {alignment}, allowed are powers of two from 8 to 1 MiB"
            )
        return alignment

    def _tensor_entry(self) -> GGUFTensor:
        """One row of the tensor table; `offset` still counts from the start of the data."""
        name = self._name("a tensor name", MAX_NAME_BYTES)
        n_dims = self._number("<I", f"tensor {name}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self._fail(f"tensor {name} has {n_dims} dimensions, allowed are 1 to {MAX_DIMS}")
        *ne, qtype_id, offset = struct.unpack(
            f"<{n_dims}QIQ", self._take(8 * n_dims + 12, f"tensor {name}")
        )
        if 0 in ne:
            raise self._fail(f"tensor {name} has a dimension of 0")
        qtype = self._qtype(name, qtype_id)
        group, block_bytes = QTYPE_SIZES[qtype]
        if ne[0] % group:
            raise self._fail(
                f"tensor {name} has rows of {ne[0]} values, not a multiple of {qtype}'s {group}"
            )
        n_bytes = math.prod(ne) // group * block_bytes
        return GGUFTensor(name, qtype, tuple(reversed(ne)), self.path, offset, n_bytes)

    def _qtype(self, name: str, qtype_id: int) -> str:
        if qtype_id in QTYPE_NAMES:
            return QTYPE_NAMES[qtype_id]
        removed = REMOVED_QTYPES.get(qtype_id)
        what = f"{removed}, which ggml has removed" if removed else f"{qtype_id}, which is unknown"
        raise UnsupportedError(
            f"{self.path}: tensor {name} has the type {what} (known: "
            f"{', '.join(QTYPE_NAMES.values())})"
        )

    def _place(self, entries: list[GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
        """The tensors by name, in the file's order, with offsets from the start of the file."""
        data = -(-(self.base + self.at) // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                raise self._fail(f"tensor {entry.name} is there twice")
            if entry.offset % alignment:
                raise self._fail(
                    f"tensor {entry.name} starts at {entry.offset}, not a multiple of {alignment}"
                )
            if entry.offset > self.n_bytes - data - entry.n_bytes:
                raise self._fail(
                    f"the file is truncated: tensor {entry.name} ends at byte "
                    f"{data + entry.offset + entry.n_bytes}, the file at {self.n_bytes}"
                )
            tensors[entry.name] = replace(entry, offset=data + entry.offset)
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for tensor, following in pairwise(in_order):
            if tensor.offset + tensor.n_bytes > following.offset:
                raise self._fail(f"tensors {tensor.name} and {following.name} overlap")
        return tensors
