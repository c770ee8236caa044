"""Whoever changes a method raises its version or says that its results stay the same; so stored results never lie."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import record_fingerprints as record

RECORDED = json.loads(record.RECORD.read_text(encoding="utf-8"))
REMEDY = (
    "The code has changed since it was recorded. If results change, raise its version (`version=` of the decorator; "
    "PROTOCOL in auditing/case.py for the protocol; VERSION too in a file that trains a network and keeps it). "
    "In any case run `python tests/record_fingerprints.py` and commit tests/fingerprints.json."
)


def test_no_code_has_changed_since_its_version_was_recorded() -> None:
    current = record.current()
    changed = {name for name in current.keys() | RECORDED.keys() if current.get(name) != RECORDED.get(name)}
    assert not changed, f"{', '.join(sorted(changed))}: {REMEDY}"


def test_no_version_is_lower_than_recorded() -> None:
    current = record.current()
    assert not {n for n, r in RECORDED.items() if n in current and current[n]["version"] < r["version"]}


def test_every_file_of_methods_is_covered() -> None:
    covered = set[Path]().union(*(paths for _, paths in record.covered().values()))
    others = record.files(record.OTHERS)
    assert not record.files(f"{package}/**/*.py" for package in record.METHODS) - covered - others
    for pattern in (*record.PROTOCOL, *record.PROTOCOL_WITHOUT, *record.OTHERS):
        assert record.files([pattern]), f"{pattern} finds no file"
    for path in others - covered:
        if path.name == "__init__.py":
            body = ast.parse(path.read_text(encoding="utf-8")).body
            assert all(isinstance(s, (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)) for s in body), path


CODE = '''
"""Of a file."""
def scale(x, factor=2):
    """Of a function."""
    y = x * factor  # a comment
    return y
'''


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("Of a file", "Other words"),
        CODE.replace('    """Of a function."""\n', ""),
        CODE.replace("# a comment", ""),
        CODE.replace("(x, factor=2)", "(\n    x: float,\n    factor: int = 2,\n) -> float"),
        CODE.replace("y = x * factor", "y = (x * factor)"),
    ],
)
def test_words_annotations_and_formatting_leave_a_fingerprint_as_it_is(same: str) -> None:
    assert same != CODE
    assert record.fingerprint([same]) == record.fingerprint([CODE])


@pytest.mark.parametrize("change", [("factor=2", "factor=3"), ("x * factor", "x + factor"), ("return y", "return x")])
def test_code_changes_a_fingerprint(change: tuple[str, str]) -> None:
    assert record.fingerprint([CODE.replace(*change)]) != record.fingerprint([CODE])
