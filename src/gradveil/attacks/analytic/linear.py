"""The images that entered a fully connected first layer with a bias.

A single image is read by division (Phong et al. 2017; Geiping et al. 2020), a batch before a ReLU by the zeros in its signals
(see `apart.py`), a batch that enters the classifier itself by its probabilities (see `classifier.py`); all are exact. Where
none explains the update, as with noise or behind another activation, the images
are separated as independent sources (see `separation.py`), which is approximate; the score is then how far pixels lie outside
of their range.
"""

import math

import torch
from torch import Tensor

from gradveil.attacks import ClosedForm, attack
from gradveil.attacks.analytic.apart import factored, layer_inputs
from gradveil.attacks.analytic.classifier import classifier_inputs
from gradveil.attacks.analytic.separation import separated
from gradveil.attacks.layers import classifier_name, linear_layers
from gradveil.core.observation import Observation

_EXPLAINED = 0.1  # error of a reading above which images are separated as sources instead


@attack("linear", targets="unused", version=4)
class Linear(ClosedForm):
    """The inputs of a fully connected first layer: of one image by division, of a batch by the zeros that ReLU leaves, or
    by the probabilities of a classifier.

    Example: gradveil audit --model smlp --batch-size 8 --attack linear
    """

    def applies(self, observation: Observation) -> str | None:
        layers = linear_layers(observation)
        if not layers:
            return "the model has no fully connected layer with a bias"
        width = observation.state[f"{layers[0]}.weight"].shape[1]
        pixels = math.prod(observation.task.input_shape)
        wrong = f"the first fully connected layer takes {width} features, not the {pixels} pixels"
        return None if width == pixels else wrong

    def read(self, observation: Observation) -> tuple[Tensor, Tensor]:
        count, layer = observation.knowledge.batch_size, linear_layers(observation)[0]
        reading = layer_inputs(observation, layer)
        if reading is not None and (count == 1 or reading.error <= _EXPLAINED):
            return _images(observation, reading.inputs), torch.tensor(reading.error)
        last = classifier_inputs(observation) if count > 1 and layer == classifier_name(observation) else None
        if last is not None and last.error <= _EXPLAINED:
            return _images(observation, last.inputs), torch.tensor(last.error)
        weight, bias = (observation.update.tensors[f"{layer}.{part}"].double() for part in ("weight", "bias"))
        if not bool(bias.any()):  # the layer sent nothing: not finite, and so a failure
            return torch.full((count, *observation.task.input_shape), torch.nan), torch.tensor(1.0)
        mixtures = factored(torch.cat([weight, bias[:, None]], 1), count).rest
        images = _images(observation, separated(mixtures, observation.task.input_shape))
        pixels = observation.task.denormalize(images)
        return images, (pixels - pixels.clamp(0, 1)).square().mean().sqrt()


def _images(observation: Observation, inputs: Tensor) -> Tensor:
    """As many images as the batch has; those that are missing are the mean of the others."""
    missing = observation.knowledge.batch_size - len(inputs)
    inputs = torch.cat([inputs, inputs.mean(0, keepdim=True).expand(missing, -1)])
    return inputs.float().view(-1, *observation.task.input_shape)
