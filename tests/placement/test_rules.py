"""The `-placement` map: what it says, and every way to say it wrong."""

import pytest

from jitllm.errors import UsageError
from jitllm.placement.rules import Profile, Rule, override, parse_placement


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3=host", [Rule("blocks", ((3, 3),), "host")]),
        ("0-9=cpu:1!", [Rule("blocks", ((0, 9),), "cpu:1", pin=True)]),
        ("*=CUDA:0~", [Rule("blocks", None, "cuda:0", stream=True)]),
        ("0-1=gpu~!, head=cpu:0", [
            Rule("blocks", ((0, 1),), "gpu", pin=True, stream=True),
            Rule("head", None, "host"),
        ]),
        ("0=cpu:1,*=cpu", [Rule("blocks", ((0, 0),), "cpu:1"), Rule("blocks", None, "host")]),
    ],
)  # fmt: skip
def test_an_entry_is_a_selection_and_a_place_with_marks(text, expected):
    assert parse_placement(text) == tuple(expected)


@pytest.mark.parametrize("text", ["0-9,12=cpu:1", "0-9", "", "0=cpu:1,"])
def test_an_entry_without_a_place_is_refused(text):
    with pytest.raises(UsageError, match="is not SEL=WHERE; write "):
        parse_placement(text)


_REFUSED = [
    ("a=host", "-placement 'a=host': 'a' is not a range of blocks; write N, A-B or *"),
    ("1-=host", "-placement '1-=host': '1-' is not a range of blocks; write N, A-B or *"),
    ("9-3=host", "-placement '9-3=host': the range '9-3' ends before it begins; write 3-9"),
    ("0=", "-placement '0=': '' is not a place; write host, or a device such as cpu:1 or cuda:0"),
    (
        "0=gpu:x",
        "-placement '0=gpu:x': 'gpu:x' is not a place; write host, or a device such as cpu:1 or "
        "cuda:0",
    ),
    ("0=cpu:1!!", "-placement '0=cpu:1!!': repeats a mark in '!!'; write ! and ~ once each"),
    (
        "*=host~",
        "-placement '*=host~': host~ means nothing, the host reads its pages itself; write host, "
        "or DEVICE~",
    ),
    (
        "head=cpu:1~",
        "-placement 'head=cpu:1~': only blocks are streamed; place head on the device or on the "
        "host",
    ),
    (
        "embed=cpu:1",
        "-placement 'embed=cpu:1': only a profile places embed; SEL is N, A-B, head or *",
    ),
    (
        "0-4=cpu:1,3-9=host",
        "-placement: 3-9=host names block 3, which 0-4=cpu:1 names already; name each block once",
    ),
    ("head=cpu:1,head=host", "-placement: places the head twice; place it once"),
]


@pytest.mark.parametrize(("text", "sentence"), _REFUSED)
def test_what_is_not_in_the_map_is_refused_by_name(text, sentence):
    with pytest.raises(UsageError) as refusal:
        parse_placement(text)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("text", ["0-9=cpu:1!", "3=host", "*=cuda:0!~", "head=cpu:2"])
def test_a_rule_prints_as_it_is_written(text):
    (rule,) = parse_placement(text)
    assert str(rule) == text


def test_flags_replace_what_a_profile_says_and_leave_the_rest():
    profile = Profile(rules=parse_placement("0=cpu:1"), strict=True, gpu_layers=3)
    changed = override(profile, placement="*=cpu:2~", devices="cpu:2=1M", relocate=True)
    assert changed.rules == parse_placement("*=cpu:2~")
    assert [str(request) for request in changed.devices] == ["cpu:2"]
    assert (changed.strict, changed.relocate, changed.gpu_layers) == (True, True, 3)
    assert override(profile, gpu_layers=None) == profile
    assert override(profile, gpu_layers=0, strict=False) == Profile(
        rules=profile.rules, gpu_layers=0
    )
