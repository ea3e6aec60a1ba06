"""What an HTTP client is told when something fails: OpenAI's error object, one sentence each.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from http import HTTPStatus
from typing import Any

from jitllm.errors import (
    BudgetError,
    ChatTemplateError,
    DeviceError,
    JitllmError,
    SettingError,
    UnsupportedError,
    UsageError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


class ApiError(JitllmError):
    """A request that is answered with `status`; `code` and `param` say what was wrong with what."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        figures: dict[str, int] | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s = retry_after_s
        self.figures = figures or {}
        """Numbers of the message, for programs: further keys of the error object."""

    @property
    def type(self) -> str:
        """OpenAI's class of the error, which follows from the status."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else _TYPES[400])

    def body(self) -> dict[str, Any]:
        """The JSON object that is the reply."""
        facts = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": facts | self.figures}


def bad_value(param: str, message: str) -> ApiError:
    """A 400 for a field that cannot mean anything."""
    return ApiError(400, message, code="invalid_value", param=param)


def unsupported(param: str, message: str) -> ApiError:
    """A 400 for a field that means something, but not to this server."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


_STATUS_OF: tuple[tuple[type[JitllmError], int, str], ...] = (
    (BudgetError, 409, "budget_too_small"),
    (DeviceError, 400, "invalid_device"),
    (ChatTemplateError, 400, "invalid_messages"),
    (UnsupportedError, 400, "unsupported"),
    (UsageError, 400, "invalid_value"),
)


def as_api_error(error: Exception) -> ApiError:
    """Any failure as what the client is told; what nobody put into words is a bare 500."""
    if isinstance(error, ApiError):
        return error
    param = error.name if isinstance(error, SettingError) else None
    for kind, status, code in _STATUS_OF:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code, param=param)
    if isinstance(error, JitllmError):
        return ApiError(500, str(error), code="failed")
    return ApiError(500, "the server failed in a way that it has no words for; see its log")


def of_http(status: int, description: str) -> ApiError:
    """An error of the web framework's own: no such route, no such method, a body too large."""
    return ApiError(status, description, code=HTTPStatus(status).name.lower())
