"""Audits of updates that hold nothing of the victim: at most 5% may say `leaks`; without a defense all must."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import gradveil as gv
from gradveil.data import DataSet

AUDITS = 30  # of each of two null defenses; 60 without an alarm exclude rates above 5% at 95%


@pytest.fixture(scope="module")
def calibration() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "calibration.py"
    found = importlib.util.spec_from_file_location("calibration", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_null_audits_raise_no_alarm_and_open_ones_always_do(calibration: ModuleType, shapes: DataSet) -> None:
    alarms, open_ones = [], []
    for seed in range(AUDITS):
        report = gv.audit(
            shapes, "lenet", [kind() for kind in calibration.NULLS], ["rgap"], victims=8, seed=seed, workers=0, quiet=True
        )
        verdicts = {d.spec: d.verdict for d in report.summary.defenses}
        open_ones.append(verdicts.pop("none") == "leaks")
        alarms += [verdict == "leaks" for verdict in verdicts.values()]
    assert len(alarms) == 2 * AUDITS
    assert sum(alarms) == 0
    assert all(open_ones)
