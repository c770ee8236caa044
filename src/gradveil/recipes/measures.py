"""Measurements for figures that show neither attacks nor accuracies of audits.

A recipe names a measurement by `kind`; the other keys are its settings. A measurement returns named values. It works in
named pieces, so that a stopped run resumes with the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR

from gradveil import attacks, defenses
from gradveil.client import prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Observation, Sighting, observe
from gradveil.core.randomness import Stream, generator
from gradveil.core.types import Batch, Tensors
from gradveil.data import DataSet, load
from gradveil.defenses.base import Setup
from gradveil.defenses.data.ats.defense import Draw, Policy, parse_policies, transform, write_policy
from gradveil.defenses.data.ats.search import NO_POLICY, Scorer, Search, candidates, half_trained
from gradveil.defenses.data.loda.defense import Loda
from gradveil.metrics import lpips, psnr, ssim
from gradveil.models import build
from gradveil.recipes.bench import Bench
from gradveil.recipes.claims import Value, of_trainings

Values = dict[str, Value]
WorkKind = Literal["training", "obscuring", "gradients", "attacks", "crafting"]

FUNCTIONS = 50  # in the library of ATS
POLICIES_AT_ONCE = 20  # their victims are attacked together
LR, MOMENTUM, DECAY = 0.05, 0.9, 5e-4  # of LODA's retraining
TRAIN_BATCH, PUBLISHED_BATCH, PADDED = 50, 128, 4  # a smaller batch for fewer images


@dataclass(frozen=True)
class MeasurementWork:
    """Work of a measurement, for a plan: images to learn from, to obscure, to take the gradient of, or to attack."""

    kind: WorkKind
    model: str
    images: int
    attack: str = ""


class Measurement(BaseModel, extra="forbid", frozen=True):
    """The settings of a measurement, and how it is taken."""

    kind: str
    data: str
    seed: int

    def take(self, bench: Bench) -> Values:
        raise NotImplementedError

    def work(self, private: int) -> list[MeasurementWork]:
        """What there is to do, from the number of private images."""
        return []


# -- ATS: gradients on the line from noise to an image -----------------------------------------------------------------


class AtsMeasurement(Measurement):
    """A measurement on a half-trained model, as the search of ATS uses one."""

    model: str
    epochs: int  # 0: the untrained model
    images: int = 2  # that policies are scored on
    victims: int = 1
    share: float = 0.1  # of the private images, to train on

    def _workloads(self, private: int, scored: int, attacked: int = 0, attacks: Sequence[str] = ()) -> list[MeasurementWork]:
        """The training, the scores of so many policies, and the attacks under so many policies."""
        return [
            MeasurementWork("training", self.model, round(self.share * private) * self.epochs),
            MeasurementWork("gradients", self.model, scored * self.images * Search().points),
            *(MeasurementWork("attacks", self.model, attacked * self.victims, attack) for attack in attacks),
        ]


class HalfTrained:
    """A half-trained model, images to score policies on, and victims to attack."""

    def __init__(self, settings: AtsMeasurement, bench: Bench, *, control: str = "none", rounds: int = Search().rounds):
        """`control`: the defense in place of a policy; `rounds`: draws per accuracy score."""
        self.seed, self.data, self.control = settings.seed, load(settings.data, seed=settings.seed), control
        data, count = self.data, settings.images
        module = build(settings.model, input_shape=data.input_shape, num_classes=data.num_classes, seed=self.seed)
        self.task = data.task(ModelFunction(module))
        epochs = max(settings.epochs, 1)
        search = Search(images=count, epochs=epochs, share=settings.share, rounds=rounds, seed=self.seed)
        untrained = self.state = self.task.model.state()
        if settings.epochs:
            self.state = half_trained(self.task, data.private, search, bench.cache, bench.progress)
        order = torch.randperm(len(data.test), generator=generator(self.seed, "ats-images"))
        scored, self.victims = data.test[order[:count]], data.test[order[count:][: settings.victims]]
        tensors = {"images": scored.x, "labels": scored.hard_labels}
        tensors |= {f"fresh.{n}": t for n, t in untrained.items()} | {f"trained.{n}": t for n, t in self.state.items()}
        self.scorer = Scorer(self.task, tensors, search)

    def observe(self, policy: Policy) -> tuple[Batch, list[Observation]]:
        """The victims as they were fed under a policy, and what a server sees of each."""
        defense = defenses.parse(f"ats:policy={write_policy((policy,))}" if policy else self.control)
        setup = Setup(self.task, self.state, self.data.private, seed=self.seed)
        client = prepare_client(defense, LocalTraining(), setup)
        rounds = [client.round(self.state, self.victims[i : i + 1], i) for i in range(len(self.victims))]
        observations = [observe(self.task, [Sighting(self.state, u)], level="paper", trace=t) for u, t in rounds]
        fed = [trace.fed for _, trace in rounds]
        return Batch(torch.cat([b.x for b in fed]), torch.cat([b.y for b in fed])), observations

    def attack(self, policies: Sequence[Policy], attack: str) -> list[tuple[Batch, Tensor]]:
        """Per policy the victims as they were fed, and their reconstructions; all are attacked at once."""
        fed, observations = zip(*map(self.observe, policies), strict=True)
        answers = attacks.parse(attack)([one for group in observations for one in group], seed=self.seed)
        images = torch.cat([answer.images for answer in answers])
        return list(zip(fed, images.split([len(batch) for batch in fed]), strict=True))

    def gradients(self, x: Tensor, y: Tensor) -> Tensors:
        with torch.no_grad():
            return self.task.model.gradients(self.state, self.task.normalize(x)[:, None], y[:, None])


def _policy(text: str) -> Policy:
    return NO_POLICY if text == "none" else parse_policies(text)[0]


class GradientSimilarity(AtsMeasurement):
    """ATS Figure 1: similarity of gradients on the line from noise (0) to the image (1), and the area under it."""

    kind: Literal["gradient_similarity"]
    policies: dict[str, str]
    points: int

    def take(self, bench: Bench) -> Values:
        scorer = HalfTrained(self, bench).scorer
        curves = bench.each(self.policies, lambda text: scorer.similarity(_policy(text)).tolist())
        values: Values = {}
        for label, stored in curves.items():
            curve = torch.tensor(stored)  # images × points
            last = curve.shape[1] - 1
            values[f"{label} area"] = Value.of(torch.trapezoid(curve, dx=1 / last, dim=1).tolist())
            for place in (point / self.points for point in range(self.points + 1)):
                values[f"{label} {place:.1f}"] = Value.of(curve[:, round(place * last)].tolist())
        return values

    def work(self, private: int) -> list[MeasurementWork]:
        return self._workloads(private, len(self.policies))


class FunctionScores(AtsMeasurement):
    """ATS Figure 5: the privacy score of each function of the library, and of none."""

    kind: Literal["function_scores"]

    def take(self, bench: Bench) -> Values:
        scorer = HalfTrained(self, bench).scorer
        policies: dict[str, Policy] = {"none": NO_POLICY, **{str(i): (i,) for i in range(FUNCTIONS)}}
        areas = bench.each(policies, lambda p: torch.trapezoid(scorer.similarity(p), dx=1 / 20, dim=1).tolist())
        values = {name: Value.of(area) for name, area in areas.items()}
        ranked = sorted((name for name in areas if name != "none"), key=lambda name: values[name].mean)
        return values | {f"rank of {name}": Value(1.0 + ranked.index(name)) for name in ranked}

    def work(self, private: int) -> list[MeasurementWork]:
        return self._workloads(private, 1 + FUNCTIONS)


class ScoreCorrelation(AtsMeasurement):
    """ATS Figure 2: the correlation of the score with what an attack gets, compared with the transformed images.

    A PSNR is the higher the less contrast an image has, whatever an attack gets, and policies change the contrast. So
    beside the plain correlation there is the partial one, given the quality that a flat image of the mean brightness has.
    """

    kind: Literal["score_correlation"]
    policies: int
    attack: str

    def take(self, bench: Bench) -> Values:
        model = HalfTrained(self, bench)

        def measure(group: Sequence[Policy]) -> list[dict[str, float]]:
            """Per policy the score, the quality of the reconstructions and of flat guesses; more is better."""
            rows = []
            for policy, (fed, images) in zip(group, model.attack(group, self.attack), strict=True):
                flat = fed.x.mean(dim=(2, 3), keepdim=True).expand_as(fed.x)
                means = {name: float(value.mean()) for name, value in _quality(fed.x, images).items()}
                guessed = {f"flat {name}": float(value.mean()) for name, value in _quality(fed.x, flat).items()}
                rows.append({"score": model.scorer.privacy(policy), **means, **guessed})
            return rows

        drawn = candidates(Search(candidates=self.policies, seed=self.seed))
        starts = range(0, len(drawn), POLICIES_AT_ONCE)
        groups = {f"policies from {i + 1}": drawn[i : i + POLICIES_AT_ONCE] for i in starts}
        rows = [row for group in bench.each(groups, measure).values() for row in group]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        from scipy.stats import pearsonr, spearmanr  # takes two seconds to import

        scores = columns.pop("score")
        values: Values = {"policies": Value(self.policies), "score": Value.of(scores), "none": Value(0.0)}
        for name in [name for name in columns if not name.startswith("flat ")]:
            numbers, flat = columns[name], columns[f"flat {name}"]
            pearson, spearman = (float(f(scores, numbers).statistic) for f in (pearsonr, spearmanr))
            partial = float(pearsonr(_without(scores, flat), _without(numbers, flat)).statistic)
            correlations = {"pearson": pearson, "spearman": spearman, "partial": partial}
            values |= {f"{name} {kind}": Value(r, _error(r, self.policies)) for kind, r in correlations.items()}
            values[name] = Value.of(numbers)
        return values

    def work(self, private: int) -> list[MeasurementWork]:
        return self._workloads(private, self.policies, self.policies, [self.attack])


def _quality(truth: Tensor, guess: Tensor) -> Tensors:
    quality = {"PSNR": psnr(truth, guess), "SSIM": ssim(truth, guess)}
    distance = lpips(truth, guess)
    return quality if distance is None else quality | {"1 - LPIPS": 1 - distance}


def _without(numbers: Sequence[float], other: Sequence[float]) -> list[float]:
    """What is left of numbers after a straight line in others."""
    y, x = (torch.tensor(values, dtype=torch.float64) for values in (numbers, other))
    x = x - x.mean()
    slope = (x @ y) / (x @ x).clamp_min(1e-300)
    return (y - y.mean() - slope * x).tolist()


def _error(correlation: float, count: int) -> float:
    """By Fisher's transform."""
    return float((1 - correlation**2) / max(count - 3, 1) ** 0.5)


