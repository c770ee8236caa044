"""The line-up: members of undefended batches are identified, those under strong noise are not, and by theory in between."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

from gradveil import defenses
from gradveil.attacks.lineup import Candidates, LineUp
from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Observation, Sighting, observe
from gradveil.core.randomness import generator
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors, Update
from gradveil.defenses.base import Setup
from gradveil.metrics.identification import clopper_pearson

SHAPE = (1, 6, 6)
CLASSES = 3
M = 60


def images(count: int, *key: int | str) -> Batch:
    """Smooth random images with classes of their own means."""
    rng = generator("images", *key)
    labels = torch.arange(count) % CLASSES
    means = torch.rand(CLASSES, *SHAPE, generator=generator("means"))
    return Batch((means[labels] + 0.3 * torch.randn(count, *SHAPE, generator=rng)).clamp(0, 1), labels)


def mlp(hidden: int = 12) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def convnet() -> nn.Module:
    torch.manual_seed(0)
    convolution = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU()]
    return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(96, CLASSES))


def ranks(
    module: nn.Module,
    size: int,
    defense: str = "none",
    *,
    training: LocalTraining | None = None,
    updates: int = 1,
    victims: int = 12,
    public: int = 300,
    attack: LineUp | None = None,
) -> list[int]:
    """The rank of one image of each batch among M candidates of its class; 1 is the most likely."""
    method, training = defenses.parse(defense), training or LocalTraining()
    model = ModelFunction(method.model(module, SHAPE), mode="train")
    state, task = model.state(), Task(model, SHAPE, CLASSES, torch.zeros(1), torch.ones(1))
    private, shared = images(2000, "private"), images(public, "public") if public else None
    client = prepare_client(method, training, Setup(task, state, private[:100], shared))
    observations, rows, places, rng = list[Observation](), [], [], generator("places")
    for victim in range(victims):
        batch = torch.randperm(1000, generator=rng)[:size]
        seen = [Sighting(state, client.round(state, private[batch], victim, u)[0]) for u in range(updates)]
        observations.append(observe(task, seen, training=training, defense=method, public=shared))
        others = 1000 + (private.y[1000:] == private.y[batch[0]]).nonzero().flatten()[: M - 1]
        place = int(torch.randint(M, (), generator=rng))
        rows.append(torch.cat([others[:place], batch[:1], others[place:]]))
        places.append(place)
    scores = (attack or LineUp()).scores(observations, Candidates(private, tuple(rows)))
    assert all(len(s) == M and bool(s.isfinite().all()) for s in scores)
    return [int((s >= s[place]).sum()) for s, place in zip(scores, places, strict=True)]


def identified(order: list[int]) -> int:
    return sum(rank == 1 for rank in order)


def test_members_of_undefended_batches_are_identified_and_those_under_strong_noise_are_not() -> None:
    plain, noised = identified(ranks(mlp(), 4)), identified(ranks(mlp(), 4, "gaussian:std=10"))
    low, _ = clopper_pearson(plain, 12)
    assert low > 0.7 > 1 / M
    assert clopper_pearson(noised, 12)[0] <= 1 / M


def test_strong_noise_leaves_ranks_to_chance() -> None:
    order = np.array(ranks(mlp(), 4, "gaussian:std=100", victims=60))
    assert abs(order.mean() - (M + 1) / 2) < 4 * M / math.sqrt(12 * 60)
    assert clopper_pearson(int((order == 1).sum()), 60)[0] <= 1 / M


@pytest.mark.parametrize(
    ("defense", "least"),
    [("clip:norm=0.01", 12), ("prune:ratio=0.5", 10), ("quantize", 10), ("precode:k=8", 12), ("gaussian:std=0.001", 12)],
)
def test_what_is_known_of_a_defense_helps(defense: str, least: int) -> None:
    assert identified(ranks(mlp(), 4, defense)) >= least


def test_the_covariance_of_public_gradients_reaches_batches_larger_than_the_layer() -> None:
    """24 images and 12 units: the span of the gradient is everything, so the matched filter must do."""
    order = ranks(mlp(), 24, victims=24)
    assert identified(order) >= 8
    assert clopper_pearson(identified(order), 24)[0] > 3 / M


@pytest.mark.parametrize(("module", "least"), [(mlp(), 12), (convnet(), 6)])
def test_weight_differences_of_local_epochs(module: nn.Module, least: int) -> None:
    training = LocalTraining(epochs=3, batch_size=2, lr=0.05, optimizer="sgd:momentum=0.9")
    assert identified(ranks(module, 4, training=training)) >= least


def test_repeated_updates_average_the_noise() -> None:
    once, often = (identified(ranks(mlp(), 2, "gaussian:std=0.1", updates=n)) for n in (1, 30))
    assert often > once + 3


def test_without_public_images_candidates_tell_what_is_common() -> None:
    assert identified(ranks(convnet(), 1, public=0)) == 12


def test_an_update_of_zeros_identifies_nobody() -> None:
    model = ModelFunction(mlp())
    state, task = model.state(), Task(model, SHAPE, CLASSES, torch.zeros(1), torch.ones(1))
    update = Update({name: torch.zeros_like(t) for name, t in model.parameters(state).items()})
    pool = images(30)
    (scores,) = LineUp().scores([observe(task, [Sighting(state, update)])], Candidates(pool, (torch.arange(30),)))
    assert scores.tolist() == [0.0] * 30


def test_a_victim_does_not_depend_on_the_others_or_on_the_order_of_candidates() -> None:
    model = ModelFunction(mlp(), mode="train")
    state, task = model.state(), Task(model, SHAPE, CLASSES, torch.zeros(1), torch.ones(1))
    pool, public = images(90, "private"), images(200, "public")

    def observation(rows: list[int]) -> Observation:
        update = Update(model.gradient(state, pool.x[rows], pool.y[rows]), examples=len(rows))
        return observe(task, [Sighting(state, update)], public=public)

    both = [observation([0, 1]), observation([3, 4])]
    order = torch.arange(0, 90, 3)
    scores = LineUp().scores(both, Candidates(pool, (order, order)))
    (alone,) = LineUp().scores(both[1:], Candidates(pool, (order.flip(0),)))
    assert torch.allclose(alone.flip(0), scores[1], rtol=1e-4)
    assert int(scores[0].argmax()) == 0 and int(scores[1].argmax()) == 1


def _mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def test_a_gain_hides_nobody() -> None:
    """The same noisy gradients, longer: the same scores."""
    model = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)))
    task = Task(model, (1, 4, 4), 3, torch.zeros(1), torch.ones(1))
    pool = Batch(torch.rand(30, 1, 4, 4, generator=generator("pool")), torch.arange(30) % 3)
    state, scores = model.state(), list[Tensor]()
    for gain in (1, 7):
        defense = defenses.parse(f"dpsgd:clip=0.3,noise=0.5,gain={gain}")
        setup = Setup(task, state, pool)
        update, _ = prepare_client(defense, LocalTraining(), setup).round(state, pool[:4], 0)
        observations = [observe(task, [Sighting(state, update)], defense=defense)]
        scores += LineUp().scores(observations, Candidates(pool, (torch.arange(30),)))
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("m", [11, 101])
@pytest.mark.parametrize("mu", [1.0, 2.5, 4.0])
def test_orthogonal_gradients_under_gaussian_noise_are_identified_as_often_as_theory_says(m: int, mu: float) -> None:
    """The gradient of an image is the image, and images are orthogonal: the chance that the right product is the largest."""
    trials, side = 400, 11
    model = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(side * side, 1, bias=False)), _mean_output)
    task = Task(model, (1, side, side), 1, torch.zeros(1), torch.ones(1), has_classes=False)
    pool = Batch(torch.eye(side * side)[:m].view(m, 1, side, side), torch.zeros(m, 1))
    state, rng, observations = model.state(), generator("theory", m), list[Observation]()
    defense = defenses.parse(f"dpsgd:clip=1,noise={1 / mu}")
    for trial in range(trials):
        gradient: Tensors = model.gradient(state, pool.x[trial % m : trial % m + 1], pool.y[:1])
        noised = {name: t + torch.randn(t.shape, generator=rng) / mu for name, t in gradient.items()}
        observations.append(observe(task, [Sighting(state, Update(noised))], defense=defense))
    scores = LineUp().scores(observations, Candidates(pool, (torch.arange(m),) * trials))
    rate = sum(int(s.argmax()) == trial % m for trial, s in enumerate(scores)) / trials
    z = np.linspace(-9, 14, 20001)
    theory = float(np.trapezoid(norm.pdf(z - mu) * norm.cdf(z) ** (m - 1), z))
    assert abs(rate - theory) < 4 * math.sqrt(theory * (1 - theory) / trials) + 1e-9
