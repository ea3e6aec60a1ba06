"""The server: OpenAI's API in front of engines, and the control of what they take."""

from typing import TYPE_CHECKING, Any

from jitllm.server.settings import Settings, load_settings

if TYPE_CHECKING:
    from jitllm.server.app import create_app

__all__ = ["Settings", "create_app", "load_settings"]


def __getattr__(name: str) -> Any:
    # The application imports jax (1.4 s); the client and `jitllmd --help` must not.
    if name == "create_app":
        from jitllm.server.app import create_app

        return create_app
    raise AttributeError(f"module 'jitllm.server' has no attribute {name!r}")
