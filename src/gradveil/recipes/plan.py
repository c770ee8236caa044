"""What a recipe will do and about how long it takes, from its settings alone: nothing is run, images are only counted.

A step of matching, a gradient and a step of training are timed on the networks of the recipe, in processor time; a GPU
is faster.
"""

import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from gradveil import attacks, defenses, models
from gradveil.attacks.budget import Budget, Workload
from gradveil.auditing.work import one_thread
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.task import Task
from gradveil.core.types import Shape
from gradveil.data import load
from gradveil.data.source import resolve
from gradveil.data.split import sizes
from gradveil.defenses.batch.refiner.defense import Refiner
from gradveil.defenses.gradient.dcs2 import DCS2
from gradveil.federation import FederationPlan
from gradveil.recipes.measures import WorkKind
from gradveil.recipes.recipe import ATTACK_METRICS, TRAINING_METRICS, Scale, Scaled

BATCH, TRAIN_BATCH = 4, 16  # images that work is timed on
SHAPES = {
    **dict.fromkeys(("mnist", "mnist-5k", "fashion-mnist"), (1, 28, 28)),
    **dict.fromkeys(("olivetti", "mednist"), (1, 64, 64)),
}
PHOTOGRAPH = (3, 32, 32)


@dataclass(frozen=True)
class DataFacts:
    """What a plan has to know of a data set."""

    shape: Shape
    classes: int
    private: int
    public: int


@dataclass(frozen=True)
class PlannedWork:
    """One line of a plan."""

    text: str
    cells: int
    iterations: int  # of attacks, over all victims; of trainings, images
    seconds: float


def make_plan(scaled: Scaled, *, timed: bool = True) -> list[PlannedWork]:
    """One line per audit or measurement and kind of work."""
    lines = []

    def add(text: str, cells: int, count: int, kind: WorkKind, model: str, facts: DataFacts, images: int = 1) -> None:
        seconds = count * images * _seconds_per_image(kind, model, facts) if timed else 0.0
        lines.append(PlannedWork(text, cells, count, seconds))

    for name, spec in scaled.specs.items():
        cells = {cell for cell in scaled.wanted() if cell.audit == name}
        updates = {cell.defense for cell in cells if cell.figure not in TRAINING_METRICS}
        pairs = {(cell.defense, cell.attack) for cell in cells if cell.figure in ATTACK_METRICS}
        trained = {cell.defense for cell in cells if cell.figure in TRAINING_METRICS}
        title, facts = f"{name}: {spec.model} on {spec.data}", _facts(str(spec.data), scaled.scale)
        if updates and spec.trained_epochs:  # each defense is attacked on the model that was trained under it
            images = len(updates) * spec.trained_epochs * facts.private
            add(f"{title}, trainings of the attacked model", len(updates), images, "training", spec.model, facts)
        if updates:
            lines.append(PlannedWork(f"{title}, updates of {spec.victims} victims", len(updates), 0, 1.0 * len(updates)))
        if pairs:
            victims = spec.victims * spec.updates
            steps = sum(victims * _steps(attack, spec.model, facts, spec.budget) for _, attack in pairs)
            add(f"{title}, attacks", len(pairs), steps, "attacks", spec.model, facts, spec.batch_size)
        if trained and (training := spec.utility):
            plan = training.plan(spec.local_training, spec.batch_size, facts.private, spec.seed)
            model, each = training.model or spec.model, training.seeds * plan.rounds * _images_per_round(plan)
            absent = plan.num_defended < plan.clients  # without a defense it is also run without the defended clients
            images = each * plan.clients * (len(trained) + absent)
            add(f"{title}, trainings of {model}", len(trained), images, "training", model, facts)
            crafted = sum(_crafting_steps(defense) for defense in trained) * each * plan.num_defended
            if crafted:
                add(f"{title}, crafting in these trainings", len(trained), crafted, "crafting", model, facts)
    for name in dict.fromkeys(cell.measure for cell in scaled.wanted() if cell.measure):
        measurement = scaled.measures[name]
        facts = _facts(measurement.data, scaled.scale)
        workloads = [work for work in measurement.work(facts.private) if work.images]
        for work in workloads:
            steps = _steps(work.attack, work.model, facts, "standard") if work.attack else 1
            text = f"{name}: {work.model} on {measurement.data}, {work.kind}"
            add(text, 1, work.images * steps, work.kind, work.model, facts)
        if not workloads:
            lines.append(PlannedWork(f"{name}: {measurement.kind} on {measurement.data}", 1, 0, 1.0))
    return lines


