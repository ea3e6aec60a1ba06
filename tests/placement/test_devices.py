"""The `-devices` grammar and what it opens: every error by name, budgets, and who shares memory."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from jitllm.errors import DeviceError, UsageError
from jitllm.placement import devices
from jitllm.placement.devices import (
    DeviceRequest,
    default_budget,
    find_device,
    limit,
    list_devices,
    open_devices,
    parse_devices,
)

GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", [DeviceRequest("auto")]),
        ("all=2G", [DeviceRequest("all", None, 2 * GIB)]),
        ("cpu", [DeviceRequest("cpu", 0)]),
        ("gpu", [DeviceRequest("gpu")]),
        ("gpu:1", [DeviceRequest("gpu", 1)]),
        (
            "cuda:0=8G, cpu:2=8MiB",
            [DeviceRequest("cuda", 0, 8 * GIB), DeviceRequest("cpu", 2, 8 * MIB)],
        ),
        ("METAL:0=0", [DeviceRequest("metal", 0, 0)]),
    ],
)
def test_an_entry_is_a_name_a_number_and_a_budget(text, expected):
    assert parse_devices(text) == tuple(expected)


_REFUSED = [
    ("", "-devices '' has an empty entry; write e.g. auto, cpu:1 or cuda:0=8G,cuda:1"),
    (
        "cpu,,gpu",
        "-devices 'cpu,,gpu' has an empty entry; write e.g. auto, cpu:1 or cuda:0=8G,cuda:1",
    ),
    ("gpu:", "-devices 'gpu:' has a colon and no number; write gpu or gpu:0"),
    ("gpu:=2G", "-devices 'gpu:=2G' has a colon and no number; write gpu or gpu:0"),
    ("cuda:x", "-devices 'cuda:x': 'x' is not a device number; write cuda:0"),
    ("cuda:-1", "-devices 'cuda:-1': '-1' is not a device number; write cuda:0"),
    ("cuda:1:2", "-devices 'cuda:1:2' is not a device; write NAME, NAME:N or NAME:N=SIZE"),
    (":0", "-devices ':0' is not a device; write NAME, NAME:N or NAME:N=SIZE"),
    ("auto:0", "-devices 'auto:0' numbers auto, which has no numbers; write auto"),
    ("gpu,gpu", "-devices 'gpu,gpu' names gpu twice; name each device once"),
    ("cpu,cpu:0", "-devices 'cpu,cpu:0' names cpu:0 twice; name each device once"),
    ("cpu:1=2M,cpu:1", "-devices 'cpu:1=2M,cpu:1' names cpu:1 twice; name each device once"),
    (
        "cpu=3G",
        "-devices 'cpu=3G' gives the host a budget, and that is -maxmem; "
        "write -devices cpu -maxmem 3G",
    ),
    (
        "gpu=lots",
        "-devices 'gpu=lots': size 'lots' is not a number of bytes; write e.g. 400K, 1.5G or 2GiB",
    ),
    ("gpu=", "-devices 'gpu=': size '' is not a number of bytes; write e.g. 400K, 1.5G or 2GiB"),
]


@pytest.mark.parametrize(("text", "sentence"), _REFUSED)
def test_what_is_not_in_the_grammar_is_refused_by_name(text, sentence):
    with pytest.raises(UsageError) as refusal:
        parse_devices(text)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("free_bytes", "expected"),
    [(0, 0), (GIB, 768 * MIB), (4 * GIB, 4 * GIB - 512 * MIB), (80 * GIB, 79 * GIB)],
)
def test_a_default_budget_leaves_an_eighth_of_256_mib_to_1_gib(free_bytes, expected):
    assert default_budget(free_bytes) == expected


def test_vram_is_the_budget_of_devices_that_have_none():
    requests = limit(parse_devices("cpu,gpu,cpu:1=2M"), 5 * MIB)
    assert [request.budget_bytes for request in requests] == [None, 5 * MIB, 2 * MIB]


# A machine with two GPUs, a silent accelerator and three CPU devices, as JAX would show it.


class _Array:
    def block_until_ready(self):
        return self


def _jax_device(platform, index, kind, stats=None):
    return SimpleNamespace(
        platform=platform, id=index, device_kind=kind, memory_stats=lambda: stats
    )


@pytest.fixture
def machine(monkeypatch):
    """Stands in for JAX: `machine[platform]` has its devices; a "broken" kind fails."""
    stats = {"bytes_limit": 80 * GIB, "bytes_in_use": 16 * GIB}
    found = {
        "cuda": [_jax_device("gpu", i, "NVIDIA H200", stats) for i in range(2)],
        "npu": [_jax_device("npu", 0, "quiet accelerator")],
        "cpu": [_jax_device("cpu", i, "cpu") for i in range(3)],
    }

    def device_put(value, device):
        if device.device_kind == "broken":
            raise RuntimeError("no kernel image\nand a long trace")
        return _Array()

    monkeypatch.setattr(devices, "_backends", lambda: found)
    monkeypatch.setattr("jax.device_put", device_put)
    monkeypatch.setattr("jax.config.update", lambda *_: None)
    return found


def _open(text):
    return open_devices(parse_devices(text), host_memory=lambda: (6 * GIB, 8 * GIB))


def _ids(text):
    return [device.id for device in _open(text)]


def test_the_host_comes_first_and_auto_takes_the_accelerators_that_say_their_memory(machine):
    assert _ids("auto") == ["host", "cuda:0", "cuda:1"]
    assert _ids("cpu") == ["host"]
    assert _ids("gpu") == ["host", "cuda:0", "cuda:1"]
    assert _ids("cuda:1,cpu,cpu:2") == ["host", "cuda:1", "cpu:2"]
    assert _ids("all=1M") == ["host", "cuda:0", "cuda:1", "npu:0", "cpu:1", "cpu:2"]


def test_a_budget_is_the_devices_own_or_what_is_free_less_a_reserve(machine):
    host, cuda, cpu = _open("cuda:0,cpu:1=8M")
    assert (host.budget_bytes, cpu.budget_bytes) == (None, 8 * MIB)
    assert cuda.budget_bytes == 63 * GIB
    assert (cuda.free_bytes, cuda.total_bytes) == (64 * GIB, 80 * GIB)
    _, silent = _open("npu=3G")
    assert (silent.free_bytes, silent.total_bytes, silent.memory) == (3 * GIB, 3 * GIB, None)


def test_memory_that_is_the_hosts_is_marked_and_read_there(machine):
    machine["vk"] = [_jax_device("vk", 0, "llvmpipe (LLVM 19)")]
    host, cuda, rasteriser, cpu = _open("cuda:0,vk,cpu:1")
    assert [d.shares_host_memory for d in (host, cuda, rasteriser, cpu)] == [
        True,
        False,
        True,
        True,
    ]
    assert (rasteriser.free_bytes, cpu.total_bytes) == (6 * GIB, 8 * GIB)


def test_memory_that_devices_share_is_given_out_once(machine):
    budgets = [device.budget_bytes for device in _open("cpu:1,cuda:0,cpu:2")]
    third = (6 * GIB - 768 * MIB) // 3  # the host keeps as much
    assert budgets == [None, third, 63 * GIB, third]
    assert _open("cpu:1=1G,cpu:2")[2].budget_bytes == (5 * GIB - 768 * MIB) // 2


_THERE = "there is: cpu, cuda:0, cuda:1, npu:0, cpu:1, cpu:2"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rocm", f"-devices rocm: there is no such backend ({_THERE})"),
        ("cuda:7", f"-devices cuda:7: there is no such device ({_THERE})"),
        ("gpu,cuda:1", "-devices names cuda:1 twice; name each device once"),
        (
            "npu",
            "npu:0 does not say how much memory it has; give it a budget, as in -devices npu:0=8G",
        ),
        (
            "cuda:0=70G",
            "cuda:0 has 64.00 GiB free, less than its budget of 70.00 GiB; lower cuda:0=SIZE",
        ),
        (
            "cpu:3",
            "-devices cpu:3: there is no such device (JAX already runs with 3 CPU devices and "
            "makes no more; start the process with JAX_NUM_CPU_DEVICES=4)",
        ),
    ],
)
def test_a_device_that_cannot_be_had_is_refused_with_what_is_there(machine, text, sentence):
    with pytest.raises(DeviceError) as refusal:
        _open(text)
    assert str(refusal.value) == sentence


def test_a_jax_without_any_backend_is_refused_in_a_sentence(monkeypatch):
    def none_is_here():
        raise AssertionError

    monkeypatch.setattr("jax.extend.backend.backends", none_is_here)
    with pytest.raises(DeviceError, match="JAX cannot start its backends: AssertionError"):
        _open("auto")


def test_only_auto_may_end_on_the_host_without_a_word(machine):
    machine["cuda"] = []
    assert _ids("auto") == ["host"]
    machine["npu"], machine["cpu"][1:] = [], []
    with pytest.raises(DeviceError, match="-devices all: JAX finds no accelerator here; write"):
        _open("all")
    for text in ("gpu", "cuda"):
        with pytest.raises(DeviceError, match=f"-devices {text}: there is no such"):
            _open(text)


def test_a_device_that_does_not_open_is_named_and_auto_leaves_it_out(machine):
    machine["cuda"][1].device_kind = "broken"
    assert _ids("auto") == ["host", "cuda:0"]
    with pytest.raises(DeviceError) as refusal:
        _open("gpu")
    assert str(refusal.value) == "cuda:1 cannot be opened: no kernel image"


def test_the_list_shows_every_device_under_the_id_that_opens_it(machine):
    ids = [device.id for device in list_devices()]
    assert ids == ["host", "cuda:0", "cuda:1", "npu:0", "cpu:1", "cpu:2"]
    assert _ids(",".join(f"{id}=1M" for id in ids[1:])) == ids


def test_a_device_answers_to_its_platform_while_it_is_the_only_one(machine):
    devices = _open("cuda:0,npu=1M,cpu:1")
    for name, id in [
        ("cuda:0", "cuda:0"),
        ("gpu", "cuda:0"),
        ("gpu:0", "cuda:0"),
        ("cuda", "cuda:0"),
        ("npu", "npu:0"),
        ("cpu", "host"),
        ("cpu:1", "cpu:1"),
    ]:
        assert find_device(name, devices).id == id
    with pytest.raises(DeviceError) as refusal:
        find_device("gpu", _open("gpu"))
    assert str(refusal.value) == "gpu may be any of cuda:0, cuda:1; write which"
    with pytest.raises(DeviceError) as refusal:
        find_device("cuda:1", devices)
    assert str(refusal.value) == (
        "cuda:1 is not among the devices that are open (host, cuda:0, npu:0, cpu:1); "
        "add it to -devices"
    )


# JAX itself, in processes of its own: what CPU devices it makes is settled once.


def _python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_jax_makes_the_cpu_devices_that_are_named_and_their_arrays_live_there():
    code = """
import jax
from jitllm.placement.devices import *
devices = open_devices(parse_devices("cpu:2=8M,cpu:1=3M"))
array = jax.device_put(1.0, devices[1].jax_device)
print(*[d.id for d in devices], array.devices().pop().id, *[d.id for d in list_devices()])
try:
    open_devices(parse_devices("cpu:5"))
except Exception as error:
    print("3 CPU devices" in str(error))
"""
    assert " ".join(_python(code)) == "host cpu:2 cpu:1 2 host cpu:1 cpu:2 True"


def test_parsing_does_not_import_jax():
    code = """
import sys
from jitllm.placement.devices import parse_devices
parse_devices("cuda:0=8G")
print("jax" in sys.modules)
"""
    assert _python(code) == ["False"]
