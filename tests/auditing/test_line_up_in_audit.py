"""The line-up as a part of an audit: who stands in it, how it is stored, and what the summary says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.line_up import draw_line_ups
from gradveil.auditing.plan import make_plan
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError
from gradveil.metrics.identification import clopper_pearson
from gradveil.summary import Summary

CLASSES = 3


def data(count: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, 6, 6, generator=rng), torch.arange(count) % CLASSES


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def case_of(**settings: Any) -> Case:
    values = {"data": data(), "model": network(), "attacks": ["linear"], "victims": 6, "batch_size": 2, "line_up": 40}
    return Case(make_spec({**values, **settings}))


def audited(tmp_path: Path, **settings: Any) -> Summary:
    return run_audit(case_of(**settings), Execution(out=tmp_path / "run")).summary


def test_one_image_of_every_batch_stands_among_others_of_its_class_at_a_random_place() -> None:
    case = case_of(victims=12)
    drawn = draw_line_ups(case)
    private = case.data.private
    for batch, rows, place in zip(case.victims, drawn.candidates.rows, drawn.places, strict=True):
        assert len(rows) == len(rows.unique()) == 40
        assert int(rows[place]) in batch.tolist() and int(torch.isin(rows, batch).sum()) == 1
        assert (private.y[rows] == private.y[rows[place]]).all()
    assert len(set(drawn.places)) > 5
    again = draw_line_ups(case_of(victims=12))
    assert again.places == drawn.places
    assert all(torch.equal(a, b) for a, b in zip(again.candidates.rows, drawn.candidates.rows, strict=True))


def test_there_are_as_many_candidates_as_the_private_part_has_of_the_class() -> None:
    case = case_of(line_up=1001)
    counts = torch.bincount(case.data.private.y)
    drawn = draw_line_ups(case)
    for batch, rows, place in zip(case.victims, drawn.candidates.rows, drawn.places, strict=True):
        label = int(case.data.private.y[rows[place]])
        beside = int((case.data.private.y[batch] == label).sum()) - 1
        assert len(rows) == int(counts[label]) - beside


def test_copies_of_a_victim_do_not_stand_beside_it() -> None:
    x, y = data()
    x[y == 0] = x[0].clone()  # all of one class alike: their candidates are of other classes
    x[y == 1] = x[1::3][:100].repeat(2, 1, 1, 1)  # of another one every image twice
    case = case_of(data=(x, y), victims=3, batch_size=1)
    drawn = draw_line_ups(case)
    assert min(map(len, drawn.candidates.rows)) > 10
    for rows, place in zip(drawn.candidates.rows, drawn.places, strict=True):
        images = case.data.private.x[rows]
        assert int((images == images[place]).flatten(1).all(dim=1).sum()) == 1


def test_it_is_part_of_the_suite_and_of_audits_that_ask_for_it() -> None:
    suite = make_plan(case_of(attacks=["standard"], defenses=["clip"], line_up=None))
    assert [c.defense for c in suite if c.kind == "line-up"] == ["none", "clip"]
    assert not [c for c in make_plan(case_of(line_up=None)) if c.kind == "line-up"]
    assert not [c for c in make_plan(case_of(attacks=["standard"], line_up=0)) if c.kind == "line-up"]
    assert [c for c in make_plan(case_of(defenses=["clip"])) if c.kind == "line-up"]
    keys = [next(c.key for c in make_plan(case_of(line_up=m)) if c.kind == "line-up") for m in (40, 41)]
    assert keys[0] != keys[1]
    with pytest.raises(UserError, match="at least 2 candidates"):
        case_of(line_up=1)


def test_the_summary_holds_a_second_risk_that_has_no_part_in_the_verdict(tmp_path: Path) -> None:
    noised = "dpsgd:noise=30"
    summary = audited(tmp_path, defenses=["prune:ratio=0.5", noised])
    none, prune, dpsgd = summary.defenses
    for row in (none, prune):
        assert row.line_up is not None and row.line_up.m == 40 and len(row.line_up.ranks) == 6
        assert row.line_up.identified.rate >= 5 / 6 and row.line_up.shown and row.line_up.certificate is None
        hits = sum(rank == 1 for rank in row.line_up.ranks)
        rate = row.line_up.identified
        assert (rate.low, rate.high) == clopper_pearson(hits, 6) and rate.chance == pytest.approx(1 / 40)
    assert dpsgd.line_up is not None and dpsgd.line_up.certificate is not None
    assert dpsgd.line_up.identified.rate <= 1 / 6 and not dpsgd.line_up.contradicts
    assert dpsgd.line_up.certificate.upper < 0.05 and dpsgd.line_up.certificate.m == 40
    without = audited(tmp_path / "without", defenses=["prune:ratio=0.5", noised], line_up=0)
    assert [d.verdict for d in without.defenses] == [d.verdict for d in summary.defenses]
    assert all(d.line_up is None for d in without.defenses)
    assert any("line-up" in item for item in without.not_tested) and not any("line-up" in i for i in summary.not_tested)
    stored = json.loads((tmp_path / "run" / "summary.json").read_text())["defenses"][0]["line_up"]
    assert set(stored) == {"m", "identified", "ranks", "certificate"}


def test_batchnorm_in_training_mode_voids_the_certificate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES))
    same = {"model": model, "defenses": ["clip:norm=1+gaussian:std=1"], "attacks": ["ig:steps=1"]}
    trained, evaluated = (audited(tmp_path / mode, mode=mode, **same) for mode in ("train", "eval"))
    assert trained.defenses[1].line_up is not None and trained.defenses[1].line_up.certificate is None
    assert evaluated.defenses[1].line_up is not None and evaluated.defenses[1].line_up.certificate is not None


def test_a_stored_line_up_is_not_computed_again(tmp_path: Path) -> None:
    first = audited(tmp_path)
    cells = [p for p in (tmp_path / "run" / "cells").iterdir() if '"kind": "line-up"' in p.read_text()]
    assert len(cells) == len(first.defenses)
    times = [os.stat(p).st_mtime_ns for p in cells]
    assert audited(tmp_path).defenses[0].line_up == first.defenses[0].line_up
    assert [os.stat(p).st_mtime_ns for p in cells] == times


def test_a_line_up_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("no comparison")

    monkeypatch.setattr("gradveil.auditing.cells.draw_line_ups", broken)
    summary = audited(tmp_path)
    assert summary.defenses[0].line_up is None
    assert "the line-up under none: failed (ValueError: no comparison)" in summary.not_tested
