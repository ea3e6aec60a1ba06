"""The GGUF reader: what the gguf package writes comes back, and a hostile header ends in one
sentence that names the file."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitllm.errors import FormatError, JitllmError, UnsupportedError
from jitllm.gguf_file import GGUFFile, read_gguf

U8, U16, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 6, 7, 8, 9, 10
F32_TYPE, Q4_0_TYPE, Q4_K_TYPE = 0, 2, 12


# A GGUF by hand: the gguf package refuses to write what is wrong on purpose.


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def entry(name: str, ne: tuple[int, ...], qtype: int = F32_TYPE, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, qtype, offset)


def header(*parts: bytes, n_tensors: int = 0, n_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(parts)


def with_data(head: bytes, n_bytes: int, alignment: int = 32) -> bytes:
    return head + bytes(-len(head) % alignment + n_bytes)


def read_bytes(tmp_path: Path, data: bytes) -> GGUFFile:
    path = tmp_path / "case.gguf"
    path.write_bytes(data)
    return read_gguf(path)


def write_gguf(path: Path, tensors: dict[str, np.ndarray], **arrays: list[str]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in arrays.items():
        writer.add_array(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_metadata_written_by_the_gguf_package_comes_back_with_its_types(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_uint64("a.u64", 2**40)
    writer.add_int16("a.i16", -3)
    writer.add_float32("a.f32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "caf\u00e9 \U0001f600")
    writer.add_array("a.words", ["", "x", "\u2581y"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.scores", [0.5, -1.5])
    writer.add_array("a.flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = read_gguf(tmp_path / "m.gguf")
    assert model.get("general.architecture", str) == "llama"
    assert (model.get("a.u32", int), model.get("a.u64", int)) == (7, 2**40)
    assert (model.get("a.i16", int), model.get("a.f32", float)) == (-3, 0.5)
    assert model.get("a.bool", bool) is True
    assert model.get("a.text", str) == "caf\u00e9 \U0001f600"
    assert model.get("a.words", list) == ["", "x", "\u2581y"]
    assert model.get("a.numbers", np.integer).tolist() == [1, 2, 3]
    assert model.get("a.scores", np.float32).tolist() == [0.5, -1.5]
    assert model.get("a.flags", np.bool_).tolist() == [True, False]
    assert model.get("a.missing", int, 5) == 5


@pytest.mark.parametrize(
    ("name", "kind"), [("n", float), ("n", bool), ("n", str), ("n", list), ("n", np.integer)]
)
def test_a_metadata_value_of_another_type_is_an_error_with_its_key(
    tmp_path: Path, name: str, kind: type
) -> None:
    model = read_bytes(tmp_path, header(u32(name, 1), n_keys=1))
    with pytest.raises(FormatError, match=f"metadata key n has type int, expected {kind.__name__}"):
        model.get(name, kind)
    with pytest.raises(FormatError, match="metadata key absent is missing"):
        model.get("absent", int)


def test_array_element_types_are_told_apart(tmp_path: Path) -> None:
    scores = key("scores", ARRAY, struct.pack("<IQ", U8, 2) + b"\1\2")
    model = read_bytes(tmp_path, header(scores, n_keys=1))
    with pytest.raises(FormatError, match="scores has type uint8 array, expected floating"):
        model.get("scores", np.floating)


@pytest.mark.parametrize("version", [2, 3])
def test_rows_are_read_as_they_are_stored(tmp_path: Path, version: int) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    head = header(entry("w", (3, 4)), n_tensors=1, version=version)
    model = read_bytes(tmp_path, with_data(head, 0) + values.tobytes())
    tensor = model.tensors["w"]
    assert (tensor.qtype, tensor.shape, tensor.n_bytes, tensor.row_bytes) == ("F32", (4, 3), 48, 12)
    assert (model.read(tensor).view(np.float32) == values).all()
    assert (model.read(tensor, 1, 2).view(np.float32) == values[1:3]).all()
    assert model.read(tensor, 4).shape == (0, 12)


def test_tensors_match_the_gguf_packages_own_reader(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "vector": rng.normal(size=(5,)).astype(np.float32),
        "halves": rng.normal(size=(3, 7)).astype(np.float16),
        "experts": rng.normal(size=(2, 3, 4)).astype(np.float32),
    }
    path = tmp_path / "m.gguf"
    write_gguf(path, tensors)
    model = read_gguf(path)
    for theirs in gguf.GGUFReader(path).tensors:
        ours = model.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist())) == tensors[theirs.name].shape
        assert (ours.offset, ours.n_bytes) == (theirs.data_offset, theirs.n_bytes)
        assert model.read(ours).tobytes() == tensors[theirs.name].tobytes()


def test_a_type_that_conversion_refuses_can_still_be_listed(tmp_path: Path) -> None:
    qtype = int(gguf.GGMLQuantizationType.IQ3_S)
    head = header(entry("w", (256, 1), qtype), n_tensors=1)
    assert read_bytes(tmp_path, with_data(head, 110)).tensors["w"].qtype == "IQ3_S"


def test_a_file_without_tensors_is_a_vocabulary(tmp_path: Path) -> None:
    assert read_bytes(tmp_path, header(u32("n", 1), n_keys=1)).tensors == {}


HUGE = 2**63
NESTED = key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", U8, 0))
ATTACKS = {
    "not a GGUF": (b"PK\3\4" + bytes(20), "not a GGUF file"),
    "empty": (b"", "not a GGUF file"),
    "magic only": (b"GGUF", "truncated"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (header(version=1), r"version 1 is not supported \(supported: 2, 3\)"),
    "version 4": (header(version=4), "version 4 is not supported"),
    "huge key count": (header(n_keys=HUGE), f"{HUGE} metadata keys"),
    "huge tensor count": (header(n_tensors=5 * 10**8), "500000000 tensors"),
    "huge key": (header(struct.pack("<Q", HUGE), bytes(20), n_keys=1), "a metadata key is"),
    "empty key": (header(key("", U8, bytes(9)), n_keys=1), "a metadata key is 0 bytes long"),
    "key not ASCII": (header(key("\u00e4", U8, bytes(9)), n_keys=1), "not ASCII"),
    "key with an escape": (header(key("\33[31m", U8, b"\0"), n_keys=1), "cannot be printed"),
    "duplicate key": (header(u32("n", 1), u32("n", 1), n_keys=2), "key n is there twice"),
    "value type 99": (header(key("n", 99, bytes(8)), n_keys=1), "n has the unknown value type 99"),
    "huge string": (header(key("s", STRING, struct.pack("<Q", HUGE)), n_keys=1), "s needs"),
    "string not UTF-8": (header(key("s", STRING, string(b"\xff")), n_keys=1), "s is not UTF-8"),
    "bool 2": (header(key("b", BOOL, b"\2"), n_keys=1), "b is a bool with the value 2"),
    "huge array": (header(key("a", ARRAY, struct.pack("<IQ", U64, HUGE)), n_keys=1), "a needs"),
    "huge string array": (
        header(key("a", ARRAY, struct.pack("<IQ", STRING, HUGE)), n_keys=1),
        f"{HUGE} strings in metadata key a",
    ),
    "array of arrays": (header(NESTED, n_keys=1), "a is an array of arrays"),
    "array of type 99": (
        header(key("a", ARRAY, struct.pack("<IQ", 99, 1)), n_keys=1),
        "a has the unknown value type 99",
    ),
    "no dimension": (header(entry("w", ()), bytes(32), n_tensors=1), "w has 0 dimensions"),
    "five dimensions": (header(entry("w", (1,) * 5), n_tensors=1), "w has 5 dimensions"),
    "2^32-1 dimensions": (
        header(string("w"), struct.pack("<I", 2**32 - 1), bytes(32), n_tensors=1),
        "w has 4294967295 dimensions",
    ),
    "dimension 0": (header(entry("w", (8, 0)), n_tensors=1), "w has a dimension of 0"),
    "product overflows": (
        header(entry("w", (2**42 + 1, 2**22, 2**20)), n_tensors=1),
        "truncated: tensor w ends",
    ),
    "offset overflows": (
        with_data(header(entry("w", (8,), offset=2**64 - 32), n_tensors=1), 32),
        "truncated: tensor w ends",
    ),
    "data cut short": (
        with_data(header(entry("w", (8,)), n_tensors=1), 31),
        "truncated: tensor w ends at byte",
    ),
    "unaligned offset": (
        with_data(header(entry("w", (8,), offset=8), n_tensors=1), 64),
        "w starts at 8, not a multiple of 32",
    ),
    "overlap": (
        with_data(header(entry("a", (9,)), entry("b", (8,), offset=32), n_tensors=2), 64),
        "tensors a and b overlap",
    ),
    "alias": (
        with_data(header(entry("a", (8,)), entry("b", (8,)), n_tensors=2), 64),
        "tensors a and b overlap",
    ),
    "duplicate tensor": (
        with_data(header(entry("a", (8,)), entry("a", (8,), offset=32), n_tensors=2), 64),
        "tensor a is there twice",
    ),
    "rows do not fill blocks": (
        header(entry("w", (100, 1), Q4_K_TYPE), n_tensors=1),
        "w has rows of 100 values, not a multiple of Q4_K's 256",
    ),
    "removed type": (
        header(entry("w", (32,), 31), n_tensors=1),
        "w has the type Q4_0_4_4, which ggml has removed .known: F32, F16, Q4_0",
    ),
    "unknown type": (
        header(entry("w", (32,), 2**32 - 1), n_tensors=1),
        "w has the type 4294967295, which is unknown .known: F32",
    ),
    "long tensor name": (header(entry("w" * 65, (8,)), n_tensors=1), "is 65 bytes long"),
    "tensor name with a NUL": (header(entry("w\0", (8,)), n_tensors=1), "cannot be printed"),
} | {
    f"alignment {n}": (
        header(u32("general.alignment", n), n_keys=1),
        f"general.alignment is {n}, allowed are powers of two from 8 to 1 MiB",
    )
    for n in (0, 3, 4, 24, 2**21, 2**31)
}
ATTACKS["alignment is a u64"] = (
    header(key("general.alignment", U64, struct.pack("<Q", 32)), n_keys=1),
    "general.alignment is not of type uint32",
)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_crafted_file_is_refused_with_one_sentence_and_little_memory(
    tmp_path: Path, name: str
) -> None:
    data, message = ATTACKS[name]
    assert len(data) < 300
    tracemalloc.start()
    try:
        with pytest.raises((FormatError, UnsupportedError), match=message) as caught:
            read_bytes(tmp_path, data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert str(tmp_path / "case.gguf") in text
    assert "\n" not in text and text.isprintable()


def sample() -> bytes:
    """A small file with one of everything."""
    keys = [
        key("general.architecture", STRING, string("llama")),
        u32("general.alignment", 64),
        key(
            "words", ARRAY, struct.pack("<IQ", STRING, 3) + string("") + string("ab") + string("c")
        ),
        key("floats", ARRAY, struct.pack("<IQ2f", F32, 2, 1.0, 2.0)),
        key("flag", BOOL, b"\1"),
        key("split.count", U16, struct.pack("<H", 1)),
    ]
    tensors = [entry("a.weight", (32, 3), Q4_0_TYPE), entry("b.weight", (4, 2, 2), offset=64)]
    head = header(*keys, *tensors, n_tensors=len(tensors), n_keys=len(keys))
    return with_data(head, 64 + 64, alignment=64)


SAMPLE = sample()


def outcome(path: Path, data: bytes) -> None:
    """Reads `data`; whatever it is, the only error is ours and the memory stays small."""
    path.write_bytes(data)
    try:
        model = read_gguf(path)
        for tensor in model.tensors.values():
            assert model.read(tensor).nbytes == tensor.n_bytes <= len(data)
    except JitllmError as error:
        assert "\n" not in str(error)


def test_the_sample_is_sound_and_every_truncation_of_it_is_refused(tmp_path: Path) -> None:
    assert list(read_bytes(tmp_path, SAMPLE).tensors) == ["a.weight", "b.weight"]
    for n in range(len(SAMPLE)):
        with pytest.raises(JitllmError):
            read_bytes(tmp_path, SAMPLE[:n])


@given(
    flips=st.lists(
        st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=8
    ),
    n_bytes=st.integers(0, len(SAMPLE)) | st.just(len(SAMPLE)),
)
@settings(max_examples=300, deadline=2000)
def test_flipped_and_cut_bytes_end_in_our_own_errors(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], n_bytes: int
) -> None:
    data = bytearray(SAMPLE)
    for at, value in flips:
        data[at] = value
    tracemalloc.start()
    try:
        outcome(tmp_path_factory.getbasetemp() / "fuzz.gguf", bytes(data[:n_bytes]))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(JitllmError, match=r"none\.gguf cannot be read: No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(JitllmError, match="cannot be read: Is a directory"):
        read_gguf(tmp_path)


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    model = read_bytes(tmp_path, with_data(header(entry("w", (8,)), n_tensors=1), 32))
    model.path.write_bytes(b"GGUF")
    with pytest.raises(FormatError, match="became shorter while tensor w was read"):
        model.read(model.tensors["w"])


def test_a_large_vocabulary_is_read_across_the_window(tmp_path: Path) -> None:
    words = [f"\u2581token{i}" for i in range(120_000)]  # 2 MiB: more than one read of the header
    write_gguf(tmp_path / "v.gguf", {"w": np.ones(3, np.float32)}, words=words)
    model = read_gguf(tmp_path / "v.gguf")
    assert model.get("words", list) == words
    assert (model.read(model.tensors["w"]).view(np.float32) == 1).all()


# Split sets


def shard(
    number: int, count: int, name: str, *, total: int = 3, architecture: str | None = None
) -> bytes:
    keys = [
        key("split.no", U16, struct.pack("<H", number)),
        key("split.count", U16, struct.pack("<H", count)),
        key("split.tensors.count", 5, struct.pack("<i", total)),
    ]
    if number == 0 or architecture:
        keys.append(key("general.architecture", STRING, string(architecture or "llama")))
    head = header(*keys, entry(name, (8,)), n_tensors=1, n_keys=len(keys))
    return with_data(head, 0) + bytes([number]) * 32


def write_set(folder: Path, *shards: bytes) -> list[Path]:
    paths = [folder / f"m-{i + 1:05}-of-00003.gguf" for i in range(len(shards))]
    for path, data in zip(paths, shards, strict=True):
        path.write_bytes(data)
    return paths


def test_any_shard_stands_for_its_whole_set(tmp_path: Path) -> None:
    paths = write_set(tmp_path, *(shard(i, 3, f"w{i}") for i in range(3)))
    for path in paths:
        model = read_gguf(path)
        assert model.get("general.architecture", str) == "llama"
        assert list(model.tensors) == ["w0", "w1", "w2"]
        assert model.shards == tuple(paths)
        assert model.n_bytes == sum(p.stat().st_size for p in paths)
        assert model.read(model.tensors["w2"]).tobytes() == bytes([2]) * 32


BAD_SETS = {
    "a shard is missing": (
        (shard(0, 3, "a"), shard(1, 3, "b")),
        "m-00003-of-00003.gguf is missing",
    ),
    "a copy of another shard": (
        (shard(0, 3, "a"), shard(0, 3, "b"), shard(2, 3, "c")),
        "split.no is 0, but its name says 1",
    ),
    "another count": (
        (shard(0, 3, "a"), shard(1, 4, "b"), shard(2, 3, "c")),
        "split.count is 4, but its name says 3",
    ),
    "a tensor twice": (
        (shard(0, 3, "a"), shard(1, 3, "a"), shard(2, 3, "c")),
        "tensor a is in an earlier shard too",
    ),
    "tensors missing": (
        tuple(shard(i, 3, f"w{i}", total=4) for i in range(3)),
        "hold 3 tensors, but split.tensors.count is 4",
    ),
    "another model": (
        (shard(0, 3, "a"), shard(1, 3, "b", architecture="gemma"), shard(2, 3, "c")),
        "shards of different models",
    ),
}


@pytest.mark.parametrize("name", BAD_SETS)
def test_a_set_that_does_not_belong_together_is_refused(tmp_path: Path, name: str) -> None:
    shards, message = BAD_SETS[name]
    paths = write_set(tmp_path, *shards)
    with pytest.raises(JitllmError, match=message):
        read_gguf(paths[0])


def test_a_shard_under_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="one of 3 shards, but its name does not end in"):
        read_bytes(tmp_path, shard(1, 3, "w"))
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(SAMPLE)
    with pytest.raises(FormatError, match=r"named as one of 3 shards, but its split\.count is 1"):
        read_gguf(path)
