"""What a MODEL argument may be: a container, a GGUF, an https URL, or a name in `catalog.yaml`.

What is not a container becomes one in the cache, once. Nothing in the cache is ever half written:
downloads and conversions happen in a scratch folder that belongs to this process.
"""

import contextlib
import difflib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import psutil
import yaml

from jitllm import __version__
from jitllm.cache import cache_dir
from jitllm.download import Report, download_packages, download_url, file_sha256
from jitllm.errors import JitllmError, NoRoomError, UsageError
from jitllm.gguf_file import MAGIC, shard_names
from jitllm.units import format_size

_STEM_BYTES = 128
"""What a container keeps of its source's name: a file name has 255 bytes at most."""
Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""progress(what, done_bytes, total_bytes); a total of 0 is not known."""


@dataclass(frozen=True)
class CatalogEntry:
    """One model of the catalog."""

    name: str
    summary: str
    licence: str
    n_bytes: int
    sha256: str
    packages: tuple[str, ...] = ()
    """`name==version` of the wheels that hold the GGUF, or its parts in order."""
    url: str = ""
    """Where the GGUF is, when it is not in packages."""
    notice: str = ""
    """What the licence asks to be shown."""

    @property
    def source(self) -> str:
        """Where it comes from, for people."""
        return self.url or "PyPI: " + ", ".join(self.packages)


@cache
def catalog() -> dict[str, CatalogEntry]:
    """The catalog by name, in the order of its file."""
    rows = yaml.safe_load(files("jitllm").joinpath("catalog.yaml").read_text("utf-8"))
    return {
        name: CatalogEntry(name, **{**row, "packages": tuple(row.get("packages", ()))})
        for name, row in rows.items()
    }


def _quiet(*_: object) -> None:
    """Says nothing and shows no progress."""


def resolve(model: str, *, say: Say = _quiet, progress: Progress = _quiet) -> Path:
    """The container that `model` means; made in the cache, and said so, where there is none yet.

    A container is its own path and is not opened here. JitllmError for what cannot be fetched or
    converted, with the catalog's names where `model` is nothing at all.
    """
    if Path(model).is_file() and not is_gguf(Path(model)):
        return Path(model)
    target = cache_dir() / "containers" / _container_name(model)
    if target.exists():
        return target
    from jitllm.convert import convert

    with local_gguf(model, say=say, progress=progress) as gguf, _scratch() as folder:
        say(f"converting {gguf.name} once, into {target}")
        convert(gguf, folder / target.name, progress=progress)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / target.name, target)
    return target


@contextlib.contextmanager
def local_gguf(model: str, *, say: Say = _quiet, progress: Progress = _quiet) -> Iterator[Path]:
    """The GGUF that `model` means (a path, an https URL, a catalog name), here for the `with`.

    What had to be downloaded is gone afterwards; `fetch` keeps it.
    """
    entry = catalog().get(model)
    if Path(model).is_file():
        yield Path(model)
    elif entry and (path := kept(model)):
        yield path
    elif entry or _is_url(model):
        with _scratch() as folder:
            yield (
                _download(entry, folder, say, progress)
                if entry
                else _download_shards(model, folder, say, progress)
            )
    else:
        raise JitllmError(_unknown(model))


def kept(name: str) -> Path | None:
    """The GGUF of a catalog entry where `fetch` has left it in the cache, None where it has not."""
    path = _kept(catalog()[name])
    return path if path.exists() else None


def fetch(name: str, *, say: Say = _quiet, progress: Progress = _quiet) -> Path:
    """The GGUF of a catalog entry, kept in the cache."""
    if name not in catalog():
        raise JitllmError(_unknown(name))
    entry = catalog()[name]
    if not _kept(entry).exists():
        with _scratch() as folder:
            path = _download(entry, folder, say, progress)
            _kept(entry).parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, _kept(entry))
    return _kept(entry)


def _kept(entry: CatalogEntry) -> Path:
    return cache_dir() / "gguf" / f"{entry.name}-{entry.sha256[:16]}.gguf"


def is_gguf(path: Path) -> bool:
    """Whether to read a file as a GGUF: it begins as one, or has the name of one and does not begin
    as a container."""
    from jitllm.paging.layout import MAGIC as CONTAINER_MAGIC

    try:
        with open(path, "rb") as file:
            start = file.read(len(CONTAINER_MAGIC))
        named = path.suffix.lower() == ".gguf"
        return start.startswith(MAGIC) or (named and start != CONTAINER_MAGIC)
    except OSError as error:
        raise JitllmError(f"{path} cannot be read: {error.strerror or error}") from error


def _container_name(model: str) -> str:
    """A name in the cache that changes when the source does, or what is made of it."""
    from jitllm.paging.layout import VERSION

    path, entry, key = Path(model), catalog().get(model), model
    if path.is_file():
        shards = [path.with_name(name) for name in shard_names(path.name)]
        stats = [(str(shard.resolve()), shard.stat()) for shard in shards if shard.exists()]
        key = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    elif entry:
        key = entry.sha256
    stem = Path(_url_file_name(model)).stem if _is_url(model) else path.stem
    digest = hashlib.sha256(os.fsencode(f"{__version__} {VERSION} {key}")).hexdigest()
    short = os.fsencode(stem)[:_STEM_BYTES].decode("utf-8", "ignore")
    return f"{short}-{digest[:16]}.jlm"


# Downloads


def _download(entry: CatalogEntry, folder: Path, say: Say, progress: Progress) -> Path:
    """The GGUF of `entry`, in `folder`, with the bytes the catalog says."""
    say(
        f"fetching {entry.name}, {format_size(entry.n_bytes)}, licence: {entry.licence}"
        + (f"; {entry.notice}" if entry.notice else "")
    )
    _check_room(folder, entry)
    report = _labelled(progress, f"fetching {entry.name}")
    path = folder / f"{entry.name}.gguf"
    if entry.packages:
        os.replace(download_packages(entry.packages, folder, entry.n_bytes, report), path)
    else:
        download_url(entry.url, path, report)
    if (digest := file_sha256(path)) != entry.sha256:
        raise JitllmError(
            f"{entry.source} is not the file the catalog knows as {entry.name}: its sha256 is "
            f"{digest}, expected {entry.sha256}; nothing was kept"
        )
    return path


def _check_room(folder: Path, entry: CatalogEntry) -> None:
    """NoRoomError where there is too little: pip calls a full disk a bad connection."""
    needed, free = entry.n_bytes * (1 + bool(entry.packages)), shutil.disk_usage(folder).free
    if free < needed:
        raise NoRoomError(
            f"fetching {entry.name} takes {format_size(needed)} and the disk has "
            f"{format_size(free)} free"
        )


def _download_shards(url: str, folder: Path, say: Say, progress: Progress) -> Path:
    """The GGUF behind `url`; where its name is that of a shard, all shards of the set."""
    if urlsplit(url).scheme != "https":
        raise UsageError(f"{url} is not https; only https URLs are downloaded")
    name = _url_file_name(url)
    if not name.endswith(".gguf"):
        raise UsageError(f"{url} does not end in the name of a .gguf file")
    say(f"fetching {url}")
    base, query = re.fullmatch(r"([^?#]*/)[^?#/]*(.*)", url, re.DOTALL).groups()
    for shard in shard_names(name):
        report = _labelled(progress, f"fetching {shard}")
        download_url(base + quote(shard) + query, folder / shard, report)
    return folder / name


def _is_url(model: str) -> bool:
    return "://" in model


def _url_file_name(url: str) -> str:
    return unquote(urlsplit(url).path.rpartition("/")[2]).replace("/", "_")


def _labelled(progress: Progress, what: str) -> Report:
    return lambda done, total: progress(what, done, total)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder in the cache for this `with`; also clears those of processes that were killed."""
    parent = cache_dir() / "scratch"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.iterdir():
            owner = stale.name.partition("-")[0]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(stale, ignore_errors=True)
        folder = tempfile.TemporaryDirectory(dir=parent, prefix=f"{os.getpid()}-")
    except OSError as error:
        raise JitllmError(
            f"the cache {cache_dir()} cannot be written: {error.strerror}; set JITLLM_CACHE to a "
            "folder that can"
        ) from error
    with folder as name:
        try:
            yield Path(name)
        except NoRoomError as error:
            raise JitllmError(
                f"the cache is full: {error.what}; free some room, or set JITLLM_CACHE to a folder "
                f"on another disk than {cache_dir()}"
            ) from error


def _unknown(model: str) -> str:
    """What to say of a model that is neither here nor in the catalog."""
    names = list(catalog())
    low = model.lower()
    near = [name for name in names if low and (low in name or name in low)]
    near = near or difflib.get_close_matches(low, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{model!r} is neither a file nor in the catalog ({', '.join(names)}){hint}"
