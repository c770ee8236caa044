"""What an update says about labels, before any image is sought.

All rules read the classifier: with cross entropy its bias gradient is mean(p − y), so present classes pull it below zero.
"""

import torch
from torch import Tensor

from gradveil.attacks.labels.beliefs import outputs, public_images, size_is_true
from gradveil.attacks.labels.rules import bias_rule, expected_rule, idlg, llg, rehearsed_rule
from gradveil.attacks.layers import classifier_gradients
from gradveil.core.observation import Observation


def infer_labels(observation: Observation) -> Tensor:
    """The adversary's best guess of a batch's labels: the bias where there is one, else the weight's rows."""
    weight, bias = classifier_gradients(observation)
    count = observation.knowledge.batch_size
    if bias is not None and bool(bias.any()):
        if count == 1:
            return bias_rule(bias, count)
        beliefs = outputs(observation).softmax(-1)
        rehearsed = _rehearsed(observation, bias, beliefs)
        return expected_rule(bias, count, beliefs.mean(0)) if rehearsed is None else rehearsed
    if weight is not None:
        return idlg(weight) if count == 1 else llg(weight, count)
    # Nothing to read: an adversary would try any label; the first is as good as another.
    return torch.zeros(count, dtype=torch.long)


def _rehearsed(observation: Observation, bias: Tensor, beliefs: Tensor) -> Tensor | None:
    """By labelled public images, where the size of the gradient is the one that was computed."""
    knowledge, public = observation.knowledge, public_images(observation)
    if public is None or public.y.ndim != 1 or not size_is_true(observation):
        return None
    noise = knowledge.noise.std * knowledge.norm if knowledge.noise else 0.0
    return rehearsed_rule(bias.double() * knowledge.norm, knowledge.batch_size, beliefs, public.y, noise)
