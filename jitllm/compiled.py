"""Compiled steps are kept on disk from the first, however quick they were to make.

jax never writes over an entry: one that is damaged (its process was killed as it wrote, its disk
was full) would be read in vain, and its step compiled again, by every process there will be.
"""

import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jitllm.cache import cache_dir

_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '(\w+)'")
_show_others = warnings.showwarning


def keep_compiled_steps() -> None:
    """Have jax keep what it compiles in the cache, unless it was told where.

    Where the cache cannot be read or written steps are compiled again; that is no news to anybody.
    """
    global _show_others
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache")
    warnings.filterwarnings("always", _UNREADABLE.pattern)
    if warnings.showwarning is not _heed:
        _show_others, warnings.showwarning = warnings.showwarning, _heed


def _folder() -> Path:
    return cache_dir() / "xla"


def _heed(message: Warning | str, *rest: Any, **more: Any) -> None:
    """Of an entry that cannot be read jax says no more than the name of its step: all that is ours
    under that name goes, and what is compiled now takes its place."""
    if (unreadable := _UNREADABLE.match(str(message))) is None:
        return _show_others(message, *rest, **more)
    if jax.config.jax_compilation_cache_dir == str(_folder()):
        with suppress(OSError):
            for path in _folder().glob(f"{unreadable[1]}-*"):
                path.unlink(missing_ok=True)
