"""The object that `gradveil.audit` returns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradveil.core.errors import UserError
from gradveil.report import Report, write_report
from gradveil.summary import Summary

Parsed = Callable[[dict[str, Any]], Summary]


def test_frame_has_a_row_for_defense_attack_and_truth(run: Callable[..., Path]) -> None:
    folder = run(against=("original", "fed"))
    frame = Report.load(folder).to_frame()
    summary = json.loads((folder / "summary.json").read_text())
    assert len(frame) == 3 * 3 * 2
    assert list(frame.columns[:3]) == ["defense", "attack", "against"]
    row = frame[(frame.defense == "precode") & (frame.attack == "dlg") & (frame.against == "fed")].iloc[0]
    truth = summary["defenses"][2]["attacks"][3]
    assert (truth["spec"], truth["against"]) == ("dlg", "fed")
    assert row.psnr_mean == truth["psnr"]["mean"] and row.identified_high == truth["identified"]["high"]
    assert row.verdict == "no leak shown" and row.utility_pdm == pytest.approx(8.602, abs=1e-3)


def test_frame_keeps_the_columns_of_what_was_not_measured(parsed: Parsed, summary: dict[str, Any]) -> None:
    frame = Report(parsed(summary)).to_frame()
    assert frame.lpips_mean.dtype == np.float64 and frame.lpips_mean.isna().all()


def test_frame_of_failed_rows(parsed: Parsed, summary: dict[str, Any]) -> None:
    row = summary["defenses"][0]["attacks"][0]
    row.update(status="failed", error="not finite", psnr=None, identified=None)
    frame = Report(parsed(summary)).to_frame()
    assert np.isnan(frame.psnr_mean[0]) and np.isnan(frame.identified_rate[0]) and frame.error[0] == "not finite"
    assert np.isfinite(frame.psnr_mean[1])


def test_plot_shows_every_defense_at_its_cost_and_rate(parsed: Parsed, summary: dict[str, Any]) -> None:
    axes = Report(parsed(summary)).plot().axes[0]
    assert {t.get_text() for t in axes.texts} == {"none", "prune:ratio=0.9", "precode"}
    drawn = sorted(
        (float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines if line.get_marker() in "oDs"
    )
    wanted = sorted((d["utility"]["pdm"], d["worst"]["identified"]["rate"]) for d in summary["defenses"])
    assert np.allclose(drawn, wanted)


def test_plot_with_a_dollar_in_a_name_can_be_drawn(parsed: Parsed, summary: dict[str, Any], tmp_path: Path) -> None:
    summary["defenses"][1]["spec"] = "$\\bad{"
    Report(parsed(summary)).plot().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5_000


def test_a_report_of_no_defense(parsed: Parsed, summary: dict[str, Any]) -> None:
    summary["defenses"] = []
    with pytest.raises(UserError, match="nothing to plot"):
        Report(parsed(summary)).plot()
    assert len(Report(parsed(summary)).to_frame()) == 0


def test_save_copies_the_whole_folder_and_load_reads_it_back(run: Callable[..., Path], tmp_path: Path) -> None:
    folder = run()
    write_report(folder, "none")
    target = Report.load(folder).save(tmp_path / "deep" / "copy")
    names = {str(p.relative_to(folder)) for p in folder.rglob("*")}
    assert {str(p.relative_to(target)) for p in target.rglob("*")} == names
    assert Report.load(target).summary == Report.load(folder).summary
    assert [p.name for p in target.parent.iterdir()] == ["copy"], "nothing half-written stays behind"


def test_save_without_a_folder_writes_summary_and_page(parsed: Parsed, summary: dict[str, Any], tmp_path: Path) -> None:
    target = Report(parsed(summary)).save(tmp_path / "out")
    assert {p.name for p in target.iterdir()} == {"summary.json", "report.html"}
    assert Report.load(target).summary == parsed(summary)


def test_a_failing_save_leaves_nothing_behind(
    parsed: Parsed, summary: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("gradveil.report.audit_report.write_report", fail)
    with pytest.raises(OSError, match="disk full"):
        Report(parsed(summary)).save(tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_save_leaves_other_folders_alone(tmp_path: Path, run: Callable[..., Path]) -> None:
    mine = tmp_path / f".copy.{os.getpid()}.part" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    Report.load(run()).save(tmp_path / "copy")
    assert mine.read_text() == "mine" and {p.name for p in tmp_path.iterdir()} >= {"copy", mine.parent.name}


def test_save_follows_no_link_and_copies_none(tmp_path: Path, run: Callable[..., Path]) -> None:
    folder, empty = run(), tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "link").symlink_to(empty)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (folder / "tensors" / "link").symlink_to(tmp_path)
    (folder / "secret").symlink_to(__file__)
    os.mkfifo(folder / "pipe")
    for name in ("link", "nowhere"):
        with pytest.raises(UserError, match="is already there"):
            Report.load(folder).save(tmp_path / name)
    assert not list(empty.iterdir()) and not (tmp_path / "missing").exists()
    copy = Report.load(folder).save(tmp_path / "copy")
    assert not {"secret", "pipe", "link"} & {path.name for path in copy.rglob("*")}
    assert sorted(os.listdir(copy / "cells")) == sorted(os.listdir(folder / "cells"))


def test_save_does_not_mix_two_runs(run: Callable[..., Path]) -> None:
    first, second = run(), run()
    with pytest.raises(UserError, match="not an empty folder"):
        Report.load(first).save(second)
    assert Report.load(first).save(first) == first


def test_load_of_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no summary\.json"):
        Report.load(tmp_path)


def test_notebook_shows_an_escaped_table(parsed: Parsed, summary: dict[str, Any]) -> None:
    summary["defenses"][1]["spec"] = "<img src=x onerror=alert(1)>"
    text = Report(parsed(summary))._repr_html_()
    assert "<img" not in text and "&lt;img" in text and "no leak shown" in text
    assert "2 audited defenses" in repr(Report(parsed(summary)))
