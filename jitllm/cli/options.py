"""Flags that several commands share, and how a text becomes their value."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from jitllm.cli.terminal import progress_bar, say
from jitllm.units import format_size, parse_size

if TYPE_CHECKING:
    from jitllm.engine import Engine

Size = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="SIZE",
        instance_from_str=lambda words: parse_size(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda n_bytes: [format_size(n_bytes)],
    ),
]
"""Bytes, written as `400K`, `1.5G`, `2GiB`."""


Words = Annotated[tuple[str, ...], arg(metavar="[TEXT...]", help_behavior_hint="(optional)")]
"""Any number of words that make one text, see `text_or_stdin`."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where the model runs and how much memory it may take."""

    maxmem: Size | None = None
    """Memory for weights; unset: 80 % of what is free. The rest is read from disk as needed."""
    devices: str | None = None
    """auto (if unset), all, cpu, gpu[:N] or PLATFORM[:N]; a comma list, each may end in =SIZE."""
    max_seq: int | None = None
    """Room for N tokens, prompt and reply together; unset: the model's limit, at most 4096."""
    kv: Literal["f16", "f32"] = "f16"
    """Type of the cached keys and values."""
    threads: int | None = None
    """CPU threads; unset: the physical cores this process may use."""
    no_check: bool = False
    """Do not check the hash of each page that is read from disk."""

    def open(self, model: str) -> "Engine":
        """The engine for `model`: a container, a GGUF or a catalog name, fetched and converted
        with a progress bar where need be."""
        from jitllm.engine import Engine

        with progress_bar() as progress:
            return Engine.open(
                model,
                maxmem=self.maxmem,
                devices=self.devices,
                max_seq=self.max_seq,
                kv=self.kv,
                threads=self.threads,
                check_hashes=not self.no_check,
                say=say,
                progress=progress,
            )
