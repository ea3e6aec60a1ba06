"""Makes the figures of this folder with llama.cpp: the oracle of `test_golden_models.py`.

    pip install .[bench] && python -m tests.golden.make_golden

writes `<model>.json` for every model of `tests/tiny_models.py`, from the file that the tests write
too. F32 KV cache, no flash attention: all in F32 but llama.cpp's own int8 products. `f32` figures
are those of the exact weights with F32 activations: llama.cpp on the dequantised file.
"""

import json
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

from tests.figures import FOLDER, kl_divergences
from tests.tiny_models import MODELS, digest, exact_values, random_tensors, write_gguf

ENGINE = f"llama.cpp via llama-cpp-python {llama_cpp.__version__}, CPU, F32 KV, no flash attention"
PROMPT_IDS = [
    *(1, 403, 407, 261, 378, 300, 17, 450, 99, 261, 5, 120, 333, 410, 262, 270),
    *(480, 31, 77, 205, 300, 511, 42, 412, 263, 259, 388, 71, 299, 440, 350, 266),
]
N_GREEDY = 24
F32 = 0  # ggml's number for the type of the KV cache


def evaluate(path: Path, ids: list[int], n_greedy: int) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Logits f32[T, V] of `ids`, the greedy continuation, and its margins: top-1 minus top-2."""
    model = llama_cpp.Llama(
        str(path),
        n_ctx=len(ids) + n_greedy,
        logits_all=True,
        type_k=F32,
        type_v=F32,
        flash_attn=False,
        n_gpu_layers=0,
        verbose=False,
    )
    model.eval(ids)
    logits = model.scores[: len(ids)].copy()
    greedy, margins, last = [], [], logits[-1]
    for _ in range(n_greedy):
        second, first = np.sort(last)[-2:]
        greedy.append(int(last.argmax()))
        margins.append(first - second)
        model.eval(greedy[-1:])
        last = model.scores[model.n_tokens - 1].copy()
    model.close()
    return logits, greedy, np.array(margins)


def figures(name: str, folder: Path) -> dict:
    """What the tests compare with, for one model."""
    tiny, tensors = MODELS[name], dict(random_tensors(MODELS[name]))
    exact = write_gguf(folder / "exact.gguf", tiny, exact_values(tensors))
    logits, greedy, margins = evaluate(exact, PROMPT_IDS, N_GREEDY)
    golden = {
        "engine": ENGINE,
        "weights_sha256": digest(tensors),
        "prompt_ids": PROMPT_IDS,
        "greedy_ids": greedy,
        "greedy_margin": [round(float(m), 4) for m in margins],
        "logits": {
            str(at): [round(float(x), 5) for x in logits[at]]
            for at in (0, len(logits) // 2, len(logits) - 1)
        },
    }
    if tiny.qtype != "F32":
        source = write_gguf(folder / "source.gguf", tiny, tensors)
        own, *_ = evaluate(source, PROMPT_IDS, 0)
        kl = kl_divergences(logits, own)
        golden["kl_to_f32_mean"] = float(f"{kl.mean():.4g}")
    return golden


def main() -> None:
    """Write them all."""
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            golden = figures(name, Path(folder))
            text = json.dumps(golden, separators=(",", ":"))
            (FOLDER / f"{name}.json").write_text(text.replace(',"', ',\n"') + "\n")
            print(name, golden.get("kl_to_f32_mean", ""))


if __name__ == "__main__":
    main()
