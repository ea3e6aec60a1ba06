"""The one table of weight types: source blocks, page layout, exact values.

`pack` turns GGUF rows into tiles without losing a bit and without adding one (rows padded to 16
apart); `dequantise` gives, bit for bit, what gguf-py's `dequantize` gives for the source. The block
formats are those of ggml's `ggml-common.h`, the formulas those of its `dequantize_row_*`.
Letters: n rows, k columns (values of a row), g groups of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitllm.errors import FormatError
from jitllm.kernels import layout

_Array = Any  # numpy or jax array
_Fields = dict[str, _Array]  # field name -> uint8[n, g, elements, size]


@dataclass(frozen=True)
class Field:
    """A part of a source block: `elements` values of `size` bytes each (codes: bytes)."""

    name: str
    elements: int
    size: int = 1

    @property
    def n_bytes(self) -> int:
        """Bytes in one block of one row."""
        return self.elements * self.size


@dataclass(frozen=True)
class QType:
    """One weight type. `group` values of a row share a block of `block_bytes` in the source."""

    name: str
    group: int
    fields: tuple[Field, ...]
    """The source block, in its order."""
    planes: tuple[str, ...]
    """A tile, in its order: names of code planes and of fields."""
    codes: Callable[[_Fields], np.ndarray] | None
    """Source fields -> uint8[n, g, group], columns in natural order; None: floats have no codes."""
    values: Callable[[_Array, _Fields, Any], _Array]
    """(codes [n, g, group], fields, xp) -> f32[n, g, group]."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one source block."""
        return sum(field.n_bytes for field in self.fields)

    @property
    def is_float(self) -> bool:
        """Whether products take float activations (int8 otherwise)."""
        return self.codes is None

    def row_bytes(self, k: int) -> int:
        """Bytes of a source row of k values; FormatError when k is not whole groups."""
        if k <= 0 or k % self.group:
            raise FormatError(
                f"a row of {k} values cannot be {self.name}, whose blocks hold {self.group} values"
            )
        return k // self.group * self.block_bytes

    def tile_bytes(self, k: int) -> int:
        """Bytes of a tile: exactly those of its 16 source rows."""
        return layout.TILE_ROWS * self.row_bytes(k)

    def plane_bytes(self, plane: str, k: int) -> int:
        """Bytes of one plane of a tile."""
        if plane in layout.CODE_PLANES:
            return layout.code_plane_bytes(plane, k)
        field = next(f for f in self.fields if f.name == plane)
        return layout.TILE_ROWS * (k // self.group) * field.n_bytes

    def plane_offsets(self, k: int) -> dict[str, int]:
        """Where each plane starts in a tile of k columns."""
        offsets, at = {}, 0
        for plane in self.planes:
            offsets[plane] = at
            at += self.plane_bytes(plane, k)
        return offsets

    def pack(self, rows: np.ndarray, k: int) -> np.ndarray:
        """Source rows uint8[n, row_bytes(k)] -> tiles uint8[ceil(n / 16), tile_bytes(k)]."""
        fields = self._split_rows(layout.pad_rows(rows), k)
        codes = None if self.codes is None else self.codes(fields).reshape(-1, k)
        planes = [
            layout.codes_to_plane(codes, plane)
            if codes is not None and plane in layout.CODE_PLANES
            else layout.field_to_tiles(fields[plane])
            for plane in self.planes
        ]
        return np.concatenate(planes, axis=1)

    def dequantise(self, tiles: _Array, n: int, k: int, xp: Any = np) -> _Array:
        """Tiles uint8[ceil(n / 16), tile_bytes(k)] -> f32[n, k], with numpy or jax.numpy."""
        codes, fields = None, {}
        sizes = {field.name: field for field in self.fields}
        for plane, at in self.plane_offsets(k).items():
            data = tiles[:, at : at + self.plane_bytes(plane, k)]
            if plane in layout.CODE_PLANES and self.codes is not None:
                part = layout.plane_to_codes(data, plane, xp)
                codes = part if codes is None else codes | part
            else:
                field = sizes[plane]
                fields[plane] = layout.field_from_tiles(data, field.elements, field.size)
        if codes is not None:
            codes = layout.codes_from_tiles(codes).reshape(-1, k // self.group, self.group)
        return self.values(codes, fields, xp).reshape(-1, k)[:n]

    def dequantise_rows(self, rows: np.ndarray, k: int) -> np.ndarray:
        """Source rows uint8[n, row_bytes(k)] -> f32[n, k]."""
        fields = self._split_rows(rows, k)
        codes = None if self.codes is None else self.codes(fields)
        return self.values(codes, fields, np).reshape(-1, k)

    def _split_rows(self, rows: np.ndarray, k: int) -> _Fields:
        blocks = rows.reshape(len(rows), self.row_bytes(k) // self.block_bytes, self.block_bytes)
        fields, at = {}, 0
        for field in self.fields:
            part = blocks[..., at : at + field.n_bytes]
            fields[field.name] = part.reshape(*part.shape[:2], field.elements, field.size)
            at += field.n_bytes
        return fields


# Codes in natural order. In a source block a byte holds two nibbles that lie `chunk` columns apart.


def _shifted(data: np.ndarray, chunk: int, bits: int) -> np.ndarray:
    """uint8[n, g, bytes, 1] -> uint8[n, g, bytes * 8 / bits]: `chunk` low fields, then the next."""
    n, g = data.shape[:2]
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    return ((data.reshape(n, g, -1, 1, chunk) >> shifts) & np.uint8(2**bits - 1)).reshape(n, g, -1)


def _bits_in_order(data: np.ndarray) -> np.ndarray:
    """uint8[n, g, 4, 1] -> uint8[n, g, 32]: bit i of the little-endian word belongs to value i."""
    return np.unpackbits(data[..., 0], axis=-1, bitorder="little")


def _nib16(f: _Fields) -> np.ndarray:
    return _shifted(f["qs"], 16, 4)


def _nib16_bit(f: _Fields) -> np.ndarray:
    return _nib16(f) | (_bits_in_order(f["qh"]) << np.uint8(4))


def _nib32(f: _Fields) -> np.ndarray:
    return _shifted(f["qs"], 32, 4)


def _nib32_bit(f: _Fields) -> np.ndarray:
    return _nib32(f) | (_shifted(f["qh"], 32, 1) << np.uint8(4))


def _nib64_two(f: _Fields) -> np.ndarray:
    return _shifted(f["qs"], 64, 4) | (_shifted(f["qh"], 32, 2) << np.uint8(4))


def _bytes(f: _Fields) -> np.ndarray:
    return f["qs"][..., 0]


# Values, in the order of operations of gguf-py.


def _half(field: _Array, xp: Any) -> _Array:
    """uint8[n, g, 1, 2] -> f32[n, g, 1]."""
    return layout.bitcast(field, "float16", xp).astype(xp.float32)


def _scaled(zero: int) -> Callable[[_Array, _Fields, Any], _Array]:
    """d * (q - zero)."""

    def values(codes: _Array, f: _Fields, xp: Any) -> _Array:
        return _half(f["d"], xp) * (codes.astype(xp.float32) - xp.float32(zero))

    return values


def _signed(codes: _Array, f: _Fields, xp: Any) -> _Array:
    """d * q, q signed."""
    return layout.bitcast(codes, "int8", xp).astype(xp.float32) * _half(f["d"], xp)


def _affine(codes: _Array, f: _Fields, xp: Any) -> _Array:
    """d * q + m."""
    return _half(f["d"], xp) * codes.astype(xp.float32) + _half(f["m"], xp)


def _k_affine(codes: _Array, f: _Fields, xp: Any) -> _Array:
    """d * scale * q - dmin * min, 6-bit scales and mins for 8 subgroups of 32."""
    n, g = codes.shape[:2]
    raw = f["scales"][..., 0]
    low, mid, high = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    six, four = xp.uint8(63), xp.uint8(15)
    scale = xp.concatenate([low & six, (high & four) | ((low >> 6) << 4)], axis=-1)
    mins = xp.concatenate([mid & six, (high >> 4) | ((mid >> 6) << 4)], axis=-1)
    d = (_half(f["d"], xp) * scale.astype(xp.float32)).reshape(n, g, 8, 1)
    m = (_half(f["dmin"], xp) * mins.astype(xp.float32)).reshape(n, g, 8, 1)
    return d * codes.reshape(n, g, 8, 32).astype(xp.float32) - m


def _k_scaled(codes: _Array, f: _Fields, xp: Any) -> _Array:
    """d * scale * (q - 32), int8 scales for 16 subgroups of 16."""
    n, g = codes.shape[:2]
    scale = layout.bitcast(f["scales"][..., 0], "int8", xp).astype(xp.float32)
    d = (_half(f["d"], xp) * scale).reshape(n, g, 16, 1)
    return d * (codes.reshape(n, g, 16, 16).astype(xp.float32) - xp.float32(32))


def _float(dtype: str) -> Callable[[_Array, _Fields, Any], _Array]:
    def values(codes: _Array, f: _Fields, xp: Any) -> _Array:
        return layout.bitcast(f["x"], dtype, xp).astype(xp.float32)

    return values


def _bfloat16(codes: _Array, f: _Fields, xp: Any) -> _Array:
    wide = layout.bitcast(f["x"], "uint16", xp).astype(xp.uint32) << 16
    return layout.bitcast(wide, "float32", xp)


_D, _M, _DMIN, _QS = Field("d", 1, 2), Field("m", 1, 2), Field("dmin", 1, 2), Field("qs", 16)
_K_HEAD = (_D, _DMIN, Field("scales", 12))

QTYPES: dict[str, QType] = {
    qtype.name: qtype
    for qtype in (
        QType("F32", 1, (Field("x", 1, 4),), ("x",), None, _float("float32")),
        QType("F16", 1, (Field("x", 1, 2),), ("x",), None, _float("float16")),
        QType("BF16", 1, (Field("x", 1, 2),), ("x",), None, _bfloat16),
        QType("Q8_0", 32, (_D, Field("qs", 32)), ("byte", "d"), _bytes, _signed),
        QType("Q4_0", 32, (_D, _QS), ("nib", "d"), _nib16, _scaled(8)),
        QType("Q4_1", 32, (_D, _M, _QS), ("nib", "d", "m"), _nib16, _affine),
        QType("Q5_0", 32, (_D, Field("qh", 4), _QS), ("nib", "bit", "d"), _nib16_bit, _scaled(16)),
        QType(
            "Q5_1",
            32,
            (_D, _M, Field("qh", 4), _QS),
            ("nib", "bit", "d", "m"),
            _nib16_bit,
            _affine,
        ),
        QType(
            "Q4_K",
            256,
            (*_K_HEAD, Field("qs", 128)),
            ("nib", "scales", "d", "dmin"),
            _nib32,
            _k_affine,
        ),
        QType(
            "Q5_K",
            256,
            (*_K_HEAD, Field("qh", 32), Field("qs", 128)),
            ("nib", "bit", "scales", "d", "dmin"),
            _nib32_bit,
            _k_affine,
        ),
        QType(
            "Q6_K",
            256,
            (Field("qs", 128), Field("qh", 64), Field("scales", 16), _D),
            ("nib", "two", "scales", "d"),
            _nib64_two,
            _k_scaled,
        ),
    )
}
