"""A recipe and a result, written for a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gradveil.recipes.result import RecipeResult


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """Writes a recipe and returns the name to load it by."""

    def write(text: str) -> str:
        (tmp_path / "mine.yaml").write_text(text)
        return str(tmp_path / "mine.yaml")

    return write


@pytest.fixture
def make_result() -> Callable[..., RecipeResult]:
    """A stored result with these fields."""

    def make(**fields: object) -> RecipeResult:
        versions = dict.fromkeys(("gradveil", "python", "torch", "numpy", "machine"), "1")
        environment = {**versions, "cores": 2, "date": "2026-01-01", "seeds": [100], "data": {}}
        values = {"recipe": "mine", "scale": "cpu", "settings": "", "rows": {}, "claims": [], "seconds": 1.0}
        return RecipeResult.model_validate_json(json.dumps({**values, "environment": environment, **fields}))

    return make
