"""Against ATS: a transformed image is rebuilt like any other, and the transformation is public but for its draws.

* `ats-early` (Balunović et al. 2022): in the first rounds plain Inverting Gradients rebuilds what was fed.
* `ats-policy` undoes the policy too. The policy, the direction of each function, crop and flip were drawn in secret, but
  there are only some thousand draws. Each is undone (`inverse.py`), and the missing pixels are filled in as images of the
  class make them expected. Of the images that, transformed again, are what was fed, the one most like public images of
  the class is chosen.
"""

from collections.abc import Mapping
from itertools import product

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.counters.ats.inverse import signed, undo
from gradveil.attacks.generative.public_prior import ImageGaussian, gaussians
from gradveil.attacks.matching.distances import Cosine
from gradveil.attacks.matching.engine import MatchingAttack
from gradveil.attacks.matching.fed_images import fed_cost, one_image, sighting
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Match
from gradveil.core.observation import Observation
from gradveil.defenses.data.ats.defense import ATS, Draw, transform

BLOCK = 2048  # draws that are judged together


@attack("ats-early", against=(ATS,), version=4)
class AtsEarly(MatchingAttack):
    """Inverting Gradients with a weak prior, as in the first rounds.

    Args: steps: iterations; published 2,000, by default so many scaled by the budget.
    Example: gradveil audit --defense ats --attack ats-early
    """

    steps: int | None = Field(default=None, ge=1)

    def applies(self, observation: Observation) -> str | None:
        return None if observation.knowledge.part(ATS) else "the defense is not ats"

    def match(self, work: Workload) -> Match:
        return Match(Cosine(), (TV(1e-5),), Adam(0.1, signed=True), self.steps or work.steps(2_000, signed=True), box=True)


@attack("ats-policy", needs={"public"}, against=(ATS,), version=4)
class AtsPolicy(Attack):
    """Rebuild what was fed, undo every draw of the policy, keep the likeliest.

    Args: error: error of a rebuilt pixel, weighed against what images of the class are like.
    Example: gradveil audit --defense ats --attack ats-policy
    """

    error: float = Field(default=0.02, gt=0)

    def cost(self, work: Workload) -> Cost:
        return fed_cost(work)

    def applies(self, observation: Observation) -> str | None:
        public = observation.knowledge.public
        if observation.knowledge.part(ATS) is None:
            return "the defense is not ats"
        if public is not None and public.x.shape[1:] != torch.Size(observation.task.input_shape):
            return "public images have another shape than the private ones"
        return None

    def run(self, target: Target) -> Answer:
        answer = one_image(sighting(target, 0))
        public, defense = target.knowledge.public, target.knowledge.needed_part(ATS)
        assert public is not None
        classes = gaussians(public, target.task.num_outputs)
        hard = target.hard_labels
        fed = target.denormalize(answer.x).clamp(0, 1)
        images = torch.empty_like(fed)
        for victim, observation in enumerate(target.observations):
            draws = granted(observation.knowledge.secrets)
            for place in range(fed.shape[1]):
                draw = every(defense) if draws is None else _rows(draws, slice(place, place + 1))
                kind = classes[int(hard[victim, place])]
                images[victim, place] = self._likeliest(fed[victim, place], draw, defense, kind, public.x)
        return Answer(target.normalize(images), answer.score, hard, answer.iterations)

    def _likeliest(self, fed: Tensor, draw: Draw, defense: ATS, kind: ImageGaussian, public: Tensor) -> Tensor:
        best, least = fed, float("inf")
        for begin in range(0, len(draw.policy), BLOCK):
            part = _rows(draw, slice(begin, begin + BLOCK))
            many = fed.expand(len(part.policy), *fed.shape)
            before, seen = undo(many, defense.policies(), part, defense.crop, public)
            before = kind.fill(before, seen)
            again = transform(before, defense.policies(), part, defense.crop)
            cost = (again - many).square().flatten(1).sum(1) / (2 * self.error**2) + kind.surprise(before)
            if cost.min() < least:
                best, least = before[cost.argmin()], float(cost.min())
        return best


def every(defense: ATS) -> Draw:
    """All that may have been drawn for an image."""
    policies, rows = defense.policies(), []
    longest = max(map(len, policies))
    for which, policy in enumerate(policies):
        directions = [(1.0, -1.0) if two else (1.0,) for two in signed(policy)]
        for signs in product(*directions):
            rows.append((which, (*signs, *(1.0,) * (longest - len(signs)))))
    places = list(product(range(len(rows)), (False, True) if defense.flip else (False,), range(2 * defense.crop + 1)))
    each = [(row, flip, top, left) for row, flip, top in places for left in range(2 * defense.crop + 1)]
    return Draw(
        torch.tensor([rows[row][0] for row, *_ in each]),
        torch.tensor([rows[row][1] for row, *_ in each]),
        torch.tensor([[top, left] for *_, top, left in each]),
        torch.tensor([flip for _, flip, *_ in each]),
    )


def granted(secrets: Mapping[str, Tensor]) -> Draw | None:
    """The draws, where they are granted."""
    names = [f"ats.{name}" for name in ("policy", "signs", "crop", "flip")]
    return Draw(*(secrets[name] for name in names)) if all(name in secrets for name in names) else None


def _rows(draw: Draw, rows: slice) -> Draw:
    return Draw(*(value[rows] for value in vars(draw).values()))
