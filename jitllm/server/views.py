"""What a client is shown of models, devices and costs: figures read now, as JSON objects."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitllm.paging.budget import automatic_budget, memory_limits
from jitllm.placement.devices import Device, list_devices
from jitllm.placement.plan import Assignment
from jitllm.placement.profile import profile_hash
from jitllm.reports import reply_cost

if TYPE_CHECKING:
    from jitllm.engine import Engine, EngineStats
    from jitllm.rows import RowFigures
    from jitllm.server.models import Model
    from jitllm.server.sessions import OpenSession


def cost_of(
    model: Model, rows: Sequence[RowFigures], session: OpenSession | None
) -> dict[str, Any]:
    """The `jitllm` object of a reply: where it ran and what it cost, all of it measured.

    Counters are the whole engine's while the reply was made, whoever shared its passes.
    """
    engine = model.engine
    first, last = _span(rows)
    prefill_s, decode_s = sum(r.prefill_s for r in rows), max(r.decode_s for r in rows)
    n_prefilled = sum(r.prompt_tokens - r.cached_tokens for r in rows)
    cost = reply_cost(
        last_pass=last.last_pass,
        page_ins=last.counters.page_ins - first.counters.page_ins,
        bytes_read=last.counters.bytes_read - first.counters.bytes_read,
        read_wait_s=last.counters.blocked_s - first.counters.blocked_s,
        budget_bytes=last.budget_bytes,
        prefill_s=prefill_s,
        decode_s=decode_s,
        decode_tokens_per_second=_rate(sum(r.n_steps for r in rows), decode_s),
    )
    return cost | {
        "file": model.path.name,
        "kernels": engine.kernels,
        "resident_bytes": last.resident_bytes,
        "queue_ms": round(1e3 * max(r.queue_s for r in rows), 3),
        "prefill_tokens_per_second": _rate(n_prefilled, prefill_s),
        "evictions": last.counters.evictions - first.counters.evictions,
        "devices": [dataclasses.asdict(d) for d in engine.device_reports(first, last)],
        "rows_together": max(r.max_rows for r in rows),
        "session": session.id if session else None,
    }


def _span(rows: Sequence[RowFigures]) -> tuple[EngineStats, EngineStats]:
    """The engine before the first of the rows and after the last."""

    def order(stats: EngineStats) -> int:
        return sum(stats.blocks_executed.values())

    return min((r.before for r in rows), key=order), max((r.after for r in rows), key=order)


def _rate(n_tokens: int, seconds: float) -> float:
    return round(n_tokens / seconds, 2) if seconds else 0.0


def blocks_by_device(engine: Engine) -> dict[str, int]:
    """How many blocks each device executes."""
    return dict(Counter(block.device for block in engine.plan.blocks))


def model_object(model: Model) -> dict[str, Any]:
    """A loaded model, in OpenAI's shape and with what it runs on."""
    engine = model.engine
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "jitllm",
        "file": model.path.name,
        "context_tokens": engine.max_seq,
        "kv": engine.profile.kv_dtype,
        "threads": engine.n_threads,
        "process_limit_bytes": engine.ledger.limit_bytes,
        "kernels": engine.kernels,
        "blocks": blocks_by_device(engine),
        "profile": profile_object(engine),
    }


def profile_object(engine: Engine) -> dict[str, Any]:
    """The placement profile that a model was opened with, flags included."""
    file = engine.profile.source
    return {"file": Path(file).name if file else None, "hash": profile_hash(engine.profile)}


def budget_object(model: Model) -> dict[str, Any]:
    """The pager of a model: its budget and what that comes to."""
    memory, stats = model.engine.memory_report(), model.engine.stats()
    return {
        "model": model.id,
        "budget_bytes": memory.budget_bytes,
        "automatic": memory.automatic,
        "pages_bytes": memory.pages_bytes,
        "weights_bytes": memory.weights_bytes,
        "resident_bytes": stats.resident_bytes,
        "fits": memory.over_bytes == 0,
        "over_bytes": memory.over_bytes,
        "blocks": memory.n_blocks,
        "resident_blocks": memory.n_resident_blocks,
        "frames": stats.frames,
        "page_ins": stats.counters.page_ins,
        "evictions": stats.counters.evictions,
        "page_ins_per_token": memory.page_ins_per_token,
        "kv_bytes": memory.kv_bytes,
    }


