"""A batch's moments from the statistics that a client sends: against torch's own BatchNorm, and what a search gains by them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradveil import defenses
from gradveil.attacks.base import Target
from gradveil.attacks.batch_statistics import sent_moments, shares
from gradveil.attacks.matching.distances import Cosine
from gradveil.attacks.matching.engine import match_and_choose
from gradveil.attacks.matching.moments import MomentMatch, batch_moments
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Match
from gradveil.attacks.matching.rows import Rows
from gradveil.attacks.unit_length import unit_length
from gradveil.client import Client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Observation, Reconstruction, Sighting, Trace, observe
from gradveil.core.randomness import generator, torch_stream
from gradveil.core.types import Update
from gradveil.data import DataSet

SENT, WITHHELD = LocalTraining(sends_statistics=True), LocalTraining()


@pytest.mark.parametrize("momentum", [0.1, 0.7, 1.0, None])
@pytest.mark.parametrize("mini_batches", [1, 3])
def test_moments_follow_from_the_statistics_of_torch(shapes: DataSet, momentum: float | None, mini_batches: int) -> None:
    norm = nn.BatchNorm2d(1, momentum=momentum)
    module, images = nn.Sequential(norm, nn.Flatten(), nn.Linear(144, 3)), shapes.private.x[: 2 * mini_batches]
    norm(shapes.public.x[:10])  # a model that has seen images before
    function = ModelFunction(module, mode="train")
    parts = images.split(2)
    for part in parts:
        norm(part)
    after = {f"0.{name}": t.clone() for name, t in norm.named_buffers() if t.is_floating_point()}
    state = function.state()
    update = Update({n: torch.ones_like(t) for n, t in function.parameters(state).items()}, "delta", len(images), after)
    training = LocalTraining(lr=0.1, batch_size=2, sends_statistics=True)
    moments = sent_moments(observe(shapes.task(function), [Sighting(state, update)], training=training))["0."]
    weights = shares(momentum, mini_batches)
    assert float(weights.sum()) == pytest.approx(1)
    assert float(moments.mean) == pytest.approx(sum(float(w * p.mean()) for w, p in zip(weights, parts, strict=True)), rel=1e-4)
    variance = sum(float(w * p.var()) for w, p in zip(weights, parts, strict=True))
    assert float(moments.variance) == pytest.approx(variance, rel=1e-4)


def normalized() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        stages = [(1, 1), (16, 2), (16, 2)]
        layers = [(nn.Conv2d(c, 16, 3, stride=s, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for c, s in stages]
        return nn.Sequential(*(m for stage in layers for m in stage), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def seen(data: DataSet, training: LocalTraining, defense: str = "none") -> tuple[list[Observation], list[Trace]]:
    """Two victims with two images each."""
    function, method = ModelFunction(normalized(), mode="train"), defenses.parse(defense)
    task, state = data.task(function), function.state()
    client = Client(task, method, training, None, lambda *key: torch_stream(0))
    rounds = [client.round(state, data.private[slice(i, i + 2)], i) for i in (0, 2)]
    traces = [trace for _, trace in rounds]
    known = [observe(task, [Sighting(state, u)], level="paper", training=training, trace=t) for u, t in rounds]
    return [unit_length(o) for o in known], traces


def target(observations: list[Observation]) -> Target:
    return Target(observations, torch.stack([labels(o) for o in observations]), generator(0, "moments"))


def labels(observation: Observation) -> Tensor:
    assert observation.knowledge.labels is not None
    return observation.knowledge.labels


@pytest.mark.parametrize("training", [SENT, LocalTraining(lr=1e-4, batch_size=1, epochs=2, sends_statistics=True)])
def test_the_true_images_have_the_moments_that_were_sent(shapes: DataSet, training: LocalTraining) -> None:
    observations, traces = seen(shapes, training)
    victims = target(observations)
    x = victims.normalize(torch.stack([t.fed.x for t in traces]))
    rows, match = Rows.of(victims), MomentMatch(1.0)
    assert match(x, rows).max() < 1e-5 < 1e-3 < match(x.flip(0), rows).min()
    # A row's moments do not depend on the rows beside it.
    alone = batch_moments(x[1:], rows.at(torch.tensor([1])))
    for path, (mean, variance) in batch_moments(x, rows).items():
        assert torch.allclose(mean[1:], alone[path][0], atol=1e-5) and torch.allclose(variance[1:], alone[path][1], atol=1e-5)


def test_without_sent_statistics_there_are_none(shapes: DataSet) -> None:
    observations, traces = seen(shapes, WITHHELD)
    assert sent_moments(observations[0]) == {}
    x = torch.stack([t.fed.x for t in traces])
    assert MomentMatch(1.0)(x, Rows.of(target(observations))).tolist() == [0.0, 0.0]


def test_statistics_bring_a_search_closer_and_withheld_ones_with_noise_do_not(shapes: DataSet, best_psnr: Callable) -> None:
    def quality(training: LocalTraining, defense: str) -> float:
        observations, traces = seen(shapes, training, defense)
        victims = target(observations)
        match = Match(Cosine(), (TV(1e-2), MomentMatch(10.0)), Adam(0.1, signed=True), 100, box=True)
        with torch.no_grad():
            answer = match_and_choose(victims, match)
        images = [Reconstruction(victims.denormalize(x).clamp(0, 1), None, 0.0) for x in answer.x]
        return float(best_psnr(images, traces).mean())

    clear, defended = quality(SENT, "none"), quality(WITHHELD, "gaussian:std=1")
    assert clear > 12 > 10.5 > defended, (clear, defended)
    assert clear > quality(WITHHELD, "none") + 1
