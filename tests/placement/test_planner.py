"""The planner: literal sizes and budgets to literal plans, and what holds for all of them."""

import pytest

from jitllm.errors import BudgetError, DeviceError, UsageError
from jitllm.placement.plan import AUTOMATIC, NO_RULE, PAGED, RESIDENT, ROWS, STREAMED, Partition
from jitllm.placement.planner import plan
from jitllm.placement.profile import parse_profile
from jitllm.placement.rules import Profile, parse_placement
from tests.placement.toys import machine, pages

# Four blocks of 100 bytes with 10 bytes of KV each, a head of two slabs of 60 and an embedding.
_MODEL = pages(blocks=[100] * 4, head=[60, 60], embed=150, dense=20)
_KV = [10] * 4


def _plan(placement=None, devices=(), model=_MODEL, kv=_KV, workspace=0, **settings):
    rules = parse_placement(placement) if placement else ()
    budgets = {"host": None} | dict(devices)
    return plan(model, machine(**budgets), Profile(rules=rules, **settings), kv, workspace)


def _where(made):
    """What each block is on and how, one word a block; the head's after a bar."""
    words = {RESIDENT: "", STREAMED: "~", PAGED: "?"}
    cells = [part.device + words[part.mode] for part in (*made.blocks, made.head)]
    return " ".join(cells[:-1]) + " | " + cells[-1]


# What no rule names


def test_without_devices_everything_is_with_the_host():
    made = _plan()
    assert _where(made) == "host host host host | host"
    assert made.embed.mode == ROWS
    assert {part.rule for part in made.assignments} == {NO_RULE}
    # Blocks, head and the dense page; the embedding is read by rows.
    assert made.use("host").n_bytes == 400 + 120 + 20
    assert (made.use("host").kv_bytes, made.n_seams) == (40, 0)


def test_a_host_whose_budget_does_not_hold_its_pages_pages_them_within_it():
    made = _plan(devices={"host": 300})
    assert _where(made) == "host? host? host? host? | host?"
    assert (made.use("host").n_bytes, made.use("host").missing_bytes) == (300, 240)
    # With one block less on the host its pages fit.
    assert _where(_plan("1=cpu:1", {"host": 440, "cpu_1": 110})) == (
        "host cpu:1 host host | host"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ({"cpu_1": 1000}, "cpu:1 cpu:1 cpu:1 cpu:1 | cpu:1"),
        # 4 x 110 and the head's 120 with a copy of the norm, 20: one byte less and it stays home.
        ({"cpu_1": 580}, "cpu:1 cpu:1 cpu:1 cpu:1 | cpu:1"),
        ({"cpu_1": 579}, "cpu:1 cpu:1 cpu:1 cpu:1 | host"),
        # The run ends with the last block, and what is left over is with the host.
        ({"cpu_1": 439}, "host cpu:1 cpu:1 cpu:1 | host"),
        ({"cpu_1": 109}, "host host host host | host"),
        # Devices are filled in order; the head goes where the last block is.
        ({"cpu_1": 230, "cpu_2": 900}, "cpu:1 cpu:1 cpu:2 cpu:2 | cpu:2"),
        ({"cpu_1": 120, "cpu_2": 230}, "host cpu:1 cpu:2 cpu:2 | host"),
        # A device too small for any block is passed over.
        ({"cpu_1": 50, "cpu_2": 220}, "host host cpu:2 cpu:2 | host"),
        ({"cpu_1": 0}, "host host host host | host"),
    ],
)
def test_devices_are_filled_in_order_with_the_longest_run_up_to_the_last_block(budgets, expected):
    assert _where(_plan(devices=budgets)) == expected


