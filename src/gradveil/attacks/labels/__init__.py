"""What an update says about labels, before any image is sought.

All rules read the classifier: with cross entropy its bias gradient is mean(p − y), so present classes pull it below zero.
"""

import torch
from torch import Tensor

from gradveil.attacks.labels.rules import bias_rule, expected_rule, idlg, llg, rehearsed_rule
from gradveil.attacks.layers import classifier_gradients
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Batch


def infer_labels(observation: Observation) -> Tensor:
    """The adversary's best guess of a batch's labels: the bias where there is one, else the weight's rows."""
    weight, bias = classifier_gradients(observation)
    count = observation.knowledge.batch_size
    if bias is not None and bool(bias.any()):
        if count == 1:
            return bias_rule(bias, count)
        beliefs = _beliefs(observation)
        rehearsed = _rehearsed(observation, bias, beliefs)
        return expected_rule(bias, count, beliefs.mean(0)) if rehearsed is None else rehearsed
    if weight is not None:
        return idlg(weight) if count == 1 else llg(weight, count)
    # Nothing to read: an adversary would try any label; the first is as good as another.
    return torch.zeros(count, dtype=torch.long)


def _rehearsed(observation: Observation, bias: Tensor, beliefs: Tensor) -> Tensor | None:
    """By labelled public images, where the size of the gradient is the one that was computed."""
    knowledge, public = observation.knowledge, _public(observation)
    clipped = knowledge.clip_norm is not None and knowledge.clip_norm < 1.01  # the update has length 1
    if public is None or public.y.ndim != 1 or observation.update.kind != "gradient" or clipped:
        return None
    noise = knowledge.noise.std * knowledge.norm if knowledge.noise else 0.0
    return rehearsed_rule(bias.double() * knowledge.norm, knowledge.batch_size, beliefs, public.y, noise)


def _public(observation: Observation) -> Batch | None:
    """Public images of the right shape, at most 512."""
    public = observation.knowledge.public
    fits = public is not None and public.x.shape[1:] == torch.Size(observation.task.input_shape)
    return public[torch.arange(min(512, len(public)))] if public is not None and fits else None


def _beliefs(observation: Observation) -> Tensor:
    """The model's probabilities (images × classes), of public images where there are any, else of noise."""
    public, rng = _public(observation), generator("belief")
    if public is not None:
        x = observation.task.normalize(public.x)
    else:
        x = torch.randn((128, *observation.task.input_shape), generator=rng)
    with torch.no_grad():
        return observation.model(observation.state, x, observation.model.draw_noise(len(x), rng)).softmax(-1)
