"""How well a state does: which images it classifies correctly, and the loss of each, in evaluation mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors
from gradveil.federation.statistics import pieces

PIECE = 256  # images at a time


def evaluate(task: Task, state: Tensors, batch: Batch, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Per image whether it is classified correctly, and its cross entropy. `rng` is for networks that draw noise.

    Where targets are rows of numbers there is no correct class (NaN), and the loss is the one of the model.
    """
    model = task.model
    correct, loss = [], []
    with torch.no_grad():
        for x, y in zip(pieces(batch.x, PIECE), pieces(batch.y, PIECE), strict=True):
            logits = model(state, task.normalize(x), model.draw_noise(len(x), rng))
            if y.ndim == 1:
                correct.append(logits.argmax(dim=1) == y)
                loss.append(F.cross_entropy(logits, y, reduction="none"))
            else:
                correct.append(torch.full((len(y),), torch.nan))
                loss.append(
                    torch.stack(
                        [model.loss_fn(o, t) for o, t in zip(torch.split(logits, 1), torch.split(y, 1), strict=True)]
                    )
                )
    return torch.cat(correct), torch.cat(loss)
