"""What holds for every plan, whatever the sizes, budgets and rules; and for every change to one."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jitllm.errors import BudgetError, UsageError
from jitllm.placement.changes import halfway, move, rebudget, relocate, resize
from jitllm.placement.devices import HOST
from jitllm.placement.plan import PAGED, RESIDENT, ROWS, STREAMED
from jitllm.placement.planner import plan
from jitllm.placement.rules import Profile, Rule
from tests.placement.toys import machine, pages

_SIZES = st.integers(1, 60)
_DEVICES = ("cpu:1", "cuda:0", "cuda:1")


@st.composite
def _models(draw):
    blocks = draw(st.lists(_SIZES, min_size=1, max_size=9))
    kv = draw(st.lists(st.integers(0, 20), min_size=len(blocks), max_size=len(blocks)))
    heads = draw(st.lists(_SIZES, min_size=1, max_size=3))
    return pages(blocks, heads, draw(st.integers(0, 90)), draw(st.integers(0, 9))), kv


@st.composite
def _profiles(draw, n_blocks):
    places, marks = st.sampled_from((HOST, *_DEVICES)), st.booleans()
    rules, first = [], 0
    while first < n_blocks and draw(st.integers(0, 3)):
        last = draw(st.integers(first, n_blocks - 1))
        place = draw(places)
        stream = place != HOST and draw(marks)
        rules.append(Rule("blocks", ((first, last),), place, draw(marks), stream, f"rule {first}"))
        first = last + 1
    unnamed = first < n_blocks
    if unnamed and draw(marks):
        rules.append(Rule("blocks", None, draw(places), source="rest"))
        unnamed = False
    if draw(marks):
        rules.insert(draw(st.integers(0, len(rules))), Rule("head", None, draw(places)))
    return Profile(
        rules=tuple(rules),
        kv_place=draw(st.sampled_from(["block", "host"])),
        gpu_layers=draw(st.none() | st.integers(0, n_blocks + 2)) if unnamed else None,
    )


@st.composite
def _plans(draw):
    model, kv = draw(_models())
    profile = draw(_profiles(len(kv)))
    budgets = {id.replace(":", "_"): draw(st.integers(0, 300)) for id in _DEVICES}
    devices = machine(draw(st.none() | st.integers(0, 500)), **budgets)
    return plan(model, devices, profile, kv, draw(st.sampled_from([0, 7]))), model, profile, kv


def _check_bytes(made):
    """Adds everything up again, by hand, and holds it against the budgets."""
    for use in made.uses:
        parts = [part for part in made.assignments if part.device == use.device]
        kv_bytes = sum(part.kv_bytes for part in made.assignments if part.kv_device == use.device)
        assert use.kv_bytes == kv_bytes
        if use.device == HOST:
            assert use.budget_bytes is None or use.n_bytes <= use.budget_bytes
            continue
        resident = sum(part.n_bytes for part in parts if part.mode == RESIDENT)
        norm = made.tally.dense_bytes * any(part.kind == "head" for part in parts)
        streamed = [part.n_bytes for part in parts if part.mode == STREAMED]
        assert use.weights_bytes == resident + norm
        assert use.slot_bytes == max(streamed, default=0)
        assert use.n_slots in ((1, 2) if streamed else (0,))
        work = made.tally.workspace_bytes if parts else 0
        away = [part.kv_bytes for part in parts if part.kv_device != part.device]
        assert use.visiting_kv_bytes == max(away, default=0)
        total = resident + norm + kv_bytes + use.n_slots * use.slot_bytes + work
        assert use.n_bytes == total + max(away, default=0) <= use.budget_bytes


def _check_modes(made):
    """The host pages what its budget does not hold; a device never pages."""
    visited = made.tally.dense_bytes + sum(part.n_bytes for part in made.host_visits)
    budget = made.use(HOST).budget_bytes
    paged = budget is not None and visited > budget
    for part in made.assignments:
        if part.device != HOST:
            assert part.mode in (RESIDENT, STREAMED)
        elif part.kind == "embed":
            assert part.mode == ROWS
        else:
            assert part.mode == (PAGED if paged else RESIDENT)


@given(_plans())
def test_no_device_holds_more_than_its_budget_and_every_byte_is_counted(case):
    made, *_ = case
    _check_bytes(made)
    _check_modes(made)


@given(_plans())
def test_every_part_is_in_one_place_with_the_rule_that_put_it_there(case):
    made, model, profile, kv = case
    names = [part.name for part in made.assignments]
    assert (
        names == [f"block {i}" for i in range(len(kv))] + ["head", "embed"][: len(names) - len(kv)]
    )
    assert sum(part.n_bytes for part in made.assignments) + made.tally.dense_bytes == sum(
        page.n_bytes for page in model
    )
    runs = [(p.first, p.last) for p in made.partitions]
    assert [i for first, last in runs for i in range(first, last + 1)] == list(range(len(kv)))
    for block in made.blocks:
        rule = next(
            (r for r in profile.rules if r.kind == "blocks" and r.covers(block.index)), None
        )
        if rule is None:
            assert block.rule in ("automatic", "no rule", f"-gpu-layers {profile.gpu_layers}")
            continue
        assert block.rule == f"{rule} ({rule.source})"
        assert (block.device == rule.place) != bool(block.declines)
        assert block.pinned == (rule.pin and not block.declines)


@given(_plans())
def test_a_part_that_was_declined_would_be_there_with_the_bytes_it_lacked(case):
    made, model, profile, kv = case
    for part in made.assignments:
        for decline in part.declines:
            assert part.device == HOST and decline.missing_bytes > 0
            assume(part.kind == "block")
            raised = [
                replace(d, budget_bytes=d.budget_bytes + decline.missing_bytes)
                if d.id == decline.device
                else d
                for d in _devices_of(made)
            ]
            again = plan(model, raised, profile, kv, made.tally.workspace_bytes)
            assert again.blocks[part.index].device != HOST


def _devices_of(made):
    budgets = {use.device.replace(":", "_"): use.budget_bytes for use in made.uses}
    return machine(**budgets)


@given(_plans())
def test_planning_is_strict_exactly_where_nothing_asked_for_is_declined(case):
    made, model, profile, kv = case
    declined = any(d.asked for part in made.assignments for d in part.declines)
    try:
        strict = replace(profile, strict=True)
        again = plan(model, _devices_of(made), strict, kv, made.tally.workspace_bytes)
    except BudgetError as error:
        assert declined and error.smallest_bytes > 0
    else:
        assert again == made and not declined


@given(_models(), st.integers(0, 400), st.integers(0, 400), st.integers(1, 100))
def test_a_larger_device_never_gets_fewer_blocks(model_kv, first, second, more):
    model, kv = model_kv

    def n_blocks(budget):
        return plan(model, machine(cpu_1=first, cpu_2=budget), Profile(), kv).n_device_blocks

    assert n_blocks(second) <= n_blocks(second + more)


@given(_plans(), st.data())
def test_a_move_keeps_every_budget_or_changes_nothing(case, data):
    made, _, profile, kv = case
    first = data.draw(st.integers(0, len(kv) - 1))
    last = data.draw(st.integers(first, len(kv) - 1))
    to = data.draw(st.sampled_from((HOST, *_DEVICES)))
    try:
        moved = move(made, first, last, to)
    except BudgetError as error:
        assert to != HOST and error.smallest_bytes > made.use(to).budget_bytes
        return
    except UsageError:
        assert any(block.pinned for block in made.blocks[first : last + 1])
        return
    _check_bytes(moved)
    _check_modes(moved)
    for before, after in zip(made.blocks, moved.blocks, strict=True):
        inside = first <= after.index <= last
        assert after.device == (to if inside else before.device)
        if inside and profile.kv_place == "block":
            assert after.kv_device == to


@given(_plans(), st.data())
def test_growing_kv_sends_the_last_blocks_home_and_they_return_when_it_shrinks(case, data):
    made, _, _, kv = case
    grown = [bytes_ + data.draw(st.integers(0, 30)) for bytes_ in kv]
    try:
        smaller = relocate(made, grown)
    except BudgetError:
        assert any(part.pinned or part.kind != "block" for part in made.assignments)
        return
    _check_bytes(smaller)
    _check_modes(smaller)
    for use in made.uses[1:]:
        on = [block for block in made.blocks if block.device == use.device and not block.pinned]
        gone = [smaller.blocks[block.index].device == HOST for block in on]
        assert gone == sorted(gone)
    back = relocate(smaller, kv)
    assert [(b.device, b.mode, b.declines) for b in back.blocks] == [
        (b.device, b.mode, b.declines) for b in made.blocks
    ]


@given(_plans(), st.data())
def test_on_the_way_to_another_plan_no_device_holds_more_than_in_both(case, data):
    made, _, _, kv = case
    try:
        new = relocate(made, [bytes_ + data.draw(st.integers(0, 30)) for bytes_ in kv])
        back = relocate(new, kv)
    except BudgetError:
        return
    for before, after in ((made, new), (new, back)):
        way = halfway(before, after)
        _check_bytes(way)
        for old, part, block in zip(before.blocks, way.blocks, after.blocks, strict=True):
            assert part.device == (HOST if HOST in (old.device, block.device) else block.device)
            assert part.kv_bytes == block.kv_bytes


@given(_plans(), st.data())
def test_kv_of_another_size_keeps_every_budget_and_place_or_is_refused(case, data):
    made, _, _, kv = case
    grown = [bytes_ + data.draw(st.integers(0, 30)) for bytes_ in kv]
    try:
        resized = resize(made, grown)
    except BudgetError as error:
        assert "lacks" in str(error) and relocate_or_none(made, grown) != made
        return
    _check_bytes(resized)
    assert [b.device for b in resized.blocks] == [b.device for b in made.blocks]
    assert [b.kv_bytes for b in resized.blocks] == grown


def relocate_or_none(made, kv):
    try:
        return relocate(made, kv)
    except BudgetError:
        return None


@given(_plans(), st.integers(0, 500))
def test_another_budget_of_the_host_changes_nothing_but_what_it_pages(case, budget):
    made, *_ = case
    new = rebudget(made, budget)
    _check_modes(new)
    assert new.uses[1:] == made.uses[1:]
    assert [b.device for b in new.blocks] == [b.device for b in made.blocks]


@settings(max_examples=5, deadline=4000)
@given(st.integers(150, 200))
def test_planning_two_hundred_blocks_is_quick(n_blocks):
    model = pages([100] * n_blocks, [100])
    made = plan(model, machine(cpu_1=1000, cpu_2=1000), Profile(), [0] * n_blocks)
    assert made.n_device_blocks == 20
