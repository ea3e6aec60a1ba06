"""`jitllm convert`: a GGUF becomes a container."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from jitllm.cli.report import count, format_time
from jitllm.cli.terminal import progress_bar, read_text, say
from jitllm.errors import JitllmError, UsageError
from jitllm.units import format_size

if TYPE_CHECKING:
    from jitllm.convert import ConvertReport


def convert(
    source: str,
    out: Path | None = None,
    /,
    *,
    force: bool = False,
    plan: bool = False,
    chat_template: str | None = None,
    force_pre: bool = False,
) -> None:
    """Turn a GGUF into a container (.jlm), once; `run` and the others do it on their own.

    Without OUT the container goes into the cache, where the other commands find it. Its path is
    printed on stdout.

    Args:
        source: A GGUF (of a split set, any shard), an https URL of one, or a catalog name.
        out: The container to write.
        force: Replace OUT if it exists.
        plan: Report size, pages and what stands in the way; read no weights, write nothing.
        chat_template: File with a Jinja template to use in place of the model's own.
        force_pre: Accept a pre-tokenizer that is not in the table; ids may differ.
    """
    from jitllm import catalog
    from jitllm.convert import convert as convert_gguf

    template = read_text(chat_template) if chat_template else None
    with ExitStack() as stack:
        progress = stack.enter_context(progress_bar())
        if out is None and not (plan or force or template or force_pre):
            print(catalog.resolve(source, say=say, progress=progress))
            return
        if out is None and not plan:
            raise UsageError("name an OUT.jlm: what goes into the cache is made in one way only")
        gguf = stack.enter_context(catalog.local_gguf(source, say=say, progress=progress))
        started = time.monotonic()
        report = convert_gguf(
            gguf,
            out or Path(gguf.stem + ".jlm"),
            force=force,
            plan=plan,
            chat_template=template,
            force_pre=force_pre,
            progress=progress,
        )
    _show(report, plan, time.monotonic() - started)


def _show(report: "ConvertReport", plan: bool, seconds: float) -> None:
    tell = print if plan else say
    types = ", ".join(f"{name} {format_size(n)}" for name, n in report.qtype_bytes.items())
    tell(f"source    {report.source}, {format_size(report.source_bytes)}: {report.arch}, {types}")
    if report.ignored:
        tell(f"left out  {', '.join(report.ignored)}")
    if report.refusals:
        for refusal in report.refusals:
            tell(f"refused   {refusal}")
        raise JitllmError(
            f"{report.source} cannot be converted, for {count(len(report.refusals), 'reason')}"
        )
    kinds = dict.fromkeys(page.kind for page in report.pages)
    pages = ", ".join(_pages_of(report, kind) for kind in kinds)
    tell(f"pages     {pages}")
    took = "" if plan else f", in {format_time(seconds)}"
    tell(f"container {report.out}, {format_size(report.file_bytes)}{took}")
    if not plan:
        print(report.out)


def _pages_of(report: "ConvertReport", kind: str) -> str:
    sizes = [page.n_bytes for page in report.pages if page.kind == kind]
    span = sorted({format_size(min(sizes)), format_size(max(sizes))})
    return f"{len(sizes)} {kind} of {' to '.join(span)}"
