"""Against Refiner: the update sent is nearly the true gradient where it matters, so that part is matched, and no more.

Rebuilding what was fed gives an image made to look like noise. But its gradient was pulled to that of the private image,
most of all for critical parameters. So the private image nearly explains the update, and few other natural images do.

1. Repeated updates of one batch start from different noise: their mean is nearer to the true gradient.
2. The update is matched under Refiner's weights (1 + |g·θ| / largest)½ · τ^layer, with the update sent in place of the
   true gradient, and only in the `share` of each tensor's parameters that weigh most.
3. The strength of the prior is measured: the adversary refines public images itself, attacks them with each prior
   weight, and takes the weight that serves best there.
"""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.counters.noise_likelihood import average
from gradveil.attacks.matching.distances import Cosine
from gradveil.attacks.matching.engine import solve
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Insight, Match, Problem
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors, Update
from gradveil.defenses.base import Setup, Step
from gradveil.defenses.batch.refiner.defense import Refiner, Utility

WEIGHTS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # of TV
USUAL = 1e-2  # where none can be tried
TRIED = 4  # public batches that choose the weight


@attack("refiner-partial", against=(Refiner,), version=2)
class RefinerPartial(Attack):
    """Average, match what Refiner keeps close, under a prior chosen on public images.

    Args:
        share: share of each tensor's parameters that count.
        tv: weight of total variation; by default chosen on public images, where there are any.
        steps: iterations of signed Adam; by default 800 scaled by the budget.
    Example: gradveil audit --defense refiner --attack refiner-partial
    """

    share: float = Field(default=0.5, gt=0, le=1)
    tv: float | None = Field(default=None, gt=0)
    steps: int | None = Field(default=None, ge=1)

    def cost(self, work: Workload) -> Cost:  # of the match; the trial on public images is for a few victims in all
        return Cost(self.steps or work.steps(800))

    def applies(self, observation: Observation) -> str | None:
        return None if observation.knowledge.part(Refiner) else "the defense is not refiner"

    def run(self, target: Target) -> Answer:
        averaged = target.about([average(o) for o in target.observations], target.labels)
        x, residual, used = self._match(averaged, (self.tv or self._tried(averaged),))
        return Answer(x[:, 0], residual[:, 0], iterations=used)

    def _match(self, target: Target, weights: tuple[float, ...]) -> tuple[Tensor, Tensor, int]:
        """Images (victims × weights × B × …), residuals and steps, for several prior weights at once."""
        each = len(weights)
        priors = (TV(torch.tensor(weights).repeat(target.shape[0])),)
        steps = self.cost(target.workload).iterations
        match = Match(Cosine(), priors, Adam(0.1, signed=True), steps, restarts=each, box=True)
        solution = solve(Problem(target, match, Insight(self._kept(target))))
        shape = (target.shape[0], each)
        return solution.x.unflatten(0, shape), solution.residual.unflatten(0, shape), solution.iterations

    def _kept(self, target: Target) -> Tensors:
        """Refiner's weights for each victim, 0 for those of little weight."""
        tau, parameters = target.knowledge.needed_part(Refiner).tau, target.model.parameters(target.state)
        rows = [Utility(o.update.tensors, parameters, tau, "normalised").weights for o in target.observations]
        return {name: torch.stack([self._largest(row[name]) for row in rows]) for name in rows[0]}

    def _largest(self, weight: Tensor) -> Tensor:
        cut = weight.flatten().kthvalue(max(1, round(weight.numel() * (1 - self.share)))).values
        return weight * (weight >= cut)

    def _tried(self, target: Target) -> float:
        """The prior weight that serves best on public images that the adversary has refined itself."""
        public = target.knowledge.public
        if public is None or target.training.kind != "gradient" or len(public) < TRIED * target.shape[1]:
            return USUAL
        trial, truth = _rehearsal(target, public)
        x, _, _ = self._match(trial, WEIGHTS)
        error = (trial.denormalize(x).clamp(0, 1) - truth[:, None]).square().flatten(2).mean((0, 2))
        return WEIGHTS[int(error.argmin())]


def _rehearsal(target: Target, public: Batch) -> tuple[Target, Tensor]:
    """Victims made of public images: what they would send, and their true images."""
    defense, first, size = target.knowledge.needed_part(Refiner), target.first, target.shape[1]
    rng = generator(target.rng.initial_seed(), "refiner-rehearsal")
    images = Batch(public.x[:1000], public.hard_labels[:1000])
    memory = defense.prepare(Setup(first.task, first.state, images, rng=rng))  # the evaluator, trained on public images
    picked = torch.randperm(len(public), generator=rng)[: TRIED * size].view(TRIED, size)
    observations, truth, labels = [], [], []
    for rows in picked:
        batch = Batch(public.x[rows], public.hard_labels[rows])
        updates = []
        for _ in range(max(1, target.sightings)):
            step = Step(first.task, first.state, batch, rng, memory)
            step.batch = defense.batch(batch, step)
            step.noise = first.model.draw_noise(size, rng)
            updates.append(step.gradient(step.batch))
        mean = {n: torch.stack([u[n] for u in updates]).mean(0) for n in updates[0]}
        sighting = replace(first.seen[0], update=Update(mean, "gradient", size))
        observations.append(replace(first, seen=(sighting,), knowledge=replace(first.knowledge, secrets={})))
        truth.append(batch.x)
        labels.append(batch.y)
    return Target(observations, torch.stack(labels), rng, target.budget), torch.stack(truth)
