"""Two runs compared: which differences are called clear, which noise, and which runs are not compared at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parsed_page import edit
from scipy import stats

import gradveil as gv
from gradveil.api import compare
from gradveil.core.errors import UserError
from gradveil.report.comparison import Change, DefenseChange
from gradveil.report.intervals import paired_shares, two_shares

LEAKY = {"none": 1.0, "precode": 0.9}
TIGHT = {"none": 1.0, "precode": 0.0}


def named(defenses: list[DefenseChange], spec: str) -> DefenseChange:
    return next(d for d in defenses if d.spec == spec)


def readings(defense: DefenseChange) -> dict[str, str]:
    return {c.metric: c.reading for c in defense.rows[0].changes}


def test_a_run_and_itself_are_the_same(run: Callable[..., Path]) -> None:
    folder = run(victims=6)
    found = compare(folder, folder)
    assert found.paired and found.headline.startswith("No verdict changed")
    assert {c.reading for d in found.defenses for row in d.rows[:-1] for c in row.changes} == {"the same"}
    assert {c.difference for d in found.defenses for c in d.rows[-1].changes} == {0.0}, "cosine and accuracy"


def test_a_defense_that_got_better_is_told_with_its_numbers(run: Callable[..., Path]) -> None:
    a, b = run(leak=LEAKY, victims=8), run(leak=TIGHT, victims=8)
    found = compare(a, b)
    changed = named(found.defenses, "precode")
    assert found.paired and changed.verdict == "leaks → no leak shown"
    assert readings(changed) == {"psnr": "leaks less", "ssim": "leaks less", "identified": "leaks less"}
    assert set(readings(named(found.defenses, "none")).values()) <= {"the same", "within noise"}
    cells = [json.loads(next((f / "cells").glob("cell-01-00.json")).read_text()) for f in (a, b)]
    psnr = [[v["psnr"] for v in cell["victims"]] for cell in cells]
    change = next(c for c in changed.rows[1].changes if c.metric == "psnr")
    wanted = stats.ttest_rel(psnr[1], psnr[0]).confidence_interval(0.95)
    assert change.before == pytest.approx(np.mean(psnr[0])) and change.after == pytest.approx(np.mean(psnr[1]))
    assert (change.low, change.high) == pytest.approx((wanted.low, wanted.high))
    assert "precode" in found.headline
    assert named(compare(b, a).defenses, "precode").rows[0].changes[0].reading == "leaks more"


def test_other_victims_are_two_groups(run: Callable[..., Path]) -> None:
    a, b = run(victims=8, leak=LEAKY), run(victims=5, leak=TIGHT, case={"seed": 1})
    found = compare(a, b)
    assert not found.paired and found.victims == (8, 5)
    assert any("seed" in note for note in found.notes) and any("victims" in note for note in found.notes)
    cells = [json.loads((f / "cells" / "cell-01-00.json").read_text()) for f in (a, b)]
    psnr = [[v["psnr"] for v in cell["victims"]] for cell in cells]
    wanted = stats.ttest_ind(psnr[1], psnr[0], equal_var=False).confidence_interval(0.95)
    change = named(found.defenses, "precode").rows[1].changes[0]
    assert (change.low, change.high) == pytest.approx((wanted.low, wanted.high))


def test_more_victims_in_one_run_are_paired_by_the_first(run: Callable[..., Path]) -> None:
    found = compare(run(victims=6), run(victims=4))
    assert found.paired and found.defenses[0].rows[1].changes[0].victims == 4


def test_images_of_a_batch_count_as_one(run: Callable[..., Path]) -> None:
    found = compare(run(victims=3, batch=4, leak=LEAKY), run(victims=3, batch=4, leak=TIGHT))
    assert {c.victims for c in named(found.defenses, "precode").rows[1].changes} == {3}


def test_one_victim_is_too_few(run: Callable[..., Path]) -> None:
    found = compare(run(victims=1, leak=LEAKY), run(victims=1, leak=TIGHT))
    assert set(readings(named(found.defenses, "precode")).values()) == {"too few victims to tell"}


def test_other_cases_are_refused_by_name_unless_allowed(run: Callable[..., Path]) -> None:
    a, b = run(), run(case={"knowledge": "paper", "batch_size": 4})
    with pytest.raises(UserError, match="batch_size .* knowledge .realistic and paper") as error:
        compare(a, b)
    assert "--across knowledge" in str(error.value)
    with pytest.raises(UserError, match="knowledge") as error:
        compare(a, b, across=["batch_size"])
    assert "batch_size (" not in str(error.value)
    found = compare(a, b, across=["batch_size", "knowledge"])
    assert not found.paired and len(found.notes) == 2
    with pytest.raises(UserError, match="no term"):
        compare(a, b, across=["colour"])


def test_reports_are_compared_as_their_folders_are(run: Callable[..., Path]) -> None:
    a, b = run(leak=LEAKY), run(leak=TIGHT)
    assert gv.compare(gv.Report.load(a), gv.Report.load(b)) == gv.compare(a, str(b))
    with pytest.raises(UserError, match="no folder"):
        gv.compare(gv.Report(gv.Report.load(a).summary), b)


def test_other_content_under_the_same_name_is_refused(run: Callable[..., Path]) -> None:
    a, b = run(), run()
    for folder, digest in ((a, "1" * 64), (b, "2" * 64)):
        file = folder / "environment.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "data_sha256": digest}))
    with pytest.raises(UserError, match="data's content"):
        compare(a, b)


def test_what_is_in_one_run_only_is_said(run: Callable[..., Path]) -> None:
    a = run(leak={"none": 1.0, "clip": 0.5}, strength={"ig": 1.0, "dlg": 0.4})
    b = run(leak={"none": 1.0, "prune": 0.5}, strength={"ig": 1.0})
    found = compare(a, b)
    assert [d.spec for d in found.defenses] == ["none"]
    assert [r.attack for r in found.defenses[0].rows] == ["worst of all", "ig", "no attack"]
    assert any("clip" in n for n in found.notes) and any("prune" in n for n in found.notes)
    assert "dlg" in found.defenses[0].notes[0]


def test_two_settings_of_one_run_are_paired(run: Callable[..., Path]) -> None:
    folder = run(leak={"none": 1.0, "prune:ratio=0.7": 0.9, "prune:ratio=0.99": 0.0}, victims=8)
    found = compare(folder, defenses=["prune:ratio=0.7", "prune:ratio=0.990"])
    (change,) = found.defenses
    assert change.specs == ("prune:ratio=0.7", "prune:ratio=0.99") and found.paired and not found.notes
    assert change.verdicts == ("leaks", "no leak shown") and change.spec == "prune:ratio=0.7 → prune:ratio=0.99"
    assert readings(change) == {"psnr": "leaks less", "ssim": "leaks less", "identified": "leaks less"}
    assert found.headline.startswith("The verdict changed from “leaks” to “no leak shown”; what the worst attack got changed")
    assert "two defenses" in found.title
    cells = [json.loads((folder / "cells" / f"cell-0{d}-00.json").read_text()) for d in (1, 2)]
    psnr = [[v["psnr"] for v in cell["victims"]] for cell in cells]
    wanted = stats.ttest_rel(psnr[1], psnr[0]).confidence_interval(0.95)
    assert (change.rows[1].changes[0].low, change.rows[1].changes[0].high) == pytest.approx((wanted.low, wanted.high))
    beside = {c.metric: c.texts[:2] for c in change.rows[-1].changes}
    assert beside == {"cosine": ("0.90", "0.80"), "accuracy": ("89.0%", "85.0%")}


def test_two_settings_of_two_runs(run: Callable[..., Path]) -> None:
    a, b = run(leak={"none": 1.0, "prune:ratio=0.7": 0.9}), run(leak={"none": 1.0, "prune:ratio=0.99": 0.0})
    found = compare(a, b, ["prune:ratio=0.7", "prune:ratio=0.99"])
    assert found.paired and found.defenses[0].specs == ("prune:ratio=0.7", "prune:ratio=0.99") and not found.notes
    assert [d.spec for d in compare(a, b, "none").defenses] == ["none"]
    with pytest.raises(UserError, match="run-1 has no defense prune:ratio=0.7; it has none and prune:ratio=0.99"):
        compare(a, b, "prune:ratio=0.7")
    for defenses in ([], ["none"], ["none"] * 3):
        with pytest.raises(UserError, match="one run and two defenses: .* it has none and prune:ratio=0.7"):
            compare(a, None, defenses)


def test_a_line_up_is_compared_victim_by_victim(run: Callable[..., Path]) -> None:
    folders = [run(victims=8), run(victims=8)]
    for folder, ranks in zip(folders, ([1] * 8, [1, 7, 3, 9, 4, 8, 2, 5]), strict=True):
        share = ranks.count(1) / 8
        risk = {"m": 10, "ranks": ranks, "identified": {"rate": share, "low": 0.0, "high": 1.0, "chance": 0.1}}
        edit(folder, lambda summary, risk=risk: summary["defenses"][1].update(line_up=risk))
    change = compare(*folders).defenses[1].rows[-1].changes[0]
    assert (change.metric, change.before, change.after, change.victims) == ("line_up", 1.0, 0.125, 8)
    assert (change.low, change.high) == pytest.approx(paired_shares(np.array([0.0] + [-1.0] * 7)))
    assert change.reading == "picked less often" and change.clear
    edit(folders[1], lambda summary: summary["defenses"][1]["line_up"].update(m=200))
    assert "10 and 200 candidates" in compare(*folders).defenses[1].notes[0]


def test_two_versions_are_paired_and_named(run: Callable[..., Path]) -> None:
    a, b = run(), run(extra={"gradveil": "0.3.0"})
    file = b / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "packages": {"torch": "2.14.0"}}))
    found = compare(a, b)
    assert found.paired
    assert found.notes == [
        "The runs differ in their gradveil: 0.2.0 and 0.3.0.",
        "The runs differ in their torch: 2.13.0 and 2.14.0.",
    ]


def test_victims_that_one_run_skipped_are_not_paired(run: Callable[..., Path]) -> None:
    found = compare(run(), run(case={"skip_victims": 4}), across=["skip_victims"])
    assert not found.paired and "skip_victims: None and 4" in found.notes[0]


def test_frame_page_and_notebook_show_the_same(run: Callable[..., Path], tmp_path: Path) -> None:
    found = compare(run(leak=LEAKY), run(leak=TIGHT))
    frame = found.to_frame()
    changes = [c for d in found.defenses for row in d.rows for c in row.changes]
    assert list(frame["change"].dropna()) == [c.difference for c in changes] and list(frame["reading"]) == [
        c.reading for c in changes
    ]
    assert set(frame["attack"]) == {"worst of all", "ig", "dlg", "precode-ignore", "no attack"}
    rows = [
        re.findall(r"<tr class=.*?</tr>", text)
        for text in (found.save(tmp_path / "page.html").read_text(), found._repr_html_())
    ]
    assert rows[0] == rows[1] and len(rows[0]) == len(frame) == len(changes)
    for text, change in zip(rows[0], changes, strict=True):
        assert all(part in text for part in change.texts) and change.reading in text
    assert found.headline in found._repr_html_() and found.headline in repr(found)


def test_the_page_is_text_and_fetches_nothing(run: Callable[..., Path], tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    a, b = run(leak={"none": 1.0, hostile: 0.9}), run(leak={"none": 1.0, hostile: 0.0})
    page = compare(a, b).save(tmp_path / "deep" / "page.html").read_text()
    assert "<img" not in page and "&lt;img" in page and "leaks less" in page
    assert "http:" not in page and "https:" not in page and "<script" not in page
    assert compare(b, a).save(tmp_path / "deep" / "page.html").read_text() != page, "our own page is replaced"
    with pytest.raises(UserError, match="is a folder"):
        compare(a, b).save(tmp_path)
    (tmp_path / "index.html").write_text("<!doctype html>of the user")
    with pytest.raises(UserError, match="index.html is there already, and gradveil did not write it"):
        compare(a, b).save(tmp_path / "index.html")
    assert (tmp_path / "index.html").read_text() == "<!doctype html>of the user"


@pytest.mark.parametrize("n", [8, 30])
def test_intervals_of_shares_hold_what_they_promise(n: int) -> None:
    """They cover the truth about 95 times in a hundred, also for few victims and shares near one."""
    rng = np.random.default_rng(0)
    for p, q in ((0.5, 0.5), (0.9, 0.4), (0.95, 0.95)):
        paired = two = 0
        for _ in range(600):
            a, b = (rng.random(n) < p).astype(float), (rng.random(n) < q).astype(float)
            low, high = two_shares(a, b)
            two += low <= q - p <= high
            low, high = paired_shares(b - a)
            paired += low <= q - p <= high
        assert paired >= 0.92 * 600 and two >= 0.92 * 600


@pytest.mark.parametrize(
    ("change", "reading"),
    [
        (Change("psnr", 10.0, 12.0, 0.5, 3.5, 8), "leaks more"),
        (Change("psnr", 10.0, 9.0, -2.5, 0.5, 8), "within noise"),
        (Change("ssim", None, 0.2), "not measured in both"),
        (Change("accuracy", 0.9, 0.8), "no interval"),
    ],
)
def test_readings(change: Change, reading: str) -> None:
    assert change.reading == reading


def test_differences_carry_their_sign() -> None:
    texts: dict[str, Any] = {"psnr": Change("psnr", 10, 12.04, 0.5, 3.5, 8).texts}
    assert texts["psnr"] == ("10.0", "12.0", "+2.0 (+0.5 to +3.5)")
    assert Change("identified", 1.0, 0.5, -0.8, 0.0, 8).texts == ("100.0%", "50.0%", "−50.0 (−80.0 to 0.0)")
