"""Routes of the control plane: one resource each, and what cannot change is not a POST."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from flask import Blueprint, Response, request

from jitllm.paging.budget import peak_rss_bytes, rss_bytes
from jitllm.server.app import Server, json_body, reply, server
from jitllm.server.bodies import BUDGET, LOAD, MOVE, NOTHING, PLACEMENT, SESSION, read
from jitllm.server.errors import ApiError, bad_value
from jitllm.server.models import Model
from jitllm.server.placing import follow
from jitllm.server.sessions import OpenSession
from jitllm.server.shapes import event
from jitllm.server.views import (
    budget_object,
    devices_object,
    model_object,
    model_stats,
    placement_object,
    residency_object,
)

control = Blueprint("control", __name__)


@control.get("/healthz")
def healthz() -> Response:
    """Whether requests are answered."""
    if server().draining:
        raise ApiError(503, "the server is shutting down", code="unavailable")
    return reply({"status": "ok", "models": [m.id for m in server().models.list()]})


@control.get("/metrics")
def metrics() -> Response:
    """Figures for Prometheus."""
    return Response(server().metrics.render(), mimetype="text/plain; version=0.0.4")


# Models


@control.get("/jitllm/models")
def models() -> Response:
    """What is loaded, and what could be."""
    files = [{"file": name, "bytes": size} for name, size in server().models.files()]
    loaded = [model_object(m) for m in server().models.list()]
    return reply({"object": "list", "data": loaded, "files": files})


@control.post("/jitllm/models")
def load() -> Response:
    """Load a file of the models' folder."""
    given = read(json_body(), LOAD, required=("file",))
    file, id = given.pop("file"), given.pop("id", None)
    options = dataclasses.replace(server().settings.options, **given)
    return reply(model_object(server().models.load(file, id, options)), 201)


@control.get("/jitllm/models/<id>")
def model(id: str) -> Response:
    """One loaded model."""
    return reply(model_object(_model(id)))


@control.delete("/jitllm/models/<id>")
def unload(id: str) -> Response:
    """Put a model away."""
    server().models.unload(id)
    return reply({"id": id, "object": "model", "deleted": True})


@control.get("/jitllm/models/<id>/budget")
def budget(id: str) -> Response:
    """The budget of a model and what it comes to."""
    return reply(budget_object(_model(id)))


@control.put("/jitllm/models/<id>/budget")
def set_budget(id: str) -> Response:
    """Another budget, from the next token on."""
    model = _model(id)
    wanted = read(json_body(), BUDGET, required=("maxmem",))["maxmem"]
    applied = model.scheduler.call(lambda: model.engine.set_budget(wanted))
    return reply(budget_object(model) | {"applied": dataclasses.asdict(applied)})


@control.get("/jitllm/models/<id>/residency")
def residency(id: str) -> Response:
    """Which blocks are in memory now."""
    return reply(residency_object(_model(id)))


@control.get("/jitllm/models/<id>/placement")
def placement(id: str) -> Response:
    """Where every block is, and why."""
    return reply(placement_object(_model(id)))


@control.put("/jitllm/models/<id>/placement")
def replace_placement(id: str) -> Response:
    """Blocks to where a `-placement` map has them."""
    return _replace(_model(id))


@control.post("/jitllm/models/<id>/placement/moves")
def move(id: str) -> Response:
    """A range of blocks to a device, with the KV of every session."""
    return _move(_model(id))


# Sessions


@control.get("/jitllm/sessions")
def sessions() -> Response:
    """All sessions of all models."""
    found = [s.as_object() for m in server().models.list() for s in m.sessions.list()]
    return reply({"object": "list", "data": found})


@control.post("/jitllm/sessions")
def new_session() -> Response:
    """Another session."""
    name = read(json_body(), SESSION).get("model")
    return reply(server().models.get(name).sessions.new().as_object(), 201)


@control.get("/jitllm/sessions/<id>")
def session(id: str) -> Response:
    """One session."""
    return reply(_session(id)[1].as_object())


@control.delete("/jitllm/sessions/<id>")
def close_session(id: str) -> Response:
    """Put a session away."""
    model, session = _session(id)
    model.sessions.close(session)
    return reply({"id": id, "object": "session", "deleted": True})


@control.post("/jitllm/sessions/<id>/reset")
def reset_session(id: str) -> Response:
    """Forget the conversation and keep the session."""
    read(json_body(), NOTHING)
    session = _session(id)[1]
    session.reset()
    return reply(session.as_object())


@control.get("/jitllm/sessions/<id>/placement")
def session_placement(id: str) -> Response:
    """Where the session's blocks and their KV are."""
    return reply(placement_object(_session(id)[0]))


@control.put("/jitllm/sessions/<id>/placement")
def replace_session_placement(id: str) -> Response:
    """Blocks to where a map has them, as for the session's model."""
    return _replace(_session(id)[0])


@control.post("/jitllm/sessions/<id>/placement/moves")
def move_session(id: str) -> Response:
    """The same as for the session's model: blocks are shared, KV goes with them."""
    return _move(_session(id)[0])


# Figures


@control.get("/jitllm/devices")
def devices() -> Response:
    """The memory that can be spent."""
    return reply({"object": "list", "data": devices_object(server().models.list())})


@control.get("/jitllm/stats")
def stats() -> Response:
    """Everything that is counted; with `watch`, again every so many seconds, as a stream."""
    wanted = request.args.get("watch")
    if wanted is None:
        return reply(_stats(server()))
    try:
        seconds = float(wanted)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise bad_value("watch", "watch has to be a number of seconds from 0.1 to 3600")
    watchers = server().watchers
    if not watchers.acquire(blocking=False):
        raise ApiError(429, "too many watch already", code="too_many_watchers")
    response = Response(_watch(server(), seconds), mimetype="text/event-stream")
    response.call_on_close(watchers.release)
    return response


def _watch(server: Server, seconds: float) -> Iterator[bytes]:
    while not server.draining:
        yield event(_stats(server))
        time.sleep(seconds)


def _stats(server: Server) -> dict[str, Any]:
    return {
        "uptime_s": round(time.time() - server.started_s, 3),
        "rss_bytes": rss_bytes(),
        "peak_rss_bytes": peak_rss_bytes(),
        "requests": server.metrics.counts(),
        "models": {m.id: model_stats(m) for m in server.models.list()},
    }


def _model(id: str) -> Model:
    return server().models.get(id)


def _session(id: str) -> tuple[Model, OpenSession]:
    for model in server().models.list():
        if (found := model.sessions.find(id)) is not None:
            return model, found
    raise ApiError(
        404,
        f"there is no session {id[:80]!r}; it was closed, or its model was put away",
        code="session_not_found",
    )


def _move(model: Model) -> Response:
    given = read(json_body(), MOVE, required=("first", "last", "to"))
    first, last, to = given["first"], given["last"], given["to"]
    model.scheduler.call(lambda: model.engine.move(first, last, to))
    return reply(placement_object(model))


def _replace(model: Model) -> Response:
    text = read(json_body(), PLACEMENT, required=("placement",))["placement"]

    model.scheduler.call(lambda: follow(model.engine, text))
    return reply(placement_object(model))
