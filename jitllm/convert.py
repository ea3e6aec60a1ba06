"""GGUF -> container: once, streaming, and the only place that refuses a model.

Everything that could be wrong is found from the header, before a weight is read. Pages hold the
source's own bits in the kernels' tile layout; vectors become F32; embedding rows that are not also
the output head stay GGUF rows, to be read one at a time.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jitllm import __version__
from jitllm.convert_pages import BATCH_BYTES, HEAD, Part, paginate
from jitllm.errors import ChatTemplateError, FormatError, JitllmError, UnsupportedError
from jitllm.gguf_file import GGUFFile, read_gguf
from jitllm.kernels.qtypes import QTYPES
from jitllm.model.arch import expected_tensors, model_config
from jitllm.model.config import ModelConfig
from jitllm.paging.container import (
    ContainerWriter,
    PageEntry,
    PageSpec,
    TensorSpec,
    check_target,
    plan_layout,
)
from jitllm.text.build import build_tokenizer
from jitllm.text.chat import ChatTemplate

Progress = Callable[[str, int, int], None]
"""progress(what, done_bytes, total_bytes)."""

QUANTIZATION_VERSION = 2
_BLOCK = re.compile(r"blk\.\d+\.(.+)")
# What llama.cpp's loader skips too: tables that the rotation is computed without.
_IGNORED_TENSORS = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?")
# Keys that have a reader here or in the tokenizer; the architecture answers for its own.
_KNOWN_KEYS = re.compile(r"general\.|split\.|tokenizer\.")
_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did, or with `plan` would do."""

    source: Path
    out: Path
    arch: str
    source_bytes: int
    file_bytes: int = 0
    """Size of the container; 0 where a refusal stands in the way of knowing it."""
    pages: tuple[PageEntry, ...] = ()
    qtype_bytes: dict[str, int] = field(default_factory=dict)
    """Source bytes per weight type."""
    ignored: tuple[str, ...] = ()
    """Tensors and metadata keys of the source that were left out on purpose."""
    warnings: tuple[str, ...] = ()
    """What was guessed where the source does not say, and what of it cannot be used."""
    refusals: tuple[str, ...] = ()
    """Why the model cannot be converted, one sentence each; none where it can."""


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    plan: bool = False,
    chat_template: str | None = None,
    force_pre: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write the container of the GGUF at `source` to `out`.

    `chat_template` (Jinja text) takes the place of the model's own; `force_pre` accepts a
    pre-tokenizer that is not in the table; `force` replaces `out`. With `plan` nothing is written,
    no weight is read, and refusals are listed instead of raised. Memory stays below two of the
    largest tensors plus 300 MB. JitllmError says in one sentence why it cannot be done.
    """
    source, out = Path(source), Path(out)
    if not plan:
        check_target(out, force)
    gguf = read_gguf(source)
    if not plan and any(out.exists() and out.samefile(shard) for shard in gguf.shards):
        raise JitllmError(f"{out} is the source itself; name another file for the container")
    examined = _examine(gguf, chat_template, force_pre)
    refusals = examined.refusals
    if refusals and not plan:
        n_more = len(refusals) - 1
        more = f" (and {n_more} more, see `jitllm convert -plan`)" if n_more else ""
        raise type(refusals[0])(f"{refusals[0]}{more}")
    if not plan:
        _write(examined, out, force, progress or (lambda *_: None))
    return examined.report(out)


# Examining


@dataclass(frozen=True)
class _Examined:
    """What the header of a source says, and everything that speaks against converting it."""

    gguf: GGUFFile
    metadata: dict[str, Any]
    """The container's, but for the hash of the source."""
    pages: list[PageSpec]
    parts: list[Part]
    refusals: list[JitllmError]

    @property
    def specs(self) -> list[TensorSpec]:
        return [part.spec() for part in self.parts]

    def metadata_with(self, sha256: str) -> dict[str, Any]:
        """All of the container's metadata."""
        name = os.fsencode(self.gguf.path.name).decode("utf-8", "replace")
        source = {"name": name, "n_bytes": self.gguf.n_bytes, "sha256": sha256}
        return self.metadata | {"source": source}

    def report(self, out: Path) -> ConvertReport:
        """What converting this to `out` comes to."""
        gguf, by_type = self.gguf, Counter[str]()
        arch = str(gguf.metadata.get("general.architecture", "missing"))
        for tensor in gguf.tensors.values():
            by_type[tensor.qtype] += tensor.n_bytes
        report = ConvertReport(
            source=gguf.path,
            out=out,
            arch=arch if arch.isprintable() else repr(arch),
            source_bytes=gguf.n_bytes,
            qtype_bytes=dict(by_type.most_common()),
            ignored=_ignored(gguf),
            refusals=tuple(map(str, self.refusals)),
        )
        if self.refusals:
            return report
        layout = plan_layout(self.metadata_with("0" * 64), self.specs, self.pages)
        guess = self.metadata["tokenizer"]["warning"]
        warnings = (guess or "", *_template_warnings(self.metadata["chat_templates"]))
        return replace(
            report,
            file_bytes=layout.file_bytes,
            pages=layout.pages,
            warnings=tuple(filter(None, warnings)),
        )


