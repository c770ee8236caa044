"""A weight difference of many steps as one gradient, at a point between the weights before and after. SME, Zhu et al. 2023."""

from dataclasses import replace

from gradveil.attacks.base import Target
from gradveil.core.observation import Observation, Sighting


def as_gradient(observation: Observation) -> Observation:
    """The victim as if it had sent the negative of its weight difference as a gradient, at the middle of its way."""
    knowledge = observation.knowledge
    share = knowledge.norm * knowledge.training.middle(knowledge.batch_size)

    def one(sighting: Sighting) -> Sighting:
        sent = sighting.update.tensors
        state = {n: v + share * sent[n] if n in sent else v for n, v in sighting.state.items()}
        return Sighting(
            state, replace(sighting.update, tensors={n: -t for n, t in sent.items()}, kind="gradient"), sighting.group
        )

    seen = tuple(one(s) for s in observation.seen)
    return replace(observation, seen=seen, knowledge=replace(knowledge, training=knowledge.training.single_gradient()))


def each_as_gradient(target: Target) -> list[Target]:
    """Every victim by itself, since each ended at other weights."""
    singles = (target.subset([i], "surrogate") for i in range(target.shape[0]))
    return [single.about([as_gradient(single.first)], single.labels) for single in singles]
