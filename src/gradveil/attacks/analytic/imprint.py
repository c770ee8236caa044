"""Robbing the Fed (Fowl et al. 2022): a malicious server puts a block in front of the model that sorts images into bins.

The block is linear N → bins, ReLU, linear bins → N. Every row of the first layer asks the same question h(x) with another
threshold, so an image switches on the rows below its answer; the difference of neighbouring rows' gradients holds only
the images whose answer falls between their thresholds, and divided by the bias's difference it is the image itself.

The published question is the mean brightness with thresholds for ImageNet; here it is a random direction, on which
images differ more, with thresholds at the quantiles of public images where there are any (of a normal law otherwise).
The client receives the changed model and could see the block in it; the report names the tampering.
"""

import math

import torch
from pydantic import Field
from torch import Tensor, nn

from gradveil.attacks import ClosedForm, attack
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Batch


class ImprintBlock(nn.Module):
    """The inserted block; images go in and images of the same shape come out."""

    def __init__(self, direction: Tensor, thresholds: Tensor, gain: float):
        super().__init__()
        pixels, bins = len(direction), len(thresholds)
        self.question, self.act, self.back = nn.Linear(pixels, bins), nn.ReLU(), nn.Linear(bins, pixels)
        with torch.no_grad():
            self.question.weight.copy_(direction.expand(bins, -1) * gain)
            self.question.bias.copy_(-thresholds * gain)
            # Images of one colour would silence the whole first layer of a net whose filters all have a negative sum.
            pattern = torch.randn(pixels, 1, generator=generator(0, "imprint pattern"))
            self.back.weight.copy_(pattern.expand(-1, bins) / (gain * bins))
            self.back.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.back(self.act(self.question(x.flatten(1))))
        return output.view_as(x)


class Imprinted(nn.Module):
    """The server's model behind an imprint block."""

    def __init__(self, block: ImprintBlock, model: nn.Module):
        super().__init__()
        self.imprint, self.model = block, model

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(self.imprint(x))
        return output


@attack("imprint", targets="unused", version=2)
class Imprint(ClosedForm):
    """A malicious block in front of the model; images by differences of its rows.

    Args:
        bins: rows of the block, between whose thresholds images are sorted.
        gain: size of the block's weights, divided out behind the ReLU; small, as published.
    Example: gradveil audit --batch-size 8 --attack imprint:bins=512
    """

    bins: int = Field(default=256, ge=2)
    gain: float = Field(default=1e-3, gt=0)

    def tamper(
        self, module: nn.Module, input_shape: tuple[int, int, int], public: Batch | None = None, batch_size: int = 1
    ) -> nn.Module:
        pixels = math.prod(input_shape)
        direction = torch.randn(pixels, generator=generator(0, "imprint")) / math.sqrt(pixels)
        levels = (torch.arange(self.bins) + 0.5) / self.bins
        if public is not None and len(public) >= 32:
            answers = public.x.flatten(1) @ direction
            centre, spread = answers.mean(), answers.std()
            # Between the sample's quantiles and the normal law's: the tails of unseen images lie beyond the sample.
            thresholds = torch.quantile(answers, levels)
        else:
            centre, spread = torch.tensor(0.0), torch.tensor(1.0)
            thresholds = centre + spread * math.sqrt(2) * torch.erfinv(2 * levels - 1)
        thresholds = thresholds.clone()
        thresholds[0] = centre - 10 * spread
        return Imprinted(ImprintBlock(direction, thresholds, self.gain), module)

    def applies(self, observation: Observation) -> str | None:
        if _block(observation) is None:
            return "the model carries no imprint block (a malicious server has to send one)"
        return None if observation.update.kind == "gradient" else "it reads single gradients, not weight deltas"

    def read(self, observation: Observation) -> tuple[Tensor, Tensor]:
        tensors, path = observation.update.tensors, _block(observation)
        weight, bias = (tensors[f"{path}.question.{n}"].double() for n in ("weight", "bias"))
        order = observation.state[f"{path}.question.bias"].argsort(descending=True)  # thresholds rising
        weight, bias = weight[order], bias[order]
        inside = torch.cat([bias[:-1] - bias[1:], bias[-1:]])
        images = torch.cat([weight[:-1] - weight[1:], weight[-1:]])
        hits = inside.abs() > 1e-5 * bias.abs().max()
        ranked = (inside.abs() * hits).argsort(descending=True)[: observation.knowledge.batch_size]
        recovered = images.new_zeros(observation.knowledge.batch_size, images.shape[1])
        for place, i in enumerate(ranked.tolist()):
            recovered[place] = images[i] / inside[i] if hits[i] else 0
        missing = 1 - hits.sum().clamp_max(len(recovered)) / len(recovered)  # share of the batch without a bin
        return recovered.float().view(-1, *observation.task.input_shape), missing.float()


def _block(observation: Observation) -> str | None:
    return next((p for p, m in observation.model.module.named_modules() if isinstance(m, ImprintBlock)), None)
