"""The first fully connected layer with a bias gives its input exactly (Phong et al. 2017; Geiping et al. 2020).

For one image ∇W = δ aᵀ and ∇b = δ, so a = ∇Wᵀδ/‖δ‖². Where that layer is the first, a is the image itself. For a batch,
each row is a mixture of the images that switched its unit on: the rows with the largest signals are the guesses.
"""

import torch
from torch import Tensor

from gradveil.attacks import ClosedForm, attack
from gradveil.attacks.layers import linear_layers
from gradveil.core.observation import Observation


@attack("linear", targets="unused")
class Linear(ClosedForm):
    """The input of a fully connected first layer, by division.

    Example: gradveil audit --model smlp --attack linear
    """

    def applies(self, observation: Observation) -> str | None:
        layers = linear_layers(observation)
        if not layers:
            return "the model has no fully connected layer with a bias"
        width = observation.state[f"{layers[0]}.weight"].shape[1]
        pixels = int(torch.tensor(observation.task.input_shape).prod())
        wrong = f"the first fully connected layer takes {width} features, not the {pixels} pixels"
        return None if width == pixels else wrong

    def read(self, observation: Observation) -> tuple[Tensor, Tensor]:
        tensors, count, layer = (observation.update.tensors, observation.knowledge.batch_size, linear_layers(observation)[0])
        weight, bias = tensors[f"{layer}.weight"].double(), tensors[f"{layer}.bias"].double()
        if count == 1:
            a = weight.T @ bias / (bias**2).sum()  # not finite, and so a failure, where the layer sent nothing
            error = (weight - torch.outer(bias, a)).norm() / weight.norm()
            return a.float().view(1, *observation.task.input_shape), error.float()
        rows = bias.abs().argsort(descending=True)[: max(1, int((bias != 0).sum()))]
        guesses = weight[rows] / bias[rows, None]
        return _spread(guesses, count).float().view(count, *observation.task.input_shape), torch.tensor(0.0)


def _spread(guesses: Tensor, count: int) -> Tensor:
    """Guesses that differ from each other, strongest first: two rows that saw one image alone are equal."""
    kept = [guesses[0]]
    for guess in guesses[1:]:
        if len(kept) == count:
            break
        if all((guess - k).norm() > 0.05 * k.norm() for k in kept):
            kept.append(guess)
    kept += [guesses.mean(0)] * (count - len(kept))
    return torch.stack(kept)
