"""Against any randomness: a client that trains on the same images again draws again, and the draws average out.

Updates of one state are averaged entry by entry, over those sightings in which the entry was sent at all (an exact zero
next to other values was left out, not measured). The mean is matched. The attack needs no knowledge of the defense.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks import Answer, Target, attack
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.matching.swift import SwiftCounter
from gradveil.core.observation import Observation, Sighting
from gradveil.core.types import Update, hard_labels


@attack("repeats", version=4)
class Repeats(SwiftCounter):
    """Average several sightings of the same data on the same state, then match.

    Example: gradveil audit --defense gaussian:std=0.01 --updates 16 --attack repeats
    """

    def applies(self, observation: Observation) -> str | None:
        groups = _groups(observation)
        if max(len(g) for g in groups) < 2:
            return "no state was seen with more than one update of the same data"
        if all(_alike(group) for group in groups):
            return "the updates of one state are all the same, so there is nothing to average"
        return None

    def run(self, target: Target) -> Answer:
        merged = [merge(o) for o in target.observations]
        labels = target.labels
        if target.knowledge.labels is None:  # those read off a single update are as uncertain as it is
            labels = torch.stack([infer_labels(o) for o in merged])
        return replace(self.search.reconstruct(target.about(merged, labels)), labels=hard_labels(labels, soft_ndim=3))


def merge(observation: Observation) -> Observation:
    """One sighting for each state: the mean of its updates."""
    return replace(observation, seen=tuple(_mean(group) for group in _groups(observation)))


def _groups(observation: Observation) -> list[list[Sighting]]:
    groups: dict[tuple[int, int], list[Sighting]] = {}
    for sighting in observation.seen:
        groups.setdefault((id(sighting.state), sighting.group), []).append(sighting)
    return list(groups.values())


def _alike(group: list[Sighting]) -> bool:
    first = group[0].update.tensors
    return all(torch.equal(s.update.tensors[n], t) for s in group[1:] for n, t in first.items())


def _mean(group: list[Sighting]) -> Sighting:
    first = group[0].update
    tensors = {n: _sent_mean(torch.stack([s.update.tensors[n] for s in group])) for n in first.tensors}
    return replace(group[0], update=Update(tensors, first.kind, first.examples))


def _sent_mean(values: Tensor) -> Tensor:
    return values.sum(0) / (values != 0).sum(0).clamp_min(1)
