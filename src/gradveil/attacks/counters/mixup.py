"""Against MixUp: mixing is linear, so encodings that share images are equations, and the images are their solution.

1. The encodings are rebuilt from the updates (`fed_images.py`), exactly for single images.
2. Partners and amounts. At knowledge `upper-bound` they are granted (the oracle of Carlini et al. 2021 and GradAttack).
   Otherwise they are read from the soft labels, which the update gives away too: an encoding holds its victim's image
   with about the weight of the class that all of the victim's encodings share, and one unknown image per other class.
   Where encodings outnumber victims, partners are also searched among the other victims' images, by a factorisation,
   which is used only if it explains the encodings.
3. Least squares for all images at once, in the pixel range. What the equations leave open stays at the mean public image
   (of the class, where it is known). So a single encoding is split as far as class means allow.

All victims of one target belong to one client, as the group of their sightings says, and are decoded together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.generative.public_prior import class_means
from gradveil.attacks.matching.fed_images import Fed, fed_cost, recover, soft_labels
from gradveil.core.observation import Observation
from gradveil.core.types import Batch
from gradveil.defenses.batch.instahide import InstaHide
from gradveil.defenses.batch.mixup import MixUp

PULL = 1e-4  # towards the mean, against equations with coefficients around 0.25
PRESENT = 0.02  # share of a label below which its class is taken to be absent
EXPLAINED = 0.1  # share of the encodings' variance that a factorisation may leave
ROUNDS = 60  # of the factorisation

Solve = Callable[["Mixture"], tuple[Tensor, Tensor]]


@dataclass
class Mixture:
    """The equations: `mixing` (encodings × images) times the unknown images are the encodings."""

    mixing: Tensor
    mean: Tensor  # images × C × H × W: each image before any equation
    victims: Tensor  # victims × B: where the victims' images are among the unknowns


def cannot_decode(observation: Observation, defense: type[MixUp] | type[InstaHide]) -> str | None:
    """Why encodings cannot be told apart here, or None."""
    labels = observation.knowledge.labels
    if observation.knowledge.part(defense) is None:
        return f"the defense is not {defense.name}"
    if observation.update.kind != "gradient":
        return "images are mixed again at every local step, and a weight delta adds the steps up"
    if observation.knowledge.batch_size > 1 and (labels is None or labels.ndim == 1):
        return "the mixed labels of a batch are not known"
    return None


@attack("mixup-decode", against=(MixUp,), version=4)
class MixupDecode(Attack):
    """Rebuild the encodings, then solve for the images in them.

    Args: steps: iterations of the least squares in the pixel range, which cost next to nothing.
    Example: gradveil audit --defense mixup --updates 4 --attack mixup-decode
    """

    steps: int = Field(default=1000, ge=1)

    def cost(self, work: Workload) -> Cost:
        return fed_cost(work)

    def applies(self, observation: Observation) -> str | None:
        return cannot_decode(observation, MixUp)

    def run(self, target: Target) -> Answer:
        fed = recover(target)
        encodings = fed.pixels.flatten(0, 1)

        def solve(mixture: Mixture) -> tuple[Tensor, Tensor]:
            return unmix(mixture, encodings, self.steps), encodings

        return answer(target, fed, decode(fed, encodings, solve, self.steps))


def answer(target: Target, fed: Fed, images: Tensor) -> Answer:
    """The victims' images; the score says how well the encodings were rebuilt."""
    labels = soft_labels(fed)
    hard = None if labels is None else _victim_class(fed, labels)
    return Answer(target.normalize(images), fed.by_victim(fed.score).amax(1), hard, fed.iterations)


def decode(fed: Fed, encodings: Tensor, solve: Solve, steps: int) -> Tensor:
    """Victims × B × C × H × W. `solve` gives the images of a mixture, and the encodings as it understands them."""
    labels, mixture = soft_labels(fed), granted(fed)
    if mixture is not None:
        return solve(mixture)[0][mixture.victims]
    if labels is None:  # nothing tells the parts of an encoding: it is the best there is
        return encodings.view_as(fed.x).clamp(0, 1)[fed.sighting == 0]
    mixture = by_labels(fed, labels)
    unmixed, encodings = solve(mixture)
    images = unmixed[mixture.victims]
    closed = factorised(fed, encodings, images, labels, steps)
    return images if closed is None else solve(closed)[0][closed.victims]


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


