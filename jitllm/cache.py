"""Where everything is kept that can be made again: containers, compiled kernels and steps."""

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """The folder of the cache: `JITLLM_CACHE`, or `jitllm` in the platform's cache folder."""
    if own := os.environ.get("JITLLM_CACHE"):
        return Path(own).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        base = base if os.path.isabs(base) else "~/.cache"
    return Path(base).expanduser() / "jitllm"
