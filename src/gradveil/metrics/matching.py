"""Which reconstruction belongs to which image of a batch. It is decided once, and every metric uses it.

An update does not contain the order of its batch, so an attack cannot know it.
"""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.metrics.pixel import pair


def match(truth: Tensor, reconstruction: Tensor) -> Tensor:
    """`order` (n): image i of the truth belongs to `reconstruction[order[i]]`; least total MSE (Hungarian method).

    Args: truth, reconstruction: images n × C × H × W in [0, 1].
    """
    x, y = pair(truth, reconstruction)
    cost = torch.cdist(x.flatten(1), y.flatten(1)).square()
    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(columns, dtype=torch.long, device=truth.device)
