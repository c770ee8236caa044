"""The engine: minimise distance(update of x, observed update) + priors(x), for victims × restarts in one batch.

Rows are victims · restarts, restarts of a victim side by side. The adversary chooses among restarts by the residual
alone (distance without priors), never by the truth, which it does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.attacks.base import Answer, Target
from gradveil.attacks.budget import rows_at_once
from gradveil.attacks.matching import dense, frozen
from gradveil.attacks.matching.distances import Cosine, Distance, PerRow
from gradveil.attacks.matching.optimizers import LBFGS, SGD, Adam
from gradveil.attacks.matching.priors import TV, Prior
from gradveil.attacks.matching.starts import Start
from gradveil.core.randomness import generator
from gradveil.core.types import Tensors


@dataclass(frozen=True)
class Match:
    """How to match: everything that tells one published attack from another."""

    distance: Distance = field(default_factory=Cosine)
    priors: tuple[Prior, ...] = (TV(1e-4),)
    optimizer: Adam | SGD | LBFGS = field(default_factory=Adam)
    steps: int = 4000
    start: Start = field(default_factory=Start)
    restarts: int = 1
    box: bool = False
    decay: bool = True  # ×0.1 at 3/8, 5/8 and 7/8 of the steps
    warmup: int = 0
    patience: int | None = None  # stop when no row has improved for so many steps
    learn_labels: bool = False  # DLG: soft labels are unknowns too


@dataclass
class Solution:
    """Rows of images with their values, before the adversary chooses."""

    x: Tensor
    value: Tensor
    residual: Tensor
    labels: Tensor
    iterations: int
    history: dict[str, list[float]]


class Problem:
    """The objective as a function of rows of images, with its gradient."""

    def __init__(
        self,
        target: Target,
        distance: Distance,
        priors: Sequence[Prior],
        *,
        restarts: int = 1,
        weights: Tensors | None = None,
        keep: Sequence[str] | None = None,
        labels: Tensor | None = None,
        transform: Callable[[Tensors], Tensors] | None = None,
    ):
        """`keep` names the tensors that count; `weights` (0/1 masks too) multiply both sides, victims first or shared;
        `transform` is what a known defense does to an update, applied to ours before it is compared."""
        self.target, self.distance, self.priors, self.restarts = target, distance, tuple(priors), restarts
        self.names = [n for n in target.model.trainable if keep is None or n in keep]
        self.weights = weights or {}
        self.seen = [self._weighed(target.updates(i), None) for i in range(target.sightings)]
        self.states = [s.state for s in target.first.seen]
        given = target.labels if labels is None else labels
        self.labels = given.repeat_interleave(restarts, 0)
        self.transform = transform
        self.noise = {k: v.repeat_interleave(restarts, 0) for k, v in _noise(target).items()}
        self.at_once = rows_at_once(target) or self.rows  # that fit the memory
        low, high = (
            target.normalize(torch.zeros(target.task.input_shape)),
            target.normalize(torch.ones(target.task.input_shape)),
        )
        self.box = (low.amin((1, 2)).view(-1, 1, 1), high.amax((1, 2)).view(-1, 1, 1))

    @property
    def rows(self) -> int:
        return len(self.labels)

    def __call__(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Value a row and its gradient."""
        if len(x) > self.at_once:
            values, gradients = zip(*(self(x[part], where) for part, where in self.parts(x, rows)), strict=True)
            return torch.cat(values), torch.cat(gradients)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            value = self.value(x, rows)
            (gradient,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), gradient

    def parts(self, x: Tensor, rows: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """As many rows at a time as fit the memory: which of `x`, and which rows of the problem they are."""
        every = torch.arange(len(x)) if rows is None else rows
        for start in range(0, len(x), self.at_once):
            part = slice(start, start + self.at_once)
            yield part, every[part]

    def value(self, x: Tensor, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        total = self.mismatch(x, rows, labels)
        for prior in self.priors:
            total = total + prior(x, self, rows)
        return total

    def mismatch(
        self, x: Tensor, rows: Tensor | None = None, labels: Tensor | None = None, distance: Distance | None = None
    ) -> Tensor:
        """The distance alone, summed over sightings."""
        y = labels if labels is not None else self.labels if rows is None else self.labels[rows]
        noise = self.noise if rows is None else {k: v[rows] for k, v in self.noise.items()}
        total: Tensor | None = None
        for i, state in enumerate(self.states):
            found = self.target.model.updates(state, x, y, self.target.training, noise)
            term = self.compare(found, rows, i, distance)
            total = term if total is None else total + term
        assert total is not None
        return total / len(self.seen)

    def compare(
        self, found: Tensors, rows: Tensor | None = None, sighting: int = 0, distance: Distance | None = None
    ) -> Tensor:
        """The distance of updates from those of one sighting."""
        found = self.transform(found) if self.transform else found
        distance = distance or self.distance
        if isinstance(distance, PerRow) and rows is not None:
            distance = distance.rows(rows)
        victims = torch.arange(self.rows) // self.restarts if rows is None else rows // self.restarts
        if rows is None and self.restarts == 1:
            return distance(self._weighed(found, victims), self.seen[sighting])
        return distance(self._weighed(found, victims), [t[victims] for t in self.seen[sighting]])

    def residual(self, x: Tensor, distance: Distance | None = None, labels: Tensor | None = None) -> Tensor:
        """The distance alone of finished rows, this one or another."""
        with torch.no_grad():
            if len(x) <= self.at_once:
                return self.mismatch(x, labels=labels, distance=distance)
            parts = self.parts(x, None)
            return torch.cat(
                [self.mismatch(x[p], r, None if labels is None else labels[p], distance) for p, r in parts]
            )

    def _weighed(self, tensors: Tensors, victims: Tensor | None) -> list[Tensor]:
        result = []
        for name in self.names:
            weight = self.weights.get(name)
            if weight is None:
                result.append(tensors[name])
            elif weight.ndim == tensors[name].ndim:  # a mask for each victim
                result.append(tensors[name] * (weight if victims is None else weight[victims]))
            else:
                result.append(tensors[name] * weight)
        return result


def _noise(target: Target) -> Tensors:
    """The draw of a random model: the true one where it was granted, else one of the adversary's own, held fixed."""
    drawn = target.model.draw_noise(target.shape[1], generator("noise"))
    secrets = [o.knowledge.secrets for o in target.observations]
    return {name: torch.stack([known.get(name, own) for known in secrets]) for name, own in drawn.items()}


def solve(target: Target, match: Match, *, problem: Problem | None = None, start: Tensor | None = None) -> Solution:
    """Run one match from its starts to its end."""
    problem = problem or Problem(target, match.distance, match.priors, restarts=match.restarts)
    x = start if start is not None else match.start.draw(target, problem.restarts, target.rng)
    if isinstance(match.optimizer, LBFGS):
        show = target.progress
        tick = (lambda i: show(i, match.steps)) if show else None
        if match.learn_labels:
            x, labels, value, used = _second_order_with_labels(problem, match, x, tick)
        else:
            x, value, used = match.optimizer.minimize(problem, x, match.steps, tick)
            labels = problem.labels
        history: dict[str, list[float]] = {}
    else:
        x, labels, value, used, history = _first_order(problem, match, x)
    residual = problem.residual(x, labels=labels if match.learn_labels else None)
    return Solution(x, value, residual, labels, used, history)


def choose(target: Target, problem: Problem, solution: Solution) -> Answer:
    """For each victim the restart with the lowest residual."""
    residual = torch.nan_to_num(solution.residual, nan=float("inf")).unflatten(0, (-1, problem.restarts))
    pick = residual.argmin(1) + torch.arange(len(residual)) * problem.restarts
    labels = solution.labels[pick]
    hard = labels.argmax(-1) if labels.is_floating_point() else labels
    return Answer(solution.x[pick], solution.residual[pick], hard, solution.iterations, solution.history)


def match_and_choose(target: Target, match: Match, **more: object) -> Answer:
    """The whole of a plain matching attack."""
    problem = Problem(target, match.distance, match.priors, restarts=match.restarts, **more)  # type: ignore[arg-type]
    return choose(target, problem, solve(target, match, problem=problem))


def _first_order(
    problem: Problem, match: Match, x: Tensor
) -> tuple[Tensor, Tensor, Tensor, int, dict[str, list[float]]]:
    assert not isinstance(match.optimizer, LBFGS)
    x = x.clone()
    low, high = problem.box
    step = match.optimizer.stepper(x)
    labels = problem.labels
    if match.learn_labels:
        labels = _label_logits(problem)
        step_labels = match.optimizer.stepper(labels)
    best, best_value = x.clone(), torch.full((len(x),), float("inf"))
    best_labels = labels.clone()
    since, record_every = torch.zeros(len(x)), max(1, match.steps // 100)
    history: dict[str, list[float]] = {"step": [], "objective": []}
    # The exact route for every model, a quicker one where it has shown to give the same.
    objective = dense.objective(problem) or frozen.objective(problem, signed=match.optimizer.signed)
    for i in range(match.steps):
        if match.learn_labels:
            value, g, g_labels = _joint(problem, x, labels)
        else:
            value, g = objective(x)
        better = value < best_value
        best = torch.where(better.view(-1, 1, 1, 1, 1), x, best)
        best_value = torch.where(better, value, best_value)
        if match.learn_labels:
            best_labels = torch.where(better.view(-1, 1, 1), labels, best_labels)
        if match.patience:
            since = torch.where(better, torch.zeros_like(since), since + 1)
            if i % 100 == 99 and bool((since >= match.patience).all()):
                break
        decay = _decay(i, match)
        x = x + step(g, decay)
        noise = getattr(match.optimizer, "noise", 0.0)
        if noise:
            x = x + noise * match.optimizer.lr * decay * _alike(problem, x.shape)
        if match.box:
            x = torch.minimum(torch.maximum(x, low), high)
        if match.learn_labels:
            labels = labels + step_labels(g_labels, decay)
        if i % record_every == 0:
            history["step"].append(i)
            history["objective"].append(float(best_value.mean()))
            if problem.target.progress:
                problem.target.progress(i, match.steps)
    if match.learn_labels:
        return best, best_labels.softmax(-1), best_value, i + 1, history
    return best, labels, best_value, i + 1, history


def _decay(i: int, match: Match) -> float:
    warm = min(1.0, (i + 1) / match.warmup) if match.warmup else 1.0
    if not match.decay:
        return warm
    return warm * 0.1 ** sum(i >= int(match.steps / part) for part in (2.667, 1.6, 1.142))


def _label_logits(problem: Problem) -> Tensor:
    return _alike(problem, (problem.rows, problem.labels.shape[1], problem.target.task.num_outputs))


def _alike(problem: Problem, shape: Sequence[int]) -> Tensor:
    """N(0, 1), one draw a restart and the same for every victim: nobody's result depends on the company."""
    one = torch.randn((problem.restarts, *shape[1:]), generator=problem.target.rng)
    return one.repeat(problem.rows // problem.restarts, *(1 for _ in shape[1:]))


def _joint(problem: Problem, x: Tensor, logits: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    if len(x) > problem.at_once:
        found = [_joint(problem, x[part], logits[part], where) for part, where in problem.parts(x, rows)]
        values, gradients, words = (torch.cat(column) for column in zip(*found, strict=True))
        return values, gradients, words
    x, logits = x.detach().requires_grad_(), logits.detach().requires_grad_()
    with torch.enable_grad():
        value = problem.value(x, rows, labels=logits.softmax(-1))
        g, g_labels = torch.autograd.grad(value.sum(), [x, logits])
    return value.detach(), g, g_labels


def _second_order_with_labels(
    problem: Problem, match: Match, x: Tensor, tick: object
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Images and label logits as one long unknown."""
    assert isinstance(match.optimizer, LBFGS)
    logits = _label_logits(problem)
    shape, pixels = x.shape[1:], x[0].numel()

    def objective(z: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        images, words = z[:, :pixels].unflatten(1, shape), z[:, pixels:].unflatten(1, logits.shape[1:])
        value, g, g_words = _joint(problem, images, words, rows)
        return value, torch.cat([g.flatten(1), g_words.flatten(1)], 1)

    z = torch.cat([x.flatten(1), logits.flatten(1)], 1)
    z, value, used = match.optimizer.minimize(objective, z, match.steps, tick)  # type: ignore[arg-type]
    return z[:, :pixels].unflatten(1, shape), z[:, pixels:].unflatten(1, logits.shape[1:]).softmax(-1), value, used
