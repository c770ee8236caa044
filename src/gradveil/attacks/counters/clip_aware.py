"""Against clipping: our update is clipped to the same norm before it is compared, so every distance fits again."""

from functools import reduce

import torch

from gradveil.attacks import Target, attack
from gradveil.attacks.matching.problem import NOTHING, Insight
from gradveil.attacks.matching.swift import SwiftCounter
from gradveil.core.observation import Observation
from gradveil.core.types import Tensors


@attack("clip-aware", adaptive=True, targets="any")
class ClipAware(SwiftCounter):
    """Match after clipping our update to the norm that the defense declares.

    Example: gradveil audit --defense clip:norm=0.5 --attack clip-aware
    """

    def applies(self, observation: Observation) -> str | None:
        return None if observation.knowledge.clip_norm else "the defense does not clip"

    def insight(self, target: Target) -> Insight:
        return clipped(target)


def clipped(target: Target) -> Insight:
    """Our updates are clipped as the defense does it; nothing where it does not clip."""
    bound = target.knowledge.clip_norm
    if bound is None:
        return NOTHING

    def clip(tensors: Tensors) -> Tensors:
        size = torch.sqrt(reduce(torch.add, ((g.flatten(1) ** 2).sum(1) for g in tensors.values())) + 1e-24)
        scale = (bound / size).clamp_max(1.0)
        return {name: g * scale.view(-1, *(1 for _ in g.shape[1:])) for name, g in tensors.items()}

    return Insight(transform=clip)
