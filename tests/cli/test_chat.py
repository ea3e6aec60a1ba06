"""`jitllm chat`: lines in, replies out, commands obeyed, and ctrl-C that stops a reply alone."""

import signal
import subprocess
import sys
import time

import pytest


def test_each_line_is_a_turn_of_one_session(cli, engine):
    outcome = cli("chat", "m.jlm", stdin="hello there\n\nand again\n")
    assert outcome.code == 0
    assert outcome.out == "turn-1 there hello\nturn-2 again and\n"
    assert engine.closed


def test_system_stop_and_sampling_go_with_every_turn(cli, engine):
    cli("chat", "-system", "be brief", "-stop", "x", "-temp", "0", "m.jlm", stdin="a\nb\n")
    for _, _, params, system, stop in engine.calls[1:]:
        assert (params.temp, system, stop) == (0.0, "be brief", ("x",))


def test_reset_starts_the_session_anew(cli, engine):
    outcome = cli("chat", "m.jlm", stdin="a\n/reset\nb\n")
    assert outcome.out == "turn-1 a\nturn-1 b\n"
    assert "the conversation starts anew" in outcome.err


def test_budget_changes_the_budget_at_once_and_shows_it(cli, engine):
    outcome = cli("chat", "m.jlm", stdin="/budget 450K\n")
    assert engine.budget_bytes == 450 * 1024
    assert outcome.err.count("★ OVER BUDGET by 100.0 KiB") == 1
    assert outcome.err.count("★ OVER BUDGET by 50.0 KiB") == 1


def test_stats_shows_memory_and_the_last_reply(cli, engine):
    err = cli("chat", "m.jlm", stdin="one two\n/stats\n").err
    assert err.count("memory   budget") == 2
    assert err.count("rate     prompt 3 tokens") == 1


def test_stats_shows_every_line_of_the_ledger_and_the_process(cli, engine):
    lines = cli("chat", "m.jlm", stdin="/stats\n").err.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("ledger"))
    assert lines[at : at + 5] == [
        "ledger        budget     used       peak",
        "weights       400.0 KiB  300.0 KiB  350.0 KiB",
        "prefix cache             0 B        0 B",
        "all                      364.0 KiB  420.0 KiB",
        "process                  1.0 MiB    2.0 MiB",
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/rest", "there is no command /rest; did you mean /reset?"),
        ("/frobnicate", "there is no command /frobnicate; /help lists the commands"),
        ("/budget lots", "size 'lots' is not a number of bytes; write e.g. 400K, 1.5G or 2GiB"),
        ("/budget", "size '' is not a number of bytes; write e.g. 400K, 1.5G or 2GiB"),
        ("/budget 1K", "a budget of 1.0 KiB is below the smallest that works, 10.0 KiB"),
        ("boom", "page 3 of fake.jlm does not match its hash"),
    ],
)
def test_a_mistake_or_a_failure_is_said_and_the_conversation_goes_on(cli, engine, line, sentence):
    outcome = cli("chat", "m.jlm", stdin=f"{line}\nstill here\n")
    assert outcome.code == 0
    assert f"jitllm: {sentence}\n" in outcome.err
    assert "here still" in outcome.out


def test_a_model_that_cannot_chat_is_refused_before_the_first_line(cli, engine):
    engine.template_error = "fake.gguf has no chat template"
    outcome = cli("chat", "m.jlm", stdin="hello\n")
    assert outcome == (1, "", "jitllm: fake.gguf has no chat template\n")


def test_help_lists_every_command(cli, engine):
    err = cli("chat", "m.jlm", stdin="/help\n").err
    assert all(f"\n{name}" in err for name in ("/reset", "/budget", "/stats", "/help"))


def start_slow_chat() -> subprocess.Popen:
    """A chat whose replies take 0.2 s a piece, with both ends in hand."""
    command = [sys.executable, "-m", "tests.cli.fake_engine", "chat", "m.jlm"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_ctrl_c_stops_the_reply_and_the_next_line_is_answered():
    with start_slow_chat() as chat:
        chat.stdin.write("a b c d e f g h i j k l m n o p\n")
        chat.stdin.flush()
        assert chat.stdout.read(len("turn-1")) == "turn-1"  # the reply is under way
        chat.send_signal(signal.SIGINT)
        out, err = chat.communicate("next\n", timeout=30)
    stopped, answered, _ = out.split("\n")
    assert stopped.endswith(" a") is False
    assert answered == "turn-2 next"
    assert "stopped" in err.splitlines()
    assert chat.returncode == 0


def test_a_second_ctrl_c_leaves_with_130_and_no_traceback():
    with start_slow_chat() as chat:
        chat.stdin.write("a b c d e f g h i j k l m n o p\n")
        chat.stdin.flush()
        assert chat.stdout.read(1) == "t"
        chat.send_signal(signal.SIGINT)
        time.sleep(0.01)
        chat.send_signal(signal.SIGINT)
        _, err = chat.communicate(timeout=30)
    assert chat.returncode == 130
    assert "Traceback" not in err
