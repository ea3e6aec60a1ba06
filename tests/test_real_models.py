"""Real models answer as llama.cpp does, where they are in the cache (`jitllm.catalog.fetch`)."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from jitllm import catalog
from jitllm.cache import cache_dir
from jitllm.engine import Engine
from tests import figures

NAMES = ("stories260k", "smollm2-135m", "gemma3-270m")
CLEAR = 0.1
NLL_TOLERANCE = 0.05


@dataclass(frozen=True)
class Answer:
    """What a model said to each prompt under one kernel set, given llama.cpp's own replies."""

    prompts: list[dict]
    """With llama.cpp's figures: exact weights, F32 activations."""
    logits: list[np.ndarray]
    """f32[T, V] of each prompt and all but the last of its greedy ids."""
    tokens: list[list[int]]
    """Each prompt's ids by our tokenizer."""
    reply: list[int]
    """The first prompt's greedy reply."""


def skip_unless_cached(name: str) -> None:
    container = cache_dir() / "containers" / catalog._container_name(name)
    if not (container.exists() or catalog.kept(name)):
        pytest.skip(f"{name} is not in the cache, {cache_dir()}")


@cache
def ask(name: str, kernels: str) -> Answer:
    skip_unless_cached(name)
    prompts = figures.load(name)["prompts"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        figures.use_kernels(kernels, monkeypatch)
        with Engine.open(name, max_seq=96, kv="f32") as engine:
            logits = [engine.logits(p["prompt_ids"] + p["greedy_ids"][:-1]) for p in prompts]
            tokens = [engine.tokenize(p["text"], p["add_bos"], p["parse_special"]) for p in prompts]
            generation = engine.generate(prompts[0]["prompt_ids"], n=6, temp=0)
            list(generation)
    return Answer(prompts, logits, tokens, generation.report.ids)


@pytest.fixture(params=NAMES)
def exact(request: pytest.FixtureRequest) -> Answer:
    """From the portable path: exact weights, F32 activations."""
    return ask(request.param, "xla")


def test_prompts_have_the_tokens_of_llama_cpp(exact: Answer) -> None:
    assert exact.tokens == [prompt["prompt_ids"] for prompt in exact.prompts]


def test_prompt_tokens_are_as_likely_as_llama_cpp_finds_them(exact: Answer) -> None:
    for prompt, logits in zip(exact.prompts, exact.logits, strict=True):
        nll = figures.nll(logits[: len(prompt["prompt_ids"])], prompt["prompt_ids"])
        np.testing.assert_allclose(nll, prompt["prompt_nll"], atol=NLL_TOLERANCE, rtol=0)


def test_every_clear_token_is_the_one_llama_cpp_picks(exact: Answer) -> None:
    for prompt, logits in zip(exact.prompts, exact.logits, strict=True):
        clear = np.array(prompt["greedy_margin"]) > CLEAR
        ours = logits[len(prompt["prompt_ids"]) - 1 :].argmax(axis=1)
        np.testing.assert_array_equal(ours[clear], np.array(prompt["greedy_ids"])[clear])


def test_a_greedy_reply_is_that_of_llama_cpp(exact: Answer) -> None:
    prompt = exact.prompts[0]
    clear = figures.clear_prefix(prompt["greedy_ids"], prompt["greedy_margin"], CLEAR)
    n = min(len(clear), len(exact.reply))
    assert n >= 4 and exact.reply[:n] == clear[:n]


@pytest.mark.parametrize("name", NAMES)
def test_int8_products_stray_no_further_than_those_of_llama_cpp(name: str) -> None:
    """Mean divergence over prompts and replies. Token by token int8 activations move likelihoods by
    up to 0.4, here and in llama.cpp: the tolerances of the exact path are not for them."""
    exact, ours = ask(name, "xla"), ask(name, "cpu")
    pairs = zip(exact.logits, ours.logits, strict=True)
    strayed = np.concatenate([figures.kl_divergences(*pair) for pair in pairs]).mean()
    assert strayed <= max(1.1 * figures.load(name)["kl_to_f32_mean"], 1e-9)
