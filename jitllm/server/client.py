"""Talks to a jitllmd: what the verbs of the command line use. The standard library alone."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jitllm.errors import JitllmError, SettingError
from jitllm.server.settings import split_addr

_TIMEOUT_S = 600
_CONNECT_S = 10
_KEYS = {"invalid_api_key": "JITLLMD_API_KEY", "invalid_admin_key": "JITLLMD_ADMIN_KEY"}
_NONE: Mapping[str, str] = {}


class Client:
    """The server at `addr`. JitllmError in the server's words where it refuses, or where there is
    none; SettingError for a field of a request that `settings` has another name for."""

    def __init__(self, addr: str, key: str | None = None, settings: Mapping[str, str] = _NONE):
        self.addr, self._key, self._settings = addr, key, settings
        self._host, self._port = split_addr(addr)

    def get(self, path: str) -> dict[str, Any]:
        """The resource at `path`."""
        return self._ask("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What comes of `body`."""
        return self._ask("POST", path, body)

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The resource at `path`, now as `body` says."""
        return self._ask("PUT", path, body)

    def delete(self, path: str) -> dict[str, Any]:
        """What is left to say of the resource at `path`."""
        return self._ask("DELETE", path)

    def events(self, path: str, body: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """The server-sent events of `path`, as they come, to `[DONE]`."""
        with self._sent("GET" if body is None else "POST", path, body) as response:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data and data != line.strip():
                    yield self._checked(json.loads(data))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        with self._sent(method, path, body) as response:
            return json.loads(response.read())

    @contextmanager
    def _sent(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_S)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise JitllmError(
                    f"no server answers at {self.addr} ({error.strerror or error}); "
                    f"jitllmd serve -addr {self.addr} starts one"
                ) from error
            connection.sock.settimeout(_TIMEOUT_S)
            connection.request(method, path, *self._content(body))
            response = connection.getresponse()
            if response.status >= 400:
                raise self._refusal(response)
            yield response
        except (OSError, http.client.RemoteDisconnected) as error:
            why = getattr(error, "strerror", None) or error
            raise JitllmError(f"the server at {self.addr} broke off: {why}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise JitllmError(f"what answers at {self.addr} is no jitllmd") from error
        finally:
            connection.close()

    def _content(self, body: dict[str, Any] | None) -> tuple[bytes | None, dict[str, str]]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return None if body is None else json.dumps(body).encode(), headers

    def _checked(self, content: dict[str, Any]) -> dict[str, Any]:
        if "error" in content:
            raise self._in_words(content["error"])
        return content

    def _refusal(self, response: http.client.HTTPResponse) -> JitllmError:
        try:
            return self._in_words(json.loads(response.read())["error"])
        except (ValueError, KeyError, TypeError):
            return JitllmError(
                f"what answers at {self.addr} is no jitllmd: it says {response.status} "
                f"{response.reason}"
            )

    def _in_words(self, error: dict[str, Any]) -> JitllmError:
        message, param = error["message"], error.get("param") or ""
        if (variable := _KEYS.get(error.get("code"))) is not None:
            wrong, _, _ = message.partition("; ")
            return JitllmError(f"{wrong}; give it with --api-key, or in {variable}")
        name = self._settings.get(param.partition("[")[0])
        if name is None or not message.startswith(param):
            return JitllmError(message)
        return SettingError(name, name + message.removeprefix(param))
