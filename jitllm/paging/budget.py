"""What may be used and what is used: the ledger of the process's large allocations, and the memory
and cores that the machine and its control groups leave to us.

    automatic budget = 80 % of min(MemAvailable, limit - (usage - inactive file))

with the second term for every memory cgroup around the process, v1 or v2: page cache that the
kernel will drop on demand is not in use. All files are read below `root`, "/" but in tests.
"""

import math
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jitllm.errors import BudgetError
from jitllm.units import told_apart

LINES = ("weights", "kv", "activations", "staging", "prefix_cache")
"""The ledger's lines. `weights` is all that is weight-shaped: frames, embedding, row look-ups."""
AUTOMATIC_SHARE = 0.8
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as the largest page-aligned 63-bit number."""


@dataclass(frozen=True)
class LedgerLine:
    """One line: its ceiling (None: none of its own), what is allocated now, and the most ever."""

    name: str
    budget_bytes: int | None
    used_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class LedgerReport:
    """All lines and their sum. `peak_bytes` is the largest sum ever, not the sum of the peaks."""

    lines: tuple[LedgerLine, ...]
    used_bytes: int
    peak_bytes: int
    limit_bytes: int | None


class Charge:
    """Bytes on one line, until `release` or the death of the owner they were charged for."""

    def __init__(self, ledger: "Ledger", line: str, n_bytes: int):
        self._ledger, self._line, self.n_bytes = ledger, line, n_bytes

    def shrink(self, n_bytes: int) -> None:
        """Give back all but `n_bytes`."""
        assert 0 <= n_bytes <= self.n_bytes, "a charge only shrinks"
        self._ledger._add(self._line, n_bytes - self.n_bytes)
        self.n_bytes = n_bytes

    def release(self) -> None:
        """Give back everything; a second call does nothing."""
        self.shrink(0)


class Ledger:
    """Who allocated how much, against each line's budget and the limit on the sum. Thread-safe.

    A charge that would break a ceiling is refused with BudgetError before it is made. The limit
    counts for each line the larger of its budget and its use, so that what one line was promised
    is never lent to another.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        whose: str = "the process",
        remedy: str = "lower another budget or raise --process-limit",
    ):
        """`whose` memory it is, and the `remedy` for too little of it, are for the sentence of the
        error."""
        self.limit_bytes, self._whose, self._remedy = limit_bytes, whose, remedy
        self._budgets: dict[str, int | None] = dict.fromkeys(LINES)
        self._used, self._peaks = dict.fromkeys(LINES, 0), dict.fromkeys(LINES, 0)
        self._peak_sum = 0
        # Re-entrant: a charge's owner can die, and give back, anywhere inside.
        self._lock = threading.RLock()

    def set_budget(self, line: str, n_bytes: int | None) -> None:
        """Set one line's ceiling; what it already uses stays. BudgetError: beyond the limit."""
        with self._lock:
            self._check_limit(line, max(n_bytes or 0, self._used[line]))
            self._budgets[line] = n_bytes

    def charge(self, line: str, n_bytes: int, owner: object | None = None) -> Charge:
        """Put `n_bytes` on a line; they come off by the charge, or when `owner` is collected."""
        with self._lock:
            budget, used = self._budgets[line], self._used[line] + n_bytes
            if budget is not None and used > budget:
                wanted, ceiling = told_apart(used, budget)
                raise BudgetError(f"{line} would take {wanted} of its {ceiling}", used)
            self._check_limit(line, max(budget or 0, used))
            self._add(line, n_bytes)
        charge = Charge(self, line, n_bytes)
        if owner is not None:
            weakref.finalize(owner, charge.release).atexit = False
        return charge

    def used(self, line: str) -> int:
        """Bytes on one line now."""
        return self._used[line]

    def report(self) -> LedgerReport:
        """Every line as it stands."""
        with self._lock:
            lines = tuple(
                LedgerLine(name, self._budgets[name], self._used[name], self._peaks[name])
                for name in LINES
            )
            return LedgerReport(lines, sum(self._used.values()), self._peak_sum, self.limit_bytes)

    def _check_limit(self, line: str, claim: int) -> None:
        others = (max(self._budgets[o] or 0, self._used[o]) for o in LINES if o != line)
        total = sum(others) + claim
        if self.limit_bytes is not None and total > self.limit_bytes:
            wanted, ceiling = told_apart(total, self.limit_bytes)
            raise BudgetError(
                f"{line} would bring {self._whose} to {wanted} of its limit of {ceiling}; "
                f"{self._remedy}",
                total,
            )

    def _add(self, line: str, n_bytes: int) -> None:
        with self._lock:
            self._used[line] += n_bytes
            self._peaks[line] = max(self._peaks[line], self._used[line])
            self._peak_sum = max(self._peak_sum, sum(self._used.values()))


@dataclass(frozen=True)
class MemoryLimits:
    """What this process can count on, in bytes; `cgroup_*` is None outside a limited cgroup."""

    total_bytes: int
    available_bytes: int
    """What the kernel could give without swapping: MemAvailable."""
    cgroup_limit_bytes: int | None
    """The tightest limit around the process."""
    cgroup_available_bytes: int | None
    """The least room that any cgroup around the process leaves, page cache counted as free."""

    @property
    def usable_bytes(self) -> int:
        """The least of the kernel's and the cgroups' available bytes."""
        rooms = (self.available_bytes, self.cgroup_available_bytes)
        return max(0, min(room for room in rooms if room is not None))


