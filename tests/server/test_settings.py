"""Settings from a file, and maps for a model that runs."""

from pathlib import Path

import pytest

from jitllm.errors import UsageError
from jitllm.placement.devices import Device
from jitllm.placement.planner import plan
from jitllm.placement.rules import Profile
from jitllm.server import Settings, load_settings
from jitllm.server.errors import ApiError
from jitllm.server.placing import moves_for

ROOT = Path(__file__).parents[2]


def from_text(tmp_path: Path, text: str, **overrides: object) -> Settings:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    return load_settings(path, **overrides)


def test_every_kind_of_value_is_read(tmp_path):
    text = "load: [a.jlm, b.jlm]\nid: a\nmaxmem: 400K\nprefix_cache: 0\nsessions: 2\napi_key: k\n"
    text += "kv: f32\nthreads: 1\nprocess_limit: 1G\nplacement: null\nmax_seq:\n"
    assert from_text(tmp_path, text, sessions=3) == Settings(
        load=("a.jlm", "b.jlm"),
        id=("a",),
        maxmem=409600,
        prefix_cache=0,
        sessions=3,
        api_key="k",
        kv="f32",
        threads=1,
        process_limit=1 << 30,
    )
    assert from_text(tmp_path, "# nothing\n") == Settings()


def test_the_settings_of_the_repository_can_be_read():
    assert load_settings(ROOT / "configs" / "server.yaml").load == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sesions: 2", "unknown key 'sesions'; known are"),
        ("sessions: two", "sessions has to be a whole number, but is 'two'"),
        ("sessions: true", "sessions has to be a whole number, but is True"),
        ("maxmem: much", "s.yaml: maxmem: size 'much' is not a number of bytes"),
        ("sessions: 0", "s.yaml: sessions has to be a whole number of 1 or more, but is 0"),
        ("threads: 0", "s.yaml: threads has to be a whole number of 1 or more, but is 0"),
        ("max_seq: -1", "s.yaml: max_seq has to be a whole number of 1 or more, but is -1"),
        ("maxmem: -1", "s.yaml: maxmem has to be a whole number of 0 or more, but is -1"),
        ("process_limit: x", "s.yaml: process_limit: size 'x' is not a number of bytes"),
        ("kv: q4", "s.yaml: kv has to be f16 or f32, but is 'q4'"),
        ("api_key: 12", "s.yaml: api_key has to be a text, but is 12"),
        ("max_queue: -1", "s.yaml: max_queue has to be a whole number of 0 or more, but is -1"),
        ("log_format: xml", "log_format has to be text or json, but is 'xml'"),
        ("cors_origin: app.example", "cors_origin 'app.example' is no origin"),
        ("id: a", "id a has no file to load that it could name"),
        ("- a", "have to be KEY: VALUE lines"),
        ("a: [", "are not YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path, text, message):
    with pytest.raises(UsageError) as caught:
        from_text(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(UsageError, match=r"cannot be read: No such file or directory$"):
        load_settings(tmp_path / "none.yaml")


class Page:
    kind, index, n_bytes = "block", 0, 100

    def __init__(self, kind: str, index: int = 0):
        self.kind, self.index = kind, index


DEVICES = [
    Device("host", budget_bytes=10_000),
    Device("cpu:1", platform="cpu", index=1, budget_bytes=10_000),
]
PAGES = [Page("dense"), *(Page("block", i) for i in range(6)), Page("head")]
# three blocks are away already
START = plan(PAGES, DEVICES, Profile(gpu_layers=3), [10] * 6, 50)


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("0-1=cpu:1", [(0, 1, "cpu:1")]),
        ("*=host", [(3, 5, "host")]),
        ("4=host", [(4, 4, "host")]),
        ("3-5=cpu:1", []),
        ("0=cpu:1,4=host,*=cpu:1", [(4, 4, "host"), (0, 2, "cpu:1")]),
        ("0=host,2=host,*=cpu:1", [(1, 1, "cpu:1")]),
    ],
)
def test_a_map_moves_what_is_elsewhere_and_what_comes_home_first(text, moves):
    assert [b.device for b in START.blocks] == ["host"] * 3 + ["cpu:1"] * 3
    assert moves_for(START, text) == moves


def test_a_map_for_blocks_that_are_not_there_is_refused_as_it_is_at_a_load():
    with pytest.raises(
        UsageError, match=r"placement: 4-6=host names block 6; the model has .* 0-5"
    ):
        moves_for(START, "0=cpu:1,4-6=host")


@pytest.mark.parametrize("text", ["head=cpu:1", "0=cpu:1!", "0=cpu:1~"])
def test_what_takes_another_load_is_refused(text):
    with pytest.raises(ApiError, match="cannot be done while the model runs; load it again"):
        moves_for(START, text)
