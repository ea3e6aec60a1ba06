"""`jitllm hardware`: the machine, as one page and as one object."""

import json
import os


def test_hardware_names_cpu_cores_memory_budget_kernels_and_devices(cli):
    outcome = cli("hardware")
    assert (outcome.code, outcome.err) == (0, "")
    labels = [line.split()[0] for line in outcome.out.splitlines() if line]
    assert labels[:7] == ["cpu", "cores", "memory", "budget", "kernels", "device", "host"]


def test_hardware_as_json_has_bytes(cli):
    facts = json.loads(cli("hardware", "--json").out)
    assert 1 <= facts["cores"] <= os.cpu_count()
    assert 0 < facts["automatic_budget_bytes"] < facts["memory_total_bytes"]
    assert facts["automatic_budget_bytes"] <= 0.81 * facts["memory_available_bytes"]
    assert facts["devices"][0]["id"] == "host"
    assert facts["cpu"] and facts["kernels"]


def test_the_portable_path_is_named_with_its_reason(cli, monkeypatch):
    monkeypatch.setenv("JITLLM_KERNELS", "xla")
    assert "portable XLA (JITLLM_KERNELS=xla)" in cli("hardware").out


def test_an_empty_setting_is_none(cli, monkeypatch):
    monkeypatch.setenv("JITLLM_KERNELS", "")
    assert cli("hardware").code == 0
