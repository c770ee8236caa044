"""Against DCS²: what is sent is the gradient of two images, so two images are sought.

* `dcs2-joint` knows Eq. 10. Cross entropy is linear in its target, so λg·∇L(x_c, y_c) + (1 − λg)·∇L(x_c, y_s) is the
  gradient of x_c under the soft label λg·y_c + (1 − λg)·y_s: the update is twice the gradient of an ordinary batch of
  sensitive and concealed images, and any matching attack on batches applies. The labels stand in the classifier's bias
  gradient: y_s pulls with 2 − λg, y_c with λg. A few guesses of them run in one batch; the residual decides.
* `dcs2-average-start` is the paper's own (Table 4): Inverting Gradients from the class mean of public images.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.budget import steps_for
from gradveil.attacks.labels import classifier_gradients
from gradveil.attacks.matching.distances import Cosine
from gradveil.attacks.matching.engine import Match, match_and_choose
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.starts import Start
from gradveil.attacks.matching.swift import Swift
from gradveil.attacks.registry import attack
from gradveil.settings import settings
from gradveil.types import Observation, Tensors


def _settings(observation: Observation) -> Any:
    parts = getattr(observation.knowledge.defense, "parts", ())
    return next((p for p in parts if getattr(p, "name", "") == "dcs2"), None)


@attack("dcs2-joint", adaptive=True)
@settings
class DCS2Joint(Attack):
    """Sensitive and concealed image matched together."""

    guesses: int = Field(default=4, ge=1)  # of the pair of labels

    def applies(self, observation: Observation) -> str | None:
        if _settings(observation) is None:
            return "the defense is not dcs2"
        if observation.knowledge.batch_size != 1 or observation.update.kind != "gradient":
            return "it looks for one sensitive and one concealed image behind one gradient"
        if classifier_gradients(observation)[1] is None:
            return "the classifier has no bias to read labels from"
        return None

    def run(self, target: Target) -> Answer:
        known = _settings(target.first)
        pairs = [self._pairs(o) for o in target.observations]
        each = len(pairs[0])
        observations, labels = [], []
        for o, options in zip(target.observations, pairs, strict=True):
            for sensitive, concealed in options:
                hard = F.one_hot(torch.tensor([sensitive, concealed]), o.num_classes).float()
                soft = known.lambda_g * hard[1] + (1 - known.lambda_g) * hard[0]
                labels.append(torch.stack([hard[0], soft]))
                observations.append(replace(o, knowledge=replace(o.knowledge, batch_size=2)))
        parts = 1 if not known.divide else 2 if known.lambda_g in (0, 1) else 3
        doubled = target.about(observations, torch.stack(labels))
        answer = Swift(adam_steps=0).reconstruct(doubled, lambda _: {"transform": _scale(2 / parts)})
        pick = answer.score.view(-1, each).argmin(1)
        rows = pick + torch.arange(len(pick)) * each
        found = torch.tensor([[options[int(i)][0]] for options, i in zip(pairs, pick, strict=True)])
        return Answer(answer.x[rows, :1], answer.score[rows], found, answer.iterations)

    def _pairs(self, observation: Observation) -> list[tuple[int, int]]:
        """Likely (y_s, y_c), best first: the deepest pull is the sensitive label's."""
        bias = classifier_gradients(observation)[1]
        assert bias is not None
        order = bias.argsort().tolist()
        given = observation.knowledge.labels
        first = int(given.reshape(-1)[0]) if given is not None and given.ndim == 1 else order[0]
        others = [c for c in order if c != first]
        pairs = [(first, others[0]), (first, first), (first, others[1 % len(others)]), (others[0], first)]
        return pairs[: self.guesses]


def _scale(factor: float) -> Any:
    def transform(tensors: Tensors) -> Tensors:
        return {name: factor * t for name, t in tensors.items()}

    return transform


@attack("dcs2-average-start", needs={"public"}, adaptive=True)
@settings
class DCS2AverageStart(Attack):
    """Inverting Gradients from the mean public image of the class."""

    steps: int | None = Field(default=None, ge=1)

    def run(self, target: Target) -> Answer:
        public = target.knowledge.public
        assert public is not None
        hard = target.labels if target.labels.ndim == 2 else target.labels.argmax(-1)
        means = torch.stack([_class_mean(public.x, public.hard_labels, c) for c in range(target.first.num_classes)])
        match = Match(
            Cosine(),
            (TV(1e-4),),
            Adam(0.1),  # unsigned and without a box, as the paper runs it
            self.steps or steps_for(target, 4_000),
            Start("given", images=means[hard]),
        )
        return match_and_choose(target, match)


def _class_mean(images: Tensor, labels: Tensor, label: int) -> Tensor:
    own = images[labels == label]
    return own.mean(0) if len(own) else images.mean(0)
