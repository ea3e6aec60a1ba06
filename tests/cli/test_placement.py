"""Placement from the command line, on a model with the sizes of stories260K: `cpu:1` is where a
GPU would be."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import placing

TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return placing.container(tmp_path_factory.mktemp("models"), **placing.STORIES)


def run(model: Path, line: str) -> tuple[dict, str]:
    """(what `run --json` prints, stderr); in a process of its own, for CPU devices to be made."""
    command = [sys.executable, "-m", "tests.cli.real", "run", "--json", "-n", "8", "-temp", "0"]
    done = subprocess.run(
        [*command, *shlex.split(line), str(model), TEXT],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JITLLM_CACHE": str(model.parent / "cache"), "JAX_NUM_CPU_DEVICES": "2"}
        if "all" in line
        else os.environ | {"JITLLM_CACHE": str(model.parent / "cache")},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def ids(model: Path) -> list[int]:
    facts, told = run(model, "-devices cpu -maxmem 400K")
    assert facts["jitllm"]["device_blocks"] == 0 and facts["jitllm"]["host_blocks"] == 5
    assert "device " not in told
    return facts["ids"]


@pytest.mark.parametrize(
    ("line", "blocks", "device_blocks"),
    [
        ("-devices all", {"host": 0, "cpu:1": 5}, 5),
        ("-devices cpu:1=3M,cpu:2=8M", {"host": 0, "cpu:1": 5, "cpu:2": 0}, 5),
        ("-devices cpu:1 -gpu-layers 10", {"host": 0, "cpu:1": 5}, 5),
        ("-devices cpu:1=2M -placement '*=cpu:1~'", {"host": 0, "cpu:1": 5}, 5),
        ("-devices cpu:1=2M -gpu-layers 2 -maxmem 400K", {"host": 3, "cpu:1": 2}, 2),
    ],
)
def test_a_command_places_blocks_and_says_so(
    line: str, blocks: dict[str, int], device_blocks: int, model: Path, ids: list[int]
) -> None:
    facts, told = run(model, line)
    assert facts["ids"] == ids
    devices = {device["device"]: device for device in facts["devices"]}
    assert {name: device["n_blocks"] for name, device in devices.items()} == blocks
    # A pass for the prompt and one for each token but the first.
    assert {n: d["blocks_executed"] for n, d in devices.items()} == {
        n: 8 * b for n, b in blocks.items()
    }
    streamed = devices["cpu:1"]["streamed_bytes"]
    assert streamed > 8 * 4 * 180 * 1024 if "~" in line else streamed == 0
    assert (facts["jitllm"]["device_blocks"], facts["jitllm"]["host_blocks"]) == (
        device_blocks,
        5 - device_blocks,
    )
    assert facts["jitllm"]["device_ids"] == ["cpu:1"]
    assert facts["seams_per_token"] == 2
    assert facts["jitllm"]["decode_ms"] > 0
    labels = [words.split()[0] for words in told.splitlines()]
    assert labels.count("device") == len(blocks) and labels.count("seams") == 1
    assert labels.count("placed") >= 3
