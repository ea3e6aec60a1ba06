"""What the engine says about itself: plain data, measured, nothing estimated."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jitllm.placement.devices import HOST


@dataclass(frozen=True)
class PartReport:
    """Neighbouring parts of the model in one place."""

    what: str
    """`blocks 0-2`, `head`, ..."""
    device: str
    mode: str
    """`resident`, `streamed`, `paged`, or `by rows`."""
    declined: str
    """What the device lacks where it was wanted; empty where it is."""


@dataclass(frozen=True)
class MemoryReport:
    """What a budget will cost, known before the first token."""

    budget_bytes: int
    automatic: bool
    """Whether the budget was chosen by the machine's free memory."""
    weights_bytes: int
    """All pages a pass visits, and what stays resident beside them."""
    kv_bytes: int
    """One session's KV cache."""
    pages_bytes: int
    """Of the budget, what is left for pages."""
    over_bytes: int
    """By how much the weights exceed the budget; 0 where they fit."""
    n_pages: int
    n_blocks: int
    n_resident_blocks: int
    block_bytes: int
    """The largest block's page."""
    page_ins_per_token: int
    page_in_bytes_per_token: int
    max_seq: int
    kernels: str
    placement: tuple[PartReport, ...] = ()
    """Where there are devices besides the host."""
    n_asked_blocks: int = 0
    """Blocks that rules or `-gpu-layers` wanted on devices."""
    n_device_blocks: int = 0
    """Blocks that are there, asked for or not."""
    profile: str = ""
    """The placement profile's file, if there is one."""
    profile_hash: str = ""
    """Of what it says, flags included; see `placement.profile`."""


@dataclass(frozen=True)
class DeviceReport:
    """What one device had of the model, and did for one reply."""

    device: str
    n_blocks: int
    """Placed there, at the reply's end."""
    blocks_executed: int
    weights_bytes: int
    """Resident there."""
    kv_bytes: int
    streamed_bytes: int
    """Uploaded through its slots for this reply."""
    peak_bytes: int = 0
    """The most that weights, KV, slots and activations ever took there."""
    seconds: float = 0.0
    """Of the reply's passes, the time that it had the activations."""


@dataclass
class GenerationReport:
    """One reply: what it is and what it cost. Complete when the reply has ended."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """`stop` (end of the reply), `length` (n reached), `context` (no room left), `cancelled`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, tokens whose KV was there already."""
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    page_ins: int = 0
    evictions: int = 0
    frames: int = 0
    bytes_read: int = 0
    read_requests: int = 0
    read_wait_s: float = 0.0
    bytes_read_per_token: int = 0
    """Bytes read from disk per decoded token, the prompt's apart."""
    budget_bytes: int = 0
    resident_bytes: int = 0
    peak_rss_bytes: int = 0
    devices: list[DeviceReport] = field(default_factory=list)
    """The host first."""
    seams_per_token: float = 0.0
    """How often activations changed device for a decoded token."""
    last_pass: dict[str, int] = field(default_factory=dict)
    """Blocks run in its last pass, by device."""


def reply_cost(
    *,
    last_pass: Mapping[str, int],
    page_ins: int,
    bytes_read: int,
    read_wait_s: float,
    budget_bytes: int,
    prefill_s: float,
    decode_s: float,
    decode_tokens_per_second: float,
) -> dict[str, Any]:
    """The object `jitllm` of a reply: where it ran, as counted in its last pass, and its cost."""
    elsewhere = {device: n for device, n in last_pass.items() if device != HOST and n}
    return {
        "device_blocks": sum(elsewhere.values()),
        "host_blocks": last_pass.get(HOST, 0),
        "device_ids": sorted(elsewhere),
        "page_ins": page_ins,
        "bytes_read": bytes_read,
        "read_wait_ms": round(1e3 * read_wait_s, 3),
        "budget_bytes": budget_bytes,
        "prefill_ms": round(1e3 * prefill_s, 3),
        "decode_ms": round(1e3 * decode_s, 3),
        "decode_tokens_per_second": round(decode_tokens_per_second, 2),
    }
