"""Memory cgroups, version 1 or 2, for runs under a limit; on most machines only root makes them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class NoCgroups(Exception):
    """A memory cgroup cannot be made here; the text says why."""


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A new memory cgroup with a limit, gone after the `with`. NoCgroups: not on this machine."""
    parent, limit = _hierarchy()
    group = parent / f"jitllm-{os.getpid()}-{limit_bytes}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise NoCgroups(f"a memory cgroup cannot be made: {error.strerror}") from None
    try:
        yield group
    finally:
        group.rmdir()


def inside(group: Path, command: list[str]) -> list[str]:
    """`command` as one that runs in the group from its first instruction."""
    enter = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
    return ["sh", "-c", enter, "sh", *command]


def _hierarchy() -> tuple[Path, str]:
    """Where memory cgroups are made, and the name of the file with their limit."""
    for parent, limit in ((_ROOT / "memory", "memory.limit_in_bytes"), (_ROOT, "memory.max")):
        if (parent / "cgroup.procs").exists() and os.access(parent, os.W_OK):
            return parent, limit
    raise NoCgroups(f"no memory cgroups under {_ROOT} that this user may make")
