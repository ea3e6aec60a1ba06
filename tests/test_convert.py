"""GGUF to container: the same bits in pages, whole or not at all, and refusals by name."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from jitllm import catalog
from jitllm.convert import ConvertReport, convert
from jitllm.convert_pages import slab_rows
from jitllm.errors import FormatError, JitllmError, UnsupportedError
from jitllm.gguf_file import GGUFFile, GGUFTensor, read_gguf
from jitllm.kernels.qtypes import QTYPES
from jitllm.model.config import ModelConfig
from jitllm.paging.container import Container, TensorEntry
from tests.kernels.test_qtypes import same_bits
from tests.tiny_models import MODELS, N_VOCAB, Tiny, dequantised, random_tensors, write_gguf

SMALL = Tiny(width=16, ff_width=24, n_blocks=2, n_heads=2, n_kv_heads=1, head_dim=8)
Edit = Callable[[gguf.GGUFWriter], None]


def write(folder: Path, tiny: Tiny = SMALL, edit: Edit = lambda writer: None) -> Path:
    return write_gguf(folder / "m.gguf", tiny, dict(random_tensors(tiny)), edit)


def page_bytes(container: Container, tensor: TensorEntry) -> np.ndarray:
    page = container.pages[tensor.page]
    offset = page.offset + tensor.offset
    return np.fromfile(container.path, np.uint8, tensor.n_bytes, offset=offset)


def values_in_pages(container: Container, name: str) -> np.ndarray:
    """A tensor's values, put together from all pages that hold rows of it."""
    parts = []
    for tensor in (t for t in container.tensors.values() if t.name == name):
        data, qtype = page_bytes(container, tensor), QTYPES[tensor.qtype]
        if len(tensor.shape) == 1:
            parts.append(data.view(np.float32))
        elif container.pages[tensor.page].kind == "embed":
            rows = data.reshape(tensor.shape[0], -1)
            parts.append(qtype.dequantise_rows(rows, tensor.shape[1]))
        else:
            n_rows, columns = tensor.shape
            tiles = data.reshape(-1, qtype.tile_bytes(columns))
            parts.append(qtype.dequantise(tiles, n_rows, columns))
    return np.concatenate(parts)


def source_values(model: GGUFFile, tensor: GGUFTensor) -> np.ndarray:
    return dequantised(tensor.qtype, model.read(tensor)).reshape(tensor.shape)


# The same bits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_pages_hold_the_values_that_gguf_py_reads_from_the_source(
    tmp_path: Path, name: str, tied: bool
) -> None:
    source = write(tmp_path, replace(MODELS[name], tied=tied))
    report = convert(source, tmp_path / "m.jlm")
    container, model = Container.open(report.out), read_gguf(source)
    assert {tensor.name for tensor in container.tensors.values()} == model.tensors.keys()
    for tensor in model.tensors.values():
        assert same_bits(values_in_pages(container, tensor.name), source_values(model, tensor))
    kinds = {page.kind for page in container.pages}
    assert kinds == {"dense", "block", "head"} | (set() if tied else {"embed"})


@pytest.mark.parametrize("qtype", ["F16", "BF16"])
def test_vectors_become_f32_with_the_same_values(tmp_path: Path, qtype: str) -> None:
    tensors = dict(random_tensors(SMALL))
    halves = random_tensors(replace(SMALL, qtype=qtype))
    rows = next(data for name, (_, data) in halves if name == "blk.0.ffn_up.weight")
    tensors["output_norm.weight"] = (qtype, rows[0])
    model = read_gguf(write_gguf(tmp_path / "m.gguf", SMALL, tensors))
    container = Container.open(convert(model.path, tmp_path / "m.jlm").out)
    assert container.tensors["output_norm.weight"].qtype == "F32"
    values = source_values(model, model.tensors["output_norm.weight"])
    assert same_bits(values_in_pages(container, "output_norm.weight"), values)


