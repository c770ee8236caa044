"""Against SVTPrivacy: zeros were not sent, and the noise on all other entries has a known size.

Repeated updates of one batch send different entries. The mean of an entry is over the updates that sent it, and the entry
counts by their number. The few entries of the classifier's bias may be missing, so labels are read from the rows of its weight.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks import Answer, Target, attack
from gradveil.attacks.counters.noise_likelihood import NoiseLikelihood, same_state
from gradveil.attacks.labels.rules import llg
from gradveil.attacks.layers import classifier_gradients
from gradveil.attacks.matching.problem import Insight
from gradveil.core.observation import Observation
from gradveil.core.types import Tensors
from gradveil.defenses.update.svt import Svt


@attack("svt-likelihood", against=(Svt,), targets="any", version=2)
class SvtLikelihood(NoiseLikelihood):
    """As `noise-likelihood`, on the entries that were sent, whose noise has the size that the settings say.

    Args: steps: iterations of signed Adam; by default 1,500 scaled by the budget.
    Example: gradveil audit --defense svt:fraction=0.5,epsilon=1e4,noise_var=100,gamma=1 --attack svt-likelihood
    """

    def applies(self, observation: Observation) -> str | None:
        return None if observation.knowledge.part(Svt) else "the defense is not svt"

    def run(self, target: Target) -> Answer:
        if target.knowledge.labels is not None or not target.task.has_classes:
            return super().run(target)
        labels = torch.stack([self._row_labels(o, usual) for o, usual in zip(target.observations, target.labels, strict=True)])
        return replace(super().run(target.about(target.observations, labels)), labels=labels)

    def _row_labels(self, observation: Observation, usual: Tensor) -> Tensor:
        weight, _ = classifier_gradients(self.average(observation))
        return usual if weight is None else llg(weight, len(usual))

    def average(self, observation: Observation) -> Observation:
        times, first = _times_sent(observation), observation.seen[0]
        sums = {n: torch.stack([s.update.tensors[n] for s in same_state(observation)]).sum(0) for n in times}
        means = {n: total / times[n].clamp_min(1) for n, total in sums.items()}
        return replace(observation, seen=(replace(first, update=replace(first.update, tensors=means)),))

    def insight(self, target: Target) -> Insight:
        rows = [_times_sent(o) for o in target.observations]
        return Insight({name: torch.stack([row[name] for row in rows]).sqrt() for name in rows[0]})

    def expected_misfit(self, observation: Observation) -> float:
        sent = sum(int((times > 0).sum()) for times in _times_sent(observation).values())
        std = math.sqrt(2) * observation.knowledge.needed_part(Svt).noise_scale / observation.knowledge.norm
        return sent * std**2


def _times_sent(observation: Observation) -> Tensors:
    """Per entry, the number of updates that hold it."""
    same = same_state(observation)
    return {n: torch.stack([s.update.tensors[n] != 0 for s in same]).sum(0).to(t) for n, t in same[0].update.tensors.items()}
