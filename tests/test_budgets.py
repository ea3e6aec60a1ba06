"""A budget, or how a prompt is cut, changes what a model costs and never what it says."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jitllm import executor
from jitllm.convert import convert
from jitllm.engine import Engine
from jitllm.errors import BudgetError
from jitllm.paging.container import Container
from jitllm.session import Session
from tests import figures
from tests.tiny_models import write_tiny

MODELS = {
    "untied": ("llama", {"n_blocks": 5}),
    "tied, with windows": ("gemma3", {}),
    "quantised": ("Q4_K", {"n_blocks": 4}),
}
PROMPT = [1, 403, 407, 261, 378, 300, 17, 450, 99, 261, 5, 120, 333, 410, 262, 270, 480, 31, 77]
REPLY = [205, 300, 11]
BUDGETS = ("smallest", "one page more", "half", "all")


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    paths = {}
    for i, (name, (tiny, overrides)) in enumerate(MODELS.items()):
        paths[name] = folder / f"{i}.jlm"
        convert(write_tiny(folder / f"{i}.gguf", tiny, **overrides), paths[name])
    return paths


@pytest.fixture(scope="module", params=figures.KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        figures.use_kernels(request.param, monkeypatch)
        yield request.param


@pytest.fixture(scope="module", params=MODELS)
def container(request: pytest.FixtureRequest, containers: dict[str, Path]) -> Path:
    return containers[request.param]


def budgets(container: Path) -> dict[str, int]:
    """The budgets of `BUDGETS` in bytes."""
    with pytest.raises(BudgetError) as refusal:
        Engine.open(container, maxmem=1)
    smallest = refusal.value.smallest_bytes
    pages = [page.n_bytes for page in Container.open(container).pages]
    sizes = (smallest, smallest + max(pages), smallest + sum(pages) // 2, smallest + sum(pages))
    return dict(zip(BUDGETS, sizes, strict=True))


@contextmanager
def conversation(container: Path, budget: int | str) -> Iterator[tuple[Engine, Session]]:
    with (
        Engine.open(container, maxmem=budget, max_seq=48, kv="f32") as engine,
        engine.session() as session,
    ):
        yield engine, session


def whole_prompt(session: Session) -> np.ndarray:
    """f32[T, V] of the prompt at once and of the reply token by token."""
    rows = [session.logits(PROMPT), *(session.prefill([token])[None] for token in REPLY)]
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def expected(container: Path, kernels: str) -> np.ndarray:
    """What a model says that has all the memory it wants."""
    with conversation(container, "1G") as (_, session):
        return whole_prompt(session)


def test_the_budget_does_not_change_a_bit_of_the_logits(
    container: Path, expected: np.ndarray
) -> None:
    for name, budget in budgets(container).items():
        with conversation(container, budget) as (engine, session):
            np.testing.assert_array_equal(whole_prompt(session), expected)
            counters, n_pages = engine.stats().counters, engine.stats().n_pages
            assert counters.page_ins == n_pages if name == "all" else counters.page_ins > n_pages


def test_page_ins_of_every_token_are_those_of_the_formula(container: Path) -> None:
    """n pages, c resident: n-c+1 through one moving frame, n-c+2 through two, 0 when all fit."""
    for name, budget in budgets(container).items():
        with conversation(container, budget) as (engine, session):
            session.prefill(PROMPT)
            for token in REPLY:
                before = engine.stats()
                session.prefill([token])
                page_ins = engine.stats().counters.page_ins - before.counters.page_ins
                outside = before.n_pages - before.n_resident_pages
                formula = {0} if name == "all" else {outside + 1, outside + 2}
                assert page_ins in formula
                assert page_ins == engine.memory_report().page_ins_per_token
            if name == "smallest":
                assert before.n_resident_pages == 1 and page_ins == before.n_pages


def test_weights_in_memory_never_exceed_the_budget(container: Path) -> None:
    for budget in budgets(container).values():
        with conversation(container, budget) as (engine, session):
            whole_prompt(session)
            line = next(line for line in engine.stats().ledger.lines if line.name == "weights")
            assert 0 < line.peak_bytes <= budget


def test_a_prompt_may_be_cut_into_chunks_of_any_size(
    container: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chunk_tokens in (1, 7, 16):
        monkeypatch.setattr(executor, "CHUNK_TOKENS", chunk_tokens)
        with conversation(container, "1G") as (_, session):
            np.testing.assert_array_equal(whole_prompt(session), expected)


def test_a_prompt_may_come_token_by_token(container: Path, expected: np.ndarray) -> None:
    for budget in (budgets(container)["half"], "1G"):
        with conversation(container, budget) as (_, session):
            rows = [session.prefill([token]) for token in PROMPT + REPLY]
            np.testing.assert_array_equal(rows, expected)


def test_budgets_may_change_and_prompts_be_cut_anywhere(
    containers: dict[str, Path], kernels: str
) -> None:
    """Any pieces of a text, any budget for each."""
    path = containers["untied"]
    ids, allowed = PROMPT + REPLY, budgets(path)
    with conversation(path, "1G") as (engine, session):
        expected = session.logits(ids)

        @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(st.tuples(st.sampled_from([1, 2, 5, 11]), st.sampled_from(BUDGETS))))
        def check(cuts: list[tuple[int, str]]) -> None:
            session.reset()
            rows, at = [], 0
            for n_tokens, budget in [*cuts, (len(ids), "half")]:
                if piece := ids[at : at + n_tokens]:
                    engine.set_budget(allowed[budget])
                    rows.append(session.logits(piece))
                    at += n_tokens
            np.testing.assert_array_equal(np.concatenate(rows), expected)

        check()


MEASURE = """
import json, sys
from jitllm.engine import Engine
from jitllm.paging.budget import peak_rss_bytes, rss_bytes

def peak_ledger_bytes(path, budget):
    with Engine.open(path, maxmem=budget, max_seq=256) as engine:
        list(engine.generate(list(range(3, 40)), n=6, temp=0))
        return engine.stats().ledger.peak_bytes

small, large, *budgets = sys.argv[1:]
for _ in range(2):
    peak_ledger_bytes(small, "1G")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from here
loaded = rss_bytes()
for budget in budgets:
    peak = peak_ledger_bytes(large, budget)
    print(json.dumps({"grown": peak_rss_bytes() - loaded, "ledger": peak}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_grows_by_what_the_ledger_says(tmp_path: Path, monkeypatch) -> None:
    """From the loaded interpreter, every kind of step run once, to the peak of a model of 80 MB."""
    figures.use_kernels("cpu", monkeypatch)
    large = {"width": 1024, "ff_width": 4096, "n_blocks": 5, "n_heads": 16, "n_kv_heads": 4}
    paths = []
    for name, overrides in {"small": {}, "large": large}.items():
        paths.append(tmp_path / f"{name}.jlm")
        convert(write_tiny(tmp_path / f"{name}.gguf", "Q8_0", **overrides), paths[-1])
    command = [sys.executable, "-c", MEASURE, *map(str, paths), "20M", "40M", "200M"]
    # The first process compiles kernels and steps, which takes memory of its own; the second finds
    # them in the cache.
    for _ in range(2):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["grown"] <= 1.1 * line["ledger"] for line in lines] == [True] * 3, lines
    # And the sum is no invention: most of it is really there.
    assert lines[-1]["grown"] >= 0.7 * lines[-1]["ledger"], lines
