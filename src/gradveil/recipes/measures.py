"""What some figures show beside attacks and accuracies.

A measure is named in a recipe by `kind`; the rest of what stands there is its arguments. It gives named values, each
with its spread. It does its work in named pieces, one by one, so that a run that was stopped goes on with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from gradveil import attacks, defenses
from gradveil.client import prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.observation import Observation, Sighting, observe
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, LocalTraining, Tensors
from gradveil.data import DataSet, load
from gradveil.defenses.base import Setup
from gradveil.defenses.data.ats.defense import Policy, parse_policies, write_policy
from gradveil.defenses.data.ats.search import NO_POLICY, Scorer, Search, candidates, half_trained
from gradveil.defenses.data.loda.defense import Loda
from gradveil.metrics import lpips, psnr, ssim
from gradveil.models import build
from gradveil.recipes.claims import Value

Values = dict[str, Value]
T = TypeVar("T")

RATE, MOMENTUM, DECAY, TRAIN_BATCH = 0.05, 0.9, 5e-4, 50  # of LODA's retraining, the batch for fewer images
TOGETHER = 20  # policies whose victims are attacked at once


class Bench(Protocol):
    """Where a measure is taken."""

    cache: Path  # for what is trained once

    def each(self, pieces: Mapping[str, T], work: Callable[[T], Any], /) -> dict[str, Any]:
        """Named pieces of work in their order. What a piece gives is kept as JSON and not worked out again."""

    def progress(self, what: str, done: int, total: int, /) -> None:
        """Of something long that comes before the pieces."""


@dataclass(frozen=True)
class Work:
    """What a measure will take, for a plan: so many images to learn from, to take the gradient of, or to attack."""

    kind: Literal["training", "obscuring", "gradients", "attacks"]
    model: str
    images: int
    attack: str = ""


# -- ATS: gradients on the way from noise to an image --------------------------------------------------------------------


class Ground:
    """A half-trained model, images to score policies on and others to attack, as the search of ATS has them."""

    def __init__(
        self,
        bench: Bench,
        data: str,
        model: str,
        epochs: int,
        seed: int,
        images: int = 2,
        victims: int = 1,
        share: float = 0.1,
    ):
        self.data, self.seed = load(data, seed=seed), seed
        found = self.data
        self.module = build(model, input_shape=found.input_shape, num_classes=found.num_classes, seed=seed)
        self.function = ModelFunction(self.module)
        fresh = self.function.state()
        self.search = Search(images=images, epochs=max(epochs, 1), share=share, seed=seed)
        self.state = fresh
        if epochs:
            shared: dict[str, Any] = {"folder": bench.cache, "progress": bench.progress}
            shared |= {"mean": found.mean, "std": found.std, "search": self.search}
            self.state = half_trained(self.module, found.private, **shared)
        order = torch.randperm(len(found.test), generator=generator(seed, "ats-images"))
        scored, self.victims = found.test[order[:images]], found.test[order[images:][:victims]]
        tensors = {"images": scored.x, "labels": scored.hard_labels, "mean": found.mean, "std": found.std}
        tensors |= {f"fresh.{n}": t for n, t in fresh.items()} | {f"trained.{n}": t for n, t in self.state.items()}
        self.scorer = Scorer(self.module, tensors, self.search)

    def observed(self, policy: Policy) -> tuple[Batch, list[Observation]]:
        """The victims as they were fed under a policy, and what a server sees of each."""
        data, how = self.data, defenses.parse(f"ats:policy={write_policy((policy,))}" if policy else "none")
        task = data.task(self.function)
        client = prepare_client(how, LocalTraining(), Setup(task, self.state, data.private, seed=self.seed))
        sent = [client.round(self.state, self.victims[i : i + 1], i) for i in range(len(self.victims))]
        seen = [observe(task, [Sighting(self.state, update)], level="paper", trace=trace) for update, trace in sent]
        fed = [trace.fed for _, trace in sent]
        return Batch(torch.cat([b.x for b in fed]), torch.cat([b.y for b in fed])), seen

    def rebuilt(self, policies: Sequence[Policy], attack: str) -> list[tuple[Batch, Tensor]]:
        """For every policy the victims as they were fed, and what the attack, on all of them at once, makes of them."""
        fed, seen = zip(*map(self.observed, policies), strict=True)
        found = attacks.parse(attack)([one for some in seen for one in some], seed=self.seed)
        images = torch.cat([answer.images for answer in found])
        return list(zip(fed, images.split([len(batch) for batch in fed]), strict=True))

    def gradients(self, x: Tensor, y: Tensor) -> Tensors:
        inputs = self.data.task(self.function).normalize(x)
        with torch.no_grad():
            return self.function.gradients(self.state, inputs[:, None], y[:, None])


def _policy(text: str) -> Policy:
    return NO_POLICY if text == "none" else parse_policies(text)[0]


def gradient_similarity(bench: Bench, policies: Mapping[str, str], points: int, **ground: Any) -> Values:
    """ATS Figure 1: likeness of gradients on the way from noise (0) to the image (1), and the area under it."""
    scorer = Ground(bench, **ground).scorer
    found: Values = {}
    for label, kept in bench.each(policies, lambda text: scorer.similarity(_policy(text)).tolist()).items():
        curve = torch.tensor(kept)
        area = torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1), dim=1)
        found[f"{label} area"] = Value.of(area.tolist())
        for point in range(points + 1):
            place = round(point / points * (curve.shape[1] - 1))
            found[f"{label} {point / points:.1f}"] = Value.of(curve[:, place].tolist())
    return found


def function_scores(bench: Bench, **ground: Any) -> Values:
    """ATS Figure 5: the privacy score of each function of the library, and of none."""
    scorer = Ground(bench, **ground).scorer
    every = {"none": NO_POLICY, **{str(i): (i,) for i in range(50)}}
    areas = bench.each(every, lambda policy: torch.trapezoid(scorer.similarity(policy), dx=1 / 20, dim=1).tolist())
    found = {name: Value.of(area) for name, area in areas.items()}
    ranked = sorted((name for name in areas if name != "none"), key=lambda name: found[name].mean)
    return found | {f"rank of {name}": Value(1.0 + ranked.index(name)) for name in ranked}


def score_correlation(bench: Bench, policies: int, attack: str, **ground: Any) -> Values:
    """ATS Figure 2: does the score say what an attack gets? Pictures are compared with the transformed images."""
    place = Ground(bench, **ground)

    def figures(group: Sequence[Policy]) -> list[dict[str, float]]:
        """Of each policy the score and how good the attack's pictures are; more is better."""
        found = []
        for policy, (fed, images) in zip(group, place.rebuilt(group, attack), strict=True):
            seen = {"PSNR": psnr(fed.x, images), "SSIM": ssim(fed.x, images)}
            if (apart := lpips(fed.x, images)) is not None:
                seen["1 - LPIPS"] = 1 - apart
            quality = {name: float(value.mean()) for name, value in seen.items()}
            found.append({"score": place.scorer.privacy(policy), **quality})
        return found

    drawn = list(candidates(Search(candidates=policies, seed=place.seed)))
    groups = {f"policies from {i + 1}": drawn[i : i + TOGETHER] for i in range(0, len(drawn), TOGETHER)}
    rows = [row for some in bench.each(groups, figures).values() for row in some]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    scores = columns.pop("score")
    values: Values = {"policies": Value(policies), "score": Value.of(scores), "none": Value(0.0)}
    for name, levels in columns.items():
        straight, ranked = float(pearsonr(scores, levels).statistic), float(spearmanr(scores, levels).statistic)
        error = (1 - straight**2) / max(policies - 3, 1) ** 0.5  # by Fisher's transform
        values |= {f"{name} pearson": Value(straight, error), f"{name} spearman": Value(ranked, error)}
        values[name] = Value.of(levels)
    return values