def automatic_budget(root: str | os.PathLike[str] = "/") -> int:
    """The budget in bytes where nobody named one: 80 % of what is usable now."""
    return int(memory_limits(root).usable_bytes * AUTOMATIC_SHARE)


def memory_limits(root: str | os.PathLike[str] = "/") -> MemoryLimits:
    """The memory of the machine and of the cgroups around this process."""
    root = Path(root)
    limits, rooms = [], []
    for group in _cgroups(root, "memory"):
        limit = _first_number(group, "memory.max", "memory.limit_in_bytes")
        usage = _first_number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and limit < _UNLIMITED_BYTES:
            limits.append(limit)
            rooms.append(limit - max(0, (usage or 0) - _inactive_file(group)))
    total, available = _system_memory(root)
    return MemoryLimits(total, available, min(limits, default=None), min(rooms, default=None))


def usable_cores(root: str | os.PathLike[str] = "/") -> int:
    """Cores to compute on: the physical ones of the cpuset, no more than the CPU quota pays for.

    A quota of 1.5 CPUs gives 2: two threads that are throttled do more than one that is not.
    """
    root = Path(root)
    quotas = [quota for group in _cgroups(root, "cpu") if (quota := _cpu_quota(group))]
    return max(1, math.ceil(min([_physical_cores(root), *quotas])))


def rss_bytes(root: str | os.PathLike[str] = "/") -> int:
    """Bytes of this process in memory now."""
    return _status_bytes(Path(root), "VmRSS")


def peak_rss_bytes(root: str | os.PathLike[str] = "/") -> int:
    """The most bytes that this process ever had in memory."""
    return _status_bytes(Path(root), "VmHWM")


def _status_bytes(root: Path, field: str) -> int:
    status = _fields(root / "proc/self/status")
    if field in status:
        return int(status[field].split()[0]) * 1024
    import psutil

    memory = psutil.Process().memory_info()
    return getattr(memory, "peak_wset", memory.rss) if field == "VmHWM" else memory.rss


def _system_memory(root: Path) -> tuple[int, int]:
    """Total and available bytes; /proc/meminfo, or what psutil makes of other systems."""
    fields = _fields(root / "proc/meminfo")
    if "MemAvailable" in fields:
        total, available = (int(fields[k].split()[0]) for k in ("MemTotal", "MemAvailable"))
        return total * 1024, available * 1024
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _physical_cores(root: Path) -> int:
    """Physical cores in the process's cpuset; CPUs that share one are counted once."""
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return len({_read(root / topology.format(cpu)) or cpu for cpu in _allowed_cpus(root)})


def _allowed_cpus(root: Path) -> list[int]:
    """The CPUs of the process's cpuset, from a list such as `0-3,8`."""
    text = _fields(root / "proc/self/status").get("Cpus_allowed_list")
    if not text:
        return list(range(os.cpu_count() or 1))
    spans = [part.split("-") for part in text.split(",")]
    return [cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)]


def _cpu_quota(group: Path) -> float | None:
    """CPUs that a cgroup may use at once, None without a quota."""
    pair = _read(group / "cpu.max").split()
    if not pair:
        pair = [_read(group / f"cpu.cfs_{what}_us").strip() for what in ("quota", "period")]
    quota, period = (_number(text) for text in pair)
    return quota / period if quota and period and quota > 0 else None


def _inactive_file(group: Path) -> int:
    """Page cache that the kernel gives up first; v1 keeps the subtree's under `total_`."""
    stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if line)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the cgroups around this process that `controller` may rule, v1 and v2."""
    mounts = list(_cgroup_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one line and one tree for all controllers, named by nothing.
        name = controller if controllers else ""
        if name in controllers.split(","):
            for mounted, mount_root, folder in mounts:
                if name in mounted:
                    yield from _ancestry(path, mount_root, folder)


def _ancestry(path: str, mount_root: str, folder: Path) -> Iterator[Path]:
    """The cgroup `path` and all above it up to the mount at `folder`, innermost first.

    In a container the path may lie outside what is mounted: then the mount itself is the group.
    """
    inside = os.path.relpath(path, mount_root)
    group = folder if inside.startswith("..") else folder / inside
    while folder in (group, *group.parents):
        yield group
        group = group.parent


def _cgroup_mounts(root: Path) -> Iterator[tuple[set[str], str, Path]]:
    """(v1 controllers, or {""} for v2; what part of the tree; where) of each cgroup mount."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, *_, options = right.split(" ")
        if kind in ("cgroup", "cgroup2"):
            mount_root, folder = left.split(" ")[3:5]
            controllers = set(options.split(",")) if kind == "cgroup" else {""}
            yield controllers, mount_root, root / folder.lstrip("/")


def _first_number(group: Path, *names: str) -> int | None:
    return next((n for name in names if (n := _number(_read(group / name))) is not None), None)


def _number(text: str) -> int | None:
    """An int; None for nothing and for `max`."""
    try:
        return int(text)
    except ValueError:
        return None


def _fields(path: Path) -> dict[str, str]:
    """`Name: value` lines."""
    pairs = (line.partition(":") for line in _read(path).splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _read(path: Path) -> str:
    """A small kernel file, empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
