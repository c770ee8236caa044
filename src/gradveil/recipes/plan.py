"""What a recipe will do and about how long it takes, from its settings alone: nothing is run, data are only counted.

An iteration of matching, a gradient and a training step are timed on the recipe's own networks, by the processor's
time; a GPU is quicker.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from gradveil import attacks, models
from gradveil.attacks.base import Attack, Target
from gradveil.attacks.budget import steps_for
from gradveil.attacks.matching.ig import VARIANTS
from gradveil.audit.cells import one_thread
from gradveil.audit.spec import AuditSpec
from gradveil.data import load
from gradveil.data.catalogue import KNOWN
from gradveil.data.split import TEST_GIVEN
from gradveil.gradients import ModelFunction
from gradveil.recipes.measures import MEASURES
from gradveil.recipes.recipe import ATTACK_METRICS, TRAINING_METRICS, Scale, Scaled
from gradveil.types import LocalTraining, Observation, generator

STEPS = 4000  # of an attack that does not say
TOGETHER = 4  # victims that an iteration is timed on
SHAPES = {
    **dict.fromkeys(("mnist", "mnist-5k", "fashion-mnist"), (1, 28, 28)),
    **dict.fromkeys(("olivetti", "mednist"), (1, 64, 64)),
}
PHOTOGRAPH = (3, 32, 32)


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
    for name, spec in scaled.specs.items():
        cells = {cell for cell in scaled.wanted() if cell.audit == name}
        updates = {cell.defense for cell in cells if cell.figure not in TRAINING_METRICS}
        pairs = {(cell.defense, cell.attack) for cell in cells if cell.figure in ATTACK_METRICS}
        trained = {cell.defense for cell in cells if cell.figure in TRAINING_METRICS}
        about = f"{name}: {spec.model} on {spec.data}"
        if updates and spec.trained_epochs:  # each defense attacks the model that was trained under it
            images = len(updates) * spec.trained_epochs * _private(str(spec.data), scaled.scale)
            cost = _train_seconds(spec.model, _source(spec)) if timed else 0.0
            lines.append(Line(f"{about}, trainings of the attacked model", len(updates), images, images * cost))
        if updates:
            lines.append(Line(f"{about}, updates of {spec.victims} victims", len(updates), 0, 1.0 * len(updates)))
        if pairs:
            counted = sum(_iterations(spec, attack) for _, attack in pairs)
            cost = _match_seconds(spec.model, _source(spec)) if timed else 0.0
            lines.append(Line(f"{about}, attacks", len(pairs), counted, counted * spec.batch_size * cost))
        if trained and spec.utility:
            how = spec.utility
            images = how.rounds * how.clients * how.images
            cost = _train_seconds(how.model, _source(spec)) if timed else 0.0
            lines.append(Line(f"{about}, trainings of {how.model}", len(trained), images, len(trained) * images * cost))
    for name in dict.fromkeys(cell.measure for cell in scaled.wanted() if cell.measure):
        lines += _of_measure(name, scaled, timed)
    return lines


def _of_measure(name: str, scaled: Scaled, timed: bool) -> list[Line]:
    given = scaled.measures[name]
    data = str(given["data"])
    source = data.partition(":")[0]
    clocks = {
        "training": _train_seconds,
        "obscuring": _train_seconds,
        "gradients": _gradient_seconds,
        "attacks": _match_seconds,
    }
    found = [
        Line(
            f"{name}: {work.model} on {data}, {work.kind}",
            1,
            work.count,
            work.count * clocks[work.kind](work.model, source) if timed else 0.0,
        )
        for work in MEASURES[given["kind"]].work(_private(data, scaled.scale), given)
        if work.count
    ]
    return found or [Line(f"{name}: {given['kind']} on {data}", 1, 0, 1.0)]


@lru_cache(maxsize=64)
def _private(data: str, scale: Scale) -> int:
    """Images of the private part: at scale cpu of the files at hand, otherwise of what the publisher has."""
    source, _, options = data.partition(":")
    if scale == "cpu" and KNOWN[source].available():
        return len(load(data).private)
    asked = re.search(r"\bprivate=(\d+)", options)
    return int(asked[1]) if asked else round(TEST_GIVEN[0] * KNOWN[source].images)


def _source(spec: AuditSpec) -> str:
    return str(spec.data).partition(":")[0]


def _shape(data: str) -> tuple[tuple[int, int, int], int]:
    return SHAPES.get(data, PHOTOGRAPH), KNOWN[data].num_classes


def _iterations(spec: AuditSpec, text: str) -> int:
    """Of one attack on all victims."""
    attack = attacks.parse(text)
    restarts = getattr(attack, "restarts", 1)
    return _steps(spec, attack) * (restarts if isinstance(restarts, int) else 1) * spec.victims * spec.updates


def _steps(spec: AuditSpec, attack: Attack) -> int:
    if ".analytic." in type(attack).__module__:
        return 0  # a closed form
    own = getattr(attack, "steps", None)
    if isinstance(own, int):
        return own
    if getattr(attack, "paper", "gradveil") != "gradveil":
        return VARIANTS[attack.paper].steps  # type: ignore[attr-defined]
    shape, classes = _shape(_source(spec))
    function = _function(spec.model, _source(spec))
    nothing = Observation(function, (), shape, classes, torch.zeros(1), torch.ones(1))
    return steps_for(Target([nothing], torch.zeros(1), generator(0), spec.budget), STEPS)


@lru_cache(maxsize=64)
def _function(model: str, data: str) -> ModelFunction:
    shape, classes = _shape(data)
    return ModelFunction(models.build(model, input_shape=shape, num_classes=classes))


@lru_cache(maxsize=64)
def _match_seconds(model: str, data: str) -> float:
    """Of one iteration on one image: a gradient, and the gradient of its distance."""
    function, (shape, _) = _function(model, data), _shape(data)
    state = function.state()

    def work() -> None:
        x = torch.full((TOGETHER, 1, *shape), 0.5, requires_grad=True)
        found = function.updates(state, x, torch.zeros(TOGETHER, 1, dtype=torch.long), LocalTraining())
        torch.autograd.grad(sum((g**2).sum() for g in found.values()), x)  # type: ignore[arg-type]

    return _seconds(work) / TOGETHER


@lru_cache(maxsize=64)
def _gradient_seconds(model: str, data: str) -> float:
    """Of the gradient of one image among others."""
    function, (shape, _) = _function(model, data), _shape(data)
    state = function.state()
    x, y = torch.full((TOGETHER, 1, *shape), 0.5), torch.zeros(TOGETHER, 1, dtype=torch.long)
    return _seconds(lambda: function.gradients(state, x, y)) / TOGETHER


@lru_cache(maxsize=64)
def _train_seconds(model: str, data: str) -> float:
    function, (shape, _) = _function(model, data), _shape(data)
    x, y, state = torch.zeros(16, *shape), torch.zeros(16, dtype=torch.long), function.state()
    return _seconds(lambda: function.gradient(state, x, y)) / 16


def _seconds(work: Callable[[], object]) -> float:
    """The faster of two runs, the first of which warms up."""
    times = []
    with one_thread():
        for _ in range(2):
            begun = time.process_time()
            work()
            times.append(time.process_time() - begun)
    return min(times)
