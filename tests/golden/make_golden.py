"""Makes the figures of this folder with llama.cpp: the oracle of the golden tests.

    pip install .[bench] && python -m tests.golden.make_golden

writes `<model>.json` for every model of `tests/tiny_models.py`, from the file that the tests write
too, and for those real models whose GGUF `jitllm.catalog.fetch` has left in the cache. All figures
are those of the exact weights with F32 activations and an F32 KV cache, that is llama.cpp on the
dequantised file; `kl_to_f32_mean` is how far its own int8 products stray from them.
"""

import json
import tempfile
from functools import partial
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf import GGUFValueType

from jitllm import catalog
from tests.figures import FOLDER, kl_divergences, nll
from tests.tiny_models import MODELS, digest, exact_values, random_tensors, write_gguf

ENGINE = f"llama.cpp via llama-cpp-python {llama_cpp.__version__}, CPU, F32 KV, no flash attention"
PROMPT_IDS = [
    *(1, 403, 407, 261, 378, 300, 17, 450, 99, 261, 5, 120, 333, 410, 262, 270),
    *(480, 31, 77, 205, 300, 511, 42, 412, 263, 259, 388, 71, 299, 440, 350, 266),
]
N_GREEDY = 24
PROMPTS = {
    # Text, whether BOS comes first, whether special tokens are parsed.
    "stories260k": [("Once upon a time", True, False), ("The dog and the cat", True, False)],
    "smollm2-135m": [
        ("Once upon a time", False, False),
        ("The capital of France is", False, False),
        (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
            "trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
            False,
            True,
        ),
        (
            'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
            False,
            False,
        ),
    ],
    "gemma3-270m": [("Once upon a time", True, False), ("The capital of France is", True, False)],
}
N_GREEDY_REAL = 32
F32 = 0  # ggml's number for the type of the KV cache


def open_model(path: Path, n_ctx: int) -> llama_cpp.Llama:
    """llama.cpp on the CPU, every row's logits kept."""
    return llama_cpp.Llama(
        str(path),
        n_ctx=n_ctx,
        logits_all=True,
        type_k=F32,
        type_v=F32,
        flash_attn=False,
        n_gpu_layers=0,
        verbose=False,
    )


def logits_of(model: llama_cpp.Llama, ids: list[int]) -> np.ndarray:
    """f32[T, V] from an empty context."""
    model.reset()
    model.eval(ids)
    return model.scores[: len(ids)].copy()


def greedy(model: llama_cpp.Llama, n: int) -> tuple[list[int], list[float]]:
    """n ids that follow what the model has seen, and their margins: top-1 minus top-2 logit."""
    ids, margins = [], []
    for _ in range(n):
        last = model.scores[model.n_tokens - 1]
        second, first = np.partition(last, -2)[-2:]
        ids.append(int(last.argmax()))
        margins.append(round(float(first - second), 4))
        model.eval(ids[-1:])
    return ids, margins


def tiny_figures(name: str, folder: Path) -> dict:
    """What the tests compare with, for a model of `tiny_models`."""
    tiny, tensors = MODELS[name], dict(random_tensors(MODELS[name]))
    model = open_model(write_gguf(folder / "exact.gguf", tiny, exact_values(tensors)), 64)
    logits = logits_of(model, PROMPT_IDS)
    ids, margins = greedy(model, N_GREEDY)
    model.close()
    golden = {
        "engine": ENGINE,
        "weights_sha256": digest(tensors),
        "prompt_ids": PROMPT_IDS,
        "greedy_ids": ids,
        "greedy_margin": margins,
        "logits": {
            str(at): [round(float(x), 5) for x in logits[at]]
            for at in (0, len(logits) // 2, len(logits) - 1)
        },
    }
    if tiny.qtype != "F32":
        model = open_model(write_gguf(folder / "source.gguf", tiny, tensors), 64)
        golden["kl_to_f32_mean"] = _mean_kl(logits, logits_of(model, PROMPT_IDS))
        model.close()
    return golden


def _mean_kl(reference: np.ndarray, logits: np.ndarray) -> float:
    return float(f"{kl_divergences(reference, logits).mean():.4g}")


def real_figures(name: str, source: Path, folder: Path) -> dict:
    """The same for a real model; its divergence is over the prompts and their replies."""
    model = open_model(write_exact(source, folder / "exact.gguf"), 128)
    golden = {"engine": ENGINE, "prompts": [], "kl_to_f32_mean": 0.0}
    texts, answers = [], []
    for text, add_bos, parse_special in PROMPTS[name]:
        ids = model.tokenize(text.encode(), add_bos, parse_special)
        logits = logits_of(model, ids)
        reply, margins = greedy(model, N_GREEDY_REAL)
        golden["prompts"].append(
            {
                "text": text,
                "add_bos": add_bos,
                "parse_special": parse_special,
                "prompt_ids": ids,
                "prompt_nll": [round(float(x), 4) for x in nll(logits, ids)],
                "greedy_ids": reply,
                "greedy_margin": margins,
            }
        )
        texts.append(ids + reply[:-1])
        answers.append(logits_of(model, texts[-1]))
    model.close()
    own = open_model(source, 128)
    strayed = [_divergences(own, ids, logits) for ids, logits in zip(texts, answers, strict=True)]
    own.close()
    golden["kl_to_f32_mean"] = float(f"{np.concatenate(strayed).mean():.4g}")
    return golden


def _divergences(model: llama_cpp.Llama, ids: list[int], reference: np.ndarray) -> np.ndarray:
    return kl_divergences(reference, logits_of(model, ids))


def write_exact(source: Path, path: Path) -> Path:
    """The GGUF `source` with every tensor dequantised to F32, at `path`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            part = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, part)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write(name: str, golden: dict) -> None:
    """One file, a line for each field."""
    pack = partial(json.dumps, separators=(",", ":"), ensure_ascii=False)
    lines = ",\n".join(f"{pack(key)}:{pack(value)}" for key, value in golden.items())
    (FOLDER / f"{name}.json").write_text(f"{{{lines}}}\n", encoding="utf-8")
    print(name, golden.get("kl_to_f32_mean", ""))


def main() -> None:
    """Write them all."""
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            write(name, tiny_figures(name, Path(folder)))
        for name in PROMPTS:
            if source := catalog.kept(name):
                write(name, real_figures(name, source, Path(folder)))
            else:
                print(f"{name} is not in the cache and keeps the figures it has")


if __name__ == "__main__":
    main()
