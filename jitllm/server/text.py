"""Routes of OpenAI's API: text for a prompt, text for a conversation, the models there are."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flask import Blueprint, Response

from jitllm.errors import JitllmError
from jitllm.server.app import gone, json_body, reply, server
from jitllm.server.errors import ApiError, as_api_error
from jitllm.server.jobs import Cancelled, Job, Request
from jitllm.server.metrics import Metrics
from jitllm.server.protocol import read_chat, read_completion
from jitllm.server.reply import Choice
from jitllm.server.shapes import ChatShape, Shape, event, events
from jitllm.server.views import model_object

text = Blueprint("text", __name__)
log = logging.getLogger("jitllmd")
Read = Callable[[dict[str, Any]], Request]
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_CLIENT_GONE = 499
"""nginx's status for a request whose client went away; nobody sees it but the log."""


@text.post("/v1/completions")
def completions() -> Response:
    """What follows a prompt."""
    return _answer(read_completion, Shape, "cmpl")


@text.post("/v1/chat/completions")
def chat_completions() -> Response:
    """The reply to a conversation."""
    return _answer(read_chat, ChatShape, "chatcmpl")


@text.get("/v1/models")
def models() -> Response:
    """The models that are loaded."""
    return reply({"object": "list", "data": [model_object(m) for m in server().models.list()]})


@text.get("/v1/models/<id>")
def model(id: str) -> Response:
    """One loaded model."""
    return reply(model_object(server().models.get(id)))


def _answer(read: Read, shape_class: type[Shape], prefix: str) -> Response:
    slots, metrics = server().slots, server().metrics
    with _counting_refusals(metrics):
        if not slots.acquire(blocking=False):
            raise ApiError(
                429, "too many requests are under way", code="queue_full", retry_after_s=1
            )
    try:
        response = _begin(read, shape_class, prefix)
    except BaseException:
        slots.release()
        raise
    response.call_on_close(slots.release)
    return response


def _begin(read: Read, shape_class: type[Shape], prefix: str) -> Response:
    metrics = server().metrics
    with _counting_refusals(metrics):
        asked = read(json_body())
        model = server().models.asked_for(asked.model, asked.session)
        job = Job(model, asked, gone(), metrics)
    shape = shape_class(
        f"{prefix}-{secrets.token_hex(12)}",
        int(time.time()),
        job.model.id,
        asked.n_logprobs is not None,
    )
    if asked.stream:
        stream = _streamed(job, shape)
        next(stream)  # it has begun, and so counts, should nobody ask for its first event
        response = Response(stream, mimetype="text/event-stream", headers=_STREAM_HEADERS)
        response.call_on_close(job.close)
        return response
    return _whole(job, shape)


def _whole(job: Job, shape: Shape) -> Response:
    with _counting(job) as count:
        choices = [Choice(index) for index in range(job.n_choices)]
        try:
            for delta in job.deltas():
                choices[delta.index].add(delta)
        except Cancelled:
            return Response(status=_CLIENT_GONE)
        count("ok")
        return reply(shape.whole(choices, job.usage, job.cost))


def _streamed(job: Job, shape: Shape) -> Iterator[bytes]:
    usage = (lambda: job.usage) if job.request.include_usage else None
    with _counting(job) as count:
        yield b""
        try:
            for data in events(
                shape, job.deltas(), job.n_choices, cost=lambda: job.cost, usage=usage
            ):
                if data.endswith(b"[DONE]\n\n"):
                    count("ok")
                yield data
        except Cancelled:
            return
        except Exception as error:
            # whatever it is: the status has been sent, and what is left is to say it in the stream
            count("failed")
            if not isinstance(error, JitllmError):
                log.exception("a stream failed", exc_info=error)
            yield event(as_api_error(error).body())


@contextmanager
def _counting_refusals(metrics: Metrics) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # all of them are answered, see `app._failed`
        metrics.count("refused" if as_api_error(error).status < 500 else "failed")
        raise


@contextmanager
def _counting(job: Job) -> Iterator:
    """Closes the job and counts how it ended; unless told otherwise, its client went away."""
    outcome = "cancelled"

    def ended(how: str) -> None:
        nonlocal outcome
        outcome = how

    try:
        yield ended
    except Exception:  # not GeneratorExit, which is how a client that left ends a stream
        outcome = "failed"
        raise
    finally:
        job.close()
        job.metrics.count(outcome)
        job.metrics.saw(job.figures)
