"""The public names are loaded when they are used, from where type checkers see them, and cost nothing before."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradveil

NAMES = [name for name in gradveil.__all__ if not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(gradveil, name)
    assert (value.__name__ if name != "flower" else value.__name__.rpartition(".")[2]) == name
    assert name in dir(gradveil)


def test_type_checkers_see_the_same_names_at_the_same_places() -> None:
    tree = ast.parse(Path(gradveil.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {a.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert sorted(seen) == sorted(NAMES)
    for name in set(NAMES) - {"flower"}:
        assert getattr(gradveil, name).__module__ == seen[name]


def test_importing_the_package_loads_no_heavy_module() -> None:
    code = "import sys, gradveil; print([m for m in ('torch', 'numpy', 'pydantic', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        gradveil.nonsense  # noqa: B018
