"""What tests of placement share: a model, what it says, and where its blocks were run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from jitllm.convert import convert
from jitllm.engine import Engine
from jitllm.placement.devices import HOST
from jitllm.placement.plan import RESIDENT, Plan
from jitllm.placement.rules import Profile, parse_placement
from jitllm.session import Session
from tests.tiny_models import N_VOCAB, write_tiny

MIB = 2**20
PROMPT = [1, 403, 407, 261, 378, 300, 17, 450, 99, 261, 5, 120, 333, 410, 262, 270, 480, 31, 77]
N_REPLY = 6
STORIES = {
    "n_blocks": 5,
    "ff_width": 172,
    "n_heads": 8,
    "n_kv_heads": 4,
    "head_dim": 8,
    "context_length": 512,
    "n_unused_tokens": 512 - N_VOCAB,
}
"""Of the model `llama`: what makes its container that of stories260K, byte for byte in size."""


def container(folder: Path, name: str = "llama", **overrides: object) -> Path:
    """The container of a tiny model."""
    path = folder / f"{name}.jlm"
    convert(write_tiny(folder / f"{name}.gguf", name, **overrides), path)
    return path


def rules(text: str, **settings: object) -> Profile:
    """The profile of a `-placement` map."""
    return Profile(rules=parse_placement(text) if text else (), **settings)


@contextmanager
def conversation(path: Path, **options: object) -> Iterator[tuple[Engine, Session]]:
    """An engine with a context of 48 tokens, unless `options` say more, and one session of it."""
    with (
        Engine.open(path, **{"max_seq": 48, "devices": "cpu"} | options) as engine,
        engine.session() as session,
    ):
        yield engine, session


def says(session: Session, prompt: list[int] = PROMPT, n_reply: int = N_REPLY) -> np.ndarray:
    """f32[T, V]: the logits of a prompt, and of a greedy reply of `n_reply` tokens to it."""
    rows = [session.logits(prompt)]
    for _ in range(n_reply):
        rows.append(session.prefill([int(rows[-1][-1].argmax())])[None])
    return np.concatenate(rows)


def runs(plan: Plan, n_passes: int = 1) -> dict[str, int]:
    """Blocks that `n_passes` passes have to run on each device."""
    counts: dict[str, int] = {}
    for block in plan.blocks:
        counts[block.device] = counts.get(block.device, 0) + n_passes
    return counts


def check_ledgers(engine: Engine) -> None:
    """Each device is charged for what the plan has there, and never was for more than it has."""
    sessions = list(engine._sessions)
    for use in engine.plan.uses[1:]:
        ledger = engine._residence.ledgers[use.device]
        parts = [part for part in engine.plan.assignments if part.device == use.device]
        weights = sum(part.n_bytes for part in parts if part.mode == RESIDENT)
        # The norm before the head comes with its first use, and takes less than its page.
        assert weights <= ledger.used("weights") <= max(weights, use.weights_bytes)
        blocks = [b.index for b in engine.plan.blocks if b.kv_device == use.device]
        assert ledger.used("kv") == sum(
            a.nbytes for s in sessions for b in blocks for a in s._kvs[b]
        )
        assert ledger.used("kv") <= use.kv_bytes or not sessions
        assert ledger.used("staging") == use.n_slots * use.slot_bytes
        assert ledger.used("activations") <= use.workspace_bytes or not parts
        assert ledger.report().peak_bytes <= ledger.limit_bytes == use.budget_bytes


def live_bytes(device: str) -> int:
    """Bytes of all arrays on a CPU device, whoever has them."""
    gc.collect()
    number = 0 if device == HOST else int(device.partition(":")[2])
    on = jax.devices("cpu")[number]
    return sum(array.nbytes for array in jax.live_arrays() if array.devices() == {on})
