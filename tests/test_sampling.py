"""SamplingParams: the defaults, the ranges and the sentences for what lies outside them."""

import dataclasses
import subprocess
import sys

import pytest

from jitllm.errors import UsageError
from jitllm.sampling import SamplingParams

_WHOLE, _NUMBER = "a whole number", "a number"
_REFUSED = [
    ("n", 0, _WHOLE, "of 1 or more"),
    ("n", 2.0, _WHOLE, "of 1 or more"),
    ("n", True, _WHOLE, "of 1 or more"),
    ("temp", -0.1, _NUMBER, "of 0 or more"),
    ("temp", float("nan"), _NUMBER, "of 0 or more"),
    ("temp", float("inf"), _NUMBER, "of 0 or more"),
    ("temp", "hot", _NUMBER, "of 0 or more"),
    ("temp", None, _NUMBER, "of 0 or more"),
    ("top_k", -1, _WHOLE, "of 0 or more"),
    ("top_p", 1.5, _NUMBER, "from 0 to 1"),
    ("min_p", -0.01, _NUMBER, "from 0 to 1"),
    ("repeat_penalty", 0, _NUMBER, "from 0.001 to 1000"),
    ("repeat_last_n", -1, _WHOLE, "of 0 or more"),
    ("presence_penalty", 2.1, _NUMBER, "from -2 to 2"),
    ("frequency_penalty", -2.1, _NUMBER, "from -2 to 2"),
    ("seed", 2**64, _WHOLE, f"from {-(2**63)} to {2**64 - 1}"),
]


@pytest.mark.parametrize(("name", "value", "kind", "allowed"), _REFUSED)
def test_a_value_outside_its_range_is_refused_with_the_range(name, value, kind, allowed):
    with pytest.raises(UsageError) as refusal:
        SamplingParams(**{name: value})
    assert str(refusal.value) == f"{name} has to be {kind} {allowed}, but is {value!r}"


def test_the_ends_of_a_range_are_allowed():
    SamplingParams(n=1, temp=0, top_k=0, top_p=0, min_p=0, repeat_last_n=0, seed=-(2**63))
    SamplingParams(top_p=1, min_p=1, seed=2**64 - 1, repeat_penalty=1e-3)


def test_the_defaults_are_the_documented_ones():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": None,
        "temp": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "repeat_penalty": 1.0,
        "repeat_last_n": 64,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
    }


def test_the_module_loads_neither_numpy_nor_jax():
    code = "import sys, jitllm.sampling; print({'numpy', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
