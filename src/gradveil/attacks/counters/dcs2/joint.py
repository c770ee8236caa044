"""Against DCS²: what is sent is the gradient of two images, so two images are sought.

* `dcs2-joint` knows Eq. 10. Cross entropy is linear in its target, so λg·∇L(x_c, y_c) + (1 − λg)·∇L(x_c, y_s) is the
  gradient of x_c under the soft label λg·y_c + (1 − λg)·y_s: the update is twice the gradient of an ordinary batch of
  sensitive and concealed images.
  1. The classifier's gradient tells the two apart exactly, labels and features (`dcs2_pair`).
  2. Linear layers before it, then convolutions are undone in closed form, both images at once, as long as there are
     clearly more equations than unknowns.
  3. The sensitive image alone is sought by its features there: the concealed one, however wild, is out of the way.
  Where 1 fails (the update was changed further), sensitive and concealed image are matched together, with a few guesses
  of their labels in one batch: y_s pulls the classifier's bias with 2 − λg, y_c with λg. The residual decides.
* `dcs2-average-start` is the paper's own (Table 4): Inverting Gradients from the class mean of public images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradveil.attacks.analytic.rgap import RGAP, Layer, back_through_linear, line, linear_tail
from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.budget import steps_for
from gradveil.attacks.counters.dcs2.pair import Pair, separate
from gradveil.attacks.layers import classifier_gradients, linear_layers
from gradveil.attacks.matching.distances import Cosine, Nothing
from gradveil.attacks.matching.engine import match_and_choose, solve
from gradveil.attacks.matching.head import FeatureMatch, cut_before
from gradveil.attacks.matching.optimizers import LBFGS, Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Insight, Match, Problem
from gradveil.attacks.matching.starts import Start
from gradveil.attacks.matching.swift import Swift
from gradveil.attacks.registry import attack
from gradveil.core.observation import Knowledge, Observation
from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses.gradient.dcs2 import DCS2

APART = 1e-3  # error of the classifier's equations below which the two images are told apart
NATURAL = 1e-3  # TV weight by which a natural image is told from a concealed one
LADDER = ((1e-3, 100), (1e-4, 100), (1e-5, 200), (1e-6, 200))  # TV weight, L-BFGS iterations


@attack("dcs2-joint", adaptive=True)
@settings
class DCS2Joint(Attack):
    """Sensitive and concealed image matched together."""

    guesses: int = Field(default=4, ge=1)  # of the pair of labels

    def applies(self, observation: Observation) -> str | None:
        if observation.knowledge.part(DCS2) is None:
            return "the defense is not dcs2"
        if observation.knowledge.batch_size != 1 or observation.update.kind != "gradient":
            return "it looks for one sensitive and one concealed image behind one gradient"
        if classifier_gradients(observation)[1] is None:
            return "the classifier has no bias to read labels from"
        return None

    def run(self, target: Target) -> Answer:
        pairs = [_separated(o) for o in target.observations]
        apart = [i for i, pair in enumerate(pairs) if pair.error < APART]
        other = [i for i in range(len(pairs)) if i not in apart]
        x = torch.zeros(target.shape)
        score, labels, used = torch.zeros(len(pairs)), torch.zeros(len(pairs), 1).long(), 0
        if apart:
            chosen = [pairs[i] for i in apart]
            found = _by_features(target.subset(apart), chosen)
            x[apart], score[apart], used = found.x, found.score, found.iterations
            labels[apart] = torch.tensor([[pair.labels[0]] for pair in chosen])
        if other:
            found = self._together(target.subset(other))
            assert found.labels is not None
            x[other], score[other], labels[other] = found.x, found.score, found.labels
            used = max(used, found.iterations)
        return Answer(x, score, labels, used)

    def _together(self, target: Target) -> Answer:
        defense = _dcs2(target.knowledge)
        pairs = [self._pairs(o) for o in target.observations]
        each = len(pairs[0])
        observations, labels = [], []
        for o, options in zip(target.observations, pairs, strict=True):
            for sensitive, concealed in options:
                hard = F.one_hot(torch.tensor([sensitive, concealed]), o.task.num_outputs).float()
                soft = defense.lambda_g * hard[1] + (1 - defense.lambda_g) * hard[0]
                labels.append(torch.stack([hard[0], soft]))
                observations.append(replace(o, knowledge=replace(o.knowledge, batch_size=2)))
        doubled = target.about(observations, torch.stack(labels))
        answer = Swift(adam_steps=0).reconstruct(doubled, Insight(transform=_scale(2 / defense.divisor)))
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


def _dcs2(knowledge: Knowledge) -> DCS2:
    defense = knowledge.part(DCS2)
    assert defense is not None  # `applies` has asked
    return defense


def _separated(observation: Observation) -> Pair:
    defense, layer = _dcs2(observation.knowledge), linear_layers(observation)[-1]
    names = [f"{layer}.{part}" for part in ("weight", "bias")]
    weight, bias = (observation.state[n] for n in names)
    weight_sent, bias_sent = (observation.update.tensors[n] * defense.divisor for n in names)
    return separate((weight_sent, bias_sent), (weight, bias), defense.lambda_g)


def _by_features(target: Target, pairs: list[Pair]) -> Answer:
    """The sensitive images, from the deepest features that the closed form gives."""
    scale = _dcs2(target.knowledge).divisor
    layers = line(target.first)
    layer = linear_layers(target.first)[-1]
    weight = target.state[f"{layer}.weight"].double()
    states = [(pair.features, pair.signals @ weight / scale) for pair in pairs]
    for step in linear_tail(target.first):
        layer = step.path
        states = [back_through_linear(o, step, *s) for o, s in zip(target.observations, states, strict=True)]
    layers = layers[:-1] if layers and layers[-1].path == layer else []
    while layers and _determined(target, layers[-1], 2):
        step = layers.pop()
        layer = step.path
        states = [RGAP().back(o, step, *s)[:2] for o, s in zip(target.observations, states, strict=True)]
    # With one label on both sides the equations do not say which image is which: then both are rebuilt.
    twins = [(v, i) for v, pair in enumerate(pairs) for i in range(1 + (pair.labels[0] == pair.labels[1]))]
    features = torch.stack([states[v][0][i : i + 1] for v, i in twins]).float()
    target = target.subset([v for v, _ in twins])
    x, missed, used = _with_features(target, layer, features)
    # A natural image meets its features without giving up smoothness, a concealed one does not.
    value = missed + NATURAL * TV(form="smoothed").variation(x)
    own = [[i for i, (v, _) in enumerate(twins) if v == place] for place in range(len(pairs))]
    rows = [min(some, key=lambda i: float(value[i])) for some in own]
    return Answer(x[rows], value[rows], iterations=used)


def _with_features(target: Target, layer: str, features: Tensor) -> tuple[Tensor, Tensor, int]:
    """The smoothest images with these features before `layer`, how far they miss them, and the evaluations used."""
    head = cut_before(target, layer, features, torch.zeros_like(features))
    if head is None:  # the features are the image
        return features.view(target.shape), torch.zeros(len(features)), 0
    x, used = Start(scale=0.1).draw(target, 1, target.rng), 0
    for tv, steps in LADDER:
        match = Match(Nothing(), (FeatureMatch(head.features), TV(tv, "smoothed")), LBFGS(history=30), steps)
        problem = Problem(head.target, match)
        solution = solve(problem, start=x)
        x, used = solution.x, used + solution.iterations
    return x, FeatureMatch(head.features)(x, problem.rows), used


def _determined(target: Target, layer: Layer, images: int) -> bool:
    """Whether the two sets of equations of a layer are clearly more than its unknown inputs."""
    unknown = images * math.prod(layer.before)
    return images * math.prod(layer.after) + target.state[f"{layer.path}.weight"].numel() > 1.5 * unknown


def _scale(factor: float) -> Callable[[Tensors], Tensors]:
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
        hard = target.hard_labels
        means = torch.stack([_class_mean(public.x, public.hard_labels, c) for c in range(target.task.num_outputs)])
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
