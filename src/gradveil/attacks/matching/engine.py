"""The engine: `solve` runs one problem from its starts to its end, `choose` keeps one restart per victim.

The adversary chooses among restarts by the residual alone (distance without priors), never by the truth, which it does
not have.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.base import Answer, Attack, Cost, Target, Workload
from gradveil.attacks.matching.optimizers import LBFGS, FirstOrder
from gradveil.attacks.matching.problem import NOTHING, Insight, Match, Problem
from gradveil.attacks.matching.unknowns import ImagesAndLabels, ImagesOnly, MappedImages
from gradveil.core.loops import Loop, Snapshot

Curves = dict[str, list[float]]


@dataclass
class Solution:
    """Rows of images with their values, before the adversary chooses."""

    x: Tensor
    value: Tensor
    residual: Tensor
    labels: Tensor
    iterations: int
    history: Curves


def solve(problem: Problem, start: Tensor | None = None) -> Solution:
    """Run a problem from its starts, or from `start` (victims · restarts × B × C × H × W, as the network takes them)."""
    match, target = problem.match, problem.target
    unknowns = _unknowns(problem)
    z = unknowns.begin(match.start.draw(target, match.restarts, target.rng) if start is None else start)
    history: Curves = {}
    if isinstance(match.optimizer, LBFGS):
        show = target.progress
        tick = (lambda i: show(i, match.steps)) if show else None
        z, value, used = match.optimizer.minimize(unknowns, z, match.steps, tick)
    else:
        z, value, used, history = _first_order(unknowns, match.optimizer, z)
    x, labels = unknowns.images(z), unknowns.labels(z)
    return Solution(x, value, problem.residual(x, labels), labels, used, history)


def _unknowns(problem: Problem) -> ImagesOnly:
    match = problem.match
    if match.learn_labels:
        return ImagesAndLabels(problem)
    return ImagesOnly(problem) if match.coordinates is None else MappedImages(problem, match.coordinates)


def choose(problem: Problem, solution: Solution) -> Answer:
    """For each victim the restart with the lowest residual."""
    restarts = problem.match.restarts
    residual = torch.nan_to_num(solution.residual, nan=float("inf")).unflatten(0, (-1, restarts))
    pick = residual.argmin(1) + torch.arange(len(residual)) * restarts
    labels = solution.labels[pick]
    hard = labels.argmax(-1) if labels.is_floating_point() else labels
    return Answer(solution.x[pick], solution.residual[pick], hard, solution.iterations, solution.history)


def match_and_choose(target: Target, match: Match, insight: Insight = NOTHING) -> Answer:
    """The whole of a plain matching attack."""
    problem = Problem(target, match, insight)
    return choose(problem, solve(problem))


class MatchingAttack(Attack):
    """An attack that is one match and nothing else; subclasses say which."""

    def match(self, work: Workload) -> Match:
        raise NotImplementedError

    def cost(self, work: Workload) -> Cost:
        match = self.match(work)
        return Cost(match.optimizer.expected_evaluations(match.steps), match.restarts)

    def run(self, target: Target) -> Answer:
        return match_and_choose(target, self.match(target.workload))


@dataclass
class _Search(Snapshot):
    """All that a first-order step changes, beside the optimiser."""

    z: Tensor
    best: Tensor
    best_value: Tensor
    since: Tensor  # steps since a row was better than ever before
    history: Curves
    used: int = 0


def _first_order(unknowns: ImagesOnly, optimizer: FirstOrder, z: Tensor) -> tuple[Tensor, Tensor, int, Curves]:
    problem = unknowns.problem
    match, target = problem.match, problem.target
    low, high = target.pixel_range
    objective, step = unknowns.quick(signed=optimizer.signed), optimizer.stepper(z)
    at = _Search(z, z, torch.full((len(z),), float("inf")), torch.zeros(len(z)), {"step": [], "objective": []})
    record_every = max(1, match.steps // 100)

    def within(x: Tensor) -> Tensor:
        if optimizer.noise:
            x = x + optimizer.noise * optimizer.lr * decay * problem.rows.draw(x.shape[1:])
        return torch.minimum(torch.maximum(x, low), high) if match.box else x

    loop = Loop(match.steps, at, step, target.rng, *([objective] if isinstance(objective, Snapshot) else []))
    for i in loop:
        at.used = i + 1
        if match.resample:
            problem.rows = problem.rows.redrawn(i)
        value, gradient = objective(at.z, None)
        better = value < at.best_value
        at.best = torch.where(better.view(-1, *(1 for _ in z.shape[1:])), at.z, at.best)
        at.best_value = torch.where(better, value, at.best_value)
        if match.patience:
            at.since = torch.where(better, torch.zeros_like(at.since), at.since + 1)
            if i % 100 == 99 and bool((at.since >= match.patience).all()):
                loop.stop()
                continue
        decay = _decay(i, match)
        at.z = unknowns.change_images(at.z + step(gradient, decay), within)
        if i % record_every == 0:
            at.history["step"].append(i)
            at.history["objective"].append(float(at.best_value.mean()))
            if target.progress:
                target.progress(i, match.steps)
    return at.best, at.best_value, at.used, at.history


def _decay(i: int, match: Match) -> float:
    warm = min(1.0, (i + 1) / match.warmup) if match.warmup else 1.0
    if not match.decay:
        return warm
    return warm * 0.1 ** sum(i >= int(match.steps / part) for part in (2.667, 1.6, 1.142))