def test_rows_that_do_not_fill_a_tile_are_padded_with_zeros(tmp_path: Path) -> None:
    container = Container.open(convert(write(tmp_path), tmp_path / "m.jlm").out)
    tensor = container.tensors["blk.0.ffn_up.weight"]
    assert tensor.shape == (24, 16) and tensor.n_bytes == 32 * 16 * 4
    tiles = page_bytes(container, tensor).reshape(2, -1)
    assert not QTYPES["F32"].dequantise(tiles, 32, 16)[24:].any()


@pytest.mark.parametrize("tied", [False, True])
def test_head_slabs_are_whole_tiles_within_a_block_and_cover_the_vocabulary(
    tmp_path: Path, tied: bool
) -> None:
    source = write(tmp_path, replace(SMALL, tied=tied))
    container = Container.open(convert(source, tmp_path / "m.jlm").out)
    largest = max(page.n_bytes for page in container.pages if page.kind == "block")
    slabs = [t for t in container.tensors.values() if container.pages[t.page].kind == "head"]
    assert len(slabs) > 2
    assert {slab.name for slab in slabs} == {"token_embd.weight" if tied else "output.weight"}
    assert all(container.pages[slab.page].n_bytes <= largest for slab in slabs)
    assert all(slab.shape[0] % 16 == 0 for slab in slabs[:-1])
    ends = [slab.first_row + slab.shape[0] for slab in slabs]
    assert [slab.first_row for slab in slabs] == [0, *ends[:-1]] and ends[-1] == N_VOCAB


@pytest.mark.parametrize(
    ("n_rows", "limit", "expected"),
    [
        (160, 10_240, 160),  # 10 tiles of 1024 bytes: all fit
        (160, 9 * 1024, 80),  # one more than fit: two equal slabs, not nine and one
        (160, 4096 + 1023, 64),  # four fit, so three slabs of 4, 4, 2
        (1, 10_000, 16),
        (160, 10, 16),  # a tile is the least
    ],
)
def test_slabs_are_about_equal(n_rows: int, limit: int, expected: int) -> None:
    head = GGUFTensor("output.weight", "F32", (n_rows, 16), Path("m"), 0, n_rows * 64)
    assert slab_rows(head, limit) == expected


def test_page_bytes_are_the_sources_padding_apart(tmp_path: Path) -> None:
    source = write(tmp_path, MODELS["Q4_K"])
    report = convert(source, tmp_path / "m.jlm")
    pages = sum(page.n_bytes for page in report.pages)
    weights = sum(tensor.n_bytes for tensor in read_gguf(source).tensors.values())
    assert weights <= pages <= 1.01 * weights + 4096 * len(report.pages)


def test_the_container_says_what_the_model_is_and_where_it_came_from(tmp_path: Path) -> None:
    source = write(tmp_path)
    metadata = Container.open(convert(source, tmp_path / "m.jlm").out).metadata
    config = ModelConfig.from_dict(metadata["config"])
    sizes = (config.arch, config.width, config.n_blocks, config.n_vocab)
    assert sizes == ("llama", 16, 2, N_VOCAB)
    assert metadata["source"] == {
        "name": "m.gguf",
        "n_bytes": source.stat().st_size,
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
    }
    assert metadata["writer"].startswith("jitllm ")
    assert metadata["general"]["name"] == "tiny"
    assert metadata["tokenizer"]["n_vocab"] == N_VOCAB and metadata["tokenizer"]["stop_ids"] == [2]


