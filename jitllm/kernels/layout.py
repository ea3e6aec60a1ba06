"""The tile layout: rows in tiles of 16, columns in groups of 4, so that one 64-byte load holds four
consecutive columns of 16 rows and adds into 16 row accumulators without a horizontal sum.

A tile is contiguous: first the planes that hold the codes (`CODE_PLANES`), then one plane per scale
field. Everything here is numpy or jax.numpy, chosen by `xp`; the two directions are exact inverses.
Letters: n rows, t tiles of 16 rows, k columns, b groups of 32 columns.
"""

from typing import Any

import numpy as np

TILE_ROWS = 16
_Array = Any  # numpy or jax array of the same shape


def bitcast(x: _Array, dtype: str, xp: Any) -> _Array:
    """Reinterpret uint8[..., size] as dtype[...], or an array as another type of its own size."""
    if xp is np:
        out = np.ascontiguousarray(x).view(dtype)
        return out[..., 0] if x.dtype == np.uint8 and out.dtype.itemsize > 1 else out
    from jax import lax

    return lax.bitcast_convert_type(x, xp.dtype(dtype))


def pad_rows(x: np.ndarray) -> np.ndarray:
    """Zero rows up to a multiple of 16."""
    missing = -len(x) % TILE_ROWS
    return np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) if missing else x


def field_to_tiles(field: np.ndarray) -> np.ndarray:
    """uint8[n, groups, elements, size] -> uint8[t, bytes]: 16 rows of an element lie together."""
    tiles = field.reshape(-1, TILE_ROWS, *field.shape[1:]).transpose(0, 2, 3, 1, 4)
    return tiles.reshape(len(tiles), -1)


def field_from_tiles(plane: _Array, elements: int, size: int) -> _Array:
    """The inverse: uint8[t, bytes] -> uint8[n, groups, elements, size]."""
    tiles = plane.reshape(plane.shape[0], -1, elements, TILE_ROWS, size)
    tiles = tiles.transpose(0, 3, 1, 2, 4)
    return tiles.reshape(-1, *tiles.shape[2:])


def _codes_to_tiles(codes: np.ndarray) -> np.ndarray:
    """uint8[n, k] -> uint8[t, b, 8, 64]: column group c of 4 columns x 16 rows is one vector."""
    n, k = codes.shape
    tiles = codes.reshape(n // TILE_ROWS, TILE_ROWS, k // 32, 8, 4).transpose(0, 2, 3, 1, 4)
    return tiles.reshape(n // TILE_ROWS, k // 32, 8, 64)


def codes_from_tiles(tiles: _Array) -> _Array:
    """The inverse: uint8[t, b, 8, 64] -> uint8[n, k]."""
    t, b = tiles.shape[:2]
    return tiles.reshape(t, b, 8, TILE_ROWS, 4).transpose(0, 3, 1, 2, 4).reshape(t * 16, b * 32)


def _pack(tiles: np.ndarray, shift: int, bits: int) -> np.ndarray:
    """A bit field of 8 / bits neighbouring column groups in one vector: uint8[t, b * bits * 64]."""
    per = 8 // bits
    field = (tiles >> shift) & (2**bits - 1)
    t, b = field.shape[:2]
    field = field.reshape(t, b, 8 // per, per, 64)
    out = np.zeros((t, b, 8 // per, 64), np.uint8)
    for i in range(per):
        out |= field[:, :, :, i] << np.uint8(i * bits)
    return out.reshape(t, -1)


def _unpack(plane: _Array, shift: int, bits: int, xp: Any) -> _Array:
    """The inverse, back in place in the codes: uint8[t, b, 8, 64]."""
    per = 8 // bits
    t = plane.shape[0]
    vectors = plane.reshape(t, -1, 8 // per, 1, 64)
    shifts = xp.arange(0, 8, bits, dtype=xp.uint8).reshape(per, 1)
    field = (vectors >> shifts) & xp.uint8(2**bits - 1)
    return field.reshape(t, -1, 8, 64) << xp.uint8(shift)


# A code is the sum of its planes: (first bit of the code, how many bits), 32 * bits / 8 bytes a row
# and group. `nib` holds column groups 2g and 2g + 1 in load g, `two` 4h .. 4h + 3, `bit` all eight.
CODE_PLANES = {"byte": (0, 8), "nib": (0, 4), "two": (4, 2), "bit": (4, 1)}


def code_plane_bytes(plane: str, k: int) -> int:
    """Bytes of a code plane of one tile of k columns."""
    return TILE_ROWS * k * CODE_PLANES[plane][1] // 8


def codes_to_plane(codes: np.ndarray, plane: str) -> np.ndarray:
    """uint8[n, k] -> uint8[t, bytes]."""
    shift, bits = CODE_PLANES[plane]
    tiles = _codes_to_tiles(codes)
    return tiles.reshape(len(tiles), -1) if bits == 8 else _pack(tiles, shift, bits)


def plane_to_codes(data: _Array, plane: str, xp: Any) -> _Array:
    """uint8[t, bytes] -> uint8[t, b, 8, 64], this plane's share of each code."""
    shift, bits = CODE_PLANES[plane]
    if bits == 8:
        return data.reshape(data.shape[0], -1, 8, 64)
    return _unpack(data, shift, bits, xp)
