"""The line-up: which of m candidate images was in the batch? Asked by someone who has the images; nothing is rebuilt.

For each candidate the gradient that it adds to an update is computed, and compared with what was sent. It is another risk
than a rebuilt picture: less must leak for it, and it reaches larger batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks.labels import infer_labels
from gradveil.attacks.lineup.ground import Ground
from gradveil.attacks.lineup.rehearsal import prepare
from gradveil.attacks.unit_length import unit_length, why_unusable
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.settings import settings
from gradveil.core.types import Batch, Tensors

VERSION = 1  # raised when the results change


@dataclass(frozen=True)
class Candidates:
    """Images that may have been in the batches, and which of them stand in the line-up of each batch."""

    images: Batch
    rows: tuple[Tensor, ...]  # per observation


@settings
class LineUp:
    """Score candidates by how well they explain the update of a batch.

    Args:
        public_images: whose gradients tell what the other images of a batch add.
        rehearsals: public batches on which the way of comparing is chosen.
        draws: of what is random in the defense, per candidate.
    """

    public_images: int = Field(default=800, ge=8)
    rehearsals: int = Field(default=24, ge=1)
    draws: int = Field(default=4, ge=1)

    def scores(self, observations: Sequence[Observation], candidates: Candidates) -> list[Tensor]:
        """Per observation one score per candidate, in the order of its rows; the highest fits best.

        An update that cannot be used gives all candidates the same score.
        """
        answers = [torch.zeros(len(rows), dtype=torch.double) for rows in candidates.rows]
        usable = {i: unit_length(o) for i, o in enumerate(observations) if why_unusable(o) is None}
        grounds: dict[object, Ground] = {}
        with torch.no_grad():
            for places in _alike(usable, candidates):
                union = torch.cat([candidates.rows[i] for i in places]).unique()
                for sightings in _by_state(usable[places[0]]):
                    self._compare(usable, places, sightings, candidates, union, grounds, answers)
        return answers

    def _compare(
        self,
        observations: dict[int, Observation],
        places: Sequence[int],
        sightings: Sequence[int],
        candidates: Candidates,
        union: Tensor,
        grounds: dict[object, Ground],
        answers: list[Tensor],
    ) -> None:
        """Add the scores of these victims by these sightings, which are of one state."""
        first = observations[places[0]]
        state = first.seen[sightings[0]].state
        key = (id(first.model), id(state), first.knowledge.batch_size)
        if key not in grounds:
            grounds[key] = prepare(first, state, self._public(first), self.public_images, self.rehearsals)
        shared, images = grounds[key], candidates.images[union]
        draws = self.draws if shared.is_random else 1
        moves = first.update.kind == "delta" and first.knowledge.noise is None
        faces = [] if moves else [shared.line_up(images, draw) for draw in range(draws)]
        for i in places:
            observation, rows = observations[i], torch.searchsorted(union, candidates.rows[i])
            tensors = _mean([observation.seen[s].update.tensors for s in sightings])
            ground = shared
            if moves:  # between the weights before and after the local training
                ground = shared.at(_between(state, tensors, observation.knowledge.norm))
                faces = [ground.line_up(candidates.images[candidates.rows[i]], draw) for draw in range(draws)]
                rows = torch.arange(len(rows))
            sent = ground.sent(observation, tensors, _labels(observation), len(sightings))
            scores = torch.stack([ground.scores(sent, one.picked(rows)) for one in faces])
            answers[i] = answers[i] + scores.logsumexp(0) - math.log(draws)

    def _public(self, observation: Observation) -> Batch | None:
        """Public images that the network takes, in random order."""
        public, task = observation.knowledge.public, observation.task
        if public is None or public.x.shape[1:] != torch.Size(task.input_shape):
            return None
        public = public[torch.randperm(len(public), generator=generator("line-up"))]
        if not task.has_classes:
            return public
        labels = public.hard_labels
        fits = int(labels.max()) < task.num_outputs
        return Batch(public.x, labels if fits else torch.arange(len(labels)) % task.num_outputs)


def _alike(observations: dict[int, Observation], candidates: Candidates) -> list[list[int]]:
    """Victims of one model whose candidates are of the same classes: these are computed once."""
    groups: dict[object, list[int]] = {}
    for i, o in observations.items():
        labels = candidates.images.hard_labels[candidates.rows[i]].unique() if o.task.has_classes else torch.zeros(1)
        key = (id(o.model), tuple(id(s.state) for s in o.seen), o.knowledge.batch_size, tuple(labels.tolist()))
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _by_state(observation: Observation) -> list[list[int]]:
    """The numbers of the sightings, those of one state together: the mean of these says most."""
    groups: dict[int, list[int]] = {}
    for i, sighting in enumerate(observation.seen):
        groups.setdefault(id(sighting.state), []).append(i)
    return list(groups.values())


def _labels(observation: Observation) -> Tensor:
    granted = observation.knowledge.labels
    if granted is not None or observation.task.has_classes:
        return infer_labels(observation) if granted is None else granted
    return torch.zeros(observation.knowledge.batch_size, dtype=torch.long)


def _mean(updates: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([update[name] for update in updates]).mean(0) for name in updates[0]}


def _between(state: Tensors, difference: Tensors, norm: float) -> Tensors:
    return {**state, **{name: state[name] + (norm / 2 * t).to(state[name]) for name, t in difference.items()}}