def layer_similarity(
    bench: Bench, policies: Mapping[str, str], attack: str, steps: Sequence[int], **ground: Any
) -> Values:
    """ATS Figure 6: per layer, how like the rebuilt image's gradient is to the true one as the attack proceeds.

    Layers are those with weights of more than one dimension, the first two and the last two.
    """
    place = Ground(bench, **ground)
    weights = [n for n, t in place.function.parameters(place.state).items() if t.ndim > 1]
    layers = {"shallow 1": weights[0], "shallow 2": weights[1], "deep 1": weights[-2], "deep 2": weights[-1]}

    def alike(piece: tuple[str, str, int]) -> dict[str, list[float]]:
        label, text, number = piece
        ((fed, rebuilt),) = place.rebuilt([_policy(text)], attack.format(steps=number))
        true, ours = place.gradients(fed.x, fed.y), place.gradients(rebuilt, fed.y)
        return {
            f"{label} {layer} {number}": F.cosine_similarity(
                true[name].flatten(1), ours[name].flatten(1), eps=1e-12
            ).tolist()
            for layer, name in layers.items()
        }

    pieces = {f"{label} {number}": (label, text, number) for label, text in policies.items() for number in steps}
    return {name: Value.of(v) for found in bench.each(pieces, alike).values() for name, v in found.items()}


# -- LODA: what obscured images still teach ------------------------------------------------------------------------------


def obscured_accuracy(
    bench: Bench,
    trained_on: Mapping[str, str],
    models: Mapping[str, str],
    data: str,
    images: int,
    epochs: int,
    seed: int,
) -> Values:
    """LODA Tables 5 to 7: test accuracy on clean images of networks that were trained on obscured ones."""
    found = load(data, seed=seed)
    private = found.private[:images]

    @lru_cache(maxsize=1)
    def shown(text: str) -> Tensor:
        return private.x if text == "none" else _obscured(bench, text, private, found, seed)

    def right(piece: tuple[str, str]) -> float:
        text, model = piece
        return accuracy(model, Batch(shown(text), private.hard_labels), found, epochs, seed)

    pieces = {f"{label} {name}": (text, model) for label, text in trained_on.items() for name, model in models.items()}
    values: Values = {}
    for name, share in bench.each(pieces, right).items():
        # The error of a test part of this size, and two points between seeds.
        spread = 100 * (share * (1 - share) / len(found.test)) ** 0.5
        values[name] = Value(100 * share, (spread**2 + 2.0**2) ** 0.5)
    return values


