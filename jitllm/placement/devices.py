"""Devices: the `-devices` grammar, and what it opens. jax is imported where a device is opened.

An id is the platform and JAX's number, `cuda:0`; the host is `host`, also written `cpu` or
`cpu:0`. `cpu:1`, `cpu:2`, ... are further CPU devices that JAX makes on request: they have buffers
and compiled steps of their own, so that placement can be tried on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from jitllm.errors import DeviceError, UsageError
from jitllm.units import parse_size, told_apart

HOST = "host"
"""Id of the device that pages are read into."""

_MIB = 2**20
_ENTRY = re.compile(r"([A-Za-z][\w.-]*?)(?::([^:=]*))?(?:=(.*))?")
_ANY = ("auto", "all")
_HOST_MEMORY = ("llvmpipe", "lavapipe", "softpipe", "swiftshader", "pocl", "orin", "tegra", "apple")
"""In a `device_kind`: rasterisers that run on the CPU, and chips without memory of their own."""

MemoryReader = Callable[[], tuple[int, int]]
"""() -> (free bytes, total bytes), read now."""


@dataclass(frozen=True)
class DeviceRequest:
    """One entry of `-devices`, as `parse_devices` understood it."""

    name: str
    """`auto`, `all`, `gpu`, or a platform in lower case."""
    index: int | None = None
    """The device's number; None is every device of that name. `cpu` alone is number 0."""
    budget_bytes: int | None = None
    """What may be put on each device opened; None leaves it to `default_budget`."""

    def __str__(self) -> str:
        number = "" if self.index is None else f":{self.index}"
        return self.name + number


@dataclass(frozen=True)
class Device:
    """A place where blocks can be. Equal by id; planning needs `id` and `budget_bytes` alone."""

    id: str
    """`host`, `cpu:1`, `cuda:0`, ..."""
    platform: str = field(default="cpu", compare=False)
    index: int = field(default=0, compare=False)
    names: tuple[str, ...] = field(default=(), compare=False)
    """Other names a rule may use: `gpu:0`, and `cuda` or `gpu` where only one is opened."""
    budget_bytes: int | None = field(default=None, compare=False)
    """For weights, KV and slots. The host's is `-maxmem`, for weights alone; None: not limited."""
    shares_host_memory: bool = field(default=False, compare=False)
    """Whether its memory is the host's, and has to be counted there."""
    kind: str = field(default="", compare=False)
    """The device in its maker's words."""
    memory: MemoryReader | None = field(default=None, compare=False, repr=False)
    """Free and total bytes now; None where the platform does not say."""
    jax_device: Any = field(default=None, compare=False, repr=False)

    @property
    def is_host(self) -> bool:
        """Whether this is where pages are read into."""
        return self.id == HOST

    @property
    def free_bytes(self) -> int | None:
        """Free memory, read now; where the platform does not say, the budget."""
        return self.memory()[0] if self.memory else self.budget_bytes

    @property
    def total_bytes(self) -> int | None:
        """All its memory; where the platform does not say, the budget."""
        return self.memory()[1] if self.memory else self.budget_bytes


def find_device(name: str, devices: Sequence[Device]) -> Device:
    """The device among `devices` that `name` means: an id, or another of its names.

    DeviceError where none is called so, or more than one.
    """
    found = [device for device in devices if name == device.id or name in device.names]
    if len(found) == 1:
        return found[0]
    ids = ", ".join(device.id for device in found or devices)
    if found:
        raise DeviceError(f"{name} may be any of {ids}; write which")
    raise DeviceError(f"{name} is not among the devices that are open ({ids}); add it to -devices")


