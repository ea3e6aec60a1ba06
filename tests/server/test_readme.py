"""The README's examples for a server do what it says, on a server that really runs."""

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.process import Served, serving, write_model

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "README.md").read_text("utf-8").partition("\n## A server\n")[2]
SECTION = SECTION.partition("\n## ")[0]
_COMMAND = re.compile(r"^    \$ ((?:.*\\\n)*.*)", re.MULTILINE)
_ADDR = "127.0.0.1:4242"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "stories260K")
    start, *_ = _COMMAND.findall(SECTION)
    assert start.startswith("jitllmd serve -models models -load stories260K.jlm -id stories ")
    with serving(folder, *start.split()[4:]) as served:
        yield served


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_can_be_typed_as_they_stand(served):
    _, *commands = _COMMAND.findall(SECTION)
    assert sum("curl" in command for command in commands) >= 4
    assert sum("jitllmd" in command for command in commands) >= 5
    program = f"{sys.executable} -m tests.server.real"
    script = [
        "set -e",
        'curl() { command curl -f --no-progress-meter "$@"; echo; }',
        f'jitllmd() {{ verb=$1; shift; {program} "$verb" -addr {served.addr} "$@"; }}',
        *(command.replace(_ADDR, served.addr) for command in commands),
    ]
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "applied  budget 400.0 KiB" in done.stdout
    assert "blocks 0-2  cpu:1" in done.stdout
    assert done.stdout.endswith("no session is open\n")


def test_the_client_s_example_runs(served, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    exec(textwrap.dedent(example).replace(_ADDR, served.addr), {})
    assert " 16 " in capsys.readouterr().out
