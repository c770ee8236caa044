"""Against MixUp: mixing is linear, so encodings that share images are equations, and images are their solution.

1. The encodings are rebuilt from the updates (`fed.py`), exactly for single images.
2. Who was mixed, and how much. At knowledge `upper-bound` coefficients and partners are given (the oracle of Carlini
   et al. 2021 and of GradAttack). Else they are read from the soft labels, which the update gives away too: an
   encoding holds its victim's image with about the weight of the class that all of the victim's encodings share, and
   one unknown image for each other class. Where encodings outnumber victims, the partners are also sought among the
   other victims' images, by a factorisation; it is believed only if it explains the encodings.
3. Least squares for all images at once, in the pixel range; what the equations leave open stays with the mean of the
   public images (of the class, where it is known). A single encoding is thus split as far as class means allow.

All victims of one target are one client's, as their sightings' group says, and are decoded together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.matching.fed_images import Fed, recover, soft_labels
from gradveil.attacks.registry import attack
from gradveil.core.observation import Observation
from gradveil.core.settings import settings
from gradveil.core.types import Batch
from gradveil.defenses.batch.instahide import InstaHide
from gradveil.defenses.batch.mixup import MixUp

PULL = 1e-4  # towards the mean, beside equations with coefficients around 0.25
PRESENT = 0.02  # share of a label below which its class is taken to be absent
EXPLAINED = 0.1  # share of the encodings' variance that a factorisation may leave
ROUNDS = 60  # of the factorisation

Solve = Callable[["Mixture"], tuple[Tensor, Tensor]]


@dataclass
class Mixture:
    """The equations: `mixing` (encodings × images) times the unknown images are the encodings."""

    mixing: Tensor
    mean: Tensor  # images × C × H × W: what each is before any equation
    own: Tensor  # of each victim's images, their place among the unknowns


def cannot_decode(observation: Observation, defense: type[MixUp] | type[InstaHide]) -> str | None:
    """Why encodings cannot be told apart here, or None."""
    labels = observation.knowledge.labels
    if observation.knowledge.part(defense) is None:
        return f"the defense is not {defense.name}"
    if observation.update.kind != "gradient":
        return "images are mixed anew at every local step, and a weight delta adds the steps up"
    if observation.knowledge.batch_size > 1 and (labels is None or labels.ndim == 1):
        return "the mixed labels of a batch are not known"
    return None


@attack("mixup-decode", adaptive=True)
@settings
class MixupDecode(Attack):
    """Rebuild the encodings, then solve for the images in them."""

    steps: int = Field(default=1000, ge=1)  # of the least squares in the pixel range

    def applies(self, observation: Observation) -> str | None:
        return cannot_decode(observation, MixUp)

    def run(self, target: Target) -> Answer:
        fed = recover(target)
        encodings = fed.pixels.flatten(0, 1)

        def solve(mixture: Mixture) -> tuple[Tensor, Tensor]:
            return unmix(mixture, encodings, self.steps), encodings

        return answer(target, fed, decode(fed, encodings, solve, self.steps))


def answer(target: Target, fed: Fed, images: Tensor) -> Answer:
    """The victims' images, with the adversary's word for how well the encodings were rebuilt."""
    labels = soft_labels(fed)
    hard = None if labels is None else _own_class(fed, labels)
    return Answer(target.normalize(images), fed.by_victim(fed.score).amax(1), hard, fed.iterations)


def decode(fed: Fed, encodings: Tensor, solve: Solve, steps: int) -> Tensor:
    """Victims × B × C × H × W. `solve` gives the images of a mixture, and the encodings as it understands them."""
    labels = soft_labels(fed)
    known = given(fed)
    if known is not None:
        return solve(known)[0][known.own]
    if labels is None:  # nothing tells the parts of an encoding: it is the best there is
        return encodings.view_as(fed.x).clamp(0, 1)[fed.sighting == 0]
    open_ = by_labels(fed, labels)
    found, encodings = solve(open_)
    images = found[open_.own]
    closed = factorised(fed, encodings, images, labels, steps)
    if closed is not None:
        images = solve(closed)[0][closed.own]
    return images


def unmix(mixture: Mixture, encodings: Tensor, steps: int) -> Tensor:
    """Least squares in [0, 1] by accelerated projected gradients, from the mean and pulled to it."""
    m, mean = mixture.mixing, mixture.mean.flatten(1)
    gram, wanted = m.T @ m, m.T @ encodings.flatten(1) + PULL * mean
    gram = gram + PULL * torch.eye(len(gram))
    rate = 1 / torch.linalg.matrix_norm(gram, 2)
    x: Tensor = torch.linalg.solve(gram, wanted).clamp(0, 1)
    look = x
    for i in range(steps):
        new = (look - rate * (gram @ look - wanted)).clamp(0, 1)
        look = new + i / (i + 3) * (new - x)
        x = new
    return x.view_as(mixture.mean)


# -- who was mixed, and how much ---------------------------------------------------------------------------------------


def given(fed: Fed) -> Mixture | None:
    """From the secrets, where they are granted."""
    secrets = [o.knowledge.secrets for o in fed.target.observations]
    if not all("mixing" in s and "partners" in s for s in secrets):
        return None
    size = fed.x.shape[1]
    amounts = torch.stack([s["mixing"][:size] for s in secrets]).flatten(0, 1)
    places = torch.stack([s["partners"][:size] for s in secrets]).flatten(0, 1)
    rows = torch.arange(len(places)) % (len(places) // (int(fed.sighting.max()) + 1))
    places = torch.where(places < 0, -1 - rows[:, None], places)  # an image that is nowhere else has a place of its own
    names, columns = places.unique(return_inverse=True)
    mixing = torch.zeros(len(places), len(names)).scatter_(1, columns, amounts)
    mean = _means(fed.target.knowledge.public, fed.target.first)[-1]
    return Mixture(mixing, mean.expand(len(names), *mean.shape), columns[: int(rows.max()) + 1, 0].view(-1, size))


def by_labels(fed: Fed, labels: Tensor) -> Mixture:
    """The victim's image by the weight of its class, and an unknown image for each other class of an encoding."""
    means, classes = _means(fed.target.knowledge.public, fed.target.first), _own_class(fed, labels)
    victims, size = classes.shape
    columns: list[Tensor] = [means[c] for c in classes.flatten().tolist()]
    entries: list[tuple[int, int, float]] = []
    for row, label in enumerate(labels.flatten(0, 1)):
        victim = row % (victims * size)
        own = int(classes.flatten()[victim])
        entries.append((row, victim, float(label[own])))
        others = [c for c in (label > PRESENT).nonzero().flatten().tolist() if c != own]
        amounts = [float(label[c]) for c in others]
        rest = 1 - float(label[own]) - sum(amounts)
        if rest > PRESENT:  # parts that carry no label: public images
            others, amounts = [*others, -1], [*amounts, rest]
        entries += [(row, len(columns) + i, amount) for i, amount in enumerate(amounts)]
        columns += [means[c] for c in others]
    rows, places, shares = zip(*entries, strict=True)
    mixing = torch.zeros(len(labels.flatten(0, 1)), len(columns))
    mixing[list(rows), list(places)] = torch.tensor(shares)
    return Mixture(mixing, torch.stack(columns), torch.arange(victims * size).view(victims, size))


