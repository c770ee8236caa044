"""Against an unknown defense that may have spoiled some layers and left others as they were.

Several subsets of the update are matched at once: everything; the entries that were sent (not exactly zero); all but one
layer, for each layer; the first half of the layers. A candidate that fits few numbers fits them easily, so the residuals
of the subsets cannot be compared. All candidates are judged alike, on all tensors, by how likely the whole update is if
every tensor has an unknown scale s and carries noise of an unknown size: with r = ‖s·g' − g‖² / ‖g‖² and n entries per
tensor, the best of both leaves Σ (n/2)·log r. A layer that a candidate does not explain (r ≥ 1) says nothing for or
against it, one that it explains to many digits says much, and a large layer more than a small one. So spoiled layers do
not outvote whole ones.
"""

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.matching.distances import LayerCosine, fitted
from gradveil.attacks.matching.engine import solve
from gradveil.attacks.matching.optimizers import LBFGS
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Insight, Match, Problem
from gradveil.attacks.matching.starts import Start
from gradveil.attacks.matching.swift import Swift
from gradveil.core.observation import Observation
from gradveil.core.types import Tensors

FLOOR = 1e-8  # of r: digits that floats do not have are no evidence
SEARCH = Swift(restarts=1, cycles=1, adam_steps=0)
Mask = dict[str, Tensor]  # name → 0/1, for one victim; broadcast over the tensor


@attack("layer-subsets", targets="any", version=3)
class LayerSubsets(Attack):
    """Match several subsets of the layers, keep what explains most of the update.

    Args:
        most: largest number of subsets; with more layers only the last ones are left out one by one.
        kept, look: subsets that go on after a first look, and its iterations.
    Example: gradveil audit --defense mypackage.defenses:Mine --attack layer-subsets:most=12
    """

    most: int = Field(default=8, ge=2)
    kept: int = Field(default=2, ge=1)
    look: int = Field(default=60, ge=1)

    def cost(self, work: Workload) -> Cost:  # as if all rows took part throughout
        search = SEARCH.cost(work)
        return Cost(self.look + search.iterations * search.rows * self.kept // self.most, rows=self.most)

    def applies(self, observation: Observation) -> str | None:
        layers = len(_layers(observation.model.trainable))
        return None if layers > 1 else "the model has one layer, which has no subsets"

    def run(self, target: Target) -> Answer:
        rows = [(place, m) for place, o in enumerate(target.observations) for m in _subsets(o, self.most)]
        every, masks = _expanded(target, rows)
        match = Match(LayerCosine(), (TV(1e-3, "smoothed"),), LBFGS(), self.look, Start(scale=0.1))
        first = solve(Problem(every, match, masks))
        evidence = _evidence(every, first.x)
        rows = [rows[i] for v in range(target.shape[0]) for i in _best(rows, evidence, v, self.kept)]
        every, masks = _expanded(target, rows)
        answer = SEARCH.reconstruct(every, masks)
        evidence = _evidence(every, answer.x)
        pick = [_best(rows, evidence, v, 1)[0] for v in range(target.shape[0])]
        return Answer(answer.x[pick], evidence[pick], iterations=first.iterations + answer.iterations)


MaskedRows = list[tuple[int, Mask]]  # the victim's number, and which entries of its update count


def _expanded(target: Target, rows: MaskedRows) -> tuple[Target, Insight]:
    """Each victim once per subset, and the masks."""
    places = [place for place, _ in rows]
    masks = {name: _stacked([mask[name] for _, mask in rows]) for name in rows[0][1]}
    return target.about([target.observations[i] for i in places], target.labels[places]), Insight(masks)


def _best(rows: MaskedRows, evidence: Tensor, victim: int, count: int) -> list[int]:
    candidates = [i for i, (place, _) in enumerate(rows) if place == victim]
    return sorted(candidates, key=lambda i: float(evidence[i]))[:count]


def _layers(names: list[str]) -> list[list[str]]:
    """Tensors of one module, in the model's order."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())


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
    """Σ (n/2)·log r over all tensors and sightings, one number per row; lower is better."""
    total = torch.zeros(len(x))
    noise = target.model.draw_noise(target.shape[1], target.rng)
    noise = {k: v.expand(len(x), *v.shape) for k, v in noise.items()}
    for i, sighting in enumerate(target.first.seen):
        updates = target.model.updates(sighting.state, x, target.labels, target.training, noise)
        total += _log_share(updates, target.updates(i))
    return torch.nan_to_num(total, nan=0.0, posinf=0.0)


def _log_share(ours: Tensors, observed: Tensors) -> Tensor:
    terms = []
    for name, a in ours.items():
        a, b = a.reshape(len(a), -1), observed[name].reshape(len(a), -1)
        sent = (b != 0).to(b)  # an entry that was not sent says nothing
        (a,) = fitted([a * sent], [b])
        share = ((a - b) ** 2).sum(1) / torch.where(sent.any(1), (b**2).sum(1), 1)
        terms.append(sent.sum(1) / 2 * share.clamp(FLOOR, 1.0).log())
    return torch.stack(terms).sum(0)
