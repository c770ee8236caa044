"""Against ATS: a transformed image is rebuilt like any other, and the transformation is no secret but for its draws.

* `ats-early` (Balunović et al. 2022): in the first rounds plain Inverting Gradients rebuilds what was fed.
* `ats-policy` undoes the policy too. Which of the policies, the direction of each function, crop and flip were drawn in
  secret, but there are only some thousand draws: each is undone (`ats_inverse.py`), what it left out is filled in as
  images of the class make it expected, and that image is chosen which, transformed again, is what was fed and of all
  such is most like public images of the class.
"""

from __future__ import annotations

from itertools import product

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.budget import steps_for
from gradveil.attacks.counters.ats.inverse import signed, undo
from gradveil.attacks.generative.public_prior import ImageGaussian, gaussians
from gradveil.attacks.matching.distances import Cosine
from gradveil.attacks.matching.engine import match_and_choose
from gradveil.attacks.matching.fed_images import one_image, sighting
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Match
from gradveil.attacks.registry import attack
from gradveil.core.observation import Observation
from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses.data.ats.defense import ATS, Draw, transform

BLOCK = 2048  # draws that are judged together


@attack("ats-early", adaptive=True)
@settings
class AtsEarly(Attack):
    """Inverting Gradients with a weak prior, as in the first rounds."""

    steps: int | None = Field(default=None, ge=1)  # published: 2,000

    def applies(self, observation: Observation) -> str | None:
        return None if observation.knowledge.part(ATS) else "the defense is not ats"

    def run(self, target: Target) -> Answer:
        steps = self.steps or steps_for(target, 2_000)
        return match_and_choose(target, Match(Cosine(), (TV(1e-5),), Adam(0.1, signed=True), steps, box=True))


@attack("ats-policy", needs={"public"}, adaptive=True)
@settings
class AtsPolicy(Attack):
    """Rebuild what was fed, undo every draw of the policy, keep the likeliest."""

    error: float = Field(default=0.02, gt=0)  # of a rebuilt pixel, when it is weighed against what images are like

    def applies(self, observation: Observation) -> str | None:
        public = observation.knowledge.public
        if observation.knowledge.part(ATS) is None:
            return "the defense is not ats"
        if public is not None and public.x.shape[1:] != torch.Size(observation.task.input_shape):
            return "public images have another shape than the private ones"
        return None

    def run(self, target: Target) -> Answer:
        answer = one_image(sighting(target, 0))
        public, defense = target.knowledge.public, target.knowledge.part(ATS)
        assert public is not None and defense is not None
        classes = gaussians(public, target.task.num_outputs)
        hard = target.hard_labels
        fed = target.denormalize(answer.x).clamp(0, 1)
        found = torch.empty_like(fed)
        for victim, observation in enumerate(target.observations):
            draws = given(observation.knowledge.secrets)
            for place in range(fed.shape[1]):
                draw = every(defense) if draws is None else _rows(draws, slice(place, place + 1))
                kind = classes[int(hard[victim, place])]
                found[victim, place] = self._likeliest(fed[victim, place], draw, defense, kind, public.x)
        return Answer(target.normalize(found), answer.score, hard, answer.iterations)

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


def given(secrets: Tensors | object) -> Draw | None:
    """What was drawn, where it is granted."""
    names = ("policy", "signs", "crop", "flip")
    if not isinstance(secrets, dict) or any(f"ats.{n}" not in secrets for n in names):
        return None
    return Draw(*(secrets[f"ats.{n}"] for n in names))


def _rows(draw: Draw, rows: slice) -> Draw:
    return Draw(*(value[rows] for value in vars(draw).values()))
