"""What a server says of itself, as lines for a person. Pure functions over its JSON objects."""

from collections.abc import Iterator, Sequence
from typing import Any

from jitllm.cli.report import count, format_time
from jitllm.cli.terminal import columns
from jitllm.units import format_size

Facts = dict[str, Any]


def device_lines(devices: Sequence[Facts]) -> list[str]:
    """One line a device: budget, what is used of it, free and total memory."""
    rows = [("device", "budget", "used", "free", "total", "kind")]
    for device in devices:
        sizes = (_size(device[f"{key}_bytes"]) for key in ("budget", "used", "free", "total"))
        rows.append((device["id"], *sizes, device["kind"]))
    return columns(rows)


def model_lines(models: Sequence[Facts], files: Sequence[Facts]) -> list[str]:
    """The loaded models, and the files that could be."""
    rows = [("model", "file", "context", "profile", "blocks")]
    for model in models:
        blocks = ", ".join(f"{n} on {device}" for device, n in model["blocks"].items())
        context, profile = count(model["context_tokens"], "token"), model["profile"]["file"] or "-"
        rows.append((model["id"], model["file"], context, profile, blocks))
    listing = columns(rows) if models else ["no model is loaded"]
    names = [(file["file"], format_size(file["bytes"])) for file in files]
    return [*listing, "", *columns([("file", "size"), *names])] if files else listing


def budget_lines(pager: Facts) -> list[str]:
    """The pager of a model: what its budget is and what that comes to."""
    automatic = " (automatic)" if pager["automatic"] else ""
    fits = "it fits" if pager["fits"] else f"over budget by {format_size(pager['over_bytes'])}"
    return [
        f"model    {pager['model']}",
        f"memory   budget {format_size(pager['budget_bytes'])}{automatic},"
        f" {format_size(pager['pages_bytes'])} left for pages,"
        f" weights {format_size(pager['weights_bytes'])}: {fits}",
        f"pages    {pager['resident_blocks']} of {pager['blocks']} blocks resident at once,"
        f" {count(pager['frames'], 'frame')}, {count(pager['page_ins'], 'page-in')},"
        f" {count(pager['evictions'], 'eviction')},"
        f" {count(pager['page_ins_per_token'], 'page-in')} per token",
    ]


def applied_line(applied: Facts) -> str:
    """What a change of the budget did."""
    stay = f"{applied['n_pinned']} of {count(applied['n_pages'], 'page')} stay"
    rest = f", the others pass through {count(applied['n_moving'], 'frame')}"
    return (
        f"applied  budget {format_size(applied['budget_bytes'])},"
        f" {count(applied['evicted'], 'page')} evicted, {stay}{rest if applied['n_moving'] else ''}"
    )


def placement_lines(placement: Facts) -> list[str]:
    """Where every part of a model is, neighbours that have everything in common together."""
    profile = placement["profile"]
    told = [f"profile  {profile['file']}, hash {profile['hash']}"] if profile["file"] else []
    rows = [("part", "device", "mode", "bytes", "KV", "rule")]
    for parts in _runs(placement["parts"]):
        first, last = parts[0], parts[-1]
        several = f"blocks {first['part'].split()[-1]}-{last['part'].split()[-1]}"
        name = first["part"] if len(parts) == 1 else several
        n_bytes, kv_bytes = (sum(p[key] for p in parts) for key in ("bytes", "kv_bytes"))
        where = first["device"], first["mode"]
        rows.append((name, *where, format_size(n_bytes), format_size(kv_bytes), first["rule"]))
    return [*told, "", *columns(rows)]


def _runs(parts: Sequence[Facts]) -> Iterator[list[Facts]]:
    run: list[Facts] = []
    for part in parts:
        if run and any(part[key] != run[0][key] for key in ("device", "mode", "rule", "kv_device")):
            yield run
            run = []
        if part["part"] in ("head", "embed") and run:
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def session_lines(sessions: Sequence[Facts]) -> list[str]:
    """The open sessions."""
    if not sessions:
        return ["no session is open"]
    rows = [("session", "model", "kind", "tokens", "room", "state")]
    for s in sessions:
        numbers = f"{s['tokens']:,}", f"{s['room_tokens']:,}"
        rows.append(
            (s["id"], s["model"], s["kind"] or "new", *numbers, "busy" if s["busy"] else "idle")
        )
    return columns(rows)


def stats_lines(stats: Facts) -> list[str]:
    """The server's figures, and those of each model."""
    requests = ", ".join(f"{n} {outcome}" for outcome, n in stats["requests"].items())
    lines = [
        f"server   up for {format_time(stats['uptime_s'])},"
        f" {format_size(stats['rss_bytes'])} RSS (peak {format_size(stats['peak_rss_bytes'])})",
        f"requests {requests}",
    ]
    for id, model in stats["models"].items():
        lines += ["", f"model    {id}", *_model_figures(model)]
    return lines


def _model_figures(model: Facts) -> Iterator[str]:
    pager, rows, cache = model["pager"], model["scheduler"], model["scheduler"]["prefix_cache"]
    yield (
        f"memory   {format_size(model['resident_bytes'])} of"
        f" {format_size(model['budget_bytes'])} for weights,"
        f" {model['resident_pages']} of {count(model['pages'], 'page')} resident"
    )
    yield (
        f"pages    {count(model['frames'], 'frame')}, {count(pager['page_ins'], 'page-in')},"
        f" {count(pager['evictions'], 'eviction')}, {format_size(pager['bytes_read'])} read in"
        f" {count(pager['read_requests'], 'request')}"
    )
    yield (
        f"rows     {rows['n_decoding']} decoding, {rows['n_prefilling']} prefilling,"
        f" {rows['n_queued']} waiting; {count(rows['n_steps'], 'step')} of"
        f" {rows['n_step_rows'] / max(1, rows['n_steps']):.1f} rows"
    )
    yield (
        f"cache    {format_size(cache['used_bytes'])} of {format_size(cache['budget_bytes'])} for"
        f" prefixes, {count(cache['n_hits'], 'hit')}, {cache['n_misses']:,} missed"
    )
    for line in model["ledger"]["lines"]:
        if line["peak_bytes"]:
            yield (
                f"ledger   {line['name'].replace('_', ' ')} {format_size(line['used_bytes'])}"
                f" (peak {format_size(line['peak_bytes'])})"
            )


def cost_lines(usage: Facts, cost: Facts) -> list[str]:
    """What a reply took."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    known = f" ({cached} of them cached)" if cached else ""
    return [
        f"rate     prompt {count(usage['prompt_tokens'], 'token')}{known} in"
        f" {format_time(cost['prefill_ms'] / 1e3)},"
        f" {count(usage['completion_tokens'], 'token')} in {format_time(cost['decode_ms'] / 1e3)}"
        f" ({cost['decode_tokens_per_second']:.1f} tokens/s)",
        f"pages    {count(cost['page_ins'], 'page-in')}, {format_size(cost['bytes_read'])} read,"
        f" blocked on reads for {format_time(cost['read_wait_ms'] / 1e3)}",
    ]


def _size(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else format_size(n_bytes)
