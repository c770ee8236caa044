"""DCS² on batches: sensitive and concealed images are read apart together at the first fully connected layer.

The update is the gradient of all of them (see `joint.py`). Two things tell which are which:

1. The label. From the inputs of the layer follow the outputs of the network, and from these the signals at the layer under
   each label. The signals of a sensitive image are those of one class, the signals of a concealed one those of a mixture.
2. A concealed image with one class is not natural: smooth images miss its features. So all are inverted.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from gradveil.attacks import Answer, Target
from gradveil.attacks.analytic.apart import LayerInputs, layer_inputs
from gradveil.attacks.layers import hooked
from gradveil.attacks.matching.features import UNREADABLE, FeatureInversion, head_at, read_each
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.rows import Rows
from gradveil.core.errors import UserError
from gradveil.core.observation import Observation
from gradveil.core.randomness import torch_stream
from gradveil.core.types import Batch
from gradveil.defenses.gradient.dcs2 import DCS2

# Gradients that the pixels of concealed images give are beyond natural ones.
INVERSION = FeatureInversion(matching=0, starts=4)
NATURAL = 1e-3  # TV weight by which a natural image is told from a concealed one
READABLE = 0.1  # error of a reading up to which it separates the images
HARD = 1e-3  # distance (1 − cosine) up to which signals are those of one class


def natural_images(target: Target) -> Answer:
    """The sensitive images of batches; those of an update that cannot be read are not finite, which is a failure."""
    count = target.shape[1]
    doubled = target.about([_with_concealed(o) for o in target.observations], target.labels)
    readings = {i: reading for i, reading in read_each(doubled, layer_inputs).items() if reading.error <= READABLE}
    if not readings:
        raise UserError(f"attack 'dcs2-joint' does not apply: {UNREADABLE}.")
    rows = list(readings)
    answer = _inverted(doubled.subset(rows), list(readings.values()))
    natural = answer.score.argsort(1)[:, :count]  # those with one class first
    x, score = torch.full(target.shape, torch.nan), torch.full(target.shape[:1], torch.nan)
    x[rows] = answer.x.take_along_dim(natural[:, :, None, None, None], 1)
    score[rows] = answer.score.take_along_dim(natural, 1).mean(1)
    return Answer(x, score, iterations=answer.iterations)


def _with_concealed(observation: Observation) -> Observation:
    """The same update as that of all images behind it."""
    knowledge = observation.knowledge
    count, sensitive = knowledge.batch_size, knowledge.needed_part(DCS2)
    concealed = count
    if not callable(sensitive.sensitive):
        empty = Batch(torch.zeros(count, *observation.task.input_shape), torch.zeros(count).long())
        concealed = len(sensitive.select(empty))
    return replace(observation, knowledge=replace(knowledge, batch_size=count + concealed))


def _inverted(target: Target, readings: list[LayerInputs]) -> Answer:
    """All images, and how unnatural each is: what it misses of its features, and its roughness; 1 more without one class."""
    answer, head = INVERSION.invert(target, readings), head_at(target, readings)
    unnatural = NATURAL * TV(form="smoothed").variation(answer.x.flatten(0, 1)[:, None]).view(answer.x.shape[:2])
    if head is not None:
        missed = (Rows.of(head.target).outputs(answer.x).view_as(head.features) - head.features).square().sum(2)
        unnatural += missed / head.features.square().sum(2).clamp_min(1e-12)
    for row, observation, reading in zip(unnatural, target.observations, readings, strict=True):
        row[: len(reading.inputs)] += (_distance_to_a_class(observation, reading) > HARD).float()
        row[len(reading.inputs) :] = torch.inf  # copies of others
    return Answer(answer.x, unnatural, iterations=answer.iterations)


def _distance_to_a_class(observation: Observation, reading: LayerInputs) -> Tensor:
    """1 − cosine between the signals of each input and those that cross entropy has under the nearest class."""
    model, outputs = observation.model, list[Tensor]()
    layer = model.module.get_submodule(reading.layer)
    count = len(reading.inputs)

    def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return reading.inputs.view_as(inputs[0]).detach().requires_grad_()

    def note(_: nn.Module, __: tuple[Tensor, ...], z: Tensor) -> None:
        outputs.append(z)

    hooks = (layer.register_forward_pre_hook(enter), layer.register_forward_hook(note))
    images = torch.zeros(count, *observation.task.input_shape).to(reading.inputs)
    with torch.enable_grad(), hooked(hooks):
        logits = model(observation.state, images, model.draw_noise(count, torch_stream(0)))
        slopes = [torch.autograd.grad(c.sum(), outputs[0], retain_graph=True)[0] for c in logits.unbind(1)]
    per_class = torch.stack(slopes, 1).flatten(2)  # images × classes × outputs of the layer
    mean = (logits.softmax(1)[:, :, None] * per_class).sum(1, keepdim=True)
    return 1 - torch.cosine_similarity(mean - per_class, reading.signals[:, None], dim=2).amax(1).detach()
