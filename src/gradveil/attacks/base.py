"""What an attack is: a function from observations to reconstructions that declares what it needs to know.

`__call__` is sealed: it checks the knowledge, brings updates to unit length, infers labels where they are not granted,
stacks the victims that share a model, seeds, times, and records what is not finite as a failure. Subclasses write `run`
for one stack of victims.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, final

import torch
from torch import Tensor, nn

from gradveil.attacks.budget import Budget, Cost, Workload, row_bytes
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.labels.targets import infer_targets
from gradveil.attacks.unit_length import unit_length, why_unusable
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.kernels import missing_second_derivative
from gradveil.core.local_training import LocalTraining
from gradveil.core.loops import Loop
from gradveil.core.observation import Knowledge, Observation, Reconstruction
from gradveil.core.progress import Steps
from gradveil.core.randomness import TorchStream, generator
from gradveil.core.settings import spec_of
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors, hard_labels
from gradveil.defenses.base import Defense

Targets = Literal["classes", "any", "unused"]
TOGETHER = 2**28  # bytes of one batched computation; more at once is no faster on a CPU


@dataclass
class Target:
    """Victims that share a model, stacked: what `run` works on."""

    observations: list[Observation]
    labels: Tensor  # N × B class numbers, or N × B × classes when soft; granted, or inferred from the update
    rng: TorchStream
    budget: Budget = "standard"
    progress: Steps | None = None
    memory: int | None = None  # bytes that one batched computation may take
    cache: Path | None = None  # a folder for what is trained once, such as a generator
    _stacked: dict[int, Tensors] = field(default_factory=dict)

    @property
    def first(self) -> Observation:
        return self.observations[0]

    @property
    def task(self) -> Task:
        return self.first.task

    @property
    def model(self) -> ModelFunction:
        return self.task.model

    @property
    def knowledge(self) -> Knowledge:
        return self.first.knowledge

    @property
    def training(self) -> LocalTraining:
        return self.first.knowledge.training

    @property
    def state(self) -> Tensors:
        return self.first.state

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Victims, images per victim, channels, height, width."""
        return (len(self.observations), self.knowledge.batch_size, *self.task.input_shape)

    @property
    def hard_labels(self) -> Tensor:
        """N × B class numbers; of soft labels the largest."""
        return hard_labels(self.labels, soft_ndim=3)

    @property
    def workload(self) -> Workload:
        public = self.knowledge.public
        images = 0 if public is None else len(public)
        return Workload(self.task, self.budget, self.knowledge.batch_size, self.training, images)

    @property
    def rows_at_once(self) -> int:
        """How many rows of victims · restarts are computed together: the same on all machines, unless memory is short.

        Sums over other numbers of rows are rounded differently, and a long search may end elsewhere for that.
        """
        size = row_bytes(self.workload)
        return max(1, min(TOGETHER, self.memory or TOGETHER) // size)

    @property
    def sightings(self) -> int:
        return len(self.first.seen)

    def updates(self, sighting: int = 0) -> Tensors:
        """The victims' updates of one sighting, stacked along a first axis."""
        if sighting not in self._stacked:
            rows = [o.seen[sighting].update.tensors for o in self.observations]
            self._stacked[sighting] = {n: torch.stack([r[n] for r in rows]) for n in rows[0]}
        return self._stacked[sighting]

    def normalize(self, x: Tensor) -> Tensor:
        return self.task.normalize(x)

    def denormalize(self, x: Tensor) -> Tensor:
        return self.task.denormalize(x)

    @property
    def pixel_range(self) -> tuple[Tensor, Tensor]:
        """Black and white as the network takes them, C × 1 × 1 each."""
        low, high = (self.normalize(torch.full((self.shape[2], 1, 1), v)) for v in (0.0, 1.0))
        return low, high

    def about(self, observations: list[Observation], labels: Tensor) -> Target:
        """The same work on other observations."""
        return replace(self, observations=observations, labels=labels, _stacked={})

    def subset(self, rows: Sequence[int], purpose: str = "") -> Target:
        """The same question about a selection of the victims. A `purpose` gets a separate random stream, so that its
        draws do not depend on what was drawn before."""
        picked = [self.observations[i] for i in rows]
        rng = generator(self.rng.initial_seed(), purpose) if purpose else self.rng
        return replace(self.about(picked, self.labels[list(rows)]), rng=rng)


@dataclass
class Answer:
    """What `run` returns: images N × B × C × H × W in the network's input space, and the adversary's own scores."""

    x: Tensor
    score: Tensor
    labels: Tensor | None = None  # where the attack inferred them itself
    iterations: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)


