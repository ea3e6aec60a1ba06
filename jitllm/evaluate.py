"""Perplexity: how well a model predicts a text, in llama.cpp's way so that figures compare."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jitllm.errors import UsageError

if TYPE_CHECKING:
    from jitllm.engine import Engine
    from jitllm.session import Session

Progress = Callable[[str, int, int], None]
"""progress(what, done_tokens, total_tokens)."""

_LOGITS_BYTES = 128 << 20
_MIN_WINDOW_TOKENS = 4


@dataclass(frozen=True)
class Perplexity:
    """exp(mean negative log-likelihood) over the scored tokens, and its standard error."""

    perplexity: float
    error: float
    n_scored_tokens: int
    n_windows: int
    window_tokens: int
    n_left_out_tokens: int
    """At the end of the text, too few to fill a window."""


def perplexity(
    engine: "Engine",
    ids: Sequence[int],
    window_tokens: int,
    bos_id: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """The perplexity of `ids` in windows of `window_tokens`.

    Each window is read afresh, its first token replaced by `bos_id` if there is one, and its second
    half is scored: every scored token has at least half a window before it (as llama.cpp's
    tools/perplexity does). A text shorter than a window is one window. Raises `UsageError` where
    that leaves nothing to score.
    """
    window_tokens = min(window_tokens, len(ids))
    if window_tokens < _MIN_WINDOW_TOKENS:
        raise UsageError(
            f"perplexity needs windows of {_MIN_WINDOW_TOKENS} tokens or more, but the shorter of "
            f"-ctx and the text has {window_tokens}"
        )
    n_windows = len(ids) // window_tokens
    losses: list[np.ndarray] = []
    with engine.session() as session:
        for number in range(n_windows):
            window = list(ids[number * window_tokens : (number + 1) * window_tokens])
            if bos_id is not None:
                window[0] = bos_id
            losses += _window_losses(session, window)
            if progress:
                progress("perplexity", (number + 1) * window_tokens, n_windows * window_tokens)
    return _summary(np.concatenate(losses), n_windows, window_tokens, len(ids))


def _window_losses(session: "Session", window: Sequence[int]) -> Iterator[np.ndarray]:
    """Losses of the tokens behind the middle of `window`, in pieces whose logits fit in memory."""
    middle = len(window) // 2
    session.truncate(0)
    n_vocab = len(session.prefill(window[:middle]))
    n_piece = max(16, _LOGITS_BYTES // (4 * n_vocab))
    for start in range(middle, len(window) - 1, n_piece):
        end = min(start + n_piece, len(window) - 1)
        yield token_losses(session.logits(window[start:end]), window[start + 1 : end + 1])


def token_losses(logits: np.ndarray, targets: Sequence[int]) -> np.ndarray:
    """Negative log-likelihood f64[T] of `targets` under logits f32[T, V]."""
    peaks = logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(logits - peaks).sum(axis=1, dtype=np.float64))
    chosen = logits[np.arange(len(targets)), np.asarray(targets)]
    return log_sums - (chosen - peaks[:, 0]).astype(np.float64)


def _summary(losses: np.ndarray, n_windows: int, window_tokens: int, n_ids: int) -> Perplexity:
    value = math.exp(losses.mean())
    spread = losses.std(ddof=1) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
    return Perplexity(
        perplexity=value,
        error=value * float(spread),
        n_scored_tokens=len(losses),
        n_windows=n_windows,
        window_tokens=window_tokens,
        n_left_out_tokens=n_ids - n_windows * window_tokens,
    )
