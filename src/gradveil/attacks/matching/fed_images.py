"""What entered the network, after the defense changed the private images: the first half of most counters.

Images that a defense feeds look unnatural and their labels may be soft, so neither priors nor labels help. For one image
behind one gradient neither is needed: a fully connected layer gives away its exact input and the exact signal at it (see
`analytic/apart.py`), and together with the gradients of the layers before they fix the image.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.analytic.linear import Linear
from gradveil.attacks.analytic.rgap import RGAP
from gradveil.attacks.base import Answer, Cost, Target, Workload
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.layers import classifier_gradients
from gradveil.attacks.matching.distances import RelativeL2
from gradveil.attacks.matching.engine import solve
from gradveil.attacks.matching.head import FeatureMatch, Head, reduce_to_head
from gradveil.attacks.matching.optimizers import LBFGS
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Match, Problem, residual
from gradveil.attacks.matching.starts import Start
from gradveil.attacks.matching.swift import Swift
from gradveil.core.observation import Observation
from gradveil.core.randomness import torch_stream

LADDER = ((1e-4, 100), (1e-7, 200))  # TV weight, L-BFGS iterations
POLISH = (1e-7, 600)
EXACT = 1e-6  # residual (share of the update's size) above which images are polished
CONVERGED = 1e-2  # residual above which the portfolio tries too
CONFIRMED = 1e-2  # relative difference within which two classes say the same about the size of a signal


@dataclass
class Fed:
    """Every sighting of every victim, sighting by sighting: images N·S × B × C × H × W as the network takes them."""

    target: Target  # one sighting each
    x: Tensor
    score: Tensor
    iterations: int
    victim: Tensor  # the victim of each row
    sighting: Tensor  # the sighting of each row

    @property
    def pixels(self) -> Tensor:
        return self.target.denormalize(self.x)

    def by_victim(self, rows: Tensor) -> Tensor:
        """Rows as victims × sightings."""
        return rows.reshape(int(self.sighting.max()) + 1, -1, *rows.shape[1:]).transpose(0, 1)


def fed_cost(work: Workload) -> Cost:
    """What `one_image` takes where no closed form gives the images; every second one is counted as needing `swift` too."""
    portfolio = Swift().cost(work)
    if work.batch_size > 1 or work.training.kind != "gradient":
        return portfolio
    return Cost(LBFGS().expected_evaluations(sum(steps for _, steps in (*LADDER, POLISH))) + portfolio.iterations // 2)


def recover(target: Target) -> Fed:
    """The images that were fed, each sighting by itself; of batches the first, since labels are granted for no other."""
    count = target.sightings if target.shape[1] == 1 else 1
    parts = [sighting(target, i) for i in range(count)]
    answers = [one_image(part) for part in _joined(parts)]
    target = target.about([o for part in parts for o in part.observations], torch.cat([part.labels for part in parts]))
    victims = len(parts[0].observations)
    return Fed(
        target,
        torch.cat([a.x for a in answers]),
        torch.cat([a.score for a in answers]),
        max(a.iterations for a in answers),
        torch.arange(victims).repeat(count),
        torch.arange(count).repeat_interleave(victims),
    )


def one_image(target: Target) -> Answer:
    """The fed images behind single sightings: closed forms where they apply, then features and signal, else `swift`."""
    if Linear().applies(target.first) is None:
        return Linear().run(target)
    head = reduce_to_head(target)
    if head is None:
        return Swift().reconstruct(target)
    x, score, used = *_unrolled(target, head), 0
    rows = (score > EXACT).nonzero().flatten()
    if len(rows):
        new = Start(scale=0.1).draw(head.target, 1, target.rng)[rows]
        for weight, steps in LADDER:
            new, used = _descend(head, rows.tolist(), new, weight, steps, used)
        new_score = residual(head.target.subset(rows.tolist()), new)
        better = new_score < score[rows]
        x[rows[better]], score[rows[better]] = new[better], new_score[better]
    rows = ((score > EXACT) & (score < CONVERGED)).nonzero().flatten()
    if len(rows):  # bright images saturate smooth nets: close, but slow
        x[rows], used = _descend(head, rows.tolist(), x[rows], *POLISH, used)
        score = residual(head.target, x)
    rows = (score > CONVERGED).nonzero().flatten()
    if len(rows):  # kinks: L-BFGS stops at them, the portfolio's signed Adam does not
        again = Swift().reconstruct(head.target.subset(rows.tolist()))
        better = again.score < score[rows]
        x[rows[better]], score[rows[better]] = again.x[better], again.score[better]
        used += again.iterations
    return Answer(x, score, iterations=used)


def _unrolled(target: Target, head: Head) -> tuple[Tensor, Tensor]:
    """Images and residuals by the closed form; where there is none, grey ones that fit nothing."""
    if RGAP().applies(target.first) is not None:
        return torch.zeros(target.shape), torch.full(target.shape[:1], float("inf"))
    x = RGAP().run(target).x
    return x, residual(head.target, x)


def _descend(head: Head, rows: list[int], x: Tensor, weight: float, steps: int, used: int) -> tuple[Tensor, int]:
    match = Match(RelativeL2(), (FeatureMatch(head.features[rows]), TV(weight, "smoothed")), LBFGS(history=30), steps=steps)
    solution = solve(Problem(head.target.subset(rows), match), start=x)
    return solution.x, used + solution.iterations


def soft_labels(fed: Fed) -> Tensor | None:
    """The labels that single images were trained with: the network's belief minus the classifier's bias gradient.

    The size of the gradient is unknown. It is that which leaves the classes that an image does not have at 0.
    """
    labels = fed.target.labels
    if labels.ndim == 3:
        return labels
    signals = [s for o in fed.target.observations if (s := classifier_gradients(o)[1]) is not None]
    if labels.shape[1] > 1 or len(signals) < len(fed.x):
        return None
    rows = []
    for observation, x, signal in zip(fed.target.observations, fed.x, signals, strict=True):
        noise = observation.model.draw_noise(1, torch_stream(0))
        belief = observation.model(observation.state, x, noise).softmax(-1)
        rows.append((belief - signal_size(belief[0], signal) * signal).clamp(0, 1))
    return torch.stack(rows)


def signal_size(belief: Tensor, signal: Tensor) -> Tensor:
    """The factor of the signal that leaves the labels of absent classes at 0: belief / signal, the same for all of them
    and larger for classes that are present. Of one that no other class confirms, the smallest."""
    ratio = (belief / signal)[(signal > 0) & (belief > 0)].sort().values
    confirmed = (ratio[1:] <= (1 + CONFIRMED) * ratio[:-1]).nonzero().flatten().tolist()
    return ratio[confirmed[0] if confirmed else 0] if len(ratio) else belief.new_zeros(())


def sighting(target: Target, place: int) -> Target:
    """The victims as if only this sighting had been seen; labels are granted for the first one alone."""
    if place == 0 and (target.sightings == 1 or target.shape[1] > 1):
        return target
    observations = []
    for o in target.observations:
        knowledge = o.knowledge if place == 0 else replace(o.knowledge, labels=None, secrets=_secrets(o, place))
        observations.append(replace(o, seen=(o.seen[place],), knowledge=knowledge))
    hard = target.hard_labels
    labels = hard if place == 0 else torch.stack([infer_labels(o) for o in observations])
    return target.about(observations, labels)


def _secrets(observation: Observation, place: int) -> dict[str, Tensor]:
    """Of later sightings the secrets are named `name@place`."""
    mark = f"@{place}"
    return {n.removesuffix(mark): t for n, t in observation.knowledge.secrets.items() if n.endswith(mark)}


def _joined(parts: list[Target]) -> list[Target]:
    """Sightings of one state as one target: they are computed together."""
    first = parts[0]
    if len(parts) == 1 or any(p.state is not first.state for p in parts):
        return parts
    rows = [o for part in parts for o in part.observations]
    return [first.about(rows, torch.cat([p.labels for p in parts]))]
