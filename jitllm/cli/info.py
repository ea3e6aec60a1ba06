"""`jitllm info`: what is in a file."""

import dataclasses
import json as json_module
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jitllm.cli.terminal import columns
from jitllm.units import format_size

_WIDTH, _SHOWN_VALUES = 100, 4


def info(file: Path, /, *, json: bool = False) -> None:
    """Show the metadata, tensors, pages and sizes of a GGUF or a container.

    Args:
        file: A container (.jlm) or a GGUF; of a split set, any shard.
        json: Print one JSON object, long values in full.
    """
    facts = describe(file)
    if json:
        print(json_module.dumps(facts, ensure_ascii=False))
        return
    for line in _lines(facts):
        print(line)


def describe(path: Path) -> dict[str, Any]:
    """The facts that `info` prints: file, metadata, tensors and, of a container, pages."""
    from jitllm.catalog import is_gguf

    return _describe_gguf(path) if is_gguf(path) else _describe_container(path)


def _describe_gguf(path: Path) -> dict[str, Any]:
    from jitllm.gguf_file import read_gguf

    gguf = read_gguf(path)
    tensors = [
        {"name": t.name, "qtype": t.qtype, "shape": list(t.shape), "n_bytes": t.n_bytes}
        for t in gguf.tensors.values()
    ]
    return {
        "file": str(path),
        "format": f"GGUF version {gguf.version}",
        "n_bytes": gguf.n_bytes,
        "shards": [str(shard) for shard in gguf.shards],
        "metadata": {key: _plain(value) for key, value in gguf.metadata.items()},
        "tensors": tensors,
    }


def _describe_container(path: Path) -> dict[str, Any]:
    from jitllm.paging.container import Container

    container = Container.open(path)
    return {
        "file": str(path),
        "format": "jitllm container",
        "n_bytes": container.file_bytes,
        "metadata": dict(_flat("", container.metadata)),
        "pages": [dataclasses.asdict(page) for page in container.pages],
        "tensors": [
            dataclasses.asdict(tensor) | {"name": key} for key, tensor in container.tensors.items()
        ],
    }


def _plain(value: Any) -> Any:
    """Numpy arrays as lists, for JSON."""
    return value.tolist() if hasattr(value, "tolist") else value


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Nested dicts as dotted keys."""
    if not isinstance(value, dict):
        yield prefix.removeprefix("."), value
        return
    for key, inner in value.items():
        yield from _flat(f"{prefix}.{key}", inner)


def _lines(facts: dict[str, Any]) -> Iterable[str]:
    yield f"{facts['file']}: {facts['format']}, {format_size(facts['n_bytes'])}"
    if len(facts.get("shards", ())) > 1:
        yield from ("", "shards", *(f"  {shard}" for shard in facts["shards"]))
    yield from ("", f"metadata ({len(facts['metadata'])})")
    yield from _indented([(key, _short(value)) for key, value in facts["metadata"].items()])
    if "pages" in facts:
        yield from ("", f"pages ({len(facts['pages'])})")
        yield from _indented([_page_row(n, page) for n, page in enumerate(facts["pages"])])
    yield from ("", f"tensors ({len(facts['tensors'])})")
    yield from _indented([_tensor_row(tensor) for tensor in facts["tensors"]])
    yield from ("", "weights by type")
    yield from _indented(_type_rows(facts["tensors"]))


def _indented(rows: list[tuple[str, ...]]) -> Iterable[str]:
    return (f"  {line}" for line in columns(rows))


def _page_row(number: int, page: dict[str, Any]) -> tuple[str, ...]:
    place = f"at {page['offset']}"
    return (str(number), f"{page['kind']} {page['index']}", format_size(page["n_bytes"]), place)


def _tensor_row(tensor: dict[str, Any]) -> tuple[str, ...]:
    shape = " x ".join(map(str, tensor["shape"]))
    row = (printable(tensor["name"]), tensor["qtype"], shape, format_size(tensor["n_bytes"]))
    return (*row, f"page {tensor['page']}") if "page" in tensor else row


def _type_rows(tensors: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    sizes: dict[str, list[int]] = {}
    for tensor in tensors:
        sizes.setdefault(tensor["qtype"], []).append(tensor["n_bytes"])
    order = sorted(sizes, key=lambda name: -sum(sizes[name]))
    return [(name, f"{len(sizes[name])}", format_size(sum(sizes[name]))) for name in order]


def _short(value: Any) -> str:
    """One line: a long text or list by its beginning and its length."""
    if isinstance(value, list) and len(value) > _SHOWN_VALUES:
        shown = ", ".join(_short(item) for item in value[:_SHOWN_VALUES])
        return f"{shown[:_WIDTH]}, ... ({len(value)} values)"
    if isinstance(value, list):
        return ", ".join(map(_short, value)) or "none"
    text = printable(str(value))
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}... ({len(text)} characters)"


def printable(text: str) -> str:
    """`text` with control characters escaped: a file's own words never drive the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
