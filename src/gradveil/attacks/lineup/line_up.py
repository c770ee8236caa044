"""The line-up: which of m candidate images was in the batch? Asked by someone who has the images; nothing is rebuilt.

For each candidate the gradient that it adds to an update is computed, and compared with what was sent. It is another risk
than a rebuilt picture: less must leak for it, and it reaches larger batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks.base import Target
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.lineup.ground import Ground
from gradveil.attacks.lineup.others import Filter
from gradveil.attacks.lineup.rehearsal import prepare
from gradveil.attacks.unit_length import unit_length, why_unusable
from gradveil.core.observation import Observation
from gradveil.core.progress import Steps
from gradveil.core.randomness import generator
from gradveil.core.settings import settings
from gradveil.core.types import Batch, Tensors

VERSION = 2  # raised when the results change


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

    def scores(
        self,
        observations: Sequence[Observation],
        candidates: Candidates,
        *,
        progress: Steps | None = None,
        cache: Path | None = None,
    ) -> list[Tensor]:
        """Per observation one score per candidate, in the order of its rows; the highest fits best.

        An update that cannot be used gives all candidates the same score. `cache` is a folder for what is trained once.
        """
        usable = {i: unit_length(o) for i, o in enumerate(observations) if why_unusable(o) is None}
        answers = [torch.zeros(len(rows), dtype=torch.double) for rows in candidates.rows]
        grounds, done = dict[object, Ground](), 0
        with torch.no_grad():
            for places in _alike(usable, candidates):
                first = usable[places[0]]
                for sightings in _by_state(first):
                    state = first.seen[sightings[0]].state
                    key = (id(first.model), id(state), first.knowledge.batch_size)
                    if key not in grounds:
                        grounds[key] = self._ground(first, state, cache)
                    seen = {i: _mean([usable[i].seen[s].update.tensors for s in sightings]) for i in places}
                    for i, scores in self._compare(grounds[key], usable, seen, len(sightings), candidates):
                        answers[i] = answers[i] + scores
                done += len(places)
                if progress:
                    progress(done, len(usable))
        return answers

    def _compare(
        self,
        shared: Ground,
        observations: Mapping[int, Observation],
        seen: Mapping[int, Tensors],
        sightings: int,
        candidates: Candidates,
    ) -> Iterator[tuple[int, Tensor]]:
        """The scores of victims by the mean of their updates of one state; what candidates have in common is done once."""
        draws, first = range(self.draws if shared.is_random else 1), observations[next(iter(seen))]
        by_filter = isinstance(shared.way, Filter)
        moves = first.update.kind == "delta" and first.knowledge.noise is None and by_filter
        union = torch.cat([candidates.rows[i] for i in seen]).unique()
        faces = [] if moves else [shared.line_up(candidates.images[union], draw) for draw in draws]
        for i, tensors in seen.items():
            ground, rows = shared, torch.searchsorted(union, candidates.rows[i])
            if moves:  # gradients are those between the weights before and after the local training
                between = {name: shared.state[name] + observations[i].knowledge.norm / 2 * t for name, t in tensors.items()}
                ground, rows = shared.at({**shared.state, **between}), torch.arange(len(rows))
                faces = [ground.line_up(candidates.images[candidates.rows[i]], draw) for draw in draws]
            sent = ground.sent(observations[i], tensors, _labels(observations[i]), sightings)
            scores = torch.stack([ground.scores(sent, one.picked(rows)) for one in faces])
            yield i, scores.logsumexp(0) - math.log(len(draws))

    def _ground(self, observation: Observation, state: Tensors, cache: Path | None) -> Ground:
        target = Target([observation], torch.zeros(1, observation.knowledge.batch_size), generator("line-up"), cache=cache)
        return prepare(target, state, self._public(observation), self.public_images, self.rehearsals)

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
