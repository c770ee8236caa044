"""What a recipe will do and about how long it takes, from its settings alone: nothing is run, data are only counted.

An iteration of matching, a gradient and a training step are timed on the recipe's own networks, by the processor's
time; a GPU is quicker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from gradveil import attacks, models
from gradveil.attacks.base import Attack, Budget, Target
from gradveil.attacks.budget import steps_for
from gradveil.attacks.matching.ig import VARIANTS
from gradveil.auditing.cells import one_thread
from gradveil.core.gradients import ModelFunction
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.task import Task
from gradveil.core.types import LocalTraining
from gradveil.data import load
from gradveil.data.source import resolve
from gradveil.data.split import sizes
from gradveil.recipes.measures import MEASURES
from gradveil.recipes.recipe import ATTACK_METRICS, TRAINING_METRICS, Scale, Scaled

STEPS = 4000  # of an attack that does not say
TOGETHER = 4  # victims that an iteration is timed on
SHAPES = {
    **dict.fromkeys(("mnist", "mnist-5k", "fashion-mnist"), (1, 28, 28)),
    **dict.fromkeys(("olivetti", "mednist"), (1, 64, 64)),
}
PHOTOGRAPH = (3, 32, 32)

Clock = Callable[[str, "Facts"], float]


@dataclass(frozen=True)
class Facts:
    """What a plan has to know of a data set."""

    shape: tuple[int, int, int]
    classes: int
    private: int


@dataclass(frozen=True)
class Line:
    """One piece of work of a plan."""

    what: str
    cells: int
    iterations: int  # of attacks, over all victims; of trainings, images
    seconds: float


def make_plan(scaled: Scaled, *, timed: bool = True) -> list[Line]:
    """A line for every audit and kind of work, then for every measure and kind of work."""
    lines = []

    def add(what: str, cells: int, count: int, clock: Clock, model: str, facts: Facts, images: int = 1) -> None:
        lines.append(Line(what, cells, count, count * images * clock(model, facts) if timed else 0.0))

    for name, spec in scaled.specs.items():
        cells = {cell for cell in scaled.wanted() if cell.audit == name}
        updates = {cell.defense for cell in cells if cell.figure not in TRAINING_METRICS}
        pairs = {(cell.defense, cell.attack) for cell in cells if cell.figure in ATTACK_METRICS}
        trained = {cell.defense for cell in cells if cell.figure in TRAINING_METRICS}
        about, facts = f"{name}: {spec.model} on {spec.data}", _facts(str(spec.data), scaled.scale)
        if updates and spec.trained_epochs:  # each defense attacks the model that was trained under it
            images = len(updates) * spec.trained_epochs * facts.private
            add(f"{about}, trainings of the attacked model", len(updates), images, _train_seconds, spec.model, facts)
        if updates:
            lines.append(Line(f"{about}, updates of {spec.victims} victims", len(updates), 0, 1.0 * len(updates)))
        if pairs:
            victims = spec.victims * spec.updates
            counted = sum(victims * _steps(attack, spec.model, facts, spec.budget) for _, attack in pairs)
            add(f"{about}, attacks", len(pairs), counted, _match_seconds, spec.model, facts, spec.batch_size)
        if trained and spec.utility:
            how = spec.utility
            images = len(trained) * how.rounds * how.clients * how.images
            add(f"{about}, trainings of {how.model}", len(trained), images, _train_seconds, how.model, facts)
    for name in dict.fromkeys(cell.measure for cell in scaled.wanted() if cell.measure):
        given = scaled.measures[name]
        facts = _facts(str(given["data"]), scaled.scale)
        works = [work for work in MEASURES[given["kind"]].work(facts.private, given) if work.images]
        for work in works:
            steps = _steps(work.attack, work.model, facts, "standard") if work.attack else 1
            what = f"{name}: {work.model} on {given['data']}, {work.kind}"
            add(what, 1, work.images * steps, CLOCKS[work.kind], work.model, facts)
        if not works:
            lines.append(Line(f"{name}: {given['kind']} on {given['data']}", 1, 0, 1.0))
    return lines


@lru_cache(maxsize=64)
def _facts(data: str, scale: Scale) -> Facts:
    """At scale cpu of the files at hand; otherwise, and where there are none, of what the publisher has."""
    source = resolve(data)
    named, options = source.named, source.options
    if named is None or (scale == "cpu" and named.available()):
        loaded = load(data)
        return Facts(loaded.input_shape, loaded.num_classes, len(loaded.private))
    channels, height, width = SHAPES.get(named.name, PHOTOGRAPH)
    shape = (channels, options.size or height, options.size or width)
    return Facts(shape, named.num_classes, sizes(named.images, options, test_published=True, name=data)[0])


def _steps(text: str, model: str, facts: Facts, budget: Budget) -> int:
    """Iterations of an attack on one victim, all its restarts together."""
    attack = attacks.parse(text)
    restarts = getattr(attack, "restarts", 1)
    return _once(attack, model, facts, budget) * (restarts if isinstance(restarts, int) else 1)


def _once(attack: Attack, model: str, facts: Facts, budget: Budget) -> int:
    if ".analytic." in type(attack).__module__:
        return 0  # a closed form
    own = getattr(attack, "steps", None)
    if isinstance(own, int):
        return own
    if getattr(attack, "paper", "gradveil") != "gradveil":
        return VARIANTS[attack.paper].steps  # type: ignore[attr-defined]
    nothing = Observation(Task(_function(model, facts), facts.shape, facts.classes, torch.zeros(1), torch.ones(1)), ())
    return steps_for(Target([nothing], torch.zeros(1), generator(0), budget), STEPS)


# -- seconds of one image ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _function(model: str, facts: Facts) -> ModelFunction:
    return ModelFunction(models.build(model, input_shape=facts.shape, num_classes=facts.classes))


@lru_cache(maxsize=64)
def _match_seconds(model: str, facts: Facts) -> float:
    """Of one iteration on one image: a gradient, and the gradient of its distance."""
    function = _function(model, facts)
    state = function.state()

    def work() -> None:
        x = torch.full((TOGETHER, 1, *facts.shape), 0.5, requires_grad=True)
        found = function.updates(state, x, torch.zeros(TOGETHER, 1, dtype=torch.long), LocalTraining())
        torch.autograd.grad(sum((g**2).sum() for g in found.values()), x)  # type: ignore[arg-type]

    return _seconds(work) / TOGETHER


@lru_cache(maxsize=64)
def _gradient_seconds(model: str, facts: Facts) -> float:
    """Of the gradient of one image among others."""
    function = _function(model, facts)
    state = function.state()
    x, y = torch.full((TOGETHER, 1, *facts.shape), 0.5), torch.zeros(TOGETHER, 1, dtype=torch.long)
    return _seconds(lambda: function.gradients(state, x, y)) / TOGETHER


@lru_cache(maxsize=64)
def _train_seconds(model: str, facts: Facts) -> float:
    function = _function(model, facts)
    x, y, state = torch.zeros(16, *facts.shape), torch.zeros(16, dtype=torch.long), function.state()
    return _seconds(lambda: function.gradient(state, x, y)) / 16


CLOCKS: dict[str, Clock] = {
    "training": _train_seconds,
    "obscuring": _train_seconds,
    "gradients": _gradient_seconds,
    "attacks": _match_seconds,
}


def _seconds(work: Callable[[], object]) -> float:
    """The faster of two runs, the first of which warms up."""
    times = []
    with one_thread():
        for _ in range(2):
            begun = time.process_time()
            work()
            times.append(time.process_time() - begun)
    return min(times)
