"""Fishing (Wen et al. 2022): a malicious server sets the classifier so that one image of a large batch makes the gradient.

Only one class c keeps a row of weights w; all other rows are zero. The signal that reaches the layers before the classifier is
then w · (p − y) of class c alone: images of other classes that are not taken for c send nothing (class fishing), and images
of c beyond a cut along w, which are taken for c, send nothing either (feature fishing). The steep row magnifies the rest.

1. As published, w and the cut come from statistics of features. Here w is the direction that tells c from other classes in
   public images, and class and cut are those that leave `certain` images per batch on the wrong side. Where none is, the one
   nearest to the cut outweighs the others. Without labelled public images only the class is fished.
2. What entered the first fully connected layer is read from its gradient, or from the row of class c where the classifier is
   the only one, as if the batch were the images that sent something.
3. The image with these inputs, and with the gradients of the layers before, is found by second-order steps on smooth nets
   (see `swift.py`), and by inverting the inputs on others (see `features.py`).

The client receives a classifier of one row and could see it; the report names the tampering. Other images stay grey.
"""

import copy
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor, nn

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.analytic.apart import LayerInputs, layer_inputs
from gradveil.attacks.layers import classifier_name, hooked, is_smooth, linear_layers, takes_one_row_per_image
from gradveil.attacks.matching.features import FeatureInversion, head_at, read_each
from gradveil.attacks.matching.swift import Swift
from gradveil.core.observation import Observation, Sighting
from gradveil.core.randomness import generator
from gradveil.core.types import Batch

MOST = 2048  # public images that are looked at
FEW = 16  # images that are read where several send a signal
RIDGE = 0.1  # weight of the direction's length, as a share of the features' size
BLIND = 256  # images of noise in their place
BEYOND = 10.0  # standard deviations from the last of these to a cut that no image passes


@attack("fishing", version=3)
class Fishing(Attack):
    """A classifier that one image of a batch passes; its features by division, its pixels by inversion.

    Args:
        certain: images per batch that are expected on the wrong side of the cut. Fewer leave more to the image nearest to it,
            whose signal is smaller; of more, several share the gradient.
        gain: steepness of the cut, per standard deviation of public images along the direction.
    Example: gradveil audit --model flower-cnn --batch-size 32 --attack fishing:certain=1
    """

    certain: float = Field(default=0.5, gt=0)
    gain: float = Field(default=50.0, gt=0)

    def tamper(
        self, module: nn.Module, input_shape: tuple[int, int, int], public: Batch | None = None, batch_size: int = 1
    ) -> nn.Module:
        module = copy.deepcopy(module)
        noise = torch.randn(BLIND, *input_shape, generator=generator(0, "fishing"))
        images = noise if public is None or len(public) < 2 else public.x[:MOST]
        classifier, features = _last_layer(module, images)
        if classifier is None or classifier.bias is None:
            return module
        direction, cut, wanted = classifier.weight[0].detach().double(), None, 0
        if public is not None and len(public) >= 2 and bool((public.y[1:MOST:2] >= 0).any()):
            direction, cut, wanted = _best_cut(features, public.hard_labels[:MOST], self.certain / batch_size)
        along = features @ direction
        spread = along.std().clamp_min(1e-12)
        cut = along.max() + BEYOND * spread if cut is None else cut
        with torch.no_grad():
            classifier.weight.zero_()
            classifier.bias.zero_()
            classifier.weight[wanted] = self.gain / spread * direction
            classifier.bias[wanted] = -self.gain / spread * cut
        return module

    def applies(self, observation: Observation) -> str | None:
        if _fished(observation) is None:
            return "the classifier is not one that a malicious server sent: one row of weights, the others zero"
        return None if observation.update.kind == "gradient" else "it reads single gradients, not weight deltas"

    def cost(self, work: Workload) -> Cost:
        return _search(work.task.model.module).cost(work)

    def run(self, target: Target) -> Answer:
        readings = read_each(target, _read)
        x, score, used = torch.zeros(target.shape), torch.ones(target.shape[0]), 0
        for count in sorted({len(r.inputs) for r in readings.values()}):
            rows = [i for i, r in readings.items() if len(r.inputs) == count]
            few = target.about([_magnified(target.observations[i], readings[i]) for i in rows], target.labels[rows, :count])
            answer = _rebuilt(few, [replace(r, signals=_unit(r.signals)) for r in map(readings.__getitem__, rows)])
            x[rows, :count], score[rows], used = answer.x, answer.score, max(used, answer.iterations)
        return Answer(x, score, iterations=used)


def _search(module: nn.Module) -> Swift | FeatureInversion:
    return Swift(closed=False) if is_smooth(module) else FeatureInversion()


