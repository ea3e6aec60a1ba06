"""Whole vocabularies against llama.cpp, where they are.

The models of the catalog are taken from jitllm's cache. The vocabularies of llama.cpp's own tests
(`ggml-vocab-*.gguf` with `.inp` and `.out` beside them) are megabytes each, so they are not in the
repository: JITLLM_TEST_FILES names a folder that has them in `vocab/`.
"""

import os
from functools import cache
from pathlib import Path

import pytest

from jitllm.catalog import kept
from jitllm.gguf_file import read_gguf
from jitllm.text import ChatTemplate, Tokenizer
from jitllm.text.build import build_tokenizer
from tests.text.vocabularies import golden

_MODELS = {"smollm2-135m": "SmolLM2-135M-Instruct.Q4_1", "gemma3-270m": "gemma-3-270m-q4_k_m"}
_SEPARATOR = "\n__ggml_vocab_test__\n"
_VOCABULARIES = """
    deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm phi-3 qwen2 starcoder
"""


@cache
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(build_tokenizer(read_gguf(path).metadata))


def _model(name: str) -> Path:
    path = kept(name)
    if path is None:
        pytest.skip(f"{name} is not in the cache")
    return path


@pytest.mark.parametrize("name", _MODELS)
def test_a_model_of_the_catalog_gives_the_ids_of_llama_cpp(name: str) -> None:
    subject = _tokenizer(_model(name))
    for row in golden("tokenize")[_MODELS[name]]:
        text = row["text"]
        assert subject.encode(text, add_bos=False) == row["ids"], text
        assert subject.encode(text, add_bos=False, parse_special=True) == row["ids_special"], text


@pytest.mark.parametrize("name", _MODELS)
def test_every_token_of_a_model_of_the_catalog_has_text(name: str) -> None:
    subject = _tokenizer(_model(name))
    for i in range(subject.n_vocab):
        assert subject.token_bytes(i, special=True)
    # Spaces in front, runs of white space and broken characters included.
    ids = [i for i in range(0, subject.n_vocab, 7) if subject.token_bytes(i)]
    whole = b"".join(map(subject.token_bytes, ids))
    assert whole.decode("utf-8", "replace").startswith(subject.decode(ids))


def test_smollm2_writes_its_chat_as_it_was_trained() -> None:
    path = _model("smollm2-135m")
    subject = _tokenizer(path)
    template = ChatTemplate(read_gguf(path).metadata["tokenizer.chat_template"])
    ids = template.encode(subject, [{"role": "user", "content": "Hi<|im_end|>"}])
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2
    text = b"".join(subject.token_bytes(i, special=True) for i in ids).decode()
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", _VOCABULARIES.split())
def test_a_vocabulary_of_llama_cpp_gives_its_ids(name: str) -> None:
    folder = os.environ.get("JITLLM_TEST_FILES")
    if not folder:
        pytest.skip(f"JITLLM_TEST_FILES names no folder with vocab/ggml-vocab-{name}.gguf")
    path = Path(folder, "vocab", f"ggml-vocab-{name}.gguf")
    subject = _tokenizer(path)
    texts = Path(f"{path}.inp").read_bytes().decode().split(_SEPARATOR)
    expected = Path(f"{path}.out").read_text().split("\n")[: len(texts)]
    for text, ids in zip(texts, expected, strict=True):
        assert subject.encode(text, add_bos=False) == list(map(int, ids.split())), text
