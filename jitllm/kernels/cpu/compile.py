"""From LLVM IR to callable addresses: the tier of this CPU, the object cache, and the loader.

A unit of compilation has a name and a function that builds its IR for a tier. Its object code is
kept on disk under a name made of everything it depends on - llvmlite, the CPU with its features,
the FFI version and the sources of the kernels - so a warm start reads a file and builds no IR.
Stale files are never read again and can be deleted at any time.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from jitllm.cache import cache_dir
from jitllm.errors import UsageError
from jitllm.kernels.cpu import ffi
from jitllm.kernels.cpu.ir import Module

_X86_V3 = ("avx2", "fma", "f16c", "bmi2")


@dataclass(frozen=True)
class Tier:
    """What the generated code may use. `dot` names the instruction of the int8 products."""

    name: str
    dot: str
    cpu: str
    features: str
    has_f16: bool = True
    """f16 converts to f32 by an instruction."""
    amx: bool = False
    """Blocks of tokens meet unpacked weights in AMX tiles."""


_AVX512 = (*_X86_V3, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")

# name -> (instruction of the int8 dot, features it needs, CPU model when forced on a better host)
_TIERS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "avx512-amx": ("vnni512", (*_AVX512, "amx-tile", "amx-int8"), ""),
    "avx512-vnni": ("vnni512", _AVX512, "x86-64-v4"),
    "avx2-vnni": ("vnni256", (*_X86_V3, "avxvnni"), "x86-64-v3"),
    "avx2": ("maddubs", _X86_V3, "x86-64-v3"),
    "generic": ("portable", (), "x86-64"),
}
TIER_NAMES = tuple(_TIERS)


@cache
def _initialise() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def host_features() -> dict[str, bool]:
    """The features LLVM detects on this CPU."""
    _initialise()
    return dict(llvm.get_host_cpu_features())


@cache
def _amx_is_granted() -> bool:
    """Ask Linux for the tile registers, which a process must before its first use."""
    if platform.system() != "Linux":
        return False
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18  # asm/prctl.h, x86-64
    return ctypes.CDLL(None).syscall(arch_prctl, req_xcomp_perm, xtiledata) == 0


def host_tiers() -> tuple[str, ...]:
    """The tiers this CPU can run, best first."""
    has = host_features()
    able = [name for name, (_, needs, _) in _TIERS.items() if all(has.get(x) for x in needs)]
    if "avx512-amx" in able and not _amx_is_granted():
        able.remove("avx512-amx")
    return tuple(able)


def tier(name: str | None = None) -> Tier:
    """The tier to generate for: `name`, else `JITLLM_CPU_TIER`, else the host's best.

    Raises UsageError for a name outside the table or above what the host can run.
    """
    able = host_tiers()
    name = name or os.environ.get("JITLLM_CPU_TIER") or able[0]
    if name not in able:
        raise UsageError(f"JITLLM_CPU_TIER is {name}; this CPU can run {', '.join(able)}")
    return _make_tier(name, forced=name != able[0])


@cache
def _make_tier(name: str, forced: bool) -> Tier:
    dot, needs, model = _TIERS[name]
    features = llvm.get_host_cpu_features()
    is_x86 = llvm.get_process_triple().startswith("x86")
    wide = ",-prefer-256-bit" if is_x86 else ""
    if forced:
        flags = ",".join(f"+{x}" for x in needs) + wide
        return Tier(name, dot, model if is_x86 else "", flags, has_f16=bool(needs))
    return Tier(
        name,
        dot,
        llvm.get_host_cpu_name(),
        features.flatten() + wide,
        has_f16=not is_x86 or features.get("f16c", False),
        amx="amx-int8" in needs,
    )


def _machine(t: Tier) -> llvm.TargetMachine:
    _initialise()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=t.cpu, features=t.features, opt=3, jit=True)


def _optimised(module: Module, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    parsed = llvm.parse_assembly(str(module.ir))
    parsed.triple, parsed.data_layout = machine.triple, str(machine.target_data)
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed


Build = Callable[[Tier], Module]


def assembly(build: Build, t: Tier) -> str:
    """The assembly text of a unit, as the host's assembler would read it."""
    machine = _machine(t)
    return machine.emit_assembly(_optimised(build(t), machine))


@cache
def _source_digest() -> bytes:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.digest()


def _object_path(name: str, t: Tier) -> Path:
    key = (llvmlite.__version__, t, ffi.api_version(), _source_digest(), name)
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    return cache_dir() / "kernels" / f"{name}-{t.name}-{digest}.o"


def _object_code(name: str, build: Build, t: Tier) -> bytes:
    path = _object_path(name, t)
    code = _kept(path)
    if code is None:
        machine = _machine(t)
        code = machine.emit_object(_optimised(build(t), machine))
        _keep(path, code)
    return code


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def _kept(path: Path) -> bytes | None:
    """The code in a cache file; None where there is none or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    digest, code = content[:size], content[size:]
    return code if digest == _digest(code) else None


def _keep(path: Path, code: bytes) -> None:
    """Write a cache file whole or not at all; a folder that refuses costs only the next start."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
            f.write(_digest(code) + code)
        os.replace(f.name, path)
    except OSError:
        return


_lock = threading.RLock()
_libraries: dict[tuple[str, str], llvm.ResourceTracker] = {}


@cache
def _jit() -> llvm.LLJIT:
    return llvm.create_lljit_compiler(_machine(tier()))


def load(
    name: str,
    build: Build,
    t: Tier,
    exports: tuple[str, ...],
    imports: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Compile and link a unit once per process; the addresses of `exports`.

    `name` identifies what `build` makes, within a tier. The addresses stay valid for good.
    """
    with _lock:
        if (name, t.name) not in _libraries:
            library = llvm.JITLibraryBuilder().add_object_img(_object_code(name, build, t))
            library.add_current_process()
            for symbol, address in (imports or {}).items():
                library.import_symbol(symbol, address)
            for symbol in exports:
                library.export_symbol(symbol)
            _libraries[name, t.name] = library.link(_jit(), f"{name}-{t.name}")
        library = _libraries[name, t.name]
        return {symbol: library[symbol] for symbol in exports}
