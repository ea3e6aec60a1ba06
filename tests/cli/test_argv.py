"""Every way to write a command line means the same, and what means nothing is refused in words."""

from typing import Literal

import pytest
from tyro.conf import OmitArgPrefixes, UseAppendAction

from jitllm.cli.argv import normalise
from jitllm.cli.options import Size, Words
from jitllm.errors import UsageError
from jitllm.sampling import SamplingParams


def go(
    model: str,
    text: Words = (),
    /,
    *,
    maxmem: Size | None = None,
    max_seq: int | None = None,
    system: str | None = None,
    kv: Literal["f16", "f32"] = "f16",
    stop: UseAppendAction[tuple[str, ...]] = (),
    sampling: OmitArgPrefixes[SamplingParams] | None = None,
    json: bool = False,
) -> None:
    """Never called."""


def info(file: str, /) -> None:
    """Never called."""


def score(model: str, /, *, f: str, ctx: int = 512) -> None:
    """Never called."""


def profile(action: Literal["check", "show"], file: str | None = None, /) -> None:
    """Never called."""


COMMANDS = {"go": go, "info": info, "score": score, "profile": profile}


@pytest.mark.parametrize(
    "line",
    [
        "go -max-seq 5 m hello",
        "go --max-seq 5 m hello",
        "go -max-seq=5 m hello",
        "go --max-seq=5 m hello",
        "go -max_seq 5 m hello",
        "go --max_seq=5 m hello",
        "go m -max-seq 5 hello",
        "go m hello -max-seq 5",
        "go m hello --max-seq=5",
    ],
)
def test_dashes_equals_signs_underscores_and_places_do_not_matter(line):
    assert normalise("prog", line.split(), COMMANDS) == ["go", "--max-seq=5", "--", "m", "hello"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # values that begin with a dash, are empty, or hold spaces and equals signs
        (["-temp", "-0.5", "m"], ["--temp=-0.5", "--", "m"]),
        (["-seed", "-1", "m"], ["--seed=-1", "--", "m"]),
        (["-system", "-x y", "m"], ["--system=-x y", "--", "m"]),
        (["-system=", "m"], ["--system=", "--", "m"]),
        (["-system=a=b c\nd", "m"], ["--system=a=b c\nd", "--", "m"]),
        (["-stop=-n", "-stop", "b", "m"], ["--stop=-n", "--stop=b", "--", "m"]),
        # switches take no value
        (["-json", "m", "x"], ["--json", "--", "m", "x"]),
        # arguments that begin with a dash
        (["m", "-"], ["--", "m", "-"]),
        (["m", "-5 degrees"], ["--", "m", "-5 degrees"]),
        (["m", "- a list"], ["--", "m", "- a list"]),
        (["m", "-hello there, said she"], ["--", "m", "-hello there, said she"]),
        (["m", "--", "-n", "--"], ["--", "m", "-n", "--"]),
        (["m", ""], ["--", "m", ""]),
    ],
)
def test_values_and_arguments_survive_whatever_they_begin_with(words, expected):
    assert normalise("prog", ["go", *words], COMMANDS) == ["go", *expected]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["goo"], "unknown command 'goo'; did you mean go?"),
        (["zzz"], "unknown command 'zzz'; the commands are go, info, score, profile"),
        (["-n", "4", "go"], "the command comes first, then -n; see prog --help"),
        (["go", "-tmp", "0", "m"], "go has no flag -tmp; did you mean -temp?"),
        (["go", "--maxmen=4G", "m"], "go has no flag --maxmen; did you mean --maxmem?"),
        (["go", "m", "-xyzzy"], "go has no flag -xyzzy; text that begins with a dash goes after --;"
         " see prog go --help"),
        (["info", "-n", "4"], "info has no flag -n; text that begins with a dash goes after --;"
         " see prog info --help"),
        (["go", "m", "-n"], "-n needs a value; see prog go --help"),
        (["go", "-system", "-n", "4", "m"], "-system needs a value, but -n follows;"
         " write -system=-n if that is it"),
        (["go", "-system", "--", "m"], "-system needs a value, but -- follows;"
         " write -system=-- if that is it"),
        (["go", "-n", "many", "m"], "-n has to be a whole number, but is 'many'"),
        (["go", "-n=1.5", "m"], "-n has to be a whole number, but is '1.5'"),
        (["go", "--temp=hot", "m"], "--temp has to be a number, but is 'hot'"),
        (["go", "-kv", "q4", "m"], "-kv has to be f16 or f32, but is 'q4'"),
        (["go", "-json=no", "m"], "-json takes no value, but is given 'no'"),
        (["go"], "go needs MODEL; see prog go --help"),
        (["profile", "sho"], "ACTION has to be check or show, but is 'sho'"),
        (["score", "m", "-ctx", "8"], "score needs -f; see prog score --help"),
        (["score", "-ctx", "8"], "score needs MODEL and -f; see prog score --help"),
        (["--tyro-print-completion", "cmd"], "write --tyro-print-completion SHELL,"
         " SHELL being bash, zsh, fish"),
        (["--tyro-write-completion", "zsh"], "write --tyro-write-completion SHELL FILE,"
         " SHELL being bash, zsh, fish"),
        (["info", "a", "b"], "info takes FILE, but 'b' follows; see prog info --help"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused_with_a_way_out(words, sentence):
    with pytest.raises(UsageError) as refusal:
        normalise("prog", words, COMMANDS)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("words", [["-h"], ["-help"], ["--help"]])
def test_help_is_asked_for_anywhere_but_behind_two_dashes(words):
    assert normalise("prog", words, COMMANDS) == ["--help"]
    assert normalise("prog", ["go", *words], COMMANDS) == ["go", "--help"]
    assert normalise("prog", ["go", "m", "-n", "4", *words], COMMANDS) == ["go", "--help"]
    assert normalise("prog", ["go", "m", "--", *words], COMMANDS) == ["go", "--", "m", *words]


def test_requests_for_shell_completion_reach_tyro_untouched():
    words = ["--tyro-print-completion", "bash"]
    assert normalise("prog", words, COMMANDS) == words
