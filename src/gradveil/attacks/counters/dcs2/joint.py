"""Against DCS²: the update of one image is the gradient of two, so two images are searched.

* `dcs2-joint` knows Eq. 10. Cross entropy is linear in its target, so λg·∇L(x_c, y_c) + (1 − λg)·∇L(x_c, y_s) is the
  gradient of x_c under the soft label λg·y_c + (1 − λg)·y_s: the update is, up to its size, the gradient of an ordinary
  batch of a sensitive and a concealed image.
  1. The classifier's gradient separates the two exactly, labels and features (`pair.py`).
  2. Linear layers before it, then convolutions are undone in closed form, both images at once, as long as there are
     clearly more equations than unknowns.
  3. The sensitive image alone is searched by its features there, without the concealed one.
  Where 1 fails (the update was changed further), both images are matched together, with a few guesses of their labels
  in one batch: y_s pulls the classifier's bias with 2 − λg, y_c with λg. The residual decides.
  In batches, all images are read apart at the first fully connected layer, and the natural ones are kept (`batch.py`).
* `dcs2-average-start` is the paper's attack (Table 4): Inverting Gradients from the class mean of public images.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.analytic.rgap import RGAP, Layer, back_through_linear, line, linear_tail
from gradveil.attacks.counters.dcs2.batch import INVERSION, NATURAL, natural_images
from gradveil.attacks.counters.dcs2.pair import Pair, separate
from gradveil.attacks.generative.public_prior import class_means
from gradveil.attacks.layers import classifier_gradients, linear_layers
from gradveil.attacks.matching.distances import Cosine, Nothing
from gradveil.attacks.matching.engine import MatchingAttack, match_and_choose, solve
from gradveil.attacks.matching.head import FeatureMatch, cut_before
from gradveil.attacks.matching.optimizers import LBFGS, Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Match, Problem
from gradveil.attacks.matching.starts import Start
from gradveil.attacks.matching.swift import Swift
from gradveil.core.observation import Observation
from gradveil.defenses.gradient.dcs2 import DCS2

APART = 1e-3  # error of the classifier's equations below which the two images are told apart
TOGETHER = Swift(adam_steps=0)
LADDER = ((1e-3, 100), (1e-4, 100), (1e-5, 200), (1e-6, 200))  # TV weight, L-BFGS iterations


@attack("dcs2-joint", against=(DCS2,), version=5)
class DCS2Joint(Attack):
    """Sensitive and concealed images told apart, or matched together.

    One gradient of a single image, of all networks whose classifier has a bias; or of a batch, where the first fully connected
    layer meets a ReLU and gives away twice as many images as the batch has.

    Args: guesses: pairs of labels that are tried where the images are matched together.
    Example: gradveil audit --defense dcs2 --attack dcs2-joint
    """

    guesses: int = Field(default=4, ge=1)

    def cost(self, work: Workload) -> Cost:
        apart = LBFGS().expected_evaluations(sum(steps for _, steps in LADDER))
        return Cost(max(apart, TOGETHER.cost(work).iterations), rows=self.guesses)

    def applies(self, observation: Observation) -> str | None:
        if observation.knowledge.part(DCS2) is None:
            return "the defense is not dcs2"
        if observation.update.kind != "gradient":
            return "it looks for sensitive and concealed images behind one gradient"
        if observation.knowledge.batch_size > 1:
            return INVERSION.applies(observation)
        if classifier_gradients(observation)[1] is None:
            return "the classifier has no bias to read labels from"
        return None

    def run(self, target: Target) -> Answer:
        if target.knowledge.batch_size > 1:
            return natural_images(target)
        pairs = [_separated(o) for o in target.observations]
        apart = [i for i, pair in enumerate(pairs) if pair.error < APART]
        other = [i for i in range(len(pairs)) if i not in apart]
        x = torch.zeros(target.shape)
        score, labels, used = torch.zeros(len(pairs)), torch.zeros(len(pairs), 1).long(), 0
        if apart:
            chosen = [pairs[i] for i in apart]
            answer = _by_features(target.subset(apart), chosen)
            x[apart], score[apart], used = answer.x, answer.score, answer.iterations
            labels[apart] = torch.tensor([[pair.labels[0]] for pair in chosen])
        if other:
            answer = self._together(target.subset(other))
            assert answer.labels is not None
            x[other], score[other], labels[other] = answer.x, answer.score, answer.labels
            used = max(used, answer.iterations)
        return Answer(x, score, labels, used)

    def _together(self, target: Target) -> Answer:
        defense = target.knowledge.needed_part(DCS2)
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
        answer = TOGETHER.reconstruct(doubled)
        pick = answer.score.view(-1, each).argmin(1)
        rows = pick + torch.arange(len(pick)) * each
        best = torch.tensor([[options[int(i)][0]] for options, i in zip(pairs, pick, strict=True)])
        return Answer(answer.x[rows, :1], answer.score[rows], best, answer.iterations)

    def _pairs(self, observation: Observation) -> list[tuple[int, int]]:
        """Likely (y_s, y_c), best first: the deepest pull is the sensitive label's."""
        bias = classifier_gradients(observation)[1]
        assert bias is not None
        order = bias.argsort().tolist()
        granted = observation.knowledge.labels
        first = int(granted.reshape(-1)[0]) if granted is not None and granted.ndim == 1 else order[0]
        others = [c for c in order if c != first]
        pairs = [(first, others[0]), (first, first), (first, others[1 % len(others)]), (others[0], first)]
        return pairs[: self.guesses]


def _separated(observation: Observation) -> Pair:
    defense, layer = observation.knowledge.needed_part(DCS2), linear_layers(observation)[-1]
    names = [f"{layer}.{part}" for part in ("weight", "bias")]
    weight, bias = (observation.state[n] for n in names)
    weight_sent, bias_sent = (observation.update.tensors[n] for n in names)
    return separate((weight_sent, bias_sent), (weight, bias), defense.lambda_g)


def _by_features(target: Target, pairs: list[Pair]) -> Answer:
    """The sensitive images, from the deepest features that the closed form gives."""
    layers, layer = line(target.first), linear_layers(target.first)[-1]
    weight = target.state[f"{layer}.weight"].double()
    states = [(pair.features, pair.signals @ weight) for pair in pairs]
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
    candidates = [[i for i, (v, _) in enumerate(twins) if v == place] for place in range(len(pairs))]
    rows = [min(places, key=lambda i: float(value[i])) for places in candidates]
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


@attack("dcs2-average-start", needs={"public"}, against=(DCS2,), version=2)
class DCS2AverageStart(MatchingAttack):
    """Inverting Gradients from the mean public image of the class.

    Args: steps: iterations; by default 4,000 scaled by the budget.
    Example: gradveil audit --defense dcs2 --attack dcs2-average-start
    """

    steps: int | None = Field(default=None, ge=1)

    def match(self, work: Workload) -> Match:  # unsigned and without a box, as the paper runs it
        return Match(Cosine(), (TV(1e-4),), Adam(0.1), self.steps or work.steps(4_000))

    def run(self, target: Target) -> Answer:
        public = target.knowledge.public
        assert public is not None
        means = class_means(public.x, public.hard_labels, target.task.num_outputs)
        start = Start("images", images=means[target.hard_labels])
        return match_and_choose(target, replace(self.match(target.workload), start=start))
