"""Measurements: taken piece by piece, so that a run that was stopped goes on; planned with all their work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from gradveil.auditing.progress import LogLines
from gradveil.auditing.run import Stopped
from gradveil.core.types import Batch
from gradveil.data import load as load_data
from gradveil.recipes import measures, plan
from gradveil.recipes.plan import make_plan
from gradveil.recipes.recipe import load
from gradveil.recipes.run import run_recipe
from gradveil.recipes.searches import PolicySearch

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


def test_a_stopped_measure_goes_on_with_its_next_piece(
    written: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load(written(RECIPE))
    whole = run_recipe(recipe, "cpu", tmp_path / "whole").rows
    real, asked = measures.Scorer.similarity, []

    def stopped(scorer: measures.Scorer, policy: Any) -> Any:
        asked.append(policy)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(scorer, policy)

    monkeypatch.setattr(measures.Scorer, "similarity", stopped)
    with pytest.raises(Stopped, match="1 of 2 cells are done"):
        run_recipe(recipe, "cpu", tmp_path / "out")
    (part,) = (tmp_path / "out" / "measures").iterdir()
    assert list(json.loads(part.read_text())["pieces"]) == ["none"]

    shown = Console(width=200)
    again = run_recipe(recipe, "cpu", tmp_path / "out", display=lambda: LogLines(shown))
    assert asked == [(), (3, 1, 7), (3, 1, 7)]
    assert again.rows == whole
    assert not list((tmp_path / "out" / "measures").glob("*.part.json"))
    said = capsys.readouterr().out
    assert "1 of 2 cells are done already" in said and "[2/2] searched: done" in said


def test_a_plan_counts_the_training_the_scores_and_the_attacks_of_a_measure() -> None:
    lines = {line.text: line for line in make_plan(load("ats/figure2").at("paper"), timed=False)}
    counts = [line.iterations for line in lines.values()]
    learnt = 50 * round(0.1 * 50_000)  # epochs, a share of all training images of CIFAR-100
    assert counts == 3 * [learnt, 100 * 100 * 21, 100 * 100 * 2500]  # three trainings
    assert all("resnet20-4 on cifar100:private=50000" in text for text in lines)


def test_a_plan_counts_the_trainings_of_attacked_models() -> None:
    lines = make_plan(load("ats/table2").at("paper"), timed=False)
    (trainings,) = [line for line in lines if "trainings of the attacked model" in line.text]
    assert trainings.iterations == trainings.cells * 200 * 50_000


def test_a_plan_counts_seeds_mini_batches_and_crafting() -> None:
    lines = {line.text: line.iterations for line in make_plan(load("dcs2/figure3").at("paper"), timed=False)}
    (trained,) = [count for text, count in lines.items() if "trainings of lenet" in text]
    (crafted,) = [count for text, count in lines.items() if "crafting" in text]
    rounds = 5 * 200 * 200  # seeds, rounds, images of a client
    assert (trained, crafted) == (rounds * 10 * (5 + 1), rounds * 1000)  # five rows, and once without the client
    (steps,) = [
        line.iterations
        for line in make_plan(load("precode/supplement").at("paper"), timed=False)
        if "trainings of dmlp" in line.text
    ]
    assert steps % (3 * 234_600 * 64) == 0  # seeds, steps of FedSGD, images of a mini-batch


def test_a_plan_takes_data_of_ones_own_and_an_attack_that_does_not_say_its_steps(
    written: Callable[[str], str], tmp_path: Path
) -> None:
    images = np.random.default_rng(0).random((30, 12, 12), np.float32)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(30) % 3)
    text = RECIPE.replace("gradient_similarity", "score_correlation").replace("mnist-5k", str(tmp_path / "own.npz"))
    text = text.replace("{none: none, searched: 3-1-7}, points: 2", "2, attack: 'ig:paper=ats', victims: 3")
    lines = make_plan(load(written(text)).at("cpu"), timed=False)
    assert [line.iterations for line in lines] == [2 * 2 * 21, 2 * 3 * 4800]


def test_a_plan_knows_the_size_that_is_asked_for() -> None:
    assert plan._facts("tinyimagenet:size=224", "paper").shape == (3, 224, 224)
    assert plan._facts("celeba:public=cifar10", "paper").private == 162_770  # nothing of it need be public


SEARCH = """
title: A search of four candidates
measures:
  search: {kind: policy_search, candidates: 4, random: 2, published: 3-1-7, attack: 'ig:steps=2', data: mnist-5k,
           model: lenet, images: 3, victims: 2, epochs: 1, share: 0.01, seed: 100}