def default_budget(free_bytes: int) -> int:
    """What of `free_bytes` a device is given unasked: all but an eighth, of 256 MiB to 1 GiB."""
    return max(0, free_bytes - min(max(free_bytes // 8, 256 * _MIB), 1024 * _MIB))


def machine_memory() -> tuple[int, int]:
    """The machine's available and total bytes. A container's limit is the caller's to know."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def limit(requests: Iterable[DeviceRequest], vram_bytes: int) -> tuple[DeviceRequest, ...]:
    """`requests` where `-vram` is the budget of every device that was given none of its own."""
    return tuple(
        replace(request, budget_bytes=vram_bytes)
        if request.budget_bytes is None and str(request) != "cpu:0"
        else request
        for request in requests
    )


# The grammar


def parse_devices(text: str) -> tuple[DeviceRequest, ...]:
    """The entries of `auto | all | cpu | gpu[:N] | PLATFORM[:N]`, each with an optional `=SIZE`.

    UsageError for an empty entry, a trailing colon, a number that is none, a device named twice
    and a budget for the host.
    """
    requests: list[DeviceRequest] = []
    for entry in text.split(","):
        request = _parse_entry(text, entry.strip())
        if any(str(request) == str(other) for other in requests):
            raise UsageError(f"-devices {text!r} names {request} twice; name each device once")
        requests.append(request)
    return tuple(requests)


def _parse_entry(text: str, entry: str) -> DeviceRequest:
    if not entry:
        raise UsageError(
            f"-devices {text!r} has an empty entry; write e.g. auto, cpu:1 or cuda:0=8G,cuda:1"
        )
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise UsageError(f"-devices {entry!r} is not a device; write NAME, NAME:N or NAME:N=SIZE")
    name, number, size = match.groups()
    name = name.lower()
    index = _parse_index(entry, name, number)
    if name == "cpu" and index == 0 and size is not None:
        raise UsageError(
            f"-devices {entry!r} gives the host a budget, and that is -maxmem; "
            f"write -devices cpu -maxmem {size or 'SIZE'}"
        )
    return DeviceRequest(name, index, None if size is None else _parse_budget(entry, size))


def _parse_index(entry: str, name: str, number: str | None) -> int | None:
    if number is None:
        return 0 if name == "cpu" else None
    if name in _ANY:
        raise UsageError(f"-devices {entry!r} numbers {name}, which has no numbers; write {name}")
    if not number:
        raise UsageError(f"-devices {entry!r} has a colon and no number; write {name} or {name}:0")
    if not (number.isascii() and number.isdigit()) or len(number) > 4:
        raise UsageError(f"-devices {entry!r}: {number!r} is not a device number; write {name}:0")
    return int(number)


def _parse_budget(entry: str, size: str) -> int:
    try:
        return parse_size(size)
    except UsageError as error:
        raise UsageError(f"-devices {entry!r}: {error}") from None


# Opening


def open_devices(
    requests: Sequence[DeviceRequest], host_memory: MemoryReader = machine_memory
) -> list[Device]:
    """The host, always first, and then every other device asked for, in order, ready for use.

    A device without a budget of its own gets `default_budget` of what is free; `host_memory` is
    what devices that share it divide between them. DeviceError for a backend or a device that is
    not there, that does not open, or that has less free than its budget, and for one named twice.
    `auto` leaves out what does not open or does not say how much memory it has; nothing else may
    end on the host without a word.
    """
    _make_cpu_devices(requests)
    present = _present(host_memory)
    asked: list[Device] = []
    for request in requests:
        for device in _select(request, present):
            if device.is_host:
                continue
            if device in asked:
                raise DeviceError(f"-devices names {device.id} twice; name each device once")
            _try_out(device)
            asked.append(replace(device, budget_bytes=request.budget_bytes))
    return [_host(present), *(_with_budget(device, asked) for device in asked)]


def list_devices(host_memory: MemoryReader = machine_memory) -> list[Device]:
    """Every device that `-devices` could open now, the host first, without a budget."""
    present = _present(host_memory)
    return [_host(present), *_others(present)]


def _make_cpu_devices(requests: Iterable[DeviceRequest]) -> None:
    """Ask JAX for as many CPU devices as are named; it makes them when it first runs, once."""
    import jax

    n_devices = 1 + max((r.index or 0 for r in requests if r.name == "cpu"), default=0)
    if n_devices <= max(1, jax.config.jax_num_cpu_devices):
        return
    try:
        jax.config.update("jax_num_cpu_devices", n_devices)
    except RuntimeError:
        # It already runs with fewer, or was given them another way: `_select` looks.
        return


def _backends() -> Mapping[str, Sequence[Any]]:
    """JAX's own devices by platform name, in JAX's order of preference."""
    import jax
    from jax.extend.backend import backends

    try:
        return {name.lower(): jax.local_devices(backend=name) for name in backends()}
    except (RuntimeError, AssertionError) as error:  # it asserts that one of JAX_PLATFORMS is here
        raise DeviceError(f"JAX cannot start its backends: {_first_line(error)}") from error


def _present(host_memory: MemoryReader) -> dict[str, list[Device]]:
    """Every device by platform name. `gpu` is the first platform that JAX counts as one."""
    present: dict[str, list[Device]] = {}
    for platform, found in _backends().items():
        present[platform] = [_device(platform, each, host_memory) for each in found]
        if found and found[0].platform == "gpu":
            present.setdefault("gpu", present[platform])
    return present


def _device(platform: str, found: Any, host_memory: MemoryReader) -> Device:
    kind = str(getattr(found, "device_kind", platform))
    shares = platform == "cpu" or any(word in kind.lower() for word in _HOST_MEMORY)
    id = f"{platform}:{found.id}"
    names = {"cpu": (), "gpu": (platform, "gpu", f"gpu:{found.id}")}.get(
        found.platform, (platform,)
    )
    return Device(
        id=HOST if id == "cpu:0" else id,
        platform=platform,
        index=found.id,
        names=("cpu", id) if id == "cpu:0" else names,
        shares_host_memory=shares,
        kind=kind,
        memory=_memory_reader(found) or (host_memory if shares else None),
        jax_device=found,
    )


def _memory_reader(found: Any) -> MemoryReader | None:
    """Reads `memory_stats` of a JAX device; None where the platform has none."""

    def read() -> tuple[int, int]:
        stats = found.memory_stats()
        total = stats["bytes_limit"]
        return max(0, total - stats["bytes_in_use"]), total

    try:
        read()
    except (KeyError, TypeError, NotImplementedError, RuntimeError):
        return None
    return read


def _host(present: Mapping[str, Sequence[Device]]) -> Device:
    for device in present.get("cpu", ()):
        if device.is_host:
            return device
    raise DeviceError(f"JAX runs without its CPU backend, which is the host ({_there(present)})")


def _others(present: Mapping[str, Sequence[Device]]) -> list[Device]:
    """All devices but the host; accelerators in JAX's order, then further CPU devices."""
    found = [device for name, each in present.items() if name != "gpu" for device in each]
    found.sort(key=lambda device: device.platform == "cpu")
    return [device for device in found if not device.is_host]


def _select(request: DeviceRequest, present: Mapping[str, Sequence[Device]]) -> list[Device]:
    """The devices one entry means; none only for `auto`."""
    if request.name == "auto":
        return [
            device for device in _others(present) if device.platform != "cpu" and _opens(device)
        ]
    found = _others(present) if request.name == "all" else present.get(request.name)
    if request.name == "all" and not found:
        raise DeviceError(
            "-devices all: JAX finds no accelerator here; write -devices cpu for the host alone, "
            "or cpu:1 to try placement on a further CPU device"
        )
    if found is None:
        raise DeviceError(f"-devices {request}: there is no such backend ({_there(present)})")
    if request.index is not None:
        found = [device for device in found if device.index == request.index]
    if not found:
        why = _missing(request, present)
        raise DeviceError(f"-devices {request}: there is no such device ({why})")
    return list(found)


def _missing(request: DeviceRequest, present: Mapping[str, Sequence[Device]]) -> str:
    if request.name != "cpu" or request.index is None:
        return _there(present)
    return (
        f"JAX already runs with {len(present['cpu'])} CPU devices and makes no more; start the "
        f"process with JAX_NUM_CPU_DEVICES={request.index + 1}"
    )


def _there(present: Mapping[str, Sequence[Device]]) -> str:
    ids = [device.id for device in _others(present)]
    return "there is: " + ", ".join(["cpu", *ids])


def _opens(device: Device) -> bool:
    try:
        _try_out(device)
    except DeviceError:
        return False
    return device.memory is not None


def _try_out(device: Device) -> None:
    import jax
    import numpy as np

    try:
        jax.device_put(np.zeros(1, np.uint8), device.jax_device).block_until_ready()
    except RuntimeError as error:
        raise DeviceError(f"{device.id} cannot be opened: {_first_line(error)}") from error


def _with_budget(device: Device, opened: Sequence[Device]) -> Device:
    """`device` with a budget: its own, or of what is free what `opened` devices leave it."""
    free_bytes, budget_bytes = device.memory()[0] if device.memory else None, device.budget_bytes
    if budget_bytes is None and free_bytes is None:
        raise DeviceError(
            f"{device.id} does not say how much memory it has; give it a budget, as in "
            f"-devices {device.id}=8G"
        )
    if budget_bytes is None:
        return replace(device, budget_bytes=_share(device, default_budget(free_bytes), opened))
    if free_bytes is not None and budget_bytes > free_bytes:
        free, wanted = told_apart(free_bytes, budget_bytes)
        raise DeviceError(
            f"{device.id} has {free} free, less than its budget of {wanted}; lower {device.id}=SIZE"
        )
    return device


def _share(device: Device, n_bytes: int, opened: Sequence[Device]) -> int:
    """What `device` may have of `n_bytes` that are free to it: memory is counted once, and the host
    has the share of one in its own."""
    if not device.shares_host_memory:
        return n_bytes
    budgets = [other.budget_bytes for other in opened if other.shares_host_memory]
    taken = sum(budget for budget in budgets if budget is not None)
    return max(0, n_bytes - taken) // (budgets.count(None) + 1)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