def factorised(fed: Fed, encodings: Tensor, images: Tensor, labels: Tensor, steps: int) -> Mixture | None:
    """Encodings as mixtures of the victims' images alone; None where that does not explain them.

    Labels are mixed as images are, so they count as further pixels. Amounts and images are improved in turn.
    """
    classes = _own_class(fed, labels).flatten()
    if len(encodings) < 1.5 * len(classes):
        return None
    weight = encodings[0].numel() ** 0.5 / 4  # labels weigh as much as a fair part of the pixels
    marks = F.one_hot(classes, labels.shape[-1]).float() * weight
    wanted = torch.cat([encodings.flatten(1), labels.flatten(0, 1) * weight], 1)
    mean = _means(fed.target.knowledge.public, fed.target.first)[classes]
    own, mixing = torch.arange(len(classes)), torch.zeros(len(encodings), len(classes))
    images = images.flatten(0, 1)
    for _ in range(ROUNDS):
        basis = torch.cat([images.flatten(1), marks], 1)
        mixing = _amounts(basis, wanted, steps)
        images = unmix(Mixture(mixing, mean, own), encodings, 30)
    left = (mixing @ images.flatten(1) - encodings.flatten(1)).square().sum()
    if left > EXPLAINED * (encodings - encodings.mean(0)).square().sum():
        return None
    # Victims are different images; which is whose shows in the amounts only now.
    evidence = _own(fed, mixing.unflatten(0, fed.x.shape[:2])).flatten(0, 1)
    own = torch.from_numpy(linear_sum_assignment(evidence.numpy(), maximize=True)[1])
    return Mixture(mixing, mean, own.view(-1, fed.x.shape[1]))


def _amounts(basis: Tensor, wanted: Tensor, steps: int) -> Tensor:
    """Least squares with amounts not below 0."""
    gram, target = basis @ basis.T, wanted @ basis.T
    rate = 1 / torch.linalg.matrix_norm(gram, 2)
    x = look = torch.zeros_like(target)
    for i in range(steps):
        new = (look - rate * (look @ gram - target)).clamp_min(0)
        look = new + i / (i + 3) * (new - x)
        x = new
    return x


def _own_class(fed: Fed, labels: Tensor) -> Tensor:
    """Victims × B: the class of the image that the encodings are of; of a single encoding that of most weight."""
    return _own(fed, labels).argmax(-1)


def _own(fed: Fed, amounts: Tensor) -> Tensor:
    """How much speaks for each part of a victim's encodings being its own image, given the parts' amounts.

    Own amounts are Beta(3, k − 1), a partner's Beta(1, k + 1): the ratio of the two is the square of λ / (1 − λ).
    """
    return fed.by_victim(amounts.clamp(PRESENT, 1 - PRESENT).logit()).sum(1)


def _means(public: Batch | None, observation: Observation) -> Tensor:
    """The mean public image of every class, and last of all classes; grey where there is nothing to average."""
    if public is None or public.x.shape[1:] != torch.Size(observation.task.input_shape):
        return torch.full((observation.task.num_outputs + 1, *observation.task.input_shape), 0.5)
    every = public.x.mean(0)
    own = [public.x[public.hard_labels == c] for c in range(observation.task.num_outputs)]
    return torch.stack([*(x.mean(0) if len(x) else every for x in own), every])
