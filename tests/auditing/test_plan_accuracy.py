"""The benchmark that compares plans with what audits take."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("plan_accuracy")


def test_an_audit_is_planned_and_run(benchmark: ModuleType, digits: str) -> None:
    settings = {"data": digits, "victims": 2, "defenses": ["clip"], "attacks": ["ig:steps=100"]}
    part = benchmark.run_one(settings, 0)
    assert set(part["cells"]) == {
        "baseline without an update",
        *(f"{work} under {defense}" for work in ("updates", "ig:steps=100") for defense in ("none", "clip")),
    }
    assert all(cell["used"] > 0 and cell["expected"] > 0 for cell in part["cells"].values())


def test_the_page_counts_the_audits_within_the_factor(benchmark: ModuleType) -> None:
    def part(expected: float, used: float) -> dict[str, object]:
        cell = {"expected": expected, "limit": 2 * expected, "used": used, "status": "ok"}
        return {"command": "gradveil audit", "planning": 3.0, "cells": {"ig under none": cell}}

    text = "\n".join(benchmark.page({"good": part(10, 14), "early": part(10, 16), "late": part(16, 10)}))
    assert "Of 3 audits, the plan is within a factor of 1.5 of the CPU seconds used for 1." in text
    assert "| early | 1 | 10 s | 20 s | 16 s | 0.62 | 3 s |" in text
    assert text.index("| late | ig under none | 16.0 s | 10.0 s |") < text.index("| good | ig under none | 10.0 s | 14.0 s |")


def test_presets_are_among_the_audits(benchmark: ModuleType) -> None:
    assert len(benchmark.AUDITS) >= 10 and benchmark.AUDITS["medical-resnet"]["preset"] == "medical-resnet"
