"""Audits of updates that hold nothing of the victim say `leaks` in 5% of cases; planted images are seen."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scipy.stats import binomtest

from gradveil.auditing.case import Case
from gradveil.auditing.spec import make_spec
from gradveil.data import DataSet
from gradveil.metrics import identify

KINDS = ("noise-alone", "stranger", "other-class", "constant")


@pytest.fixture
def calibration(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("calibration")


def test_null_audits_keep_the_level_and_open_ones_always_leak(
    calibration: ModuleType, shapes: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(calibration.DATA, "shapes", lambda: shapes)
    monkeypatch.setattr(calibration, "VICTIMS", {(1, False): 8, (8, False): 1})
    monkeypatch.setattr(calibration, "AUDITS", {(1, False): 2, (8, False): 3})
    for batch, seed in ((1, 0), (1, 1), (8, 0), (8, 1)):
        part = calibration.Part("shapes", batch, "closed", seed)
        assert calibration.do(part, tmp_path, draws=100) == part.file
    stored = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert len(stored) == 4
    for part in stored:
        assert set(part["alarms"]) == {"none", *KINDS} == {"none", *part["redrawn"]}
        assert part["alarms"]["none"] == part["audits"] == (2 if part["batch"] == 1 else 3)
        assert part["alarms"]["constant"] == part["redrawn"]["constant"] == 0
    redrawn = sum(part["redrawn"][kind] for part in stored for kind in KINDS[:3])
    assert binomtest(redrawn, 1200, 0.05).pvalue > 0.0005, redrawn
    audits = sum(part["alarms"][kind] for part in stored for kind in KINDS[:3])
    assert audits <= 6, audits  # more than 6 of 30 at 5%: 1 in 1,000
    single = [part["planted"] for part in stored if part["batch"] == 1]
    assert all(seen >= 90 for planted in single for seen in planted.values()), single  # of 100, with 3 of 8 images
    text = "\n".join(calibration.page(stored))
    assert "Pooled:" in text and "| shapes | 8 | closed | stranger |" in text and "| 3 of 8 |" in text


@pytest.mark.skipif(not os.environ.get("GRADVEIL_DATA"), reason="needs the images in GRADVEIL_DATA")
@pytest.mark.parametrize("name", ["chest", "dark"])
def test_strangers_of_chest_images_in_batches_of_eight_and_nearly_black_images_raise_no_more(
    calibration: ModuleType, name: str
) -> None:
    """The answers are images that no part of the audit holds: before, half of such audits of X-rays said `leaks`."""
    data, outside = calibration.apart(calibration.DATA[name]())
    values = {"data": data, "defenses": "none", "attacks": "rgap", "victims": 8, "batch_size": 8}
    alarms, seen = 0, 0
    for seed in range(4):
        case = Case(make_spec(values | {"seed": seed}))
        stranger = calibration.Stranger(outside)
        stream = torch.Generator().manual_seed(seed)
        answers = []
        for label in case.slots.label:
            same_class = (stranger.labels == label).nonzero().flatten()
            answers.append(stranger.images[same_class[torch.randint(len(same_class), (1,), generator=stream)]])
        images, (label, batch) = torch.cat(answers), map(torch.from_numpy, (case.slots.label, case.slots.batch))
        nearest = identify(case.tested.x[:64], label, images, case.distractors, batch=batch).nearest.numpy()
        table = calibration.private_table(case, [images.unflatten(0, (8, 8))])
        audits = [calibration.audit_slots(case.slots, 8, 0)]
        alarms += calibration.redraw(case, table, nearest, audits, seed, 100)
        seen += calibration.redraw(case, table, nearest, audits, seed, 10, planted=1)
    assert binomtest(alarms, 400, 0.05).pvalue > 0.001, alarms
    assert seen >= 36  # of 40: one exact image of 64