class LayerSimilarity(AtsMeasurement):
    """ATS Figure 6: per layer, how similar the gradient of the rebuilt image is to the true one after so many steps.

    Layers are those with weights of more than one dimension: the first two and the last two.
    """

    kind: Literal["layer_similarity"]
    policies: dict[str, str]
    attack: str  # with {steps}
    steps: tuple[int, ...]

    def take(self, bench: Bench) -> Values:
        model = HalfTrained(self, bench)
        weights = [n for n, t in model.task.model.parameters(model.state).items() if t.ndim > 1]
        layers = {"shallow 1": weights[0], "shallow 2": weights[1], "deep 1": weights[-2], "deep 2": weights[-1]}

        def compare(piece: tuple[str, str, int]) -> dict[str, list[float]]:
            label, text, steps = piece
            ((fed, rebuilt),) = model.attack([_policy(text)], self.attack.format(steps=steps))
            truth, ours = (model.gradients(x, fed.y) for x in (fed.x, rebuilt))
            pairs = {layer: (truth[name].flatten(1), ours[name].flatten(1)) for layer, name in layers.items()}
            cosines = {layer: F.cosine_similarity(a, b, eps=1e-12).tolist() for layer, (a, b) in pairs.items()}
            return {f"{label} {layer} {steps}": cosine for layer, cosine in cosines.items()}

        pieces = {f"{label} {n}": (label, text, n) for label, text in self.policies.items() for n in self.steps}
        results = bench.each(pieces, compare).values()
        return {name: Value.of(cosines) for result in results for name, cosines in result.items()}

    def work(self, private: int) -> list[MeasurementWork]:
        attacks = [self.attack.format(steps=steps) for steps in self.steps]
        return self._workloads(private, 0, len(self.policies), attacks)


