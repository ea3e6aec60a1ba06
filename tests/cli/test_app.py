"""The program around the commands: help, exit codes, pipes, and never a traceback."""

import os
import resource
import subprocess
import sys

import pytest

from jitllm.cli.app import Command, run_program
from jitllm.cli.jitllm import COMMANDS, main
from jitllm.errors import BudgetError, FormatError
from tests.tiny_models import write_tiny

NAMES = [command.name for command in COMMANDS]


def run_fake(*argv: str, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.cli.fake_engine", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["tokenize", "-h"]])
def test_help_loads_neither_jax_nor_numpy_nor_tokenizers(argv):
    code = (
        "import sys; from jitllm.cli.jitllm import main; code = main(sys.argv[1:]);"
        "heavy = {'jax', 'numpy', 'tokenizers', 'llvmlite', 'rich', 'jinja2'} & set(sys.modules);"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_takes_less_than_600_ms_of_a_core():
    def core_seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = core_seconds()
    assert run_fake("--help").returncode == 0
    assert core_seconds() - before < 0.6


def test_help_shows_every_command_with_an_example(cli):
    page = cli("--help").out
    for command in COMMANDS:
        assert f"• {command.name}" in page
        assert command.example.splitlines()[0] in page


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_each_command_has_a_page_with_its_examples(cli, command):
    outcome = cli(command.name, "--help")
    assert outcome.code == 0
    assert outcome.err == ""
    for example in command.example.splitlines():
        assert f"  {example}\n" in outcome.out
        assert f"jitllm {command.name}" in example


def test_no_command_shows_the_help_on_stderr_and_exits_2(cli):
    outcome = cli()
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("usage: jitllm")


def test_an_unknown_command_exits_2_with_one_line(cli):
    assert cli("rum") == (2, "", "jitllm: unknown command 'rum'; did you mean run?\n")


def test_the_version_is_the_package_s(cli):
    assert cli("--version") == (0, "jitllm 0.1.0\n", "")
    assert cli("-version").code == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_the_commands_and_flags(cli, shell):
    script = cli("--tyro-print-completion", shell).out
    assert "perplexity" in script
    assert "maxmem" in script


def failing(error: BaseException) -> int:
    def fail() -> None:
        """Fail."""
        raise error

    return run_program("prog", "", [Command(fail, "prog fail")], ["fail"])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (FormatError("x.gguf ends early"), 1, "prog: x.gguf ends early\n"),
        (BudgetError("1.0 KiB is too small", 9), 1, "prog: 1.0 KiB is too small\n"),
        (FileNotFoundError(2, "No such file", "x.gguf"), 1, "prog: x.gguf: No such file\n"),
        (OSError(28, "No space left"), 1, "prog: No space left\n"),
        (MemoryError(), 1, "prog: the machine has no memory left; a smaller -maxmem or -max-seq"
         " needs less\n"),
        (ZeroDivisionError("by\nzero"), 1, "prog: internal error, ZeroDivisionError: by zero"
         " (JITLLM_TRACEBACK=1 shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)  # fmt: skip
def test_every_failure_is_one_sentence_and_a_code(capsys, monkeypatch, error, code, line):
    monkeypatch.delenv("JITLLM_TRACEBACK", raising=False)
    assert failing(error) == code
    assert capsys.readouterr() == ("", line)


def test_a_traceback_is_shown_to_those_who_ask_for_it(capsys, monkeypatch):
    monkeypatch.setenv("JITLLM_TRACEBACK", "1")
    assert failing(ValueError("inner")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m tests.cli.fake_engine library | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("name")
    assert done.stderr == ""


def test_a_reader_that_never_reads_ends_a_long_reply_quietly():
    words = "word " * 20_000
    code = "from tests.cli.fake_engine import main; import sys; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "run", "m.jlm"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        process.stdin.write(words.encode())
        process.stdin.close()
        err = process.stderr.read().decode()
        process.wait(timeout=60)
    assert process.returncode == 141
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["library", "run m.jlm", "chat m.jlm", "--help"])
def test_a_closed_standard_stream_is_an_empty_one(command, closed):
    line = f"{sys.executable} -m tests.cli.fake_engine {command} {closed}"
    done = subprocess.run(
        line, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "error" not in done.stderr


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["library"]])
def test_python_without_docstrings_runs_it_too(argv):
    command = [sys.executable, "-OO", "-m", "tests.cli.fake_engine", *argv]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def test_bytes_that_are_no_utf8_on_the_command_line_are_replaced():
    done = run_fake("run", "m.jlm", "caf\udce9")
    assert done.returncode == 0
    assert done.stdout == "caf\N{REPLACEMENT CHARACTER}" * 2 + "\n"


def test_a_file_whose_name_is_no_utf8_is_found_and_named_byte_by_byte(tmp_path):
    source = tmp_path / "caf\udce9.gguf"
    write_tiny(source)
    out = tmp_path / "caf\udce9.jlm"
    command = [sys.executable, "-m", "tests.cli.real", "convert", source, out]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, os.fsencode(out) + b"\n"), done.stderr
    command = [
        sys.executable,
        "-m",
        "tests.cli.real",
        "run",
        "-n",
        "1",
        "-devices",
        "cpu",
        out,
        "a",
    ]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0


def test_main_takes_the_process_s_own_arguments_by_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jitllm", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == "jitllm 0.1.0\n"
