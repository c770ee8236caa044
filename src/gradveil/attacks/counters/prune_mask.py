"""Against pruning: entries that were not sent say nothing, so only the sent ones are matched.

LODA and others mask a first-order cosine this way; the same mask under second-order steps is far stronger.
"""

from gradveil.attacks import Target, attack
from gradveil.attacks.matching.problem import Insight
from gradveil.attacks.matching.swift import SwiftCounter
from gradveil.core.observation import Observation
from gradveil.defenses.update.prune import Prune


@attack("prune-mask", against=(Prune,), targets="any", version=2)
class PruneMask(SwiftCounter):
    """Match only what was sent.

    Example: gradveil audit --defense prune:ratio=0.9 --attack prune-mask
    """

    def applies(self, observation: Observation) -> str | None:
        pruned = any((t == 0).float().mean() > 0.05 for t in observation.update.tensors.values())
        return None if pruned else "no tensor of the update has zeroed entries"

    def insight(self, target: Target) -> Insight:
        masks = {name: (t != 0).to(t) for name, t in target.updates().items()}
        return Insight(masks)
