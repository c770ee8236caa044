"""Against any defense that can be run: match the update that it would make of our images, in expectation over its draws.

At every step the candidate images go through a copy of the defense (data, batch, gradient and update stage) several times
with fresh draws, and the mean result is compared with the update sent (expectation over transformation, Athalye et al.
2018). The gradient goes through the update stage where that has one. Where rounding, sorting or a search has cut it, and
through the stages that see images, it goes straight through: forward as the defense acts, backward as if it did nothing.
A defense that costs many rounds per step is refused.
"""

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.generative.rehearsal import copy_of_client, cost_of_round, defense_of
from gradveil.attacks.matching.distances import Cosine
from gradveil.attacks.matching.engine import solve
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Match, Problem
from gradveil.attacks.matching.rows import Rows
from gradveil.attacks.matching.starts import Start
from gradveil.attacks.matching.swift import Swift
from gradveil.client import Client
from gradveil.core.errors import UserError
from gradveil.core.loops import Snapshot, State
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Step
from gradveil.defenses.update.none import NoDefense

MOST_ROUNDS = 20.0  # rounds of an undefended client that one round of the defense may cost


@attack("expectation", version=3)
class Expectation(Attack):
    """Match the mean defended update over fresh draws of the defense.

    Args:
        draws: draws of the defense per step; one where the defense draws nothing.
        steps: iterations of signed Adam, scaled by the budget.
        tv: weight of total variation; strong, as under noise.
    Example: gradveil audit --defense mypackage.defenses:Mine --attack expectation:draws=4
    """

    draws: int = Field(default=2, ge=1)
    steps: int = Field(default=400, ge=1)
    tv: float = Field(default=1e-2, ge=0)

    def cost(self, work: Workload) -> Cost:
        return Cost(work.steps(self.steps, least=2) * self.draws, rows=2)

    def applies(self, observation: Observation) -> str | None:
        if not set(defense_of(observation.knowledge).stages) - {"model"}:
            return "the defense changes nothing that could be rehearsed"
        if observation.knowledge.training.kind != "gradient":
            return "it follows one gradient, not a local training"
        return None

    def run(self, target: Target) -> Answer:
        client = copy_of_client(target, target.knowledge.public)
        _affordable(target, client)
        draws = self.draws if client.defense.random else 1
        steps = target.workload.steps(self.steps, least=2)
        match = Match(Cosine(), (TV(self.tv),), Adam(0.1, signed=True), steps, box=True, restarts=2)
        problem = _Defended(target, match, client, draws)
        # One start is the end of a match that ignores the defense, the other is random. In the end both results and the
        # first start are compared by the same draws.
        plain = Swift(restarts=0, cycles=0, adam_steps=0).reconstruct(target).x
        start = torch.stack([plain, Start().draw(target, 1, target.rng)], 1).flatten(0, 1)
        solution = solve(problem, start=start)
        options = torch.stack([*solution.x.unflatten(0, (-1, 2)).unbind(1), plain], 1)
        expected = torch.stack([problem.expected(options[:, i]) for i in range(3)], 1)
        pick = torch.nan_to_num(expected, nan=torch.inf).argmin(1)
        rows = torch.arange(len(pick))
        return Answer(options[rows, pick], expected[rows, pick], iterations=solution.iterations)


def _affordable(target: Target, client: Client) -> None:
    batch = Batch(torch.rand(target.shape[1:], generator=generator("expectation")), target.hard_labels[0])
    plain = copy_of_client(target, target.knowledge.public, NoDefense())
    ratio = cost_of_round(client, target.state, batch) / cost_of_round(plain, target.state, batch)
    if ratio > MOST_ROUNDS:
        reason = f"one round of the defense costs as much as {ratio:.0f} without it"
        raise UserError(f"attack 'expectation' does not apply: {reason}.")


class _Defended(Problem, Snapshot):
    """The match, with the defense between the candidate and its update."""

    def __init__(self, target: Target, match: Match, client: Client, draws: int):
        super().__init__(target, match)
        self.client, self.draws, self.calls = client, draws, 0
        self.sloped: dict[str, bool] = {}  # which tensors keep a slope through the update stage

    def state_dict(self) -> State:
        return {"calls": self.calls, "sloped": self.sloped}

    def mismatch(self, x: Tensor, rows: Rows) -> Tensor:
        self.calls += 1
        total = torch.zeros(len(x))
        for i, state in enumerate(self.states):
            drawn = [self._defended(x, rows.labels, state, (self.calls, i, d)) for d in range(self.draws)]
            mean = {n: torch.stack([t[n] for t in drawn]).mean(0) for n in self.names}
            total = total + self.compare(mean, rows, i)
        return total / len(self.states)

    def expected(self, x: Tensor) -> Tensor:
        """The mismatch of one image set per victim, by the same draws at every call."""
        self.calls = -1
        return self.mismatch(x, self.rows.at(torch.arange(len(x)) * self.match.restarts))

    def _defended(self, x: Tensor, y: Tensor, state: Tensors, key: tuple[int, ...]) -> Tensors:
        """One defended update of each row of candidate images. All rows see the same draws."""
        steps, images, labels = zip(*(self._fed(*row, state, key) for row in zip(x, y, strict=True)), strict=True)
        noise = {n: torch.stack([s.noise[n] for s in steps]) for n in steps[0].noise}
        plain = self.client.task.model.gradients(state, torch.stack(images), torch.stack(labels), noise)
        sent = [self._sent({n: t[k] for n, t in plain.items()}, step) for k, step in enumerate(steps)]
        return {n: torch.stack([row[n] for row in sent]) for n in self.names}

    def _fed(self, x: Tensor, y: Tensor, state: Tensors, key: tuple[int, ...]) -> tuple[Step, Tensor, Tensor]:
        """One row's images and labels after the defense, with the slope of the images themselves."""
        client, rng = self.client, generator("expectation", *key)
        with torch.no_grad():
            shown = Batch(self.target.denormalize(x.detach()).clamp(0, 1), y)
            step = Step(client.task, state, shown, rng, client.memory)
            step.batch = client.defense.batch(client.defense.data(shown, step), step)
            same = len(step.batch) == len(x)
            step.noise = client.task.model.draw_noise(len(x), rng)
        if not same:
            return step, x, y
        return step, x + (step.task.normalize(step.batch.x) - self.target.normalize(shown.x)).detach(), step.batch.y

    def _sent(self, plain: Tensors, step: Step) -> Tensors:
        """One row's gradient after the defense."""
        defense = self.client.defense
        with torch.no_grad():
            changed = defense.gradient({n: t.detach() for n, t in plain.items()}, step)
        before = {n: t + (changed[n] - t).detach() for n, t in plain.items()}
        after = defense.update(before, step)
        return {n: self._through(n, t, after[n]) for n, t in before.items()}

    def _through(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        """A tensor with a gradient: that of the stage where it left one, otherwise straight through."""
        if not before.requires_grad:
            return after
        if name not in self.sloped:
            self.sloped[name] = _has_slope(after, before)
        return after if self.sloped[name] else before + (after - before).detach()


def _has_slope(after: Tensor, before: Tensor) -> bool:
    if not after.requires_grad:
        return False
    (slope,) = torch.autograd.grad(after.sum(), before, retain_graph=True, allow_unused=True)
    return slope is not None and bool(slope.any())
