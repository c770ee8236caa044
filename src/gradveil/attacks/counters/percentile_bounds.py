"""Against PercentilePrivacy: entries between zero and the limit were sent exactly, those at the limit are at least as large.

The update says which is which: zeros were held back, and all entries at the limit have the largest absolute value.
"""

from dataclasses import replace

import torch

from gradveil.attacks import Target, attack
from gradveil.attacks.analytic.apart import LayerInputs
from gradveil.attacks.counters.prune_mask import PruneMask
from gradveil.attacks.matching.distances import AT_LIMIT
from gradveil.attacks.matching.problem import Insight
from gradveil.core.observation import Observation
from gradveil.core.types import Tensors
from gradveil.defenses.update.percentile import Percentile


@attack("percentile-bounds", against=(Percentile,), targets="any", version=4)
class PercentileBounds(PruneMask):
    """Match exact entries, and hold the others to their bound; in batches, complete the first fully connected layer.

    As `prune-mask`, but an entry at the limit counts only where a candidate stays below it. The completion of a batch's
    layer takes such entries for entries that were not sent.

    Example: gradveil audit --defense percentile:gamma=0.001 --attack percentile-bounds
    """

    def applies(self, observation: Observation) -> str | None:
        return None if observation.knowledge.part(Percentile) else "the defense is not percentile"

    def insight(self, target: Target) -> Insight:
        limits = torch.tensor([limit_of(o.update.tensors) for o in target.observations])
        return replace(super().insight(target), limits=limits)

    def read(self, observation: Observation) -> LayerInputs | None:
        (sighting, *others), limit = observation.seen, limit_of(observation.update.tensors)
        exact = {n: t.masked_fill(t.abs() >= AT_LIMIT * limit, 0) for n, t in sighting.update.tensors.items()}
        below = replace(sighting, update=replace(sighting.update, tensors=exact))
        return super().read(replace(observation, seen=(below, *others)))


def limit_of(sent: Tensors) -> float:
    """The largest absolute value; single numbers are not clamped, so they do not count."""
    return max((float(t.abs().max()) for t in sent.values() if t.ndim), default=0.0)
