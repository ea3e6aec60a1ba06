"""`jitllm verify`: a placement beside the host, from the command line."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jitllm.cli.verify import lines
from jitllm.verify import Position, Verification
from tests.tiny_models import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")


def verify(model: Path, *words: str) -> subprocess.CompletedProcess:
    """In a process of its own: further CPU devices can only be made before JAX runs."""
    command = [sys.executable, "-m", "tests.cli.real", "verify", str(model), *words]
    environment = os.environ | {"JITLLM_CACHE": str(model.parent / "cache")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_blocks_on_another_cpu_device_are_bit_equal_and_ran_there(model):
    done = verify(model, "-devices", "cpu:1=3M", "-gpu-layers", "2", "--json", "-max-seq", "32")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["executed"]["cpu:1"] > 0
    assert facts["executed"]["host"] > 0
    assert facts["n_seams"] > 0
    assert len(facts["positions"]) == 32
    assert all(p["largest_difference"] == 0 and p["same_choice"] for p in facts["positions"])


def test_a_run_says_what_each_device_did(model):
    words = ["-devices", "cpu:1=3M", "-placement", "0=cpu:1,1=cpu:1~,2=host"]
    command = [
        sys.executable,
        "-m",
        "tests.cli.real",
        "run",
        "--json",
        "-n",
        "4",
        "-temp",
        "0",
        *words,
    ]
    environment = os.environ | {"JITLLM_CACHE": str(model.parent / "cache")}
    done = subprocess.run(
        [*command, "-max-seq", "32", str(model), "ab"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    facts = json.loads(done.stdout)
    host, other = facts["devices"]
    passes = facts["generated_tokens"]
    assert (host["device"], host["n_blocks"], host["blocks_executed"]) == ("host", 1, passes)
    assert (other["device"], other["n_blocks"]) == ("cpu:1", 2)
    assert other["blocks_executed"] == 2 * passes
    assert other["streamed_bytes"] > 0 == host["streamed_bytes"]
    assert facts["seams_per_token"] >= 2
    assert "\ndevice   cpu:1: 2 blocks, " in done.stderr


def position(number: int, difference: float, same: bool) -> Position:
    return Position(number, 100 + number, difference, 0.25, same)


def test_equal_logits_are_one_line():
    equal = Verification((position(0, 0.0, True),), {"host": 1, "cpu:1": 2}, 4)
    assert lines(equal) == [
        "blocks run: host 1, cpu:1 2; activations changed device 4 times",
        "1 position: the logits are bit-equal",
    ]


def test_each_position_that_differs_is_shown_with_its_margin():
    off = (position(0, 0.0, True), position(1, 1e-5, True), position(2, 0.5, False))
    assert lines(Verification(off, {"host": 3}, 0))[1:] == [
        "the logits differ at 2 of 3 positions",
        "position  token  difference  margin    choice",
        "1         101    1.00e-05    2.50e-01  same",
        "2         102    5.00e-01    2.50e-01  ANOTHER TOKEN",
    ]


def test_a_tie_may_fall_either_way_and_what_is_no_number_differs(cli, monkeypatch):
    tie = replace(position(0, 2e-3, False), margin=1e-3)
    nothing = replace(position(1, float("nan"), False), margin=float("nan"))
    assert lines(Verification((tie,), {"host": 1}, 0))[-1].endswith("a tie")
    assert [p.position for p in Verification((tie, nothing), {}, 0).wrong] == [1]
    assert len(Verification((tie, nothing), {}, 0).differing) == 2
    monkeypatch.setattr("jitllm.verify.verify", lambda *_, **__: Verification((tie,), {}, 0))
    assert cli("verify", "m.jlm").code == 0


def test_another_token_is_a_failure(cli, monkeypatch):
    off = Verification((position(0, 0.5, False),), {"host": 1}, 0)
    monkeypatch.setattr("jitllm.verify.verify", lambda model, **settings: off)
    outcome = cli("verify", "m.jlm")
    assert outcome.code == 1
    assert outcome.err == "jitllm: the placement chooses another token at 1 of 1 position\n"
