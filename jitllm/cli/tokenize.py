"""`jitllm tokenize`: how a model cuts a text."""

import json as json_module

from jitllm.cli.options import Words
from jitllm.cli.terminal import progress_bar, say, text_or_stdin


def tokenize(
    model: str,
    text: Words = (),
    /,
    *,
    special: bool = False,
    no_bos: bool = False,
    json: bool = False,
) -> None:
    """Show the ids and pieces of a text, one token a line.

    Args:
        model: A container (.jlm), a GGUF (converted once into the cache) or a catalog name.
        text: The text; `-` or none reads stdin, newlines and all.
        special: Read special tokens such as <|im_end|> as tokens and not as text.
        no_bos: Leave out the token that begins a text, where the model has one.
        json: Print one JSON object with ids and pieces.
    """
    from jitllm.catalog import resolve
    from jitllm.paging.container import Container
    from jitllm.text.tokenizer import Tokenizer

    with progress_bar() as progress:
        container = Container.open(resolve(model, say=say, progress=progress))
    tokenizer = Tokenizer(container.metadata["tokenizer"])
    words = text_or_stdin(text, strip_newline=False)
    ids = tokenizer.encode(words, add_bos=False if no_bos else None, parse_special=special)
    pieces = [tokenizer.piece(id_) for id_ in ids]
    if json:
        print(json_module.dumps({"ids": ids, "pieces": pieces}, ensure_ascii=False))
        return
    width = len(str(max(ids, default=0)))
    for id_, piece in zip(ids, pieces, strict=True):
        print(f"{id_:{width}}  {piece!r}")