def _rebuilt(target: Target, readings: list[LayerInputs]) -> Answer:
    """Step 3."""
    search, head = _search(target.model.module), head_at(target, readings)
    if head is None or isinstance(search, FeatureInversion):
        return FeatureInversion().invert(target, readings)
    return search.run(head.target)


def _last_layer(module: nn.Module, images: Tensor) -> tuple[nn.Linear | None, Tensor]:
    """The linear layer that the forward pass meets last, and what enters it (images × width)."""
    met: list[tuple[nn.Linear, Tensor]] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        met.append((layer, inputs[0].flatten(1).double()))

    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if not layers:
        return None, images.flatten(1)
    trains, rows = module.training, list[Tensor]()
    with torch.no_grad(), hooked([m.register_forward_pre_hook(note) for m in layers]):
        module.eval()
        for part in images.split(128):
            module(part)
            rows.append(met[-1][1])
        module.train(trains)
    return met[-1][0], torch.cat(rows)


def _best_cut(features: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor, int]:
    """Direction, cut and class that leave this share of images on the wrong side."""
    classes = labels[labels >= 0].unique()
    fitted, held = features[::2], features[1::2]  # the cut is chosen on other images than the direction
    centre = fitted.mean(0)
    kernel = (fitted - centre) @ (fitted - centre).T
    wanted = (labels[::2, None] == classes).double()
    ridge = RIDGE * kernel.diagonal().mean() * torch.eye(len(kernel), dtype=kernel.dtype)
    directions = (fitted - centre).T @ torch.linalg.solve(kernel + ridge, wanted - wanted.mean(0))
    best: tuple[float, Tensor, Tensor, int] | None = None
    for direction, c in zip(directions.T, classes.tolist(), strict=True):
        along, order = (held @ direction).sort()
        is_wanted = (labels[1::2][order] == c).double()
        # Of n images on a line there are n + 1 places for a cut: images of c below it and others above it are wrong.
        below = torch.cat([is_wanted.new_zeros(1), is_wanted.cumsum(0)])
        above = torch.cat([(1 - is_wanted).flip(0).cumsum(0).flip(0), is_wanted.new_zeros(1)])
        cuts = torch.cat([along[:1] - along.std(), (along[1:] + along[:-1]) / 2, along[-1:] + along.std()])
        gaps = ((below + above) / len(along) - share).abs()
        place = int(gaps.argmin())
        if best is None or float(gaps[place]) < best[0]:
            best = float(gaps[place]), direction, cuts[place], c
    assert best is not None
    return best[1:]


def _fished(observation: Observation) -> int | None:
    """The class whose row alone is not zero, or None."""
    weight = observation.state.get(f"{classifier_name(observation)}.weight")
    rows = [] if weight is None else weight.abs().sum(1).nonzero().flatten().tolist()
    return rows[0] if len(rows) == 1 else None


def _as_batch_of(observation: Observation, count: int) -> Observation:
    return replace(observation, knowledge=replace(observation.knowledge, batch_size=count))


def _unit(signals: Tensor) -> Tensor:
    return torch.nn.functional.normalize(signals.flatten(), dim=0, eps=0.0).view_as(signals)


def _magnified(observation: Observation, reading: LayerInputs) -> Observation:
    """The batch of those that were read, with signals of unit length: squares of the smallest would vanish."""
    tensors = {name: t / reading.signals.norm() for name, t in observation.update.tensors.items()}
    seen = (Sighting(observation.state, replace(observation.update, tensors=tensors)),)
    return replace(_as_batch_of(observation, len(reading.inputs)), seen=seen)


def _read(observation: Observation) -> LayerInputs | None:
    """What entered the first fully connected layer, of the images that sent a signal."""
    classifier, layers = classifier_name(observation), linear_layers(observation)
    if layers[0] == classifier or not takes_one_row_per_image(observation, layers[0]):
        return _read_row(observation, f"{classifier}")
    alone = layer_inputs(_as_batch_of(observation, 1), layers[0])
    if alone is None or alone.is_exact:
        return alone
    most = min(FEW, observation.knowledge.batch_size)
    together = layer_inputs(_as_batch_of(observation, most), layers[0]) if most > 1 else None
    return together if together is not None and together.error < alone.error else alone


def _read_row(observation: Observation, layer: str) -> LayerInputs | None:
    weight, bias = (observation.update.tensors[f"{layer}.{part}"] for part in ("weight", "bias"))
    row = _fished(observation)
    if row is None or not bool(bias[row]):
        return None
    signals = torch.zeros_like(bias)
    signals[row] = bias[row]
    return LayerInputs(layer, (weight[row] / bias[row])[None], signals[None], 0.0)
