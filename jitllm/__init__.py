"""jitllm: run a model that does not fit the memory, under a budget in bytes."""

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str):
    # Engine imports jax (1.4 s); `jitllm --help` must not.
    if name == "Engine":
        from jitllm.engine import Engine

        return Engine
    raise AttributeError(f"module 'jitllm' has no attribute {name!r}")
