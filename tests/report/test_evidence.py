"""Whether a page says what its run holds: every change of a page or of a result is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gradveil as gv
from gradveil.report import write_report
from gradveil.report.about import About
from gradveil.report.evidence import disagreement, evidence_hash
from gradveil.report.html import render
from gradveil.storage.run_folder import RunFolder

Run = Callable[..., Path]


def difference(folder: Path) -> str | None:
    return disagreement(RunFolder(folder), render)


@pytest.mark.parametrize("mode", ["none", "blurred", "shown"])
def test_a_page_agrees_with_its_run(run: Run, mode: str) -> None:
    folder = run()
    write_report(folder, mode)
    assert difference(folder) is None
    assert evidence_hash(RunFolder(folder)) in (folder / "report.html").read_text()
    folder.rename(folder.with_name("elsewhere"))
    assert difference(folder.with_name("elsewhere")) is None, "the place of a run is no evidence"


def test_an_audit_that_finds_everything_done_leaves_the_evidence_as_it_is(tmp_path: Path) -> None:
    data = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    hashes = set()
    for _ in range(2):
        gv.audit(data, model, ["clip"], ["linear"], victims=2, quiet=True, out=tmp_path / "run")
        hashes.add(evidence_hash(RunFolder(tmp_path / "run")))
    assert len(hashes) == 1


def replaced(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("report.html", "Private images leak under", "No private images leak under", "was edited, or another version"),
        ("report.html", "evidence=", "evidence=0", "does not name its evidence"),
        ("summary.json", '"seed": 0', '"seed": 1', "was made of other evidence"),
        ("audit.yaml", "seed: 0", "seed: 1", "was made of other evidence"),
        ("environment.json", '"cpus": 2', '"cpus": 3', "was made of other evidence"),
        ("cells/cell-00-00.json", '"iterations": 300', '"iterations": 301', "does not hold what was written"),
    ],
)
def test_a_change_is_noticed(run: Run, name: str, old: str, new: str, says: str) -> None:
    folder = run()
    write_report(folder)
    replaced(folder / name, old, new)
    assert says in (difference(folder) or "")


def test_pictures_that_were_changed_are_noticed(run: Run) -> None:
    folder = run()
    write_report(folder, "none")
    file = next((folder / "tensors").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert "does not hold what was written" in (difference(folder) or "")


def test_a_page_made_anew_of_a_changed_summary_is_noticed_by_the_cells(run: Run) -> None:
    folder = run()
    summary = json.loads((folder / "summary.json").read_text())
    summary["defenses"][1]["attacks"][0]["psnr"]["mean"] -= 5
    (folder / "summary.json").write_text(json.dumps(summary))
    write_report(folder)
    assert difference(folder) == "the summary's row of ig under prune:ratio=0.9 is not what its cell holds"
    (folder / "cells" / "cell-00-00.json").unlink()
    write_report(folder)
    assert "rests on a cell that is not stored" in (difference(folder) or "")


def test_names_are_part_of_the_page_and_not_of_the_evidence(run: Run) -> None:
    folder = run()
    write_report(folder)
    before = evidence_hash(RunFolder(folder))
    About(auditor="A. Lee").store(folder)
    assert evidence_hash(RunFolder(folder)) == before
    assert "was edited" in (difference(folder) or "")
    write_report(folder)
    assert difference(folder) is None
