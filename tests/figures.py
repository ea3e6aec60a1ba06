"""The figures in `golden/`, and what it means to agree with them.

`make_golden.py` says where they come from. Tolerances: F32 models within 2e-3 of llama.cpp (its
GELU is a table of half floats; without it we agree to 1e-5), the same token wherever its lead over
the second is above `CLEAR`; int8 products by their divergence from the exact weights' answer.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent / "golden"
TOLERANCE = 2e-3
CLEAR = 1e-2
"""Margin of a greedy token, top-1 minus top-2 logit, above which it must be ours too."""
KERNELS = ("xla", "cpu")


def load(name: str) -> dict:
    """One file of figures."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def use_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines opened from now on use the kernel set `name`; skips where this machine has none."""
    from jitllm.kernels.ops import choose

    monkeypatch.setenv("JITLLM_KERNELS", name)
    ops, note = choose("cpu")
    if ops.name != name:
        pytest.skip(f"kernels {name} are not to be had: {note}")


def distance(logits: np.ndarray, golden: Mapping[str, Sequence[float]]) -> float:
    """The largest difference of logits[T, V] from those of some positions: position -> [V]."""
    return max(float(np.abs(logits[int(at)] - row).max()) for at, row in golden.items())


def clear_prefix(ids: Sequence[int], margins: Sequence[float], clear: float) -> list[int]:
    """The greedy ids before the first that is not clear: behind it two answers may part."""
    unclear = (i for i, margin in enumerate(margins) if margin <= clear)
    return list(ids[: next(unclear, len(ids))])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f64 of logits[T, V]."""
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def kl_divergences(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL(reference || logits) of each row, in nats."""
    p, q = log_softmax(reference), log_softmax(logits)
    return (np.exp(p) * (p - q)).sum(axis=1)


def nll(logits: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Negative log-likelihood f64[T - 1] of every id but the first, from logits[T, V] of `ids`."""
    return -log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
