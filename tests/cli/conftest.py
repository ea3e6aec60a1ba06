"""Fixtures: `cli` runs a command in this process on a fake engine."""

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from jitllm.cli import jitllm
from jitllm.cli.options import EngineOptions
from tests.cli.fake_engine import FakeEngine


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()

    def open_fake(options: EngineOptions, model: str) -> FakeEngine:
        fake.calls.append(("open", model, options))
        return fake

    monkeypatch.setattr(EngineOptions, "open", open_fake)
    return fake


@pytest.fixture
def cli(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    monkeypatch.delenv("JITLLM_TRACEBACK", raising=False)

    def call(*argv: str, stdin: str | bytes = "") -> Outcome:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = jitllm.main(argv)
        return Outcome(code, *capsys.readouterr())

    return call
