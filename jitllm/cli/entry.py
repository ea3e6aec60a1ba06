"""Where the installed commands begin: ctrl-C ends them from here on with 130 and no traceback.

Python raises KeyboardInterrupt wherever it happens to be. In the middle of the import of a library
in C++ that ends the process with an abort, and in a callback of the garbage collector (jax has
one) or a `__del__` it is printed and forgotten. What falls there is sent again a moment later.
"""

import contextlib
import os
import signal
import sys
import types
from importlib import import_module

INTERRUPTED = 130
_A_MOMENT_S = 0.02


def jitllm() -> int:
    """The `jitllm` command with the process's own arguments; its exit code."""
    return _enter("jitllm.cli.jitllm")


def jitllmd() -> int:
    """The `jitllmd` command with the process's own arguments; its exit code."""
    return _enter("jitllm.cli.jitllmd")


def _enter(module: str) -> int:
    # A shell starts what it puts in the background with ctrl-C ignored; that stays so.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if heeded:
            catch_interrupts()
        code = import_module(module).main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        _leave_at_once()
    if heeded:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def _leave_at_once() -> None:
    """Without the interpreter's own end, which waits for threads that nobody stopped."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(INTERRUPTED)


def catch_interrupts() -> None:
    """Make ctrl-C raise KeyboardInterrupt in the main thread, later where it would be lost now."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.unraisablehook = _unraisable


def _interrupt(signum: int, frame: types.FrameType | None) -> None:
    if _in_import(frame):
        _send_again()
    else:
        raise KeyboardInterrupt


def _unraisable(what: "sys.UnraisableHookArgs") -> None:
    if what.exc_type is KeyboardInterrupt:
        _send_again()
    else:
        sys.__unraisablehook__(what)


def _send_again() -> None:
    signal.setitimer(signal.ITIMER_REAL, _A_MOMENT_S)


def _in_import(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