def placement_object(model: Model) -> dict[str, Any]:
    """Where every part of a model is, and why; with the pager's figures."""
    plan = model.engine.plan
    return {
        "model": model.id,
        "profile": profile_object(model.engine),
        "parts": [_part(part) for part in plan.assignments],
        "devices": [
            {
                "id": use.device,
                "budget_bytes": use.budget_bytes,
                "used_bytes": use.n_bytes,
                "weights_bytes": use.weights_bytes,
                "kv_bytes": use.kv_bytes,
            }
            for use in plan.uses
        ],
        "pager": budget_object(model),
    }


def _part(part: Assignment) -> dict[str, Any]:
    return {
        "part": part.name,
        "device": part.device,
        "mode": part.mode,
        "bytes": part.n_bytes,
        "kv_bytes": part.kv_bytes,
        "kv_device": part.kv_device,
        "pinned": part.pinned,
        "rule": part.rule,
        "declined": [str(decline) for decline in part.declines],
    }


def residency_object(model: Model) -> dict[str, Any]:
    """Which blocks are in memory now, and where."""
    pairs = zip(model.engine.plan.blocks, model.engine.residency(), strict=True)
    blocks = [
        {
            "block": block.index,
            "device": block.device,
            "mode": block.mode,
            "bytes": block.n_bytes,
            "in_memory": in_memory,
        }
        for block, in_memory in pairs
    ]
    return {"model": model.id, "blocks": blocks}


def devices_object(models: Iterable[Model]) -> list[dict[str, Any]]:
    """The memory that can be spent: the host's, and that of every device which has its own.

    Free and total are read now. Budgets and use are those of the loaded models together; the host's
    are for weights, those of other devices for all that is there.
    """
    engines = [model.engine for model in models]
    rows = [_device(device, engines) for device in list_devices() if _has_memory(device)]
    limits = memory_limits()
    rows[0] |= {
        "budget_bytes": sum(e.stats().budget_bytes for e in engines) or automatic_budget(),
        "free_bytes": limits.usable_bytes,
        "total_bytes": min(limits.total_bytes, limits.cgroup_limit_bytes or limits.total_bytes),
    }
    return rows


def _has_memory(device: Device) -> bool:
    return device.is_host or not device.shares_host_memory


def _device(device: Device, engines: Sequence[Engine]) -> dict[str, Any]:
    uses = [use for e in engines for use in e.plan.uses if use.device == device.id]
    reports = [r for e in engines for r in e.device_reports(e.stats(), e.stats())]
    had = [
        r.weights_bytes + r.kv_bytes * (not device.is_host)
        for r in reports
        if r.device == device.id
    ]
    budgets = [use.budget_bytes for use in uses if use.budget_bytes is not None]
    return {
        "id": device.id,
        "kind": device.kind,
        "budget_bytes": sum(budgets) if budgets else None,
        "used_bytes": sum(had),
        "free_bytes": device.free_bytes,
        "total_bytes": device.total_bytes,
    }


def model_stats(model: Model) -> dict[str, Any]:
    """Everything that is counted about a model, now."""
    stats, scheduler = model.engine.stats(), model.scheduler.stats
    return {
        "budget_bytes": stats.budget_bytes,
        "resident_bytes": stats.resident_bytes,
        "resident_pages": stats.n_resident_pages,
        "pages": stats.n_pages,
        "frames": stats.frames,
        "pager": dataclasses.asdict(stats.counters),
        "ledger": dataclasses.asdict(stats.ledger),
        "blocks_executed": stats.blocks_executed,
        "steps_compiled": stats.steps_compiled,
        "scheduler": dataclasses.asdict(scheduler),
        "sessions": len(model.sessions.list()),
    }
