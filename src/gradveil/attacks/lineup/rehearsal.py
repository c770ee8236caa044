"""The rehearsal: a copy of the client, with its defense, sends updates of public batches to the adversary itself.

The adversary tries every way of comparing on them and takes the one that identifies most: it knows the truth about its own
batches. The way is the same for all victims, and chosen before anything of theirs is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.base import Target
from gradveil.attacks.generative.rehearsal import copy_of_client, cost_of_round
from gradveil.attacks.lineup.background import Filter, Seen
from gradveil.attacks.lineup.contributions import Contributions, Dense
from gradveil.attacks.lineup.ground import Ground, Reading, Sent
from gradveil.attacks.lineup.span import Span
from gradveil.attacks.unit_length import unit_length, why_unusable
from gradveil.client import Client
from gradveil.core.observation import Observation, Sighting, observe
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.update.none import NoDefense

RIDGES = (1e-2, 1e-1, 1.0, 10.0, 100.0)
CUTS = (1e-6, 1e-4, 1e-2)  # see `Span`
HELD_OUT = 600  # public images of the rehearsal, at most; a third of all
FEW = 64  # public images below which there is no rehearsal
RIVALS = 5  # images of a class that a member is compared with, at the least
ALLOWANCE = 4e9  # work of all rounds, and four times that for the encoding of candidates; about a nanosecond each
ZEROS = 0.05  # share of further zeros in defended updates from which zeros count as not sent
CANDIDATES = 1001  # of a usual line-up


class Rehearsed(NamedTuple):
    """One public batch: what was sent, which held-out image is the member, and which of its class were not in the batch."""

    sent: Sent
    seen: Seen
    label: int
    member: Tensor
    rivals: Tensor


def prepare(observation: Observation, state: Tensors, public: Batch | None, size: int, rounds: int) -> Ground:
    """The ground of all victims of one state, with the way of comparing that did best in `rounds` rehearsals.

    Args:
        observation: of one victim, at unit length.
        state: of the model.
        public: in random order.
        size: number of public images that tell what the others of a batch add.
        rounds: number of rehearsals.
    """
    if public is None or len(public) < 4:
        return Ground(observation, state, None)
    held_out = min(HELD_OUT, len(public) // 3) if len(public) >= FEW else 0
    target = Target([observation], torch.zeros(1, observation.knowledge.batch_size), generator("line-up"))
    client = copy_of_client(target, public)
    changes = bool({"data", "batch"} & set(client.defense.stages))
    costs = (size + CANDIDATES) * cost_of_round(client, observation.state, public[:1]) if changes else 0.0
    encoder = client if changes and costs <= 4 * ALLOWANCE else None
    ground = Ground(observation, state, public[held_out:][:size], encoder)
    if held_out:
        batch = public[: ground.batch_size]
        if rounds * cost_of_round(client, observation.state, batch) > ALLOWANCE:
            client = copy_of_client(target, public, NoDefense())
        _choose(ground, client, public[:held_out], rounds)
    return ground


def _choose(ground: Ground, client: Client, held_out: Batch, rounds: int) -> None:
    images, observed = ground.contributions(held_out), list(_rounds(ground, client, held_out, rounds))
    plain = ground.task.model.gradient(
        ground.observation.state, ground.task.normalize(held_out.x[: ground.batch_size]), held_out.y[: ground.batch_size]
    )
    if observed:
        zeros = min(_zeros(o.update.tensors.values()) for o, _ in observed)
        ground.masks = zeros > _zeros(plain.values()) + ZEROS
    rehearsed = [r for o, rows in observed if (r := _rehearsed(ground, images, held_out, o, rows)) is not None]
    if not rehearsed or ground.masks:  # a covariance per mask would take long
        return
    ways = _filters(ground, images, rehearsed) + _spans(images, rehearsed)
    _, ground.reading = max(ways, key=lambda way: way[0])


def _rounds(ground: Ground, client: Client, held_out: Batch, rounds: int) -> Iterable[tuple[Observation, Tensor]]:
    """Updates of held-out batches, and the places of their images."""
    state, rng = ground.observation.state, generator("line-up", "rehearsal")
    for i in range(rounds):
        rows = torch.randperm(len(held_out), generator=rng)[: ground.batch_size]
        update, _ = client.round(state, held_out[rows], "line-up", i)
        observed = observe(ground.task, [Sighting(state, update)], training=client.training, defense=client.defense)
        if why_unusable(observed) is None:
            yield unit_length(observed), rows


def _rehearsed(ground: Ground, images: Contributions, held_out: Batch, o: Observation, rows: Tensor) -> Rehearsed | None:
    assert ground.background is not None
    labels = ground.labels(held_out)
    rivals = labels == labels[rows[0]]
    rivals[rows] = False
    if int(rivals.sum()) < RIVALS:
        return None
    sent = ground.sent(o, o.update.tensors, labels[rows])
    seen = Seen(ground.background.public.along(sent.blocks), images.along(sent.blocks))
    return Rehearsed(sent, seen, int(labels[rows[0]]), rows[:1], rivals.nonzero().flatten())


def _filters(ground: Ground, images: Contributions, rehearsed: Sequence[Rehearsed]) -> list[tuple[float, Reading]]:
    """The success of every matched filter. All share the covariance of an average batch, which saves time."""
    background, ways = ground.background, list[tuple[float, Reading]]()
    assert background is not None
    cross, squares = background.public.dot(images), images.squares()
    average = background.sizes / background.sizes.sum() * (ground.batch_size - 1)
    for way in [Filter(ridge, free) for free in ([False, True] if ground.has_size else [True]) for ridge in RIDGES]:
        whitening = ground.whitening(way, background, average, rehearsed[0].sent)
        coordinates, values = whitening.coordinates(whitening.weigh(cross)), []
        for sent, seen, label, member, rivals in rehearsed:
            others = sent.others(label)
            scores = way.scores(whitening, cross, squares, seen, others, coordinates)
            values.append(scores[torch.cat([member, rivals])])
        ways.append((_success(values), way))
    return ways


def _spans(images: Contributions, rehearsed: Sequence[Rehearsed]) -> list[tuple[float, Reading]]:
    """The success of the span of every fully connected layer."""
    ways = list[tuple[float, Reading]]()
    for place, block in enumerate(images.blocks):
        if not isinstance(block, Dense):
            continue
        for way in (Span(place, cut) for cut in CUTS):
            values = []
            for one in rehearsed:
                rows = torch.cat([one.member, one.rivals])
                values.append(way.scores(one.sent.blocks[place], Dense(block.inputs[rows], block.signals[rows])))
            ways.append((_success(values), way))
    return ways


def _success(values: Sequence[Tensor]) -> float:
    """The share of members that would be identified in a usual line-up, if scores of others are Gaussian; members are first.

    Where all would be, the distance from the others decides.
    """
    margins = torch.stack([(v[0] - v[1:].mean()) / v[1:].std().clamp_min(1e-12) for v in values])
    return float(torch.special.ndtr(margins).pow(CANDIDATES - 1).mean() + 1e-6 * margins.clamp(-1e3, 1e3).mean())


def _zeros(tensors: Iterable[Tensor]) -> float:
    flat = torch.cat([t.flatten() for t in tensors])
    return float((flat == 0).double().mean())
