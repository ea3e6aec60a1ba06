"""`jitllm speed`: how fast a model runs here."""

import dataclasses
import json as json_module
from typing import TYPE_CHECKING, Annotated

from tyro.conf import OmitArgPrefixes, arg

from jitllm.cli.options import EngineOptions
from jitllm.cli.terminal import progress_bar
from jitllm.ranges import Range
from jitllm.units import format_size

if TYPE_CHECKING:
    from jitllm.speed import Speed

_DEFAULT_ENGINE = EngineOptions()


def speed(
    model: str,
    /,
    *,
    p: Annotated[int, arg(metavar="N")] = 512,
    n: Annotated[int, arg(metavar="N")] = 128,
    r: Annotated[int, arg(metavar="N")] = 3,
    json: bool = False,
    engine: OmitArgPrefixes[EngineOptions] = _DEFAULT_ENGINE,
) -> None:
    """Measure tokens a second, for a prompt and for a reply, and how near memory's limit that is.

    Args:
        model: A container (.jlm), a GGUF (converted once into the cache) or a catalog name.
        p: Tokens of the prompt.
        n: Tokens of the reply.
        r: Rounds; medians are reported.
        json: Print one JSON object.
    """
    for name, value in (("p", p), ("n", n), ("r", r)):
        Range(int, 1).check(name, value)
    if engine.max_seq is None:
        engine = dataclasses.replace(engine, max_seq=max(p, n, 1))
    with engine.open(model) as opened:
        from jitllm import speed as measure
        from jitllm.paging.budget import usable_cores

        with progress_bar("rounds") as progress:
            n_threads = engine.threads or usable_cores()
            result = measure.speed(opened, p, n, r, n_threads, progress)
    if json:
        print(json_module.dumps(dataclasses.asdict(result)))
    else:
        print("\n".join(lines(result)))


def lines(result: "Speed") -> list[str]:
    """The result for a person."""
    return [
        f"prompt   {result.prefill_tokens_per_second:.1f} tokens/s"
        f" ({_span(result.prefill_spread)}) for {result.prefill_tokens} tokens",
        f"reply    {result.decode_tokens_per_second:.1f} tokens/s"
        f" ({_span(result.decode_spread)}) for {result.decode_tokens} tokens",
        f"weights  {format_size(result.weights_bytes)} a token,"
        f" {result.decode_gb_per_second:.1f} GB/s in the reply",
        f"memory   {result.memory_gb_per_second:.1f} GB/s by plain reading; the reply reached"
        f" {100 * result.share_of_memory:.0f} %",
        f"kernels  {result.kernels}",
    ]


def _span(spread: tuple[float, float]) -> str:
    return f"{spread[0]:.1f} to {spread[1]:.1f}"
