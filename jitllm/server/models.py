"""The models of a server: which are loaded, under which names, from which files."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jitllm.errors import FormatError
from jitllm.scheduler import Scheduler
from jitllm.server.errors import ApiError
from jitllm.server.sessions import Sessions
from jitllm.server.settings import ModelOptions, Settings

if TYPE_CHECKING:
    from jitllm.engine import Engine

OpenEngine = Callable[[Path, ModelOptions], "Engine"]
FILE_ENDINGS = (".jlm", ".gguf")
DRAIN_S = 10.0
"""How long replies under way may go on when their model is put away."""
_N_NAMED = 10
"""Of the files in the folder, in an error."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def open_engine(path: Path, options: ModelOptions) -> Engine:
    """The engine for a file, as `options` have it."""
    from jitllm.engine import Engine
    from jitllm.placement.profile import load_profile
    from jitllm.placement.rules import Profile, override

    profile = override(
        load_profile(options.profile) if options.profile else Profile(),
        devices=options.devices,
        placement=options.placement,
        gpu_layers=options.gpu_layers,
        kv_dtype=options.kv,
    )
    return Engine.open(
        path,
        maxmem=options.maxmem,
        profile=profile,
        max_seq=options.max_seq,
        threads=options.threads,
        process_limit=options.process_limit,
    )


@dataclass(frozen=True, eq=False)
class Model:
    """One loaded model, and everything that belongs to it."""

    id: str
    path: Path
    engine: Engine
    scheduler: Scheduler
    sessions: Sessions
    created: int

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Let what runs finish, for so long, and give everything back."""
        self.scheduler.drain(drain_s)
        self.scheduler.close()
        self.sessions.close_all()
        self.engine.close()


class Models:
    """Loads, finds and puts away. Thread-safe; a load or an unload does not hold up the others."""

    def __init__(self, settings: Settings, open_engine: OpenEngine):
        self._settings, self._open = settings, open_engine
        self._root = settings.folder
        self._loaded: dict[str, Model] = {}
        self._busy: set[str] = set()
        self._lock = threading.Lock()

    def list(self) -> list[Model]:
        """The loaded models, the oldest first."""
        with self._lock:
            return list(self._loaded.values())

    def get(self, name: str | None) -> Model:
        """The model called `name`; None means the one there is. ApiError where there is none."""
        with self._lock:
            if name is None and len(self._loaded) == 1:
                return next(iter(self._loaded.values()))
            if name in self._loaded:
                return self._loaded[name]
            ids = ", ".join(self._loaded) or "none"
        if name is None:
            raise ApiError(
                400,
                f"model is missing; loaded are: {ids}",
                code="missing_required_parameter",
                param="model",
            )
        raise ApiError(
            404,
            f"the model {name[:80]!r} is not loaded; loaded are: {ids}",
            code="model_not_found",
            param="model",
        )

    def asked_for(self, name: str | None, session: str | None) -> Model:
        """The model of a request, which may name it or leave that to its session."""
        if name is None and session is not None:
            for model in self.list():
                if model.sessions.find(session) is not None:
                    return model
        return self.get(name)

    def files(self) -> list[tuple[str, int]]:
        """(name, bytes) of what could be loaded: containers and GGUFs inside the folder."""
        found = []
        for path in sorted(self._root.rglob("*")):
            name = path.relative_to(self._root).as_posix()
            if path.suffix in FILE_ENDINGS and self._inside(name):
                found.append((name, path.stat().st_size))
        return found

    def load(self, file: str, id: str | None = None, options: ModelOptions | None = None) -> Model:
        """Load `file` of the folder under a name. ApiError for a name that is taken or is none."""
        path = self._inside(file)
        if path is None:
            raise ApiError(
                404,
                f"there is no model file {file[:80]!r}; there are: {self._names()}",
                code="file_not_found",
                param="file",
            )
        id = id or re.sub(r"[^A-Za-z0-9._-]+", "-", Path(file).stem).strip("-._") or "model"
        if not _ID.fullmatch(id):
            raise ApiError(
                400,
                f"id has to be of up to 64 letters, digits, dots and dashes, but is {id[:80]!r}",
                code="invalid_value",
                param="id",
            )
        self._reserve(id)
        try:
            model = self._make(id, path, options or self._settings.options)
            with self._lock:
                self._loaded[id] = model
            return model
        except FormatError as error:
            raise ApiError(400, str(error), code="invalid_file", param="file") from error
        finally:
            with self._lock:
                self._busy.discard(id)

    def unload(self, id: str) -> None:
        """Put a model away: from now on it is not found, and what runs may finish."""
        self.get(id)
        with self._lock:
            model = self._loaded.pop(id, None)
        if model is not None:
            model.close()
            del model
            _give_back()

    def drain(self, timeout_s: float) -> None:
        """Have every model take no more requests, and wait until theirs have ended."""
        deadline = time.monotonic() + timeout_s
        for model in self.list():
            model.scheduler.drain(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Put everything away, and wait for nothing."""
        for model in self.list():
            with self._lock:
                del self._loaded[model.id]
            model.close(drain_s=0)

    def _names(self) -> str:
        names = [name for name, _ in self.files()]
        more = f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else ""
        return ", ".join(names[:_N_NAMED]) + more or "none"

    def _reserve(self, id: str) -> None:
        with self._lock:
            if id in self._loaded or id in self._busy:
                raise ApiError(
                    409,
                    f"a model is called {id!r} already; give this one another id",
                    code="model_exists",
                    param="id",
                )
            self._busy.add(id)

    def _make(self, id: str, path: Path, options: ModelOptions) -> Model:
        engine = self._open(path, options)
        try:
            scheduler = Scheduler(
                engine,
                n_rows=self._settings.sessions,
                max_queue=self._settings.max_queue,
                prefix_cache_bytes=self._prefix_cache_bytes(engine),
            )
        except BaseException:
            engine.close()
            raise
        sessions = Sessions(id, engine, scheduler, self._settings.sessions)
        return Model(id, path, engine, scheduler, sessions, int(time.time()))

    def _prefix_cache_bytes(self, engine: Engine) -> int:
        if self._settings.prefix_cache is not None:
            return self._settings.prefix_cache
        kv_bytes, spare_bytes = engine.memory_report().kv_bytes, engine.spare_bytes
        return kv_bytes if spare_bytes is None else min(kv_bytes, spare_bytes)

    def _inside(self, file: str) -> Path | None:
        """The file of that name, if it is one and is in the folder, links followed."""
        if "\0" in file or "\\" in file:
            return None
        try:
            root = self._root.resolve()
            path = (root / file).resolve(strict=True)
            inside = path.is_relative_to(root) and path.is_file()
        except (OSError, RuntimeError):
            return None
        return path if inside and path.suffix in FILE_ENDINGS else None


def _give_back() -> None:
    """Have memory that nobody refers to return to the system. glibc keeps it for later otherwise:
    100 MB after a minute of many requests to a model of one."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
