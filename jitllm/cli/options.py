"""Flags that several commands share, and how a text becomes their value."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from jitllm.cli.terminal import progress_bar, say
from jitllm.ranges import check_counts
from jitllm.units import format_size, parse_size

if TYPE_CHECKING:
    from jitllm.engine import Engine
    from jitllm.placement.rules import Profile
    from jitllm.prospect import Prospect

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
    process_limit: Size | None = None
    """All that the ledger counts together, KV and activations too; unset: no limit of its own."""
    max_seq: int | None = None
    """Room for N tokens, prompt and reply together; unset: the model's limit, at most 4096."""
    kv: Literal["f16", "f32"] | None = None
    """Type of the cached keys and values; unset: f16, or what the profile says."""
    threads: int | None = None
    """CPU threads; unset: the physical cores this process may use."""
    no_check: bool = False
    """Do not check the hash of each page that is read from disk."""
    devices: str | None = None
    """auto (if unset), all, cpu, gpu[:N] or PLATFORM[:N]; a comma list, each may end in =SIZE."""
    vram: Size | None = None
    """Memory for each device without a =SIZE of its own; unset: what is free, less a reserve."""
    gpu_layers: int | None = None
    """Put the last N blocks on devices; more than there are takes the output head too."""
    placement: str | None = None
    """SEL=WHERE,...: SEL is N, A-B, head or *; WHERE is host or a device, ! pinned, ~ streamed."""
    placement_strict: bool = False
    """Refuse a placement that does not fit, rather than leaving blocks on the host."""
    relocate: bool = False
    """When a growing KV cache fills a device, send its last blocks home until there is room."""
    gpu_grow: bool = False
    """Let devices take more of the host's blocks while they have room."""
    profile: str | None = None
    """YAML file that says all this; the flags win over it."""

    def __post_init__(self) -> None:
        """SettingError for a count that cannot be."""
        check_counts(self, max_seq=1, threads=1, gpu_layers=0)

    def open(self, model: str) -> "Engine":
        """The engine for `model`: a container, a GGUF or a catalog name, fetched and converted
        with a progress bar where need be."""
        settings = self.settings()
        from jitllm.engine import Engine

        with progress_bar() as progress:
            return Engine.open(model, **settings, say=say, progress=progress)

    def prospect(self, model: str) -> "Prospect":
        """What the engine for `model` would be; nothing of the model is read but its head."""
        profile = self.effective_profile()
        from jitllm.catalog import resolve
        from jitllm.paging.container import Container
        from jitllm.prospect import devices_of, look_ahead

        devices = devices_of(profile)
        with progress_bar() as progress:
            container = Container.open(resolve(model, say=say, progress=progress))
        return look_ahead(
            container,
            devices,
            profile,
            self.maxmem,
            self.max_seq,
            profile.kv_dtype,
            self.threads,
            self.process_limit,
        )

    def settings(self) -> dict[str, Any]:
        """What these flags are to `Engine.open`."""
        profile = self.effective_profile()
        return {
            "maxmem": self.maxmem,
            "profile": profile,
            "grow": self.gpu_grow,
            "max_seq": self.max_seq,
            "kv": profile.kv_dtype,
            "threads": self.threads,
            "process_limit": self.process_limit,
            "check_hashes": not self.no_check,
        }

    def effective_profile(self) -> "Profile":
        """The profile of the file, if any, with what the flags say instead."""
        from jitllm.placement.devices import limit, parse_devices
        from jitllm.placement.profile import load_profile
        from jitllm.placement.rules import Profile, override

        profile = override(
            load_profile(self.profile) if self.profile else Profile(),
            devices=self.devices,
            placement=self.placement,
            kv_dtype=self.kv,
            gpu_layers=self.gpu_layers,
            strict=self.placement_strict or None,
            relocate=self.relocate or None,
        )
        if self.vram is None:
            return profile
        devices = limit(profile.devices or parse_devices("auto"), self.vram)
        return replace(profile, devices=devices)
