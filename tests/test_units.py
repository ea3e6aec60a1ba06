"""Byte sizes as text: what is printed reads back, and what differs looks different."""

import pytest

from jitllm.units import exact_size, format_size, parse_size, told_apart

KIB = 1024


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (210 * KIB, "210.0 KiB"),
        (210 * KIB - 1, "210.0 KiB (215039 bytes)"),
        (3 << 29, "1.50 GiB"),
    ],
)
def test_a_size_that_is_rounded_has_its_bytes_beside_it(n_bytes, text):
    assert exact_size(n_bytes) == text
    assert parse_size(format_size(n_bytes)) == n_bytes or text.endswith("bytes)")


def test_two_sizes_that_differ_never_look_the_same():
    assert told_apart(100 * KIB, 210 * KIB - 1) == ("100.0 KiB", "210.0 KiB")
    assert told_apart(210 * KIB - 1, 210 * KIB) == ("210.0 KiB (215039 bytes)", "210.0 KiB")
    assert told_apart(5 * KIB, 5 * KIB) == ("5.0 KiB", "5.0 KiB")