def test_the_chat_templates_of_the_file_are_kept_and_one_may_take_their_place(
    tmp_path: Path,
) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template(
            [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
        )

    source = write(tmp_path, edit=edit)
    convert(source, tmp_path / "m.jlm")
    templates = Container.open(tmp_path / "m.jlm").metadata["chat_templates"]
    assert templates == {"default": "a", "tool_use": "b"}
    convert(source, tmp_path / "m.jlm", force=True, chat_template="{{ messages }}")
    templates = Container.open(tmp_path / "m.jlm").metadata["chat_templates"]
    assert templates == {"default": "{{ messages }}"}


def test_a_template_that_is_none_is_refused_where_asked_for_and_said_where_found(
    tmp_path: Path,
) -> None:
    source = write(tmp_path, edit=lambda writer: writer.add_chat_template("{% for"))
    with pytest.raises(JitllmError, match="template"):
        convert(source, tmp_path / "m.jlm", chat_template="{{ oops")
    assert os.listdir(tmp_path) == ["m.gguf"]
    (warning,) = convert(source, tmp_path / "m.jlm").warnings
    assert warning.startswith("the chat template cannot be used: ")


def test_a_guess_about_the_vocabulary_is_a_warning(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 324))]
        for key in ("model", "tokens", "token_type", "scores"):
            del writer.kv_data[0][f"tokenizer.ggml.{key}"]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*letters, *(f"w{i}" for i in range(N_VOCAB - 256))])
        writer.add_token_types([1] * N_VOCAB)
        writer.add_token_merges(["w 1"])

    report = convert(write(tmp_path, edit=edit), tmp_path / "m.jlm", plan=True)
    assert report.refusals == ()
    assert "names no pre-tokenizer" in report.warnings[0]


def write_split(folder: Path, tiny: Tiny) -> list[Path]:
    """The model as a set of three shards; the first has all of the metadata."""
    tensors, paths = list(random_tensors(tiny)), []
    for number in range(3):

        def edit(writer: gguf.GGUFWriter, number: int = number) -> None:
            if number:
                writer.kv_data[0].clear()
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 3)
            writer.add_int32("split.tensors.count", len(tensors))

        path = folder / f"m-{number + 1:05}-of-00003.gguf"
        paths.append(write_gguf(path, tiny, dict(tensors[number::3]), edit))
    return paths


def test_a_split_set_gives_the_pages_of_the_whole_file(tmp_path: Path) -> None:
    whole = Container.open(convert(write(tmp_path), tmp_path / "whole.jlm").out)
    shards = write_split(tmp_path, SMALL)
    joined = Container.open(convert(shards[1], tmp_path / "joined.jlm").out)
    assert [page.hash for page in joined.pages] == [page.hash for page in whole.pages]
    assert joined.metadata["source"]["n_bytes"] == sum(path.stat().st_size for path in shards)


# Whole or not at all


def test_converting_twice_gives_identical_bytes(tmp_path: Path) -> None:
    source = write(tmp_path, MODELS["Q4_0"])
    one, two = (convert(source, tmp_path / name).out for name in ("one.jlm", "two.jlm"))
    assert one.read_bytes() == two.read_bytes()


def test_an_existing_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    source = write(tmp_path)
    out = tmp_path / "m.jlm"
    out.write_bytes(b"mine")
    with pytest.raises(JitllmError, match=r"m\.jlm exists; add --force to replace it"):
        convert(source, out)
    assert out.read_bytes() == b"mine"
    convert(source, out, force=True)
    Container.open(out)


def test_the_source_is_never_replaced_by_its_container(tmp_path: Path) -> None:
    source = write(tmp_path)
    before = source.read_bytes()
    (tmp_path / "link.jlm").symlink_to(source)
    for out in (source, tmp_path / "link.jlm"):
        with pytest.raises(JitllmError, match="is the source itself"):
            convert(source, out, force=True)
    assert source.read_bytes() == before


def test_a_plan_knows_the_size_and_reads_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, MODELS["Q8_0"])
    with monkeypatch.context() as patch:
        patch.setattr(GGUFFile, "read", None)
        report = convert(source, tmp_path / "m.jlm", plan=True)
    assert not report.out.exists() and report.refusals == ()
    written = convert(source, report.out)
    container = Container.open(report.out)
    assert written == report
    assert report.file_bytes == container.file_bytes == report.out.stat().st_size
    assert [(p.kind, p.offset, p.n_bytes) for p in report.pages] == [
        (p.kind, p.offset, p.n_bytes) for p in container.pages
    ]


def test_progress_counts_up_to_its_total(tmp_path: Path) -> None:
    source = write(tmp_path)
    reports: list[tuple[str, int, int]] = []
    convert(source, tmp_path / "m.jlm", progress=lambda *report: reports.append(report))
    done = [report[1] for report in reports]
    assert done == sorted(done) and len(done) > 20
    assert reports[-1][0] == "converting m.gguf" and reports[-1][1] == reports[-1][2]


