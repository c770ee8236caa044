"""What a build server reads: JUnit XML and GitHub's annotations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from gradveil.auditing.condition import CheckedCondition
from gradveil.core.errors import UserError
from gradveil.report.pipeline import github_annotations, write_junit
from gradveil.summary import Summary

Parsed = Callable[[dict[str, Any]], Summary]
CONDITION = 'worst.ssim.max > 0.6 and spec != "none"'


def test_a_suite_a_defense_and_failures_where_conditions_hold(parsed: Parsed, summary: dict[str, Any], tmp_path: Path) -> None:
    checked = [CheckedCondition(CONDITION, ("prune:ratio=0.9",)), CheckedCondition("worst.asr > 2")]
    file = write_junit(parsed(summary), checked, tmp_path / "deep" / "junit.xml")
    root = ET.parse(file).getroot()
    suites = {s.get("name"): s for s in root.iter("testsuite")}
    assert list(suites) == ["none", "prune:ratio=0.9", "precode"]
    assert {name: s.get("failures") for name, s in suites.items()} == {"none": "0", "prune:ratio=0.9": "1", "precode": "0"}
    assert root.get("tests") == "18" and root.get("failures") == "1"  # 3 × (verdict + 2 conditions + 3 attacks)
    assert root.get("errors") == "0"
    (failing,) = [c for c in suites["prune:ratio=0.9"].iter("testcase") if c.find("failure") is not None]
    failure = failing.find("failure")
    assert failing.get("name") == f"not: {CONDITION}" and failure is not None
    assert failure.get("message") == f"{CONDITION} holds for prune:ratio=0.9"
    verdicts = {p.get("value") for p in suites["precode"].iter("property") if p.get("name") == "verdict"}
    assert verdicts == {"no leak shown"}


def test_a_leak_without_a_condition_is_told_but_does_not_fail(parsed: Parsed, summary: dict[str, Any], tmp_path: Path) -> None:
    root = ET.parse(write_junit(parsed(summary), [], tmp_path / "junit.xml")).getroot()
    assert root.get("failures") == "0"
    assert {p.get("value") for p in root.iter("property") if p.get("name") == "verdict"} >= {"leaks"}


def test_attacks_that_broke_are_errors_and_those_that_do_not_apply_are_skipped(
    parsed: Parsed, summary: dict[str, Any], tmp_path: Path
) -> None:
    rows = summary["defenses"][1]["attacks"]
    rows[0].update(status="failed", error="ValueError: 1 < 2 & \x00\x1b[31m \ud800 ]]>")
    rows[1].update(status="not applicable", error="needs a <linear> layer")
    summary["defenses"][1]["spec"] = 'a"b<c>&\x07'
    root = ET.parse(write_junit(parsed(summary), [CheckedCondition("spec == 'x'")], tmp_path / "junit.xml")).getroot()
    assert (root.get("errors"), root.get("skipped")) == ("1", "1")
    (error,), (skipped,) = root.iter("error"), root.iter("skipped")
    assert error.get("message", "").startswith("ValueError: 1 < 2 & \ufffd\ufffd[31m")
    assert skipped.get("message") == "needs a <linear> layer"
    assert 'a"b<c>&\ufffd' in {s.get("name") for s in root.iter("testsuite")}


def test_what_the_audit_cannot_tell_is_an_error_and_never_passes(
    parsed: Parsed, summary: dict[str, Any], tmp_path: Path
) -> None:
    summary["defenses"][2] |= {
        "verdict": "cannot tell",
        "doubts": ["no-attack-ran"],
        "worst": None,
        "test": None,
        "attacks": [],
    }
    checked = [CheckedCondition(CONDITION, missing={"precode": ("worst.ssim.max",)})]
    root = ET.parse(write_junit(parsed(summary), checked, tmp_path / "junit.xml")).getroot()
    errors = {(c.get("classname"), c.get("name")): e for c in root.iter("testcase") if (e := c.find("error")) is not None}
    assert list(errors) == [("gradveil.precode", "verdict"), ("gradveil.precode", f"not: {CONDITION}")]
    verdict, condition = (error.get("message", "") for error in errors.values())
    assert verdict.startswith("This audit cannot tell") and "no attack ran" in verdict
    assert condition == "worst.ssim.max was not measured"
    lines = list(github_annotations(parsed(summary), checked))
    assert "::warning title=Gradveil::the audit cannot tell whether updates leak under precode" in lines
    assert any(f"whether {CONDITION} holds for precode: worst.ssim.max was not measured" in line for line in lines)


def test_a_folder_is_no_file(parsed: Parsed, summary: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        write_junit(parsed(summary), [], tmp_path)


def test_a_file_of_the_user_stays(parsed: Parsed, summary: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    for text in ('<testsuites name="pytest"/>', "notes"):
        file.write_text(text)
        with pytest.raises(UserError, match="junit.xml is there already, and gradveil did not write it"):
            write_junit(parsed(summary), [], file)
        assert file.read_text() == text
    file.write_text("")
    for _ in range(2):  # an empty file holds nothing, and our own is replaced
        assert ET.parse(write_junit(parsed(summary), [], file)).getroot().get("name") == "gradveil"


def test_annotations_are_one_escaped_line_each(parsed: Parsed, summary: dict[str, Any]) -> None:
    summary["warnings"] = [{"code": "no-classes", "text": "100% sure?\n::error::forged"}]
    summary["defenses"][2]["verdict"] = "leaks"
    lines = list(github_annotations(parsed(summary), [CheckedCondition("worst.asr > 0.5", ("prune:ratio=0.9",))]))
    assert lines[0].startswith("::error title=prune%3Aratio=0.9%3A worst.asr > 0.5::Updates leak")
    assert "%25" in lines[0] and lines[1].startswith("::warning title=precode leaks::")
    assert not any(line.startswith("::warning title=none") for line in lines), "the control is meant to leak"
    assert "::warning title=Gradveil::100%25 sure?%0A::error::forged" in lines
    assert not any("\n" in line or "\r" in line for line in lines)


def test_a_name_cannot_end_the_title(parsed: Parsed, summary: dict[str, Any]) -> None:
    summary["defenses"][1]["spec"] = "a,file=x::b%0A\nc"
    (line,) = github_annotations(parsed(summary), [CheckedCondition("worst.asr > 0", ("a,file=x::b%0A\nc",))])
    assert line.startswith("::error title=a%2Cfile=x%3A%3Ab%250A%0Ac%3A worst.asr > 0::")