cell: {measure: search, value: "{kind} {of}"}
rows: {none: {kind: none}, random: {kind: random}, searched: {kind: searched}, published: {kind: published}}
columns: {PSNR: {of: PSNR}, score: {of: score}}
source: nothing.
"""


def test_a_search_is_run_and_its_policies_stand_beside_random_and_published_ones(
    written: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, controls, real = load(written(SEARCH)), [], measures.HalfTrained.observe

    def observe(model: Any, policy: Any) -> Any:
        fed, observations = real(model, policy)
        controls.extend([] if policy else zip(model.victims.x, fed.x, strict=True))
        return fed, observations

    monkeypatch.setattr(measures.HalfTrained, "observe", observe)
    rows = run_recipe(recipe, "cpu", tmp_path / "out").rows
    assert all(row["PSNR"][2] == 2 for row in rows.values())  # per victim, whatever the number of policies
    assert rows["random"]["score"][2] == 2 and rows["published"]["score"][2] == 1
    assert rows["searched"]["score"][0] <= rows["random"]["score"][0]
    assert len(controls) == 2
    for image, fed in controls:  # no policy is crop and flip alone, which every policy has too
        padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
        crops = [padded[:, i : i + 28, j : j + 28] for i in range(9) for j in range(9)]
        assert not torch.equal(fed, image)
        assert any(torch.allclose(fed, one, atol=1e-3) for crop in crops for one in (crop, crop.flip(2)))
    lines = {line.text: line.iterations for line in make_plan(recipe.at("cpu"), timed=False)}
    assert [count for text, count in lines.items() if text.endswith("attacks")] == [6 * 2 * 2]


def test_a_partial_correlation_takes_out_what_a_third_number_explains() -> None:
    rng = np.random.default_rng(0)
    contrast, score, attack = rng.normal(size=(3, 500))
    apart = measures._without((5 * contrast + attack).tolist(), contrast.tolist())
    assert abs(np.corrcoef(apart, contrast)[0, 1]) < 1e-9 and np.corrcoef(apart, attack)[0, 1] > 0.99
    alike = measures._without((5 * contrast + score).tolist(), contrast.tolist())
    assert np.corrcoef(alike, score)[0, 1] > 0.99 > 0.5 > abs(np.corrcoef(5 * contrast + score, score)[0, 1])


def test_networks_are_trained_on_obscured_images_as_the_public_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """LODA: batches of 128, a tenth of the rate after half and after three quarters, cropped and flipped at every step."""
    data, rates, seen = load_data("mnist-5k:private=300", seed=0), [], []
    step, forward = torch.optim.SGD.step, torch.nn.Flatten.forward

    def stepped(optimizer: Any, *rest: Any) -> Any:
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *rest)

    def flattened(layer: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach())
        return forward(layer, x)

    monkeypatch.setattr(torch.optim.SGD, "step", stepped)
    monkeypatch.setattr(torch.nn.Flatten, "forward", flattened)
    one = Batch(data.private.x[:1].repeat(300, 1, 1, 1), data.private.hard_labels[:1].repeat(300))

    def different(epochs: int, *, published: bool) -> list[int]:
        """How many different images the network sees in each of its mini-batches; test batches are of 250."""
        rates.clear()
        seen.clear()
        measures.accuracy("smlp", one, data, epochs, 0, published=published)
        return [len(x.flatten(1).unique(dim=0)) for x in seen if 2 < len(x) < 128]

    crops = different(4, published=True)  # of one image 81, each also mirrored
    assert rates == pytest.approx([0.05] * 6 + [0.005] * 3 + [0.0005] * 3) and len(crops) >= 12 and min(crops[:12]) > 50
    assert different(1, published=False)[:6] == [1] * 6 and len(set(rates)) == 6
    for number in (5, 6, 7):
        (trained,) = load(f"loda/table{number}").at("paper").measures.values()
        assert isinstance(trained, measures.ObscuredAccuracy) and trained.kind == "published_accuracy"
        assert (trained.images, trained.epochs) == (49_500, 200)


def test_measurements_of_ats_have_the_published_sizes_at_paper_scale() -> None:
    """[P] 4.2: 100 policies, 2,500 iterations; 4.4: a tenth of the training images, 50 epochs; 5.1: 1,500 candidates on 100
    images, ten rounds for the accuracy score; a hundred images are attacked."""
    names = ("figure1", "figure2", "figure5", "figure6", "search")
    measured = {name: load(f"ats/{name}").at("paper").measures for name in names}
    for name, of in measured.items():
        for measure in of.values():
            assert isinstance(measure, measures.AtsMeasurement)
            assert (measure.model, measure.epochs, measure.share) == ("resnet20-4", 50, 0.1)
            assert measure.images == 100 or name == "figure6"  # without scores
            assert measure.victims == 100 or name in ("figure1", "figure5")  # without attacks
            assert plan._facts(measure.data, "paper").private == 50_000
    search = measured["search"]["search"]
    assert isinstance(search, PolicySearch)
    assert (search.candidates, search.rounds, search.attack) == (1500, 10, "ig:paper=ats")
    for one in measured["figure2"].values():
        assert isinstance(one, measures.ScoreCorrelation) and (one.policies, one.attack) == (100, "ig:paper=ats,steps=2500")


def test_the_correlation_of_ats_is_of_three_trainings_and_its_partial_form_is_shown() -> None:
    """With two victims per policy and one training it told nothing."""
    recipe = load("ats/figure2")
    trained = recipe.at("cpu").measures
    assert {measure.seed for measure in trained.values()} == {100, 101, 102}
    for measure in trained.values():
        assert isinstance(measure, measures.ScoreCorrelation) and measure.victims >= 8 and measure.policies == 100
    shown = {cell.measure for (row, _), cell in recipe.at("cpu").cells.items() if row.startswith("partial")}
    assert shown == set(trained)
    assert "was fixed before this run" in " ".join(recipe.comment.split())
