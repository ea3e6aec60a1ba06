"""`jitllm sweep`: tokens a second over budgets."""

import dataclasses
import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes

from jitllm.cli.options import EngineOptions
from jitllm.cli.terminal import columns, progress_bar, say
from jitllm.units import format_size

if TYPE_CHECKING:
    from jitllm.sweep import Point

_DEFAULT_ENGINE = EngineOptions()
_BAR = 40
_PREDICTED, _MEASURED = (200, 120, 30), (40, 90, 190)


def sweep(
    model: str,
    /,
    *,
    points: int = 8,
    png: Path | None = None,
    json: bool = False,
    engine: OmitArgPrefixes[EngineOptions] = _DEFAULT_ENGINE,
) -> None:
    """Measure tokens a second from the smallest budget to all of the model, beside the prediction.

    Args:
        model: A container (.jlm), a GGUF (converted once into the cache) or a catalog name.
        points: How many budgets.
        png: Draw the two curves into this file too.
        json: Print one JSON list of points.
    """
    prospect = engine.prospect(model)
    from jitllm.sweep import sweep as measure

    with progress_bar("points") as progress:
        result = measure(prospect, points, say, progress)
    if png is not None:
        png.write_bytes(picture(result))
    if json:
        print(json_module.dumps([dataclasses.asdict(point) for point in result]))
    else:
        print("\n".join(lines(result)))


def lines(points: Sequence["Point"]) -> list[str]:
    """A plot for the terminal: a bar for what was measured, `|` where it was predicted."""
    highest = max(max(p.measured_tokens_per_second, p.predicted_tokens_per_second) for p in points)
    rows = [
        (
            format_size(p.budget_bytes),
            format_size(p.bytes_read_per_token),
            f"{p.predicted_tokens_per_second:.1f}",
            f"{p.measured_tokens_per_second:.1f}",
            _bar(p, highest),
        )
        for p in points
    ]
    header = ("budget", "read a token", "predicted", "measured", "tokens/s")
    return columns([header, *rows])


def picture(points: Sequence["Point"]) -> bytes:
    """The same as a PNG."""
    from jitllm.cli.png import line_chart

    curves = [
        (
            name,
            colour,
            [(p.budget_bytes, getattr(p, f"{name}_tokens_per_second")) for p in points],
        )
        for name, colour in (("predicted", _PREDICTED), ("measured", _MEASURED))
    ]
    return line_chart(curves, lambda n_bytes: format_size(round(n_bytes)), "tokens/s")


def _bar(point: "Point", highest: float) -> str:
    measured = round(_BAR * point.measured_tokens_per_second / highest)
    predicted = round(_BAR * point.predicted_tokens_per_second / highest)
    bar = list(("█" * measured).ljust(_BAR + 1))
    bar[predicted] = "|"
    return "".join(bar).rstrip()