def _images_per_round(plan: FederationPlan) -> int:
    """Images of a client that a gradient is computed of in a round."""
    held = plan.images_per_client or 0
    return min(plan.batch_size or held, held) if plan.fedsgd else held * plan.local_epochs


def _crafting_steps(defense: str) -> int:
    """Gradients of gradients that a defense computes for every batch."""
    return sum(part.steps for part in defenses.parse(defense).parts if isinstance(part, DCS2 | Refiner))


@lru_cache(maxsize=64)
def _facts(data: str, scale: Scale) -> DataFacts:
    """At scale cpu from the files at hand; otherwise, and without files, from what the publisher says."""
    source = resolve(data)
    named, options = source.named, source.options
    if named is None or (scale == "cpu" and named.available()):
        loaded = load(data)
        return DataFacts(loaded.input_shape, loaded.num_classes, len(loaded.private), len(loaded.public))
    channels, height, width = SHAPES.get(named.name, PHOTOGRAPH)
    shape = (channels, (options.size or height) + 2 * options.pad, (options.size or width) + 2 * options.pad)
    private, public, _ = sizes(named.images, options, test_published=True, name=data)
    return DataFacts(shape, named.num_classes, private, public)


def _steps(text: str, model: str, facts: DataFacts, budget: Budget) -> int:
    """Iterations of an attack on one victim, all its restarts together."""
    task = Task(_function(model, facts), facts.shape, facts.classes, torch.zeros(1), torch.ones(1))
    cost = attacks.parse(text).cost(Workload(task, budget, public_images=facts.public))
    return cost.iterations * cost.rows


@lru_cache(maxsize=64)
def _function(model: str, facts: DataFacts) -> ModelFunction:
    return ModelFunction(models.build(model, input_shape=facts.shape, num_classes=facts.classes))


@lru_cache(maxsize=64)
def _seconds_per_image(kind: WorkKind, model: str, facts: DataFacts) -> float:
    """A gradient and the gradient of its distance, of single images ("attacks") or of a mini-batch ("crafting"), a gradient
    per image, or a gradient of a mini-batch."""
    function, count = _function(model, facts), BATCH if kind in ("attacks", "gradients") else TRAIN_BATCH
    state, x, y = function.state(), torch.full((count, *facts.shape), 0.5), torch.zeros(count, dtype=torch.long)

    def match() -> None:
        candidates = x[:, None].clone().requires_grad_()
        updates = function.updates(state, candidates, y[:, None], LocalTraining())
        torch.autograd.grad(torch.stack([(g**2).sum() for g in updates.values()]).sum(), candidates)

    def craft() -> None:
        images = x.clone().requires_grad_()
        with torch.enable_grad():
            gradient = function.gradient(state, images, y, differentiable=True)
            torch.autograd.grad(torch.stack([(g**2).sum() for g in gradient.values()]).sum(), images)

    work: dict[WorkKind, Callable[[], object]] = {
        "crafting": craft,
        "training": lambda: function.gradient(state, x, y),
        "obscuring": lambda: function.gradient(state, x, y),
        "gradients": lambda: function.gradients(state, x[:, None], y[:, None]),
        "attacks": match,
    }
    with one_thread():  # the first of two runs warms up
        return min(timeit.repeat(work[kind], timer=time.process_time, number=1, repeat=2)) / count
