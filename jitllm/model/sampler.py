"""Logits to a token id: small pure functions over numpy arrays, composed by `sample`.

V is the vocabulary, C what a filter has left of it: what follows the first filter costs by C.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jitllm.errors import JitllmError
from jitllm.sampling import SamplingParams

_N_LANES = 64
_FIRST_GUESS = 256
_LEAST_TEMP = np.finfo(np.float64).tiny
"""What is less may be 0 to the processor, which libraries tell to take such numbers for it."""


class Logprobs(NamedTuple):
    """How likely one token was, and the likeliest ones: natural logarithms of probabilities."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(id, logprob), likeliest first."""


class Candidates(NamedTuple):
    """Tokens still in play: `ids` int[C] and their `logits` f32[C]."""

    ids: np.ndarray
    logits: np.ndarray

    def take(self, which: np.ndarray | slice) -> "Candidates":
        """The candidates at the positions, mask or slice `which`."""
        return Candidates(self.ids[which], self.logits[which])


def make_rng(seed: int | None) -> np.random.Generator:
    """The generator `sample` draws from: the same draws for the same seed, on every machine."""
    return np.random.Generator(np.random.PCG64(None if seed is None else seed % 2**64))


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    rng: np.random.Generator,
    history: Sequence[int] = (),
    n_prompt: int = 0,
) -> int:
    """The id that follows, for `logits` f32[V] and the ids so far in `history`, of which the first
    `n_prompt` are the prompt's.

    Raises `JitllmError` when the logits hold NaN or infinity: no choice would mean anything.
    """
    recent = history[-params.repeat_last_n :] if params.repeat_last_n else ()
    logits = apply_repeat_penalty(logits, recent, params.repeat_penalty)
    if params.presence_penalty or params.frequency_penalty:
        penalties = params.presence_penalty, params.frequency_penalty
        logits = apply_count_penalties(logits, history[n_prompt:], *penalties)
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]):
        raise JitllmError(
            f"the model gave {logits[best]} as a logit; its weights are damaged or overflow"
        )
    if params.temp < _LEAST_TEMP:
        return best
    candidates = Candidates(np.arange(len(logits), dtype=np.int32), logits)
    candidates = apply_top_k(candidates, params.top_k)
    candidates = apply_top_p(candidates, params.top_p)
    candidates = apply_min_p(candidates, params.min_p)
    weights = np.cumsum(_weights(candidates.logits, params.temp))
    drawn = int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
    return int(candidates.ids[min(drawn, len(weights) - 1)])


def logprobs(logits: np.ndarray, chosen: int, n_top: int) -> Logprobs:
    """What the model itself says, for `logits` f32[V]: before penalties, filters, temperature."""
    exact = logits.astype(np.float64)
    peak = exact.max()
    total = peak + np.log(np.exp(exact - peak).sum())
    everything = Candidates(np.arange(len(logits), dtype=np.int32), logits)
    top = apply_top_k(everything, n_top).ids if n_top else ()
    return Logprobs(
        float(exact[chosen] - total), tuple((int(i), float(exact[i] - total)) for i in top)
    )


def apply_repeat_penalty(logits: np.ndarray, recent: Sequence[int], penalty: float) -> np.ndarray:
    """Logits f32[V] with the `recent` ids pushed down: divided by `penalty` where positive, else
    multiplied (Keskar et al. 2019, CTRL, section 4.1). The input is never changed."""
    if penalty == 1 or len(recent) == 0:
        return logits
    ids = np.unique(np.asarray(recent))
    logits = logits.copy()
    seen = logits[ids]
    with np.errstate(over="ignore"):  # a vast penalty sends a logit to -inf: never drawn
        logits[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    return logits


def apply_count_penalties(
    logits: np.ndarray, reply: Sequence[int], presence: float, frequency: float
) -> np.ndarray:
    """Logits f32[V] less `presence` + `frequency` * count for each id that the `reply` has `count`
    times (OpenAI API reference, "Frequency and presence penalties"). The input is never changed."""
    if len(reply) == 0:
        return logits
    ids, counts = np.unique(np.asarray(reply), return_counts=True)
    logits = logits.copy()
    logits[ids] -= (presence + frequency * counts).astype(np.float32)
    return logits


def apply_top_k(candidates: Candidates, k: int) -> Candidates:
    """The `k` likeliest, likeliest first, the lowest id first among equals; 0 keeps all."""
    if k == 0:
        return candidates
    head = candidates.take(_at_least_top(candidates.logits, k))
    return head.take(np.argsort(-head.logits, kind="stable")[:k])


def apply_top_p(candidates: Candidates, p: float) -> Candidates:
    """The fewest likeliest candidates whose probabilities, relative to all of `candidates`, reach
    `p` (Holtzman et al. 2020); never fewer than one. Likeliest first; 1 keeps all."""
    if p >= 1:
        return candidates
    enough, count = p * _weights(candidates.logits).sum(), _FIRST_GUESS
    while True:
        head = apply_top_k(candidates, count)
        mass = np.cumsum(_weights(head.logits))
        if mass[-1] >= enough or count >= len(candidates.ids):
            return head.take(slice(int(np.searchsorted(mass, enough)) + 1))
        count *= 16


def apply_min_p(candidates: Candidates, p: float) -> Candidates:
    """The candidates at least `p` times as likely as the likeliest (Nguyen et al. 2024); 0 keeps
    all."""
    return candidates.take(_weights(candidates.logits) >= p) if p else candidates


def _weights(logits: np.ndarray, temp: float = 1.0) -> np.ndarray:
    """Probabilities relative to the likeliest token, f64; a ratio or a draw needs no other sum."""
    with np.errstate(over="ignore"):  # a temperature near 0 sends the others to exp(-inf) = 0
        return np.exp((logits - logits.max()).astype(np.float64) / temp)


def _at_least_top(logits: np.ndarray, k: int) -> np.ndarray:
    """Ascending ids that hold the k likeliest tokens and few others.

    Sorting 262,144 logits takes 20 ms. The k-th largest of V/64 column maxima is a floor that at
    least k logits reach, for two passes over V at memory speed.
    """
    n_columns = len(logits) // _N_LANES
    if k >= n_columns:
        return np.arange(len(logits))
    maxima = logits[: n_columns * _N_LANES].reshape(_N_LANES, n_columns).max(axis=0)
    floor = np.partition(maxima, n_columns - k)[n_columns - k]
    return np.flatnonzero(logits >= floor)