def _obscured(bench: Bench, text: str, private: Batch, data: DataSet, seed: int) -> Tensor:
    method = defenses.parse(text)
    if not isinstance(method, Loda):
        raise UserError(f"'{text}' obscures no images; write loda:….")
    memory = method.equip(data.public, data.input_shape, bench.cache)
    start = memory.starts(private.x.shape, generator(seed, "start"))
    parts = zip(private.x.split(128), start.split(128), strict=True)
    obscured = torch.cat([method.obscure(x, begin, memory) for x, begin in parts])
    return (obscured * 255).round() / 255


def accuracy(model: str, train: Batch, data: DataSet, epochs: int, seed: int) -> float:
    """Of a fresh network on the clean test part, after SGD with momentum and a one-cycle rate."""
    module = build(model, input_shape=data.input_shape, num_classes=data.num_classes, seed=seed)
    mean, std, rng = data.mean.view(-1, 1, 1), data.std.view(-1, 1, 1), generator(seed, "training")
    batches = max(1, len(train) // TRAIN_BATCH)
    optimizer = torch.optim.SGD(module.parameters(), RATE, momentum=MOMENTUM, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=epochs * batches)
    module.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(train), generator=rng).chunk(batches):
            optimizer.zero_grad()
            F.cross_entropy(module((train.x[rows] - mean) / std), train.y[rows]).backward()
            optimizer.step()
            schedule.step()
    module.eval()
    with torch.no_grad():
        guess = torch.cat([module((x - mean) / std).argmax(dim=1) for x in data.test.x.split(250)])
    return float((guess == data.test.hard_labels).float().mean())


# -- Refiner: what a pixel distance says of privacy ----------------------------------------------------------------------


def perturbations(bench: Bench, data: str, images: int, noise: float, scale: float, seed: int) -> Values:
    """Refiner Figure 2: MSE of a picture to itself shifted by a pixel, with one pixel scaled up, and with noise.

    The paper's scaled pixel has an MSE of 0.106, so its factor is large; here the brightest pixel is multiplied.
    """
    found = load(data, seed=seed)
    x = found.private.x[:images]
    shifted = torch.zeros_like(x)
    shifted[..., :-1, :-1] = x[..., 1:, 1:]
    scaled = x.clone().flatten(1)
    brightest = scaled.argmax(dim=1, keepdim=True)
    scaled.scatter_(1, brightest, scale * scaled.gather(1, brightest))
    noisy = x + noise * torch.randn(x.shape, generator=generator(seed, "noise"))

    def errors(other: Tensor) -> list[float]:
        found: list[float] = (other.view_as(x) - x).square().flatten(1).mean(1).tolist()
        return found

    changed = {"shift": shifted, "scale": scaled, "noise": noisy}
    return {name: Value.of(each_error) for name, each_error in bench.each(changed, errors).items()}


# -- all of them ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """How it is taken, and the work of it, told from the number of private images and the settings."""

    take: Callable[..., Values]
    work: Callable[[int, Mapping[str, Any]], list[Work]]


def _on_ground(private: int, given: Mapping[str, Any], *, scored: int, attacks: Sequence[str] = ()) -> list[Work]:
    """The half-trained model, so many policies scored, and these attacks on the victims, each under every policy."""
    model = given["model"]
    learnt = round(given.get("share", 0.1) * private) * given["epochs"]
    policies = given["policies"] if isinstance(given.get("policies"), int) else len(given.get("policies", ()))
    return [
        Work("training", model, learnt),
        Work("gradients", model, scored * given.get("images", 0) * Search().points),
        *(Work("attacks", model, policies * given["victims"], attack) for attack in attacks),
    ]


def _of_obscuring(private: int, given: Mapping[str, Any]) -> list[Work]:
    """A step of obscuring is a pass through the public network, which is about as large as `cnn`."""
    images = min(private, given["images"])
    methods = [defenses.parse(text) for text in given["trained_on"].values()]
    crafted = sum(images * method.steps for method in methods if isinstance(method, Loda))
    learnt = len(methods) * images * given["epochs"]
    return [Work("obscuring", "cnn", crafted), *(Work("training", m, learnt) for m in given["models"].values())]


MEASURES = {
    "gradient_similarity": Measurement(gradient_similarity, lambda n, g: _on_ground(n, g, scored=len(g["policies"]))),
    "function_scores": Measurement(function_scores, lambda n, g: _on_ground(n, g, scored=51)),
    "score_correlation": Measurement(
        score_correlation, lambda n, g: _on_ground(n, g, scored=g["policies"], attacks=[g["attack"]])
    ),
    "layer_similarity": Measurement(
        layer_similarity,
        lambda n, g: _on_ground(n, g, scored=0, attacks=[g["attack"].format(steps=steps) for steps in g["steps"]]),
    ),
    "obscured_accuracy": Measurement(obscured_accuracy, _of_obscuring),
    "perturbations": Measurement(perturbations, lambda n, g: []),
}
