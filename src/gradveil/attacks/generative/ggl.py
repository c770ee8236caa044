"""GGL (Li et al. 2022): the search stays among images that a generative network can make, so that few numbers suffice.

1. A generator is trained on public images (`gan.py`), once; it has classes where the public images have all of them.
2. The work of the defense is read off the update: entries or columns that are exactly zero do not count on either side;
   the cosine makes a clipping bound irrelevant. Where the first linear layer's gradients are those of one image, its exact
   input and the signal behind it replace all later layers, random ones included.
3. The search is for the latent numbers that would have sent this update, plus λ·R(z): the best of many draws go on, by
   Adam or, without any gradient of the match, by CMA-ES. R is the KL divergence of their mean and variance from N(0, 1),
   or (‖z‖² − dim)² / dim² in the paper's alternative. The mismatch decides among the restarts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.generative.gan import LATENT, Generator, generator_for
from gradveil.attacks.generative.rehearsal import fits, public_batch
from gradveil.attacks.matching.distances import Cosine
from gradveil.attacks.matching.head import FeatureMatch, reduce_to_head
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.problem import Insight, Match, Problem
from gradveil.core.errors import UserError
from gradveil.core.loops import Loop, Snapshot
from gradveil.core.observation import Observation
from gradveil.core.types import Tensors

SPARSE = 0.05  # share of exact zeros from which a tensor was thinned out
ROWS = 512  # evaluated at a time


@attack("ggl", needs={"public"}, version=2)
class GGL(Attack):
    """Match the update of generated images, over the generator's input.

    Args:
        optimizer: Adam, or CMA-ES, which needs the package cma.
        conditional: a generator that knows classes; by default where public images have all of them.
        regularizer: KL divergence of the latent numbers from N(0, 1), or their norm.
        weight: weight of the regulariser; the paper's code has 1e-4 for the cosine and 0.1 for L2.
        steps, lr: iterations of Adam (twice the generations of CMA-ES), scaled by the budget, and its learning rate.
        draws, restarts: random latents from which the search begins, and how many of the best go on.
    Example: gradveil audit --attack ggl:optimizer=cma
    """

    optimizer: Literal["adam", "cma"] = "adam"
    conditional: bool | None = None
    regularizer: Literal["kl", "norm"] = "kl"
    weight: float = Field(default=1e-2, ge=0)
    steps: int = Field(default=600, ge=1)
    lr: float = Field(default=0.1, gt=0)
    draws: int = Field(default=64, ge=1)
    restarts: int = Field(default=4, ge=1)

    def cost(self, work: Workload) -> Cost:  # of the search: a generator of few images has little to search
        return Cost(min(work.steps(self.steps, least=2), max(20, work.public_images)), rows=self.restarts)

    def applies(self, observation: Observation) -> str | None:
        return fits(observation)

    def run(self, target: Target) -> Answer:
        public = public_batch(target)
        classes = target.task.num_outputs
        conditional = _all_classes(target) if self.conditional is None else self.conditional
        network = generator_for(public, classes if conditional else 0, target.cache, target.progress)
        search = _Search(target, network, self)
        start = search.begin(self.draws, 1 if self.optimizer == "cma" else self.restarts)
        steps = self.cost(target.workload).iterations
        z, residual = self._cma(search, start, steps) if self.optimizer == "cma" else self._adam(search, start, steps)
        return Answer(search.images(z, search.victims), residual, search.hard, iterations=steps)

    def _adam(self, search: _Search, z: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        rows = search.victims.repeat_interleave(self.restarts)
        step = Adam(self.lr).stepper(z)
        at = _Latents(z, z.clone(), torch.full((len(z),), math.inf))
        for i in Loop(steps, at, step):
            z = at.z.requires_grad_()
            with torch.enable_grad():
                value = search(z, rows)
                (slope,) = torch.autograd.grad(value.sum(), z)
            better = value.detach() < at.lowest
            at.best = torch.where(better.view(-1, 1, 1), z.detach(), at.best)
            at.lowest = torch.where(better, value.detach(), at.lowest)
            decay = 0.1 ** sum(i >= int(steps / part) for part in (2.667, 1.6, 1.142))
            at.z = z.detach() + step(torch.nan_to_num(slope), decay)
            search.tick(i, steps)
        best = at.best
        residual = search.mismatch(best, rows).view(-1, self.restarts)
        pick = torch.nan_to_num(residual, nan=math.inf).argmin(1)
        return best[pick + torch.arange(len(pick)) * self.restarts], residual.gather(1, pick[:, None]).squeeze(1)

    def _cma(self, search: _Search, z: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """One evolution per victim, all evaluated together."""
        try:
            import cma
        except ImportError:
            raise UserError("ggl:optimizer=cma needs the package cma: pip install 'gradveil[gradfree]'.") from None
        size, shape = len(z), z.shape[1:]
        streams = np.random.default_rng(int(torch.randint(2**31, (1,), generator=search.target.rng)))
        options = {"verbose": -9, "seed": math.nan, "randn": lambda n, d: streams.standard_normal((n, d))}
        evolutions = [cma.CMAEvolutionStrategy(row.flatten().double().numpy(), 0.5, options) for row in z]
        for i in Loop(max(1, steps // 2)):
            asked = [e.ask() for e in evolutions]
            rows = search.victims.repeat_interleave(len(asked[0]))
            trial = torch.tensor(np.concatenate([np.stack(a) for a in asked])).float().view(-1, *shape)
            values = torch.nan_to_num(search.evaluated(trial, rows), nan=1e6).view(size, -1).double().numpy()
            for evolution, points, value in zip(evolutions, asked, values, strict=True):
                evolution.tell(points, value.tolist())
            search.tick(i, steps // 2)
        best = np.stack([e.result.xbest if e.result.xbest is not None else e.mean for e in evolutions])
        z = torch.tensor(best).float().view(-1, *shape)
        return z, search.mismatch(z, search.victims)


@dataclass
class _Latents(Snapshot):
    """What a step of Adam changes, beside the optimiser."""

    z: Tensor
    best: Tensor
    lowest: Tensor


class _Search:
    """The objective over latents, for victims as they are or reduced to the layers before their first linear one."""

    def __init__(self, target: Target, network: Generator, how: GGL):
        self.target, self.network, self.how = target, network, how
        self.hard = target.hard_labels
        self.victims = torch.arange(target.shape[0])
        head = reduce_to_head(target)
        inner = head.target if head else target
        # Columns that a defense has zeroed look like features of zero, so where there are many of these none is used.
        whole = head is not None and float((head.features == 0).float().mean()) < SPARSE
        priors = (FeatureMatch(head.features),) if head and whole else ()
        self.problem = Problem(inner, Match(Cosine(), priors), Insight(_sent(inner)))

    def images(self, z: Tensor, rows: Tensor) -> Tensor:
        made = self.network(z.flatten(0, 1), self.hard[rows].flatten())
        return self.target.normalize(made.unflatten(0, z.shape[:2]))

    def __call__(self, z: Tensor, rows: Tensor) -> Tensor:
        return self._value(z, rows) + self.how.weight * self.regularizer(z)

    def regularizer(self, z: Tensor) -> Tensor:
        if self.how.regularizer == "norm":
            return (((z**2).mean(-1) - 1) ** 2).sum(-1)
        mean, variance = z.mean(-1), z.var(-1, unbiased=False).clamp_min(1e-8)
        return (-0.5 * (1 + variance.log() - mean**2 - variance)).sum(-1)

    def evaluated(self, z: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([self(a, b) for a, b in zip(z.split(ROWS), rows.split(ROWS), strict=True)])

    def mismatch(self, z: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            return self._value(z, rows)

    def _value(self, z: Tensor, rows: Tensor) -> Tensor:
        return self.problem.value(self.images(z, rows), self.problem.rows.at(rows))

    def begin(self, draws: int, kept: int) -> Tensor:
        """Of random latents, the same for every victim, those that fit it best: victims · kept × B × dim."""
        size = self.target.shape[1]
        one = torch.randn(max(draws, kept), size, LATENT, generator=self.target.rng)
        every = one.repeat(len(self.victims), 1, 1)
        value = torch.nan_to_num(self.evaluated(every, self.victims.repeat_interleave(len(one))), nan=math.inf)
        pick = value.view(len(self.victims), -1).topk(kept, largest=False).indices
        return one[pick].flatten(0, 1)

    def tick(self, done: int, steps: int) -> None:
        if self.target.progress and done % 10 == 0:
            self.target.progress(done, steps)


def _all_classes(target: Target) -> bool:
    public = target.knowledge.public
    return public is not None and public.hard_labels.unique().tolist() == list(range(target.task.num_outputs))


def _sent(target: Target) -> Tensors:
    """Masks for thinned-out tensors: only the entries that were sent count."""
    masks = {name: (t != 0).to(t) for name, t in target.updates().items()}
    return {name: mask for name, mask in masks.items() if float(mask.mean()) < 1 - SPARSE}