# -- LODA: what obscured images still teach ----------------------------------------------------------------------------


class ObscuredAccuracy(Measurement):
    """LODA Tables 5 to 7: test accuracy on clean images of networks that were trained on obscured ones.

    `published_accuracy` has the batch, the learning rates, the crop and the flip of the public code; the other kind suits
    few images.
    """

    kind: Literal["obscured_accuracy", "published_accuracy"]
    trained_on: dict[str, str]  # defenses by label
    models: dict[str, str]
    images: int
    epochs: int
    seeds: int = 5  # trainings; the n-th of every row have the same weights at first and the same mini-batches

    def take(self, bench: Bench) -> Values:
        data = load(self.data, seed=self.seed)
        private = data.private[: self.images]

        @lru_cache(maxsize=1)
        def obscured(defense: str) -> Tensor:
            return private.x if defense == "none" else _obscured(bench, defense, private, data, self.seed)

        def measure(piece: tuple[str, str]) -> list[float]:
            defense, model = piece
            train, published = Batch(obscured(defense), private.hard_labels), self.kind == "published_accuracy"
            seeds = range(self.seed, self.seed + self.seeds)
            return [accuracy(model, train, data, self.epochs, seed, published=published) for seed in seeds]

        labels = [(label, name) for label in self.trained_on for name in self.models]
        pieces = {f"{label} {name}": (self.trained_on[label], self.models[name]) for label, name in labels}
        return {name: of_trainings(shares) for name, shares in bench.each(pieces, measure).items()}

    def work(self, private: int) -> list[MeasurementWork]:
        """A step of obscuring is one pass through the public network, which is about as large as `cnn`."""
        images, methods = min(private, self.images), [defenses.parse(text) for text in self.trained_on.values()]
        crafted = sum(images * method.steps for method in methods if isinstance(method, Loda))
        learned = len(methods) * images * self.epochs * self.seeds
        return [
            MeasurementWork("obscuring", "cnn", crafted),
            *(MeasurementWork("training", m, learned) for m in self.models.values()),
        ]


