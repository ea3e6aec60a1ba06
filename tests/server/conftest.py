"""Fixtures: an application on the fake engine, and a client of it in this process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from flask import Flask
from flask.testing import FlaskClient
from waitress import wasyncore
from waitress.server import BaseWSGIServer

from jitllm.server import Settings
from jitllm.server.app import create_app
from jitllm.server.serve import listen
from tests.server.fake_engine import FakeEngine


class Served(NamedTuple):
    """An application, the engine behind its model `fake`, and a client."""

    app: Flask
    engine: FakeEngine
    client: FlaskClient

    def post(self, path: str, body: Any, **options: Any):
        # as a server does: to the end, and then closed
        return self.client.post(path, json=body, **{"buffered": True} | options)

    def complete(self, prompt: Any = "abc", **fields: Any):
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0} | fields)

    def chat(self, content: str = "abc", **fields: Any):
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, "temperature": 0} | fields
        return self.post("/v1/chat/completions", body)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fake.jlm").write_bytes(b"not read by the fake engine")
    return tmp_path


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Served]]:
    """Makes a server on the fake engine; keywords are settings, or `engine`."""
    made = []

    def make(engine: FakeEngine | None = None, **settings: Any) -> Served:
        engine = engine or FakeEngine()
        given = {"models": str(folder), "load": ("fake.jlm",)} | settings
        app = create_app(Settings(**given), lambda path, options: engine)
        made.append(app)
        return Served(app, engine, app.test_client())

    yield make
    for app in made:
        app.extensions["jitllm"].close()


@pytest.fixture
def served(make: Callable[..., Served]) -> Served:
    return make()


@contextmanager
def listening(served: Served) -> Iterator[BaseWSGIServer]:
    """The application on a socket, at `effective_port`, served as `jitllmd serve` does."""
    httpd = listen(served.app, Settings(addr="127.0.0.1:0"))
    thread = threading.Thread(target=httpd.run)
    thread.start()
    try:
        yield httpd
    finally:
        httpd.task_dispatcher.shutdown()
        httpd.trigger.pull_trigger(lambda: wasyncore.close_all(httpd._map))
        thread.join(10)
