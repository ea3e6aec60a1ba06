"""Models and figures of a folder that is not part of the repository: `JITLLM_TEST_FILES` names it.

`models/{tiny,quant}/*.gguf` and `models/stories260K.gguf`, with llama.cpp's figures in
`golden/{tiny,quant,real}/*.json`; see its `golden/README.md`.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from jitllm.convert import convert
from jitllm.engine import Engine
from tests import figures

TINY = "llama llama-linear llama-rope-freqs llama-tied-mha qwen2 qwen3 gemma gemma2 gemma3"
QUANT = "base-f32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K_M Q5_K_M Q6_K"


@pytest.fixture(scope="module")
def files() -> Path:
    folder = os.environ.get("JITLLM_TEST_FILES")
    if not folder:
        pytest.skip("JITLLM_TEST_FILES names no folder of reference files")
    return Path(folder)


def golden_of(files: Path, kind: str, name: str) -> dict:
    return json.loads((files / "golden" / kind / f"{name}.json").read_text())


def logits_of(gguf: Path, ids: list[int], kernels: str, folder: Path) -> np.ndarray:
    out = folder / f"{gguf.stem}.jlm"
    if not out.exists():
        convert(gguf, out)
    with pytest.MonkeyPatch.context() as monkeypatch:
        figures.use_kernels(kernels, monkeypatch)
        with Engine.open(out, maxmem="64M", max_seq=128, kv="f32") as engine:
            return engine.logits(ids)


def check_clear_tokens(logits: np.ndarray, golden: dict) -> None:
    """logits of the prompt and all but the last greedy id."""
    clear = np.array(golden["greedy_margin"]) > figures.CLEAR
    ours = logits[-len(clear) :].argmax(axis=1)
    np.testing.assert_array_equal(ours[clear], np.array(golden["greedy_ids"])[clear])


@pytest.mark.parametrize("kernels", figures.KERNELS)
@pytest.mark.parametrize("name", TINY.split())
def test_a_tiny_model_answers_as_llama_cpp(
    files: Path, name: str, kernels: str, tmp_path: Path
) -> None:
    golden = golden_of(files, "tiny", name)
    ids = golden["prompt_ids"] + golden["greedy_ids"][:-1]
    logits = logits_of(files / "models" / "tiny" / f"{name}.gguf", ids, kernels, tmp_path)
    assert figures.distance(logits, golden["logits_pos"]) < figures.TOLERANCE
    check_clear_tokens(logits, golden)


@pytest.mark.parametrize("name", QUANT.split())
def test_a_quantised_model_answers_as_llama_cpp(files: Path, name: str, tmp_path: Path) -> None:
    golden = golden_of(files, "quant", name)
    exact = golden["f32_activation"]
    ids = golden["prompt_ids"] + exact["greedy_ids"][:-1]
    gguf = files / "models" / "quant" / f"{name}.gguf"
    reference, ours = (logits_of(gguf, ids, kernels, tmp_path) for kernels in figures.KERNELS)
    assert figures.distance(reference, exact["logits_pos"]) < figures.TOLERANCE
    check_clear_tokens(reference, exact)
    n = len(golden["prompt_ids"])
    strayed = figures.kl_divergences(reference[:n], ours[:n]).mean()
    assert strayed <= max(1.1 * golden["int8_activation"]["kl_to_f32_mean"], 1e-9)


@pytest.mark.parametrize("kernels", figures.KERNELS)
def test_stories260k_answers_as_llama_cpp(files: Path, kernels: str, tmp_path: Path) -> None:
    for golden in golden_of(files, "real", "stories260k")["stories260K"]["f32_activation"]:
        ids = golden["prompt_ids"] + golden["greedy_ids"][:-1]
        logits = logits_of(files / "models" / "stories260K.gguf", ids, kernels, tmp_path)
        nll = figures.nll(logits[: len(golden["prompt_ids"])], golden["prompt_ids"])
        np.testing.assert_allclose(nll, golden["prompt_nll"], atol=1e-3, rtol=0)
        check_clear_tokens(logits, golden)
