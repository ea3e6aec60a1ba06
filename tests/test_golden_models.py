"""Tiny models answer as llama.cpp does: every architecture, every weight type, both kernel sets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jitllm.convert import convert
from jitllm.engine import Engine
from tests import figures
from tests.tiny_models import MODELS, digest, random_tensors, write_tiny

INT8 = [name for name, tiny in MODELS.items() if tiny.qtype not in ("F32", "F16", "BF16")]
FLOAT = [name for name in MODELS if name not in INT8]
Containers = Callable[[str], Path]


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    """The container of a tiny model, made when first asked for."""
    folder = tmp_path_factory.mktemp("models")

    def container(name: str) -> Path:
        out = folder / f"{name}.jlm"
        if not out.exists():
            convert(write_tiny(folder / f"{name}.gguf", name), out)
        return out

    return container


@dataclass(frozen=True)
class Answer:
    """What a model said under one kernel set, and what llama.cpp said."""

    golden: dict
    logits: np.ndarray
    """f32[T, V] of the prompt and all but the last of llama.cpp's greedy ids."""
    greedy_ids: list[int]

    @property
    def prompt_logits(self) -> np.ndarray:
        return self.logits[: len(self.golden["prompt_ids"])]


@cache
def ask(name: str, kernels: str, containers: Containers) -> Answer:
    golden = figures.load(name)
    with pytest.MonkeyPatch.context() as monkeypatch:
        figures.use_kernels(kernels, monkeypatch)
        with Engine.open(containers(name), maxmem="64M", max_seq=64, kv="f32") as engine:
            logits = engine.logits(golden["prompt_ids"] + golden["greedy_ids"][:-1])
            generation = engine.generate(golden["prompt_ids"], n=24, temp=0)
            list(generation)
    return Answer(golden, logits, generation.report.ids)


CASES = [
    *((name, "xla") for name in MODELS),
    *((name, "cpu") for name in FLOAT),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def answer(request: pytest.FixtureRequest, containers: Containers) -> Iterator[Answer]:
    yield ask(*request.param, containers)


def test_logits_are_those_of_llama_cpp(answer: Answer) -> None:
    assert figures.distance(answer.logits, answer.golden["logits"]) < figures.TOLERANCE


def test_every_clear_token_is_the_one_llama_cpp_picks(answer: Answer) -> None:
    """Given its tokens so far; so near-ties do not end the comparison."""
    golden = answer.golden
    clear = np.array(golden["greedy_margin"]) > figures.CLEAR
    ours = answer.logits[len(golden["prompt_ids"]) - 1 :].argmax(axis=1)
    assert clear.sum() >= 12
    np.testing.assert_array_equal(ours[clear], np.array(golden["greedy_ids"])[clear])


def test_a_greedy_reply_is_that_of_llama_cpp(answer: Answer) -> None:
    golden = answer.golden
    ids = figures.clear_prefix(golden["greedy_ids"], golden["greedy_margin"], figures.CLEAR)
    assert len(ids) >= 7
    assert answer.greedy_ids[: len(ids)] == ids


@pytest.mark.parametrize("name", INT8)
def test_int8_products_stray_no_further_than_those_of_llama_cpp(
    name: str, containers: Containers
) -> None:
    """From the answer of the exact weights with F32 activations, which is the portable path's."""
    exact, ours = (ask(name, kernels, containers) for kernels in figures.KERNELS)
    assert figures.distance(exact.logits, exact.golden["logits"]) < figures.TOLERANCE
    strayed = figures.kl_divergences(exact.prompt_logits, ours.prompt_logits).mean()
    assert 0 < strayed <= 1.1 * exact.golden["kl_to_f32_mean"]


@pytest.mark.parametrize("kernels", figures.KERNELS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_usual_cache_in_half_precision_strays_little(
    name: str, kernels: str, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As little as llama.cpp's F16 products: `kl_to_f32_mean` of the F16 model is 8e-8."""
    exact = ask(name, kernels, containers)
    figures.use_kernels(kernels, monkeypatch)
    with Engine.open(containers(name), max_seq=64) as engine:
        logits = engine.logits(exact.golden["prompt_ids"])
    assert 0 < figures.kl_divergences(exact.prompt_logits, logits).mean() < 1e-7


@pytest.mark.parametrize("name", MODELS)
def test_the_figures_belong_to_these_very_weights(name: str) -> None:
    weights = digest(dict(random_tensors(MODELS[name])))
    assert figures.load(name)["weights_sha256"] == weights, "run tests/golden/make_golden.py again"
