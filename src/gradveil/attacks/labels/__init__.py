"""What an update says about labels, before any image is sought.

All rules read the classifier: with cross entropy its bias gradient is mean(p − y), so present classes pull it below zero.
"""

import torch
from torch import Tensor

from gradveil.attacks.labels.rules import bias_rule, expected_rule, idlg, llg
from gradveil.attacks.layers import classifier_gradients
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator


def infer_labels(observation: Observation) -> Tensor:
    """The adversary's best guess of a batch's labels: the bias where there is one, else the weight's rows."""
    weight, bias = classifier_gradients(observation)
    count = observation.knowledge.batch_size
    if bias is not None and bool(bias.any()):
        return bias_rule(bias, count) if count == 1 else expected_rule(bias, count, _belief(observation))
    if weight is not None:
        return idlg(weight) if count == 1 else llg(weight, count)
    # Nothing to read: an adversary would try any label; the first is as good as another.
    return torch.zeros(count, dtype=torch.long)


def _belief(observation: Observation) -> Tensor:
    """The model's mean output distribution: on public images where there are any, else on noise."""
    public, rng = observation.knowledge.public, generator("belief")
    if public is not None and public.x.shape[1:] == torch.Size(observation.task.input_shape):
        x = observation.task.normalize(public.x[:256])
    else:
        x = torch.randn((128, *observation.task.input_shape), generator=rng)
    with torch.no_grad():
        logits = observation.model(observation.state, x, observation.model.draw_noise(len(x), rng))
    return logits.softmax(-1).mean(0)