def test_what_the_fill_leaves_with_the_host_says_what_the_last_device_lacks():
    made = _plan(devices={"cpu_1": 120, "cpu_2": 250})
    # With all four, cpu:1 has block 0 and cpu:2 needs 330 for the others; it has 250.
    assert [str(d) for d in made.blocks[0].declines] == ["cpu:2 lacks 80 B"]
    assert made.blocks[0].rule == AUTOMATIC
    enough = _plan(devices={"cpu_1": 120, "cpu_2": 330})
    assert _where(enough) == "cpu:1 cpu:2 cpu:2 cpu:2 | host"
    assert [str(d) for d in enough.head.declines] == ["cpu:2 lacks 140 B"]


@pytest.mark.parametrize(
    ("n_layers", "expected", "asked"),
    [
        (0, "host host host host | host", 0),
        (1, "host host host cpu:1 | host", 1),
        (4, "cpu:1 cpu:1 cpu:1 cpu:1 | host", 4),
        (5, "cpu:1 cpu:1 cpu:1 cpu:1 | cpu:1", 4),
        (99, "cpu:1 cpu:1 cpu:1 cpu:1 | cpu:1", 4),
    ],
)
def test_gpu_layers_takes_the_last_blocks_and_beyond_their_number_the_head(
    n_layers, expected, asked
):
    made = _plan(devices={"cpu_1": 1000}, gpu_layers=n_layers)
    assert _where(made) == expected
    assert (made.n_asked_blocks, made.n_device_blocks) == (asked, asked)
    assert {block.rule for block in made.blocks} == {f"-gpu-layers {n_layers}"}


def test_gpu_layers_that_do_not_fit_are_counted_as_asked_for():
    made = _plan(devices={"cpu_1": 240}, gpu_layers=3)
    assert _where(made) == "host host cpu:1 cpu:1 | host"
    assert (made.n_asked_blocks, made.n_device_blocks) == (3, 2)
    assert [str(d) for d in made.blocks[1].declines] == ["cpu:1 lacks 90 B"]
    assert made.blocks[0].declines == ()


def test_gpu_layers_leave_alone_what_rules_name():
    made = _plan("3=host", {"cpu_1": 1000}, gpu_layers=2)
    assert _where(made) == "host cpu:1 cpu:1 host | host"


def test_gpu_layers_beside_rules_that_name_every_block_are_refused():
    sentence = "-gpu-layers 3 finds no block to place, the rules name them all; leave out one"
    with pytest.raises(UsageError, match=sentence):
        _plan("*=cpu:1", {"cpu_1": 900}, gpu_layers=3)
    assert _plan("*=cpu:1", {"cpu_1": 900}, gpu_layers=5).head.device == "cpu:1"
    assert _plan("*=cpu:1", {"cpu_1": 900}, gpu_layers=0).n_device_blocks == 4


def test_gpu_layers_need_a_device():
    with pytest.raises(UsageError) as refusal:
        _plan(gpu_layers=2)
    assert str(refusal.value) == (
        "-gpu-layers 2 needs a device besides the host; name it with -devices"
    )
    assert _where(_plan(gpu_layers=0)) == "host host host host | host"


# Rules


def test_the_first_rule_that_matches_places_a_block():
    made = _plan("1=cpu:2,*=cpu:1", {"cpu_1": 1000, "cpu_2": 1000})
    assert _where(made) == "cpu:1 cpu:2 cpu:1 cpu:1 | host"
    assert made.partitions == (
        Partition(0, 0, "cpu:1", RESIDENT),
        Partition(1, 1, "cpu:2", RESIDENT),
        Partition(2, 3, "cpu:1", RESIDENT),
    )
    assert made.blocks[1].rule == "1=cpu:2 (-placement)"
    # host to cpu:1 to cpu:2 to cpu:1 and back to the host for the head.
    assert made.n_seams == 4


def test_what_no_rule_names_stays_with_the_host_once_a_rule_names_blocks():
    assert _where(_plan("1-2=cpu:1", {"cpu_1": 1000})) == "host cpu:1 cpu:1 host | host"
    # A rule for the head alone leaves the blocks to the fill.
    assert _where(_plan("head=host", {"cpu_1": 230})) == "host host cpu:1 cpu:1 | host"


