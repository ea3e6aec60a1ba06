"""A line chart as a PNG: a canvas, a font of 5 by 8 dots, and the file format."""

import struct
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

Curve = tuple[str, tuple[int, int, int], Sequence[tuple[float, float]]]
"""(name, colour, points)"""

WIDTH, HEIGHT = 800, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 30, 40, 50
_INK, _GRID = (60, 60, 60), (225, 225, 225)
_SCALE, _ADVANCE = 2, 6
_TICKS = 5
# Columns of dots, the lowest bit on top.
_FONT = {
    " ": "0000000000", ".": "0060600000", "/": "2010080402", "0": "3E5149453E", "1": "00427F4000",
    "2": "7249494946", "3": "2141494D33", "4": "1814127F10", "5": "2745454539", "6": "3C4A494931",
    "7": "4121110907", "8": "3649494936", "9": "464949291E", "B": "7F4949493E", "G": "3E41415173",
    "K": "7F08142241", "M": "7F021C027F", "T": "03017F0103", "a": "2054547840", "b": "7F28444438",
    "c": "3844444428", "d": "384444287F", "e": "3854545418", "g": "18A4A49C78", "i": "00447D4000",
    "k": "7F10284400", "m": "7C04780478", "n": "7C08040478", "o": "3844444438", "p": "FC18242418",
    "r": "7C08040408", "s": "4854545424", "t": "04043F4424", "u": "3C4040207C",
}  # fmt: skip


def line_chart(curves: Sequence[Curve], x_label: Callable[[float], str], title: str) -> bytes:
    """A PNG of `curves` over one x axis; y begins at 0 and its unit is the `title`."""
    canvas = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    points = [point for _, _, curve in curves for point in curve]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_high = max(y for _, y in points) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / ((x_high - x_low) or 1.0)
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - y / y_high * (HEIGHT - _TOP - _BOTTOM),
        )

    for tick in range(_TICKS):
        x = x_low + (x_high - x_low) * tick / (_TICKS - 1)
        y = y_high * tick / (_TICKS - 1)
        _line(canvas, place(x, 0), place(x, y_high), _GRID, 1)
        _line(canvas, place(x_low, y), place(x_high, y), _GRID, 1)
        label = x_label(x)
        _text(canvas, place(x, 0)[0] - _text_width(label) / 2, HEIGHT - _BOTTOM + 12, label, _INK)
        label = f"{y:.1f}"
        _text(canvas, _LEFT - 10 - _text_width(label), place(x, y)[1] - 8, label, _INK)
    _text(canvas, 10, 12, title, _INK)
    at = WIDTH - _RIGHT
    for name, colour, curve in reversed(curves):
        at -= _text_width(name) + 24
        _text(canvas, at, 12, name, colour)
        for start, end in pairwise(curve):
            _line(canvas, place(*start), place(*end), colour, 3)
    return encode(canvas)


def encode(pixels: np.ndarray) -> bytes:
    """The PNG of uint8[height, width, 3]."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with filter 0
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def _line(
    canvas: np.ndarray,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: tuple[int, int, int],
    thickness: int,
) -> None:
    n_dots = int(max(abs(end[0] - start[0]), abs(end[1] - start[1]))) + 2
    xs = np.linspace(start[0], end[0], n_dots).round().astype(int)
    ys = np.linspace(start[1], end[1], n_dots).round().astype(int)
    reach = range(-(thickness // 2), thickness // 2 + 1)
    for dx in reach:
        for dy in reach:
            canvas[(ys + dy).clip(0, HEIGHT - 1), (xs + dx).clip(0, WIDTH - 1)] = colour


def _text(canvas: np.ndarray, x: float, y: float, text: str, colour: tuple[int, int, int]) -> None:
    left, top = round(min(x, WIDTH - _text_width(text))), round(y)
    for character in text:
        columns = np.frombuffer(bytes.fromhex(_FONT[character]), np.uint8)
        dots = np.unpackbits(columns[:, None], axis=1, bitorder="little").T  # [8, 5]
        dots = dots.repeat(_SCALE, axis=0).repeat(_SCALE, axis=1).astype(bool)
        height, width = dots.shape
        canvas[top : top + height, left : left + width][dots] = colour
        left += _ADVANCE * _SCALE


def _text_width(text: str) -> int:
    return len(text) * _ADVANCE * _SCALE
