"""The OpenAPI document is true: schemathesis asks for what it allows, and gets what it says."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.server.conftest import Served
from tests.server.fake_engine import FakeEngine
from tests.server.process import serving, write_model


@pytest.fixture
def schema(make: Callable[..., Served]) -> Any:
    app = make(FakeEngine(max_seq=256)).app

    def from_here(environ: dict[str, Any], start: Callable) -> Iterable[bytes]:
        return app(environ | {"REMOTE_ADDR": "127.0.0.1"}, start)

    return schemathesis.openapi.from_wsgi("/openapi.json", from_here)


def test_whatever_the_document_allows_is_answered_as_it_says(schema) -> None:
    # the figures may be asked for as a stream without end
    _try_all(schema, 20)


def test_a_real_server_answers_whatever_its_document_allows(tmp_path) -> None:
    flags = "-load", write_model(tmp_path).name, "-id", "tiny"
    with serving(tmp_path, *flags) as served:
        _try_all(schemathesis.openapi.from_url(f"http://{served.addr}/openapi.json"), 5)
        assert served.client.get("/healthz")
        assert not [line for line in served.said if "ERROR" in line]
        assert served.terminate() == 0


def _try_all(schema: Any, n_examples: int) -> None:
    operations = [o.ok() for o in schema.exclude(path="/jitllm/stats").get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        _try(operation, n_examples)


def _try(operation: Any, n_examples: int) -> None:
    @given(case=operation.as_strategy())
    @settings(max_examples=n_examples, deadline=None, suppress_health_check=list(HealthCheck))
    def answered(case: Any) -> None:
        _check(case)

    answered()


def test_replies_are_as_the_document_says_whole_and_streamed(schema) -> None:
    prompts = {"prompt": "abc"}, {"messages": [{"role": "user", "content": "abc"}]}
    for path, prompt in zip(("/v1/completions", "/v1/chat/completions"), prompts, strict=True):
        for stream, mimetype in ((False, "application/json"), (True, "text/event-stream")):
            response = _check(schema[path]["POST"].Case(body=prompt | {"stream": stream}))
            assert response.status_code == 200
            assert response.headers["content-type"][0].startswith(mimetype)


def _check(case: Any) -> Any:
    response = case.call(headers={"Host": "localhost"})
    checks = [not_a_server_error, response_schema_conformance]
    case.validate_response(response, checks=checks)
    return response
