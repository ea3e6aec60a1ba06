"""Reads: the file's bytes, past the page cache where that is possible, and one error where not."""

import errno
import logging
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jitllm.errors import FormatError, JitllmError
from jitllm.paging.budget import Ledger
from jitllm.paging.frames import aligned_memory
from jitllm.paging.reader import REQUEST_BYTES, Reader, page_segments
from tests.paging.toys import kernel_read_bytes

N_BYTES = 5 * REQUEST_BYTES + 3 * 4096


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "bytes.jlm"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, N_BYTES, np.uint8).tobytes())
    return path


@pytest.fixture
def view() -> memoryview:
    return memoryview(aligned_memory(N_BYTES, Ledger())[0])


def read_whole(reader: Reader, view: memoryview) -> bytes:
    read = reader.read(page_segments(0, view))
    read.check()
    return bytes(view)


def test_a_page_comes_in_requests_of_a_mebibyte(file, view):
    segments = page_segments(4096, view[: 2 * REQUEST_BYTES + 4096])
    assert [offset for offset, _ in segments] == [4096, 4096 + REQUEST_BYTES, 4096 + 2 * 2**20]
    assert [len(part) for _, part in segments] == [REQUEST_BYTES, REQUEST_BYTES, 4096]


def test_reads_give_the_bytes_of_the_file(file, view):
    reader = Reader(file)
    assert read_whole(reader, view) == file.read_bytes()
    assert (reader.n_bytes, reader.n_requests) == (N_BYTES, 6)
    reader.close()


def test_direct_reads_are_what_the_kernel_counts(file, view):
    reader = Reader(file)
    if not reader.direct or not os.access("/proc/self/io", os.R_OK):
        pytest.skip("no direct reads or no /proc/self/io here")
    counted = []
    for _ in range(5):
        before = kernel_read_bytes()
        read_whole(reader, view)
        counted.append(kernel_read_bytes() - before)
    reader.close()
    if not any(counted):
        pytest.skip("no disk below this file system")
    # The kernel also counts what the interpreter itself reads now and then.
    assert N_BYTES in counted


def test_a_file_system_that_refuses_direct_opening_is_read_through_the_cache(
    file, view, monkeypatch, caplog
):
    real = os.open

    def refuse(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    with caplog.at_level(logging.WARNING):
        reader = Reader(file)
        assert not reader.direct
        assert read_whole(reader, view) == file.read_bytes()
    assert [r.message for r in caplog.records] == [
        f"{file}: no direct reads on this file system; using the page cache"
    ]
    reader.close()


def test_a_file_system_that_refuses_direct_reading_is_read_through_the_cache(
    file, view, monkeypatch, caplog
):
    import fcntl

    real = os.preadv

    def refuse(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    reader = Reader(file)
    with caplog.at_level(logging.WARNING):
        assert read_whole(reader, view) == file.read_bytes()
        assert read_whole(reader, view) == file.read_bytes()
    assert not reader.direct
    assert len(caplog.records) == 1
    reader.close()


def test_short_reads_are_continued(file, view, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, b, offset: real(fd, [b[0][:8192]], offset))
    reader = Reader(file)
    assert read_whole(reader, view) == file.read_bytes()
    reader.close()


@pytest.mark.parametrize("length", [0, 4096, N_BYTES - 4096, N_BYTES - 1])
def test_a_file_cut_off_under_the_reader_is_one_error(file, view, length):
    reader = Reader(file)
    os.truncate(file, length)
    read = reader.read(page_segments(0, view))
    for wait in (read.wait, read.check):
        with pytest.raises(FormatError, match="was cut off while it was in use"):
            wait()
    reader.close()


def test_a_failing_disk_is_one_error_and_the_next_read_works(file, view, monkeypatch):
    reader = Reader(file)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(JitllmError, match="cannot be read: Input/output error"):
            reader.read(page_segments(0, view)).wait()
    assert read_whole(reader, view) == file.read_bytes()
    reader.close()


def failing(*_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_bytes_are_there_before_they_are_known_to_be_right(file, view):
    reader, verified = Reader(file), []

    def verify() -> None:
        time.sleep(0.05)
        verified.append(bytes(view))

    read = reader.read(page_segments(0, view), verify)
    read.wait()
    assert not verified and bytes(view) == file.read_bytes()
    read.check()
    assert verified == [file.read_bytes()]
    reader.close()


def test_what_a_check_finds_wrong_is_raised_by_every_later_wait(file, view):
    reader = Reader(file)

    def verify() -> None:
        raise FormatError("wrong")

    read = reader.read(page_segments(0, view), verify)
    with pytest.raises(FormatError, match="wrong"):
        read.check()
    with pytest.raises(FormatError, match="wrong"):
        read.wait()
    reader.close()


def test_an_urgent_read_does_not_wait_for_those_before_it(file, view, monkeypatch):
    real, row_is_there = os.preadv, threading.Event()

    def patient(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if len(buffers[0]) == REQUEST_BYTES:
            assert row_is_there.wait(10)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", patient)
    reader = Reader(file)
    page = reader.read(page_segments(0, view[: 5 * REQUEST_BYTES]))
    row = view[5 * REQUEST_BYTES :][:4096]
    reader.read([(4096, row)], urgent=True).wait()
    assert bytes(row) == file.read_bytes()[4096:8192] and not page.arrived
    row_is_there.set()
    page.check()
    reader.close()


def test_closing_ends_the_reads_under_way(file, view, monkeypatch):
    real = os.preadv

    def slow(*arguments):
        time.sleep(0.05)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    reader = Reader(file, n_threads=1)
    reads = [reader.read(page_segments(0, view)) for _ in range(3)]
    reader.close()
    reader.close()
    assert all(read.checked for read in reads)
    with pytest.raises(JitllmError, match="was closed"):
        reads[-1].wait()


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(FormatError, match="cannot be read: No such file"):
        Reader(tmp_path / "none.jlm")