def _obscured(bench: Bench, text: str, private: Batch, data: DataSet, seed: int) -> Tensor:
    method = defenses.parse(text)
    if not isinstance(method, Loda):
        raise UserError(f"'{text}' obscures no images; write loda:….")
    memory = method.equip(data.public, data.input_shape, bench.cache)
    starts = memory.starts(private.x.shape, generator(seed, "start"))
    chunks = zip(private.x.split(128), starts.split(128), strict=True)
    obscured = torch.cat([method.obscure(x, start, memory) for x, start in chunks])
    return (obscured * 255).round() / 255


def accuracy(model: str, train: Batch, data: DataSet, epochs: int, seed: int, *, published: bool = False) -> float:
    """The accuracy of a new network on the clean test part, after SGD with momentum.

    The learning rate has one cycle; that of the public code falls to a tenth after half and after three quarters.
    """
    module = build(model, input_shape=data.input_shape, num_classes=data.num_classes, seed=seed)
    task, rng = data.task(ModelFunction(module)), generator(seed, "training")
    batches = -(-len(train) // PUBLISHED_BATCH) if published else max(1, len(train) // TRAIN_BATCH)
    steps = epochs * batches
    optimizer = torch.optim.SGD(module.parameters(), LR, momentum=MOMENTUM, weight_decay=DECAY)
    schedule = _published(optimizer, steps) if published else OneCycleLR(optimizer, LR, total_steps=steps)
    module.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(train), generator=rng).chunk(batches):
            optimizer.zero_grad()
            x = _cropped_and_flipped(train.x[rows], rng) if published else train.x[rows]
            F.cross_entropy(module(task.normalize(x)), train.y[rows]).backward()
            optimizer.step()
            schedule.step()
    module.eval()
    with torch.no_grad():
        classes = torch.cat([module(task.normalize(x)).argmax(dim=1) for x in data.test.x.split(250)])
    return float((classes == data.test.hard_labels).float().mean())


def _published(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """Of 200 epochs at the 100th and the 150th."""
    return MultiStepLR(optimizer, [steps // 2, steps * 3 // 4])


def _cropped_and_flipped(images: Tensor, rng: Stream) -> Tensor:
    nothing = (NO_POLICY,)
    return transform(images, nothing, Draw.make(len(images), nothing, PADDED, True, rng), PADDED)


# -- Refiner: what a pixel distance says of privacy --------------------------------------------------------------------


class Perturbations(Measurement):
    """Refiner Figure 2: MSE between an image and itself shifted by a pixel, with one pixel scaled up, and with noise.

    The paper's scaled pixel has an MSE of 0.106, so its factor is large; here the brightest pixel is multiplied.
    """

    kind: Literal["perturbations"]
    images: int
    noise: float
    scale: float

    def take(self, bench: Bench) -> Values:
        x = load(self.data, seed=self.seed).private.x[: self.images]
        shifted = torch.zeros_like(x)
        shifted[..., :-1, :-1] = x[..., 1:, 1:]
        scaled = x.clone().flatten(1)
        brightest = scaled.argmax(dim=1, keepdim=True)
        scaled.scatter_(1, brightest, self.scale * scaled.gather(1, brightest))
        noisy = x + self.noise * torch.randn(x.shape, generator=generator(self.seed, "noise"))
        changed = {"shift": shifted, "scale": scaled.view_as(x), "noise": noisy}
        errors = bench.each(changed, lambda other: (other - x).square().flatten(1).mean(1).tolist())
        return {name: Value.of(each) for name, each in errors.items()}
