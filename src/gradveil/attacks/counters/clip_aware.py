"""Against clipping, which changes nothing but the size of an update: every match leaves the size open."""

from gradveil.attacks import attack
from gradveil.attacks.matching.swift import SwiftCounter
from gradveil.core.observation import Observation
from gradveil.defenses.update.clip import Clip


@attack("clip-aware", against=(Clip,), targets="any", version=5)
class ClipAware(SwiftCounter):
    """`swift`, which no change of an update's size stops, under the name of clipping's counter.

    Example: gradveil audit --defense clip:norm=0.5 --attack clip-aware
    """

    def applies(self, observation: Observation) -> str | None:
        knowledge = observation.knowledge
        return None if knowledge.clip_norm or knowledge.part(Clip) else "the defense does not clip"
