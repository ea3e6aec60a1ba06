"""Where the cache is, for everything that keeps something there."""

import sys
from pathlib import Path

import pytest

from jitllm.cache import cache_dir


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "home/.cache/jitllm"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/jitllm"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "home/.cache/jitllm"),
        ("darwin", {}, "home/Library/Caches/jitllm"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/jitllm"),
        ("linux", {"XDG_CACHE_HOME": "/xdg", "JITLLM_CACHE": "/own"}, "/own"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    variables: dict[str, str],
    expected: str,
) -> None:
    for name in ("JITLLM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_dir() == tmp_path / expected
