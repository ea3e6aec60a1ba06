"""`jitllm plan` and `jitllm profile`: where a model will be and what it will cost, as text."""

import json
import re
from pathlib import Path

import pytest

from jitllm.placement.profile import load_profile, parse_profile, profile_hash
from tests.tiny_models import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture(autouse=True)
def cache(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITLLM_CACHE", str(Path(model).parent / "cache"))


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text("rules: [{blocks: 0-1, place: host}]\nrelocate: true\n")
    return str(path)


def test_plan_shows_memory_places_and_what_a_token_costs(cli, model):
    outcome = cli("plan", "-maxmem", "300K", "-max-seq", "64", model)
    assert outcome.code == 0
    memory, *rest = outcome.out.splitlines()
    assert memory.startswith("memory   budget 300.0 KiB, weights ")
    assert " for 64 tokens, peak " in memory and "★ OVER BUDGET by " in memory
    assert "blocks 0-2  host" in outcome.out
    titles = ("this budget", "next above", "next below", "smallest", "all resident")
    assert all(any(line.startswith(title) for line in rest) for title in titles)
    assert rest[-1].startswith("measured: disk ")


def test_plan_as_json_agrees_with_the_run_under_the_same_budget(cli, model):
    words = ("-maxmem", "300K", "-max-seq", "64", "--json", model)
    planned = json.loads(cli("plan", *words).out)
    ran = json.loads(cli("run", "-n", "4", "-temp", "0", *words, "abc").out)
    for name in ("budget_bytes", "weights_bytes", "kv_bytes", "over_bytes", "max_seq"):
        assert planned[name] == ran[name]
    assert planned["now"]["tokens_per_second"] > 0
    assert planned["smallest"]["budget_bytes"] < planned["whole"]["budget_bytes"]
    assert planned["whole"]["bytes_read_per_token"] == planned["whole"]["n_moving"] == 0
    assert planned["smallest"]["n_moving"] == planned["smallest"]["n_resident"] == 1


def test_plan_refuses_a_budget_that_cannot_work(cli, model):
    outcome = cli("plan", "-maxmem", "1K", model)
    assert outcome.code == 1
    assert "the smallest that works is" in outcome.err


def test_profile_show_prints_yaml_in_which_flags_win(cli, profile):
    out = cli("profile", "show", profile, "-gpu-layers", "2").out
    assert "- blocks: 0-1\n" in out
    assert "relocate: true\n" in out
    assert out.endswith("gpu_layers: 2\n")
    hashed = re.match("# hash ([0-9a-f]{16})\n", out)[1]
    assert hashed == profile_hash(parse_profile(out))
    assert hashed != profile_hash(load_profile(profile))


def test_profile_check_prints_the_plan(cli, model, profile):
    outcome = cli("profile", "check", profile, model)
    assert outcome.code == 0
    assert f"0-1=host ({profile}:1:9)" in outcome.out
    assert "block 2" in outcome.out


def test_profile_check_says_where_a_profile_is_wrong(cli, model, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("rules:\n  - {blocks: 7-9, place: host}\n")
    outcome = cli("profile", "check", str(path), model)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"jitllm: {path}:2:5: ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["check"], "profile check needs FILE and MODEL"),
        (["check", "a.yaml"], "profile check needs FILE and MODEL"),
        (["show", "a.yaml", "m"], "profile show takes FILE, but 'm' follows"),
    ],
)
def test_profile_says_what_it_needs(cli, words, sentence):
    assert cli("profile", *words) == (2, "", f"jitllm: {sentence}\n")
