"""An engine that pages, in use: its budget jumps about, its disk fails, its file is damaged, it
answers for hours, its control group is tight."""

import errno
import gc
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from jitllm.convert import convert
from jitllm.engine import Engine
from jitllm.errors import BudgetError, JitllmError
from jitllm.paging.container import Container
from tests import figures
from tests.cgroups import NoCgroups, inside, memory_group
from tests.paging.toys import kernel_read_bytes
from tests.tiny_models import write_tiny

PROMPT = "Once upon a time there was a little girl named Lily"
N_TOKENS = 40


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    convert(write_tiny(folder / "tiny.gguf", "Q4_K", n_blocks=5), folder / "tiny.jlm")
    return folder / "tiny.jlm"


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A container that the test may damage."""
    path = tmp_path / "tiny.jlm"
    path.write_bytes(original.read_bytes())
    return path


@pytest.fixture(scope="module")
def smallest(original: Path) -> int:
    with pytest.raises(BudgetError) as refusal:
        Engine.open(original, maxmem=1)
    return refusal.value.smallest_bytes


@pytest.fixture(scope="module")
def everything(original: Path, smallest: int) -> int:
    return smallest + sum(page.n_bytes for page in Container.open(original).pages)


def opened(path: Path, budget: int, **settings: object) -> Engine:
    return Engine.open(path, maxmem=budget, max_seq=96, devices="cpu", **settings)


def reply(engine: Engine, n: int = N_TOKENS) -> list[int]:
    generation = engine.generate(PROMPT, n=n, temp=0)
    assert "".join(generation) == generation.report.text
    return generation.report.ids


@pytest.fixture(scope="module")
def expected(original: Path, everything: int) -> list[int]:
    """The reply of an engine that has all the memory it wants."""
    with opened(original, everything) as engine:
        return reply(engine)


# A budget that changes


def logits_of(engine: Engine, n_tokens: int, before_each=lambda: None) -> np.ndarray:
    """f32[n, V] of a greedy reply, token by token."""
    with engine.session() as session:
        rows = [session.prefill(engine.tokenize(PROMPT))]
        for _ in range(n_tokens - 1):
            before_each()
            rows.append(session.prefill([int(rows[-1].argmax())]))
    return np.array(rows)


@pytest.mark.parametrize("kernels", figures.KERNELS)
def test_random_budgets_amid_a_reply_do_not_change_a_bit(
    original, smallest, everything, kernels, monkeypatch
):
    figures.use_kernels(kernels, monkeypatch)
    with opened(original, everything) as engine:
        steady = logits_of(engine, 24)
    dice, applied = random.Random(0), []
    with opened(original, smallest) as engine:

        def jump() -> None:
            applied.append(engine.set_budget(dice.randint(smallest, everything)))
            line = engine.stats().ledger.lines[0]
            assert line.name == "weights" and line.used_bytes <= line.budget_bytes

        np.testing.assert_array_equal(logits_of(engine, 24, jump), steady)
    assert len({now.n_resident for now in applied}) > 3
    assert sum(now.evicted for now in applied) > 5


def test_budgets_that_another_thread_sets_are_in_force_and_change_no_token(
    original, smallest, everything, expected
):
    with opened(original, everything) as engine:
        done, set_so_far = threading.Event(), []

        def jump() -> None:
            dice = random.Random(1)
            while not done.wait(0.002):
                set_so_far.append(engine.set_budget(dice.randint(smallest, everything)))

        jumper = threading.Thread(target=jump)
        jumper.start()
        try:
            assert reply(engine) == expected
        finally:
            done.set()
            jumper.join()
        assert len(set_so_far) > 5
        assert engine.stats().budget_bytes == set_so_far[-1].budget_bytes


# What is read


def test_bytes_read_in_a_reply_are_the_kernel_s(original, smallest):
    if not os.access("/proc/self/io", os.R_OK):
        pytest.skip("no /proc/self/io here")
    with opened(original, smallest + 100_000) as engine:
        reply(engine)
        pairs = []
        for _ in range(5):
            engine.set_budget(smallest + 100_000)  # waits for what is being read ahead
            ours, kernels = engine.pager_counters().bytes_read, kernel_read_bytes()
            reply(engine)
            engine.set_budget(smallest + 100_000)
            ours = engine.pager_counters().bytes_read - ours
            pairs.append((ours, kernel_read_bytes() - kernels))
    if not any(kernels for _, kernels in pairs):
        pytest.skip("no direct reads, or no disk below this file system")
    # The kernel also counts what the interpreter itself reads now and then.
    assert any(ours == kernels > 0 for ours, kernels in pairs)


# What goes wrong


class Trouble:
    """Something that befalls a file in use, until it is put right."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        self.path, self.monkeypatch, self.content = path, monkeypatch, path.read_bytes()

    def failing_disk(self) -> None:
        def fail(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        self.monkeypatch.setattr(os, "preadv", fail)

    def damage(self) -> None:
        """A bit of every block is flipped."""
        with self.path.open("r+b") as file:
            for page in Container.open(self.path).pages:
                if page.kind == "block":
                    file.seek(page.offset + 100)
                    file.write(bytes([self.content[page.offset + 100] ^ 1]))

    def cut_off(self) -> None:
        os.truncate(self.path, len(self.content) // 3)

    def put_right(self) -> None:
        self.monkeypatch.undo()
        with self.path.open("r+b") as file:
            file.write(self.content)


@pytest.mark.parametrize(
    ("befall", "sentence"),
    [
        (Trouble.failing_disk, r"tiny\.jlm cannot be read: Input/output error"),
        (Trouble.damage, r"tiny\.jlm has a damaged block page \d \(its hash differs\)"),
        (Trouble.cut_off, r"tiny\.jlm was cut off while it was in use"),
    ],
)
@pytest.mark.parametrize("room", [0, 150_000])
def test_trouble_amid_a_reply_is_one_error_and_the_next_request_is_answered(
    model, smallest, expected, monkeypatch, befall, sentence, room
):
    trouble = Trouble(model, monkeypatch)
    with opened(model, smallest + room) as engine:
        generation = engine.generate(PROMPT, n=N_TOKENS, temp=0)
        for _ in range(3):
            next(generation)
        befall(trouble)
        with pytest.raises(JitllmError, match=sentence) as error:
            list(generation)
        assert "\n" not in str(error.value)
        with pytest.raises(JitllmError, match=sentence):
            reply(engine)
        trouble.put_right()
        assert reply(engine) == expected
        assert engine.set_budget(smallest).n_resident == 1  # nothing is held any more


# In the long run


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_three_hundred_replies_leak_less_than_ten_kilobytes_each(original, smallest):
    with opened(original, smallest + 100_000) as engine:
        for _ in range(60):
            reply(engine, n=3)
        before, page_ins = anonymous_bytes(), engine.pager_counters().page_ins
        for _ in range(300):
            engine.session().close()
            reply(engine, n=3)
        assert engine.pager_counters().page_ins > page_ins + 900
        assert anonymous_bytes() - before < 300 * 10_000


def test_a_closed_engine_has_given_everything_back(original, everything):
    engine = opened(original, everything)
    reply(engine, n=3)
    assert engine.ledger.used("weights") > 0 < engine.ledger.used("kv")
    engine.close()
    assert (engine.ledger.used("weights"), engine.ledger.used("kv")) == (0, 0)


# In a control group

RUN = """
import json, sys
from jitllm.engine import Engine

def anonymous_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["RssAnon"].split()[0]) << 10

def ran(path, **settings):
    with Engine.open(path, max_seq=256, devices="cpu", **settings) as engine:
        generation = engine.generate(list(range(3, 203)), n=6, temp=0)
        list(generation)
        return generation.report.ids, engine.stats()

small, large, limit = sys.argv[1:]
ran(small)
base = anonymous_bytes()
ids, stats = ran(large, process_limit=int(limit))
facts = {"base": base, "ids": ids, "ledger": stats.ledger.peak_bytes}
print(json.dumps(facts | {"page_ins": stats.counters.page_ins}))
"""


def run_alone(paths: list[Path], limit_bytes: int, group: Path | None = None) -> dict:
    """A model of 80 MB in a process of its own, after one of the same kind that is tiny."""
    command = [sys.executable, "-c", RUN, *map(str, paths), str(limit_bytes)]
    command = command if group is None else inside(group, command)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout)


def test_a_run_lives_in_a_control_group_of_its_ledger_s_limit_and_the_interpreter(
    tmp_path, monkeypatch
):
    """And a tenth. Its budget is what the limit leaves."""
    figures.use_kernels("cpu", monkeypatch)
    large = {"width": 1024, "ff_width": 4096, "n_blocks": 5, "n_heads": 16, "n_kv_heads": 4}
    paths = []
    for name, overrides in {"small": {}, "large": large}.items():
        paths.append(tmp_path / f"{name}.jlm")
        convert(write_tiny(tmp_path / f"{name}.gguf", "Q8_0", **overrides), paths[-1])
    limit = 60 << 20
    free = run_alone(paths, limit)
    try:
        with memory_group(int(1.1 * (free["base"] + limit))) as group:
            held = run_alone(paths, limit, group)
    except NoCgroups as reason:
        pytest.skip(str(reason))
    assert held["ids"] == free["ids"]
    assert held["page_ins"] > 12
    assert held["ledger"] <= limit
