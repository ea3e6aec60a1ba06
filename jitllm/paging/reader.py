"""Positioned reads that go past the page cache: 1 MiB each, sixteen at a time, into aligned memory.

Reads are served in the order in which they are asked for, urgent ones past all others; the requests
of one read run side by side. The bytes of a read are there when `wait` returns; whether they are
the right ones is known when `check` returns: the hash is taken on the reader's threads, while the
bytes are put to use.
Where the file system refuses O_DIRECT, reads go through the page cache, which is said once.
"""

import errno
import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jitllm.errors import FormatError, JitllmError

REQUEST_BYTES = 1 << 20
N_IN_FLIGHT = 16
"""Eight keep a disk busy by themselves. With the cores computing, a request that is done is noticed
late, and sixteen read a twentieth more."""
SECTOR_BYTES = 4096
"""What O_DIRECT wants offsets, lengths and addresses to be multiples of, on any disk."""

Segment = tuple[int, memoryview]
"""(offset in the file, where the bytes go): both aligned, as is the length."""

_log = logging.getLogger(__name__)


class Read:
    """A read under way. Any thread may wait for it."""

    def __init__(self, segments: Sequence[Segment], verify: Callable[[], None] | None):
        self.n_bytes = sum(len(view) for _, view in segments)
        self.n_requests = len(segments)
        self.started_s = self.finished_s = 0.0
        """When the first request began and the last one ended, by `time.perf_counter`."""
        self._segments, self._verify = iter(list(segments)), verify
        self._left, self._error = len(segments), None
        assert segments, "a read of nothing would never end"
        self._lock = threading.Lock()
        self._arrived, self._checked = threading.Event(), threading.Event()

    @property
    def arrived(self) -> bool:
        """All bytes are there, or never will be."""
        return self._arrived.is_set()

    @property
    def checked(self) -> bool:
        """The bytes were found right or wrong."""
        return self._checked.is_set()

    def wait(self) -> None:
        """Until the bytes are there. JitllmError: they could not be read, or were found wrong."""
        self._arrived.wait()
        self._raise()

    def check(self) -> None:
        """Until the bytes are known to be right. JitllmError: they are not."""
        self._checked.wait()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            # A traceback would keep alive the buffers that it passed.
            raise self._error.with_traceback(None)

    def _next(self) -> Segment | None:
        with self._lock:
            if not self.started_s:
                self.started_s = time.perf_counter()
            return next(self._segments, None)

    def _done(self, error: Exception | None) -> None:
        """One request ended; the last to end checks the whole."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self.finished_s = time.perf_counter()
            self._arrived.set()
            self._finish()

    def _finish(self) -> None:
        try:
            if self._error is None and self._verify is not None:
                self._verify()
        except Exception as error:
            self._error = error.with_traceback(None)
        finally:
            # What refers to a frame would keep its memory alive.
            self._segments, self._verify = iter(()), None
            self._checked.set()


class Reader:
    """Reads of one file. Closing it ends those under way with an error."""

    def __init__(self, path: Path, n_threads: int = N_IN_FLIGHT):
        self.path, self.n_threads = path, n_threads
        self.n_bytes = self.n_requests = 0
        """Asked for so far, by the one thread that asks."""
        self._fd, self.direct = _open(path)
        self._asked_direct, self._closing = self.direct, False
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="jitllm-read")
        self._urgent = ThreadPoolExecutor(n_threads, thread_name_prefix="jitllm-urgent")
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        if not self.direct:
            self._tell()

    def read(
        self,
        segments: Sequence[Segment],
        verify: Callable[[], None] | None = None,
        urgent: bool = False,
    ) -> Read:
        """Start to read the segments. `verify` raises JitllmError where the bytes are wrong.

        An `urgent` read is for a few small segments that somebody waits for: it does not queue
        behind the pages that are being read ahead.
        """
        read = Read(segments, verify)
        self.n_bytes += read.n_bytes
        self.n_requests += read.n_requests
        pool = self._urgent if urgent else self._pool
        for _ in range(min(self.n_threads, len(segments))):
            pool.submit(self._work, read)
        return read

    def close(self) -> None:
        """End the reads under way, stop the threads, close the file. A second call does nothing."""
        self._closing = True
        self._pool.shutdown(wait=True)
        self._urgent.shutdown(wait=True)
        self._close_fd()

    def _work(self, read: Read) -> None:
        while (segment := read._next()) is not None:
            error = None
            try:
                self._fill(*segment)
            except OSError as failure:
                error = JitllmError(f"{self.path} cannot be read: {failure.strerror}")
            except Exception as failure:  # a waiter must hear of anything, or it waits for ever
                error = failure.with_traceback(None)
            del segment
            read._done(error)

    def _fill(self, offset: int, view: memoryview) -> None:
        while view:
            if self._closing:
                raise JitllmError(f"{self.path} was closed during a read")
            n_read = self._pread(view, offset)
            # Past a short direct read lies no aligned offset: only the end of a file is unaligned.
            if n_read == 0 or (self.direct and n_read % SECTOR_BYTES):
                raise FormatError(
                    f"{self.path} was cut off while it was in use (no data at byte "
                    f"{offset + n_read})"
                )
            view, offset = view[n_read:], offset + n_read

    def _pread(self, view: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._fd, [view], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._asked_direct:
                raise
        self._drop_direct()
        return os.preadv(self._fd, [view], offset)

    def _drop_direct(self) -> None:
        """Some file systems take O_DIRECT and then refuse to read: take the flag back."""
        with self._lock:
            if self.direct:
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self.direct = False
                self._tell()

    def _tell(self) -> None:
        _log.warning("%s: no direct reads on this file system; using the page cache", self.path)


def page_segments(offset: int, view: memoryview) -> list[Segment]:
    """A read of len(view) bytes at `offset`, in requests of REQUEST_BYTES."""
    return [
        (offset + start, view[start : start + REQUEST_BYTES])
        for start in range(0, len(view), REQUEST_BYTES)
    ]


def _open(path: Path) -> tuple[int, bool]:
    """A file descriptor, and whether its reads are direct."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    for extra in (direct, 0) if direct else (0,):
        try:
            return os.open(path, flags | extra), bool(extra)
        except OSError as error:
            if not extra or error.errno != errno.EINVAL:
                raise FormatError(f"{path} cannot be read: {error.strerror}") from None
    raise AssertionError("a plain open ends the loop")
