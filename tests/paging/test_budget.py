"""The ledger's ceilings, and budgets found in made-up machines under a folder."""

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from jitllm.errors import BudgetError
from jitllm.paging.budget import (
    LINES,
    Ledger,
    automatic_budget,
    memory_limits,
    peak_rss_bytes,
    rss_bytes,
    usable_cores,
)

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


def machine(root: Path, files: dict[str, object], available: int = 16 * GIB, cores: str = "0-7"):
    """A /proc and /sys under `root`: 32 GiB, `available` of them free, and `files`."""
    base = {
        "proc/meminfo": f"MemTotal: {32 << 20} kB\nMemAvailable: {available >> 10} kB\n",
        "proc/self/status": f"Name: x\nCpus_allowed_list:\t{cores}\nVmRSS:\t 7 kB\nVmHWM:\t9 kB\n",
    }
    for name, content in {**base, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def v2(path: str, mount_root: str = "/") -> dict[str, object]:
    return {
        "proc/self/cgroup": f"0::{path}",
        "proc/self/mountinfo": f"30 20 0:26 {mount_root} /sys/fs/cgroup rw shared:4 - cgroup2 c rw",
    }


def v1(path: str, mount_root: str = "/") -> dict[str, object]:
    return {
        "proc/self/cgroup": f"5:cpu,cpuacct:{path}\n4:memory:{path}\n1:name=systemd:/\n0::/",
        "proc/self/mountinfo": (
            f"31 30 0:27 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            f"32 30 0:28 {mount_root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup c rw,cpu,cpuacct\n"
            "33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
        ),
    }


def limits2(folder: str, limit: object, usage: int = 0, inactive: int = 0) -> dict[str, object]:
    at = f"sys/fs/cgroup{folder}"
    return {
        f"{at}/memory.max": limit,
        f"{at}/memory.current": usage,
        f"{at}/memory.stat": f"anon 1\ninactive_file {inactive}",
    }


def limits1(folder: str, limit: object, usage: int = 0, inactive: int = 0) -> dict[str, object]:
    at = f"sys/fs/cgroup/memory{folder}"
    return {
        f"{at}/memory.limit_in_bytes": limit,
        f"{at}/memory.usage_in_bytes": usage,
        f"{at}/memory.stat": f"inactive_file 5\ntotal_inactive_file {inactive}",
    }


BUDGETS = {
    "no cgroup": ({}, 16 * GIB),
    "v2 max": ({**v2("/"), **limits2("", "max", 3 * GIB)}, 16 * GIB),
    "v2 limit": ({**v2("/a"), **limits2("/a", 4 * GIB, 1 * GIB)}, 3 * GIB),
    "v2 page cache is free": (
        {**v2("/a"), **limits2("/a", 4 * GIB, 3 * GIB, inactive=2 * GIB)},
        3 * GIB,
    ),
    "v2 the tighter parent": (
        {**v2("/a/b"), **limits2("/a", 5 * GIB, 3 * GIB), **limits2("/a/b", 4 * GIB, 1 * GIB)},
        2 * GIB,
    ),
    "v2 the child is max": (
        {**v2("/a/b"), **limits2("/a", 5 * GIB, 1 * GIB), **limits2("/a/b", "max", 1 * GIB)},
        4 * GIB,
    ),
    "v2 the mount is the container": (
        {**v2("/docker/x", "/docker/x"), **limits2("", 2 * GIB, 1 * GIB)},
        1 * GIB,
    ),
    "v2 a path outside the namespace": ({**v2("/../x"), **limits2("", 2 * GIB)}, 2 * GIB),
    "v2 more than the host has": ({**v2("/a"), **limits2("/a", 64 * GIB)}, 16 * GIB),
    "v2 over its limit": ({**v2("/a"), **limits2("/a", 1 * GIB, 2 * GIB)}, 0),
    "v1 unlimited": ({**v1("/a"), **limits1("/a", V1_UNLIMITED, 3 * GIB)}, 16 * GIB),
    "v1 limit": (
        {**v1("/a"), **limits1("/a", 4 * GIB, 3 * GIB, inactive=1 * GIB)},
        2 * GIB,
    ),
    "v1 the tighter parent": (
        {**v1("/a/b"), **limits1("/a", 2 * GIB, 1 * GIB), **limits1("/a/b", V1_UNLIMITED)},
        1 * GIB,
    ),
    "v1 the mount is the container": (
        {**v1("/docker/x", "/docker/x"), **limits1("", 2 * GIB)},
        2 * GIB,
    ),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_the_automatic_budget_is_four_fifths_of_what_is_usable(tmp_path, case):
    files, usable = BUDGETS[case]
    root = machine(tmp_path, files)
    assert memory_limits(root).usable_bytes == usable
    assert automatic_budget(root) == int(usable * 0.8)


def test_an_unlimited_group_reports_no_limit(tmp_path):
    root = machine(tmp_path, {**v1("/"), **limits1("", V1_UNLIMITED)})
    assert memory_limits(root).cgroup_limit_bytes is None
    assert memory_limits(root).total_bytes == 32 * GIB


CORES = {
    "cpuset": ({}, "0-3,8", 5),
    "one core": ({}, "6", 1),
    "two CPUs a core": (
        {
            f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": core
            for core in ("0,4", "1,5", "2,6", "3,7")
            for cpu in core.split(",")
        },
        "0-5",
        4,
    ),
    "v2 no quota": ({**v2("/a"), "sys/fs/cgroup/a/cpu.max": "max 100000"}, "0-7", 8),
    "v2 quota": ({**v2("/a"), "sys/fs/cgroup/a/cpu.max": "300000 100000"}, "0-7", 3),
    "v2 part of a core": ({**v2("/a"), "sys/fs/cgroup/a/cpu.max": "50000 100000"}, "0-7", 1),
    "v2 quota and a half": ({**v2("/a"), "sys/fs/cgroup/a/cpu.max": "150000 100000"}, "0-7", 2),
    "v2 quota of the parent": (
        {**v2("/a/b"), "sys/fs/cgroup/a/cpu.max": "200000 100000"},
        "0-7",
        2,
    ),
    "v2 quota above the cpuset": (
        {**v2("/a"), "sys/fs/cgroup/a/cpu.max": "900000 100000"},
        "0-1",
        2,
    ),
    "v1 no quota": (
        {
            **v1("/a"),
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": -1,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": 100000,
        },
        "0-7",
        8,
    ),
    "v1 quota": (
        {
            **v1("/a"),
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": 400000,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": 100000,
        },
        "0-7",
        4,
    ),
}


@pytest.mark.parametrize("case", CORES)
def test_cores_are_those_of_the_cpuset_that_the_quota_pays_for(tmp_path, case):
    files, allowed, cores = CORES[case]
    assert usable_cores(machine(tmp_path, files, cores=allowed)) == cores


def test_the_real_machine_answers(tmp_path):
    assert 0 < automatic_budget() < memory_limits().total_bytes
    assert usable_cores() >= 1
    assert 0 < rss_bytes() <= peak_rss_bytes()


def test_memory_in_use_is_read_from_the_status_file(tmp_path):
    root = machine(tmp_path, {})
    assert (rss_bytes(root), peak_rss_bytes(root)) == (7 * 1024, 9 * 1024)


def test_a_system_without_proc_is_asked_through_psutil(tmp_path):
    assert memory_limits(tmp_path).total_bytes > 0
    assert rss_bytes(tmp_path) > 0 and peak_rss_bytes(tmp_path) > 0
    assert usable_cores(tmp_path) >= 1


def test_the_ledger_adds_up_and_remembers_its_peaks():
    ledger = Ledger()
    one, two = ledger.charge("weights", 100), ledger.charge("kv", 50)
    one.release()
    one.release()
    ledger.charge("kv", 10)
    two.shrink(20)
    report = ledger.report()
    assert [line.name for line in report.lines] == list(LINES)
    lines = {line.name: (line.used_bytes, line.peak_bytes) for line in report.lines}
    assert lines["weights"] == (0, 100)
    assert lines["kv"] == (30, 60)
    assert (report.used_bytes, report.peak_bytes) == (30, 150)


def test_a_line_refuses_what_its_budget_cannot_hold():
    ledger = Ledger()
    ledger.set_budget("prefix_cache", 100)
    ledger.charge("prefix_cache", 60)
    with pytest.raises(BudgetError, match="prefix_cache would take 101 B of its 100 B"):
        ledger.charge("prefix_cache", 41)
    assert ledger.used("prefix_cache") == 60


def test_the_limit_counts_what_other_lines_were_promised():
    ledger = Ledger(limit_bytes=100)
    ledger.set_budget("weights", 70)
    ledger.charge("kv", 30)
    with pytest.raises(BudgetError, match="--process-limit") as refusal:
        ledger.charge("kv", 1)
    assert refusal.value.smallest_bytes == 101
    with pytest.raises(BudgetError):
        ledger.set_budget("weights", 71)
    ledger.charge("weights", 70)
    assert ledger.report().used_bytes == 100


def test_a_charge_ends_with_its_owner():
    ledger = Ledger()
    owner = np.zeros(10)
    ledger.charge("staging", 80, owner)
    alias = owner[:5]
    del owner
    assert ledger.used("staging") == 80
    del alias
    gc.collect()
    assert ledger.used("staging") == 0


def test_many_threads_leave_the_ledger_balanced():
    ledger = Ledger()

    def work():
        for _ in range(500):
            ledger.charge("kv", 3).release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.used("kv") == 0
    assert 3 <= ledger.report().peak_bytes <= 12
