"""The order of packages, no cycles between modules, and one public class per name.

Every import statement counts: at the top of a file, inside a function, and under `TYPE_CHECKING`. Imports of a module by
its name as text (`import_module("gradveil.…")`) count too.
"""

from __future__ import annotations

import ast
import functools
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
ROOT = "gradveil"

# From the lowest to the highest. A module imports from packages in lower rows, and from its own package.
ORDER = (
    ("core",),
    ("storage", "processes", "certification"),
    ("data", "models", "metrics"),
    ("defenses",),
    ("client",),
    ("attacks",),
    ("protection", "summary"),
    ("federation",),
    ("auditing",),
    ("report",),
    ("recipes",),
    ("api",),
    ("cli",),
    ("__init__", "__main__"),
)
LEVEL = {package: level for level, row in enumerate(ORDER) for package in row}


@functools.cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


def modules(source: Path) -> dict[str, Path]:
    """Dotted name → file, of every module of the package; a package is named without `__init__`."""
    paths = {}
    for path in sorted((source / ROOT).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def package_of(module: str) -> str:
    """The name that stands in ORDER: the first part below the root."""
    return module.split(".")[1] if "." in module else "__init__"


def imported(tree: ast.AST, module: str, is_package: bool, every: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that one module imports, anywhere in its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            # `__version__` is a constant of the root, which imports nothing when it is loaded.
            names = [f"{base}.{a.name}" for a in node.names if (base, a.name) != (ROOT, "__version__")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            text = node.args[0]
            names = [text.value] if isinstance(text, ast.Constant) and isinstance(text.value, str) else []
        else:
            continue
        for name in names:
            while name and name not in every:  # a class or a function: the module that holds it
                name = name.rpartition(".")[0]
            if name and name != module:
                yield name


def graph(source: Path) -> dict[str, set[str]]:
    every = modules(source)
    return {
        name: set(imported(parse(path.read_text(encoding="utf-8")), name, path.stem == "__init__", every))
        for name, path in every.items()
    }


def wrong_order(source: Path) -> set[str]:
    """`importer -> imported` for every import that does not point down."""
    edges = [(a, b) for a, targets in graph(source).items() for b in targets]
    return {f"{a} -> {b}" for a, b in edges if package_of(a) != package_of(b) and LEVEL[package_of(a)] <= LEVEL[package_of(b)]}


def cycles(source: Path) -> set[str]:
    """Groups of modules that reach each other by imports, written `a <-> b <-> c`."""
    edges = graph(source)
    reached = {name: _reachable(edges, name) for name in edges}
    groups = {frozenset(b for b in reached[a] if a in reached[b]) | {a} for a in edges if a in reached[a]}
    return {" <-> ".join(sorted(group)) for group in groups}


def _reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += edges[name]
    return seen


def double_names(source: Path) -> set[str]:
    """`Name: module, module` for every public class, or what is named like one, that two modules define."""
    homes: dict[str, set[str]] = defaultdict(set)
    for module, path in modules(source).items():
        for node in parse(path.read_text(encoding="utf-8")).body:
            for name in _class_like(node):
                homes[name].add(module)
    return {f"{name}: {', '.join(sorted(where))}" for name, where in homes.items() if len(where) > 1}


def _class_like(node: ast.stmt) -> list[str]:
    """Public names of classes; of functions and type aliases those that are written like a class."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        names = [node.name]
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [t.id for t in targets if isinstance(t, ast.Name) and not t.id.isupper()]  # capitals: a constant
    else:
        names = []
    return [name for name in names if name[0].isupper()]


@pytest.mark.parametrize("rule", [wrong_order, cycles, double_names], ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Callable[[Path], set[str]]) -> None:
    assert not rule(SOURCE)


def test_every_package_has_its_place() -> None:
    assert {package_of(name) for name in modules(SOURCE)} <= set(LEVEL)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tree of the same layout that keeps all rules."""
    write(tmp_path, "__init__", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gradveil.api import audit\n")
    write(tmp_path, "core.__init__", "")
    write(tmp_path, "core.types", "class Batch: ...\n")
    write(tmp_path, "data.__init__", "from gradveil.data.load import Dataset\n")
    write(tmp_path, "data.load", "from gradveil import __version__\nfrom ..core.types import Batch\nclass Dataset: ...\n")
    write(tmp_path, "models.__init__", "from gradveil.core import types\n")
    write(tmp_path, "api", "from gradveil.data import Dataset\ndef audit():\n    from gradveil import models\n")
    return tmp_path


def write(source: Path, module: str, text: str, mode: str = "w") -> None:
    path = (source / ROOT).joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode, encoding="utf-8") as file:
        file.write(text)


def test_the_small_tree_keeps_all_rules(small: Path) -> None:
    assert not wrong_order(small) | cycles(small) | double_names(small)
    assert graph(small)["gradveil.data.load"] == {"gradveil.core.types"}
    assert graph(small)["gradveil.api"] == {"gradveil.data", "gradveil.models"}


@pytest.mark.parametrize(
    "line",
    [
        "from gradveil.data.load import Dataset",
        "from gradveil import data",
        "import gradveil.data",
        "from ..data import load",
        "def later():\n    from gradveil.data import load",
        "if TYPE_CHECKING:\n    from gradveil.data import load",
        "import importlib\nimportlib.import_module('gradveil.data.load')",
    ],
)
def test_one_line_that_points_up_is_reported(small: Path, line: str) -> None:
    write(small, "core.types", f"{line}\n", mode="a")
    (broken,) = wrong_order(small)
    assert broken.startswith("gradveil.core.types -> gradveil.data")


def test_a_package_beside_and_the_root_point_up_too(small: Path) -> None:
    write(small, "models.__init__", "import gradveil.data\n", mode="a")
    write(small, "data.load", "from gradveil import audit\n", mode="a")
    assert wrong_order(small) == {"gradveil.models -> gradveil.data", "gradveil.data.load -> gradveil"}


@pytest.mark.parametrize("length", [2, 3, 5])
def test_a_cycle_of_any_length_is_reported_though_an_import_inside_a_function_hides_it(small: Path, length: int) -> None:
    names = [f"gradveil.core.m{i}" for i in range(length)]
    for i, name in enumerate(names):
        write(small, name.removeprefix("gradveil."), f"def late():\n    import {names[(i + 1) % length]}\n")
    assert cycles(small) == {" <-> ".join(names)}


@pytest.mark.parametrize("line", ["class Batch: ...", "Batch = dict[str, int]", "Batch: object = int", "def Batch(): ..."])
def test_a_second_public_class_of_one_name_is_reported(small: Path, line: str) -> None:
    write(small, "models.base", f"{line}\nclass _Batch: ...\n")
    write(small, "models.small", "class _Batch: ...\n")  # private names may be shared
    assert double_names(small) == {"Batch: gradveil.core.types, gradveil.models.base"}


def test_a_line_in_a_copy_of_the_source_that_breaks_the_order_is_reported(tmp_path: Path) -> None:
    shutil.copytree(SOURCE / ROOT, tmp_path / ROOT, ignore=shutil.ignore_patterns("__pycache__"))
    write(tmp_path, "core.errors", "\n\ndef late():\n    from gradveil.report import html\n", mode="a")
    assert wrong_order(tmp_path) == {"gradveil.core.errors -> gradveil.report.html"}
    (cycle,) = cycles(tmp_path)
    assert "gradveil.core.errors <-> " in cycle and "gradveil.report.html" in cycle
