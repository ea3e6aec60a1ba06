"""`jitllmd serve`: the application on waitress, until SIGTERM or ctrl-C."""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import waitress
from waitress.server import BaseWSGIServer, MultiSocketServer

from jitllm.errors import JitllmError
from jitllm.server.app import Server, create_app
from jitllm.server.protocol import MAX_BODY_BYTES
from jitllm.server.settings import Settings

DRAIN_S = 10.0
"""How long replies under way may go on after SIGTERM."""
_LOOK_S = 0.05
_SPARE_THREADS = 6
"""For the control plane, and to say no when the queue is full."""
_IDLE_S = 60
"""A client that neither sends nor reads for so long is cut off."""
_MAX_UNREAD_BYTES = 64 << 20
"""Of a reply, for a client that does not read: more than a reply can have."""


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until told to stop; `say` hears the address once requests are answered.

    SIGTERM and ctrl-C let replies under way finish, for `DRAIN_S`; a second signal does not.
    """
    settings.check_bind()
    with _log_on_stderr(settings.log_format):
        app = create_app(settings)
        state: Server = app.extensions["jitllm"]
        try:
            httpd = listen(app, settings)
            signals = _StopSignals()
            thread = threading.Thread(target=httpd.run, name="jitllmd-http", daemon=True)
            thread.start()
            say(f"listening at http://{_address(httpd)}")
            while not signals.n_heard:
                time.sleep(_LOOK_S)
            say("draining: replies under way may finish")
            _drain(state, httpd, signals)
        finally:
            state.close()


def listen(app: Any, settings: Settings) -> BaseWSGIServer | MultiSocketServer:
    """`app` at the address of the settings; it answers while `run` does."""
    try:
        return waitress.create_server(
            app,
            host=settings.host,
            port=settings.port,
            threads=settings.n_slots + _SPARE_THREADS,
            # read on while a request is answered: that is how one sees that its client left
            channel_request_lookahead=1,
            channel_timeout=_IDLE_S,
            cleanup_interval=10,
            connection_limit=1000,
            max_request_body_size=4 * MAX_BODY_BYTES,
            outbuf_high_watermark=_MAX_UNREAD_BYTES,
            ident="jitllmd",
            clear_untrusted_proxy_headers=True,
        )
    except (OSError, socket.gaierror) as error:
        why = error.strerror or error
        raise JitllmError(
            f"cannot listen at {settings.addr}: {why}; name another with -addr"
        ) from error


def _address(httpd: BaseWSGIServer | MultiSocketServer) -> str:
    if isinstance(httpd, MultiSocketServer):
        host, port = httpd.effective_listen[0]
    else:
        host, port = httpd.effective_host, httpd.effective_port
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _StopSignals:
    """Counts each SIGTERM and SIGINT from here on.

    No Event, and the main thread has to look: where another thread takes the signal (after a ctrl-Z
    it may), nothing wakes one that waits without end.
    """

    def __init__(self) -> None:
        self.n_heard = 0
        for which in (signal.SIGTERM, signal.SIGINT):
            signal.signal(which, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.n_heard += 1


def _drain(state: Server, httpd: BaseWSGIServer | MultiSocketServer, signals: _StopSignals) -> None:
    """Until replies have ended and have been sent, or time or patience is over."""
    deadline = time.monotonic() + DRAIN_S
    ended = threading.Thread(target=state.drain, args=(DRAIN_S,), daemon=True)
    ended.start()
    while time.monotonic() < deadline and signals.n_heard < 2:
        if not ended.is_alive() and not _has_unsent(httpd):
            return
        time.sleep(_LOOK_S)


def _has_unsent(httpd: BaseWSGIServer | MultiSocketServer) -> bool:
    channels = [c for c in list(_map_of(httpd).values()) if hasattr(c, "total_outbufs_len")]
    return any(channel.requests or channel.total_outbufs_len for channel in channels)


def _map_of(httpd: BaseWSGIServer | MultiSocketServer) -> dict[int, Any]:
    return httpd.map if isinstance(httpd, MultiSocketServer) else httpd._map


class _JsonLines(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        } | getattr(record, "facts", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _TextLines(logging.Formatter):
    """The same facts for people. What a client sent is shown escaped."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        shown = " ".join(f"{key}={_plain(value)}" for key, value in facts.items())
        return f"{super().format(record)} {shown}".rstrip()


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


@contextmanager
def _log_on_stderr(log_format: str) -> Iterator[None]:
    """What is logged inside goes to the stderr that there is now, and afterwards where it went."""
    handler = logging.StreamHandler()
    forms = {
        "json": _JsonLines(),
        "text": _TextLines("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"),
    }
    handler.setFormatter(forms[log_format])
    levels = {"jitllmd": logging.INFO, "jitllm": logging.INFO, "waitress": logging.ERROR}
    loggers = {logging.getLogger(name): level for name, level in levels.items()}
    before = {logger: (logger.handlers, logger.propagate, logger.level) for logger in loggers}
    for logger, level in loggers.items():
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, (handlers, propagate, level) in before.items():
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
