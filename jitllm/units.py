"""Byte sizes: text to int at the rim, int to text in reports. Powers of 1024 throughout."""

import re

from jitllm.errors import UsageError

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(?:([KMGT])I?)?B?\s*", re.IGNORECASE)
_MAX_BYTES = 2**63 - 1


def parse_size(text: str) -> int:
    """Bytes of `text`: a number with optional K, M, G, T, optional `i` and `B`, any case.

    >>> parse_size("400K"), parse_size("1.5 GiB"), parse_size("12")
    (409600, 1610612736, 12)
    """
    match = _SIZE.fullmatch(text) if text.isascii() else None
    if match is None:
        raise UsageError(f"size {text!r} is not a number of bytes; write e.g. 400K, 1.5G or 2GiB")
    number, unit = match.groups()
    n_bytes = float(number) * 1024 ** _POWERS[(unit or "").upper()]
    if n_bytes > _MAX_BYTES:
        raise UsageError(f"size {text!r} is larger than any memory; write e.g. 400K, 1.5G or 2GiB")
    return int(n_bytes)


def format_size(n_bytes: int) -> str:
    """`n_bytes` in the largest unit that keeps it above one: `512 B`, `181.0 KiB`, `1.50 GiB`."""
    if n_bytes < 0:
        return "-" + format_size(-n_bytes)
    if n_bytes < 1024:
        return f"{n_bytes} B"
    value, units = float(n_bytes), ["KiB", "MiB", "GiB", "TiB", "PiB"]
    for unit in units:
        value /= 1024
        if value < 1023.95 or unit == units[-1]:
            break
    digits = 2 if unit not in ("KiB", "MiB") else 1
    return f"{value:.{digits}f} {unit}"


def exact_size(n_bytes: int) -> str:
    """`format_size`, and in bytes where that rounds: `210.0 KiB`, `210.0 KiB (215039 bytes)`."""
    text = format_size(n_bytes)
    return text if parse_size(text) == n_bytes else f"{text} ({n_bytes} bytes)"


def told_apart(one: int, other: int) -> tuple[str, str]:
    """Both in the form of `format_size`, and in bytes where that hides that they differ."""
    texts = format_size(one), format_size(other)
    if one == other or texts[0] != texts[1]:
        return texts
    return exact_size(one), exact_size(other)
