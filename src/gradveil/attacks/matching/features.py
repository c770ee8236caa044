"""Feature inversion: a fully connected layer gives away its inputs, image by image; find the images that have them. Ours.

The idea is that of Mahendran and Vedaldi (2015), on features that `attacks/analytic/apart.py` reads from one update.

1. The inputs and signals of the first fully connected layer are read from its gradient, also of batches. A weight difference
   of SGD is read like one gradient; the layers before are taken as they were in the middle of the steps.
2. Each input is inverted through the layers before it. A step is one forward and one backward pass: no derivative of a
   gradient. ReLUs are left as they are, but let a share of the error pass where they are closed; without it a unit that is
   closed by mistake never opens, and the search ends a thousand times further from the features.
3. Steps are taken in coordinates of natural images, coarse structure first, from several starts at once.
4. From these images the gradients of the layers before are matched too, since the signals at the cut are known: where
   features and gradients are more numbers than the pixels. From every start it is under a firmer prior, since kinks keep
   gradients from a fit.
5. The half of the images that is nearer to features and gradients is kept, and their mean taken: where they differ,
   nothing was known. This comes before step 4 where the features alone are more numbers than the pixels, or the budget
   does not suffice to match from every start.

Where it does not, and the layer takes one number per channel of a single image (ResNets), nothing is tried: such features
do not say where anything is. One image behind ResNet18: 89 others of its class are nearer to the answer after 64 CPU
seconds; none is after 6 seconds of signed Adam.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.analytic.apart import LayerInputs, layer_inputs
from gradveil.attacks.layers import linear_layers, pools_all_places, takes_one_row_per_image
from gradveil.attacks.matching.distances import Distance, Nothing, RelativeL2
from gradveil.attacks.matching.engine import solve
from gradveil.attacks.matching.head import PREFIX, FeatureMatch, Head, cut_before
from gradveil.attacks.matching.natural import Coordinates, Natural
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV, BoxPenalty
from gradveil.attacks.matching.problem import NOTHING, Insight, Match, Problem, residual
from gradveil.attacks.matching.rows import Rows
from gradveil.attacks.matching.surrogate import each_as_gradient
from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalSGD, optimizer
from gradveil.core.loops import Loop
from gradveil.core.observation import Observation

RELU: tuple[object, ...] = (F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
SPREAD = 0.3  # of the starts, in standard deviations of natural images
SMOOTH = 0.5  # weight of total variation, as a share of that of the prior
WEAK = 0.01  # weight of the prior where features are more numbers than the pixels, as a share of that elsewhere
FINER = 0.25  # step size while gradients are matched, as a share of that before
FIRMER = 3.0  # weight of the prior while gradients are matched from every start, as a multiple of that before
FEW = 4  # starts below which gradients are matched from their mean alone
CHEAPER = 3  # steps of the inversion that take as long as one evaluation with the derivative of an update


class _Plan(NamedTuple):
    """What the budget allows: steps of the inversion and of the match, and starts."""

    inversion: int
    matching: int
    starts: int
    matches_every_start: bool


@attack("features", targets="unused", version=6)
class FeatureInversion(Attack):
    """Images with the inputs that a fully connected layer gives away.

    Args:
        steps: first-order steps of the inversion, scaled by the budget.
        matching: steps that also match the gradients of the layers before, scaled by the budget.
        starts: starts per victim, at most; large networks get as many as the budget allows.
        prior: weight of how unlikely an image is.
        lr: step size of Adam, in standard deviations of natural images.
        slope: share of the error that passes a closed ReLU.
    Example: gradveil audit --model flower-cnn --batch-size 8 --attack features:steps=2000
    """

    steps: int = Field(default=600, ge=1)
    matching: int = Field(default=300, ge=0)
    starts: int = Field(default=8, ge=1)
    prior: float = Field(default=0.05, ge=0)
    lr: float = Field(default=0.2, gt=0)
    slope: float = Field(default=0.1, ge=0, le=1)

    def applies(self, observation: Observation) -> str | None:
        if not isinstance(optimizer(observation.knowledge.training.optimizer), LocalSGD):
            return "steps that are divided by their size, such as Adam's, do not give away the inputs of a layer"
        layers = linear_layers(observation)
        if not layers:
            return "the model has no fully connected layer with a bias"
        if not takes_one_row_per_image(observation, layers[0]):
            return "the first fully connected layer takes several rows per image"
        single = observation.knowledge.batch_size == 1
        return UNREADABLE if single and layer_inputs(observation) is None else None

    def cost(self, work: Workload) -> Cost:
        plan = self._plan(work)
        if self._cannot_win(work):
            return Cost(0)
        every = plan.starts if plan.matches_every_start else 1
        return Cost(plan.inversion // CHEAPER + plan.matching * every // plan.starts, plan.starts)

    def run(self, target: Target) -> Answer:
        if self._cannot_win(target.workload):
            raise UserError(f"attack '{self.name}' does not apply: {TOO_LARGE}.")
        readings = read_each(target, layer_inputs)
        if not readings:
            raise UserError(f"attack '{self.name}' does not apply: {UNREADABLE}.")
        rows = list(readings)
        answer = self.invert(target.subset(rows), list(readings.values()))
        x, score = torch.full(target.shape, torch.nan), torch.full(target.shape[:1], torch.nan)
        x[rows], score[rows] = answer.x, answer.score
        return Answer(x, score, iterations=answer.iterations)

    def invert(self, target: Target, readings: Sequence[LayerInputs], insight: Insight = NOTHING) -> Answer:
        """The images of victims, each with one reading. Of the insight, the weights count."""
        if target.training.kind == "delta":
            answers = [
                self.invert(single, [replace(reading, signals=-reading.signals)], insight.subset([i]))
                for i, (single, reading) in enumerate(zip(each_as_gradient(target), readings, strict=True))
            ]
            images, scores = (torch.cat(parts) for parts in zip(*((a.x, a.score) for a in answers), strict=True))
            return Answer(images, scores, iterations=max(a.iterations for a in answers))
        head = head_at(target, readings)
        if head is None:  # the features are the images
            images = torch.stack([_filled(r.inputs, target.shape[1]) for r in readings])
            return Answer(images.view(target.shape), torch.tensor([r.error for r in readings]))
        search = _Search(
            self, head, Insight({f"{PREFIX}{name}": w for name, w in insight.weights.items()}, limits=insight.limits)
        )
        plan = self._plan(target.workload)
        x, used = search.inverted(plan.inversion, plan.starts), plan.inversion
        if plan.matching and search.is_determined:
            every = not search.is_wide and plan.matches_every_start
            x = search.matched(x, plan.matching, FIRMER) if every else search.matched(search.mean(x), plan.matching)
            used += plan.matching
        x = search.mean(x)
        return Answer(x, search.score(x), iterations=used)

    def _cannot_win(self, work: Workload) -> bool:
        """Whether features that do not say where anything is are all that the budget allows to use, of one image, which
        other searches recover."""
        return work.batch_size == 1 and not self._plan(work).matches_every_start and pools_all_places(work.task)

    def _plan(self, work: Workload) -> _Plan:
        """Steps and starts that the budget allows. Where it does not suffice to match from a few starts, only their mean is
        matched; where it does not suffice for one start, all steps are fewer."""
        inversion, matching = work.steps(self.steps), work.steps(self.matching, least=50) if self.matching else 0
        per_start = max(1, inversion // CHEAPER + matching)
        matched = work.evaluations // per_start
        if matched >= min(FEW, self.starts):
            return _Plan(inversion, matching, min(self.starts, matched), matches_every_start=True)
        share = min(1.0, work.evaluations / per_start)
        inversion, matching = max(1, int(share * inversion)), int(share * matching)
        inverted = (work.evaluations - matching) // max(1, inversion // CHEAPER)
        return _Plan(inversion, matching, max(1, min(self.starts, FEW, inverted)), matches_every_start=False)


TOO_LARGE = "the first fully connected layer takes averages over all places, and the network is too large to match gradients"
UNREADABLE = "the first fully connected layer does not give away its inputs"


def read_each(target: Target, read: Callable[[Observation], LayerInputs | None]) -> dict[int, LayerInputs]:
    """The readings of those victims whose update can be read."""
    victims = len(target.observations)
    readings = [read(target.observations[i]) for i in Loop(victims)]
    return {i: reading for i in range(victims) if (reading := readings[i % len(readings)]) is not None}


def head_at(target: Target, readings: Sequence[LayerInputs]) -> Head | None:
    """The problem before the layer that was read; None where its inputs are the images."""
    count, layer = target.shape[1], readings[0].layer
    signals = [r.signals_at_inputs(o) for o, r in zip(target.observations, readings, strict=True)]
    features = torch.stack([_filled(r.inputs, count) for r in readings])
    return cut_before(target, layer, features, torch.stack([_filled(s, count, 0) for s in signals]))


class _Search:
    """Images with the features of a head."""

    def __init__(self, settings: FeatureInversion, head: Head, insight: Insight):
        self.settings, self.head, self.insight = settings, head, insight
        self.coordinates = Coordinates.of(head.target)

    @property
    def is_determined(self) -> bool:
        """Whether features and gradients are more numbers than the pixels. If not, a closer fit makes worse images."""
        _, images, *pixels = self.head.target.shape
        sent = sum(t.numel() for t in self.head.target.first.update.tensors.values())
        return sent + images * self.head.features.shape[2] >= images * math.prod(pixels)

    def inverted(self, steps: int, starts: int) -> Tensor:
        """Step 3: images from every start, victims · starts first."""
        x = self.coordinates.draw(self.head.target, starts, SPREAD)
        return self._descend(x, steps, self.settings.lr, Nothing(), self.weight)

    def matched(self, x: Tensor, steps: int, firmer: float = 1.0) -> Tensor:
        """Step 4."""
        return self._descend(x, steps, self.settings.lr * FINER, RelativeL2(), self.weight * firmer)

    def mean(self, x: Tensor) -> Tensor:
        """Step 5: one row of images per victim."""
        victims = self.head.target.shape[0]
        rows = x.unflatten(0, (victims, -1))
        nearest = self.score(x).unflatten(0, (victims, -1)).argsort(1)[:, : (rows.shape[1] + 1) // 2]
        kept: Tensor = rows[torch.arange(victims)[:, None], nearest]
        return kept.mean(1)

    @property
    def is_wide(self) -> bool:
        """Whether the features alone are more numbers than the pixels."""
        return self.head.features.shape[2] >= math.prod(self.head.target.shape[2:])

    @property
    def weight(self) -> float:
        """Of the prior. Wide features leave little open: it would only blur."""
        return self.settings.prior * (WEAK if self.is_wide else 1)

    def _descend(self, x: Tensor, steps: int, lr: float, distance: Distance, weight: float) -> Tensor:
        """Better images from `x`, victims · restarts first."""
        # After the inversion of wide features, fine structure is left.
        coordinates = None if self.is_wide and not isinstance(distance, Nothing) else self.coordinates
        priors = (
            OpenMatch(self.head.features, self.settings.slope),
            Natural(self.coordinates, weight),
            TV(SMOOTH * weight),
            BoxPenalty(1.0),
        )
        restarts = len(x) // self.head.target.shape[0]
        match = Match(distance, priors, Adam(lr), steps, restarts=restarts, coordinates=coordinates)
        return solve(Problem(self.head.target, match, self.insight), start=x).x

    def score(self, x: Tensor) -> Tensor:
        """How far images are from the features and from the gradients of the layers before, as a share of both."""
        low, high = self.head.target.pixel_range
        x = torch.minimum(torch.maximum(x, low), high)
        rows = Rows.of(self.head.target, len(x) // self.head.target.shape[0])
        return residual(self.head.target, x, insight=self.insight) + FeatureMatch(self.head.features)(x, rows)


class OpenMatch(FeatureMatch):
    """The match of features whose slope passes closed ReLUs."""

    def __init__(self, features: Tensor, slope: float):
        super().__init__(features)
        self.mode = _OpenReLU(slope)

    def outputs(self, x: Tensor, rows: Rows) -> Tensor:
        with self.mode:
            return super().outputs(x, rows)


class _OpenReLU(TorchFunctionMode):
    """Every ReLU, as a module or as a function, with a slope where it is closed. Its values stay."""

    def __init__(self, slope: float):
        super().__init__()
        self.slope = slope

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Tensor, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func not in RELU:
            return func(*args, **(kwargs or {}))
        leaky = F.leaky_relu(args[0], self.slope)
        return leaky + (torch.relu(args[0]) - leaky).detach()


def _filled(rows: Tensor, count: int, factor: float = 1.0) -> Tensor:
    """As many rows as there are images: equal images share a row, which is repeated, with its signal (`factor` 0) once."""
    more = rows[torch.arange(count - len(rows)) % len(rows)]
    return torch.cat([rows, factor * more])
