"""Trap weights (Boenisch et al. 2023): a malicious server sets the first fully connected layer so that few images pass.

Half of each row's weights are negative, the other half their mirror scaled down, so that a ReLU unit is on for few images
only. A row that one image of the batch switched on gives that image exactly, by division; rows that several share give
mixtures. Rows that agree with each other are rows of one image: the adversary keeps those first.
"""

import copy

import torch
from pydantic import Field
from torch import Tensor, nn

from gradveil.attacks import ClosedForm, attack
from gradveil.attacks.analytic.linear import Linear
from gradveil.attacks.layers import linear_layers
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Batch


@attack("trap-weights", targets="unused")
class TrapWeights(ClosedForm):
    """The first fully connected layer set to isolate images of a batch.

    Args:
        scale: size of the mirrored weights; smaller isolates more images and misses more.
        size: standard deviation of the weights before their sign is set.
    Example: gradveil audit --model smlp --batch-size 8 --attack trap-weights
    """

    scale: float = Field(default=0.97, gt=0, le=1)
    size: float = Field(default=0.5, gt=0)

    def tamper(
        self, module: nn.Module, input_shape: tuple[int, int, int], public: Batch | None = None, batch_size: int = 1
    ) -> nn.Module:
        module = copy.deepcopy(module)
        pixels = int(torch.tensor(input_shape).prod())
        first = next((m for m in module.modules() if isinstance(m, nn.Linear) and m.in_features == pixels), None)
        if first is None:
            return module
        rng = generator(0, "trap-weights")
        negative = -torch.randn(first.out_features, pixels, generator=rng).abs() * self.size
        half = pixels // 2
        places = torch.rand(first.out_features, pixels, generator=rng).argsort(1)
        weight = negative.clone()
        chosen = negative.gather(1, places[:, :half])
        weight.scatter_(1, places[:, half : 2 * half], -self.scale * chosen)
        weight.scatter_(1, places[:, :half], chosen)
        offset = torch.zeros(first.out_features)
        if public is not None:
            # Normalised pixels are not positive as the paper assumes; the threshold is set where few public images pass.
            offset = -torch.quantile(public.x.flatten(1) @ weight.T, 0.95, dim=0)
        with torch.no_grad():
            first.weight.copy_(weight)
            first.bias.copy_(offset)
        return module

    def applies(self, observation: Observation) -> str | None:
        return Linear().applies(observation)

    def read(self, observation: Observation) -> tuple[Tensor, Tensor]:
        tensors, count, layer = (observation.update.tensors, observation.knowledge.batch_size, linear_layers(observation)[0])
        weight, bias = tensors[f"{layer}.weight"].double(), tensors[f"{layer}.bias"].double()
        live = bias.abs() > 1e-7 * bias.abs().max()
        guesses = weight[live] / bias[live, None]
        if len(guesses) == 0:
            return torch.zeros(count, *observation.task.input_shape), torch.tensor(1.0)
        unit = torch.nn.functional.normalize(guesses - guesses.mean(1, keepdim=True), dim=1)
        agree = ((unit @ unit.T) > 0.999).sum(1)  # how many rows say the same
        kept: list[int] = []
        for i in agree.argsort(descending=True).tolist():
            if len(kept) < count and all(float(unit[i] @ unit[k]) < 0.98 for k in kept):
                kept.append(i)
        images = torch.cat([guesses[kept], guesses.mean(0, keepdim=True).expand(count - len(kept), -1)])
        alone = sum(int(agree[i] < 2) for i in kept) + count - len(kept)
        return images.float().view(count, *observation.task.input_shape), torch.tensor(alone / count)