def test_rules_have_the_room_in_their_order():
    budgets = {"cpu_1": 270}
    assert _where(_plan("head=cpu:1,*=cpu:1", budgets)) == "cpu:1 host host host | cpu:1"
    made = _plan("*=cpu:1,head=cpu:1", budgets)
    assert _where(made) == "cpu:1 cpu:1 host host | host"
    assert [str(d) for part in made.assignments for d in part.declines] == [
        "cpu:1 lacks 60 B",
        "cpu:1 lacks 170 B",
        "cpu:1 lacks 310 B",
    ]
    assert _where(_plan("*=cpu:1,head=cpu:1", {"cpu_1": 270 + 310})) == (
        "cpu:1 cpu:1 cpu:1 cpu:1 | cpu:1"
    )  # fmt: skip


def test_a_large_block_that_does_not_fit_does_not_keep_a_small_one_out():
    model = pages(blocks=[100, 300, 100], head=[10])
    made = _plan("*=cpu:1", {"cpu_1": 250}, model=model, kv=[0, 0, 0])
    assert _where(made) == "cpu:1 host cpu:1 | host"


def test_a_streamed_device_has_one_slot_and_a_second_where_there_is_room():
    for budget, n_slots in ((109, 0), (140, 1), (239, 1), (240, 2), (1000, 2)):
        made = _plan("*=cpu:1~", {"cpu_1": budget})
        use = made.use("cpu:1")
        assert (use.n_slots, use.weights_bytes) == (n_slots, 0), budget
        if n_slots:
            assert _where(made) == "cpu:1~ cpu:1~ cpu:1~ cpu:1~ | host"
            assert use.n_bytes == 40 + 100 * n_slots
    # The host still visits what it sends through the slots.
    assert made.use("host").weights_bytes == 540
    assert [part.name for part in made.host_visits] == [
        "block 0", "block 1", "block 2", "block 3", "head",
    ]  # fmt: skip


def test_a_slot_is_as_large_as_the_largest_page_that_passes_through():
    model = pages(blocks=[100, 300, 200], head=[10])
    made = _plan("0=cpu:1,*=cpu:1~", {"cpu_1": 700}, model=model, kv=[0, 0, 0])
    assert made.use("cpu:1").n_bytes == 100 + 2 * 300
    assert made.partitions == (
        Partition(0, 0, "cpu:1", RESIDENT),
        Partition(1, 2, "cpu:1", STREAMED),
    )


def test_kv_goes_with_its_block_or_stays_with_the_host():
    made = _plan("0-1=cpu:1", {"cpu_1": 220})
    assert (made.use("cpu:1").kv_bytes, made.use("host").kv_bytes) == (20, 20)
    made = _plan("0-1=cpu:1", {"cpu_1": 210}, kv_place="host")
    assert _where(made) == "cpu:1 cpu:1 host host | host"
    assert (made.use("cpu:1").kv_bytes, made.use("host").kv_bytes) == (0, 40)


def test_activations_count_on_each_device_that_executes_something():
    made = _plan("0=cpu:1", {"cpu_1": 117, "cpu_2": 50}, workspace=7)
    assert [use.workspace_bytes for use in made.uses] == [0, 7, 0]
    assert _where(_plan("0=cpu:1", {"cpu_1": 116}, workspace=7)).startswith("host")


def test_the_embedding_is_placed_by_a_profile():
    profile = parse_profile("rules: [{embed: true, place: 'cpu:1', pin: true}]")
    made = plan(_MODEL, machine(cpu_1=150), profile, _KV)
    assert (made.embed.device, made.embed.mode, made.embed.pinned) == ("cpu:1", RESIDENT, True)
    made = plan(_MODEL, machine(cpu_1=149), profile, _KV)
    assert (made.embed.device, made.embed.mode, made.embed.pinned) == ("host", ROWS, False)
    assert [str(d) for d in made.embed.declines] == ["cpu:1 lacks 1 B"]


