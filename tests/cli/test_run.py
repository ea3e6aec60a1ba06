"""`jitllm run` on an engine that reverses words: what goes where, and with which exit code."""

import json
import signal
import subprocess
import sys

from jitllm.cli.options import EngineOptions


def test_stdout_is_the_text_alone_and_stderr_the_cost(cli, engine):
    outcome = cli("run", "m.jlm", "one two three")
    assert outcome.code == 0
    assert outcome.out == "one two threethree two one\n"
    labels = [line.split()[0] for line in outcome.err.splitlines()]
    assert labels == ["memory", "pages", "kernels", "pages", "bytes", "rate", "peak"]
    assert engine.closed


def test_words_make_one_text(cli, engine):
    assert cli("run", "m.jlm", "one", "two", "-n", "4").out == "one twotwo one\n"


def test_the_flags_reach_the_engine(cli, engine):
    line = "-maxmem 400K m.jlm x -devices=cpu --max-seq 64 -n 16 -temp 0 -top-k=7 -seed -1"
    cli("run", *line.split(), "-stop", "a", "-stop", "b", "-no-check")
    opened, generated = engine.calls
    assert opened == (
        "open",
        "m.jlm",
        EngineOptions(maxmem=409600, devices="cpu", max_seq=64, no_check=True),
    )
    assert generated == (
        "generate",
        "x",
        {"n": 16, "temp": 0.0, "top_k": 7, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0,
         "repeat_last_n": 64, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": -1,
         "stop": ("a", "b")},
    )  # fmt: skip


def test_json_prints_one_object_with_the_text_and_the_figures(cli, engine):
    outcome = cli("run", "--json", "m.jlm", "uno dös")
    facts = json.loads(outcome.out)
    assert outcome.out.count("\n") == 1
    assert facts["text"] == "uno dösdös uno"
    assert facts["reply"] == "dös uno"
    assert facts["ids"] == [100, 101]
    assert facts["bytes_read"] == 20480


def test_no_text_or_a_dash_reads_stdin_and_drops_the_last_newline(cli, engine):
    assert cli("run", "m.jlm", stdin="from a pipe\n").out == "from a pipepipe a from\n"
    assert cli("run", "m.jlm", "-", stdin="a\n\n").out == "a\na\n"
    assert cli("run", "m.jlm", "-", stdin="no end").out == "no endend no\n"


def test_stdin_that_is_no_utf8_is_read_with_replacements(cli, engine):
    assert cli("run", "m.jlm", stdin=b"caf\xe9").out == "caf\N{REPLACEMENT CHARACTER}" * 2 + "\n"


def test_a_prompt_may_begin_with_a_dash(cli, engine):
    assert cli("run", "m.jlm", "- milk and eggs").out == "- milk and eggseggs and milk -\n"
    assert cli("run", "m.jlm", "--", "-n").out == "-n-n\n"


def test_chat_sends_messages_and_prints_the_reply_alone(cli, engine):
    outcome = cli("run", "-chat", "-system", "be brief", "m.jlm", "who are you")
    assert outcome.out == "you are who\n"
    messages = engine.calls[1][1]
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "who are you"},
    ]


def test_a_system_message_without_chat_is_refused_before_anything_is_opened(cli, engine):
    outcome = cli("run", "-system", "be brief", "m.jlm", "who are you")
    assert outcome == (2, "", "jitllm: -system is part of a conversation; add -chat\n")
    assert engine.calls == []


def test_a_failure_before_the_reply_leaves_stdout_empty(cli, engine):
    outcome = cli("run", "m.jlm", "one two boom")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.endswith("\njitllm: page 3 of fake.jlm does not match its hash\n")


def test_a_failure_amid_the_reply_ends_the_line_and_exits_1(cli, engine):
    outcome = cli("run", "m.jlm", "boom one two")
    assert outcome.code == 1
    assert outcome.out == "boom one twotwo one\n"
    assert outcome.err.endswith("\njitllm: page 3 of fake.jlm does not match its hash\n")
    assert engine.closed


def test_a_setting_out_of_range_is_a_usage_error(cli, engine):
    outcome = cli("run", "-top-p", "7", "m.jlm", "x")
    assert outcome == (2, "", "jitllm: -top-p has to be a number from 0 to 1, but is 7.0\n")


def test_a_size_that_is_none_is_a_usage_error(cli, engine):
    outcome = cli("run", "-maxmem", "4 quarts", "m.jlm", "x")
    assert outcome.code == 2
    assert outcome.err == (
        "jitllm: size '4 quarts' is not a number of bytes; write e.g. 400K, 1.5G or 2GiB\n"
    )


def test_ctrl_c_ends_the_run_with_130_and_no_traceback():
    command = [sys.executable, "-m", "tests.cli.fake_engine", "run", "-chat", "m.jlm", "a " * 200]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.read(1) == "a"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out.endswith("\n")
    assert "Traceback" not in err
