"""`jitllm hardware`: what this machine offers."""

import os
import platform
from typing import Any

from jitllm.cli.terminal import columns


def hardware(*, json: bool = False) -> None:
    """Show what this machine offers: cores, memory, the automatic budget, kernels and devices.

    Args:
        json: Print one JSON object.
    """
    facts = describe()
    if json:
        import json as json_module

        print(json_module.dumps(facts))
        return
    for label, text in _lines(facts):
        print(f"{label:8} {text}")
    print()
    rows = [
        (d["id"], _size(d["free_bytes"]), _size(d["total_bytes"]), d["kind"])
        for d in facts["devices"]
    ]
    print("\n".join(columns([("device", "free", "total", "what it is"), *rows])))


def describe() -> dict[str, Any]:
    """The facts that `hardware` prints. Sizes in bytes; None where there is no limit or no word."""
    from jitllm.kernels.ops import choose
    from jitllm.paging.budget import automatic_budget, memory_limits, usable_cores
    from jitllm.placement.devices import list_devices

    memory = memory_limits()
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "cores_of_the_machine": os.cpu_count(),
        "memory_total_bytes": memory.total_bytes,
        "memory_available_bytes": memory.available_bytes,
        "cgroup_limit_bytes": memory.cgroup_limit_bytes,
        "automatic_budget_bytes": automatic_budget(),
        "kernels": choose("cpu")[1],
        "devices": [
            {
                "id": device.id,
                "kind": device.kind,
                "free_bytes": device.free_bytes,
                "total_bytes": device.total_bytes,
                "shares_host_memory": device.shares_host_memory,
            }
            for device in list_devices()
        ],
    }


def cpu_name() -> str:
    """The CPU in its maker's words, or its architecture where the system does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        names = {key.strip(): value.strip() for key, value in fields.items()}
        return names.get("model name") or names["Model"]
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    limit = facts["cgroup_limit_bytes"]
    return [
        ("cpu", facts["cpu"]),
        ("cores", f"{facts['cores']} of {facts['cores_of_the_machine']} used for decoding"),
        (
            "memory",
            f"{_size(facts['memory_total_bytes'])} total,"
            f" {_size(facts['memory_available_bytes'])} available,"
            f" {'no cgroup limit' if limit is None else 'cgroup limit ' + _size(limit)}",
        ),
        ("budget", f"{_size(facts['automatic_budget_bytes'])} unless -maxmem says otherwise"),
        ("kernels", facts["kernels"]),
    ]


def _size(n_bytes: int | None) -> str:
    from jitllm.units import format_size

    return "not said" if n_bytes is None else format_size(n_bytes)
