"""The rehearsal: a copy of the client, with its defense, sends updates of public batches to the adversary itself.

The adversary tries every way of comparing on them and takes the one that identifies most: it knows the truth about its own
batches. The way is the same for all victims, and chosen before anything of theirs is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.base import Target
from gradveil.attacks.generative.rehearsal import copy_of_client, cost_of_round
from gradveil.attacks.lineup.contributions import Contributions, LayerBlock
from gradveil.attacks.lineup.ground import Ground, Sent, WayToCompare
from gradveil.attacks.lineup.others import Filter, Seen, Whitening
from gradveil.attacks.lineup.span import Directions, Span
from gradveil.attacks.unit_length import unit_length, why_unusable
from gradveil.client import Client
from gradveil.core.loops import Loop
from gradveil.core.observation import Observation, Sighting, observe
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors, Update

RIDGES = (1e-3, 1e-1, 10.0)
CUTS = (1e-6, 1e-4, 1e-2)  # see `Span`
HELD_OUT = 400  # public images of the rehearsal, at most; a third of all
FEW = 64  # public images below which there is no rehearsal
RIVALS = 5  # images of a class that a member is compared with, at the least
ALLOWANCE = 1e10  # work of all rounds, and of the encoding of all images; about a nanosecond each
LEAST = 4  # rounds
ZEROS = 0.05  # share of further zeros in defended updates from which zeros count as not sent
CERTAIN = 0.999  # success of a span with which the filters, which take longer, are not tried
CANDIDATES = 1001  # of a usual line-up


class Rehearsed(NamedTuple):
    """One public batch: what was sent, which held-out image is the member, and which of its class were not in the batch."""

    sent: Sent
    seen: Seen
    label: int
    member: Tensor
    rivals: Tensor


def prepare(target: Target, state: Tensors, public: Batch | None, size: int, rounds: int) -> Ground:
    """The ground of all victims of one state, with the way of comparing that did best in `rounds` rehearsals.

    Args:
        target: one victim, at unit length.
        state: of the model.
        public: in random order.
        size: number of public images that tell what the others of a batch add.
        rounds: number of rehearsals.
    """
    observation = target.first
    if public is None or len(public) < 4:
        return Ground(observation, state, None)
    held_out = min(HELD_OUT, len(public) // 3) if len(public) >= FEW else 0
    client = copy_of_client(target, public)
    cost = cost_of_round(client, observation.state, public[:1])
    changes = bool({"data", "batch"} & set(client.defense.stages))
    encoder = client if changes and cost * (size + CANDIDATES) <= ALLOWANCE else None
    ground = Ground(observation, state, public[held_out:][:size], encoder)
    rounds = min(rounds, int(ALLOWANCE / cost / ground.batch_size))
    if held_out and rounds >= LEAST:
        _choose(ground, client, public[:held_out], rounds)
    else:
        ground.masks = _zeros(observation.update) > _natural_zeros(ground, public) + ZEROS
    return ground


def _choose(ground: Ground, client: Client, held_out: Batch, rounds: int) -> None:
    updates = _rounds(ground, client, held_out, rounds)
    observed = list(islice(updates, LEAST))
    if observed and min(_zeros(o.update) for o, _ in observed) > _natural_zeros(ground, held_out) + ZEROS:
        ground.masks = True  # each mask has a covariance, so that a comparison of ways would take long
        return
    observed, images = [*observed, *updates], ground.contributions(held_out)
    rehearsed = [r for o, rows in observed if (r := _rehearsed(ground, images, held_out, o, rows)) is not None]
    if rehearsed:
        ways = _spans(ground, images, rehearsed)
        if max((success for success, _ in ways), default=0.0) < CERTAIN:
            ways += _filters(ground, images, rehearsed)
        _, ground.way = max(ways, key=lambda way: way[0])


def _rounds(ground: Ground, client: Client, held_out: Batch, rounds: int) -> Iterator[tuple[Observation, Tensor]]:
    """Updates of held-out batches, and the places of their images."""
    state, rng = ground.observation.state, generator("line-up", "rehearsal")
    for i in Loop(rounds, shared=True):
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


def _filters(ground: Ground, images: Contributions, rehearsed: Sequence[Rehearsed]) -> list[tuple[float, WayToCompare]]:
    """The success of every matched filter. All share the covariance of an average batch, which saves time."""
    background, ways = ground.background, list[tuple[float, WayToCompare]]()
    assert background is not None
    cross, squares = background.public.dot(images), images.squares()
    average = background.sizes / background.sizes.sum() * (ground.batch_size - 1)
    for ridge in RIDGES:
        whitening: Whitening | None = None
        for way in [Filter(ridge, free) for free in ([False, True] if ground.has_size else [True])]:
            if whitening is None or rehearsed[0].sent.noise:  # which counts as less or more where the size is free
                whitening = ground.whitening(way, background, average, rehearsed[0].sent)
                candidates = whitening.of(cross, squares)
            values = []
            for sent, seen, label, member, rivals in rehearsed:
                rows = torch.cat([member, rivals])
                picked = Seen(seen.public, seen.candidates[:, rows])
                values.append(way.scores(whitening, candidates.picked(rows), picked, sent.others(label)))
            ways.append((_success(values), way))
    return ways


def _spans(ground: Ground, images: Contributions, rehearsed: Sequence[Rehearsed]) -> list[tuple[float, WayToCompare]]:
    """The success of the span of every fully connected layer."""
    ways = list[tuple[float, WayToCompare]]()
    for place, block in enumerate(images.blocks):
        if isinstance(block, LayerBlock):
            values: dict[Span, list[Tensor]] = {Span(place, cut): [] for cut in CUTS}
            for one in rehearsed:
                directions = Directions.of(one.sent.blocks[place], ground.batch_size)
                rows = torch.cat([one.member, one.rivals])
                for way, scores in values.items():
                    scores.append(way.scores(directions, LayerBlock(block.inputs[rows], block.signals[rows])))
            ways += [(_success(scores), way) for way, scores in values.items()]
    return ways


def _success(values: Sequence[Tensor]) -> float:
    """The share of members that would be identified in a usual line-up, if scores of others are Gaussian; members are first.

    Where all would be, the distance from the others decides.
    """
    margins = torch.stack([(v[0] - v[1:].mean()) / v[1:].std().clamp_min(1e-12) for v in values])
    return float(torch.special.ndtr(margins).pow(CANDIDATES - 1).mean() + 1e-6 * margins.clamp(-1e3, 1e3).mean())


def _zeros(update: Update) -> float:
    """The share of zeros."""
    flat = torch.cat([t.flatten() for t in update.tensors.values()])
    return float((flat == 0).double().mean())


def _natural_zeros(ground: Ground, images: Batch) -> float:
    """The share of zeros in the plain gradient of a batch."""
    batch, task = images[: ground.batch_size], ground.task
    noise = task.model.draw_noise(len(batch), generator("line-up"))
    return _zeros(Update(task.model.gradient(ground.observation.state, task.normalize(batch.x), batch.y, noise)))
