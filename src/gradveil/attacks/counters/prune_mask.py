"""Against pruning: entries that were not sent say nothing, so only the sent ones are matched.

LODA and others mask a first-order cosine this way; the same mask under second-order steps is far stronger.

In batches, the gradient of a fully connected layer has at most the rank of the number of images. A matrix of low rank follows
from part of its entries (Candès and Recht 2009): the first fully connected layer is completed, then read apart.
"""

import torch
from torch import Tensor

from gradveil.attacks import Target, attack
from gradveil.attacks.analytic.apart import LayerInputs, layer_inputs
from gradveil.attacks.counters.batches import BatchCounter, with_gradient
from gradveil.attacks.layers import linear_layers
from gradveil.attacks.matching.problem import Insight
from gradveil.core.observation import Observation
from gradveil.defenses.update.prune import Prune

_ITERATIONS, _ASSUMED = 400, 100  # at most, and with the assumption that what was not sent is near zero
_WEIGHT, _FADE = 0.1, 0.85  # of that assumption, at first, and its factor per iteration
_FITTED = 1e-7  # share of the sent entries that is left when they are met as exactly as single precision has them


@attack("prune-mask", against=(Prune,), targets="any", version=6)
class PruneMask(BatchCounter):
    """Match only what was sent; in batches, complete the gradient of the first fully connected layer and read it apart.

    Single images and all networks: the match. Batches whose first fully connected layer meets a ReLU: the
    reading, as long as every unit has sent clearly more entries than there are images.

    Example: gradveil audit --defense prune:ratio=0.9 --attack prune-mask
    """

    def applies(self, observation: Observation) -> str | None:
        pruned = any((t == 0).float().mean() > 0.05 for t in observation.update.tensors.values())
        return None if pruned else "no tensor of the update has zeroed entries"

    def insight(self, target: Target) -> Insight:
        masks = {name: (t != 0).to(t) for name, t in target.updates().items()}
        return Insight(masks)

    def read(self, observation: Observation) -> LayerInputs | None:
        layer, count = linear_layers(observation)[0], observation.knowledge.batch_size
        weight, bias = (observation.update.tensors[f"{layer}.{part}"].double() for part in ("weight", "bias"))
        sent = torch.cat([weight, bias[:, None]], 1)
        if 2 * count > min(sent.shape):
            return None
        # A unit with fewer entries than twice the images is left open by them: it is taken for one without a signal.
        enough = (sent != 0).sum(1, keepdim=True) >= 2 * count
        return layer_inputs(with_gradient(observation, layer, completed(sent, count) * enough), layer)


def completed(sent: Tensor, rank: int) -> Tensor:
    """The matrix of a rank that has the entries of `sent` that are not zero, by alternating least squares."""
    mask = (sent != 0).to(sent)
    u, sizes, v = torch.linalg.svd(sent, full_matrices=False)
    left: Tensor = u[:, :rank] * sizes[:rank].sqrt()
    right: Tensor = v[:rank].T * sizes[:rank].sqrt()
    for i in range(_ITERATIONS):
        weights = mask + (_WEIGHT * _FADE**i if i < _ASSUMED else 0) * (1 - mask)
        left = _fitted(sent, weights, right)
        right = _fitted(sent.T, weights.T, left)
        if i >= _ASSUMED and (mask * (left @ right.T) - sent).norm() <= _FITTED * sent.norm():
            break
    return left @ right.T


def _fitted(matrix: Tensor, weights: Tensor, factor: Tensor) -> Tensor:
    """The other factor: weighted least squares, row by row."""
    rank = factor.shape[1]
    products = (factor[:, :, None] * factor[:, None]).flatten(1)
    moments = (weights @ products).unflatten(1, (rank, rank))
    ridge = 1e-10 * moments.diagonal(dim1=1, dim2=2).mean() + 1e-30
    solution: Tensor = torch.linalg.solve(moments + ridge * torch.eye(rank).to(moments), (weights * matrix) @ factor)
    return solution