def _examine(gguf: GGUFFile, chat_template: str | None, force_pre: bool) -> _Examined:
    if not gguf.tensors:
        raise FormatError(f"{gguf.path} has no tensors: it is a vocabulary, not a model")
    refusals: list[JitllmError] = []

    def attempt(step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except (FormatError, UnsupportedError) as error:
            refusals.append(error)

    attempt(_check_kind, gguf)
    config = attempt(_config, gguf)
    tokenizer = attempt(build_tokenizer, gguf.metadata, force_pre)
    templates = attempt(_templates, gguf, chat_template)
    refusals += _tensor_refusals(gguf, config)
    pages, parts = ([], []) if refusals else paginate(gguf, config)
    metadata = (
        {}
        if refusals
        else {
            "config": config.to_dict(),
            "tokenizer": tokenizer,
            "chat_templates": templates,
            "general": _general(gguf),
            "writer": f"jitllm {__version__}",
        }
    )
    named = [_with_path(gguf.path, error) for error in refusals]
    return _Examined(gguf, metadata, pages, parts, named)


def _with_path(path: Path, error: JitllmError) -> JitllmError:
    """The same error, in a sentence that begins with the file."""
    text = str(error)
    return error if text.startswith(str(path)) else type(error)(f"{path}: {text}")


def _check_kind(gguf: GGUFFile) -> None:
    """A model, and not a LoRA, a projector or an old quantisation's bytes."""
    kind = gguf.get("general.type", str, "model")
    if kind != "model":
        raise UnsupportedError(f"the file holds a GGUF of type {kind!r}, supported is 'model'")
    version = gguf.get("general.quantization_version", int, QUANTIZATION_VERSION)
    if version != QUANTIZATION_VERSION:
        raise UnsupportedError(
            f"general.quantization_version is {version}, supported is {QUANTIZATION_VERSION}"
        )


def _config(gguf: GGUFFile) -> ModelConfig:
    n_vocab = len(gguf.get("tokenizer.ggml.tokens", list))
    return model_config(gguf.get, gguf.metadata, n_vocab, HEAD not in gguf.tensors)


def _templates(gguf: GGUFFile, own: str | None) -> dict[str, str]:
    """The chat templates by name, the usual one is `default`; or `own`, which has to be one."""
    if own is not None:
        return {"default": ChatTemplate(own).text}
    named = [key for key in gguf.metadata if key.startswith(_TEMPLATE + ".")]
    names = {_TEMPLATE: "default"} | {key: key.removeprefix(_TEMPLATE + ".") for key in named}
    return {name: gguf.get(key, str) for key, name in names.items() if key in gguf.metadata}


def _template_warnings(templates: dict[str, str]) -> Iterator[str]:
    """The model's own templates that do not compile: it still completes text."""
    for text in templates.values():
        try:
            ChatTemplate(text)
        except ChatTemplateError as error:
            yield str(error)


def _general(gguf: GGUFFile) -> dict[str, Any]:
    """Name, licence and the like: for `info` and the server's model card."""
    values = {
        key.removeprefix("general."): value
        for key, value in gguf.metadata.items()
        if key.startswith("general.")
    }
    return {k: v for k, v in values.items() if isinstance(v, str | int | float | list)}


def _ignored(gguf: GGUFFile) -> tuple[str, ...]:
    arch = f"{gguf.metadata.get('general.architecture')}."
    keys = [k for k in gguf.metadata if not (_KNOWN_KEYS.match(k) or k.startswith(arch))]
    return (*keys, *filter(_IGNORED_TENSORS.fullmatch, gguf.tensors))


def _tensor_refusals(gguf: GGUFFile, config: ModelConfig | None) -> Iterator[JitllmError]:
    """What speaks against the tensors: unknown types, and without a config no more than that."""
    for qtype in sorted({tensor.qtype for tensor in gguf.tensors.values()} - QTYPES.keys()):
        names = [name for name, tensor in gguf.tensors.items() if tensor.qtype == qtype]
        more = f" (and {len(names) - 1} more)" if names[1:] else ""
        yield UnsupportedError(
            f"tensor {names[0]}{more} has the type {qtype}, which jitllm cannot read (supported: "
            f"{', '.join(QTYPES)})"
        )
    if config is not None:
        yield from _shape_refusals(gguf, config, expected_tensors(config))


def _shape_refusals(
    gguf: GGUFFile, config: ModelConfig, expected: dict[str, tuple[tuple[int, ...], bool]]
) -> Iterator[JitllmError]:
    """Missing, misshapen and unknown tensors, and those that only some blocks have."""
    tensors = gguf.tensors
    for name, (shape, required) in expected.items():
        if name not in tensors and required:
            yield FormatError(f"tensor {name} of a {config.arch} model is missing")
        if name in tensors and tensors[name].shape != shape:
            found = tensors[name].shape
            yield FormatError(f"tensor {name} has the shape {found}, expected {shape}")
    for name in tensors:
        if name not in expected and not _IGNORED_TENSORS.fullmatch(name):
            yield UnsupportedError(
                f"tensor {name} is not one that jitllm knows in a {config.arch} model, and leaving "
                "it out could change the answer"
            )
    optional = [name for name, (_, required) in expected.items() if not required]
    in_blocks = Counter(m[1] for name in optional if name in tensors and (m := _BLOCK.match(name)))
    for name, count in in_blocks.items():
        if count != config.n_blocks:
            yield FormatError(
                f"{count} of {config.n_blocks} blocks have a {name}, it must be all or none"
            )


# Writing


class _Meter:
    """Counts bytes of all steps as one job."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self.progress, self.what, self.done, self.total = progress, what, 0, total

    def add(self, n_bytes: int) -> None:
        self.done += n_bytes
        self.progress(self.what, self.done, self.total)


def _write(examined: _Examined, out: Path, force: bool, progress: Progress) -> None:
    gguf = examined.gguf
    n_bytes = sum(spec.n_bytes for spec in examined.specs)
    meter = _Meter(progress, f"converting {gguf.path.name}", gguf.n_bytes + n_bytes)
    stamp = _stamp(gguf)
    metadata = examined.metadata_with(_sha256(gguf, meter))
    with ContainerWriter(out, metadata, examined.specs, examined.pages, force) as writer:
        for page in range(len(examined.pages)):
            parts = [part for part in examined.parts if part.page == page]
            writer.write_page(page, _page_chunks(gguf, parts, meter))
        if _stamp(gguf) != stamp:
            raise JitllmError(f"{gguf.path} was changed while it was converted; try again")
        writer.finish()


def _page_chunks(
    gguf: GGUFFile, parts: list[Part], meter: _Meter
) -> Iterator[tuple[str, np.ndarray]]:
    for part in parts:
        for chunk in part.chunks(gguf):
            yield part.tensor.name, chunk
            meter.add(chunk.nbytes)


def _sha256(gguf: GGUFFile, meter: _Meter) -> str:
    """Of the bytes of all shards, in order."""
    digest = hashlib.sha256()
    for shard in gguf.shards:
        with open(shard, "rb", buffering=0) as file:
            while chunk := file.read(BATCH_BYTES):
                digest.update(chunk)
                meter.add(len(chunk))
    return digest.hexdigest()


def _stamp(gguf: GGUFFile) -> list[tuple[int, int]]:
    """Changes when a shard is written to."""
    stats = [os.stat(shard) for shard in gguf.shards]
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]
