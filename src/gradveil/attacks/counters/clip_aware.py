"""Against clipping, which changes nothing but the size of an update: no attack here depends on the size."""

from gradveil.attacks import attack
from gradveil.attacks.counters.batches import BatchCounter
from gradveil.core.observation import Observation
from gradveil.defenses.update.clip import Clip
from gradveil.defenses.update.flower_local import FlowerLocal


@attack("clip-aware", against=(Clip, FlowerLocal), targets="any", version=9)
class ClipAware(BatchCounter):
    """Closed forms, the inversion of features and `swift`, which no change of an update's size stops.

    Single images and batches, all networks and all local training: `swift`, which begins with the closed forms. Batches
    that can be read apart at the first fully connected layer: the inversion of features.

    Example: gradveil audit --defense clip:norm=0.5 --attack clip-aware
    """

    def applies(self, observation: Observation) -> str | None:
        knowledge = observation.knowledge
        return None if knowledge.clip_norm or knowledge.part(Clip) else "the defense does not clip"
