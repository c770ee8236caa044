"""How well a state does, in evaluation mode: which images it classifies correctly, and the loss of each."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.core.loops import Loop
from gradveil.core.randomness import Stream
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors

CHUNK = 256  # images that are evaluated together


def evaluate(task: Task, state: Tensors, batch: Batch, rng: Stream) -> tuple[Tensor, Tensor]:
    """Per image whether it is classified correctly (n), and its cross entropy (n). `rng` serves models that draw noise.

    Where targets are rows of numbers there is no correct class (NaN), and the loss is that of the model.
    """
    model = task.model
    correct, losses = torch.zeros(len(batch)), torch.zeros(len(batch))
    with torch.no_grad():
        for chunk in Loop(-(-len(batch) // CHUNK), shared=True):
            place = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            x, y = batch.x[place], batch.y[place]
            outputs = model(state, task.normalize(x), model.draw_noise(len(x), rng))
            if y.ndim == 1:
                correct[place] = (outputs.argmax(dim=1) == y).float()
                losses[place] = F.cross_entropy(outputs, y, reduction="none")
            else:
                correct[place] = torch.nan
                rows = zip(outputs.split(1), y.split(1), strict=True)
                losses[place] = torch.stack([model.loss_fn(output, target) for output, target in rows])
    return correct, losses
