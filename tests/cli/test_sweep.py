"""`jitllm sweep`: the curve as text, as a picture, and from a real engine."""

import json
import struct
import zlib
from pathlib import Path

import numpy as np

from jitllm.cli.png import HEIGHT, WIDTH, encode, line_chart
from jitllm.cli.sweep import lines, picture
from jitllm.sweep import Point
from jitllm.units import format_size
from tests.tiny_models import write_tiny

POINTS = [
    Point(100 * 1024, 3, 60 * 1024, 2.0, 1.0),
    Point(200 * 1024, 1, 20 * 1024, 4.0, 5.0),
    Point(300 * 1024, 0, 0, 8.0, 10.0),
]


def decode(png: bytes) -> np.ndarray:
    """Pixels of a PNG as `encode` writes them: one IDAT, every row unfiltered."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert png[at + 8 + length : at + 12 + length] == struct.pack(">I", zlib.crc32(kind + data))
        chunks[kind], at = data, at + 12 + length
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colour) == (8, 2)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_the_plot_has_a_bar_for_what_was_measured_and_a_mark_for_the_prediction():
    assert lines(POINTS) == [
        "budget     read a token  predicted  measured  tokens/s",
        "100.0 KiB  60.0 KiB      2.0        1.0       ████    |",
        "200.0 KiB  20.0 KiB      4.0        5.0       ████████████████|███",
        "300.0 KiB  0 B           8.0        10.0      ████████████████████████████████|███████",
    ]


def test_a_png_gives_its_pixels_back():
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 3), np.uint8)
    assert np.array_equal(decode(encode(pixels)), pixels)


def test_the_picture_holds_both_curves_from_end_to_end():
    pixels = decode(picture(POINTS))
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    for colour in ((200, 120, 30), (40, 90, 190)):
        drawn = np.argwhere((pixels[60:] == colour).all(axis=2))
        assert drawn[:, 1].max() - drawn[:, 1].min() > 0.8 * WIDTH


def test_the_font_has_every_character_of_every_size():
    for n_bytes in (0, 999, 2**10, 345 * 2**10, 678 * 2**20, 2**30 + 2**28, 2**40):
        curve = ("measured", (0, 0, 0), [(n_bytes, 1.0), (n_bytes + 1, 2.0)])
        decode(line_chart([curve], lambda x: format_size(int(x)), "tokens/s"))


def test_one_engine_goes_from_the_smallest_budget_to_the_whole_model(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path / "cache"))
    model, png = write_tiny(tmp_path / "tiny.gguf"), tmp_path / "curve.png"
    outcome = cli("sweep", "--json", "-points", "3", "-png", str(png), str(model))
    assert outcome.code == 0, outcome.err
    first, middle, last = json.loads(outcome.out)
    assert first["budget_bytes"] < middle["budget_bytes"] < last["budget_bytes"]
    assert first["page_ins"] > last["page_ins"] == last["bytes_read_per_token"] == 0
    assert all(point["measured_tokens_per_second"] > 0 for point in (first, middle, last))
    assert decode(Path(png).read_bytes()).shape == (HEIGHT, WIDTH, 3)


def test_no_budget_goes_above_maxmem(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path / "cache"))
    model = str(write_tiny(tmp_path / "tiny.gguf"))
    outcome = cli("sweep", "--json", "-points", "2", "-maxmem", "300K", model)
    first, last = json.loads(outcome.out)
    assert first["budget_bytes"] < last["budget_bytes"] == 300 * 1024
    assert last["page_ins"] > 0


def test_one_point_is_no_curve(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path / "cache"))
    outcome = cli("sweep", "-points", "1", str(write_tiny(tmp_path / "tiny.gguf")))
    assert outcome.code == 2
    assert outcome.err.endswith(
        "jitllm: a sweep has to have 2 points or more, but is asked for 1\n"
    )