STALL = """
import sys, time
from jitllm.convert import convert
def stall(what, done, total):
    if done > total * 0.9:
        print("stalled", flush=True)
        time.sleep(60)
convert(sys.argv[1], sys.argv[2], progress=stall)
"""


def test_a_killed_conversion_leaves_no_container_and_does_not_stop_the_next(
    tmp_path: Path,
) -> None:
    source, out = write(tmp_path), tmp_path / "m.jlm"
    command = [sys.executable, "-c", STALL, str(source), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "stalled\n"
        process.send_signal(signal.SIGKILL)
    part = tmp_path / "m.jlm.part"
    assert part.exists() and part.stat().st_size > 0 and not out.exists()
    convert(source, out)
    assert not part.exists()
    Container.open(out)


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done > total * 0.9:
            raise KeyboardInterrupt

    source = write(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "m.jlm", progress=interrupt)
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_a_source_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    source = write(tmp_path)
    with pytest.raises(JitllmError, match="was changed while it was converted"):
        convert(source, tmp_path / "m.jlm", progress=lambda *_: os.utime(source, (1, 1)))
    assert os.listdir(tmp_path) == ["m.gguf"]


PEAK = """
import resource, sys
from jitllm.convert import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_conversion_streams(tmp_path: Path) -> None:
    wide = {16: 1024, 24: 16384, 8: 512, N_VOCAB: N_VOCAB}  # every dimension of the small model
    tensors = {}
    for name, (_, data) in random_tensors(SMALL):
        shape = [wide[n] for n in data.view(np.float32).shape]
        tensors[name] = ("F16", np.zeros(shape, np.float16))
    tiny = replace(SMALL, width=1024, ff_width=16384, head_dim=512)
    path = write_gguf(tmp_path / "m.gguf", tiny, tensors)
    model = read_gguf(path)
    assert model.n_bytes > 180 << 20
    command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / "m.jlm")]
    peak = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    largest = max(tensor.n_bytes for tensor in model.tensors.values())
    assert peak < 2 * largest + (300 << 20)
    assert peak < 90 << 20  # and far below that: it never holds as much as half the model


# Refusals


def drop(name: str) -> Callable[[dict], None]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Callable[[dict], None]:
    return lambda tensors: tensors.__setitem__(name, ("F32", np.ones(shape, np.float32)))


def set_key(name: str, value: object) -> Callable[[gguf.GGUFWriter], None]:
    def edit(writer: gguf.GGUFWriter) -> None:
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        writer.kv_data[0].pop(name, None)
        kinds[type(value)](name, value)

    return edit


TENSOR_REFUSALS = {
    "unknown": (
        put("blk.0.attn_sinks.weight", 4),
        UnsupportedError,
        r"m\.gguf: tensor blk\.0\.attn_sinks\.weight is not one that jitllm knows in a llama",
    ),
    "missing": (
        drop("blk.1.ffn_down.weight"),
        FormatError,
        r"m\.gguf: tensor blk\.1\.ffn_down\.weight of a llama model is missing",
    ),
    "embedding missing": (
        drop("token_embd.weight"),
        FormatError,
        r"tensor token_embd\.weight of a llama model is missing",
    ),
    "shape": (
        put("blk.0.attn_q.weight", 16, 8),
        FormatError,
        r"tensor blk\.0\.attn_q\.weight has the shape \(16, 8\), expected \(16, 16\)",
    ),
    "vocabulary": (
        put("token_embd.weight", N_VOCAB + 1, 16),
        FormatError,
        r"tensor token_embd\.weight has the shape \(513, 16\), expected \(512, 16\)",
    ),
    "a matrix for a vector": (
        put("output_norm.weight", 1, 16),
        FormatError,
        r"tensor output_norm\.weight has the shape \(1, 16\), expected \(16,\)",
    ),
    "bias in one block": (
        put("blk.0.attn_q.bias", 16),
        FormatError,
        r"1 of 2 blocks have a attn_q\.bias, it must be all or none",
    ),
}
KEY_REFUSALS = {
    "architecture": (set_key("general.architecture", "mamba"), "architecture 'mamba' is not one"),
    "adapter": (set_key("general.type", "adapter"), "a GGUF of type 'adapter', supported is"),
    "old quantisation": (
        set_key("general.quantization_version", 1),
        r"general\.quantization_version is 1, supported is 2",
    ),
    "type of a key": (set_key("llama.block_count", "two"), "llama.block_count has type str"),
    "count": (set_key("llama.block_count", 2**31), "llama.block_count is 2147483648"),
    "unknown hyper-parameter": (set_key("llama.moon_phase", 3), "llama.moon_phase is not one"),
}


def refusal_is(source: Path, kind: type[JitllmError], message: str) -> None:
    """`convert` refuses with one sentence and no file; `-plan` lists the same."""
    out = source.with_name("m.jlm")
    with pytest.raises(kind, match=message) as caught:
        convert(source, out)
    assert str(caught.value).startswith(str(source)) and "\n" not in str(caught.value)
    report = convert(source, out, plan=True)
    assert report.refusals and str(caught.value).startswith(report.refusals[0])
    assert report.file_bytes == 0 and report.pages == ()
    assert os.listdir(source.parent) == [source.name]


@pytest.mark.parametrize("name", TENSOR_REFUSALS)
def test_tensors_that_are_not_the_architectures_are_refused_by_name(
    tmp_path: Path, name: str
) -> None:
    change, kind, message = TENSOR_REFUSALS[name]
    tensors = dict(random_tensors(SMALL))
    change(tensors)
    refusal_is(write_gguf(tmp_path / "m.gguf", SMALL, tensors), kind, message)


@pytest.mark.parametrize("name", KEY_REFUSALS)
def test_metadata_that_is_not_understood_is_refused_by_name(tmp_path: Path, name: str) -> None:
    edit, message = KEY_REFUSALS[name]
    refusal_is(write(tmp_path, edit=edit), JitllmError, message)


def test_weight_types_outside_the_table_are_refused_with_the_table(tmp_path: Path) -> None:
    tensors = dict(random_tensors(replace(MODELS["Q8_0"], n_blocks=1)))
    matrices = [name for name, (qtype, _) in tensors.items() if qtype == "Q8_0"]
    for name in matrices[3:]:
        n_rows, n_columns = len(tensors[name][1]), 32 * tensors[name][1].shape[1] // 34
        tensors[name] = ("IQ3_S", np.zeros((n_rows, n_columns // 256 * 110), np.uint8))
    source = write_gguf(tmp_path / "m.gguf", replace(MODELS["Q8_0"], n_blocks=1), tensors)
    more = len(matrices) - 4
    message = (
        rf"tensor {matrices[3]} \(and {more} more\) has the type IQ3_S, .*: F32, F16, BF16, Q8_0"
    )
    refusal_is(source, UnsupportedError, message)


def test_all_refusals_are_planned_and_counted_when_raised(tmp_path: Path) -> None:
    tensors = dict(random_tensors(SMALL))
    for name in ("blk.0.ffn_up.weight", "output_norm.weight"):
        del tensors[name]
    source = write_gguf(tmp_path / "m.gguf", SMALL, tensors)
    report = convert(source, tmp_path / "m.jlm", plan=True)
    assert [text.split()[2] for text in report.refusals] == [
        "output_norm.weight",
        "blk.0.ffn_up.weight",
    ]
    with pytest.raises(FormatError, match=r"\(and 1 more, see `jitllm convert -plan`\)"):
        convert(source, tmp_path / "m.jlm")


def test_a_vocabulary_is_not_a_model(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", SMALL, {})
    with pytest.raises(FormatError, match="has no tensors: it is a vocabulary, not a model"):
        convert(source, tmp_path / "m.jlm")


def test_what_is_left_out_on_purpose_is_listed(tmp_path: Path) -> None:
    tensors = dict(random_tensors(SMALL))
    put("blk.0.attn_rot_embd", 8)(tensors)
    edit = set_key("quantize.imatrix.file", "x")
    source = write_gguf(tmp_path / "m.gguf", SMALL, tensors, edit)
    report = convert(source, tmp_path / "m.jlm")
    assert report.ignored == ("quantize.imatrix.file", "blk.0.attn_rot_embd")
    assert "blk.0.attn_rot_embd" not in Container.open(report.out).tensors


@pytest.mark.parametrize(
    ("qtype", "bits"), [("F32", 0x7FC00000), ("F16", 0x7C00), ("Q4_0", 0xFE00)]
)
def test_weights_that_are_not_finite_are_refused_and_leave_nothing(
    tmp_path: Path, qtype: str, bits: int
) -> None:
    source = write(tmp_path, MODELS[qtype])
    tensor = read_gguf(source).tensors["blk.1.ffn_up.weight"]
    with open(source, "r+b") as file:
        file.seek(tensor.offset + tensor.row_bytes)
        file.write(bits.to_bytes(4 if qtype == "F32" else 2, "little"))
    with pytest.raises(
        FormatError, match=r"tensor blk\.1\.ffn_up\.weight holds values that are not"
    ):
        convert(source, tmp_path / "m.jlm")
    assert os.listdir(tmp_path) == ["m.gguf"]


def converts_or_refuses(source: Path, out: Path) -> ConvertReport | None:
    """Either a sound container or one sentence and no file."""
    try:
        report = convert(source, out)
    except JitllmError as error:
        assert "\n" not in str(error)
        assert not out.exists() and not out.with_name(out.name + ".part").exists()
        return None
    Container.open(out)
    out.unlink()
    return report


def test_a_truncated_source_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path)
    data = source.read_bytes()
    for n_bytes in (0, 3, 20, 1000, len(data) // 2, len(data) - 32, len(data) - 1):
        source.write_bytes(data[:n_bytes])
        assert converts_or_refuses(source, tmp_path / "m.jlm") is None


def test_flipped_header_bits_are_refused_or_harmless(tmp_path: Path) -> None:
    source = write(tmp_path, replace(SMALL, n_blocks=1))
    data, choose = source.read_bytes(), random.Random(0)
    header = min(tensor.offset for tensor in read_gguf(source).tensors.values())
    refused = 0
    for _ in range(100):
        flipped = bytearray(data)
        flipped[choose.randrange(header)] ^= 1 << choose.randrange(8)
        source.write_bytes(flipped)
        refused += converts_or_refuses(source, tmp_path / "m.jlm") is None
    assert refused > 30


# Into the cache, and real models from it


def test_smollm2_converts_in_under_ten_seconds(tmp_path: Path) -> None:
    source = catalog.kept("smollm2-135m")
    if source is None:
        pytest.skip("smollm2-135m is not in the cache")
    started = time.monotonic()
    report = convert(source, tmp_path / "m.jlm")
    assert time.monotonic() - started < 10
    model, container = read_gguf(source), Container.open(report.out)
    for name in ("blk.0.ffn_down.weight", "blk.29.attn_q.weight", "token_embd.weight"):
        values = source_values(model, model.tensors[name])
        assert same_bits(values_in_pages(container, name), values)


def test_a_gguf_is_converted_into_the_cache_once_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path / "cache"))
    source, said = write(tmp_path), []
    path = catalog.resolve(str(source), say=said.append)
    assert said == [f"converting m.gguf once, into {path}"]
    assert path.is_relative_to(tmp_path / "cache") and Container.open(path).pages
    assert catalog.resolve(str(source), say=said.append) == path
    assert catalog.resolve(str(path)) == path
    assert len(said) == 1
    write(tmp_path, replace(SMALL, qtype="F16"))
    assert catalog.resolve(str(source), say=said.append) != path
    assert len(said) == 2
    assert list((tmp_path / "cache" / "scratch").iterdir()) == []


def test_a_gguf_with_a_long_name_fits_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path / "cache"))
    source = write(tmp_path).rename(
        tmp_path / ("n\N{LATIN SMALL LETTER E WITH ACUTE}" * 80 + ".gguf")
    )
    assert Container.open(catalog.resolve(str(source))).pages
