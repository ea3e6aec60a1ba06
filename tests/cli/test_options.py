"""Flags about memory and devices become what the engine takes; flags win over the profile."""

import pytest

from jitllm.cli.options import EngineOptions
from jitllm.errors import UsageError
from jitllm.placement.devices import DeviceRequest

PROFILE = """
devices: {cpu:1: 3M}
rules: [{blocks: 0-1, place: cpu:1}]
kv: {dtype: f32}
gpu_layers: 2
"""


@pytest.fixture
def profile(tmp_path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(PROFILE)
    return str(path)


def test_without_flags_and_profile_nothing_is_asked():
    nothing = EngineOptions().effective_profile()
    assert (nothing.devices, nothing.rules, nothing.strict, nothing.relocate) == (
        (),
        (),
        False,
        False,
    )
    assert (nothing.kv_dtype, nothing.gpu_layers) == ("f16", None)


def test_vram_is_the_budget_of_devices_that_have_none(profile):
    given = EngineOptions(devices="cpu:1=1M,cpu:2,cpu", vram=2 << 20).effective_profile()
    assert [request.budget_bytes for request in given.devices] == [1 << 20, 2 << 20, None]
    assert EngineOptions(vram=2 << 20).effective_profile().devices == (
        DeviceRequest("auto", None, 2 << 20),
    )
    assert EngineOptions(profile=profile, vram=1).effective_profile().devices == (
        DeviceRequest("cpu", 1, 3 << 20),
    )


def test_a_profile_is_read_from_its_file(profile):
    read = EngineOptions(profile=profile).effective_profile()
    assert [str(rule) for rule in read.rules] == ["0-1=cpu:1"]
    assert read.devices == (DeviceRequest("cpu", 1, 3 << 20),)
    assert (read.kv_dtype, read.gpu_layers) == ("f32", 2)


def test_flags_win_over_the_profile(profile):
    flags = EngineOptions(
        profile=profile,
        devices="cpu:2=1M",
        placement="head=cpu:2!",
        kv="f16",
        gpu_layers=0,
        placement_strict=True,
        relocate=True,
    ).effective_profile()
    assert [str(rule) for rule in flags.rules] == ["head=cpu:2!"]
    assert flags.devices == (DeviceRequest("cpu", 2, 1 << 20),)
    assert (flags.kv_dtype, flags.gpu_layers, flags.strict, flags.relocate) == (
        "f16",
        0,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_seq": 0}, "-max-seq has to be a whole number of 1 or more, but is 0"),
        ({"threads": -1}, "-threads has to be a whole number of 1 or more, but is -1"),
        ({"gpu_layers": -3}, "-gpu-layers has to be a whole number of 0 or more, but is -3"),
    ],
)
def test_a_count_that_cannot_be_is_refused(settings, sentence):
    with pytest.raises(UsageError) as refusal:
        EngineOptions(**settings)
    assert refusal.value.typed == sentence


def test_a_mistake_in_a_profile_is_a_usage_error_with_its_place(cli, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("devces: {}\n")
    outcome = cli("run", "--profile", str(path), "m.jlm", "x")
    assert outcome.code == 2
    assert outcome.err.startswith(f"jitllm: {path}:1:1: ")
    assert outcome.err.count("\n") == 1
