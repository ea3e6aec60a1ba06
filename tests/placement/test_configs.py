"""Every profile in `configs/` says what it is for, how to use it, and the plan it really gives."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from jitllm.paging.container import Container
from jitllm.placement.devices import Device, default_budget
from jitllm.placement.plan import Row
from jitllm.placement.planner import plan
from jitllm.placement.profile import load_profile, parse_profile, to_yaml
from jitllm.units import format_size, parse_size
from tests import placing
from tests.placement.toys import MIB, STORIES_KV, STORIES_PAGES, STORIES_WORKSPACE

CONFIGS = Path(__file__).parents[2] / "configs"
_FILES = sorted(path.name for path in CONFIGS.glob("*.yaml") if path.name != "server.yaml")
_REQUIRED = {
    "all-on-host.yaml",
    "one-small-device.yaml",
    "two-devices.yaml",
    "stream-through.yaml",
    "pinned-prefix.yaml",
    "head-on-device.yaml",
}


def _comment(name):
    """The paragraphs of the first comment, the sign of the comment taken off."""
    lines = (CONFIGS / name).read_text("utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    paragraphs = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:end])
    return paragraphs.split("\n\n")


def _command(name):
    return shlex.split(_comment(name)[1])


def _plan_of(name):
    """The plan for stories260K on the devices the profile names, under the command's -maxmem."""
    profile, words = load_profile(CONFIGS / name), _command(name)
    maxmem = parse_size(words[words.index("-maxmem") + 1]) if "-maxmem" in words else 100 * MIB
    devices = [Device("host", budget_bytes=maxmem)]
    for request in profile.devices:
        if str(request) != "cpu:0":
            budget = request.budget_bytes
            budget = default_budget(8192 * MIB) if budget is None else budget
            devices.append(Device(str(request), budget_bytes=budget))
    return plan(STORIES_PAGES, devices, profile, STORIES_KV, STORIES_WORKSPACE)


def _expected_plan(name):
    return [re.split(r"\s{2,}", line.strip()) for line in _comment(name)[2].splitlines()]


def _cells(row: Row):
    pinned = ", pinned" if row.pinned else ""
    return [row.what, row.device, row.mode + pinned, format_size(row.n_bytes)]


def test_the_profiles_that_the_documentation_promises_are_there():
    assert set(_FILES) >= _REQUIRED


@pytest.mark.parametrize("name", _FILES)
def test_a_profile_begins_with_its_purpose_its_command_and_its_plan(name):
    purpose, command, expected = _comment(name)
    assert purpose.endswith(".") and command.startswith("    jitllm run ")
    assert _command(name)[2:4] == ["--profile", f"configs/{name}"]
    assert len(expected.splitlines()) >= 3


@pytest.mark.parametrize("name", _FILES)
def test_a_profile_gives_the_plan_in_its_comment(name):
    made = _plan_of(name)
    assert [_cells(row) for row in made.explain()] == _expected_plan(name)
    assert not any(row.declined for row in made.explain())


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose container has the sizes of stories260K's."""
    path = placing.container(tmp_path_factory.mktemp("models"), **placing.STORIES)
    pages = [(page.kind, page.index, page.n_bytes) for page in Container.open(path).pages]
    assert pages == [(page.kind, page.index, page.n_bytes) for page in STORIES_PAGES]
    return path


@pytest.fixture(scope="module")
def expected(stories: Path) -> np.ndarray:
    with placing.conversation(stories, max_seq=512) as (_, session):
        return placing.says(session)


@pytest.mark.parametrize("name", _FILES)
def test_a_profile_runs_as_its_comment_says_and_changes_no_bit(name, stories, expected):
    words = _command(name)
    maxmem = words[words.index("-maxmem") + 1] if "-maxmem" in words else None
    profile = load_profile(CONFIGS / name)
    options = {"profile": profile, "devices": None, "maxmem": maxmem, "max_seq": 512}
    with placing.conversation(stories, **options) as (engine, session):
        np.testing.assert_array_equal(placing.says(session), expected)
        assert [_cells(row) for row in engine.plan.explain()] == _expected_plan(name)
        passes = 1 + placing.N_REPLY
        assert engine.stats().blocks_executed == placing.runs(engine.plan, passes)
        assert engine.plan.tally.workspace_bytes == STORIES_WORKSPACE
        placing.check_ledgers(engine)


@pytest.mark.parametrize("name", _FILES)
def test_the_effective_form_of_a_profile_is_the_same_profile(name):
    profile = load_profile(CONFIGS / name)
    assert parse_profile(to_yaml(profile)) == profile
