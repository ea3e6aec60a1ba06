"""`jitllm asm`: assembly for every weight type, and none for what is none."""

import pytest

from jitllm.kernels.qtypes import QTYPES


@pytest.mark.parametrize("qtype", ["Q4_K", "q8_0", "F32"])
def test_the_assembly_of_a_type_holds_its_three_functions(cli, qtype):
    pytest.importorskip("llvmlite")
    outcome = cli("asm", qtype)
    assert outcome.code == 0
    assert all(f"\n{name}:\n" in outcome.out for name in ("one", "unpack", "panel"))


def test_a_tier_can_be_named(cli, monkeypatch):
    pytest.importorskip("llvmlite")
    monkeypatch.setenv("JITLLM_CPU_TIER", "generic")
    assert cli("asm", "Q4_0").out.startswith("# Q4_0 generated for generic\n")


def test_where_nothing_is_generated_the_reason_is_said(cli, monkeypatch):
    monkeypatch.setenv("JITLLM_KERNELS", "xla")
    reason = "nothing is generated here: the kernels are portable XLA (JITLLM_KERNELS=xla)"
    assert cli("asm", "Q4_0") == (1, "", f"jitllm: {reason}\n")


def test_a_type_that_is_none_is_refused_with_the_table(cli):
    outcome = cli("asm", "Q9_Z")
    assert outcome == (
        2,
        "",
        f"jitllm: Q9_Z is not a weight type of jitllm ({', '.join(QTYPES)})\n",
    )
