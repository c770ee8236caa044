"""Which reconstruction is meant for which image of a batch: settled once, and every metric then uses it.

An update does not tell the order of its batch, so an attack cannot know it either.
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.metrics.pixel import pair


def match(truth: Tensor, reconstruction: Tensor) -> Tensor:
    """`order` (n): image i of the truth belongs to `reconstruction[order[i]]`; least total MSE (Hungarian method)."""
    x, y = pair(truth, reconstruction)
    cost = torch.cdist(x.flatten(1), y.flatten(1)).square()
    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(columns, dtype=torch.long, device=truth.device)
