"""What some figures show beside attacks and accuracies.

A measure is named in a recipe by `kind`; the rest of what stands there is its arguments. It gives named values, each
with its spread, and may keep costly things in `cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from gradveil import attacks, defenses
from gradveil.client import Client
from gradveil.data import DataSet, load
from gradveil.defenses.data.ats import Policy, parse_policies, write_policy
from gradveil.defenses.data.ats_search import NO_POLICY, Scorer, Search, candidates, half_trained
from gradveil.defenses.data.loda import Loda
from gradveil.errors import UserError
from gradveil.gradients import ModelFunction
from gradveil.metrics import psnr
from gradveil.models import build
from gradveil.recipes.claims import Value
from gradveil.types import Batch, LocalTraining, Sighting, Tensors, generator, observe

Values = dict[str, Value]

RATE, MOMENTUM, DECAY, TRAIN_BATCH = 0.05, 0.9, 5e-4, 50  # of LODA's retraining, the batch for fewer images


# -- ATS: gradients on the way from noise to an image --------------------------------------------------------------------


class Ground:
    """A half-trained model, images to score policies on and others to attack, as the search of ATS has them."""

    def __init__(
        self,
        data: str,
        model: str,
        epochs: int,
        seed: int,
        cache: Path,
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
            self.state = half_trained(
                self.module, found.private, mean=found.mean, std=found.std, search=self.search, folder=cache
            )
        order = torch.randperm(len(found.test), generator=generator(seed, "ats-images"))
        scored, self.victims = found.test[order[:images]], found.test[order[images:][:victims]]
        tensors = {"images": scored.x, "labels": scored.hard_labels, "mean": found.mean, "std": found.std}
        tensors |= {f"fresh.{n}": t for n, t in fresh.items()} | {f"trained.{n}": t for n, t in self.state.items()}
        self.scorer = Scorer(self.module, tensors, self.search)

    def rebuilt(self, policy: Policy, attack: str) -> tuple[Tensor, Tensor, Tensor]:
        """The images that were fed under a policy, their labels, and what the attack makes of their gradients."""
        data, how = self.data, defenses.parse(f"ats:policy={write_policy((policy,))}" if policy else "none")
        client = Client(
            self.function,
            how,
            LocalTraining(),
            state=self.state,
            private=data.private,
            public=None,
            num_classes=data.num_classes,
            mean=data.mean,
            std=data.std,
            seed=self.seed,
        )
        sent = [client.round(self.state, self.victims[i : i + 1], i) for i in range(len(self.victims))]
        seen = [
            observe(
                self.function,
                [Sighting(self.state, update)],
                input_shape=data.input_shape,
                num_classes=data.num_classes,
                mean=data.mean,
                std=data.std,
                level="paper",
                trace=trace,
            )
            for update, trace in sent
        ]
        found = attacks.parse(attack)(seen, seed=self.seed)
        fed = torch.cat([trace.fed.x for _, trace in sent]), torch.cat([trace.fed.y for _, trace in sent])
        return *fed, torch.cat([answer.images for answer in found])

    def gradients(self, x: Tensor, y: Tensor) -> Tensors:
        data = self.data
        pixels = (x - data.mean.view(-1, 1, 1)) / data.std.view(-1, 1, 1)
        with torch.no_grad():
            return self.function.gradients(self.state, pixels[:, None], y[:, None])


def _policy(text: str) -> Policy:
    return NO_POLICY if text == "none" else parse_policies(text)[0]


def gradient_similarity(policies: Mapping[str, str], points: int, **ground: Any) -> Values:
    """ATS Figure 1: likeness of gradients on the way from noise (0) to the image (1), and the area under it."""
    scorer = Ground(**ground).scorer
    found: Values = {}
    for label, text in policies.items():
        curve = scorer.similarity(_policy(text))
        area = torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1), dim=1)
        found[f"{label} area"] = Value.of(area.tolist())
        for point in range(points + 1):
            place = round(point / points * (curve.shape[1] - 1))
            found[f"{label} {point / points:.1f}"] = Value.of(curve[:, place].tolist())
    return found


def function_scores(**ground: Any) -> Values:
    """ATS Figure 5: the privacy score of each function of the library, and of none."""
    scorer = Ground(**ground).scorer
    every = {"none": NO_POLICY, **{str(i): (i,) for i in range(50)}}
    areas = {name: torch.trapezoid(scorer.similarity(p), dx=1 / 20, dim=1) for name, p in every.items()}
    found = {name: Value.of(area.tolist()) for name, area in areas.items()}
    ranked = sorted((name for name in areas if name != "none"), key=lambda name: found[name].mean)
    return found | {f"rank of {name}": Value(1.0 + ranked.index(name)) for name in ranked}


def score_correlation(policies: int, attack: str, **ground: Any) -> Values:
    """ATS Figure 2: does the score say what an attack gets? PSNR is against the transformed images."""
    place = Ground(**ground)
    scores, levels = [], []
    for policy in candidates(Search(candidates=policies, seed=place.seed)):
        scores.append(place.scorer.privacy(policy))
        fed, _, found = place.rebuilt(policy, attack)
        levels.append(float(psnr(fed, found).mean()))
    # Fisher's transform gives the correlation's own standard error.
    straight, ranked = float(pearsonr(scores, levels).statistic), float(spearmanr(scores, levels).statistic)
    error = (1 - straight**2) / max(policies - 3, 1) ** 0.5
    return {
        "pearson": Value(straight, error),
        "spearman": Value(ranked, error),
        "policies": Value(policies),
        "psnr": Value.of(levels),
        "score": Value.of(scores),
    }


def layer_similarity(policies: Mapping[str, str], attack: str, steps: Sequence[int], **ground: Any) -> Values:
    """ATS Figure 6: per layer, how like the rebuilt image's gradient is to the true one as the attack proceeds.

    Layers are those with weights of more than one dimension, the first two and the last two.
    """
    place = Ground(**ground)
    weights = [n for n, t in place.function.parameters(place.state).items() if t.ndim > 1]
    layers = {"shallow 1": weights[0], "shallow 2": weights[1], "deep 1": weights[-2], "deep 2": weights[-1]}
    found: Values = {}
    for label, text in policies.items():
        for number in steps:
            x, y, rebuilt = place.rebuilt(_policy(text), attack.format(steps=number))
            true, ours = place.gradients(x, y), place.gradients(rebuilt, y)
            for layer, name in layers.items():
                alike = F.cosine_similarity(true[name].flatten(1), ours[name].flatten(1), eps=1e-12)
                found[f"{label} {layer} {number}"] = Value.of(alike.tolist())
    return found


# -- LODA: what obscured images still teach ------------------------------------------------------------------------------


def obscured_accuracy(
    trained_on: Mapping[str, str],
    models: Mapping[str, str],
    data: str,
    images: int,
    epochs: int,
    seed: int,
    cache: Path,
) -> Values:
    """LODA Tables 5 to 7: test accuracy on clean images of networks that were trained on obscured ones."""
    found = load(data, seed=seed)
    private = found.private[:images]
    values: Values = {}
    for label, text in trained_on.items():
        x = private.x if text == "none" else _obscured(text, private, found, seed, cache)
        for name, model in models.items():
            right = accuracy(model, Batch(x, private.hard_labels), found, epochs, seed)
            # The error of a test part of this size, and two points between seeds.
            spread = 100 * (right * (1 - right) / len(found.test)) ** 0.5
            values[f"{label} {name}"] = Value(100 * right, (spread**2 + 2.0**2) ** 0.5)
    return values


def _obscured(text: str, private: Batch, data: DataSet, seed: int, cache: Path) -> Tensor:
    method = defenses.parse(text)
    if not isinstance(method, Loda):
        raise UserError(f"'{text}' obscures no images; write loda:….")
    memory = method.equip(data.public, data.input_shape, cache)
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


def perturbations(data: str, images: int, noise: float, scale: float, seed: int, cache: Path) -> Values:
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

    def mse(other: Tensor) -> Value:
        return Value.of((other.view_as(x) - x).square().flatten(1).mean(1).tolist())

    return {"shift": mse(shifted), "scale": mse(scaled), "noise": mse(noisy)}


MEASURES: dict[str, Callable[..., Values]] = {
    "gradient_similarity": gradient_similarity,
    "function_scores": function_scores,
    "score_correlation": score_correlation,
    "layer_similarity": layer_similarity,
    "obscured_accuracy": obscured_accuracy,
    "perturbations": perturbations,
}
