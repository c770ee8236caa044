"""Measures: taken piece by piece, so that a run that was stopped goes on; planned with all their work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradveil.audit.progress import Lines
from gradveil.audit.run import Stopped
from gradveil.recipes import measures
from gradveil.recipes.plan import make_plan
from gradveil.recipes.recipe import load
from gradveil.recipes.run import run_recipe

RECIPE = """
title: The likeness of gradients under two policies
measures:
  curve: {kind: gradient_similarity, policies: {none: none, searched: 3-1-7}, points: 2, data: mnist-5k,
          model: lenet, images: 2, epochs: 1, share: 0.01, seed: 100}
cell: {measure: curve, value: "{policy} area"}
rows: {none: {policy: none}, searched: {policy: searched}}
columns: {area: {}}
source: nothing.
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(RECIPE)
    return file


def test_a_stopped_measure_goes_on_with_its_next_piece(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_recipe(load(str(recipe)), "cpu", tmp_path / "whole")["rows"]
    real, asked = measures.Scorer.similarity, []

    def stopped(scorer: measures.Scorer, policy: Any) -> Any:
        asked.append(policy)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(scorer, policy)

    monkeypatch.setattr(measures.Scorer, "similarity", stopped)
    with pytest.raises(Stopped, match="1 of 2 cells are done"):
        run_recipe(load(str(recipe)), "cpu", tmp_path / "out")
    (part,) = (tmp_path / "out" / "measures").iterdir()
    assert list(json.loads(part.read_text())["pieces"]) == ["none"]

    shown = Console(width=200)
    again = run_recipe(load(str(recipe)), "cpu", tmp_path / "out", display=lambda: Lines(shown))
    assert asked == [(), (3, 1, 7), (3, 1, 7)]
    assert again["rows"] == whole
    assert not list((tmp_path / "out" / "measures").glob("*.part.json"))
    said = capsys.readouterr().out
    assert "1 of 2 cells are done already" in said and "[2/2] searched: done" in said


def test_a_plan_counts_the_training_the_scores_and_the_attacks_of_a_measure() -> None:
    lines = {line.what: line for line in make_plan(load("ats/figure2").at("paper"), timed=False)}
    counts = [line.iterations for line in lines.values()]
    learnt = 50 * round(0.1 * 0.6 * 50_000)  # epochs, a share of the private part of CIFAR-100
    assert counts == [learnt, 100 * 100 * 21, 100 * 100 * 2500]
    assert all("resnet20-4 on cifar100" in what for what in lines)


def test_a_plan_counts_the_trainings_of_attacked_models() -> None:
    lines = make_plan(load("ats/table2").at("paper"), timed=False)
    (trainings,) = [line for line in lines if "trainings of the attacked model" in line.what]
    assert (trainings.cells, trainings.iterations) == (2, 2 * 200 * 30_000)
