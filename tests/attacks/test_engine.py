"""The engine: who is chosen among restarts, what counts in a match, and that victims do not disturb each other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradveil.attacks import parse
from gradveil.attacks.base import Answer, Target
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.matching import swift
from gradveil.attacks.matching.distances import L2, Cosine, RelativeL2
from gradveil.attacks.matching.engine import Solution, choose, match_and_choose, solve
from gradveil.attacks.matching.optimizers import LBFGS, Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import NOTHING, Insight, Match, Problem, residual
from gradveil.attacks.matching.starts import Start
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Observation, Trace
from gradveil.core.randomness import generator
from gradveil.data import DataSet


def target_of(seen: list[Observation], seed: int = 0) -> Target:
    return Target(seen, torch.stack([infer_labels(o) for o in seen]), generator(seed, "test"))


def inputs(target: Target, truth: list[Trace]) -> Tensor:
    return target.normalize(torch.stack([t.original.x for t in truth]))


# -- the objective -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining(epochs=2, lr=0.1)])
def test_the_truth_has_no_residual_and_others_have(training: LocalTraining, observe_victims: Callable, shapes: DataSet) -> None:
    seen, truth = observe_victims(data=shapes, victims=3, training=training)
    target = target_of(seen)
    x = inputs(target, truth)
    assert residual(target, x).max() < 1e-8
    assert residual(target, x.roll(1, 0)).min() > 1e-3
    assert torch.equal(residual(target, x), Problem(target, Match(RelativeL2(), ())).residual(x))


def test_value_and_slope_are_those_of_distance_and_priors(observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, victims=2)
    target = target_of(seen)
    problem = Problem(target, Match(Cosine(), (TV(0.1),), restarts=2))
    x = torch.randn(4, 1, *shapes.input_shape, generator=generator(0, "x")).requires_grad_()
    with torch.no_grad():
        value, slope = problem(x)
    for row in range(4):
        image, victim = x[row], row // 2
        found = target.model.gradients(target.state, image[None], target.labels[victim][None])
        ours = torch.cat([g.flatten() for g in found.values()])
        theirs = torch.cat([g.flatten() for g in seen[victim].update.tensors.values()])
        direct = 1 - torch.cosine_similarity(ours, theirs, dim=0) + 0.1 * TV().variation(image[None])[0]
        (wanted,) = torch.autograd.grad(direct, x, retain_graph=True)
        assert float(value[row]) == pytest.approx(float(direct.detach()), rel=1e-4)
        assert torch.allclose(slope[row], wanted[row], rtol=1e-3, atol=1e-6)


def test_masks_and_dropped_tensors_do_not_count(observe_victims: Callable, shapes: DataSet) -> None:
    seen, truth = observe_victims(data=shapes, victims=2)
    spoiled = [o.update.tensors for o in seen]
    for tensors in spoiled:
        tensors["fc.weight"][:, :5] += 100.0
        tensors["fc.bias"] += 100.0
    target = target_of(seen)
    target.labels = torch.stack([t.original.y for t in truth])
    x, mask = inputs(target, truth), torch.ones_like(spoiled[0]["fc.weight"])
    mask[:, :5] = 0
    kept = [n for n in target.model.trainable if n != "fc.bias"]
    assert residual(target, x, L2()).min() > 1
    masks = Insight({"fc.weight": torch.stack([mask, mask])}, keep=kept)
    assert residual(target, x, L2(), masks).max() < 1e-6


def test_each_victim_keeps_its_mask_in_a_subset(observe_victims: Callable, shapes: DataSet) -> None:
    seen, truth = observe_victims(data=shapes, victims=3)
    for place, observation in enumerate(seen):  # a different column is spoiled for each victim
        observation.update.tensors["fc.weight"][:, place] += 100.0
    target = target_of(seen)
    target.labels = torch.stack([t.original.y for t in truth])
    masks = torch.ones(3, *seen[0].update.tensors["fc.weight"].shape)
    for place in range(3):
        masks[place, :, place] = 0
    insight, x = Insight({"fc.weight": masks}), inputs(target, truth)
    assert residual(target, x, L2(), insight).max() < 1e-6
    part = [2, 0]
    assert residual(target.subset(part), x[part], L2(), insight.subset(part)).max() < 1e-6
    assert residual(target.subset(part), x[part], L2(), insight.subset([0, 2])).min() > 1


def test_an_insight_says_whether_it_holds_anything() -> None:
    assert NOTHING.is_empty
    assert Insight() == NOTHING
    for insight in (Insight({"fc.weight": torch.ones(1)}), Insight(keep=[])):
        assert not insight.is_empty


def test_nothing_known_begins_with_the_closed_form_however_it_is_written(observe_victims: Callable, shapes: DataSet) -> None:
    """What an insight holds decides, not which object it is."""
    seen, _ = observe_victims(data=shapes, victims=1)
    evaluations = [
        swift.Swift(restarts=0, cycles=0, adam_steps=0).reconstruct(target_of(seen), insight).iterations
        for insight in (NOTHING, Insight(weights={}), Insight(keep=seen[0].model.trainable))
    ]
    assert evaluations[0] == evaluations[1] == 0 < evaluations[2]


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_the_lowest_residual_is_chosen_for_each_victim(observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, victims=3)
    target = target_of(seen)
    problem = Problem(target, Match(L2(), (), restarts=2))
    x = torch.arange(6.0).view(6, 1, 1, 1, 1).expand(6, *target.shape[1:])
    nan = float("nan")
    residuals = torch.tensor([0.5, 0.1, 0.2, 0.9, nan, 3.0])
    value = torch.tensor([0.0, 9.0, 9.0, 0.0, 0.0, 9.0])  # with priors: not what decides
    answer = choose(problem, Solution(x, value, residuals, problem.rows.labels, 7, {}))
    assert answer.x.amax((1, 2, 3, 4)).tolist() == [1.0, 2.0, 5.0]
    assert answer.score.tolist() == pytest.approx([0.1, 0.2, 3.0])


def test_among_many_starts_the_truth_is_recognised_without_being_known(observe_victims: Callable, shapes: DataSet) -> None:
    seen, truth = observe_victims(data=shapes, victims=2)
    target = target_of(seen)
    x = torch.randn(2, 3, *target.shape[1:], generator=generator(0, "x"))
    x[0, 2], x[1, 0] = inputs(target, truth)
    problem = Problem(target, Match(L2(), (), restarts=3))
    x = x.flatten(0, 1)
    residuals = problem.residual(x)
    answer = choose(problem, Solution(x, residuals, residuals, problem.rows.labels, 0, {}))
    assert torch.equal(answer.x, inputs(target, truth))


def test_more_restarts_are_never_worse_by_the_adversarys_own_measure(observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, victims=2)
    match = {n: Match(L2(), (), LBFGS(), steps=8, start=Start(), restarts=n) for n in (1, 4)}
    one, four = (match_and_choose(target_of(seen), match[n]).score for n in (1, 4))
    assert (four <= one * (1 + 1e-4)).all()


# -- starts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "uniform", "grey", "patch"])
def test_every_victim_has_the_same_starts(kind: str, observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, victims=3)
    three = Start(kind).draw(target_of(seen), 2, generator(0, "s")).unflatten(0, (3, 2))  # type: ignore[arg-type]
    alone = Start(kind).draw(target_of(seen[2:]), 2, generator(0, "s"))  # type: ignore[arg-type]
    assert all(torch.equal(rows, alone) for rows in three)
    if kind in ("uniform", "grey", "patch"):
        pixels = target_of(seen).denormalize(three)
        assert -1e-5 <= float(pixels.min()) <= float(pixels.max()) <= 1 + 1e-5


def test_a_given_start_is_given_in_pixels(observe_victims: Callable, shapes: DataSet) -> None:
    seen, truth = observe_victims(data=shapes, victims=2)
    target = target_of(seen)
    images = torch.stack([t.original.x for t in truth])
    drawn = Start("images", images=images).draw(target, 2, generator(0))
    assert torch.allclose(drawn[::2], inputs(target, truth))
    assert torch.equal(drawn[::2], drawn[1::2])


# -- first-order runs --------------------------------------------------------------------------------------------------


def test_a_box_keeps_pixels_in_range_and_the_best_is_kept(observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, victims=2)
    match = Match(Cosine(), (TV(1e-4),), Adam(5.0, signed=True), steps=15, box=True, decay=False)  # far too long steps
    target = target_of(seen)
    problem = Problem(target, match)
    solution = solve(problem)
    pixels = target.denormalize(solution.x)
    assert -1e-5 <= float(pixels.min()) <= float(pixels.max()) <= 1 + 1e-5
    with torch.no_grad():
        again = problem(solution.x)[0]
    assert torch.allclose(again, solution.value, rtol=1e-3, atol=1e-5)  # the value is that of the point
    recorded = solution.history["objective"]
    assert all(later <= before + 1e-6 for before, later in itertools.pairwise(recorded))


def test_patience_ends_a_run_that_no_longer_improves(observe_victims: Callable, shapes: DataSet) -> None:
    seen, truth = observe_victims(data=shapes, victims=1)
    target = target_of(seen)
    match = Match(L2(), (), Adam(0.1), steps=400, patience=50, decay=False)
    solution = solve(Problem(target, match), start=inputs(target, truth))  # nothing is better than the truth
    assert solution.iterations < 300


# -- labels as unknowns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [LBFGS(), Adam(0.1)])
def test_labels_can_be_unknowns_under_either_kind_of_optimiser(
    optimizer: Adam | LBFGS, observe_victims: Callable, shapes: DataSet
) -> None:
    seen, truth = observe_victims(data=shapes, victims=2)
    target = target_of(seen)
    match = Match(L2(), (), optimizer, steps=60, learn_labels=True, box=True)
    problem = Problem(target, match)
    solution = solve(problem, start=inputs(target, truth))
    assert solution.labels.shape == (2, 1, 3)
    assert torch.allclose(solution.labels.sum(-1), torch.ones(2, 1))
    assert solution.labels.argmax(-1).tolist() == [t.original.y.tolist() for t in truth]
    again = problem.residual(solution.x, solution.labels)
    assert torch.allclose(solution.residual, again)
    assert torch.allclose(solution.value, again, rtol=1e-3, atol=1e-6)  # no priors: the value is the residual
    limited = Problem(target_of(seen), match)  # the same draws again
    limited.at_once = 1
    assert torch.allclose(solve(limited, start=inputs(target, truth)).value, solution.value, rtol=1e-2, atol=1e-5)


def test_the_memory_of_a_machine_does_not_change_the_rows_of_a_computation(observe_victims: Callable) -> None:
    """With another number of rows sums are rounded differently, and a search may end elsewhere."""
    small, large = (target_of(observe_victims(model=model, victims=2)[0]) for model in ("lenet", "smlp"))
    assert small.rows_at_once > 100 and 2 <= large.rows_at_once <= 10
    for target in (small, large):
        rows = target.rows_at_once
        for memory in (2**28, 2**32, 2**36):
            assert dataclasses.replace(target, memory=memory).rows_at_once == rows
        assert dataclasses.replace(target, memory=2**26).rows_at_once <= max(1, rows // 4)
        assert dataclasses.replace(target, memory=2**20).rows_at_once <= 8


# -- company -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "ig:steps=12",
        "ig:steps=12,restarts=2",
        "dlg:steps=6",
        "idlg:steps=6",
        "cpl:steps=6",
        "adam-l1:steps=12",
        "lbfgs-cosine:steps=6",
        "bayes:steps=12",
        "gradinversion:steps=12,noise=2",
        "linear",
        "rgap",
    ],
)
def test_a_victims_result_does_not_depend_on_its_company(spec: str, observe_victims: Callable, shapes: DataSet) -> None:
    model = "smlp" if spec == "linear" else "lenet"
    seen, _ = observe_victims(data=shapes, model=model, victims=3)
    attack = parse(spec)
    together = attack(seen)
    for place in (2, 0):
        alone = attack([seen[place]])[0]
        assert torch.allclose(together[place].images, alone.images, atol=2e-3)
        assert torch.equal(together[place].labels, alone.labels)  # type: ignore[arg-type]
    swapped = attack([seen[1], seen[2], seen[0]])
    for one, other in zip((together[1], together[2], together[0]), swapped, strict=True):
        assert torch.allclose(one.images, other.images, atol=2e-3)


def test_victims_of_different_models_are_attacked_apart(observe_victims: Callable, shapes: DataSet) -> None:
    """One call may hold any mixture; answers come in the order of the questions."""
    pairs = [observe_victims(data=shapes, victims=2, seed=seed) for seed in (0, 1)]
    seen = [pairs[0][0][0], pairs[1][0][0], pairs[0][0][1], pairs[1][0][1]]
    truth = [pairs[0][1][0], pairs[1][1][0], pairs[0][1][1], pairs[1][1][1]]
    for found, trace in zip(parse("rgap")(seen), truth, strict=True):
        assert torch.allclose(found.images, trace.original.x, atol=1e-2)


@pytest.mark.usefixtures("hurried")
def test_swift_gives_a_noisy_victim_the_same_starts_in_any_company(
    observe_victims: Callable, shapes: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A victim that is close gets new starts; one that is far gets none, and must not notice."""
    close, _ = observe_victims(data=shapes, victims=1)
    far, _ = observe_victims(data=shapes, victims=2, defense="gaussian:std=1.0")

    def portfolio(target: Target, _: Insight, scale: float) -> Answer:
        residuals = [0.01 if o is close[0] else 100.0 for o in target.observations]
        return Answer(Start(scale=scale).draw(target, 1, target.rng), torch.tensor(residuals), iterations=1)

    monkeypatch.setattr(swift, "_portfolio", portfolio)
    attack = parse("swift:restarts=1,cycles=0")
    alone, together = attack(far[1:])[0], attack([*close, far[1]])[1]
    assert torch.allclose(alone.images, together.images, atol=2e-3)


def test_the_progress_of_an_attack_in_stages_never_goes_back(observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, victims=1, defense="gaussian:std=0.5")
    told: list[tuple[int, int]] = []
    attack = parse("swift:adam_steps=20")
    attack(seen, budget="quick", progress=lambda done, total: told.append((done, total)))
    shares = [done / total for done, total in told]
    assert len(told) > 50 and all(a <= b + 0.02 for a, b in itertools.pairwise(shares)) and 0.3 < shares[-1] <= 1
