"""The table in the terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from advised import advised
from rich.console import Console

from gradveil.report import print_summary, table
from gradveil.summary import Summary


def shown(summary: dict[str, Any], width: int = 120, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    print_summary(Summary.model_validate(advised(summary), strict=False), console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_every_defense_with_its_verdict_numbers_and_the_baseline(run: Callable[..., Path]) -> None:
    lines = shown(json.loads((run(victims=16) / "summary.json").read_text())).splitlines()
    none = next(line for line in lines if line.startswith("none"))
    assert none.split()[1:3] == ["leaks", "ig"]
    assert "100% (79–100%)" in none and "93.0%" in none
    precode = next(line for line in lines if line.startswith("precode"))
    assert "no leak shown" in precode and "8.6" in precode
    assert any(line.startswith("baseline") and "9.5" in line for line in lines)
    assert any(line.startswith("Recommended: precode: no leak was shown under it") for line in lines)
    assert "Not recommended: prune:ratio=0.9 – it leaks." in lines
    assert any(line.startswith("Test of precode: p = 0.600 against 160 strangers") for line in lines)
    assert "15 for 10% and more than the data has for 50%" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [50, 60, 80, 120, 200])
def test_it_fits_the_width_and_never_loses_the_verdict(summary: dict[str, Any], width: int) -> None:
    summary["defenses"][1]["spec"] = "prune:ratio=0.9,scope=global+gaussian:std=0.001+" * 3
    text = shown(summary, width)
    commands = [line for line in text.splitlines() if line.startswith("  gradveil ")]  # each on one line, to be copied
    assert commands and max(len(line) for line in text.splitlines() if line not in commands) <= width
    assert text.count("leaks") >= 2


def test_a_reason_that_an_attack_does_not_apply_is_told_once_below_the_table(summary: dict[str, Any]) -> None:
    reason = "attack 'rgap' does not apply: it needs a straight line of convolutions."
    for defense in summary["defenses"]:
        row = {**defense["attacks"][0], "spec": "rgap", "status": "not applicable", "error": reason}
        defense["attacks"] = [*defense["attacks"], row]
    lines = shown(summary).splitlines()
    (told,) = [number for number, line in enumerate(lines) if "does not apply" in line]
    assert lines[told] == f"Not applicable: {reason}"
    assert told > next(number for number, line in enumerate(lines) if line.startswith("baseline"))


def test_names_stay_whole_in_80_columns(summary: dict[str, Any]) -> None:
    summary["defenses"][1]["spec"] = "graddefense:std=0.01,slices=10"
    text = shown(summary, 80)
    assert all(part in text.partition("Warning")[0] for part in ("graddefense:", "std=0.01,", "slices=10"))


def test_colours_only_where_they_are_wanted(summary: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31m" in shown(summary, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in shown(summary, force_terminal=True, color_system="standard")


def test_names_are_neither_markup_nor_commands_to_the_terminal(summary: dict[str, Any]) -> None:
    summary["defenses"][1]["spec"] = "[red]a[/]\x1b[2J"
    summary["warnings"] = [{"code": "no-classes", "text": "[link=x]b[/link]\x1b]0;c\x07"}]
    text = shown(summary, 200)
    assert "[red]a[/]" in text and "[link=x]b[/link]" in text and "\x1b" not in text and "\x07" not in text


def test_columns_follow_what_was_measured(parsed: Callable[[dict[str, Any]], Summary], summary: dict[str, Any]) -> None:
    assert "PDM" in [c.header for c in table(parsed(summary)).columns]
    for defense in summary["defenses"]:
        defense["utility"] = None
    headers = [c.header for c in table(parsed(summary)).columns]
    assert "PDM" not in headers and "cosine" in headers
    assert "0.80" in shown(summary)


def test_all_leaking_is_said_once(summary: dict[str, Any]) -> None:
    for defense in summary["defenses"]:
        defense["verdict"] = "leaks"
    assert shown(summary).count("Both audited defenses leak") == 1


def test_what_was_not_measured_is_printed_too(summary: dict[str, Any]) -> None:
    for defense in summary["defenses"]:
        defense |= {"verdict": "cannot tell", "test": None, "attacks": [], "worst": None, "utility": None, "gradient": None}
    summary["baseline"] = None
    text = shown(summary)
    assert text.count("cannot tell") == 3 + 2, "in the table, and why the two are not recommended"
    assert "No audited defense can be recommended." in text and "Next: No attack ran without a defense" in text
