"""The main job from the command line, with nothing replaced: convert a model, run it in too little
memory, and get the same text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny

WORDS = ("-devices", "cpu", "-n", "12", "-temp", "0", "-max-seq", "64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITLLM_CACHE", str(folder / "cache"))


@pytest.fixture
def model(cli, folder: Path) -> str:
    path = folder / "tiny.jlm"
    if not path.exists():
        assert cli("convert", str(write_tiny(folder / "tiny.gguf")), str(path)).code == 0
    return str(path)


def facts_of(cli, model: str, *words: str) -> dict:
    outcome = cli("run", "--json", *WORDS, *words, model, "abc")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def smallest_budget(cli, model: str) -> str:
    outcome = cli("run", "-maxmem", "1", model, "abc")
    assert (outcome.code, outcome.out) == (1, "")
    assert "the smallest that works is" in outcome.err
    return outcome.err.rpartition("(")[2].split()[0]


def test_the_smallest_budget_is_named_works_and_changes_nothing_but_the_cost(cli, model):
    whole = facts_of(cli, model, "-maxmem", "1G")
    tight = facts_of(cli, model, "-maxmem", smallest_budget(cli, model))
    assert tight["text"] == whole["text"]
    assert tight["ids"] == whole["ids"]
    assert len(whole["ids"]) == whole["generated_tokens"] == 12
    assert whole["over_bytes"] == 0 < tight["over_bytes"]
    assert whole["bytes_read_per_token"] == 0 < tight["bytes_read_per_token"]
    assert tight["resident_bytes"] <= tight["budget_bytes"] < whole["resident_bytes"]
    assert tight["page_ins"] > whole["page_ins"]


def test_a_cache_that_cannot_be_written_is_not_missed(model, folder):
    (folder / "file").touch()
    command = [sys.executable, "-m", "tests.cli.real", "run", *WORDS, model, "abc"]
    environment = os.environ | {"JITLLM_CACHE": str(folder / "file")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "arning" not in done.stderr


def test_stdout_is_prompt_and_reply_and_stderr_says_over_budget(cli, model):
    outcome = cli("run", "-maxmem", smallest_budget(cli, model), *WORDS, model, "abc")
    assert outcome.out == facts_of(cli, model)["text"] + "\n"
    memory, pages, *_ = outcome.err.splitlines()
    assert memory.startswith("memory ") and "★ OVER BUDGET by " in memory
    assert pages.startswith("pages ") and " of 3 host blocks resident at once" in pages


def test_a_gguf_is_converted_once_into_the_cache_and_said_so(cli, model, folder):
    gguf = str(folder / "tiny.gguf")
    first, second = (cli("run", *WORDS, gguf, "abc") for _ in range(2))
    assert first.out == second.out == facts_of(cli, model)["text"] + "\n"
    assert "converting tiny.gguf once, into " in first.err
    assert "converting" not in second.err


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(cli, model):
    outcome = cli("run", "-max-seq", "16", model, "a b c d e f g h i j k l m n o p q r s t u v w x")
    assert outcome.code == 2
    assert "do not fit" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("jitllm: ")


def test_a_conversation_keeps_its_answer_while_its_budget_changes(cli, model, folder):
    template = folder / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    chatty = str(folder / "chatty.jlm")
    cli("convert", "-force", "-chat-template", str(template), str(folder / "tiny.gguf"), chatty)
    words = ("chat", "-temp", "0", "-n", "8", "-max-seq", "64", chatty)
    smallest = smallest_budget(cli, chatty)
    steady = cli(*words, stdin="abc\nde\n")
    moved = cli(*words, stdin=f"abc\n/budget {smallest}\nde\n")
    assert steady.code == moved.code == 0
    assert moved.out == steady.out
    assert "★ OVER BUDGET" in moved.err
    assert "★ OVER BUDGET" not in steady.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-ctx", "0"), "perplexity needs windows of 4 tokens or more"),
        (("-ctx", "64", "-max-seq", "32"), "-max-seq 32 has no room for a window of -ctx 64"),
    ],
)
def test_windows_that_cannot_be_are_refused_in_their_own_words(cli, model, folder, words, sentence):
    text = folder / "text.txt"
    text.write_text("abc " * 100)
    outcome = cli("perplexity", "-f", str(text), *words, model)
    assert (outcome.code, outcome.out) == (2, "")
    assert sentence in outcome.err


def test_perplexity_does_not_depend_on_the_budget(cli, model, folder):
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 4)
    words = ("perplexity", "--json", "-f", str(text), "-ctx", "32", model)
    whole = json.loads(cli(*words).out)
    tight = json.loads(cli(*words, "-maxmem", smallest_budget(cli, model)).out)
    assert tight == whole
    assert whole["perplexity"] > 1


def test_a_container_with_a_flipped_bit_is_one_sentence_and_no_output(cli, model, folder):
    data = bytearray(Path(model).read_bytes())
    data[len(data) // 2] ^= 1
    bad = folder / "bad.jlm"
    bad.write_bytes(data)
    outcome = cli("run", *WORDS, str(bad), "abc")
    assert outcome.code == 1
    assert outcome.out.strip() in ("", "abc")
    assert outcome.err.splitlines()[-1].startswith("jitllm: ")
    assert "Traceback" not in outcome.err
