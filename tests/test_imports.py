"""Who may import whom, read from the source: the layers of the project, as a test.

An import inside a function counts like any other; one for the type checker alone does not.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MEETING_PLACE = [
    "jitllm.engine",
    "jitllm.session",
    "jitllm.executor",
    "jitllm.steps",
    "jitllm.stores",
    "jitllm.mover",
    "jitllm.residence",
    "jitllm.scheduler",
    "jitllm.rows",
    "jitllm.prefix_cache",
    "jitllm.evaluate",
    "jitllm.speed",
    "jitllm.verify",
    "jitllm.prospect",
    "jitllm.outlook",
    "jitllm.sweep",
]
PLAIN = ["jitllm.errors", "jitllm.units", "jitllm.ranges", "jitllm.cache"]

MAY_IMPORT: dict[str, list[str]] = {
    # The longest name that begins a module's own is its row. Everything may import `PLAIN`.
    "jitllm": ["jitllm.engine"],
    "jitllm.errors": [],
    "jitllm.units": [],
    "jitllm.ranges": [],
    "jitllm.cache": [],
    "jitllm.compiled": [],
    "jitllm.sampling": [],
    "jitllm.reports": ["jitllm.placement.devices"],
    "jitllm.download": [],
    "jitllm.gguf_file": [],
    "jitllm.kernels": ["jitllm.kernels"],
    "jitllm.kernels.spec": [],
    "jitllm.model": ["jitllm.model", "jitllm.kernels"],
    "jitllm.model.config": ["jitllm.kernels.spec"],
    "jitllm.model.arch": ["jitllm.model.arch", "jitllm.model.config", "jitllm.kernels.spec"],
    "jitllm.model.weights": ["jitllm.kernels"],
    "jitllm.model.kvcache": ["jitllm.kernels"],
    "jitllm.model.sampler": ["jitllm.sampling"],
    "jitllm.text": ["jitllm.text"],
    "jitllm.paging": ["jitllm.paging"],
    "jitllm.placement": ["jitllm.placement"],
    "jitllm.convert": [
        "jitllm.gguf_file",
        "jitllm.convert_pages",
        "jitllm.model",
        "jitllm.kernels",
        "jitllm.text",
        "jitllm.paging",
    ],
    "jitllm.convert_pages": [
        "jitllm.gguf_file",
        "jitllm.model",
        "jitllm.kernels",
        "jitllm.paging",
    ],
    "jitllm.catalog": ["jitllm.download", "jitllm.gguf_file", "jitllm.convert", "jitllm.paging"],
    "jitllm.server": [
        *MEETING_PLACE,
        "jitllm.server",
        "jitllm.paging.budget",
        "jitllm.catalog",
        "jitllm.placement",
        "jitllm.reports",
        "jitllm.sampling",
        "jitllm.text",
    ],
    "jitllm.cli": ["jitllm"],
} | {
    name: [
        *MEETING_PLACE,
        "jitllm.catalog",
        "jitllm.compiled",
        "jitllm.kernels",
        "jitllm.model",
        "jitllm.paging",
        "jitllm.placement",
        "jitllm.reports",
        "jitllm.sampling",
        "jitllm.text",
    ]
    for name in MEETING_PLACE
}
WITHOUT_JAX = [
    "jitllm.text",
    "jitllm.paging",
    "jitllm.gguf_file",
    "jitllm.convert",
    "jitllm.catalog",
    "jitllm.cli",
]
"""Loading these loads no jax: 1.4 s that a command which only reads a file does not pay."""


def _is_for_the_type_checker(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _imports(node: ast.AST, nested: bool = True) -> Iterator[str]:
    """Names imported below `node`; without `nested` only those of its loading."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute here"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif _is_for_the_type_checker(child):
            continue
        elif nested or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(child, nested)


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    trees = {}
    for path in sorted((ROOT / "jitllm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def _module_of(name: str) -> str:
    """`jitllm.units.parse_size` -> `jitllm.units`."""
    while name not in modules():
        name = name.rpartition(".")[0]
    return name


def imported(name: str, nested: bool = True) -> set[str]:
    """Modules of the package that `name` imports."""
    ours = (i for i in _imports(modules()[name], nested) if i.partition(".")[0] == "jitllm")
    # The version is the one thing in the package's root, which loads nothing.
    return {_module_of(i) for i in ours if i != "jitllm.__version__"}


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def row(name: str) -> str:
    """The row of `MAY_IMPORT` that is for the module `name`."""
    rows = [r for r in MAY_IMPORT if name == r or (r != "jitllm" and _within(name, r))]
    assert rows, f"{name} has no row in MAY_IMPORT: decide what it may import"
    return max(rows, key=len)


@pytest.mark.parametrize("name", modules())
def test_a_module_imports_only_what_its_layer_may(name: str) -> None:
    allowed = [*PLAIN, *MAY_IMPORT[row(name)]]
    extra = {i for i in imported(name) if not any(_within(i, a) for a in allowed)}
    assert not extra, f"{name} may not import {', '.join(sorted(extra))}"


def test_model_paging_and_placement_do_not_know_each_other() -> None:
    parts = {f"jitllm.{part}" for part in ("model", "paging", "placement")}
    for part in parts:
        reached = {i for name in modules() if _within(name, part) for i in imported(name)}
        assert not {i for i in reached for other in parts - {part} if _within(i, other)}


def _loaded_with(name: str) -> set[str]:
    """All modules, of the package or not, that loading `name` loads."""
    todo, seen = [name], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in modules():
            seen |= set(_imports(modules()[name], nested=False))
            todo += imported(name, nested=False)
            todo += [parent for parent in modules() if name.startswith(parent + ".")]
    return seen


@pytest.mark.parametrize("part", WITHOUT_JAX)
def test_loading_these_loads_no_jax(part: str) -> None:
    for name in modules():
        if _within(name, part):
            loaded = {i.partition(".")[0] for i in _loaded_with(name)}
            assert "jitllm" in loaded
            assert "jax" not in loaded, f"loading {name} loads jax"


def test_the_server_entry_imports_the_server_alone() -> None:
    found = _imports(ast.parse((ROOT / "app.py").read_text()))
    ours = {_module_of(i) for i in found if i.startswith("jitllm")}
    assert ours == {"jitllm.errors", "jitllm.server"}
