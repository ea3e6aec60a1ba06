"""Talking to the person at the terminal: lines and progress bars on stderr, prompts from stdin.

The answer of a command goes to stdout and nowhere here."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jitllm.errors import JitllmError

_QUIET_S = 2.0


def say(line: str) -> None:
    """One line of talk, at once."""
    print(line, file=sys.stderr, flush=True)


def text_or_stdin(words: tuple[str, ...], strip_newline: bool = True) -> str:
    """The words joined by spaces; for no words, or `-` alone, all of stdin. Bytes that are no UTF-8
    are replaced.

    `echo` and editors end a text with a newline that is not meant as text: one is taken off.
    """
    if words and words != ("-",):
        return " ".join(words).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if sys.stdin.isatty():
        say("reading the text from the terminal; ctrl-D on an empty line ends it")
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    return text.removesuffix("\n").removesuffix("\r") if strip_newline else text


def read_text(path: str) -> str:
    """The UTF-8 text of a file; `-` is stdin. JitllmError where it is none."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise JitllmError(f"{path} is not text in UTF-8") from None


Progress = Callable[[str, int, int], None]
"""progress(what, done, total); a total of 0 is not known."""


@contextmanager
def progress_bar(unit: str = "bytes") -> Iterator[Progress]:
    """A progress bar on stderr, one for each `what`; `unit` is bytes or the noun that is counted.

    It appears with the first call. Where stderr is no terminal, a plain line now and then instead.
    """
    if not sys.stderr.isatty():
        yield _PlainProgress()
        return
    bar = _BarProgress(unit)
    try:
        yield bar
    finally:
        bar.stop()


class _BarProgress:
    """Bars drawn by rich, which takes 0.1 s to import: not before there is something to show."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.bars: Any = None
        self.tasks: dict[str, Any] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.bars is None:
            self.bars = _rich_bars(self.unit)
            self.bars.start()
        if what not in self.tasks:
            self.tasks[what] = self.bars.add_task(what, total=total or None)
        self.bars.update(self.tasks[what], completed=done, total=total or None)

    def stop(self) -> None:
        if self.bars is not None:
            self.bars.stop()


def _rich_bars(unit: str) -> Any:
    from rich import progress
    from rich.console import Console

    is_bytes = unit == "bytes"
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True) if is_bytes else progress.MofNCompleteColumn(),
        progress.TextColumn("" if is_bytes else unit),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


class _PlainProgress:
    """Says how far it is, at most every two seconds."""

    def __init__(self) -> None:
        self.said_at = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if total and time.monotonic() - self.said_at >= _QUIET_S:
            say(f"{what}: {100 * done // total} %")
            self.said_at = time.monotonic()


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, each column as wide as its widest cell; the last one is never padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=False)][:-1]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
