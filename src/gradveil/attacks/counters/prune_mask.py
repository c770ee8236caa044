"""Against pruning: entries that were not sent say nothing, so only the sent ones are matched.

LODA and others mask a first-order cosine this way; the same mask under second-order steps is far stronger.
"""

from __future__ import annotations

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.matching.problem import Insight
from gradveil.attacks.matching.swift import Swift
from gradveil.attacks.registry import attack
from gradveil.core.observation import Observation
from gradveil.core.settings import settings


@attack("prune-mask", adaptive=True, targets="any")
@settings
class PruneMask(Attack):
    """Match only what was sent."""

    def applies(self, observation: Observation) -> str | None:
        pruned = any((t == 0).float().mean() > 0.05 for t in observation.update.tensors.values())
        return None if pruned else "no tensor of the update has zeroed entries"

    def run(self, target: Target) -> Answer:
        masks = {name: (t != 0).to(t) for name, t in target.updates().items()}
        return Swift().reconstruct(target, Insight(masks))
