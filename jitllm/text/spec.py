"""What a container keeps of a vocabulary: one JSON-able dict, made at conversion."""

from typing import TypedDict


class TokenizerSpec(TypedDict):
    """Made by `build.build_tokenizer`, read by `tokenizer.Tokenizer`. Ids are token ids."""

    tokenizer_json: str
    """What the `tokenizers` library loads. It knows the user-defined tokens as added tokens (they
    are cut out of any text) and not the control tokens (`Tokenizer.encode` cuts those out)."""
    pieces: str
    """How a token's text becomes bytes: `byte-level` (GPT-2's byte alphabet) or `spm` (`▁` is a
    space)."""
    n_vocab: int
    add_bos: bool
    """Whether a text begins with BOS; never true where there is no BOS."""
    add_space_prefix: bool
    """Whether encoding puts a space before a text; decoding from BOS takes it away again."""
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    stop_ids: list[int]
    """Ids that end a reply, ascending."""
    control_ids: list[int]
    """Control and unknown tokens: special where special tokens are parsed, silent in text."""
    literal_ids: list[int]
    """User-defined tokens: their text is their bytes."""
    byte_ids: list[int]
    """`<0xNN>` tokens."""
    strip_after_ids: list[int]
    """Control tokens that swallow the white space behind them."""
    warning: str | None
    """A guess that was made, to be shown; None where everything was said by the file."""
