"""APRIL (Lu et al. 2022): the image behind a transformer's patches, by one linear system.

With at least as many features as patches, the gradients of the patch embedding and of the positions (`patches.py`) tell every
patch exactly, whatever the layers behind do, dropout included. The same holds for the weight difference of any number of steps
of SGD on the image.
"""

import torch
from torch import Tensor

from gradveil.attacks import ClosedForm, attack
from gradveil.attacks.analytic.patches import doubt, patch_embedding, why_unreadable
from gradveil.core.observation import Observation


@attack("april", targets="unused", version=2)
class April(ClosedForm):
    """Patches from the gradients of learned positions and of the patch embedding.

    Example: gradveil audit --attack april
    """

    def applies(self, observation: Observation) -> str | None:
        if observation.knowledge.batch_size != 1:
            return "it reads the patches of a single image"
        return why_unreadable(observation)

    def read(self, observation: Observation) -> tuple[Tensor, Tensor]:
        embedding = patch_embedding(observation)
        assert embedding is not None
        signals, weight = embedding.read(observation)
        patches = torch.linalg.lstsq(signals.T, weight, driver="gelsd").solution
        error = (signals.T @ patches - weight).norm() / weight.norm()
        image = embedding.layer.images(patches, observation.task.input_shape)[None]
        open_system = signals.shape[0] > signals.shape[1]
        return image.float(), (torch.ones_like(error) if open_system else doubt(image, error, observation)).float()