def test_a_place_may_be_a_devices_other_name():
    devices = machine(cuda_0=1000)
    devices[1] = type(devices[1])("cuda:0", names=("cuda", "gpu", "gpu:0"), budget_bytes=1000)
    made = plan(_MODEL, devices, Profile(rules=parse_placement("0=gpu,1=gpu:0")), _KV)
    assert [block.device for block in made.blocks[:2]] == ["cuda:0", "cuda:0"]


@pytest.mark.parametrize(
    ("placement", "kind", "sentence"),
    [
        ("0-4=host", UsageError, "-placement: 0-4=host names block 4; the model has blocks 0-3"),
        (
            "0-3=host,*=cpu:1",
            UsageError,
            "-placement: *=cpu:1 matches nothing: earlier rules have every block",
        ),
        (
            "0=cuda:0",
            DeviceError,
            "-placement: cuda:0 is not among the devices that are open (host, cpu:1); "
            "add it to -devices",
        ),
    ],
)
def test_a_rule_without_effect_is_refused(placement, kind, sentence):
    with pytest.raises(kind) as refusal:
        _plan(placement, {"cpu_1": 1000})
    assert str(refusal.value) == sentence


def test_a_rule_of_a_profile_is_refused_with_its_line():
    tied = pages(blocks=[100], head=[100])
    for key, why in (
        ("embed: true", "embed=host matches nothing: the embedding is the output head here; "
                        "place the head"),
        ("experts: 0", "experts of 0=host matches nothing: the model has no experts"),
    ):  # fmt: skip
        profile = parse_profile(f"rules:\n- {{{key}, place: host}}", "x.yaml")
        with pytest.raises(UsageError) as refusal:
            plan(tied, machine(), profile, [0])
        assert str(refusal.value) == f"x.yaml:2:3: {why}"


# Strict


def test_strict_placement_refuses_a_decline_with_the_missing_bytes():
    with pytest.raises(BudgetError) as refusal:
        _plan("*=cpu:1", {"cpu_1": 250}, strict=True)
    assert refusal.value.smallest_bytes == 440
    assert str(refusal.value) == (
        "block 3 has no room where *=cpu:1 (-placement) wants it: cpu:1 lacks 190 B; give cpu:1 "
        "440 B, or do without strict placement"
    )
    assert _plan("*=cpu:1", {"cpu_1": 440}, strict=True).n_device_blocks == 4


def test_strict_placement_refuses_gpu_layers_that_do_not_fit_but_not_a_fill_nobody_asked_for():
    with pytest.raises(BudgetError, match="-gpu-layers 3 wants it: cpu:1 lacks 90 B"):
        _plan(devices={"cpu_1": 240}, gpu_layers=3, strict=True)
    assert _plan(devices={"cpu_1": 240}, strict=True).n_device_blocks == 2


# What it says of itself


def test_a_plan_explains_every_part_in_runs():
    made = _plan("3=cpu:2!,*=cpu:1", {"host": 200, "cpu_1": 230, "cpu_2": 110}, kv_place="host")
    assert made.render().splitlines() == [
        "part        device  mode              bytes  KV            rule                   "
        "declined",
        "blocks 0-1  cpu:1   resident          200 B  20 B on host  *=cpu:1 (-placement)",
        "block 2     host    paged             100 B  10 B          *=cpu:1 (-placement)   "
        "cpu:1 lacks 80 B",
        "block 3     cpu:2   resident, pinned  100 B  10 B on host  3=cpu:2! (-placement)",
        "head        host    paged             120 B                no rule",
        "embed       host    by rows           150 B                no rule",
        "",
        "device  weights  KV    in memory  budget",
        "host    240 B    40 B  200 B      200 B",
        "cpu:1   200 B    10 B  210 B      230 B",
        "cpu:2   100 B    10 B  110 B      110 B",
    ]
