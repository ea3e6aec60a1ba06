"""What a run cost, as lines for a person and as one object for a script. Pure functions."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jitllm.cli.terminal import columns
from jitllm.reports import GenerationReport, MemoryReport, reply_cost
from jitllm.units import format_size

if TYPE_CHECKING:
    from jitllm.engine import EngineStats


def lines_before(memory: MemoryReport) -> list[str]:
    """What the budget means, before the first token: `memory`, `pages` and `kernels` lines, and
    `profile` where there is one."""
    automatic = " (automatic)" if memory.automatic else ""
    over = f"  ★ OVER BUDGET by {format_size(memory.over_bytes)}" if memory.over_bytes else ""
    return [
        f"memory   budget {format_size(memory.budget_bytes)}{automatic},"
        f" weights {format_size(memory.weights_bytes)},"
        f" KV {format_size(memory.kv_bytes)} for {count(memory.max_seq, 'token')},"
        f" {format_size(memory.pages_bytes)} left for pages{over}",
        f"pages    {memory.n_resident_blocks} of {memory.n_blocks} host blocks resident at once,"
        f" {format_size(memory.block_bytes)} each,"
        f" {count(memory.page_ins_per_token, 'page-in')} per token",
        f"kernels  {memory.kernels}",
        *([f"profile  {memory.profile}, hash {memory.profile_hash}"] if memory.profile else []),
        *_placement(memory),
    ]


def _placement(memory: MemoryReport) -> list[str]:
    """`placed` lines, where there are other devices than the host; each decline with its reason."""
    lines = [
        f"placed   {part.what} on {part.device}, {part.mode}"
        f"{f'  ★ {part.declined}' if part.declined else ''}"
        for part in memory.placement
    ]
    if memory.n_asked_blocks > memory.n_device_blocks:
        asked = count(memory.n_asked_blocks, "block")
        lines.append(f"placed   {memory.n_device_blocks} of the {asked} asked for on devices")
    return lines


def lines_after(report: GenerationReport) -> list[str]:
    """What the reply cost: `pages`, `bytes`, `rate` and `peak` lines, and what devices did."""
    cached = f" ({report.cached_tokens} of them cached)" if report.cached_tokens else ""
    return [
        f"pages    {count(report.frames, 'frame')}, {count(report.page_ins, 'page-in')},"
        f" {count(report.evictions, 'eviction')}, {format_size(report.bytes_read)} read in"
        f" {count(report.read_requests, 'request')}, blocked on reads for"
        f" {format_time(report.read_wait_s)}",
        f"bytes    {format_size(round(report.bytes_read_per_token))} read per token",
        f"rate     prompt {count(report.prompt_tokens, 'token')}{cached} in"
        f" {format_time(report.prefill_s)} ({report.prefill_tokens_per_second:.1f} tokens/s),"
        f" decode {count(report.generated_tokens, 'token')} in {format_time(report.decode_s)}"
        f" ({report.decode_tokens_per_second:.1f} tokens/s)",
        f"peak     {format_size(report.peak_rss_bytes)} RSS,"
        f" {format_size(report.resident_bytes)} of it weights",
        *_device_lines(report),
    ]


def _device_lines(report: GenerationReport) -> list[str]:
    """A line a device, and how often activations went between them; none for the host alone."""
    if len(report.devices) < 2:
        return []
    told = []
    for d in report.devices:
        streamed = f", {format_size(d.streamed_bytes)} streamed" if d.streamed_bytes else ""
        ran = f"{count(d.n_blocks, 'block')}, {count(d.blocks_executed, 'block run')}"
        ran += f" in {format_time(d.seconds)}"
        held = f"{format_size(d.weights_bytes)} resident{streamed}, {format_size(d.kv_bytes)} KV"
        told.append(f"device   {d.device}: {ran}, {held}")
    return [*told, f"seams    {report.seams_per_token:.1f} per token"]


def lines_of_ledger(stats: "EngineStats") -> list[str]:
    """Who has allocated how much: a line for each line of the ledger, and for the process."""
    report = stats.ledger
    rows = [
        (line.name, line.budget_bytes, line.used_bytes, line.peak_bytes) for line in report.lines
    ]
    rows.append(("all", report.limit_bytes, report.used_bytes, report.peak_bytes))
    rows.append(("process", None, stats.rss_bytes, stats.peak_rss_bytes))
    cells = [
        (name.replace("_", " "), *("" if n is None else format_size(n) for n in sizes))
        for name, *sizes in rows
    ]
    return columns([("ledger", "budget", "used", "peak"), *cells])


def as_object(memory: MemoryReport, report: GenerationReport, text: str) -> dict[str, Any]:
    """The same facts for scripts. `text` is what a run prints, prompt included; `reply` is what
    the model added to it."""
    facts = dataclasses.asdict(memory) | dataclasses.asdict(report)
    cost = reply_cost(
        last_pass=report.last_pass,
        page_ins=report.page_ins,
        bytes_read=report.bytes_read,
        read_wait_s=report.read_wait_s,
        budget_bytes=report.budget_bytes,
        prefill_s=report.prefill_s,
        decode_s=report.decode_s,
        decode_tokens_per_second=report.decode_tokens_per_second,
    )
    facts = {name: fact for name, fact in facts.items() if name != "text"}
    return {"text": text, "reply": report.text} | facts | {"jitllm": cost}


def count(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_time(seconds: float) -> str:
    """Seconds in the unit that reads best: `840 us`, `12.5 ms`, `3.42 s`, `2 min 5 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
