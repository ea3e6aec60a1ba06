"""XLA FFI handlers written in LLVM IR: reading the call frame, answering the metadata query.

The structs are those of `xla/ffi/api/c_api.h` (major version 0) on a 64-bit machine; a field is
named here by its byte offset. A handler returns null: it cannot fail, because everything that
could is checked in Python before the call is traced.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import jax

from jitllm.kernels.cpu.ir import Function, Module, Value, i32, i64, ptr

_MAJOR = 0

# XLA_FFI_CallFrame
_EXTENSION, API, _CTX, _ARGS, _RETS, _ATTRS = 8, 16, 24, 72, 112, 160
# XLA_FFI_Buffer; XLA_FFI_Array
_BUFFER_DATA, _BUFFER_DIMS, _ARRAY_DATA = 24, 40, 16
# XLA_FFI_Extension_Base; XLA_FFI_Metadata_Extension; XLA_FFI_Metadata
_EXTENSION_TYPE, _METADATA_TYPE, _METADATA = 8, 1, 24
_METADATA_MAJOR, _METADATA_MINOR, _METADATA_TRAITS = 24, 28, 32


@cache
def api_version() -> tuple[int, int]:
    """(major, minor) of the FFI this jaxlib speaks, from its own header.

    Raises RuntimeError where the major version is not the one the offsets above belong to.
    """
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    found = (re.search(rf"XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    major, minor = (int(m.group(1)) if m else -1 for m in found)
    if major != _MAJOR:
        raise RuntimeError(f"jaxlib speaks XLA FFI {major}.{minor}; the kernels know {_MAJOR}.x")
    return major, minor


class Buffer:
    """An argument or a result: the address of its data and its dimensions."""

    def __init__(self, fn: Function, address: Value):
        self._fn, self._address = fn, address
        self.data = fn.load(address, ptr, _BUFFER_DATA)

    def dim(self, axis: int) -> Value:
        """The size of one axis, i64."""
        dims = self._fn.load(self._address, ptr, _BUFFER_DIMS)
        return self._fn.load(dims, i64, 8 * axis)


class Frame:
    """What a handler was called with."""

    def __init__(self, fn: Function, address: Value):
        self.fn, self._address = fn, address
        self.address = address

    def _entry(self, table: int, index: int | Value) -> Value:
        fn = self.fn
        offset = index * 8
        return fn.load(fn.load(self._address, ptr, table), ptr, offset)

    def arg(self, index: int | Value) -> Buffer:
        """Argument `index`; a run-time index is an i64."""
        return Buffer(self.fn, self._entry(_ARGS, index))

    def ret(self, index: int | Value) -> Buffer:
        """Result `index`."""
        return Buffer(self.fn, self._entry(_RETS, index))

    def param(self, index: int | Value) -> Value:
        """Element `index` of the call's one attribute, `params`, an int64 array."""
        data = self.fn.load(self._entry(_ATTRS, 0), ptr, _ARRAY_DATA)
        return self.fn.load(data, i64, index * 8)


def api_and_context(fn: Function, frame: Value) -> tuple[Value, Value]:
    """The function table and the execution context of a call."""
    return fn.load(frame, ptr, API), fn.load(frame, ptr, _CTX)


@contextmanager
def handler(module: Module, name: str) -> Iterator[Frame]:
    """Write an exported handler; inside `with`, what happens on execution."""
    with module.function(name, ptr, [ptr], export=True) as fn:
        (frame,) = fn.args
        extension = fn.load(frame, ptr, _EXTENSION)
        with fn.when(extension.ne(None), likely=False):
            _answer_metadata(fn, extension)
        yield Frame(fn, frame)
        fn.ret(None)


def _answer_metadata(fn: Function, extension: Value) -> None:
    major, minor = api_version()
    with fn.when(fn.load(extension, i32, _EXTENSION_TYPE).eq(_METADATA_TYPE)):
        metadata = fn.load(extension, ptr, _METADATA)
        for offset, number in (
            (_METADATA_MAJOR, major),
            (_METADATA_MINOR, minor),
            (_METADATA_TRAITS, 0),
        ):
            fn.store(fn.value(number, i32), metadata, offset)
        fn.ret(None)


def register(name: str, address: int) -> None:
    """Make the handler at `address` callable as `name` from `jax.ffi.ffi_call` on the CPU."""
    pointer = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(pointer), platform="cpu")
