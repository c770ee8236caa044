"""Refiner: its evaluation network, its utility metric, and that the default both trains and hides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil import attacks
from gradveil.attacks.suite import accepted_counters
from gradveil.client import Client, prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Sighting, observe
from gradveil.core.randomness import generator
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors
from gradveil.data import load
from gradveil.defenses import parse
from gradveil.defenses.base import Setup
from gradveil.defenses.batch.refiner.defense import Utility
from gradveil.defenses.batch.refiner.evaluator import Evaluator, evaluator_for, relight
from gradveil.metrics.pixel import psnr
from gradveil.metrics.structural import ssim
from gradveil.models import build

MEAN, STD = torch.tensor([0.1307]), torch.tensor([0.3081])
SHAPE = (1, 28, 28)


@pytest.fixture(scope="module")
def digits() -> Batch:
    return load("mnist-5k").private


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def setup(digits: Batch, cache: Path | None, **more: object) -> Setup:
    function = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    return Setup(Task(function, SHAPE, 10, MEAN, STD), function.state(), digits[:300], cache=cache, **more)  # type: ignore[arg-type]


def client(function: ModelFunction, spec: str, digits: Batch, cache: Path | None = None) -> Client:
    task = Task(function, SHAPE, 10, MEAN, STD)
    return prepare_client(parse(spec), LocalTraining(), Setup(task, function.state(), digits[:300], cache=cache))


def cosine(a: Tensors, b: Tensors) -> float:
    return float(F.cosine_similarity(*(torch.cat([t.flatten() for t in g.values()]) for g in (a, b)), dim=0))


@pytest.fixture(scope="module")
def evaluator(digits: Batch, cache: Path) -> Evaluator:
    return evaluator_for(setup(digits, cache), epochs=20)


def test_evaluator_follows_noise_and_not_brightness(evaluator: Evaluator, digits: Batch) -> None:
    x, noise = digits.x[1000:1100], torch.rand(100, *SHAPE, generator=generator(0))
    score = [float(evaluator(torch.lerp(x, noise, share)).mean()) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert score == sorted(score) and score[0] < 0.2 and score[4] > 0.8
    assert torch.corrcoef(torch.tensor([score, [0.0, 0.25, 0.5, 0.75, 1.0]]))[0, 1] > 0.97
    for picture in (1 - x, torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 0.5), 0.5 * x):
        assert evaluator(picture).mean() < 0.35


def test_relit_images_are_images() -> None:
    x = torch.rand(500, *SHAPE, generator=generator(1))
    lit = relight(x, generator(0))
    assert lit.min() >= 0 and lit.max() <= 1
    same = (lit == x).all(dim=(1, 2, 3))
    assert 0.4 < same.float().mean() < 0.6
    centred = [t.flatten(1) - t.flatten(1).mean(1, keepdim=True) for t in (x, lit)]
    like = F.cosine_similarity(*centred)
    assert like.abs().min() > 0.99 and (like < 0).float().mean() > 0.15  # nothing but brightness and contrast; negatives too


def test_evaluator_is_trained_once(digits: Batch, cache: Path, evaluator: Evaluator) -> None:
    steps: list[int] = []
    again = evaluator_for(setup(digits, cache, progress=lambda what, done, total: steps.append(done)), epochs=20)
    assert not steps and all(torch.equal(a, b) for a, b in zip(again.parameters(), evaluator.parameters(), strict=True))
    evaluator_for(setup(digits[100:], cache, progress=lambda what, done, total: steps.append(done)), epochs=1)
    assert steps == [1, 2, 3, 4, 5] and len(list(cache.glob("*.safetensors"))) == 2


def test_utility_metric() -> None:
    """Eq. 4 and 5 by hand for two layers; a weight and its bias are of one layer."""
    true = {"a.weight": torch.tensor([1.0, -2.0]), "a.bias": torch.tensor([0.5]), "b.weight": torch.tensor([4.0])}
    theta = {"a.weight": torch.tensor([3.0, 0.5]), "a.bias": torch.tensor([-1.0]), "b.weight": torch.tensor([0.25])}
    found = {"a.weight": torch.tensor([1.5, 0.0]), "a.bias": torch.tensor([0.0]), "b.weight": torch.tensor([3.0])}
    by_hand = (3 * 0.9 * 0.5) ** 2 + (1 * 0.9 * 2) ** 2 + (0.5 * 0.9 * 0.5) ** 2 + (1 * 0.81 * 1) ** 2
    assert float(Utility(true, theta, 0.9, "printed")(found)) == pytest.approx(by_hand)
    relative = Utility(true, theta, 0.9, "normalised")
    assert float(relative(true)) == 0
    assert float(relative({n: torch.zeros_like(t) for n, t in true.items()})) == pytest.approx(1)
    third, sixth = 1 + 1 / 3, 1 + 0.5 / 3  # |g·θ| are 3, 1; 0.5; 1, so the largest, 3, counts twice
    above = 2 * (0.9 * 0.5) ** 2 + third * (0.9 * 2) ** 2 + sixth * (0.9 * 0.5) ** 2 + third * (0.81 * 1) ** 2
    below = 2 * (0.9 * 1) ** 2 + third * (0.9 * 2) ** 2 + sixth * (0.9 * 0.5) ** 2 + third * (0.81 * 4) ** 2
    assert float(relative(found)) == pytest.approx(above / below)


@pytest.fixture(scope="module")
def partly_trained(digits: Batch) -> ModelFunction:
    """A ReLU network after four passes over a thousand digits."""
    module = build("cnn", input_shape=SHAPE, num_classes=10)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    rng = generator(0)
    for _ in range(4):
        for rows in torch.randperm(1000, generator=rng).split(32):
            optimizer.zero_grad()
            F.cross_entropy(module((digits.x[rows] - MEAN) / STD), digits.y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        right = module((digits.x[1000:] - MEAN) / STD).argmax(1) == digits.y[1000:]
    assert right.float().mean() > 0.8
    return ModelFunction(module)


def similar(function: ModelFunction, spec: str, digits: Batch, cache: Path, batches: list[Batch]) -> Tensor:
    refiner, plain = (client(function, s, digits, cache) for s in (spec, "none"))
    state = function.state()
    pairs = [[c.round(state, b, i)[0].tensors for c in (refiner, plain)] for i, b in enumerate(batches)]
    return torch.tensor([cosine(*pair) for pair in pairs])


def test_gradient_stays_useful_on_a_partly_trained_model(partly_trained: ModelFunction, digits: Batch, cache: Path) -> None:
    # Not single digits: the gradient of one that the model knows well is next to nothing.
    few = [digits[i : i + 4] for i in range(1100, 1116, 4)]
    assert similar(partly_trained, "refiner", digits, cache, few).mean() > 0.5
    # As printed it fails.
    assert similar(partly_trained, "refiner:utility=printed", digits, cache, few[:2]).mean() < 0.4


def test_gradient_of_a_batch_stays_useful(partly_trained: ModelFunction, digits: Batch, cache: Path) -> None:
    assert similar(partly_trained, "refiner", digits, cache, [digits[1200:1264]]).min() > 0.75


def test_inversion_fails_on_lenet_where_it_succeeds_undefended(digits: Batch, cache: Path) -> None:
    function = ModelFunction(build("lenet", input_shape=SHAPE, num_classes=10))
    state, victims = function.state(), [digits[i : i + 1] for i in range(3)]
    rebuilt = {}
    for spec in ("none", "refiner"):
        party = client(function, spec, digits, cache)
        sent = [party.round(state, batch, i) for i, batch in enumerate(victims)]
        seen = [observe(party.task, [Sighting(state, u)], trace=t, level="paper") for u, t in sent]
        rebuilt[spec] = torch.cat([r.images for r in attacks.parse("ig:steps=150,tv=0.001,signed=true,boxed=true")(seen)])
    truth = torch.cat([batch.x for batch in victims])
    assert psnr(truth, rebuilt["none"]).min() > 18 and ssim(truth, rebuilt["none"]).min() > 0.6
    assert psnr(truth, rebuilt["refiner"]).max() < 14 and ssim(truth, rebuilt["refiner"]).max() < 0.6


def test_what_is_fed_is_a_random_image_and_its_start_a_secret(
    partly_trained: ModelFunction, digits: Batch, cache: Path
) -> None:
    party, batch, state = client(partly_trained, "refiner:steps=3", digits, cache), digits[:2], partly_trained.state()
    (_, first), (_, again), (_, other) = (party.round(state, batch, key) for key in (0, 0, 1))
    assert torch.equal(first.fed.x, again.fed.x) and not torch.equal(first.fed.x, other.fed.x)
    assert first.fed.x.min() >= 0 and first.fed.x.max() <= 1 and torch.equal(first.fed.y, batch.y)
    start = first.secrets["refiner.start"]
    assert start.shape == batch.x.shape and (first.fed.x - start).abs().max() <= 0.3 + 1e-6  # three steps of 0.1 away
    assert not first.fed.x.requires_grad


def test_starts_of_all_local_steps_are_kept(partly_trained: ModelFunction, digits: Batch, cache: Path) -> None:
    party = client(partly_trained, "refiner:steps=0", digits, cache)
    party.training = LocalTraining(batch_size=2, lr=0.1)
    _, trace = party.round(partly_trained.state(), digits[:5], 0)
    assert torch.equal(trace.secrets["refiner.start"], trace.fed.x)  # with no steps the start is what is fed


def test_nothing_mixed_in_and_no_steps_is_no_defense(partly_trained: ModelFunction, digits: Batch, cache: Path) -> None:
    spec = "refiner:alpha=0,steps=0"
    assert similar(partly_trained, spec, digits, cache, [digits[:3]]).min() == pytest.approx(1, abs=1e-5)


def test_card() -> None:
    found = parse("refiner")
    assert found.stages == ["batch"] and found.random and accepted_counters(type(found)) == ("refiner-partial",)


def test_alpha_decides_how_far_the_gradient_is_from_the_true_one(digits: Batch, cache: Path) -> None:
    """Refiner Figure 6: the noise ratio rises with alpha, from about 0.06. With one step for all it did not."""
    function = ModelFunction(build("lenet", input_shape=SHAPE, num_classes=10))
    ratios = []
    for alpha in (0.1, 0.5, 1.0):
        refiner, plain = (client(function, s, digits, cache) for s in (f"refiner:alpha={alpha},steps=40", "none"))
        sent, true = (c.round(function.state(), digits[:8], 0)[0].tensors for c in (refiner, plain))
        gap = torch.cat([(sent[n] - true[n]).flatten() for n in true]).norm()
        ratios.append(float(gap / torch.cat([t.flatten() for t in true.values()]).norm()))
    assert ratios[0] < 0.12 and ratios[0] < 0.7 * ratios[1] and ratios[0] < 0.7 * ratios[2]
