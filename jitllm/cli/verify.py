"""`jitllm verify`: is a placement right?"""

import dataclasses
import json as json_module
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes

from jitllm.cli.options import EngineOptions
from jitllm.cli.report import count
from jitllm.cli.terminal import columns, say
from jitllm.errors import JitllmError

if TYPE_CHECKING:
    from jitllm.verify import Verification

_DEFAULT_ENGINE = EngineOptions()


def verify(
    model: str,
    /,
    *,
    json: bool = False,
    engine: OmitArgPrefixes[EngineOptions] = _DEFAULT_ENGINE,
) -> None:
    """Compare a placement with the host alone, position by position; exit 1 if a token differs.

    Args:
        model: A container (.jlm), a GGUF (converted once into the cache) or a catalog name.
        json: Print one JSON object with every position.
    """
    settings = engine.settings()
    from jitllm.verify import verify as compare

    result = compare(model, **settings, say=say)
    if json:
        print(json_module.dumps(dataclasses.asdict(result)))
    else:
        print("\n".join(lines(result)))
    if result.wrong:
        raise JitllmError(f"the placement chooses another token at {_of(result.wrong, result)}")


def lines(result: "Verification") -> list[str]:
    """The comparison for a person."""
    ran = ", ".join(f"{device} {n:,}" for device, n in result.executed.items())
    told = [f"blocks run: {ran}; activations changed device {count(result.n_seams, 'time')}"]
    if not result.differing:
        return [*told, f"{count(len(result.positions), 'position')}: the logits are bit-equal"]
    rows = [
        (
            str(p.position),
            str(p.token),
            f"{p.largest_difference:.2e}",
            f"{p.margin:.2e}",
            "same" if p.same_choice else "ANOTHER TOKEN" if p.is_wrong else "a tie",
        )
        for p in result.differing
    ]
    told.append(f"the logits differ at {_of(result.differing, result)}")
    return [*told, *columns([("position", "token", "difference", "margin", "choice"), *rows])]


def _of(positions: list, result: "Verification") -> str:
    return f"{len(positions)} of {count(len(result.positions), 'position')}"
