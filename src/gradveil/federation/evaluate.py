"""How well a state does: which images it gets right, and the loss of each, in evaluation mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors
from gradveil.federation.statistics import pieces

PIECE = 256  # images at a time


def evaluate(task: Task, state: Tensors, batch: Batch, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """For every image whether it is classified right, and its cross entropy. `rng` is for networks that draw noise.

    Where targets are rows of numbers nothing is right or wrong (NaN), and the loss is the model's own.
    """
    model = task.model
    right, loss = [], []
    with torch.no_grad():
        for x, y in zip(pieces(batch.x, PIECE), pieces(batch.y, PIECE), strict=True):
            logits = model(state, task.normalize(x), model.draw_noise(len(x), rng))
            if y.ndim == 1:
                right.append(logits.argmax(dim=1) == y)
                loss.append(F.cross_entropy(logits, y, reduction="none"))
            else:
                right.append(torch.full((len(y),), torch.nan))
                loss.append(
                    torch.stack([model.loss_fn(o, t) for o, t in zip(logits.split(1), y.split(1), strict=True)])
                )
    return torch.cat(right), torch.cat(loss)
