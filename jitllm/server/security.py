"""Who may ask for what: checks that come before routing. Pure functions, and `Guard` that calls
them in order.

A browser is made to attack a server on loopback in two ways: a page names it by a host name of its
own (the Host check refuses that), or posts to it without reading the reply (which takes a content
type that is not ours). No page may read a reply unless its origin was allowed by name.
"""

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from jitllm.server.errors import ApiError
from jitllm.server.settings import Settings, default_names, is_loopback

_WRITES = ("POST", "PUT", "PATCH", "DELETE")
_WITH_BODY = ("POST", "PUT", "PATCH")
_OPEN_PATHS = ("/healthz",)
CORS_HEADERS = "authorization, content-type"


def host_of(header: str) -> str | None:
    """The host of a Host header, in lower case and without its port; None where it is none."""
    if not header or any(char in header for char in "/\\@?# \t"):
        return None
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port  # raises where it is no number
        return parts.hostname
    except ValueError:
        return None


def names_of(settings: Settings) -> frozenset[str]:
    """The names under which the server may be addressed, beside those of loopback."""
    names = {settings.host, *settings.allow_host}
    if settings.host in ("0.0.0.0", "::"):
        names |= {*default_names()}
    return frozenset(name.lower().strip("[]") for name in names)


def bearer(header: str) -> str:
    """The key in an Authorization header, empty where there is none."""
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def same_key(given: str, expected: str) -> bool:
    """Whether two keys are equal, in a time that does not say where they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())


class Guard:
    """The checks of one server."""

    def __init__(self, settings: Settings):
        self._settings, self._names = settings, names_of(settings)

    def check(
        self, method: str, path: str, headers: Mapping[str, str], peer: str, content_type: str
    ) -> None:
        """ApiError where the request may not go on."""
        self._check_host(headers.get("Host", ""))
        if not self._settings.api_key and not is_loopback(peer):
            raise ApiError(
                403, "without an api key only clients on this machine are answered", code="peer"
            )
        if method == "OPTIONS" or path in _OPEN_PATHS:
            return
        key = bearer(headers.get("Authorization", ""))
        if self.is_control_write(method, path):
            self._check_admin(key, peer)
        else:
            self._check_key(key)
        if method in _WITH_BODY and content_type != "application/json":
            raise ApiError(
                415,
                f"the content type has to be application/json, but is {content_type[:80]!r}",
                code="unsupported_media_type",
            )

    def is_control_write(self, method: str, path: str) -> bool:
        """Whether it changes the server for everybody. Sessions are the client's own."""
        own = path == "/jitllm/sessions" or (
            path.startswith("/jitllm/sessions/") and "/placement" not in path
        )
        return method in _WRITES and path.startswith("/jitllm/") and not own

    def cors(self, origin: str) -> dict[str, str]:
        """Headers for a page of `origin`; none unless it was allowed."""
        if origin not in self._settings.cors_origin:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE",
            "Access-Control-Allow-Headers": CORS_HEADERS,
            "Access-Control-Max-Age": "600",
        }

    def _check_host(self, header: str) -> None:
        host = host_of(header)
        if host is None or not (is_loopback(host) or host in self._names):
            raise ApiError(
                403,
                f"this server is not addressed as {header[:80]!r}; --allow-host names it so",
                code="host_not_allowed",
            )

    def _check_key(self, key: str) -> None:
        keys = [k for k in (self._settings.api_key, self._settings.admin_key) if k]
        if self._settings.api_key and not any(same_key(key, k) for k in keys):
            raise ApiError(
                401,
                "the api key is wrong or missing; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    def _check_admin(self, key: str, peer: str) -> None:
        if self._settings.admin_key:
            if not same_key(key, self._settings.admin_key):
                raise ApiError(
                    401,
                    "this needs the admin key; send it as Authorization: Bearer KEY",
                    code="invalid_admin_key",
                )
            return
        self._check_key(key)
        if not is_loopback(peer):
            raise ApiError(
                403,
                "without an admin key the server is changed from its own machine alone",
                code="peer",
            )
