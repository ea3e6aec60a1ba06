"""Where the installed commands begin: ctrl-C ends them from here on with 130 and no traceback, and
SIGTERM with 143. Either way what was half done is cleared away.

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

INTERRUPTED, TERMINATED = 130, 143
_A_MOMENT_S = 0.02
_ENDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}
_UNHEEDED_YET = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def jitllm() -> int:
    """The `jitllm` command with the process's own arguments; its exit code."""
    return _enter("jitllm.cli.jitllm")


def jitllmd() -> int:
    """The `jitllmd` command with the process's own arguments; its exit code."""
    return _enter("jitllm.cli.jitllmd")


def _enter(module: str) -> int:
    # A shell starts what it puts in the background with ctrl-C ignored; that stays so.
    heeded = [s for s, before in _UNHEEDED_YET.items() if signal.getsignal(s) is before]
    try:
        catch_signals(heeded)
        code = import_module(module).main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as end:
        code = int(end.code or 0)
    if code in (INTERRUPTED, TERMINATED):
        _leave_at_once(code)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for signum in heeded:
        signal.signal(signum, signal.SIG_DFL)
    return code


def _leave_at_once(code: int) -> None:
    """Without the interpreter's own end, which waits for threads that nobody stopped."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def catch_signals(which: list[signal.Signals]) -> None:
    """Make each of them an exception in the main thread, later where it would be lost now."""
    for signum in which:
        signal.signal(signum, _end)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(_sent_again))
    sys.unraisablehook = _unraisable


_sent_again = signal.SIGINT


def _end(signum: int, frame: types.FrameType | None) -> None:
    if _in_import(frame):
        _send_again(signal.Signals(signum))
    else:
        raise _ENDS[signal.Signals(signum)](128 + signum)


def _unraisable(what: "sys.UnraisableHookArgs") -> None:
    for signum, end in _ENDS.items():
        if what.exc_type is end:
            return _send_again(signum)
    sys.__unraisablehook__(what)


def _send_again(signum: signal.Signals) -> None:
    global _sent_again
    _sent_again = signum
    signal.setitimer(signal.ITIMER_REAL, _A_MOMENT_S)


def _in_import(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
