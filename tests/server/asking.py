"""What several tests of the server need: reading refusals and streams, waiting."""

import json
import threading
from collections.abc import Callable
from typing import Any


def error_of(response) -> dict:
    """The error object, which every refusal has to be."""
    body = response.get_json()
    assert set(body) == {"error"}
    assert {"message", "type", "param", "code"} <= set(body["error"])
    return body["error"]


def chunks_of(response: Any) -> list[dict]:
    """The events of a stream, which have to end in [DONE]."""
    assert response.mimetype == "text/event-stream"
    events = response.get_data(as_text=True).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls, for five seconds at most."""
    for _ in range(500):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to that")
