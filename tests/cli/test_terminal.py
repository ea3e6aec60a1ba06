"""Talk on stderr: plain lines where there is no terminal, bars where there is one."""

import os
import pty
import subprocess
import sys

import pytest

from jitllm.cli import terminal
from jitllm.cli.terminal import columns, progress_bar, read_text
from jitllm.errors import JitllmError


def test_columns_line_up_and_lines_do_not_end_in_spaces():
    rows = [("name", "size", "x"), ("a", "100", "long text"), ("bcdefg", "1", "y")]
    assert columns(rows) == ["name    size  x", "a       100   long text", "bcdefg  1     y"]
    assert columns([]) == []


def test_progress_without_a_terminal_says_a_line_at_most_every_two_seconds(capsys, monkeypatch):
    clock = iter([100.0, 101.0, 102.5, 102.5, 103.0, 105.0, 105.0, 200.0, 200.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    with progress_bar() as progress:
        for done in (10, 20, 30, 75, 90):
            progress("converting x.gguf", done, 100)
        progress("unknown total", 5, 0)
    assert capsys.readouterr().err.splitlines() == [
        "converting x.gguf: 20 %",
        "converting x.gguf: 75 %",
        "converting x.gguf: 90 %",
    ]


def test_progress_on_a_terminal_is_a_bar_that_leaves_nothing_on_stdout():
    code = (
        "from jitllm.cli.terminal import progress_bar, say\n"
        "with progress_bar('tokens') as progress:\n"
        "    progress('measuring', 1, 4); say('a line between'); progress('measuring', 4, 4)\n"
    )
    parent, child = pty.openpty()
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=child, timeout=60)
    shown = terminal_output(parent, child)
    assert (done.returncode, done.stdout) == (0, b"")
    assert "measuring" in shown
    assert "4/4" in shown
    assert "a line between" in shown


def terminal_output(parent: int, child: int) -> str:
    os.close(child)
    shown = b""
    try:
        while data := os.read(parent, 4096):
            shown += data
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(parent)
    return shown.decode()


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "notes.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JitllmError, match=r"notes\.bin is not text in UTF-8"):
        read_text(str(path))
