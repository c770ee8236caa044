"""Against a defense of which nothing is known but that it may have spoilt some layers and left others as they were.

Several subsets of the update are matched at once: everything; what was sent (entries that are not exactly zero); all but
one layer, for each; the first half of the layers. A candidate that fits few numbers fits them easily, so the subsets'
own residuals cannot be compared. All candidates are judged alike, on all tensors, by how likely the whole update is if
every tensor carries noise of its own unknown size: with r = ‖g' − g‖² / ‖g‖² and n entries a tensor, the best size
leaves Σ (n/2)·log r. A layer that a candidate does not explain (r ≥ 1) says nothing for or against it, one that it
explains to many digits says much, and a large one more than a small one. So spoilt layers do not outvote whole ones.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.matching.distances import LayerCosine
from gradveil.attacks.matching.engine import solve
from gradveil.attacks.matching.optimizers import LBFGS
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Insight, Match, Problem
from gradveil.attacks.matching.starts import Start
from gradveil.attacks.matching.swift import Swift
from gradveil.attacks.registry import attack
from gradveil.core.observation import Observation
from gradveil.core.settings import settings
from gradveil.core.types import Tensors

FLOOR = 1e-8  # of r: digits that floats do not have are no evidence
Mask = dict[str, Tensor]  # name → 0/1, for one victim; broadcast over the tensor


@attack("layer-subsets", targets="any")
@settings
class LayerSubsets(Attack):
    """Match several subsets of the layers, keep what explains most of the update."""

    most: int = Field(default=8, ge=2)  # subsets; with more layers only the last ones are left out one by one
    kept: int = Field(default=2, ge=1)  # of them go on after a first look
    look: int = Field(default=60, ge=1)  # iterations of the first look

    def applies(self, observation: Observation) -> str | None:
        layers = len(_layers(observation.model.trainable))
        return None if layers > 1 else "the model has one layer, which has no subsets"

    def run(self, target: Target) -> Answer:
        rows = [(place, m) for place, o in enumerate(target.observations) for m in _subsets(o, self.most)]
        every, masks = _expanded(target, rows)
        match = Match(LayerCosine(), (TV(1e-3, "smoothed"),), LBFGS(), self.look, Start(scale=0.1))
        evidence = _evidence(every, solve(Problem(every, match, masks)).x)
        rows = [rows[i] for v in range(target.shape[0]) for i in _best(rows, evidence, v, self.kept)]
        every, masks = _expanded(target, rows)
        answer = Swift(restarts=1, cycles=1, adam_steps=0).reconstruct(every, masks)
        evidence = _evidence(every, answer.x)
        pick = [_best(rows, evidence, v, 1)[0] for v in range(target.shape[0])]
        return Answer(answer.x[pick], evidence[pick], iterations=answer.iterations)


MaskedRows = list[tuple[int, Mask]]  # the victim's number, and which entries of its update count


def _expanded(target: Target, rows: MaskedRows) -> tuple[Target, Insight]:
    """Each victim once per subset, and the masks."""
    places = [place for place, _ in rows]
    masks = {name: _stacked([mask[name] for _, mask in rows]) for name in rows[0][1]}
    return target.about([target.observations[i] for i in places], target.labels[places]), Insight(masks)


def _best(rows: MaskedRows, evidence: Tensor, victim: int, count: int) -> list[int]:
    own = [i for i, (place, _) in enumerate(rows) if place == victim]
    return sorted(own, key=lambda i: float(evidence[i]))[:count]


def _layers(names: list[str]) -> list[list[str]]:
    """Tensors of one module, in the model's order."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return list(found.values())


def _subsets(observation: Observation, most: int) -> list[Mask]:
    names, sent = observation.model.trainable, observation.update.tensors
    layers = _layers(names)
    every = {n: torch.ones([1] * sent[n].ndim) for n in names}
    subsets = [every, {n: (sent[n] != 0).float() if bool((sent[n] == 0).any()) else every[n] for n in names}]
    left_out = [{n: every[n] * (n not in layer) for n in names} for layer in reversed(layers)]
    early = {n for layer in layers[: (len(layers) + 1) // 2] for n in layer}
    subsets.append({n: every[n] * (n in early) for n in names})
    return (subsets + left_out)[:most]


def _stacked(masks: list[Tensor]) -> Tensor:
    """Rows first; a mask of single numbers stays so unless another row needs it whole."""
    shape = torch.broadcast_shapes(*(m.shape for m in masks))
    return torch.stack([m.expand(shape) for m in masks])


def _evidence(target: Target, x: Tensor) -> Tensor:
    """Σ (n/2)·log r over all tensors and sightings, a row; lower is better."""
    total = torch.zeros(len(x))
    noise = target.model.draw_noise(target.shape[1], target.rng)
    noise = {k: v.expand(len(x), *v.shape) for k, v in noise.items()}
    for i, sighting in enumerate(target.first.seen):
        found = target.model.updates(sighting.state, x, target.labels, target.training, noise)
        total += _log_share(found, target.updates(i))
    return torch.nan_to_num(total, nan=0.0, posinf=0.0)


def _log_share(found: Tensors, seen: Tensors) -> Tensor:
    terms = []
    for name, a in found.items():
        a, b = a.reshape(len(a), -1), seen[name].reshape(len(a), -1)
        sent = (b != 0).to(b)  # what was not sent says nothing
        share = ((a - b) ** 2 * sent).sum(1) / (b**2).sum(1).clamp_min(1e-24)
        terms.append(sent.sum(1) / 2 * share.clamp(FLOOR, 1.0).log())
    return torch.stack(terms).sum(0)