# -- partners and amounts ----------------------------------------------------------------------------------------------


def granted(fed: Fed) -> Mixture | None:
    """From the secrets, where they are granted."""
    secrets = [o.knowledge.secrets for o in fed.target.observations]
    if not all("mixing" in s and "partners" in s for s in secrets):
        return None
    size = fed.x.shape[1]
    amounts = torch.stack([s["mixing"][:size] for s in secrets]).flatten(0, 1)
    places = torch.stack([s["partners"][:size] for s in secrets]).flatten(0, 1)
    rows = torch.arange(len(places)) % (len(places) // (int(fed.sighting.max()) + 1))
    places = torch.where(places < 0, -1 - rows[:, None], places)  # an image that is nowhere else gets a new place
    names, columns = places.unique(return_inverse=True)
    mixing = torch.zeros(len(places), len(names)).scatter_(1, columns, amounts)
    mean = _means(fed.target.knowledge.public, fed.target.first)[-1]
    return Mixture(mixing, mean.expand(len(names), *mean.shape), columns[: int(rows.max()) + 1, 0].view(-1, size))


def by_labels(fed: Fed, labels: Tensor) -> Mixture:
    """The victim's image by the weight of its class, and an unknown image for each other class of an encoding."""
    means, classes = _means(fed.target.knowledge.public, fed.target.first), _victim_class(fed, labels)
    victims, size = classes.shape
    columns: list[Tensor] = [means[c] for c in classes.flatten().tolist()]
    entries: list[tuple[int, int, float]] = []
    for row, label in enumerate(labels.flatten(0, 1)):
        victim = row % (victims * size)
        main = int(classes.flatten()[victim])
        entries.append((row, victim, float(label[main])))
        others = [c for c in (label > PRESENT).nonzero().flatten().tolist() if c != main]
        amounts = [float(label[c]) for c in others]
        rest = 1 - float(label[main]) - sum(amounts)
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
    classes = _victim_class(fed, labels).flatten()
    if len(encodings) < 1.5 * len(classes):
        return None
    weight = encodings[0].numel() ** 0.5 / 4  # labels weigh as much as a fair part of the pixels
    marks = F.one_hot(classes, labels.shape[-1]).float() * weight
    wanted = torch.cat([encodings.flatten(1), labels.flatten(0, 1) * weight], 1)
    mean = _means(fed.target.knowledge.public, fed.target.first)[classes]
    places, mixing = torch.arange(len(classes)), torch.zeros(len(encodings), len(classes))
    images = images.flatten(0, 1)
    for _ in range(ROUNDS):
        basis = torch.cat([images.flatten(1), marks], 1)
        mixing = _amounts(basis, wanted, steps)
        images = unmix(Mixture(mixing, mean, places), encodings, 30)
    left = (mixing @ images.flatten(1) - encodings.flatten(1)).square().sum()
    if left > EXPLAINED * (encodings - encodings.mean(0)).square().sum():
        return None
    # Victims have different images; only the amounts tell which image belongs to which victim.
    evidence = _evidence(fed, mixing.unflatten(0, fed.x.shape[:2])).flatten(0, 1)
    places = torch.from_numpy(linear_sum_assignment(evidence.numpy(), maximize=True)[1])
    return Mixture(mixing, mean, places.view(-1, fed.x.shape[1]))


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


def _victim_class(fed: Fed, labels: Tensor) -> Tensor:
    """Victims × B: the class of the image that the encodings are of; of a single encoding that of most weight."""
    return _evidence(fed, labels).argmax(-1)


def _evidence(fed: Fed, amounts: Tensor) -> Tensor:
    """How likely each part of a victim's encodings is the victim's image, by the parts' amounts.

    The victim's amounts are Beta(3, k − 1), a partner's Beta(1, k + 1): their ratio is the square of λ / (1 − λ).
    """
    return fed.by_victim(amounts.clamp(PRESENT, 1 - PRESENT).logit()).sum(1)


def _means(public: Batch | None, observation: Observation) -> Tensor:
    """The mean public image of every class, and last of all classes; grey where there is nothing to average."""
    if public is None or public.x.shape[1:] != torch.Size(observation.task.input_shape):
        return torch.full((observation.task.num_outputs + 1, *observation.task.input_shape), 0.5)
    means = class_means(public.x, public.hard_labels, observation.task.num_outputs)
    return torch.cat([means, public.x.mean(0, keepdim=True)])
