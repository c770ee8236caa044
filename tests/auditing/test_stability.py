"""The page on stability counts the audits whose verdict or p differs between several ways to compute them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.progress import Display
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("stability")


def test_the_page_counts_what_differs(benchmark: ModuleType) -> None:
    part = {"defense": "gaussian:std=0.7", "seconds": 1.0}
    parts = []
    for seed, stressed in ((100, "unrefuted"), (101, "leaks")):
        same = part | {"seed": seed, "verdict": "leaks", "p": 0.01, "likeness": [0.5, 0.25]}
        parts += [same | {"variant": variant} for variant in benchmark.VARIANTS]
        parts.append(same | {"variant": "2 MB", "verdict": stressed, "p": 0.02, "likeness": [0.5, 0.5]})
    parts.append(part | {"seed": 102, "variant": "1 thread", "verdict": "leaks", "p": 0.01, "likeness": [0.5]})  # not complete
    text = "\n".join(benchmark.page(parts))
    assert "2 processes, 512 MB: the verdict differs in **0** of 2 audits, p in 0." in text
    assert "with 2 MB too: the verdict differs in **1** of 2 audits, p in 2." in text
    assert text.count("| gaussian:std=0.7 |") == 2 and "| unrefuted, 0.020 | 0.25 |" in text


@pytest.mark.parametrize(("memory", "said"), [("2M", True), (None, False)])
def test_less_memory_than_all_sums_are_made_with_is_said(memory: str | None, said: bool, tmp_path: Path) -> None:
    class Notes(Display):
        texts: ClassVar[list[str]] = []

        def note(self, text: str) -> None:
            self.texts.append(text)

    Notes.texts.clear()
    case = Case(make_spec({"attacks": ["linear"], "defenses": ["none"], "victims": 1}))
    run_audit(case, Execution(out=tmp_path / "run", workers=0, memory=memory), Notes())
    assert any("a close verdict may change" in text for text in Notes.texts) == said
