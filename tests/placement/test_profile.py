"""YAML profiles: what they say, and every mistake with its file, line and column."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitllm.errors import UsageError
from jitllm.placement.devices import DeviceRequest
from jitllm.placement.profile import load_profile, parse_profile, profile_hash, to_yaml
from jitllm.placement.rules import Profile, Rule, override, parse_placement

_WHOLE = """\
# Everything at once.
devices:
  host: maxmem
  cpu:1: 3M
  CUDA:0: auto
rules:
  - blocks: 0-9,12
    place: cpu:1
    pin: true
  - blocks: "*"
    place: cuda:0
    stream: true
  - {head: true, place: cuda:0}
  - {embed: true, place: host}
  - {experts: 3, place: cpu}
kv: {dtype: f32, place: host}
strict: true
relocate: true
gpu_layers: 4
"""


def test_a_profile_says_everything_there_is_to_say():
    assert parse_profile(_WHOLE, "x.yaml") == Profile(
        devices=(
            DeviceRequest("cpu", 0),
            DeviceRequest("cpu", 1, 3 * 2**20),
            DeviceRequest("cuda", 0),
        ),
        rules=(
            Rule("blocks", ((0, 9), (12, 12)), "cpu:1", pin=True),
            Rule("blocks", None, "cuda:0", stream=True),
            Rule("head", None, "cuda:0"),
            Rule("embed", None, "host"),
            Rule("experts", ((3, 3),), "host"),
        ),
        kv_dtype="f32",
        kv_place="host",
        strict=True,
        relocate=True,
        gpu_layers=4,
    )


def test_a_profile_and_the_map_become_the_same_rules():
    profile = parse_profile('rules: [{blocks: 0-3, place: "cpu:1", pin: true}]')
    assert profile.rules == parse_placement("0-3=cpu:1!")


def test_a_rule_knows_the_line_it_is_on():
    rules = parse_profile(_WHOLE, "x.yaml").rules
    assert [rule.source for rule in rules[:3]] == ["x.yaml:7:5", "x.yaml:10:5", "x.yaml:13:5"]


def test_a_profile_of_comments_says_nothing():
    assert parse_profile("# nothing yet\n") == Profile()


_KEYS = "devices, rules, kv, strict, relocate, gpu_layers"
_RULE_KEYS = "place, pin, stream, blocks, head, embed, experts"
_REFUSED = [
    ("rule: []", f"1:1: unknown key 'rule' (did you mean rules?); the keys here are {_KEYS}"),
    ("x: 1", f"1:1: unknown key 'x'; the keys here are {_KEYS}"),
    ("strict: true\nstrict: true", "2:1: the key 'strict' is here twice; keep one"),
    ("- strict", "1:1: expected KEY: VALUE lines, but this is a list"),
    ("rules: {blocks: 1}", "1:8: expected a list of rules (- ...), but this is a mapping"),
    ("rules:\n- 7", "2:3: expected KEY: VALUE lines, but this is '7'"),
    ("words " * 50, f"1:1: expected KEY: VALUE lines, but this is '{'words ' * 8}words...'"),
    (
        "rules:\n- blocks: 0-3\n  plcae: host",
        f"3:3: unknown key 'plcae' (did you mean place?); the keys here are {_RULE_KEYS}",
    ),
    (
        "rules:\n- {place: host}",
        "2:3: a rule has one of blocks, head, embed, experts, but this one has 0",
    ),
    (
        "rules:\n- {blocks: 1, head: true, place: host}",
        "2:3: a rule has one of blocks, head, embed, experts, but this one has 2",
    ),
    ("rules:\n- blocks: 1", "2:3: this rule has no place; write place: host, or a device"),
    (
        "rules:\n- {head: false, place: host}",
        "2:3: head: false matches nothing; write head: true, or leave the rule out",
    ),
    (
        "rules:\n- {blocks: 9-1, place: host}",
        "2:12: the range '9-1' ends before it begins; write 1-9",
    ),
    (
        "rules:\n- {blocks: 1.5, place: host}",
        "2:12: '1.5' is not a range of blocks; write N, A-B or *",
    ),
    ("rules:\n- {blocks: [1], place: host}", "2:12: expected one word, but this is a list"),
    (
        "rules:\n- {blocks: '0-3,2', place: host}",
        "2:3: names block 2 twice; name each block once",
    ),
    (
        "rules:\n- {blocks: 0-3, place: 'cpu:1'}\n- {blocks: 2-4, place: host}",
        "3:3: 2-4=host names block 2, which 0-3=cpu:1 names already; name each block once",
    ),
    (
        "rules:\n- {head: true, place: host}\n- {head: true, place: 'cpu:1'}",
        "3:3: places the head twice; place it once",
    ),
    (
        "rules:\n- {blocks: 0, place: host, stream: true}",
        "2:3: host~ means nothing, the host reads its pages itself; write host, or DEVICE~",
    ),
    (
        "rules:\n- {blocks: 0, place: 'gpu:'}",
        "2:22: 'gpu:' is not a place; write host, or a device such as cpu:1 or cuda:0",
    ),
    ("rules:\n- {blocks: 0, place: host, pin: 1}", "2:33: '1' is not true or false"),
    ("rules:\n- {blocks: 0, place: host, pin: }", "2:32: expected one word, but this is nothing"),
    ("kv: {dtype: q8}", "1:13: 'q8' is not f16 or f32"),
    ("kv: {place: disk}", "1:13: 'disk' is not block or host"),
    ("kv: {q: f16}", "1:6: unknown key 'q'; the keys here are dtype, place"),
    ("gpu_layers: -1", "1:13: '-1' is not a number of blocks"),
    ("devices: [cpu]", "1:10: expected KEY: VALUE lines, but this is a list"),
    ("devices: {host: 3G}", "1:17: '3G' is not maxmem"),
    ("devices: {cuda: maxmem}", "1:17: maxmem is the host's budget; write a size, or auto"),
    ("devices:\n  cpu:1: 1M\n  cpu:01: 1M", "3:3: cpu:01 is named twice; name each device once"),
    ("devices:\n  cuda:x: 1M", "2:3: 'cuda:x=1M': 'x' is not a device number; write cuda:0"),
    (
        "devices:\n  cuda: lots",
        "2:3: 'cuda=lots': size 'lots' is not a number of bytes; write e.g. 400K, 1.5G or 2GiB",
    ),
    (
        "devices:\n  'cpu:1,cpu:2': 1M",
        "2:3: 'cpu:1,cpu:2' is more than one device; write a line for each",
    ),
    (
        "rules:\n- blocks: *\n",
        "2:12: this is not YAML: expected alphabetic or numeric character, but found '\\n'; "
        'write "*" with quotes',
    ),
    ("rules:\n\t- x", "2:1: this is not YAML: found character '\\t' that cannot start any token"),
    ("a: b: c", "1:5: this is not YAML: mapping values are not allowed here"),
    ("--- a\n--- b", "2:1: this is not YAML: but found another document"),
]


@pytest.mark.parametrize(("text", "sentence"), _REFUSED)
def test_a_mistake_is_refused_at_its_line_and_column(text, sentence):
    with pytest.raises(UsageError) as refusal:
        parse_profile(text, "x.yaml")
    assert str(refusal.value) == f"x.yaml:{sentence}"


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    for name, why in (("none.yaml", "cannot be read: No such file"), ("binary.yaml", "UTF-8")):
        with pytest.raises(UsageError, match=f"profile .*{name} .*{why}"):
            load_profile(tmp_path / name)


def test_text_that_yaml_cannot_hold_is_refused_without_a_traceback():
    for text in ("a: \x00", "[" * 5000):
        with pytest.raises(UsageError, match="this is not YAML"):
            parse_profile(text)


_PLACES = st.sampled_from(["host", "cpu:1", "cuda:0", "gpu"])


@st.composite
def _profiles(draw):
    ends = sorted(draw(st.sets(st.integers(0, 99), max_size=8)))
    spans = list(zip(ends[::2], ends[1::2], strict=False))
    rules = [Rule("blocks", (span,), draw(_PLACES), draw(st.booleans())) for span in spans]
    rules += draw(st.sampled_from([[], [Rule("blocks", None, "cpu:1", stream=True)]]))
    rules += draw(st.sampled_from([[], [Rule("head", None, "gpu", pin=True)]]))
    sizes = draw(st.lists(st.none() | st.integers(0, 2**50), max_size=3))
    return Profile(
        devices=tuple(DeviceRequest("cuda", i, size) for i, size in enumerate(sizes)),
        rules=tuple(rules),
        kv_dtype=draw(st.sampled_from(["f16", "f32"])),
        kv_place=draw(st.sampled_from(["block", "host"])),
        strict=draw(st.booleans()),
        relocate=draw(st.booleans()),
        gpu_layers=draw(st.none() | st.integers(0, 99)),
    )


@given(_profiles())
def test_the_effective_profile_reads_back_as_itself(profile):
    assert parse_profile(to_yaml(profile)) == profile


def test_the_whole_profile_reads_back_as_itself():
    profile = parse_profile(_WHOLE)
    assert parse_profile(to_yaml(profile)) == profile


def test_profiles_that_say_the_same_have_the_same_hash():
    said = parse_profile("rules: [{blocks: 0-1, place: cpu:1}]\ngpu_layers: 2", "one.yaml")
    again = parse_profile("# a note\ngpu_layers: 2\nrules:\n- {place: cpu:1, blocks: '0-1'}", "two")
    assert profile_hash(said) == profile_hash(again)
    assert profile_hash(said) != profile_hash(override(said, gpu_layers=3))
