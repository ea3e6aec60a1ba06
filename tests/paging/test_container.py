"""The container: what is written is what is read, and anything else is refused in one sentence."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from jitllm.errors import FormatError, JitllmError
from jitllm.paging.container import Container, ContainerWriter, PageSpec, TensorSpec, plan_layout
from tests.paging.toys import toy_plan, write_toy


def damaged(path: Path, offset: int, value: int) -> Path:
    """A copy of `path` with one bit of the byte at `offset` flipped."""
    raw = bytearray(path.read_bytes())
    raw[offset] ^= value
    copy = path.with_suffix(".damaged.jlm")
    copy.write_bytes(raw)
    return copy


def test_a_container_gives_back_every_tensor_byte(tmp_path):
    path, weights = write_toy(tmp_path / "toy.jlm", tied=False)
    container = Container.open(path)
    assert container.metadata == {"name": "toy", "tokens": ["a", "é", "\n"]}
    assert container.file_bytes == path.stat().st_size
    raw = path.read_bytes()
    for key, tensor in container.tensors.items():
        start = container.pages[tensor.page].offset + tensor.offset
        assert raw[start : start + tensor.n_bytes] == weights[key].tobytes(), key


def test_pages_and_tensors_are_aligned_and_in_order(tmp_path):
    path, _ = write_toy(tmp_path / "toy.jlm", tied=True)
    container = Container.open(path)
    assert [page.kind for page in container.pages] == ["dense", *["block"] * 3, *["head"] * 2]
    assert all(page.offset % 4096 == page.n_bytes % 4096 == 0 for page in container.pages)
    assert all(tensor.offset % 64 == 0 for tensor in container.tensors.values())
    assert list(container.on_page(1)) == ["blk.0.attn_q.weight", "blk.0.ffn_up.weight"]
    assert container.pages_of("head") == [4, 5]


@pytest.mark.parametrize(("tied", "unit_rows", "n_units"), [(True, 16, 4), (False, 1, 50)])
def test_embedding_units_are_tiles_when_tied_and_rows_when_not(tmp_path, tied, unit_rows, n_units):
    path, _ = write_toy(tmp_path / "toy.jlm", tied=tied)
    table = Container.open(path).embedding
    assert (table.unit_rows, table.n_units, table.n_rows) == (unit_rows, n_units, 50)


def test_writing_twice_gives_identical_bytes(tmp_path):
    one, _ = write_toy(tmp_path / "one.jlm")
    two, _ = write_toy(tmp_path / "two.jlm")
    assert one.read_bytes() == two.read_bytes()


def test_chunking_and_page_order_do_not_change_the_bytes(tmp_path):
    one, weights = write_toy(tmp_path / "one.jlm")
    with ContainerWriter(tmp_path / "two.jlm", *toy_plan()) as writer:
        for page in reversed(range(len(writer.layout.pages))):
            writer.write_page(page, quarters(writer, page, weights))
        writer.finish()
    assert one.read_bytes() == (tmp_path / "two.jlm").read_bytes()


def quarters(writer, page, weights):
    """The page's tensors in four chunks each (an embedding's in whole units)."""
    for tensor in (t for t in writer.layout.tensors if t.page == page):
        chunks = np.array_split(weights[tensor.key], 4)
        yield from ((tensor.name, chunk) for chunk in chunks if chunk.size)


def test_every_flipped_byte_of_the_head_is_refused_with_the_way_out(tmp_path):
    path, _ = write_toy(tmp_path / "toy.jlm")
    head_bytes = Container.open(path).pages[0].offset
    for offset in (*range(0, 128), *range(128, head_bytes, 7)):
        with pytest.raises(FormatError) as refusal:
            Container.open(damaged(path, offset, 0x10))
        text = str(refusal.value)
        assert "\n" not in text and "jitllm convert --force" in text


@pytest.mark.parametrize("kept", [0, 7, 100, 4096, -4096, -1])
def test_a_truncated_container_is_refused(tmp_path, kept):
    path, _ = write_toy(tmp_path / "toy.jlm")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(FormatError, match="jitllm convert --force"):
        Container.open(path)


def test_nobody_is_told_to_write_over_what_never_was_a_container(tmp_path):
    (tmp_path / "notes.txt").write_text("not weights")
    with pytest.raises(FormatError, match=r"notes\.txt is not a jitllm container$"):
        Container.open(tmp_path / "notes.txt")


def test_bytes_behind_the_last_page_are_refused(tmp_path):
    path, _ = write_toy(tmp_path / "toy.jlm")
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(FormatError, match="bytes long and should be"):
        Container.open(path)


def test_another_version_is_refused_by_number(tmp_path):
    path, _ = write_toy(tmp_path / "toy.jlm")
    with pytest.raises(FormatError, match="container version 3, and this jitllm reads 1"):
        Container.open(damaged(path, 8, 2))


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(FormatError, match=r"none\.jlm cannot be read: No such file"):
        Container.open(tmp_path / "none.jlm")


MALICE = {
    "page index": ("page", 0, 1, "out of order"),
    "page offset": ("page", 1, 2, "at the wrong place"),
    "page size": ("page", 1, 3, "gives its block page 0"),
    "tensor page": ("tensor", 1, 2, "on page"),
    "tensor dimensions": ("tensor", 1, 3, "dimensions"),
    "tensor rows": ("tensor", 1, 4, "the shape"),
    "tensor columns": ("tensor", 1, 5, "the shape"),
    "tensor row": ("tensor", 1, 6, "impossible row"),
    "tensor offset": ("tensor", 1, 7, "outside its page"),
    "tensor size": ("tensor", 1, 8, "outside its page"),
}


@pytest.mark.parametrize("case", MALICE)
def test_a_forged_head_with_a_right_hash_is_still_refused(tmp_path, monkeypatch, case):
    table, record, column, message = MALICE[case]
    path, _ = write_toy(tmp_path / "toy.jlm")
    forge(path, table, record, column, monkeypatch)
    with pytest.raises(FormatError, match=message):
        Container.open(path)


def forge(path: Path, table: str, record: int, column: int, monkeypatch) -> None:
    """Set one field of a table to a huge value and hash the head again."""
    from jitllm.paging import layout

    raw = bytearray(path.read_bytes())
    fields = struct.unpack_from("<8s2I2Q8Q16s", raw)
    head_bytes, start = fields[4], fields[7 if table == "tensor" else 9]
    dtype = layout._TENSOR if table == "tensor" else layout._PAGE
    records = np.frombuffer(raw, dtype, offset=start, count=record + 1)
    width = dtype[column].itemsize
    records[f"f{column}"][record] = 2 ** (8 * width) - 4096
    del records
    raw[96:112] = layout._head_hash(bytes(raw[:96]), bytes(raw[112:head_bytes]))
    path.write_bytes(raw)


TENSOR_LISTS = {
    "one name twice": [TensorSpec("a", "F32", (4,), 0, 16), TensorSpec("a", "F32", (4,), 0, 16)],
    "empty tensor": [TensorSpec("a", "F32", (0,), 0, 0)],
    "name too long": [TensorSpec("a" * 65, "F32", (4,), 0, 16)],
    "embedding on a block": [TensorSpec("token_embd.weight", "F32", (16, 4), 0, 256)],
}


@pytest.mark.parametrize("case", TENSOR_LISTS)
def test_a_plan_that_could_not_be_opened_is_refused_before_writing(case):
    with pytest.raises(ValueError, match="the container planned"):
        plan_layout({}, TENSOR_LISTS[case], [PageSpec("block", 0)])


def test_an_existing_file_is_replaced_only_by_force(tmp_path):
    path, _ = write_toy(tmp_path / "toy.jlm")
    before = path.read_bytes()
    with pytest.raises(JitllmError, match="exists; add --force"):
        write_toy(path)
    write_toy(path, force=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("target", ["folder", "pipe"])
def test_force_replaces_files_alone(tmp_path, target):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JitllmError, match=f"{target} is (a folder|not a file)"):
        write_toy(tmp_path / target, force=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "pipe"]


def test_a_failure_while_writing_leaves_neither_the_file_nor_its_part(tmp_path):
    with pytest.raises(KeyboardInterrupt), ContainerWriter(tmp_path / "t.jlm", *toy_plan()):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_part_left_by_a_kill_is_taken_over(tmp_path):
    (tmp_path / "toy.jlm.part").write_bytes(b"x" * 10_000_000)
    path, _ = write_toy(tmp_path / "toy.jlm")
    assert Container.open(path).file_bytes == path.stat().st_size
    assert [entry.name for entry in tmp_path.iterdir()] == ["toy.jlm"]


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    with ContainerWriter(tmp_path / "toy.jlm", *toy_plan()):
        with pytest.raises(JitllmError, match="being written by another process"):
            ContainerWriter(tmp_path / "toy.jlm", *toy_plan())
        assert (tmp_path / "toy.jlm.part").exists()


def test_too_little_room_on_the_disk_is_said_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1024}))
    with pytest.raises(JitllmError, match=r"needs .* and its disk has 1\.0 KiB free"):
        ContainerWriter(tmp_path / "toy.jlm", *toy_plan())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(JitllmError, match="cannot be written: No such file"):
        ContainerWriter(tmp_path / "none" / "toy.jlm", *toy_plan())
