"""Inversion of what a network with BatchNorm gives away about the forward pass of a batch. Ours.

The gradients of early layers pass every ReLU of the network twice, so in a deep one they hardly say in which direction images
are better: a search that starts with images that are for the most part right leaves them. What depends on the forward pass
is smooth: the moments that clients send with BatchNorm's statistics (Hatamizadeh et al. 2022), and the gradients of the last
layers. So:

1. Only the last tensors of the update are compared, beside the moments at every BatchNorm layer where they were sent.
   The layers before need one derivative, not two. BatchNorm takes the statistics of the candidates, as on the client.
2. Steps are taken in coordinates of natural images, coarse structure first, from several starts at once.
3. The half of the starts that is nearer to what was sent is kept, and their mean taken: where they differ, nothing was known.
"""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.matching.distances import LayerCosine
from gradveil.attacks.matching.engine import solve
from gradveil.attacks.matching.moments import MomentMatch
from gradveil.attacks.matching.natural import Coordinates, Natural
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV, BoxPenalty
from gradveil.attacks.matching.problem import Match, Problem
from gradveil.core.observation import Observation
from gradveil.metrics.matching import match as matched

SPREAD = 0.3  # of the starts, in standard deviations of natural images
SMOOTH = 1e-4  # weight of total variation


@attack("batchnorm", targets="any")
class BatchNormInversion(Attack):
    """Images with the BatchNorm moments and the last layers' gradients that a batch gives away.

    Args:
        steps: first-order steps from each start, scaled by the budget.
        starts: starts per victim.
        tensors: number of tensors at the end of the update that are compared.
        moments: weight of the moments, where they were sent.
        prior: weight of how unlikely an image is.
        lr: step size of Adam, in standard deviations of natural images.
    Example: gradveil audit --model resnet20:width=8 --batch-size 4 --sends-statistics --attack batchnorm:starts=8
    """

    steps: int = Field(default=300, ge=1)
    starts: int = Field(default=4, ge=1)
    tensors: int = Field(default=8, ge=1)
    moments: float = Field(default=10.0, ge=0)
    prior: float = Field(default=3e-3, ge=0)
    lr: float = Field(default=0.2, gt=0)

    def applies(self, observation: Observation) -> str | None:
        return None if observation.model.couples_images else "the model has no BatchNorm that is in train mode"

    def cost(self, work: Workload) -> Cost:
        """A step takes about half of an evaluation with the derivative of an update."""
        return Cost(max(1, self._steps(work) // 2), self.starts)

    def run(self, target: Target) -> Answer:
        last, steps = self._last(target), self._steps(target.workload)
        coordinates = Coordinates.of(last)
        priors = (MomentMatch(self.moments), Natural(coordinates, self.prior), TV(SMOOTH), BoxPenalty(1.0))
        match = Match(LayerCosine(), priors, Adam(self.lr), steps, restarts=self.starts, coordinates=coordinates)
        problem = Problem(last, match)
        x = solve(problem, start=coordinates.draw(last, self.starts, SPREAD)).x
        low, high = target.pixel_range
        x = torch.minimum(torch.maximum(x, low), high)
        score = torch.nan_to_num(problem.residual(x) + MomentMatch(self.moments)(x, problem.rows), nan=torch.inf)
        nearest = score.unflatten(0, (-1, self.starts)).sort(1)
        kept = nearest.indices[:, : (self.starts + 1) // 2] + self.starts * torch.arange(target.shape[0])[:, None]
        means = [_mean(target, x[rows], labels) for rows, labels in zip(kept, target.hard_labels, strict=True)]
        return Answer(torch.stack(means), nearest.values[:, 0], iterations=steps)

    def _steps(self, work: Workload) -> int:
        """All starts together take no longer than the budget allows."""
        return min(work.steps(self.steps), max(20, 2 * work.evaluations // self.starts))

    def _last(self, target: Target) -> Target:
        """The same victims with the last tensors of their updates."""
        model = target.model.restricted_to(target.model.trainable[-self.tensors :])
        return target.about([replace(o, task=o.task.with_model(model)) for o in target.observations], target.labels)


def _mean(target: Target, x: Tensor, labels: Tensor) -> Tensor:
    """The mean of several starts of one victim. Images of one label have no order, so they are brought to that of the first."""
    total = x[0].clone()
    for start in x[1:]:
        for label in labels.unique():
            rows = (labels == label).nonzero().flatten()
            total[rows] += start[rows[matched(target.denormalize(x[0][rows]), target.denormalize(start[rows]))]]
    return total / len(x)
