"""What the adversary prepares once per model state, and the comparison of candidates with an update."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.attacks.labels.beliefs import size_is_true
from gradveil.attacks.lineup.contributions import Contributions, LayerBlock, SingleGradients
from gradveil.attacks.lineup.others import Filter, OtherImages, Seen, Whitening
from gradveil.attacks.lineup.span import Directions, Span
from gradveil.client import Client
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.gradient.dpsgd import DpSgd

USUAL = 1e-2  # ridge, unless a rehearsal chose another
COMPANIONS = 8, 64  # images whose statistics BatchNorm takes: as many as in a batch, within these limits

WayToCompare = Filter | Span


@dataclass(frozen=True)
class Sent:
    """An update as the sum over its images, in blocks, with the labels read from it and the variance of its noise."""

    blocks: list[Tensor]
    counts: Tensor  # images per class
    noise: float

    @property
    def square(self) -> float:
        return float(sum(part.square().sum() for part in self.blocks))

    def others(self, label: int) -> Tensor:
        """Images per class without one of this class."""
        counts = self.counts.clone()
        counts[label] = (counts[label] - 1).clamp_min(0)
        return counts


@dataclass(frozen=True)
class Faces:
    """Candidates: their gradients, classes, squares (blocks × m), and products with public gradients (blocks × P × m)."""

    contributions: Contributions
    labels: Tensor
    squares: Tensor
    cross: Tensor | None = None

    def picked(self, index: Tensor) -> Faces:
        cross = None if self.cross is None else self.cross[:, :, index]
        return Faces(self.contributions.picked(index), self.labels[index], self.squares[:, index], cross)


class Ground:
    """What all victims share whose updates were computed on one state.

    Args:
        observation: of one of them, at unit length.
        state: of the model.
        public: images that tell what the others of a batch add; without any, the candidates do, one like the other.
        encoder: a client whose defense changes images before they enter the network.
    """

    def __init__(self, observation: Observation, state: Tensors, public: Batch | None, encoder: Client | None = None):
        self.observation, self.task, self.public, self.encoder = observation, observation.task, public, encoder
        self.batch_size = observation.knowledge.batch_size
        self.classes = self.task.num_outputs if self.task.has_classes else 1
        self.dpsgd = observation.knowledge.part(DpSgd)
        self.has_size = size_is_true(observation)  # the size of the update is that of the gradients
        self.way: WayToCompare = Filter(USUAL, free=True)
        self.masks = False  # zeros are entries that were not sent
        self._use(state)

    def _use(self, state: Tensors) -> None:
        self.state = state
        grey = torch.rand(COMPANIONS[0], *self.task.input_shape, generator=generator("line-up"))
        companions = grey if self.public is None else self.public.x[: min(max(COMPANIONS[0], self.batch_size), COMPANIONS[1])]
        self.gradients = SingleGradients(self.task, state, self.task.normalize(companions), self._clip)
        self.background: OtherImages | None = None
        if self.public is not None:
            self.background = OtherImages(self.contributions(self.public), self.labels(self.public), self.classes)

    def at(self, state: Tensors) -> Ground:
        """The same at another state."""
        duplicate = copy.copy(self)
        duplicate._use(state)
        return duplicate

    @property
    def _clip(self) -> float | None:
        """The bound on the gradient of a single image: one that holds for one image, and not for batches."""
        if self.dpsgd is not None:
            return self.dpsgd.clip  # before its gain
        defense = self.observation.knowledge.defense
        return defense.clip_norm(1) if defense is not None and defense.clip_norm(2) is None else None

    @property
    def is_random(self) -> bool:
        """Whether an image may add different gradients."""
        return self.encoder is not None or bool(self.task.model.draw_noise(1, generator("line-up")))

    def labels(self, images: Batch) -> Tensor:
        return images.hard_labels if self.task.has_classes else torch.zeros(len(images), dtype=torch.long)

    def contributions(self, images: Batch, draw: int = 0, *, shared: bool = True) -> Contributions:
        """Gradients of single images, as the defense lets them enter the network. `shared`: whether they serve all victims."""
        fed = images if self.encoder is None else self.encoder.fed(self.observation.state, images, "line-up", draw)
        return self.gradients.of(fed, generator("line-up", draw), shared=shared)

    def sent(self, observation: Observation, tensors: Tensors, labels: Tensor, sightings: int = 1) -> Sent:
        """An update at unit length, or the mean of several ones, with the labels of its images."""
        knowledge, sign = observation.knowledge, 1.0 if observation.update.kind == "gradient" else -1.0
        size = self.batch_size * knowledge.norm / (self.dpsgd.gain if self.dpsgd else 1.0)
        noise = (knowledge.noise.std * size) ** 2 / sightings if knowledge.noise else 0.0
        rows = labels if labels.ndim == 2 else F.one_hot(labels, max(self.classes, 1 + int(labels.max())))
        counts = rows.double().sum(0) if self.classes > 1 else torch.tensor([float(len(labels))], dtype=torch.double)
        return Sent(self.gradients.split({name: sign * size * t.double() for name, t in tensors.items()}), counts, noise)

    def line_up(self, images: Batch, draw: int = 0) -> Faces:
        """Candidates with all that their comparison needs of them alone."""
        contributions = self.contributions(images, draw, shared=False)
        faces = Faces(contributions, self.labels(images), contributions.squares())
        if self.background is None or self.masks or isinstance(self.way, Span):
            return faces
        return replace(faces, cross=self.background.public.dot(contributions))

    def scores(self, sent: Sent, faces: Faces) -> Tensor:
        """One score per candidate; the highest fits best."""
        if isinstance(self.way, Span):
            block = faces.contributions.blocks[self.way.block]
            assert isinstance(block, LayerBlock)
            return self.way.scores(Directions.of(sent.blocks[self.way.block], self.batch_size), block)
        background, labels = self.background, faces.labels
        if self.masks:
            kept = [part.flatten().nonzero().flatten() for part in sent.blocks]
            background = background and OtherImages(background.public.restricted(kept), background.labels, self.classes)
            faces = Faces(restricted := faces.contributions.restricted(kept), labels, restricted.squares())
            sent = replace(sent, blocks=[part.flatten()[k] for part, k in zip(sent.blocks, kept, strict=True)])
        if background is None:
            background = OtherImages(faces.contributions, labels, self.classes)
        cross = background.public.dot(faces.contributions) if faces.cross is None else faces.cross
        public, along = background.public.along(sent.blocks), faces.contributions.along(sent.blocks)
        scores = torch.zeros(len(labels), dtype=torch.double)
        for label in labels.unique():
            rows, others = labels == label, sent.others(int(label))
            whitening = self.whitening(self.way, background, others, sent)
            candidates = whitening.of(cross[:, :, rows], faces.squares[:, rows])
            scores[rows] = self.way.scores(whitening, candidates, Seen(public, along[:, rows]), others)
        return scores

    def whitening(self, way: Filter, background: OtherImages, others: Tensor, sent: Sent) -> Whitening:
        """The covariance of the others and of the noise. Where its size is free, the update is taken to be as large as
        the sum of the gradients is expected to be."""
        noise = sent.noise
        if way.free and noise:
            mean = background.mean(sent.counts)
            expected = float((mean @ background.grams @ mean).sum() + (background.variances @ background.weights(others)).sum())
            left = sent.square - noise * float(background.public.entries.sum())
            noise *= expected / max(left, 1e-2 * sent.square)
        return Whitening(background, others, way.ridge, noise)
