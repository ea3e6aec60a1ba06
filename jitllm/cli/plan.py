"""`jitllm plan`: what a budget will cost, before anything is read."""

import dataclasses
import json as json_module
from typing import TYPE_CHECKING, Any

from tyro.conf import OmitArgPrefixes

from jitllm.cli.options import EngineOptions
from jitllm.cli.report import count
from jitllm.cli.terminal import columns, say
from jitllm.units import format_size

if TYPE_CHECKING:
    from jitllm.outlook import Outlook
    from jitllm.placement.forecast import Cost

_DEFAULT_ENGINE = EngineOptions()
_COSTS = {
    "now": "this budget",
    "up": "next above",
    "down": "next below",
    "smallest": "smallest",
    "whole": "all resident",
}


def plan(
    model: str,
    /,
    *,
    json: bool = False,
    engine: OmitArgPrefixes[EngineOptions] = _DEFAULT_ENGINE,
) -> None:
    """Show where the model will be and what a budget will cost, without loading it.

    The disk is measured for a moment; how fast the model computes is measured once and kept.

    Args:
        model: A container (.jlm), a GGUF (converted once into the cache) or a catalog name.
        json: Print one JSON object.
    """
    prospect = engine.prospect(model)
    from jitllm.outlook import outlook

    result = outlook(prospect, say)
    if json:
        print(json_module.dumps(as_object(result)))
    else:
        print("\n".join(lines(result)))


def lines(result: "Outlook") -> list[str]:
    """The outlook for a person."""
    prospect = result.prospect
    automatic = " (automatic)" if prospect.automatic else ""
    over = f"  ★ OVER BUDGET by {format_size(result.over_bytes)}" if result.over_bytes else ""
    told = [
        f"memory   budget {format_size(prospect.budget_bytes)}{automatic},"
        f" weights {format_size(result.weights_bytes)},"
        f" KV {format_size(result.kv_bytes)} for {count(prospect.max_seq, 'token')},"
        f" peak {format_size(result.peak_bytes)}{over}",
        "",
        prospect.plan.render(),
    ]
    if result.forecast is None:
        return told
    rows = [
        _cost_row(title, cost)
        for name, title in _COSTS.items()
        if (cost := getattr(result.forecast, name)) is not None
    ]
    header = ("a token under", "from", "resident", "page-ins", "read", "tokens/s")
    rates = result.rates
    measured = (
        f"measured: disk {rates.read / 1e9:.2f} GB/s, computing {rates.paged / 1e9:.2f} GB/s"
        f" page by page, {rates.resident / 1e9:.2f} GB/s resident"
    )
    return [*told, "", *columns([header, *rows]), "", measured]


def as_object(result: "Outlook") -> dict[str, Any]:
    """The outlook for scripts."""
    prospect = result.prospect
    costs = {name: getattr(result.forecast, name) for name in _COSTS} if result.forecast else {}
    return {
        "budget_bytes": prospect.budget_bytes,
        "automatic": prospect.automatic,
        "weights_bytes": result.weights_bytes,
        "over_bytes": result.over_bytes,
        "kv_bytes": result.kv_bytes,
        "peak_bytes": result.peak_bytes,
        "max_seq": prospect.max_seq,
        "rates": result.rates and dataclasses.asdict(result.rates),
        **{name: cost and cost_object(cost) for name, cost in costs.items()},
        "parts": [dataclasses.asdict(row) for row in prospect.plan.explain()],
        "devices": [_use_object(use) for use in prospect.plan.uses],
    }


def cost_object(cost: "Cost") -> dict[str, Any]:
    """What a token costs, for scripts."""
    return {
        "budget_bytes": cost.budget_bytes,
        "n_resident": cost.n_resident,
        "n_moving": cost.n_moving,
        "page_ins": cost.page_ins,
        "bytes_read_per_token": cost.bytes_read,
        "tokens_per_second": cost.tokens_per_second,
    }


def _cost_row(title: str, cost: "Cost") -> tuple[str, ...]:
    return (
        title,
        format_size(cost.budget_bytes),
        count(cost.n_resident, "page"),
        str(cost.page_ins),
        format_size(cost.bytes_read),
        f"{cost.tokens_per_second:.1f}",
    )


def _use_object(use: Any) -> dict[str, Any]:
    return dataclasses.asdict(use) | {"n_bytes": use.n_bytes}
