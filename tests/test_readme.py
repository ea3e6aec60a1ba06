"""The README and the program say the same."""

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path

import pytest

from jitllm.cli import jitllmd
from jitllm.cli.jitllm import COMMANDS
from jitllm.kernels.qtypes import QTYPES
from jitllm.server.metrics import Metrics
from jitllm.server.settings import Settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def table(title: str, number: int = 0) -> list[list[str]]:
    """The cells of one of a section's tables, without its header."""
    rows = re.findall(r"(?:^\|.*\n)+", section(title), re.MULTILINE)[number].splitlines()
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


@pytest.mark.parametrize(
    ("title", "commands"), [("Commands", COMMANDS), ("A server", jitllmd.COMMANDS)]
)
def test_the_tables_of_commands_are_the_programs(title, commands):
    assert table(title) == [
        [
            f"`{command.example.splitlines()[0]}`",
            inspect.getdoc(command.function).partition("\n")[0],
        ]
        for command in commands
    ]


def test_every_flag_of_the_server_is_explained_in_the_order_of_its_help():
    flags = [re.match(r"`--?([a-z-]+) ", row[0])[1] for row in table("A server", 1)]
    fields = [field.name.replace("_", "-") for field in dataclasses.fields(Settings)]
    assert sorted(flags) == sorted(fields)


def test_every_metric_is_named_and_no_other():
    named = set(re.findall(r"`(jitllm_\w+)`", section("A server")))
    families = Metrics(list).registry.collect()
    suffixes = {"counter": "_total"}
    assert named == {family.name + suffixes.get(family.type, "") for family in families}


def test_every_dependency_has_its_reason_and_no_other_is_named():
    named = {name.strip() for packages, _ in table("Dependencies") for name in packages.split(",")}
    declared = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}
    assert named == declared


def test_the_optional_packages_are_named():
    for lines in PROJECT["optional-dependencies"].values():
        for line in lines:
            assert re.match(r"[\w-]+", line)[0] in section("Dependencies")


def test_the_weight_types_are_the_engine_s():
    named = re.search(r"- Weights: ([\w, \n]+), in any mixture", section("What it reads"))[1]
    assert re.split(r",\s+", named) == list(QTYPES)
