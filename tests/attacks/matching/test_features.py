"""Feature inversion: images and batches behind max-pooling come back, noise stops it, and where it does not apply."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradveil.attacks import parse
from gradveil.attacks.base import Target
from gradveil.attacks.budget import SECONDS, Workload
from gradveil.attacks.layers import pools_all_places
from gradveil.attacks.matching.features import OpenMatch
from gradveil.attacks.matching.natural import Coordinates
from gradveil.attacks.matching.rows import Rows
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Sighting, Trace, observe
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Update
from gradveil.data import DataSet


def pooled(*middle: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = (nn.Conv2d(1, 12, 5, padding=2), *middle, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(432, 100), nn.ReLU(), nn.Linear(100, 3))


@pytest.mark.parametrize("size", [1, 4])
def test_images_behind_max_pooling_come_back_and_noise_stops_it(
    size: int, observe_victims: Callable, shapes: DataSet, best_psnr: Callable
) -> None:
    clear, truth = observe_victims(data=shapes, model=pooled(), victims=2, batch_size=size)
    noisy, hidden = observe_victims(data=shapes, model=pooled(), victims=2, batch_size=size, defense="gaussian:std=1.0")
    attack = parse("features:starts=4")
    recovered, control = attack(clear, budget="quick"), attack(noisy, budget="quick")
    quality = best_psnr(recovered, truth)
    assert (quality >= 25).float().mean() >= (1 if size == 1 else 0.5), quality  # one of the two batches is not read apart
    assert best_psnr(control, hidden).max() < 18
    # The adversary knows which of its answers to believe.
    assert min(r.score for r in recovered) < 0.05 < 1 < min(r.score for r in control)


def test_a_batch_that_is_normalized_together_comes_back(shapes: DataSet, best_psnr: Callable) -> None:
    function = ModelFunction(pooled(nn.BatchNorm2d(12)), mode="train")
    task, state, batches = shapes.task(function), function.state(), shapes.private[:8].x.split(4)
    labels = torch.tensor([0, 1, 2, 0])
    sent = [Update(function.gradient(state, task.normalize(x), labels), "gradient", 4) for x in batches]
    traces = [Trace(Batch(x, labels), Batch(x, labels)) for x in batches]
    seen = [observe(task, [Sighting(state, u)], level="realistic", trace=t) for u, t in zip(sent, traces, strict=True)]
    assert seen[0].model.couples_images
    assert best_psnr(parse("features:starts=4")(seen, budget="quick"), traces).mean() >= 18


def test_images_behind_local_epochs_with_momentum_come_back(
    observe_victims: Callable, shapes: DataSet, best_psnr: Callable
) -> None:
    training = LocalTraining(epochs=2, batch_size=2, lr=0.01, optimizer="sgd:momentum=0.9")
    seen, truth = observe_victims(data=shapes, model=pooled(), victims=2, batch_size=4, training=training)
    quality = best_psnr(parse("features:starts=4")(seen, budget="quick"), truth)
    assert (quality >= 22).float().mean() >= 0.5, quality
    noisy, hidden = observe_victims(
        data=shapes, model=pooled(), victims=1, batch_size=4, training=training, defense="gaussian:std=1.0"
    )
    assert best_psnr(parse("features:starts=4")(noisy, budget="quick"), hidden).max() < 18


def test_where_it_does_not_apply(observe_victims: Callable, shapes: DataSet) -> None:
    attack = parse("features")
    no_bias = nn.Sequential(nn.Flatten(), nn.Linear(144, 3, bias=False))
    (seen, *_), _ = observe_victims(data=shapes, model=no_bias)
    assert attack.why_not(seen) == "the model has no fully connected layer with a bias"
    by_rows = nn.Sequential(nn.Flatten(1, 2), nn.Linear(12, 2), nn.Flatten(), nn.ReLU(), nn.Linear(24, 3))
    (seen, *_), _ = observe_victims(data=shapes, model=by_rows)
    assert attack.why_not(seen) == "the first fully connected layer takes several rows per image"
    (seen, *_), _ = observe_victims(data=shapes, model=pooled(), training=LocalTraining(lr=0.01, optimizer="adam"))
    assert "Adam" in str(attack.why_not(seen))


def test_averages_over_all_places_are_not_inverted_where_gradients_cannot_be_matched(
    observe_victims: Callable, shapes: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = parse("features:starts=4")
    averaged = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    (seen, *_), _ = observe_victims(data=shapes, model=averaged)
    (placed, *_), _ = observe_victims(data=shapes, model=pooled())
    for observation, pools in ((seen, True), (placed, False)):
        assert pools_all_places(observation.task) is pools
        work = Workload(observation.task, "quick")
        assert attack.cost(work).iterations > 0
        with monkeypatch.context() as poor:
            poor.setitem(SECONDS, "quick", 1.0)
            assert (attack.cost(work).iterations == 0) is pools
    monkeypatch.setitem(SECONDS, "quick", 1.0)
    with pytest.raises(UserError, match="averages over all places"):
        attack([seen], budget="quick")


def test_the_coordinates_are_those_of_the_images(observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, model=pooled(), victims=1)
    coordinates = Coordinates.of(Target(seen, torch.zeros(1, 1), generator(0)))
    z, g = torch.randn(2, 3, 1, 1, 12, 12, generator=generator(0, "z")).unbind()
    assert torch.allclose(coordinates.of_images(coordinates.images(z)), z, atol=1e-4)
    z.requires_grad_()
    (slope,) = torch.autograd.grad((coordinates.images(z) * g).sum(), z)
    assert torch.allclose(slope, coordinates.slope(g), atol=1e-5)
    many = coordinates.images(torch.randn(500, 1, 12, 12, generator=generator(0, "many")))
    assert float(many.std()) == pytest.approx(1.0, abs=0.1)  # a quarter of the pixel range, which is 4 here


def test_closed_units_keep_their_values_and_get_a_slope(observe_victims: Callable, shapes: DataSet) -> None:
    model = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(144, 3))
    seen, _ = observe_victims(data=shapes, model=model, victims=1)
    target = Target(seen, torch.zeros(1, 1), generator(0))
    x = torch.full((1, 1, 1, 12, 12), -1.0, requires_grad=True)
    rows = Rows.of(target)
    match = OpenMatch(torch.ones(1, 1, 3), 0.1)
    with torch.enable_grad():
        outputs = match.outputs(x, rows)
        (slope,) = torch.autograd.grad(outputs.sum(), x)
    assert torch.equal(outputs, rows.outputs(x))
    wanted = 0.1 * target.state["2.weight"].sum(0)
    assert torch.allclose(slope.flatten(), wanted, atol=1e-6)
