"""ctrl-C ends an installed command with 130 and without a word, wherever it falls."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
_PRESS = "signal.raise_signal(signal.SIGINT)"
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


def enter(folder: Path, body: str) -> tuple[int, str, str]:
    """The exit code and the talk of a command whose main is in `body`."""
    header = "import gc, signal, threading, time\n"
    (folder / "command.py").write_text(header + body)
    (folder / "imported.py").write_text(f"import signal\n{_PRESS}\nfinished = True\n")
    code = "import sys; from jitllm.cli.entry import _enter; sys.exit(_enter('command'))"
    paths = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; "
    if body is _IN_THE_BACKGROUND:
        paths += "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    command = [sys.executable, "-c", paths + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "body",
    [_IN_WORK, _IN_A_DESTRUCTOR, _IN_A_COLLECTION, _IN_AN_IMPORT, _BESIDE_A_THREAD],
    ids=["work", "destructor", "collection", "import", "thread"],
)
def test_ctrl_c_ends_the_command_at_once_and_quietly(tmp_path, body):
    assert enter(tmp_path, body) == (130, "", "")


def test_a_command_that_is_done_before_ctrl_c_counts_is_done(tmp_path):
    assert enter(tmp_path, _AT_THE_END) == (0, "", "")


def test_a_command_in_the_background_does_not_hear_ctrl_c(tmp_path):
    assert enter(tmp_path, _IN_THE_BACKGROUND) == (7, "", "")
