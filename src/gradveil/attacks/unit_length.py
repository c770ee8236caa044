"""Updates at unit length: an attack must not depend on the size of an update, which a defense may change at will.

One number divides the parameters of all sightings of one observation, so that means of several updates keep their
meaning. It is kept in `knowledge.norm`, and declared noise and clipping are divided by it too. Tensors that are no
trainable parameters (the statistics of BatchNorm) stay as they are.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from gradveil.core.observation import Observation, Sighting
from gradveil.core.types import Tensors


def why_unusable(observation: Observation) -> str | None:
    """Why no attack can use the update, or None if one can."""
    tensors = list(_sent(observation))
    if not all(bool(t.isfinite().all()) for t in tensors):
        return "the update holds values that are not finite"
    return None if any(bool(t.any()) for t in tensors) else "the update is zero everywhere"


def unit_length(observation: Observation) -> Observation:
    """The same observation with updates whose root mean square length over the sightings is 1.

    Computed in double precision after a division by the largest magnitude, as the square of a small number may vanish.
    """
    largest = max(float(t.abs().max()) for t in _sent(observation))
    squares = sum(float((t.double() / largest).square().sum()) for t in _sent(observation))
    rest = math.sqrt(squares / len(observation.seen))
    norm = largest * rest

    def scaled(name: str, t: Tensor) -> Tensor:
        if name not in observation.model.trainable:
            return t
        return (t.double() / largest / rest).to(observation.state[name].dtype)

    def one(sighting: Sighting) -> Sighting:
        tensors = {name: scaled(name, t) for name, t in sighting.update.tensors.items()}
        return replace(sighting, update=replace(sighting.update, tensors=tensors))

    knowledge = replace(observation.knowledge, norm=observation.knowledge.norm * norm)
    return replace(observation, seen=tuple(one(s) for s in observation.seen), knowledge=knowledge)


def _sent(observation: Observation) -> Iterator[Tensor]:
    """The parameters of all updates."""
    for sighting in observation.seen:
        for name in observation.model.trainable:
            if (tensor := sighting.update.tensors.get(name)) is not None and tensor.numel():
                yield tensor


def least_agreement(sent: Tensors, plain: Tensors) -> float:
    """Whether `sent` is the undefended update `plain` up to one common factor: 1 if it is, by the tensor that agrees least.

    After `plain` was multiplied by the factor that fits all tensors together best, a tensor of its length agrees by the
    cosine between the two, and one of another length by less. Per tensor, because on some nets the whole updates of two
    different images of a class have a cosine above 0.999.
    """
    if not plain.keys() <= sent.keys() or any(sent[n].shape != plain[n].shape for n in plain):
        return -1.0
    ours, theirs = ([t[n].double().flatten() for n in plain] for t in (sent, plain))
    largest = [max(float(t.abs().max()) for t in side) for side in (ours, theirs)]
    if not all(math.isfinite(size) and size > 0 for size in largest):
        return -1.0
    pairs = [(a / largest[0], b / largest[1]) for a, b in zip(ours, theirs, strict=True)]
    factor = sum(float(a @ b) for a, b in pairs) / sum(float(b @ b) for _, b in pairs)
    return min(_agreement(a, factor * b) for a, b in pairs) if factor > 0 else -1.0


def _agreement(a: Tensor, b: Tensor) -> float:
    """The cosine of two vectors of one length; less where their lengths differ."""
    square, error = float(b @ b), float((a - b) @ (a - b))
    return max(-1.0, 1 - error / (2 * square)) if square else 1.0 - 2.0 * (error > 0)
