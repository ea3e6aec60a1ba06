"""`jitllmd` as a program: its pages, and what it loads to show them."""

import logging
import subprocess
import sys

import pytest

from jitllm.cli.jitllmd import COMMANDS, main

NAMES = [command.name for command in COMMANDS]
FLAGS = """
    addr models load id devices placement profile maxmem gpu-layers max-seq kv threads
    process-limit sessions max-queue prefix-cache api-key admin-key allow-host cors-origin
    log-format
"""


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["place", "-h"]])
def test_help_loads_neither_jax_nor_flask(argv):
    code = (
        "import sys; from jitllm.cli.jitllmd import main; code = main(sys.argv[1:]);"
        "heavy = {'jax', 'numpy', 'flask', 'waitress', 'prometheus_client'} & set(sys.modules);"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_each_verb_has_a_page_with_its_examples(capsys, command):
    assert main([command.name, "--help"]) == 0
    page = capsys.readouterr().out
    for example in command.example.splitlines():
        assert f"  {example}\n" in page
        assert example.startswith(f"jitllmd {command.name}")


def test_serve_has_every_flag_of_the_settings_under_its_own_name(capsys):
    main(["serve", "--help"])
    page = capsys.readouterr().out
    for flag in FLAGS.split():
        assert f"--{flag} " in page


def test_keys_may_come_from_the_environment_and_are_not_shown(capsys, monkeypatch):
    monkeypatch.setenv("JITLLMD_API_KEY", "hush")
    main(["serve", "--help"])
    assert "hush" not in capsys.readouterr().out
    # with a key an open address is allowed: what fails is the folder that is not there
    assert main(["serve", "-addr", "0.0.0.0:0", "-models", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("jitllmd: the folder of models /nowhere is not there")


def test_a_folder_of_models_that_is_none_is_usage(capsys, tmp_path):
    file = tmp_path / "a.jlm"
    file.touch()
    for path, what in ((tmp_path / "none", "is not there"), (file, "is not a folder")):
        assert main(["serve", "-models", str(path)]) == 2
        sentence = f"the folder of models {path} {what}; make it, or name another"
        assert capsys.readouterr().err == f"jitllmd: {sentence}\n"


def test_a_server_that_ended_logs_nowhere(capsys):
    loggers = [logging.getLogger(name) for name in ("jitllmd", "jitllm", "waitress")]
    before = [(list(logger.handlers), logger.propagate, logger.level) for logger in loggers]
    assert main(["serve", "-addr", "127.0.0.1:0", "-load", "none.jlm"]) == 1
    assert [(logger.handlers, logger.propagate, logger.level) for logger in loggers] == before


def test_a_server_that_is_not_there_is_one_sentence_and_no_text(capsys):
    assert main(["run", "-addr", "127.0.0.1:1", "hi"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jitllmd: no server answers at 127.0.0.1:1")
