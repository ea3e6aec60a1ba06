"""The OpenAPI document is true: schemathesis asks for what it allows, and gets what it says."""

from collections.abc import Callable, Iterable
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.server.conftest import Served
from tests.server.fake_engine import FakeEngine


def test_whatever_the_document_allows_is_answered_as_it_says(make: Callable[..., Served]) -> None:
    app = make(FakeEngine(max_seq=256)).app

    def from_here(environ: dict[str, Any], start: Callable) -> Iterable[bytes]:
        return app(environ | {"REMOTE_ADDR": "127.0.0.1"}, start)

    schema = schemathesis.openapi.from_wsgi("/openapi.json", from_here)
    # the figures may be asked for as a stream without end
    operations = [o.ok() for o in schema.exclude(path="/jitllm/stats").get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        _try(operation)


def _try(operation: Any) -> None:
    @given(case=operation.as_strategy())
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    def answered(case: Any) -> None:
        response = case.call(headers={"Host": "localhost"})
        checks = [not_a_server_error, response_schema_conformance]
        case.validate_response(response, checks=checks)

    answered()
