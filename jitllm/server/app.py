"""The WSGI application: `create_app(settings)`. Routes are thin; what they call is elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from flask import Flask, Response, current_app, g, request
from werkzeug.exceptions import HTTPException

from jitllm.errors import JitllmError
from jitllm.server.errors import ApiError, as_api_error, of_http
from jitllm.server.metrics import Metrics
from jitllm.server.models import Models, OpenEngine, open_engine
from jitllm.server.protocol import MAX_BODY_BYTES, read_body
from jitllm.server.security import Guard
from jitllm.server.settings import Settings
from jitllm.server.shapes import dump

log = logging.getLogger("jitllmd")
_N_WATCHERS = 4


class Server:
    """What the routes of one application share."""

    def __init__(self, settings: Settings, open_engine: OpenEngine):
        self.settings, self.guard = settings, Guard(settings)
        self.models = Models(settings, open_engine)
        self.metrics = Metrics(self.models.list)
        self.started_s = time.time()
        self.draining = False
        """Whether requests for text are refused: the server is about to end."""
        self.slots = threading.BoundedSemaphore(settings.n_slots)
        """Requests for text under way, of all models: each occupies a thread of the server."""
        self.watchers = threading.BoundedSemaphore(_N_WATCHERS)
        """Streams of figures: each occupies a thread for as long as it is watched."""

    def load(self) -> None:
        """Load what the settings name. JitllmError where that cannot be."""
        ids = [*self.settings.id, *[None] * len(self.settings.load)]
        for file, id in zip(self.settings.load, ids, strict=False):
            self.models.load(file, id)

    def drain(self, timeout_s: float) -> None:
        """Refuse what is new, and wait for what is under way."""
        self.draining = True
        self.models.drain(timeout_s)

    def close(self) -> None:
        """Give everything back."""
        self.draining = True
        self.models.close()


def create_app(settings: Settings, open_engine: OpenEngine = open_engine) -> Flask:
    """The application, with the models of the settings loaded.

    `app.extensions["jitllm"]` is its `Server`; close it after use.
    """
    from jitllm.server.control import control
    from jitllm.server.openapi import document
    from jitllm.server.text import text

    app = Flask("jitllm.server", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    app.extensions["jitllm"] = Server(settings, open_engine)
    app.register_blueprint(text)
    app.register_blueprint(control)
    app.add_url_rule("/openapi.json", view_func=lambda: reply(document()), endpoint="openapi")
    app.before_request(_check)
    app.after_request(_finish)
    app.register_error_handler(Exception, _failed)
    app.extensions["jitllm"].load()
    return app


def server() -> Server:
    """The server that the present request belongs to."""
    return current_app.extensions["jitllm"]


def reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as JSON, on a line of its own."""
    return Response(dump(value) + b"\n", status, dict(headers or {}), mimetype="application/json")


def json_body() -> dict[str, Any]:
    """The request's JSON object. ApiError where it is none."""
    return read_body(request.get_data(cache=False))


def gone() -> Callable[[], bool]:
    """Tells, from any thread, whether the client of the present request has gone away.

    waitress says so by itself; under Flask's own server one looks at the socket; under others a
    client that left is noticed when something is sent to it.
    """
    told = request.environ.get("waitress.client_disconnected")
    socket = request.environ.get("werkzeug.socket")
    if told is None and socket is not None:
        return lambda: _has_ended(socket)
    return told or (lambda: False)


def _has_ended(socket: Any) -> bool:
    import socket as module

    try:
        return socket.recv(1, module.MSG_PEEK | module.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _check() -> Response | None:
    g.begun_s = time.perf_counter()
    server().guard.check(
        request.method,
        request.path,
        request.headers,
        request.remote_addr or "",
        request.mimetype,
    )
    if request.method == "OPTIONS":
        return Response(status=204)
    return None


def _finish(response: Response) -> Response:
    response.headers["X-Content-Type-Options"] = "nosniff"
    if server().settings.cors_origin:
        response.headers.add("Vary", "Origin")
        response.headers.update(server().guard.cors(request.headers.get("Origin", "")))
    facts = {"method": request.method, "path": request.path, "status": response.status_code}
    begun_s = g.get("begun_s", time.perf_counter())

    def say() -> None:
        took = {"ms": round(1000 * (time.perf_counter() - begun_s), 1)}
        log.info("request", extra={"facts": facts | took})

    response.call_on_close(say)
    return response


def _failed(error: Exception) -> Response:
    """Any error as OpenAI's error object."""
    if isinstance(error, HTTPException):
        told = of_http(error.code or 500, _in_words(error))
        return reply(told.body(), told.status, _allowed(error))
    if not isinstance(error, JitllmError):
        log.exception("a request failed", exc_info=error)
    told = as_api_error(error)
    return reply(told.body(), told.status, _headers(told))


def _in_words(error: HTTPException) -> str:
    path = repr(request.path[:80])
    known = {404: f"there is nothing at {path}", 405: f"{request.method} is not for {path}"}
    return known.get(error.code or 500) or error.description or error.name


def _headers(error: ApiError) -> dict[str, str]:
    return {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}


def _allowed(error: HTTPException) -> dict[str, str]:
    methods = getattr(error, "valid_methods", None)
    return {"Allow": ", ".join(methods)} if methods else {}
