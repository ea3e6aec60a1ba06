"""ctrl-C and SIGTERM end an installed command without a word, wherever they fall."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny

ROOT = Path(__file__).parent.parent.parent
_PRESS = "signal.raise_signal(SIGNAL)"
_IN_WORK = f"def main():\n    {_PRESS}\n    time.sleep(60)\n"
_IN_A_DESTRUCTOR = f"""
class Dying:
    def __del__(self):
        {_PRESS}
        time.sleep(0)

def main():
    Dying()
    time.sleep(60)
"""
_IN_A_COLLECTION = f"""
def collected(*_):
    gc.callbacks.clear()
    {_PRESS}
    time.sleep(0)

def main():
    gc.callbacks.append(collected)
    gc.collect()
    time.sleep(60)
"""
_IN_AN_IMPORT = """
def main():
    import imported
    assert imported.finished
    time.sleep(60)
"""
_BESIDE_A_THREAD = f"""
def main():
    threading.Timer(60, print).start()
    {_PRESS}
    time.sleep(60)
"""
_AT_THE_END = "def main():\n    import imported\n    return 0\n"
_IN_THE_BACKGROUND = f"def main():\n    {_PRESS}\n    return 7\n"


_IN_A_CONVERSION = f"""
from jitllm.cli import jitllm
from jitllm.paging.container import ContainerWriter

def finish(writer):
    assert writer._part.exists()
    {_PRESS}
    time.sleep(60)

def main():
    ContainerWriter.finish = finish
    return jitllm.main(["convert", "tiny.gguf", "tiny.jlm"])
"""


def enter(folder: Path, body: str, signal: str = "SIGINT") -> tuple[int, str, str]:
    """The exit code and the talk of a command whose main is in `body`."""
    header = f"import gc, signal, threading, time\nSIGNAL = signal.{signal}\n"
    (folder / "command.py").write_text(header + body)
    (folder / "imported.py").write_text(
        f"import signal\nSIGNAL = signal.{signal}\n{_PRESS}\nfinished = True\n"
    )
    code = "import sys; from jitllm.cli.entry import _enter; sys.exit(_enter('command'))"
    paths = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; "
    if body is _IN_THE_BACKGROUND:
        paths += "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    command = [sys.executable, "-c", paths + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=folder)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize(
    "body",
    [_IN_WORK, _IN_A_DESTRUCTOR, _IN_A_COLLECTION, _IN_AN_IMPORT, _BESIDE_A_THREAD],
    ids=["work", "destructor", "collection", "import", "thread"],
)
def test_a_signal_ends_the_command_at_once_and_quietly(tmp_path, body, signal, code):
    assert enter(tmp_path, body, signal) == (code, "", "")


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_a_conversion_that_is_ended_leaves_nothing(tmp_path, signal):
    source = write_tiny(tmp_path / "tiny.gguf")
    code, out, _ = enter(tmp_path, _IN_A_CONVERSION, signal)
    assert (code, out) == (130 if signal == "SIGINT" else 143, "")
    assert list(tmp_path.glob("tiny*")) == [source]


def test_a_command_that_is_done_before_ctrl_c_counts_is_done(tmp_path):
    assert enter(tmp_path, _AT_THE_END) == (0, "", "")


def test_a_command_in_the_background_does_not_hear_ctrl_c(tmp_path):
    assert enter(tmp_path, _IN_THE_BACKGROUND) == (7, "", "")
