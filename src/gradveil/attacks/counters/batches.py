"""Counters that read batches apart at a fully connected layer, and search where a batch cannot be read."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks import Answer, Target
from gradveil.attacks.analytic.apart import LayerInputs, layer_inputs
from gradveil.attacks.matching.features import FeatureInversion, read_each
from gradveil.attacks.matching.swift import SwiftCounter
from gradveil.core.observation import Observation

READABLE = 0.15  # error of a reading up to which its inversion gets closer to the images than a search


class BatchCounter(SwiftCounter):
    """The inversion of features for batches that can be read apart; `swift` with the counter's insight for all others.

    The adversary chooses by the error of the reading, which needs no truth. The residuals of the answers would mislead: on
    nets with max-pooling, images of a search fit an update three times better than nearer images of the inversion.
    """

    inversion: ClassVar[FeatureInversion] = FeatureInversion()

    def read(self, observation: Observation) -> LayerInputs | None:
        """The inputs of a fully connected layer, in spite of the defense."""
        return layer_inputs(observation)

    def run(self, target: Target) -> Answer:
        single = target.knowledge.batch_size == 1
        if single or self.inversion.applies(target.first) is not None:
            return super().run(target)
        readings = {i: reading for i, reading in read_each(target, self.read).items() if reading.error <= READABLE}
        rows, others = list(readings), [i for i in range(target.shape[0]) if i not in readings]
        if not rows:
            return super().run(target)
        answer = self.inversion.invert(target.subset(rows), list(readings.values()), self.insight(target).subset(rows))
        if not others:
            return answer
        searched = super().run(target.subset(others))
        x, score = torch.zeros(target.shape), torch.zeros(target.shape[0])
        for part, places in ((answer, rows), (searched, others)):
            x[places], score[places] = part.x, part.score
        return Answer(x, score, iterations=max(answer.iterations, searched.iterations))


def with_gradient(observation: Observation, layer: str, gradient: Tensor) -> Observation:
    """The observation with another gradient [∇W ∇b] of a fully connected layer."""
    (sighting, *others), (weight, bias) = observation.seen, gradient.split([gradient.shape[1] - 1, 1], 1)
    changed = {f"{layer}.weight": weight, f"{layer}.bias": bias.flatten()}
    sent = sighting.update.tensors
    tensors = {**sent, **{name: t.to(sent[name].dtype) for name, t in changed.items()}}
    return replace(observation, seen=(replace(sighting, update=replace(sighting.update, tensors=tensors)), *others))
