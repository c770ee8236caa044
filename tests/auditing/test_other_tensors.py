"""All that is sent reaches the attacks: tensors that are no parameters, too; and what is said where parameters are missing."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from rich.console import Console

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.report import Report
from gradveil.report.terminal import print_summary
from gradveil.summary import DefenseRow, Summary


def audit(data: str, folder: Path, defense: str, *attacks: str) -> tuple[Summary, DefenseRow, str]:
    values = {"data": data, "model": "smlp", "defenses": f"audit_methods:{defense}", "attacks": attacks, "victims": 4}
    case = Case(make_spec(values))
    report = Report.written(*run_audit(case, Execution(out=folder, workers=0)), case.spec.picture_mode)
    return report.summary, report.summary.defenses[1], (folder / "report.html").read_text(encoding="utf-8")


def test_a_claimed_counter_takes_part_reads_the_image_and_is_shown_as_claimed(digits, tmp_path, capsys):
    summary, row, page = audit(digits, tmp_path / "run", "OtherTensors", "linear", "audit_methods:ReadsOthers")
    assert summary.control.verdict == "leaks" and row.counter == ()
    assert row.claimed == ("linear", "audit_methods:ReadsOthers")
    by_name = {a.spec: a for a in row.attacks if a.against == "original"}
    assert [a.spec for a in row.attacks if a.claimed] == ["linear", "audit_methods:ReadsOthers"]
    assert not any(a.adaptive for a in row.attacks)
    assert all(a.status != "failed" for a in row.attacks), [a.error for a in row.attacks]
    assert row.verdict == "leaks" and row.best.spec == "audit_methods:ReadsOthers"
    assert by_name["audit_methods:ReadsOthers"].ssim.min > 0.999
    assert by_name["linear"].identified.rate < 0.5  # the noise hides the image from all that read parameters
    notices = {w.code: w.text for w in row.warnings}
    assert "audit_methods:ReadsOthers" in notices["claimed-counter"]
    assert "audit_methods:Nothing" in notices["unknown-counter"]
    assert "claimed counter" in page and "#claimed-counter" in page
    assert "no counter; claimed: linear and audit_methods:ReadsOthers" in re.sub(r"\s+", " ", html.unescape(page))
    print_summary(summary, Console(width=200))
    assert "which does not suffice: linear, audit_methods:ReadsOthers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("defense", "says"),
    [
        ("Incomplete", "the update has no tensor for the parameter"),
        ("DoubleComplex", "complex128"),
        ("OddTensor", "F8_E8M0"),
        ("LongName", "cannot be stored: a name of 2,011 characters"),
        ("ManyAxes", "cannot be stored"),
        ("Sparse", "'more', which is no dense tensor"),
        ("Numbered", "whose name is 1, not text"),
    ],
)
def test_an_update_that_cannot_be_read_or_stored_fails_in_one_line(digits, tmp_path, defense, says):
    _, row, _ = audit(digits, tmp_path / "run", defense, "linear")
    (attack,) = row.attacks
    assert attack.status == "failed" and says in attack.error
    assert row.verdict == "cannot tell"