class Attack:
    """Base class. Subclasses are `@settings` dataclasses registered with `@attack(name)`."""

    name: ClassVar[str] = ""
    version: ClassVar[int] = 1  # raised when the results change
    needs: ClassVar[frozenset[str]] = frozenset()  # of: labels, public, secrets
    against: ClassVar[tuple[type[Defense], ...]] = ()  # classes of defenses that it is built to break
    # What it does where targets are no class numbers: nothing; works with any the loss takes; does without them.
    targets: ClassVar[Targets] = "classes"

    def applies(self, observation: Observation) -> str | None:
        """Why this attack cannot be tried here, or None if it can."""
        return None

    def tamper(
        self, module: nn.Module, input_shape: tuple[int, int, int], public: Batch | None = None, batch_size: int = 1
    ) -> nn.Module:
        """What a malicious server does to the model before it is sent; the identity for an honest-but-curious one.

        `public` are images of the same kind as the network takes them, where the server has any, with class −1 where theirs is
        not one of the task. `batch_size` is the number of images that an update will come from.
        """
        return module

    def cost(self, work: Workload) -> Cost:
        """About what it will take, for plans and for memory. A class that does not say counts as a plain search."""
        return Cost(work.steps(1_000))

    def run(self, target: Target) -> Answer:
        raise TypeError(f"{type(self).__name__} does not say how it runs")

    @property
    def spec(self) -> str:
        return spec_of(self)

    @final
    def __call__(
        self,
        observations: Sequence[Observation],
        *,
        seed: int = 0,
        budget: Budget = "standard",
        progress: Steps | None = None,
        memory: int | None = None,
        cache: Path | None = None,
    ) -> list[Reconstruction]:
        """One reconstruction per observation, in their order."""
        for observation in observations:
            self._check(observation)
        answers = {i: _unusable(o, why) for i, o in enumerate(observations) if (why := why_unusable(o))}
        usable = {i: unit_length(o) for i, o in enumerate(observations) if i not in answers}
        stacks = _stacks(usable)
        progress = progress and _Stages(progress)
        for rows in stacks:
            picked = [usable[i] for i in rows]
            labels = torch.stack([self._labels(o) for o in picked])
            target = Target(picked, labels, generator(seed, self.name), budget, progress, memory, cache)
            if isinstance(progress, _Stages):
                progress.expect(self.cost(target.workload).iterations)
            begun = time.perf_counter()
            answer = self._run(target)
            seconds = (time.perf_counter() - begun) / len(rows)
            for place, row in enumerate(rows):
                answers[row] = _reconstruction(answer, place, target, seconds)
        return [answers[i] for i in range(len(observations))]

    def _run(self, target: Target) -> Answer:
        try:
            with torch.no_grad():
                return self.run(target)
        except RuntimeError as error:
            kernel = missing_second_derivative(error)
            if kernel is None:
                raise
        raise UserError(f"attack '{self.name}' does not apply: PyTorch has no second derivative of {kernel}.")

    def _check(self, observation: Observation) -> None:
        missing = [need for need in sorted(self.needs) if not _has(observation.knowledge, need)]
        if missing:
            raise UserError(
                f"attack '{self.name}' needs {', '.join(missing)}, which knowledge "
                f"'{observation.knowledge.level}' does not grant; try --knowledge upper-bound."
            )
        reason = self.why_not(observation)
        if reason:
            raise UserError(f"attack '{self.name}' does not apply: {reason}.")

    @final
    def why_not(self, observation: Observation) -> str | None:
        """Why this attack cannot be tried here: the loss, or what the attack itself says."""
        if not observation.task.has_classes and self.targets == "classes":
            return "it is built for class labels, and under this loss an image has a row of numbers"
        return self.applies(observation)

    def _labels(self, observation: Observation) -> Tensor:
        granted = observation.knowledge.labels
        if granted is not None:
            return granted
        if observation.task.has_classes:
            return infer_labels(observation)
        if self.targets == "unused":
            return torch.zeros(observation.knowledge.batch_size, observation.task.num_outputs)
        return infer_targets(observation)


class ClosedForm(Attack):
    """An attack that reads the images off each update, without a search."""

    def read(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Images (B × C × H × W, as the network takes them) and the adversary's score."""
        raise NotImplementedError

    def cost(self, work: Workload) -> Cost:
        return Cost(0)

    def run(self, target: Target) -> Answer:
        read = [self.read(target.observations[i]) for i in Loop(len(target.observations))]
        images, scores = zip(*(read[i % len(read)] for i in range(len(target.observations))), strict=True)
        return Answer(torch.stack(images), torch.stack(scores))


class _Stages:
    """The progress of several loops, one after another, as that of one: at the least of the expected length."""

    def __init__(self, progress: Steps):
        self._progress, self._ended, self._last, self._expected = progress, 0, 0, 0

    def expect(self, iterations: int) -> None:
        self._expected += iterations

    def __call__(self, done: int, total: int) -> None:
        if done < self._last:  # the next loop
            self._ended += self._last
        self._last = done
        self._progress(self._ended + done, max(self._expected, self._ended + total))


def _has(knowledge: Knowledge, need: str) -> bool:
    if need.startswith("secret:"):
        return need.removeprefix("secret:") in knowledge.secrets
    return {"labels": knowledge.labels, "public": knowledge.public, "secrets": knowledge.secrets}[need] is not None


def _stacks(observations: Mapping[int, Observation]) -> list[list[int]]:
    """Victims that can be attacked as one: same model and states, same shapes, same kind of labels."""
    groups: dict[object, list[int]] = {}
    for i, o in observations.items():
        states = tuple(id(s.state) for s in o.seen)
        soft = o.knowledge.labels is not None and o.knowledge.labels.ndim == 2
        key = (id(o.model), states, o.knowledge.batch_size, o.task.input_shape, soft, o.knowledge.training)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _unusable(observation: Observation, why: str) -> Reconstruction:
    """The record of an update that no attack can use."""
    images = torch.zeros(observation.knowledge.batch_size, *observation.task.input_shape)
    return Reconstruction(images, observation.knowledge.labels, float("inf"), failed=why)


def _reconstruction(answer: Answer, place: int, target: Target, seconds: float) -> Reconstruction:
    x, failed = answer.x[place], None
    if not torch.isfinite(x).all() or not torch.isfinite(answer.score[place]):
        x, failed = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0), "the optimisation did not stay finite"
    labels = (answer.labels if answer.labels is not None else target.labels)[place]
    return Reconstruction(
        images=target.denormalize(x).clamp(0, 1),
        labels=hard_labels(labels) if target.task.has_classes else labels,
        score=float(answer.score[place]),
        iterations=answer.iterations,
        seconds=seconds,
        failed=failed,
        history=answer.history if place == 0 else {},
    )


__all__ = ["Answer", "Attack", "Budget", "ClosedForm", "Cost", "Target", "Workload"]
