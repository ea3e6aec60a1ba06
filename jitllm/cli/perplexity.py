"""`jitllm perplexity`: how well a model predicts a text."""

import dataclasses
import json as json_module
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from jitllm.cli.options import EngineOptions
from jitllm.cli.report import count
from jitllm.cli.terminal import progress_bar, read_text, say
from jitllm.errors import UsageError

_DEFAULT_ENGINE = EngineOptions()


def perplexity(
    model: str,
    /,
    *,
    f: Annotated[str, arg(metavar="FILE")],
    ctx: int = 512,
    json: bool = False,
    engine: OmitArgPrefixes[EngineOptions] = _DEFAULT_ENGINE,
) -> None:
    """Measure how well a model predicts a text: the lower, the better.

    The text is cut into windows; the second half of each is scored, as llama.cpp does.

    Args:
        model: A container (.jlm), a GGUF (converted once into the cache) or a catalog name.
        f: The text; `-` is stdin.
        ctx: Tokens in a window.
        json: Print one JSON object.
    """
    text = read_text(f)
    if engine.max_seq is None:
        engine = dataclasses.replace(engine, max_seq=max(1, ctx))
    elif engine.max_seq < ctx:
        raise UsageError(f"-max-seq {engine.max_seq} has no room for a window of -ctx {ctx}")
    with engine.open(model) as opened:
        from jitllm import evaluate

        ids = opened.tokenize(text)
        bos = next(iter(opened.tokenize("")), None)
        with progress_bar("tokens") as progress:
            result = evaluate.perplexity(opened, ids, ctx, bos, progress)
    if json:
        print(json_module.dumps(dataclasses.asdict(result)))
        return
    say(
        f"{count(result.n_scored_tokens, 'token')} scored in"
        f" {count(result.n_windows, 'window')} of {result.window_tokens},"
        f" {count(result.n_left_out_tokens, 'token')} at the end left out"
    )
    print(f"perplexity {result.perplexity:.4f} ± {result.error:.4f}")
