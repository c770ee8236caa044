"""`gradveil tune` from the command line: what it prints, what it leaves, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradveil.auditing.tuning.results import TuneSummary

SMALL = ("--model", "smlp", "--attack", "linear", "--victims", "4", "--strengths", "2", "--no-utility", "--workers", "0")


def test_a_search_without_counters_finds_a_strength_and_recommends_nothing(gradveil, archive: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "run"
    code, text, errors = gradveil("tune", "--data", archive, "--defense", "gaussian:relative=0.1", *SMALL, "--out", str(out))
    assert code == 0 and "search: gaussian:relative=0.1" in errors
    lines = [line for line in text.splitlines() if not line.startswith(("  gradveil ", "Page: "))]
    assert max(map(len, lines)) <= 80
    assert f"Page: {out / 'tune.html'}" in text and "Protection:" not in text and not (out / "protection.json").exists()
    summary = TuneSummary.read(out)
    assert summary.recommended is None and summary.text.split(".")[0] in " ".join(text.split())
    assert [s.spec for s in summary.settings if s.standing == "leaks"] and all(s.loss is None for s in summary.settings)
    assert "gradveil tune --data" in text, "what to do next"
    code, text, _ = gradveil(
        "tune", "--data", archive, "--defense", "gaussian:relative=0.1", *SMALL, "--out", str(out), "--plan"
    )
    assert code == 0 and text.startswith("At most 2 strengths of each of 1 defense.") and "for the search" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--defense", "clip"), "'clip' has no strength to search"),
        (("--risk", "2"), "risk"),
        (("--victims", "30"), "and as many of the 30 before them"),
        (("--strengths", "1"), "strengths"),
    ],
)
def test_bad_input_is_told_in_one_line(gradveil, archive: str, tmp_path: Path, words: tuple[str, ...], says: str) -> None:  # type: ignore[no-untyped-def]
    code, _, errors = gradveil("tune", "--data", archive, "--out", str(tmp_path / "run"), *words)
    assert code == 2 and says in errors and errors.count("\n") == 1 and not (tmp_path / "run").exists()


def test_the_next_command_names_a_defense_once_although_two_strengths_hold(gradveil, archive: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    settings = ("--data", archive, *SMALL, "--line-up", "0", "--out", str(tmp_path / "run"))
    code, _, _ = gradveil("tune", "--defense", "gaussian:relative=1000.0", *settings)
    summary = TuneSummary.read(tmp_path / "run")
    assert code == 0 and sum(s.standing == "holds" for s in summary.settings) == 2
    (step,) = summary.next_steps
    assert step.command is not None and step.command.count("--defense") == 1
    code, text, _ = gradveil(*step.command.split()[1:], "--plan")
    assert code == 0 and "of 1 defense" in text


def test_where_no_defense_can_promise_a_risk_one_is_named_that_can(gradveil, archive: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    settings = ("--data", archive, *SMALL, "--line-up", "0", "--out", str(tmp_path / "run"))
    code, text, _ = gradveil("tune", "--defense", "prune", "--risk", "0.05", *settings)
    assert code == 0 and "No setting was tried; the text of each defense says why." in " ".join(text.split())
    (step,) = TuneSummary.read(tmp_path / "run").next_steps
    assert step.command is not None and "--defense dpsgd" in step.command and "--risk 0.05" in step.command
